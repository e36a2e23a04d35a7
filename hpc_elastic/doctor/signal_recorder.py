"""A process that records its signals and heartbeats.

Each node of the probe has two: the task's own process, in the place of a run's agent, and a child
in a session of its own, like a run's workers. Both ignore signals, so that the time between SIGTERM
and SIGKILL can be measured.
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

from hpc_elastic.doctor.probe_folder import POLL_S, ProbeFolder

AGENT, WORKER = "agent", "worker"
_WATCHED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT),
)
_ORPHAN_S = 5.0
"""How long a worker lives on after its parent, to show that Slurm left it behind."""
ORPHANED = "ORPHANED"


class SignalRecorder:
    """Records the signals and heartbeats of this process; used in its main thread.

    Other machines read the files while they are open, so each line is synchronised: an NFS client
    may keep written data until the file is closed.
    """

    def __init__(self, place: ProbeFolder, who: str, index: int) -> None:
        self._signals = _open(place.signal_file(who, index))
        self._beat = _open(place.heartbeat_file(who, index))
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


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND * path.name.endswith("signals"))


def start_worker(array_file: str, index: int) -> subprocess.Popen[bytes]:
    """Start the process in the place of a worker."""
    argv = [sys.executable, "-P", "-m", "hpc_elastic.doctor.signal_recorder", array_file]
    return subprocess.Popen([*argv, str(index)], start_new_session=True)


def main(array_file: str, index: int) -> None:
    """Run until the probe ends, or for a while after the parent's end."""
    place, parent = ProbeFolder.of(array_file), os.getppid()
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


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
