"""Failed workers as the run's report shows them: what, where, and the traceback."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_elastic.agent.signals import name_of
from hpc_elastic.rendezvous.log_entry import Failure
from hpc_elastic.shared_files import parse_json, read_tail, read_text
from hpc_elastic.transport.auth import MAX_FRAME_BYTES
from hpc_elastic.worker.shared_page import WorkerStatus

_MAX_REPORTED = 8
_MAX_MESSAGE = 2_000
_MAX_TRACEBACK = 10_000
_MAX_BYTES = MAX_FRAME_BYTES - (64 << 10)
"""Of a report, with escaped characters; that of one failure is less."""

_REMEDY = (
    "A run succeeds once its function has returned on every rank: return from the function instead "
    "of calling sys.exit() or os._exit(). A script that handles SIGTERM itself may set a flag and "
    "save; the node's agent ends the process."
)
_REMEDY_OF_SIGNAL = {
    "SIGXCPU": "The limit of CPU time was reached (`ulimit -t`): Slurm hands on that of the shell "
    "that submits, or limits.conf of the node sets it; `hpc-elastic doctor --probe` shows it."
}


@dataclass(frozen=True)
class NodeIdentity:
    """Where an agent's workers run."""

    task: str
    host: str
    logs: Path


@dataclass(frozen=True)
class WorkerFiles:
    """The files of one worker in one round."""

    place: NodeIdentity
    round: int
    rank: int
    local_rank: int

    @property
    def out(self) -> Path:
        """Its standard output."""
        return self._file("out")

    @property
    def err(self) -> Path:
        """Its standard error."""
        return self._file("err")

    @property
    def error(self) -> Path:
        """What it wrote of its own failure."""
        return self._file("error.json")

    @property
    def stack(self) -> Path:
        """Its stacks, whenever its group was looked into."""
        return self._file("stack.txt")

    def _file(self, suffix: str) -> Path:
        return self.place.logs / f"round-{self.round}.rank-{self.rank}.{suffix}"


def earliest(failures: Iterable[Failure]) -> list[Failure]:
    """Return the failures of one node that its report has room for, the oldest first."""
    found = sorted(failures, key=lambda failure: failure.time)[:_MAX_REPORTED]
    while len(json.dumps([asdict(failure) for failure in found])) > _MAX_BYTES:
        found.pop()
    return found


def recorded_exit_code(files: WorkerFiles) -> int | None:
    """Return the exit code of a worker that has written down its failure; None if it has not.

    Its process may live on for a while: threads are waited for, and exit handlers run.
    """
    code = _worker_report(files.error).get("exit_code")
    return code if isinstance(code, int) else None


def describe(exit_code: int, files: WorkerFiles, progress: WorkerStatus | None = None) -> Failure:
    """Describe how a worker has failed; a negative exit code is the signal that has ended it."""
    told, now = _worker_report(files.error), time.time()
    died_of = name_of(-exit_code) if exit_code < 0 else None
    how = f"ended by {died_of}" if died_of else _how_it_exited(exit_code, told, progress)
    return Failure(
        task=files.place.task,
        host=files.place.host,
        rank=files.rank,
        local_rank=files.local_rank,
        time=min(now, float(told.get("time", now))),
        message=str(told.get("message", how))[:_MAX_MESSAGE],
        exception=told.get("exception") and str(told["exception"])[:_MAX_MESSAGE],
        traceback=str(told.get("traceback") or read_tail(files.err))[-_MAX_TRACEBACK:] or None,
        exit_code=None if died_of else exit_code,
        signal=died_of,
        phase=told.get("phase", "run"),
        log=str(files.err),
        remedy=_REMEDY if exit_code == 0 else _REMEDY_OF_SIGNAL.get(died_of or ""),
        round=files.round,
    )


def _how_it_exited(code: int, told: Mapping[str, Any], progress: WorkerStatus | None) -> str:
    step = progress.step if progress is not None else None
    at = "" if step is None else f" at step {step}"
    if told.get("phase") == "import":
        when = "while its script was imported"
    else:
        when = "before its function returned"
    handled = f", while it handled {told['while_handling']}" if told.get("while_handling") else ""
    return f"exited with code {code}{at} {when}{handled}"


def _worker_report(error_file: Path) -> dict[str, Any]:
    """Return what the worker itself wrote of its failure; nothing if it had no chance to."""
    try:
        told = parse_json(read_text(error_file), error_file)["hpc_elastic"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return told if isinstance(told, dict) else {}
