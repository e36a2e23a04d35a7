"""A training of replicas without tensors: they meet at every step, at a counter in a store.

It uses the link below the Manager, so that what it shows is the run's doing: who is in the quorum,
and when. Each worker writes a line for each quorum and each step to ``folder/<slot>.<pid>``.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

from group import eventually

from hpc_elastic import launch
from hpc_elastic.run.directory import RunDir

GIVE_UP_S = 180.0
START_S = 90.0
STEP_S = 0.01


class Worker:
    """One replica of one worker."""

    def __init__(self, folder: Path) -> None:
        from hpc_elastic.ft.manager_client import ManagerClient

        self.folder = folder
        self.aborted = threading.Event()
        socket = Path(os.environ["HPC_ELASTIC_FT_SOCKET"])
        self.client = ManagerClient(
            socket, 0, 1, on_abort=lambda *_: self.aborted.set(), timeout_s=20
        )
        self.log = (folder / f"{os.environ['REPLICA_GROUP_ID']}.{os.getpid()}").open("a")
        self.step, self.state_version, self.failures = 0, "start", 0

    def note(self, **fields: object) -> None:
        """Write a line."""
        self.log.write(json.dumps({"at": time.time(), "step": self.step, **fields}) + "\n")
        self.log.flush()

    def train(self) -> int:
        """Step until the folder has a file ``stop``; return the last step."""
        while not self.is_over():
            if self.client.start_step(last_failed=self.failures > 0) and not self.enter():
                time.sleep(GIVE_UP_S)  # it has left: its agent stops it
            if self.all_meet():
                self.step += 1
                self.failures = 0
                self.note(made=True)
            else:
                self.failures += 1
                self.client.report_abort(self.client.steps.quorum_id, "a step failed")
                self.note(failed=self.client.steps.abort_reason)
            time.sleep(STEP_S)
        self.client.close()
        return self.step

    def is_over(self) -> bool:
        """All replicas see the same: the step is written before it is reached."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return self.step >= int((self.folder / "stop").read_text())
        return False

    def enter(self) -> bool:
        """Request a place in a quorum; return whether there was one."""
        from torch.distributed import TCPStore

        from hpc_elastic.ft.messages import QuorumRequest, QuorumResult

        store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        at = self.client.steps
        request = QuorumRequest(
            at.quorum_step, self.step, self.state_version, at.quorum_id,
            self.failures, 1, False, store, ("reattach",),
        )  # fmt: skip
        answer = self.client.request_quorum(request, timeout_s=GIVE_UP_S)
        if not isinstance(answer, QuorumResult):
            self.note(left=True)
            return False
        self.aborted.clear()
        self.place = answer
        self.step, self.state_version = answer.max_step, answer.state_version
        host, _, port = answer.store.rpartition(":")
        self.store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=10))
        self.note(quorum=answer.quorum_id, size=answer.replica_world_size)
        return True

    def all_meet(self) -> bool:
        """Wait until all members have come to this step; return False if the quorum is aborted."""
        key = f"ft/{self.place.quorum_id}/{self.client.steps.quorum_step}"
        with contextlib.suppress(RuntimeError):  # torch's error: the store is gone
            num = self.store.add(key, 1)
            while num < self.place.replica_world_size:
                if self.aborted.is_set() or self.client.steps.abort_reason:
                    return False
                time.sleep(0.002)
                num = self.store.add(key, 0)
            return True
        return False


def train_replica(folder: str, bad: str = "") -> int:
    """Be one replica; ``folder/fail.<slot>`` makes one fail, once."""
    if bad:
        raise RuntimeError(bad)
    return Worker(Path(folder)).train()


class Reporting(Worker):
    """A replica that reports its steps."""

    def note(self, **fields: object) -> None:
        """Write a line, and report a step."""
        from hpc_elastic import report

        super().note(**fields)
        if "made" in fields:
            report(step=self.step)


def train_and_report(folder: str) -> int:
    """Be one replica that reports its steps."""
    return Reporting(Path(folder)).train()


