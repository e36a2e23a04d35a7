"""Near memory first: saves survive the loss of a node, newer than what is in the directory."""

import contextlib
import itertools
import logging
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import near_training
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import PATIENCE_S, run_ranks
from group import eventually
from near_memory import fill, is_of, nodes, parts_of
from savers import flip_a_bit

from ended import is_gone
from hpc_elastic import launch
from hpc_elastic.checkpoint import Checkpointer, MemoryTier
from hpc_elastic.checkpoint.store import Store


def save_five(rank: int, folder: str) -> list[int]:
    """Save five steps, of which the first and the fourth go to the directory; one node dies."""
    ckpt, state = parts_of(rank, folder)
    assert ckpt.load_latest() is None
    for step in (10, 20, 30, 40, 50):
        fill(state, step)
        assert ckpt.save(step)
    ckpt.wait()
    dist.barrier()
    if os.environ["GROUP_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return Store(Path(folder, "checkpoints")).steps()


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    """Return what four ranks on two nodes have saved before the second node died."""
    folder = tmp_path_factory.mktemp("saved")
    found = run_ranks(save_five, 4, str(folder), env=nodes(folder, 2, 2), killed=[2, 3])
    assert found[0] == [40, 10]
    return folder


@pytest.fixture
def saved(saved_once, tmp_path):
    """Return a copy of it."""
    shutil.copytree(saved_once, tmp_path / "run")
    return tmp_path / "run"


def restore(rank: int, folder: str, expected: int | None) -> bool:
    ckpt, state = parts_of(rank, folder)
    step = ckpt.load_latest()
    ckpt.close()
    assert step == expected, step
    return expected is None or is_of(state, expected)


def test_after_the_loss_of_a_node_the_newest_step_comes_from_memory(saved):
    """Of four ranks on two nodes one node is lost; the other goes on, newer than the directory."""
    shutil.rmtree(saved / "memory-1")
    assert all(run_ranks(restore, 2, str(saved), 50, env=nodes(saved, 2)))


def test_nodes_that_come_fresh_get_what_they_lack(saved):
    """A lost node's place is taken by two nodes without memory; all ranks get the newest step."""
    (saved / "memory-0").rename(saved / "gone")
    (saved / "memory-1").rename(saved / "memory-2")
    assert all(run_ranks(restore, 3, str(saved), 50, env=nodes(saved, 1, 1, 1)))


def test_damage_in_memory_costs_one_copy_at_most(saved):
    """A good copy elsewhere replaces a damaged file; without one, an older step is taken."""
    (damaged,) = saved.glob("memory-0/*/step-00000050-*/shard-0.safetensors")
    flip_a_bit(damaged)
    assert all(run_ranks(restore, 2, str(saved), 50, env=nodes(saved, 1, 1)))
    for file in saved.glob("memory-*/*/step-00000050-*/shard-0.safetensors"):
        flip_a_bit(file)
    assert all(run_ranks(restore, 2, str(saved), 40, env=nodes(saved, 1, 1)))


def test_without_copies_a_lost_node_costs_the_steps_in_memory(saved):
    """What is not complete anywhere is passed over: the directory's newest is taken."""
    for file in saved.glob("memory-0/*/step-*/part-[23].json"):  # as if nothing had been copied
        file.unlink()
    shutil.rmtree(saved / "memory-1")
    assert all(run_ranks(restore, 1, str(saved), 40, env=nodes(saved, 1)))


def save_until_killed(rank: int, folder: str, seed: int) -> None:
    """Save as fast as it goes; one node is killed at a random moment, then the other is stopped."""
    ckpt, state = parts_of(rank, folder, 400_000, shared_every=7)
    moment = random.Random(seed).uniform(0.05, 1.5) + (0.5 if rank == 0 else 0.0)
    threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with contextlib.suppress(RuntimeError):  # the other node is gone
        for step in itertools.count(1):
            fill(state, step)
            ckpt.save(step)
            dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def restore_any(rank: int, folder: str) -> int:
    ckpt, state = parts_of(rank, folder, 400_000)
    step = ckpt.load_latest()
    ckpt.close()
    assert step is None or is_of(state, step)
    return -1 if step is None else step


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_node_killed_at_any_moment_leaves_whole_steps(tmp_path, seed):
    """Whatever was half written or half copied, all ranks restore the same whole step."""
    env = nodes(tmp_path, 1, 1)
    run_ranks(save_until_killed, 2, str(tmp_path), seed, env=env, killed=[0, 1])
    shutil.rmtree(tmp_path / "memory-1")
    found = run_ranks(restore_any, 2, str(tmp_path), env=env)
    assert found[0] == found[1] >= max(Store(tmp_path / "checkpoints").steps(), default=-1)


def go_back_and_return(rank: int, folder: str) -> None:
    ckpt, state = parts_of(rank, folder)
    fill(state, 1)
    for step in (10, 20):
        ckpt.save(step)
    ckpt.wait()
    dist.barrier()
    memory = Path(os.environ["HPC_ELASTIC_TEST_MEMORY"])
    if rank == 0:
        for file in memory.glob("*/step-00000020-*/shard-*"):
            flip_a_bit(file)
    dist.barrier()
    assert ckpt.load_latest() == 10
    dist.barrier()
    assert not list(memory.glob("*/step-00000020-*"))
    ckpt.close()


def test_a_history_that_was_given_up_does_not_come_back(tmp_path):
    """After a restore of an older step, later ones are gone from memory."""
    env = nodes(tmp_path, 2)
    run_ranks(go_back_and_return, 2, str(tmp_path), env=env)


def only_what_fits(rank: int, folder: str) -> list[int]:
    import hpc_elastic.checkpoint.node_memory as module

    module.free_bytes = lambda _: 1 << 20 if rank else 1 << 40
    ckpt, state = parts_of(rank, folder)
    for step in (10, 20):
        fill(state, step)
        ckpt.save(step)
    ckpt.wait()
    dist.barrier()
    ckpt.close()
    assert not list(Path(os.environ["HPC_ELASTIC_TEST_MEMORY"]).glob("*/step-*"))
    return Store(Path(folder, "checkpoints")).steps()


def test_without_room_on_one_node_every_save_goes_to_the_directory(tmp_path):
    """All ranks decide the same, so no save is in half of the places."""
    assert run_ranks(only_what_fits, 2, str(tmp_path), env=nodes(tmp_path, 1, 1))[0] == [20, 10]


def urgent_after_near(rank: int, folder: str) -> list[int]:
    ckpt, state = parts_of(rank, folder, shared_every=100)
    fill(state, 1)
    ckpt.save(1)
    fill(state, 2)
    ckpt.save(2)
    assert ckpt.save(2, urgent=True)
    dist.barrier()
    ckpt.close()
    return Store(Path(folder, "checkpoints")).steps()


def test_an_urgent_save_goes_to_the_directory(tmp_path):
    """Even of a step that is in memory already: the nodes may all be taken."""
    assert run_ranks(urgent_after_near, 2, str(tmp_path), env=nodes(tmp_path, 1, 1))[0] == [2, 1]


def alone(memory: Path, directory: Path, **tiers) -> tuple[Checkpointer, dict]:
    """Return a checkpointer of a single process."""
    state = {"w": torch.zeros(1000)}
    return Checkpointer(state, directory, memory_tier=MemoryTier(memory, **tiers)), state


def test_a_single_process_comes_back_from_memory(tmp_path):
    """Without a process group it works, too; only three steps are ever there."""
    ckpt, state = alone(tmp_path / "m", tmp_path / "c", shared_every=100)
    for step in range(1, 8):
        state["w"].fill_(step)
        ckpt.save(step)
    ckpt.close()
    assert Store(tmp_path / "c").steps() == [1]
    assert sorted(p.name[:13] for p in tmp_path.glob("m/*/step-*")) == [
        "step-00000005", "step-00000006", "step-00000007",
    ]  # fmt: skip
    ckpt, state = alone(tmp_path / "m", tmp_path / "c")
    assert ckpt.load_latest() == 7 and bool((state["w"] == 7).all())
    ckpt.close()


def test_a_directory_that_was_removed_is_forgotten(tmp_path):
    """Who removes his checkpoints to begin anew does not meet them again, and gets the memory."""
    ckpt, _ = alone(tmp_path / "m", tmp_path / "c")
    for step in (1, 2):
        ckpt.save(step)
    ckpt.close()
    shutil.rmtree(tmp_path / "c")
    ckpt, _ = alone(tmp_path / "m", tmp_path / "c")
    assert ckpt.load_latest() is None
    ckpt.close()
    assert not list(tmp_path.glob("m/*/step-*"))


def test_the_neighbours_death_ends_no_save(tmp_path, caplog):
    """A copy that fails is a warning; the save is good."""
    out = run_ranks(save_beside_a_dead_neighbour, 2, str(tmp_path), env=nodes(tmp_path, 1, 1))
    assert "copy" in out[0]


def save_beside_a_dead_neighbour(rank: int, folder: str) -> str:
    ckpt, state = parts_of(rank, folder)
    if rank == 1:
        ckpt.close()
    dist.barrier()
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("hpc_elastic.checkpoint.memory_tier").addHandler(handler)
    for step in (10, 20):
        fill(state, step)
        ckpt.save(step)
    ckpt.wait()
    dist.barrier()
    assert ckpt.failures == 0
    ckpt.close()
    return " ".join(said)


# ---- a run --------------------------------------------------------------------------------


class Run:
    """A run of one or two nodes on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1)
        self.result = self._thread.submit(
            launch, near_training.train, str(folder), nodes="1:2", nproc_per_node=1,
            launcher="local", run_dir=folder / "run", poll_interval_s=0.2, max_restarts=0,
        )  # fmt: skip

    def lines(self, name: str) -> list[str]:
        """Return the lines of a file that the workers write."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def saved(self) -> int:
        """Return the last step that all ranks have saved."""
        return int(next(iter(self.lines("saved")), "0"))

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to happen in the run."""
        eventually(lambda: self.result.done() or condition(), PATIENCE_S)
        assert not self.result.done(), self.result.result()

    def kill_second_node(self) -> None:
        """Kill one agent, whose worker goes with it, and take its memory away."""
        (place,) = self.lines("node-1")
        agent, worker, memory = place.split(maxsplit=2)
        os.kill(int(agent), signal.SIGKILL)
        eventually(lambda: is_gone(int(worker)))
        shutil.rmtree(memory, ignore_errors=True)  # any agent that starts here does the same
        eventually(lambda: not Path(memory).exists())

    def end(self) -> None:
        """Let the training stop."""
        (self.folder / "stop").touch()
        with contextlib.suppress(Exception):
            self.result.result(PATIENCE_S)
        self._thread.shutdown()


def test_a_run_that_loses_a_node_goes_on_from_memory(tmp_path):
    """Real agents: the survivor has every step of both, though the directory has the first only."""
    run = Run(tmp_path)
    try:
        run.until(lambda: run.saved() > 5)
        assert run.lines("began") == ["0 2"]
        run.kill_second_node()
        saved = run.saved()
        run.until(lambda: len(run.lines("began")) == 2)
        step, world_size = map(int, run.lines("began")[1].split())
        assert world_size == 1 and step >= saved
        assert Store(tmp_path / "checkpoints").steps()[-1] == 1
    finally:
        run.end()
