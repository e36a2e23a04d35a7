"""A process that writes down which signals it gets, and when it lived last.

On each node of the probe two of them: the task's own process, where a run has the agent, and a
child of it in a session of its own, as a run's workers are. Both ignore what they are asked, so
that the time between SIGTERM and SIGKILL shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from hpc_elastic.doctor.probe_folder import PLACE_POLL_S, ProbeFolder

AGENT, WORKER = "agent", "worker"
_WATCHED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT),
)
_ORPHAN_S = 5.0
"""How long a worker outlives its parent: to show that Slurm left it behind."""
ORPHANED = "ORPHANED"


class Recorder:
    """Writes the signals and heartbeats of this process; in its main thread.

    Other machines read the files while they are open, so each line is synchronised: a client of NFS
    may keep what it is given until the file is closed.
    """

    def __init__(self, place: ProbeFolder, who: str, index: int, attempt: int) -> None:
        self._signals = _open(place.signals(who, index, attempt))
        self._beat = _open(place.beat(who, index, attempt))
        for number in _WATCHED:
            signal.signal(number, self._received)
        self.beat()

    def note(self, what: str) -> None:
        """Write one line."""
        line = json.dumps({"signal": what, "time": time.time()}) + "\n"
        with contextlib.suppress(OSError):
            os.write(self._signals, line.encode())
            os.fsync(self._signals)

    def beat(self) -> None:
        """Write that this process lives."""
        with contextlib.suppress(OSError):
            os.pwrite(self._beat, f"{time.time():020.6f}".encode(), 0)
            os.fsync(self._beat)

    def _received(self, number: int, _: FrameType | None) -> None:
        self.note(signal.Signals(number).name)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND * path.name.endswith("signals"))


def start_worker(array_file: str, index: int, attempt: int) -> subprocess.Popen[bytes]:
    """Start what stands for a worker."""
    argv = [sys.executable, "-m", "hpc_elastic.doctor.signal_recorder", array_file]
    return subprocess.Popen([*argv, str(index), str(attempt)], start_new_session=True)


def main(array_file: str, index: int, attempt: int) -> None:
    """Live until the probe is over, or the parent has been dead for a while."""
    place, parent = ProbeFolder.of(array_file), os.getppid()
    recorder = Recorder(place, WORKER, index, attempt)
    end = time.monotonic() + place.read_plan().lifetime_s
    orphaned = False
    while time.monotonic() < end and not place.is_over:
        recorder.beat()
        if os.getppid() != parent and not orphaned:
            orphaned = True
            recorder.note(ORPHANED)
            end = time.monotonic() + _ORPHAN_S
        time.sleep(PLACE_POLL_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
