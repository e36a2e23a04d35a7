"""Several ranks save and restore together: all or nothing, and nobody waits for ever."""

import logging
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from group import eventually
from savers import flip_a_bit, names_in
from scarcity import no_thread
from torch import nn

from hpc_elastic.checkpoint import Checkpointer, CheckpointOptions
from hpc_elastic.checkpoint import save as save_module
from hpc_elastic.checkpoint.store import Store, read_manifest, verify_checkpoint
from hpc_elastic.errors import CheckpointCorruptError, CheckpointError, CheckpointFencedError

PATIENCE_S = 60.0


def state() -> dict[str, Any]:
    """Return a model with enough to spread, an optimizer, and values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 400), nn.BatchNorm1d(400), nn.Linear(400, 9))
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": nn.parallel.DistributedDataParallel(model), "optimizer": optimizer, "v": {}}


def train(parts: dict[str, Any], step: int) -> None:
    """Make a step, on other data on each rank; random numbers are drawn on each."""
    parts["model"](torch.randn(8, 300)).square().mean().backward()
    parts["optimizer"].step()
    parts["optimizer"].zero_grad()
    parts["v"]["step"] = step


def digest(parts: dict[str, Any]) -> str:
    """Describe a state, but for what differs between ranks on purpose (statistics)."""
    tensors = [p.detach().double().sum().item() for p in parts["model"].parameters()]
    moments = [s["exp_avg"].double().sum().item() for s in parts["optimizer"].state.values()]
    return repr((tensors, moments, parts["v"]))


def save_some(rank: int, folder: Path, steps: int) -> tuple[str, float]:
    """Train and save on every step; return the state and the next random number."""
    torch.manual_seed(rank)
    random.seed(rank)
    parts = state()
    torch.manual_seed(rank)
    with Checkpointer(parts, folder) as c:
        for step in range(1, steps + 1):
            train(parts, step)
            assert c.save(step)
    assert c.failures == 0
    return digest(parts), torch.rand(1).item() + random.random()


def restore(rank: int, folder: Path) -> tuple[int | None, str, float]:
    """Restore into a fresh state."""
    parts = state()
    step = Checkpointer(parts, folder).load_latest()
    return step, digest(parts), torch.rand(1).item() + random.random()


def test_all_ranks_go_on_where_they_were_under_any_world_size(tmp_path):
    """2 ranks, then 2, 4 and 1: weights, moments, values, and the random numbers that are known."""
    saved = run_ranks(save_some, 2, tmp_path, 3)
    assert Store(tmp_path).steps() == [3, 2]
    assert names_in(tmp_path) == ["step-00000002", "step-00000003"]
    manifest = read_manifest(tmp_path / "step-00000003")
    sizes = [entry.num_bytes for entry in manifest.files]
    assert len(sizes) == 2 and max(sizes) < 1.2 * min(sizes), "the ranks share the writing"
    again = run_ranks(restore, 2, tmp_path)
    assert again == [(3, *on_rank) for on_rank in saved]
    more, as_before = run_ranks(restore, 4, tmp_path), run_ranks(restore, 4, tmp_path)
    assert more == as_before
    assert {(step, found) for step, found, _ in more} == {(3, saved[0][0])}
    drawn = [number for _, _, number in more]
    assert drawn[:2] == [number for _, number in saved] and len(set(drawn)) == 4
    assert run_ranks(restore, 1, tmp_path) == again[:1]


# ---- one rank fails -----------------------------------------------------------------------


def outcome(c: Checkpointer) -> str:
    """Return what `wait` says."""
    try:
        c.wait()
    except CheckpointError as e:
        return f"{type(e).__name__}: {e}"
    return "committed"


def fail(*_: Any, **__: Any) -> None:
    """Write nothing."""
    raise OSError(28, "No space left on device")


def one_fails(rank: int, folder: Path, culprit: int, asynchronous: bool) -> list[str]:
    """Save with one rank's disk full; then with all well."""
    parts = state()
    options = CheckpointOptions(asynchronous=asynchronous, timeout_s=PATIENCE_S)
    c = Checkpointer(parts, folder, options=options)
    said = []
    write = save_module.write_part
    for step in range(1, 4):
        if rank == culprit:
            save_module.write_part = fail if step == 2 else write
        c.save(step)
        said.append(outcome(c))
        dist.barrier()
    c.close()
    return said


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_one_rank_that_fails_ends_the_attempt_on_all(tmp_path, culprit, asynchronous):
    """At once, with its reason; the next save works, and cleans up."""
    said = run_ranks(one_fails, 2, tmp_path, culprit, asynchronous)
    for rank, (first, second, third) in enumerate(said):
        assert (first, third) == ("committed", "committed")
        assert "No space left" in second
        assert (f"rank {culprit} gave up" in second) == (rank != culprit)
    assert names_in(tmp_path) == ["step-00000001", "step-00000003"]


