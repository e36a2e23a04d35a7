"""What the leader writes for others to read: events, status, progress, result.

Status and progress pass through the term folder (`term`), so that none of them comes from a
leader whose term is over. All writes go through one thread, so that a slow shared file system
delays the files and never the heartbeats. What comes while one is under way is written together
afterwards, the newest status alone: so the result, for which every node waits, has never more
than that before it. What the agents decide by is not here but in `decision_log`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from hpc_elastic.rendezvous.log_entry import LogEntry, carried_out
from hpc_elastic.rendezvous.term import RunFiles, TermFolder, TermOverError
from hpc_elastic.run import fencing
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.events import EventLog
from hpc_elastic.shared_files import (
    is_there,
    write_atomic,
)

_log = logging.getLogger(__name__)

_RETRY_S = 1.0


@dataclass
class _Waiting:
    """What is still to be written."""

    events: list[str] = field(default_factory=list)
    status: dict[str, Any] | None = None
    progress: list[dict[str, Any]] = field(default_factory=list)


class StatusWriter:
    """Writes one run's files for its leader.

    Args:
        run: The run.
        run_id: Its id, for the result.
        events: Where the leader's agent writes its events.
        term: The leader's; 0: this agent does not lead, and writes no status.
    """

    def __init__(self, run: RunDir, run_id: str, events: EventLog, term: int) -> None:
        self.is_over = False
        """Whether a later leader was found to write the status."""
        self._run = run
        self._run_id = run_id
        self._events = events
        self._term = TermFolder(term, RunFiles(run))
        self._waiting = _Waiting()
        self._is_called = False
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

    def note(self, kind: str, **fields: Any) -> None:
        """Append an event, in the background."""
        line = self._events.line(kind, **fields)
        with self._handing_over() as waiting:
            waiting.events.append(line)

    def show(self, status: dict[str, Any], lines: Sequence[dict[str, Any]]) -> None:
        """Replace status.json and append lines to progress.jsonl, in the background."""
        with self._handing_over() as waiting:
            waiting.status = {**status, "updated": time.time()}
            waiting.progress += lines

    async def publish(self, entry: LogEntry) -> None:
        """Write result.json unless it is there; the end may be announced once this returns."""
        result = _result(entry, self._run_id)
        loop, number = asyncio.get_running_loop(), entry.index
        while not await loop.run_in_executor(self._thread, self._try_publish, result, number):
            await asyncio.sleep(_RETRY_S)
        self.note(
            "end", status=result["status"], rounds=entry.round, restarts=entry.restarts,
            failure=entry.ending.summary if entry.ending else None,
        )  # fmt: skip

    async def close(self) -> None:
        """Write what was handed over so far, and end the thread."""
        await asyncio.to_thread(self._thread.shutdown)

    @contextlib.contextmanager
    def _handing_over(self) -> Iterator[_Waiting]:
        with self._lock:
            yield self._waiting
            is_called, self._is_called = self._is_called, True
        if not is_called:
            self._thread.submit(self._write)

    # ---- the thread that writes ----------------------------------------------------------

    def _write(self) -> None:
        with self._lock:
            waiting, self._waiting, self._is_called = self._waiting, _Waiting(), False
        if waiting.events:
            self._events.append(waiting.events)
        if waiting.status is not None and not self.is_over:
            self._show(waiting.status, waiting.progress)

    def _show(self, status: dict[str, Any], lines: list[dict[str, Any]]) -> None:
        try:
            carried_out(self._term.show(status, lines))
        except TermOverError as e:
            _log.warning("%s is not written: %s", self._run.status, e)
            self.is_over = True
        except OSError as e:
            _log.error("%s: not written: %s", e.filename2 or e.filename or self._run.status, e)

    def _try_publish(self, result: dict[str, Any], number: int) -> bool:
        try:
            if fencing.last_index(self._run.rdzv) > number:
                return True  # resumed meanwhile: this result is one of the past
        except FileNotFoundError:
            pass  # no entries are kept
        except OSError as e:
            _log.error("%s: not read: %s", self._run.rdzv, e)
            return False
        try:
            if is_there(self._run.result):
                return True
            write_atomic(self._run.result, json.dumps(result, indent=2) + "\n")
        except OSError as e:
            _log.error("%s: not written: %s", self._run.result, e)
            return False
        return True


def _result(entry: LogEntry, run_id: str) -> dict[str, Any]:
    ending = entry.ending
    assert ending is not None
    folder = f"results/{ending.results or f'round-{entry.round}'}"
    return {
        "run_id": run_id, "status": ending.status, "started": entry.started, "ended": time.time(),
        "rounds": entry.round, "restarts": entry.restarts,
        "failure": ending.failure.to_json() if ending.failure else None,
        "secondary_failures": [f.to_json() for f in ending.secondary_failures],
        "results": folder if ending.status == "succeeded" else None,
    }  # fmt: skip
