"""The event log: everything that happened to a run, one JSON object a line, append only.

Each line has ``time`` (Unix seconds), ``kind``, ``task`` and fields of its kind. Every task writes
its own file, so that nothing is interleaved on a shared file system.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

_LOGGED_CHARS = 500


@dataclass(frozen=True)
class EventLog:
    """Appends the events of one task."""

    path: Path
    task: str

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event. A file system that fails is logged, and costs the event only."""
        self.append([self.line(kind, **fields)])

    def line(self, kind: str, **fields: Any) -> str:
        """Return the line of an event that happens now, for `append`."""
        line = json.dumps({"time": time.time(), "kind": kind, "task": self.task, **fields})
        _log.info("%s", line[:_LOGGED_CHARS])
        return line

    def append(self, lines: Sequence[str]) -> None:
        """Append events. A file system that fails is logged, and costs these events only."""
        try:
            with self.path.open("a") as f:
                f.write("".join(f"{line}\n" for line in lines))
        except OSError as e:
            _log.warning("%s: %d events not written: %s", self.path, len(lines), e)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of all tasks of a run, in order of time; a torn last line is left out."""
    events = [e for path in sorted(folder.glob("*.jsonl")) for e in _lines(path)]
    return sorted(events, key=lambda e: float(e["time"]))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return
