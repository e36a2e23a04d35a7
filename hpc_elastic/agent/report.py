"""Failed workers as the run's report shows them: what, where, and the traceback."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpc_elastic.agent.signals import name_of

_MAX_REPORTED = 8
_MAX_MESSAGE = 2_000
_MAX_TRACEBACK = 10_000
"""Together less than a frame of `rendezvous.wire`, were every character an escaped one."""

_TAIL_LINES = 20


class ProcessFailure(Protocol):
    """The part of torch's ProcessFailure that is read here."""

    local_rank: int
    exitcode: int


@dataclass(frozen=True)
class WorkerFiles:
    """The files of one worker in one round."""

    folder: Path
    round: int
    rank: int

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
        return self.folder / f"round-{self.round}.rank-{self.rank}.{suffix}"


@dataclass(frozen=True)
class Place:
    """Where an agent's workers run."""

    task: str
    host: str
    logs: Path


def earliest(failures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the failures of one node that its report has room for, the oldest first."""
    return sorted(failures, key=lambda f: -float(f["age_s"]))[:_MAX_REPORTED]


def describe(failure: ProcessFailure, files: WorkerFiles, place: Place) -> dict[str, Any]:
    """Return the fields of `rendezvous.failures.Failure`, with its age in place of its time."""
    told = _told_by_worker(files.error)
    died_of = name_of(-failure.exitcode) if failure.exitcode < 0 else None
    how = f"ended by {died_of}" if died_of else f"exited with code {failure.exitcode}"
    return {
        "task": place.task,
        "host": place.host,
        "rank": files.rank,
        "local_rank": failure.local_rank,
        "age_s": max(0.0, time.time() - float(told.get("time", time.time()))),
        "message": str(told.get("message", how))[:_MAX_MESSAGE],
        "exception": told.get("exception"),
        "traceback": str(told.get("traceback") or _tail(files.err))[-_MAX_TRACEBACK:] or None,
        "exit_code": None if died_of else failure.exitcode,
        "signal": died_of,
        "phase": told.get("phase", "run"),
        "log": str(files.err),
    }


def _told_by_worker(error_file: Path) -> dict[str, Any]:
    """Return what the worker itself wrote of its failure; nothing if it had no chance to."""
    try:
        told = json.loads(error_file.read_text())["hpc_elastic"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return told if isinstance(told, dict) else {}


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-_TAIL_LINES:])
