"""Status writer: the files that a leader writes for readers: events, status, progress, result.

The status and the progress pass through the term folder (`term`), so that no leader whose term is
over writes them. One thread does all writes, so a slow shared file system delays the files and
never the heartbeats. Items that arrive during a write are written together after it, and of several
statuses only the newest. So at most one write precedes the result, for which every node waits. The
agents decide by `decision_log`, not by these files.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from hpc_elastic.rendezvous.log_entry import LogEntry
from hpc_elastic.rendezvous.term import RunFiles, TermFolder, TermOverError
from hpc_elastic.run import fencing
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.events import EventLog
from hpc_elastic.shared_files import carried_out, is_there, write_atomic

_log = logging.getLogger(__name__)

_RETRY_S = 1.0


class StatusWriter:
    """Writes a run's files for its leader; with ``term`` 0, for no leader, it writes no status."""

    def __init__(self, run: RunDir, run_id: str, events: EventLog, term: int) -> None:
        self.is_over = False
        """Whether a write has found that a later leader writes the status."""
        self._run = run
        self._run_id = run_id
        self._event_log = events
        self._term = TermFolder(term, RunFiles(run))
        self._events: list[str] = []
        self._status: dict[str, Any] | None = None
        self._progress: list[dict[str, Any]] = []
        self._is_scheduled = False
        self._lock = threading.Lock()
        """Guards the four fields above: what is not written yet."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

    def append_event(self, kind: str, **fields: Any) -> None:
        """Append an event, in the background."""
        line = self._event_log.line(kind, **fields)
        with self._lock:
            self._events.append(line)
            self._schedule_write()

    def write_status(self, status: dict[str, Any], lines: Sequence[dict[str, Any]]) -> None:
        """Replace status.json and append lines to progress.jsonl, in the background."""
        with self._lock:
            self._status = {**status, "updated": time.time()}
            self._progress += lines
            self._schedule_write()

    async def publish_result(self, entry: LogEntry) -> None:
        """Write result.json unless it is there; announce the end of the run after this returns."""
        ending = entry.ending
        assert ending is not None
        folder = f"results/{ending.results or f'round-{entry.round}'}"
        values = asdict(ending)
        result = {
            "run_id": self._run_id, "status": ending.status, "started": entry.started,
            "ended": time.time(), "rounds": entry.round, "restarts": entry.restarts,
            "failure": values["failure"], "secondary_failures": values["secondary_failures"],
            "results": folder if ending.status == "succeeded" else None,
        }  # fmt: skip
        text = json.dumps(result, indent=2) + "\n"
        loop = asyncio.get_running_loop()
        while not await loop.run_in_executor(self._thread, self._try_publish, text, entry.index):
            await asyncio.sleep(_RETRY_S)
        self.append_event(
            "end", status=ending.status, rounds=entry.round, restarts=entry.restarts,
            failure=ending.summary,
        )  # fmt: skip

    async def close(self) -> None:
        """Write everything that is not written yet, and end the thread."""
        await asyncio.to_thread(self._thread.shutdown)

    def _schedule_write(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._thread.submit(self._write)

    # ---- the thread that writes ----------------------------------------------------------

    def _write(self) -> None:
        with self._lock:
            events, status, lines = self._events, self._status, self._progress
            self._events, self._status, self._progress = [], None, []
            self._is_scheduled = False
        if events:
            self._event_log.append(events)
        if status is None or self.is_over:
            return
        try:
            carried_out(self._term.show(status, lines))
        except TermOverError as e:
            _log.warning("%s is not written: %s", self._run.status, e)
            self.is_over = True
        except OSError as e:
            _log.error("%s: not written: %s", e.filename2 or e.filename or self._run.status, e)

    def _try_publish(self, result: str, index: int) -> bool:
        try:
            if fencing.last_index(self._run.rdzv) > index:
                return True  # the run was resumed since: the result is out of date
        except FileNotFoundError:
            pass  # no entries are kept
        except OSError as e:
            _log.error("%s: not read: %s", self._run.rdzv, e)
            return False
        try:
            if not is_there(self._run.result):
                write_atomic(self._run.result, result)
        except OSError as e:
            _log.error("%s: not written: %s", self._run.result, e)
            return False
        return True
