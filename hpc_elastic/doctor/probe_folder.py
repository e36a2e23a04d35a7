"""The files by which the doctor and the tasks of its probe tell each other things.

    array-0.json               what the tasks are to do (`ProbePlan`); written before they are
    submitted go                         indices of the tasks that take part: those that run by then
    peer-<i>.json              how task i can be reached
    node-<i>.json              what task i found, written once it has measured all
    <who>-<i>.<n>.signals      what ``agent`` or ``worker`` received in attempt n, a JSON line each
    <who>-<i>.<n>.beat         time of its last heartbeat: after SIGKILL, when that came
    outside-<i>                what was wrong with Slurm's commands outside of a container
    back-<i>.json              task i was requeued, and has come back
    trial-<i>                  a folder whose changes by another node are seen by task i
    stop                       all end; so they do where the folder is gone

All of them are in the folder ``.hpc_elastic`` of the probe, which is removed with it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_elastic.shared_files import Mount, is_there, write_atomic

PLACE_POLL_S = 0.1


@dataclass(frozen=True)
class ProbePlan:
    """What the tasks of a probe are to do.

    Attributes:
        num_nodes: How many tasks there are.
        token: Tells a peer from a stranger.
        interface: ``launcher.interface``.
        in_container: Whether the tasks run in one.
        lifetime_s: After this long a task ends whatever happens.
    """

    num_nodes: int
    token: str
    interface: str | None = None
    in_container: bool = False
    lifetime_s: float = 540.0


@dataclass(frozen=True)
class ProbeFolder:
    """The paths of a probe's files.

    Attributes:
        path: The folder, absolute.
    """

    path: Path

    @classmethod
    def of(cls, array_file: str) -> ProbeFolder:
        """Return the place that a task was submitted with."""
        return cls(Path(array_file).parent)

    @property
    def array_file(self) -> Path:
        """What the tasks are to do."""
        return self.path / "array-0.json"

    @property
    def go(self) -> Path:
        """Who takes part."""
        return self.path / "go"

    @property
    def stop(self) -> Path:
        """All end once it is there."""
        return self.path / "stop"

    def peer(self, index: int) -> Path:
        """How a task can be reached."""
        return self.path / f"peer-{index}.json"

    def node(self, index: int) -> Path:
        """What a task found."""
        return self.path / f"node-{index}.json"

    def back(self, index: int) -> Path:
        """That a task has come back."""
        return self.path / f"back-{index}.json"

    def outside(self, index: int | str) -> Path:
        """What was wrong outside of a container; empty if nothing was."""
        return self.path / f"outside-{index}"

    def signals(self, who: str, index: int, attempt: int) -> Path:
        """What a process of a task received."""
        return self.path / f"{who}-{index}.{attempt}.signals"

    def beat(self, who: str, index: int, attempt: int) -> Path:
        """When a process of a task lived last."""
        return self.path / f"{who}-{index}.{attempt}.beat"

    @property
    def late_s(self) -> float:
        """How much longer than on a local disk others' files are to be waited for."""
        return Mount.of(self.path).refreshed_stale_s

    @property
    def is_over(self) -> bool:
        """Whether the probe has ended, or been taken away."""
        return is_there(self.stop) or not is_there(self.path)

    def write_plan(self, plan: ProbePlan) -> None:
        """Tell the tasks what to do."""
        write_atomic(self.array_file, json.dumps(asdict(plan)), mode=0o600)

    def read_plan(self) -> ProbePlan:
        """Return what the tasks are to do."""
        return ProbePlan(**json.loads(self.array_file.read_text()))

    def write(self, file: Path, content: Any) -> None:
        """Write a file that others wait for, in one step."""
        write_atomic(file, json.dumps(content))


def await_json(file: Path, timeout_s: float, over: Callable[[], bool]) -> Any | None:
    """Wait for a file and return what it holds; None if it does not come, or all is over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not over():
        if is_there(file):
            return json.loads(file.read_text())
        time.sleep(PLACE_POLL_S)
    return None
