"""Combined requests to Slurm of tasks of a run that need the same one at the same time.

A preemption of all nodes, or the requeue of all nodes, would be several commands for each of them
in one second. Here one command serves all tasks that need the same, through the run's folder:

- One task sends a query, and all whose need is older than the query read its answer: each counts
  the earlier queries, and takes the next one's answer.
- The wall time of all tasks is queried by the first of them that needs it.
- Each task that is ready to end requests its requeue by a file, a *wish*. One of them, half a
  second later, takes all wishes that are not taken yet, and carries them out; then the same for the
  time at which they may start. A wish counts only if its attempt is the one that runs, by Slurm's
  last answer: an agent that was killed after its wish is no reason to end the next one.

What does not come from others within `_TIMEOUT_S`, or fails, each task does by itself, as a task
alone would. Everything here may be done twice; `create_atomic` decides which task does it first.

    <run>/departing/list.<n>        the task that sends query n; list.<n>.done: the answer
    <run>/departing/wish.<task>@<attempt>
    <run>/departing/limits.<n>      what was left of the time of each task that ran then
    <run>/departing/batch.<n>       the wishes that are taken; .requeued, .postponed: it is done
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_elastic import shared_files
from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.run import job_of, queue_name
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import Phase, TaskState

_log = logging.getLogger(__name__)

FEWEST = 4
"""Tasks of a run below which each sends its own commands."""
_GATHER_S = 0.5
_POLL_S = 0.1
_TIMEOUT_S = 3.0
_MOST = 1000
"""Tasks of the largest answer that is written for others."""


class CombinedRequests:
    """What a task asks of ``slurm`` together with others; alone, if its ``attempt`` is unknown."""

    def __init__(self, folder: Path, slurm: SlurmClient, task: str, attempt: int | None) -> None:
        self._folder = folder
        self.slurm = slurm
        self._task = task
        self._attempt = attempt
        self._listed: dict[str, TaskState] = {}
        self._knows_limit = False
        self._batch: tuple[str, list[str]] | None = None
        """The batch with this task, and the tasks that it carries out; none: another task does."""

    def tasks(self, job_ids: Iterable[str]) -> dict[str, TaskState]:
        """Return the tasks of these jobs, as they are from now on."""
        ids = list(dict.fromkeys(job_ids))
        try:
            shared_files.make_folder(self._folder)
            found = [TaskState(**state) for state in self._list_together(ids)["tasks"]]
        except (OSError, ValueError, KeyError, TypeError) as e:
            _log.info("the queue is queried for this task alone: %s", e)
            return self.slurm.tasks(ids)
        self._listed = {state.task: state for state in found}
        return dict(self._listed)

    def time_left_s(self) -> float | None:
        """Return the seconds left of this task's wall time; None where it has no end.

        The first call may use an answer to another task at any time since both run, by the clocks
        of two nodes; later ones query Slurm. Raises SlurmCommandError if Slurm does not answer.
        """
        name = queue_name(self._task)
        if not self._knows_limit:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                known = self._read(f"limits.{self._last('limits')}")
                left_s = known["left_s"][f"{name}@{self._attempt}"]
                self._knows_limit = True
                return None if left_s is None else left_s - (time.time() - known["time"])
        asked_at, listed = time.time(), self.tasks([job_of(name)])
        runs = [state for state in listed.values() if state.phase is Phase.RUNNING]
        if not self._knows_limit and len(runs) <= _MOST:
            left = {f"{state.task}@{state.restarts}": state.time_left_s for state in runs}
            with contextlib.suppress(OSError):
                number = self._last("limits") + 1
                self._create(f"limits.{number}", {"time": asked_at, "left_s": left})
                self._remove_before("limits", number)
        self._knows_limit = True
        state = listed.get(name)
        return None if state is None or state.has_replaced(self._attempt) else state.time_left_s

    def requeue(self, task: str) -> None:
        """Send this task back to the queue, with all others that request it at the same time."""
        if self._attempt is not None:
            try:
                if self._requeue_together():
                    (self._folder / self._wish).unlink(missing_ok=True)
                    return
            except (OSError, ValueError, SlurmCommandError) as e:
                _log.info("%s is requeued alone: %s", task, e)
        self._batch = None
        self.slurm.requeue(task)

    def postpone(
        self, tasks: Sequence[str], delay_s: float, *, time_limit_s: float | None = None
    ) -> None:
        """Postpone this task and those requeued with it; other pools have limits of their own."""
        batch, self._batch = self._batch, None
        if batch is None:
            self.slurm.postpone(tasks, delay_s, time_limit_s=time_limit_s)
            return
        name, carried = batch
        array = job_of(queue_name(self._task))
        with contextlib.suppress(OSError):
            done = None if carried else self._await(f"{name}.postponed")
            has_limit = time_limit_s is None or (done is not None and done.get("array") == array)
            if done is not None and done.get("delay_s") == delay_s and has_limit:
                return
        others = [task for task in carried if time_limit_s is not None and job_of(task) != array]
        own = [task for task in carried if task not in others]
        self.slurm.postpone(own or tasks, delay_s, time_limit_s=time_limit_s)
        if others:
            self.slurm.postpone(others, delay_s)
        if carried:
            with contextlib.suppress(OSError):  # then the others do it themselves
                self._write(f"{name}.postponed", {"delay_s": delay_s, "array": array})

    # ---- through the folder -------------------------------------------------------------

    def _list_together(self, ids: Sequence[str]) -> dict[str, Any]:
        """Return an answer to a query that is sent from now on, by any task."""
        kind = "list-" + "+".join(ids)
        before = self._last(kind)
        time.sleep(random.uniform(0.0, _GATHER_S))
        number = self._last(kind)
        if number == before:
            number += 1
            if self._create(f"{kind}.{number}", {}):
                content = {"tasks": [asdict(s) for s in self.slurm.tasks(ids).values()]}
                self._remove_before(kind, number - 1)
                if len(content["tasks"]) <= _MOST:
                    self._write(f"{kind}.{number}.done", content)
                return content
        return self._await(f"{kind}.{number}.done") or {}

    def _requeue_together(self) -> bool:
        """Return whether this task was requeued, by itself or another."""
        own = self._wish
        (self._folder / own).touch()
        time.sleep(_GATHER_S)
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            names = self._names()
            numbers = shared_files.numbers_in(names, "batch.")
            batches = {n: self._read(f"batch.{n}") for n in numbers}
            taken = {wish for batch in batches.values() for wish in batch.get("wishes", ())}
            mine = [n for n, batch in batches.items() if own in batch.get("wishes", ())]
            if mine:
                self._batch = f"batch.{min(mine)}", []
                return self._await(f"batch.{min(mine)}.requeued") is not None
            number = max(batches, default=0) + 1
            wishes = [own, *(w for w in sorted(names) if w not in taken and self._counts(w, own))]
            if self._create(f"batch.{number}", {"wishes": wishes}):
                carried = list(dict.fromkeys(queue_name(_task_of(wish)) for wish in wishes))
                self.slurm.requeue_all(carried)
                self._batch = f"batch.{number}", carried
                self._remove_before("batch", number - 1)
                self._write(f"batch.{number}.requeued", {"done": True})
                return True
        return False

    @property
    def _wish(self) -> str:
        return f"wish.{self._task}@{self._attempt}"

    def _remove_before(self, kind: str, number: int) -> None:
        """Remove earlier files; a task that still waits for one sends its own commands then."""
        for name in self._names():
            of_kind, _, rest = name.partition(f"{kind}.")
            if not of_kind and rest and int(rest.partition(".")[0]) < number:
                shared_files.remove_behind(self._folder / name)

    def _counts(self, name: str, own: str) -> bool:
        """Return whether a file is another task's wish for its attempt that runs now."""
        if not name.startswith("wish.") or name == own:
            return False
        state = self._listed.get(queue_name(_task_of(name)))
        return state is not None and str(state.restarts) == name.rpartition("@")[2]

    def _create(self, name: str, content: dict[str, Any]) -> bool:
        text = json.dumps({**content, "token": secrets.token_hex(8)})
        return shared_files.create_atomic(self._folder / name, text)

    def _write(self, name: str, content: dict[str, Any]) -> None:
        shared_files.write_atomic(self._folder / name, json.dumps(content))

    def _names(self) -> frozenset[str]:
        return shared_files.names_in(self._folder)

    def _await(self, name: str) -> dict[str, Any] | None:
        """Return the content of a file as soon as it is there; None after `_TIMEOUT_S`."""
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            if name in self._names():
                return self._read(name)
            time.sleep(_POLL_S)
        return None

    def _last(self, kind: str) -> int:
        """Return the highest n of the files ``<kind>.<n>``; 0 if there is none."""
        return max(shared_files.numbers_in(self._names(), f"{kind}."), default=0)

    def _read(self, name: str) -> dict[str, Any]:
        return shared_files.read_json(self._folder / name, shared_files.read_undelegated) or {}


def _task_of(wish: str) -> str:
    return wish.removeprefix("wish.").rpartition("@")[0]