def one_skips(rank: int, folder: Path, threads: bool) -> list[str]:
    """Rank 1 is busy still when step 2 comes; it may be that no thread is to be had then."""
    c = Checkpointer(
        state(), folder, options=CheckpointOptions(when_busy="skip", timeout_s=PATIENCE_S)
    )
    c.save(1)
    said = [outcome(c)]
    busy = rank == 1
    if busy:
        c._save = save_module.Save(c._context, 1, 99)
    with pytest.MonkeyPatch.context() as m:
        if busy and not threads:
            m.setattr(threading.Thread, "start", no_thread)
        said.append(str(c.save(2)))
    if busy:
        c._save.finish()
        c._save = None
    said.append(outcome(c))
    c.save(3)
    return [*said, outcome(c)]


@pytest.mark.parametrize("threads", [True, False])
def test_a_step_that_one_rank_skips_is_nobodys(tmp_path, threads):
    """The others learn it at once, with the reason."""
    said = run_ranks(one_skips, 2, tmp_path, threads)
    assert said[1] == ["committed", "False", "committed", "committed"]
    assert said[0][:2] == ["committed", "True"] and said[0][3] == "committed"
    assert "rank 1 gave up: step 1 is still being written" in said[0][2]
    assert Store(tmp_path).steps() == [3, 1]


def one_is_absent(rank: int, folder: Path) -> str:
    """Rank 1 does not call save."""
    c = Checkpointer(state(), folder, options=CheckpointOptions(timeout_s=0.5))
    if rank == 0:
        c.save(1)
    said = outcome(c)
    dist.barrier()
    return said


def test_a_rank_that_does_not_save_is_named(tmp_path):
    """After a time, and with what may be the reason."""
    said = run_ranks(one_is_absent, 2, tmp_path)
    assert "no parts from rank 1 within 0.5 s. Every rank has to call save()" in said[0]
    assert Store(tmp_path).steps() == []


def one_is_slow(rank: int, folder: Path, trouble: str) -> str:
    """Rank 2 does not save before rank 1 has written its part and has had trouble."""
    timeout_s = 1.0 if rank == 1 and trouble == "time-out" else PATIENCE_S
    c = Checkpointer(state(), folder / "c", options=CheckpointOptions(timeout_s=timeout_s))
    dist.barrier()
    if rank == 2:
        eventually((folder / "trouble").exists)
        c.save(1)
    elif rank == 1 and trouble == "open files":
        names = save_module.Save._staged_names

        def fail_once(self: save_module.Save) -> set[str]:
            save_module.Save._staged_names = names
            (folder / "trouble").touch()
            raise OSError(24, "Too many open files")

        save_module.Save._staged_names = fail_once
        c.save(1)
    elif rank == 0:
        read_text = save_module.read_text

        def read_and_tell(path: Path, most: int) -> str:
            text = read_text(path, most)
            (folder / f"{path.name}-was-read").touch()
            return text

        save_module.read_text = read_and_tell
        c.save(1)
    else:
        c.save(1)
    if rank == 1 and trouble == "taken back":
        eventually((folder / "part-1.json-was-read").exists)
        (taken,) = folder.glob("c/.staging-*/part-1.json")
        taken.unlink()
        (folder / "trouble").touch()
    said = outcome(c)
    (folder / "trouble").touch()
    dist.barrier()
    return said


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [
        # its part stays where it is: rank 0 may have read it
        ("time-out", ["committed", "no commit from rank 0 within 1 s", "committed"]),
        ("open files", ["committed"] * 3),  # a look at the directory fails, for a moment
        ("taken back", ["the part of rank 1 is gone", "rank 0 gave up", "rank 0 gave up"]),
    ],
)
def test_a_rank_with_trouble_after_its_part_is_written(tmp_path, trouble, expected):
    """The step is committed, unless the part was taken back, even if rank 0 had read it."""
    said = run_ranks(one_is_slow, 3, tmp_path, trouble)
    assert all(what in found for what, found in zip(expected, said, strict=True)), said
    store = Store(tmp_path / "c")
    assert store.steps() == ([] if trouble == "taken back" else [1])
    assert all(verify_checkpoint(store.folder(step)) == [] for step in store.steps())


def all_fenced(rank: int, folder: Path, records: Path) -> str:
    """Another group is formed before the commit."""
    c = Checkpointer(state(), folder)
    dist.barrier()
    (records / "entry.4.json").touch()
    c.save(1)
    return outcome(c)


def test_a_fenced_group_commits_nothing_and_every_rank_knows(tmp_path):
    """Rank 0 finds out; the others do not wait for it."""
    folder, records = tmp_path / "c", tmp_path / "rdzv"
    records.mkdir()
    (records / "entry.3.json").touch()
    env = {"HPC_ELASTIC_FENCE": str(records / "entry.3.json")}
    said = run_ranks(all_fenced, 2, folder, records, env={0: env, 1: env})
    assert CheckpointFencedError.__name__ in said[0]
    assert "entry 4 exists" in said[1]
    assert Store(folder).steps() == []