class Managed(Worker):
    """A replica with a Manager, whose own wait for a quorum is short."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step = folder, 0
        self.log = (folder / f"{os.environ['REPLICA_GROUP_ID']}.{os.getpid()}").open("a")

    def train(self) -> int:
        """Step until the folder has a file ``stop``; return the last step."""
        import torch

        from hpc_elastic.ft import Manager, ProcessGroupGloo

        w = torch.zeros(1)
        manager = Manager(
            ProcessGroupGloo(), lambda state: w.copy_(state["w"]), lambda: {"w": w},
            min_replica_size=2, quorum_timeout=timedelta(seconds=1),
        )  # fmt: skip
        seen = None
        while not self.is_over():
            manager.start_quorum()
            manager.allreduce(w).wait()
            if manager.should_commit():
                self.step = manager.current_step()
                if seen != manager.quorum_id():
                    seen = manager.quorum_id()
                    self.note(quorum=seen, size=manager.num_participants())
                self.note(made=True)
            time.sleep(STEP_S)
        manager.shutdown()
        return self.step


def train_managed(folder: str) -> int:
    """Be one replica with a Manager."""
    return Managed(Path(folder)).train()


class Replicas:
    """A run of replicas on this machine.

    Args:
        folder: Where the workers write to.
        nodes: The range.
        train: What each worker runs.
        settings: Of the launcher.
    """

    def __init__(
        self,
        folder: Path,
        nodes: str,
        *,
        train: Callable[..., int] = train_replica,
        **settings: object,
    ) -> None:
        self.folder = folder
        self.run = RunDir(folder / "run")
        self._threads = ThreadPoolExecutor(1)
        self.results: Future = self._threads.submit(
            launch, train, str(folder), nodes=nodes, nproc_per_node=1, launcher="local",
            ft=True, run_dir=self.run.path, poll_interval_s=0.2,
            **{"max_restarts": 0, **settings},
        )  # fmt: skip

    def lines(self, slot: int) -> list[dict]:
        """What all workers of a slot have written, with their pids, in order of time."""
        found = [
            {"pid": int(path.suffix[1:]), **json.loads(line)}
            for path in self.folder.glob(f"{slot}.*")
            for line in path.read_text().splitlines()
            if line.endswith("}")
        ]
        return sorted(found, key=lambda line: line["at"])

    def last(self, slot: int, key: str) -> dict | None:
        """The last line of a slot that has a key."""
        return next((line for line in reversed(self.lines(slot)) if key in line), None)

    def train(self, size: int, *slots: int, within_s: float = START_S) -> None:
        """Wait until these make steps in a quorum of so many."""
        marks = {slot: len(self.lines(slot)) for slot in slots}

        def is_so(slot: int) -> bool:
            quorum, made = self.last(slot, "quorum"), self.last(slot, "made")
            fresh = len(self.lines(slot)) >= marks[slot] + 3
            right = quorum is not None and made is not None and quorum["size"] == size
            return right and fresh and made["at"] > quorum["at"]

        def done() -> bool:
            assert not self.results.done(), self.results.result()
            return all(is_so(slot) for slot in slots)

        eventually(done, within_s)

    def pids(self, *slots: int) -> list[set[int]]:
        """The processes that have written as a slot."""
        return [{line["pid"] for line in self.lines(slot)} for slot in slots]

    def agents(self) -> dict[int, int]:
        """Process ids of the agents, by slot."""
        tasks = json.loads((self.run.path / ".hpc_elastic" / "local-tasks.json").read_text())
        return {int(name.rpartition("_")[2]): task["pid"] for name, task in tasks.items()}

    def leader(self) -> int:
        """The slot whose agent leads."""
        from hpc_elastic.rendezvous.decision_log import DecisionLog

        _, entry = DecisionLog(self.run.rdzv, self.run.secret.read_bytes()).last()
        assert entry is not None
        return int(entry.leader.task.rpartition("_")[2])

    def finish(self, slot: int = 0) -> int:
        """Let all end at the same step, a little later; return it."""
        last = self.last(slot, "made")
        stop = (last["step"] if last else 0) + 60
        staged = self.folder / ".stop"
        staged.write_text(str(stop))
        staged.rename(self.folder / "stop")
        return stop

    def end(self) -> None:
        """Let the training stop by itself."""
        (self.folder / "stop").write_text("0")
        with contextlib.suppress(Exception):
            self.results.result(60)
        self._threads.shutdown(wait=False)
