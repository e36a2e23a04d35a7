"""What the leader writes into the run directory: its state, the group's status, the result.

All writes go through one thread, in order, so that a slow shared file system delays the files and
never the heartbeats. ``state.json`` carries rounds, restarts and losses over to the next leader.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_elastic.events import EventLog
from hpc_elastic.rendezvous.failures import Failure
from hpc_elastic.rendezvous.machine import Agent, EndRun, Machine, Phase
from hpc_elastic.rundir import RunDir, read_json, write_atomic

_log = logging.getLogger(__name__)


class Journal:
    """Reads and writes one run's files for its leader."""

    def __init__(self, run: RunDir, run_id: str, events: EventLog) -> None:
        self._run = run
        self._run_id = run_id
        self._events = events
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._state_file = run.rdzv / "state.json"

    def restore(self, machine: Machine) -> None:
        """Continue where the leaders before have left off."""
        state = read_json(self._state_file) or {}
        machine.round = int(state.get("round", 0))
        machine.restarts = int(state.get("restarts", 0))
        machine.members = tuple(Agent(**m) for m in state.get("members", []))
        machine.lost = {str(task): int(attempt) for task, attempt in state.get("lost", {}).items()}
        result = read_json(self._run.result)
        if result is not None:
            machine.phase, machine.end = Phase.ENDED, EndRun(str(result["status"]))

    async def round_started(self, machine: Machine, epoch: int) -> None:
        """Record a closed round; it may be announced once this returns."""
        members = [asdict(m) for m in machine.members]
        state = {
            "round": machine.round, "restarts": machine.restarts, "members": members,
            "lost": machine.lost, "started": self._started(),
        }  # fmt: skip
        await self._write(self._state_file, state)
        self.note(
            "round", number=machine.round, epoch=epoch, nodes=len(members),
            world_size=sum(m.nproc for m in machine.members), members=members,
            restarts=machine.restarts,
        )  # fmt: skip

    def note(self, kind: str, **fields: Any) -> None:
        """Append an event, in the background."""
        self._thread.submit(self._events.write, kind, **fields)

    def status(self, status: dict[str, Any]) -> None:
        """Replace status.json, in the background."""
        self._thread.submit(self._try_write, self._run.status, {**status, "updated": time.time()})

    async def ended(self, machine: Machine, end: EndRun) -> None:
        """Write result.json; the end may be announced once this returns."""
        if self._run.result.exists():
            return
        succeeded = end.status == "succeeded"
        result = {
            "run_id": self._run_id, "status": end.status,
            "started": self._started(), "ended": time.time(),
            "rounds": machine.round, "restarts": machine.restarts,
            "failure": _failure(end.failure), "victims": [f.to_json() for f in end.victims],
            "results": f"results/round-{machine.round}" if succeeded else None,
        }  # fmt: skip
        await self._write(self._run.result, result)
        self.note("end", status=end.status, rounds=machine.round, restarts=machine.restarts)

    async def close(self) -> None:
        """Write what was handed over so far, and end the thread."""
        await asyncio.to_thread(self._thread.shutdown)

    def _started(self) -> float:
        state = read_json(self._state_file) or {}
        return float(state.get("started", time.time()))

    async def _write(self, path: Path, value: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._try_write, path, value)

    @staticmethod
    def _try_write(path: Path, value: dict[str, Any]) -> None:
        try:
            write_atomic(path, json.dumps(value, indent=2) + "\n")
        except OSError as e:
            _log.error("%s: not written: %s", path, e)


def _failure(failure: Failure | None) -> dict[str, Any] | None:
    return failure.to_json() if failure else None
