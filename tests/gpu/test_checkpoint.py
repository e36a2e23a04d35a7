"""The Checkpointer of workers with several GPUs on their node."""

import time

import pytest

from gpu_ranks import run_ranks


def draw_after_a_restart(rank, size, store, directory, device, is_first):
    import torch

    from hpc_elastic.checkpoint import Checkpointer

    torch.cuda.set_device(device)
    torch.cuda.manual_seed(11)
    with Checkpointer({"w": torch.zeros(4, device="cuda")}, directory) as saver:
        if is_first:
            torch.rand(100, device="cuda")
            saver.save(1)
        else:
            assert saver.load_latest() == 1
        return torch.rand(3, device="cuda").tolist()


def test_the_generator_of_a_gpu_continues_on_another_gpu(gpus, tmp_path):
    """A rank that restarts with another local rank draws the numbers that come next."""
    machine = gpus(count=2)
    (before,) = run_ranks(machine, draw_after_a_restart, 1, str(tmp_path), 1, True)
    (after,) = run_ranks(machine, draw_after_a_restart, 1, str(tmp_path), 0, False)
    assert after == before


def save_and_restore(rank, size, store, directory, delay_us, is_mutant):
    import ctypes

    import torch

    from hpc_elastic.checkpoint import Checkpointer

    if is_mutant:
        torch.cuda.Stream.synchronize = lambda self: None  # of the copy to the host
    torch.cuda.set_device(1)
    state = {f"l{i}": torch.full((1 << 16,), float(i), device="cuda") for i in range(4)}
    ctypes.CDLL(None).simulated_gpu_set_delay_us(delay_us)
    with Checkpointer({"state": state}, directory) as saver:
        saver._snapshots.wait_until_warm()
        for value in state.values():
            value += 1
        saver.save(1)
        is_pinned = saver._snapshots.num_pinned >= 4 << 18
        for value in state.values():
            value.zero_()
    with Checkpointer({"state": state}, directory) as saver:
        assert saver.load_latest() == 1
    sums = [value.sum().item() / (1 << 16) for value in state.values()]
    assert sums == [1.0, 2.0, 3.0, 4.0]
    return is_pinned


def test_a_snapshot_of_a_gpu_touches_no_other_gpu(gpus, tmp_path):
    """The buffer of a worker on GPU 1 is pinned there, and a save copies all of the state."""
    machine = gpus(count=2)
    assert run_ranks(machine, save_and_restore, 1, str(tmp_path), 10000, False) == [True]
    assert list(machine.contexts().values()) == [{1}]


def test_a_copy_that_is_not_waited_for_is_seen(gpus, tmp_path):
    """Mutant: without `synchronize` after the copy to the host, the checkpoint is damaged.

    The copies come before, while or after the bytes are written, or when their buffer is gone.
    """
    with pytest.raises(AssertionError, match=r"sums ==|load_latest|, -11, "):
        run_ranks(gpus(count=2), save_and_restore, 1, str(tmp_path), 500000, True)


def save_without_pinned_memory(rank, size, store, directory):
    import torch

    from hpc_elastic.checkpoint import Checkpointer

    state = {"w": torch.zeros(1 << 20, device="cuda")}
    with Checkpointer({"state": state}, directory) as saver:
        saver._snapshots._prepare_piece()  # on this thread
        saver.save(1)
        state["w"] += 1
        saver._snapshots.wait_until_warm()
        return saver._snapshots.num_pinned, state["w"].sum().item()


def test_a_pin_that_fails_leaves_no_error_behind(gpus, tmp_path):
    """Where memory cannot be pinned, the snapshot is pageable, and the training goes on."""
    machine = gpus(pinned_mb=2)
    (found,) = run_ranks(machine, save_without_pinned_memory, 1, str(tmp_path))
    assert found == [0, float(1 << 20)]


def save_beside_the_pinning(rank, size, store, directory, place, piece_bytes):
    import torch

    from hpc_elastic.checkpoint import Checkpointer, snapshot

    snapshot._PIECE_BYTES = piece_bytes
    torch.manual_seed(0)
    state = {
        "wide": torch.randn(3, 5, 40_000), "deep": torch.randn(900, 700).T,
        "half": torch.ones(7).half(), "complex": torch.randn(50_000, dtype=torch.complex64),
        "one": torch.tensor(3.0),
    }  # fmt: skip
    state = {name: value.cuda() for name, value in state.items()}
    copies = {name: value.clone() for name, value in state.items()}
    with Checkpointer({"state": state}, directory) as saver:
        time.sleep(0.05 * place)
        begin = time.monotonic()
        saver.save(1)
        took_s = time.monotonic() - begin
        for value in state.values():
            value.zero_()
        pinned = [saver._snapshots.num_pinned]
        saver._snapshots.wait_until_warm()
        saver.wait()
        pinned.append(saver._snapshots.num_pinned)
    with Checkpointer({"state": state}, directory) as saver:
        saver.load_latest()
    assert all(torch.equal(state[name], copies[name]) for name in state)
    return took_s, *pinned


@pytest.mark.parametrize("place", range(4))
def test_a_save_waits_for_no_pinning(gpus, tmp_path, place):
    """It takes five seconds, in pieces; the save is right wherever it is."""
    machine = gpus(pin_mb_s=1, copy_mb_s=1000)
    ((took_s, then, finally_),) = run_ranks(
        machine, save_beside_the_pinning, 1, str(tmp_path), place, 1 << 18
    )
    assert then < finally_ == 5_320_018
    assert then % (1 << 18) == 0 and took_s < 2.0


def lengths_and_saves(rank, size, store, directory):
    import torch

    from hpc_elastic.checkpoint import Checkpointer
    from hpc_elastic.data.stream import count_samples

    host, port = store.split(":")
    torch.distributed.init_process_group(
        "nccl",
        store=torch.distributed.TCPStore(host, int(port)),
        rank=rank,
        world_size=size,
        device_id=torch.device("cuda", rank),
    )
    lengths = count_samples(["a", "b"], lambda shard, begin: iter(range(3)))
    with Checkpointer({"w": torch.zeros(4, device=f"cuda:{rank}")}, directory) as saver:
        saver.save(1)
    return list(lengths)


def test_ranks_without_set_device_use_the_device_of_their_group(gpus, tmp_path):
    """`init_process_group(device_id=)` is enough: nothing needs `torch.cuda.set_device`."""
    machine = gpus(count=2)
    assert run_ranks(machine, lengths_and_saves, 2, str(tmp_path)) == [[3, 3]] * 2
    assert sorted(map(sorted, machine.contexts().values())) == [[0], [1]]
