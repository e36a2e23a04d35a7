"""Near memory while the group is about to change: a save is in the directory, or nowhere."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from gloo_ranks import PATIENCE_S, run_ranks
from group import eventually
from near_memory import fill, nodes, parts_of

from hpc_elastic.checkpoint import Checkpointer, CheckpointOptions, save
from hpc_elastic.checkpoint.store import Store, verify
from hpc_elastic.errors import CheckpointError
from hpc_elastic.worker.shared_page import DIRECTORY_VARIABLE, SharedPage

NEAR_S = 15.0
"""Less than what a rank that waits in vain would wait."""


def pages(folder: Path) -> dict[int, dict[str, str]]:
    """Return the environment of two ranks on two nodes, each with a control page."""
    env = nodes(folder, 1, 1)
    for rank, variables in env.items():
        (folder / f"control-{rank}").mkdir()
        variables[DIRECTORY_VARIABLE] = str(folder / f"control-{rank}")
    return env


def saved_near(rank: int, folder: str, **options) -> tuple[SharedPage, Checkpointer, Store]:
    """Save step 1 to the directory, and make ready for step 2, which is to stay near."""
    page = SharedPage.create(Path(os.environ[DIRECTORY_VARIABLE]), 0)
    options = CheckpointOptions(rng=False, timeout_s=2 * NEAR_S, **options)
    ckpt, state = parts_of(rank, folder, options=options, shared_every=100)
    fill(state, 1)
    assert ckpt.save(1)
    ckpt.wait()
    fill(state, 2)
    dist.barrier()
    return page, ckpt, Store(Path(folder, "checkpoints"))


def leave(ckpt: Checkpointer, store: Store) -> list[int]:
    """Meet the other ranks, as the training's next step would; return the good steps."""
    dist.barrier()
    ckpt.close()
    assert ckpt.failures == 0
    return [step for step in store.steps() if not verify(store.folder(step))]


def hear_late(rank: int, folder: str, first: int, asynchronous: bool) -> list[int]:
    """One rank hears of the change right before its save, the other one right after."""
    page, ckpt, store = saved_near(rank, folder, asynchronous=asynchronous)
    if rank != first:
        assert ckpt.save(2)
        ckpt.wait()
        page.hold(1)
        return leave(ckpt, store)
    page.hold(1)
    with ThreadPoolExecutor(1) as pool:
        saved = pool.submit(ckpt.save, 2)
        eventually(lambda: page.read().held == 1 or saved.done(), 3 * NEAR_S)
        page.hold(0)
        assert saved.result(PATIENCE_S)
    return leave(ckpt, store)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_save_is_in_the_directory_though_a_rank_heard_too_late(tmp_path, first, asynchronous):
    """Its training goes on to a collective, where it waits; its part is stored nevertheless."""
    found = run_ranks(hear_late, 2, str(tmp_path), first, asynchronous, env=pages(tmp_path))
    assert found == [[2, 1]] * 2


def hear_alone(rank: int, folder: str) -> list[int]:
    """One rank hears of a change that is off again before the other one has heard of it."""
    save._LET_GO_S = 0.3
    page, ckpt, store = saved_near(rank, folder)
    if rank == 1:
        assert ckpt.save(2)
        return leave(ckpt, store)
    page.hold(1)
    with ThreadPoolExecutor(1) as pool:
        saved = pool.submit(ckpt.save, 2)
        eventually(lambda: list(store.directory.glob(".staging-step-2-*/part-0.json")))
        page.hold(0)
        assert saved.result(NEAR_S) is False
    return leave(ckpt, store)


def test_a_rank_that_heard_alone_goes_on_once_the_change_is_off(tmp_path):
    """Nobody waits as long as for one that is late, and no save has failed."""
    assert run_ranks(hear_alone, 2, str(tmp_path), env=pages(tmp_path)) == [[1]] * 2


def hear_without_room(rank: int, folder: str) -> str:
    """One rank has no room for a step in memory; the other one wants it in the directory."""
    page, ckpt, _ = saved_near(rank, folder)
    if rank == 1:
        ckpt._tier._num_bytes = 1 << 60
        ckpt.save(2)
    else:
        page.hold(1)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(ckpt.save, 2).result(NEAR_S) is False
    with pytest.raises(CheckpointError) as e:
        ckpt.wait()
    dist.barrier()
    ckpt.close()
    return str(e.value)


def test_a_rank_that_could_not_save_says_so_to_one_that_hears(tmp_path):
    """So nobody waits for its part."""
    said = run_ranks(hear_without_room, 2, str(tmp_path), env=pages(tmp_path))
    assert all("has no room in memory" in each for each in said)
    assert "rank 1 gave up" in said[0] and "rank 1" not in said[1]


def save_again(rank: int, folder: str) -> list[int]:
    """One rank hears of the change; the other one saves the same step again, for its own reason."""
    page, ckpt, store = saved_near(rank, folder)
    assert ckpt.save(2)
    if rank == 0:
        page.hold(1)
        eventually(lambda: 2 in store.steps(), NEAR_S)
        page.hold(0)
        assert ckpt.save(2)
    else:
        eventually(lambda: list(store.directory.glob(".staging-step-2-*/part-0.json")))
        assert ckpt.save(2, urgent=True)
    return leave(ckpt, store)


def test_a_step_that_is_near_is_not_saved_anew_by_one_rank_alone(tmp_path):
    """What is under way on the other is what it takes part in."""
    assert run_ranks(save_again, 2, str(tmp_path), env=pages(tmp_path)) == [[2, 1]] * 2
