"""A run of replicas stops before its end: the newest state is on the disk."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from group import eventually

from hpc_elastic import Checkpointer, ft, launch, should_checkpoint
from hpc_elastic.checkpoint.store import Store
from hpc_elastic.errors import WorkerGroupError
from hpc_elastic.run.events import read_events

STEP_S = 0.5


def train(folder: str) -> None:
    """Step until the node is taken; each committed step is a line in a file of the replica's."""
    import torch

    state = {"sum": torch.zeros(4)}
    manager = ft.Manager(
        pg=ft.ProcessGroupGloo(),
        load_state_dict=state.update,
        state_dict=lambda: state,
        min_replica_size=1,
    )
    checkpoints = Checkpointer({"state": state, "manager": manager}, Path(folder, "checkpoints"))
    with Path(folder, f"{os.getpid()}.steps").open("a") as steps:
        while True:
            manager.start_quorum()
            mean = torch.ones(4)
            manager.allreduce(mean).wait()
            if manager.should_commit():
                state["sum"] += mean
                print(manager.current_step(), file=steps, flush=True)
            if Path(folder, f"{os.getpid()}.fails").exists():
                raise ValueError("as asked")
            time.sleep(STEP_S)
            if should_checkpoint(manager.current_step(), every_s=1000):
                checkpoints.save(manager.current_step())


def steps(folder: Path) -> list[int]:
    """The last step that each replica has committed."""
    files = [f.read_text().split() for f in folder.glob("*.steps")]
    return [int(lines[-1]) for lines in files if lines]


@contextlib.contextmanager
def training(folder: Path) -> Iterator[tuple[Path, Future]]:
    """A run of two replicas that have made some steps, and its result; it is over afterwards."""
    run = folder / "run"
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(
            launch, train, str(folder), nodes=2, nproc_per_node=1, launcher="local", ft=True,
            run_dir=run, max_restarts=0, max_requeues=0,
        )  # fmt: skip
        eventually(lambda: [n > 2 for n in steps(folder)] == [True, True], 90)
        yield run, result


def happened(run: Path, kind: str) -> list[dict]:
    """The run's events of a kind."""
    return [e for e in read_events(run / "events") if e["kind"] == kind]


@pytest.mark.long
@pytest.mark.parametrize("then", ["while it leaves", "when it has left"])
@pytest.mark.parametrize("first", ["the leader", "the other"])
def test_no_step_is_lost(tmp_path, first, then):
    """The node that is left is no quorum by itself: it saves all the same, in one step more."""
    with training(tmp_path) as (run, result):
        (leader,) = [e["task"] for e in happened(run, "leader")]
        agents = {e["task"]: e["pid"] for e in happened(run, "task")}
        a, b = sorted(agents, key=lambda task: task != leader, reverse=first == "the other")
        os.kill(agents[a], signal.SIGTERM)
        if then == "while it leaves":
            time.sleep(STEP_S)
        else:
            eventually(lambda: happened(run, "task_exited"), 30)
        os.kill(agents[b], signal.SIGTERM)
        with pytest.raises(WorkerGroupError, match=r"CANCELLED|ended for good"):
            result.result(60)
    newest = Store(tmp_path / "checkpoints").steps()[0]
    assert [newest, newest] == steps(tmp_path)


@pytest.mark.parametrize(
    "how", [pytest.param("leaves for good", marks=pytest.mark.long), "fails too often"]
)
def test_a_run_saves_before_it_fails(tmp_path, how):
    """The replica that is left has the newest state in its memory alone."""
    with training(tmp_path) as (run, result):
        if how == "leaves for good":
            os.kill(happened(run, "task")[0]["pid"], signal.SIGTERM)
        else:
            next(tmp_path.glob("*.steps")).with_suffix(".fails").touch()
        with pytest.raises(WorkerGroupError, match=r"ended for good|as asked"):
            result.result(60)
    newest = Store(tmp_path / "checkpoints").steps()[0]
    assert newest == max(steps(tmp_path)) and not happened(run, "state_unsaved")
