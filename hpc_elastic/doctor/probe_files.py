"""The files by which the doctor and the tasks of its probe communicate, and their signals.

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

On each node of the probe two processes record their signals and heartbeats: the task's own process,
in the place of a run's agent, and a child in a session of its own, like a run's workers
(``python -m`` of this module). Both ignore signals, so that the time between SIGTERM and SIGKILL
can be measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hpc_elastic.shared_files import Mount, is_there, refresh, write_atomic

POLL_S = 0.1


@dataclass(frozen=True)
class ProbePlan:
    """The settings of the tasks of a probe; the token authenticates their requests."""

    token: str
    interface: str | None = None
    lifetime_s: float = 540.0


class ProbeFolder:
    """The paths of a probe's files, in a folder with an absolute path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.array_file = path / "array-0.json"
        self.members_file = path / "go"
        self.stop_file = path / "stop"

    def task_file(self, kind: str, index: int) -> Path:
        """Return ``peer``, ``node`` or ``back`` of a task."""
        return self.path / f"{kind}-{index}.json"

    def outside_file(self, index: int | str) -> Path:
        """Return the file of the errors outside of a container, which is empty without errors."""
        return self.path / f"outside-{index}"

    def process_file(self, who: str, index: int, kind: str) -> Path:
        """Return ``signals`` or ``beat`` of a process of a task."""
        return self.path / f"{who}-{index}.{kind}"

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

    def wait_for_json(self, file: Path, timeout_s: float) -> Any | None:
        """Wait for a JSON file; return its content, None after the time-out or the probe's end."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self.is_over:
            if is_there(file):
                return json.loads(file.read_text())
            time.sleep(POLL_S)
        return None


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    write_atomic(file, json.dumps(content))


def read(file: Path) -> str:
    """Return the present text of a file that others write; empty if it cannot be read."""
    try:
        refresh(file)
        return file.read_text()
    except (OSError, ValueError):
        return ""


def wait_until(condition: Callable[[], bool], timeout_s: float, pause_s: float) -> bool:
    """Poll a condition until it holds, or the time is over; return whether it holds."""
    deadline = time.monotonic() + timeout_s
    while not (holds := condition()) and time.monotonic() <= deadline:
        time.sleep(pause_s)
    return holds


AGENT, WORKER = "agent", "worker"
PROCESSES = (AGENT, WORKER)
ORPHANED = "ORPHANED"
_ORPHAN_S = 5.0
"""How long a worker lives on after its parent, to show that Slurm left it behind."""
_WATCHED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT),
)


class SignalRecorder:
    """Records the signals and heartbeats of this process; used in its main thread.

    Other machines read the files while they are open, so each line is synchronised: an NFS client
    may keep written data until the file is closed.
    """

    def __init__(self, place: ProbeFolder, who: str, index: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT
        self._signals = os.open(place.process_file(who, index, "signals"), flags | os.O_APPEND)
        self._beat = os.open(place.process_file(who, index, "beat"), flags)
        for number in _WATCHED:
            signal.signal(number, self._received)
        self.record_heartbeat()

    def record(self, what: str) -> None:
        """Append one line with the time."""
        line = json.dumps({"signal": what, "time": time.time()}) + "\n"
        with contextlib.suppress(OSError):
            os.write(self._signals, line.encode())
            os.fsync(self._signals)

    def record_heartbeat(self) -> None:
        """Write the time as a sign of life."""
        with contextlib.suppress(OSError):
            os.pwrite(self._beat, f"{time.time():020.6f}".encode(), 0)
            os.fsync(self._beat)

    def _received(self, number: int, _: FrameType | None) -> None:
        self.record(signal.Signals(number).name)


def start_worker(array_file: str, index: int) -> subprocess.Popen[bytes]:
    """Start the process in the place of a worker."""
    argv = [sys.executable, "-P", "-m", "hpc_elastic.doctor.probe_files", array_file, str(index)]
    return subprocess.Popen(argv, start_new_session=True)


def run_worker(array_file: str, index: int) -> None:
    """Run until the probe ends, or for a while after the parent's end."""
    place, parent = ProbeFolder(Path(array_file).parent), os.getppid()
    recorder = SignalRecorder(place, WORKER, index)
    end = time.monotonic() + place.read_plan().lifetime_s
    orphaned = False
    while time.monotonic() < end and not place.is_over:
        recorder.record_heartbeat()
        if os.getppid() != parent and not orphaned:
            orphaned = True
            recorder.record(ORPHANED)
            end = time.monotonic() + _ORPHAN_S
        time.sleep(POLL_S)


def signal_time(place: ProbeFolder, who: str, index: int, name: str) -> float | None:
    """Return when a process first received a signal, by its own clock; None if it did not."""
    try:
        text = read(place.process_file(who, index, "signals"))
        lines = [json.loads(line) for line in text.splitlines()]
    except ValueError:
        return None
    return next((float(line["time"]) for line in lines if line["signal"] == name), None)


def survival_times(place: ProbeFolder, index: int) -> dict[str, float | None]:
    """Return how long each process of a task lived after its first SIGTERM; None without one."""
    times: dict[str, float | None] = {}
    for who in PROCESSES:
        signalled = signal_time(place, who, index, "SIGTERM")
        last = last_heartbeat(place, who, index)
        times[who] = None if signalled is None or last is None else max(0.0, last - signalled)
    return times


def last_heartbeat(place: ProbeFolder, who: str, index: int) -> float | None:
    """Return the time of a process's last heartbeat; None if there is none."""
    try:
        return float(read(place.process_file(who, index, "beat")))
    except ValueError:
        return None


if __name__ == "__main__":
    run_worker(sys.argv[1], int(sys.argv[2]))
