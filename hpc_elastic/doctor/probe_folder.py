"""The files by which the doctor and the tasks of its probe communicate.

    array-0.json               settings of the tasks (`ProbePlan`), written before the submission
    go                         indices of the tasks that take part: those that run by then
    peer-<i>.json              address of task i
    node-<i>.json              report of task i, written once it has measured everything
    <who>-<i>.signals          signals that ``agent`` or ``worker`` received, as JSON lines
    <who>-<i>.beat             time of its last heartbeat: after SIGKILL, the time of that
    outside-<i>                errors of Slurm's commands outside of a container
    back-<i>.json              task i was requeued, and runs again
    trial-<i>                  a folder that another node changes while task i watches it
    stop                       all tasks end; they also do if the folder is removed

All files are in the folder ``.hpc_elastic`` of the probe, which is removed with it.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_elastic.shared_files import Mount, is_there, write_atomic

POLL_S = 0.1


@dataclass(frozen=True)
class ProbePlan:
    """The settings of the tasks of a probe; the token authenticates their requests."""

    token: str
    interface: str | None = None
    lifetime_s: float = 540.0


@dataclass(frozen=True)
class ProbeFolder:
    """The paths of a probe's files, in a folder with an absolute path."""

    path: Path

    @classmethod
    def of(cls, array_file: str) -> ProbeFolder:
        """Return the folder of an array file."""
        return cls(Path(array_file).parent)

    @property
    def array_file(self) -> Path:
        """The settings of the tasks."""
        return self.path / "array-0.json"

    @property
    def members_file(self) -> Path:
        """The indices of the tasks that take part."""
        return self.path / "go"

    @property
    def stop_file(self) -> Path:
        """The file that ends all tasks."""
        return self.path / "stop"

    def peer_file(self, index: int) -> Path:
        """The address of a task."""
        return self.path / f"peer-{index}.json"

    def report_file(self, index: int) -> Path:
        """The report of a task."""
        return self.path / f"node-{index}.json"

    def return_file(self, index: int) -> Path:
        """Written by a task that was requeued and runs again."""
        return self.path / f"back-{index}.json"

    def outside_file(self, index: int | str) -> Path:
        """Errors outside of a container; an empty file without errors."""
        return self.path / f"outside-{index}"

    def signal_file(self, who: str, index: int) -> Path:
        """The signals of a process of a task."""
        return self.path / f"{who}-{index}.signals"

    def heartbeat_file(self, who: str, index: int) -> Path:
        """The last heartbeat of a process of a task."""
        return self.path / f"{who}-{index}.beat"

    @property
    def staleness_s(self) -> float:
        """How stale the view of other nodes' files may be here, in seconds."""
        return Mount.of(self.path).refreshed_stale_s

    @property
    def is_over(self) -> bool:
        """Whether the probe has ended, or was removed."""
        return is_there(self.stop_file) or not is_there(self.path)

    def write_plan(self, plan: ProbePlan) -> None:
        """Write the settings of the tasks."""
        write_atomic(self.array_file, json.dumps(asdict(plan)), mode=0o600)

    def read_plan(self) -> ProbePlan:
        """Read the settings of the tasks."""
        return ProbePlan(**json.loads(self.array_file.read_text()))

    def write_json(self, file: Path, content: Any) -> None:
        """Write a JSON file atomically."""
        write_atomic(file, json.dumps(content))

    def wait_for_json(self, file: Path, timeout_s: float) -> Any | None:
        """Wait for a JSON file; return its content, None after the time-out or the probe's end."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self.is_over:
            if is_there(file):
                return json.loads(file.read_text())
            time.sleep(POLL_S)
        return None