# ---- restoring ----------------------------------------------------------------------------


def restore_or_say(rank: int, folder: Path) -> str:
    """Restore; return the step, or the error."""
    logging.disable()
    try:
        return str(restore(rank, folder)[0])
    except CheckpointError as e:
        return type(e).__name__


def bytes_read() -> int:
    """Return how many bytes this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def read_twice(rank: int, folder: Path) -> tuple[int, Any, Any]:
    """Restore a good checkpoint, and then with a damaged shard of rank 1; return what was read."""
    state = {f"w{i}": torch.zeros(1 << 18) for i in range(8)}
    c = Checkpointer({"state": state}, folder, options=CheckpointOptions(asynchronous=False))
    for step in (1, 2):
        for tensor in state.values():
            tensor.fill_(step)
        assert c.save(step)
    before = bytes_read()
    assert c.load_latest() == 2
    num_bytes = bytes_read() - before
    dist.barrier()
    shard = folder / "step-00000002" / "shard-1.safetensors"
    if rank == 0:
        flip_a_bit(shard, 8 * shard.stat().st_size - 1)
    dist.barrier()
    return num_bytes, c.load_latest(), {float(x) for t in state.values() for x in t.unique()}


def test_a_restore_reads_each_byte_once_and_an_older_one_covers_what_is_damaged(tmp_path):
    """Each rank reads the whole, and compares the checksum of its share of that on the way."""
    found = run_ranks(read_twice, 2, tmp_path)
    size = sum(file.num_bytes for file in read_manifest(tmp_path / "step-00000001").files)
    assert all(size <= num_bytes < 1.05 * size for num_bytes, _, _ in found)
    assert [outcome[1:] for outcome in found] == [(1, {1.0}), (1, {1.0})]


@pytest.mark.long
def test_all_ranks_pass_over_what_one_of_them_finds_damaged(tmp_path):
    """Each checks its share of the files."""
    run_ranks(save_some, 2, tmp_path, 2)
    shard = tmp_path / "step-00000002" / "shard-1.safetensors"
    data = bytearray(shard.read_bytes())
    data[-9] ^= 1
    shard.write_bytes(data)
    assert len(verify_checkpoint(tmp_path / "step-00000002")) == 1
    assert run_ranks(restore_or_say, 2, tmp_path) == ["1", "1"]
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    said = run_ranks(restore_or_say, 2, tmp_path)
    assert said == [CheckpointCorruptError.__name__] * 2


class OwnState:
    """An object whose state each rank sets for itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        self.value = state["value"]


class Position(OwnState):
    """A position in the data of one rank; it may be the same number on all."""

    def __iter__(self):
        return iter(())


class AnyWorldSize(Position):
    """One that says that it is the same for any number of ranks."""

    fits_any_world_size = True


def own_states(rank: int, folder: Path, save: bool, keys: str, accepted: tuple[str, ...] = ()):
    """Save states of which some are the rank's own, or restore them; return them, or the error."""
    found = {
        "differs": OwnState(rank), "same": OwnState(7), "position": Position(5),
        "any": AnyWorldSize(rank),
    }  # fmt: skip
    chosen = {key: found[key] for key in keys.split()}
    options = CheckpointOptions(strict=False, accept_inexact=accepted)
    with Checkpointer(chosen, folder, options=options) as c:
        if save:
            assert c.save(1)
            return None
        for each in chosen.values():
            each.value = None
        try:
            c.load_latest()
        except CheckpointError as e:
            return str(e)
    return {key: each.value for key, each in chosen.items()}


def on_other_world_sizes(rank: int, folder: Path) -> list[Any]:
    """Restore what two ranks saved, as one."""
    return [
        own_states(rank, folder, False, *arguments)
        for arguments in [
            ("same any",), ("differs",), ("position",),
            ("differs position", ("differs", "position")), ("position", ("other",)),
        ]
    ]  # fmt: skip


ALL_OWN = "differs same position any"


def save_and_restore_own(rank: int, folder: Path) -> Any:
    """Save and restore on the same ranks."""
    own_states(rank, folder, True, ALL_OWN)
    return own_states(rank, folder, False, ALL_OWN)


def test_states_of_ranks_come_back_to_them_or_are_refused(tmp_path):
    """Under the same world size each has its own; under another only what all had alike."""
    same = run_ranks(save_and_restore_own, 2, tmp_path)
    expected = {"same": 7, "position": 5, "any": 0}
    assert same == [{"differs": rank, **expected} for rank in range(2)]
    ((shared, differs, position, accepted, other),) = run_ranks(on_other_world_sizes, 1, tmp_path)
    assert shared == {"same": 7, "any": 0}
    assert differs.startswith("differs: the state of OwnState was another on each rank")
    assert "accept_inexact=('differs',)" in differs
    assert position.startswith("position: the state of Position is one rank's position")
    assert accepted == {"differs": 0, "position": 5}
    assert other == position
