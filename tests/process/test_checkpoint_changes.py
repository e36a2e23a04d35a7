"""A memory tier while the group is about to change: where a save goes is agreed, not raced for."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import PATIENCE_S, run_ranks
from group import eventually
from near_memory import fill, nodes, parts_of

from hpc_elastic.checkpoint import Checkpointer, CheckpointOptions
from hpc_elastic.checkpoint.store import Store, verify_checkpoint
from hpc_elastic.worker.shared_page import (
    DIRECTORY_VARIABLE,
    CheckpointRequest,
    SharedPage,
)

AT_NEXT = CheckpointRequest(5, None, confirmed=True, pause=True)
"""To stay at the next checkpoint, whichever that is."""


def pages(folder: Path) -> dict[int, dict[str, str]]:
    """Return the environment of two ranks on two nodes, each with a page of its agent."""
    env = nodes(folder, 1, 1)
    for rank, variables in env.items():
        (folder / f"control-{rank}").mkdir()
        variables[DIRECTORY_VARIABLE] = str(folder / f"control-{rank}")
    return env


def saved_once(rank: int, folder: str, asynchronous: bool):
    """Save step 1 to the directory; step 2 will stay in memory as a rule."""
    page = SharedPage.create(Path(os.environ[DIRECTORY_VARIABLE]), 0)
    options = CheckpointOptions(rng=False, asynchronous=asynchronous)
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
    return [step for step in store.steps() if not verify_checkpoint(store.folder(step))]


def save_where_agreed(rank: int, folder: str, asynchronous: bool) -> list[int]:
    """All ranks have agreed on step 2, which they have saved to memory for another reason."""
    page, ckpt, store = saved_once(rank, folder, asynchronous)
    assert ckpt.save(2)
    request = CheckpointRequest(5, 2, confirmed=True, pause=True)
    page.request_checkpoint(request)
    assert page.poll_checkpoint(2) and page.changes_group_at(2)
    with ThreadPoolExecutor(1) as pool:
        saved = pool.submit(ckpt.save, 2)
        eventually(lambda: page.read().paused == 5)
        assert not saved.done() and store.steps() == [2, 1]
        page.request_checkpoint(None)
        assert saved.result(PATIENCE_S)
    return leave(ckpt, store)


def save_while_one_is_asked(rank: int, folder: str, asynchronous: bool) -> list[int]:
    """One rank has been asked to stay at its next checkpoint, and the other one not yet."""
    page, ckpt, store = saved_once(rank, folder, asynchronous)
    page.request_checkpoint(AT_NEXT if rank else None)
    with ThreadPoolExecutor(1) as pool:
        saved = pool.submit(ckpt.save, 2)
        if rank:
            eventually(lambda: page.read().paused == 5)
            page.request_checkpoint(None)
        assert saved.result(PATIENCE_S)
    return leave(ckpt, store)


def go_by_the_clock(rank: int, folder: Path) -> list[int]:
    """Save by the clock, without a run; the ranks begin at other times."""
    time.sleep(0.05 * rank)
    state = {"x": torch.zeros(3)}
    with Checkpointer(state, folder) as c:
        return [s for s in range(1, 101) if c.save_if_due(s, every_s=0.02) or time.sleep(0.001)]


def test_ranks_outside_of_a_run_save_by_the_clock_at_the_same_steps(tmp_path):
    """As under torchrun, with the lines of the README."""
    first, second = run_ranks(go_by_the_clock, 2, tmp_path)
    assert first == second and len(first) >= 2


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize(
    ("save", "steps"), [(save_where_agreed, [2, 1]), (save_while_one_is_asked, [1])]
)
def test_a_save_goes_where_all_ranks_have_agreed(tmp_path, save, steps, asynchronous):
    """To the directory, though it is in memory already; a request that one has seen is none."""
    found = run_ranks(save, 2, str(tmp_path), asynchronous, env=pages(tmp_path))
    assert found == [steps] * 2
