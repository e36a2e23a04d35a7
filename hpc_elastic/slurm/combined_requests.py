"""Tasks of one run that want the same of Slurm at once ask together, through the run's folder.

A preemption of all nodes, or all nodes given back, would be several commands for each of them in
one second. Here one command is for all that want the same just then:

- A question is put by one task, and its answer read by all whose need is older than the question:
  each counts the questions that were put before, and takes the next one's answer.
- The wall time of all tasks is asked for by the first of them that wants to know.
- A requeue is wished for, in a file, by each task that is ready to end. One of them, half a second
  later, takes all wishes that nobody has taken yet, and carries them out; then the same for the
  time at which they may start. Of wishes only those count whose attempt is the one that runs, by
  Slurm's last answer: an agent that was killed over its wish is no reason to end the next one.

What does not come from others within `_PATIENCE_S`, or fails, each does for itself, as a task alone
would. Everything here may be done twice; `create_atomic` decides who does it first.

    <run>/departing/list.<n>        who has put question n; list.<n>.done: the answer
    <run>/departing/wish.<task>@<attempt>
    <run>/departing/limits.<n>      what was left of the time of each task that ran then
    <run>/departing/batch.<n>       whose wishes are taken; .requeued, .postponed: it is done
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.shared_files import (
    create_atomic,
    names_in,
    read_json,
    read_undelegated,
    remove_behind,
    write_atomic,
)
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import Phase, TaskState, job_of, queue_name

_log = logging.getLogger(__name__)

FEWEST = 4
"""Tasks of a run below which each asks for itself."""
_GATHER_S = 0.5
_LOOK_S = 0.1
_PATIENCE_S = 3.0
_LIMITS = "limits"
_MOST = 1000
"""Tasks of an answer that is written down for others."""


class CombinedRequests:
    """The scheduler of a task that is not alone: a `requeue.TaskQueue`.

    Args:
        folder: Of the run, for this.
        client: The caller of Slurm's commands.
        task: The agent's task.
        attempt: How often it was requeued; None: unknown, then it goes alone.
    """

    def __init__(self, folder: Path, client: SlurmClient, task: str, attempt: int | None) -> None:
        self._folder = folder
        self._client = client
        self._task = task
        self._attempt = attempt
        self._listed: dict[str, TaskState] = {}
        self._knows_limit = False
        self._batch: tuple[str, list[str]] | None = None
        """The batch with this task, and those that it carries out; none: others do."""

    def tasks(self, job_ids: Iterable[str]) -> dict[str, TaskState]:
        """Return the tasks of these jobs, as they are from now on."""
        ids = list(dict.fromkeys(job_ids))
        try:
            self._folder.mkdir(exist_ok=True)
            content = self._answer("list-" + "+".join(ids), lambda: _plain(self._client.tasks(ids)))
            found = [TaskState(**state) for state in content["tasks"]]
        except (OSError, ValueError, KeyError, TypeError) as e:
            _log.info("the queue is asked for this task alone: %s", e)
            return self._client.tasks(ids)
        self._listed = {state.task: state for state in found}
        return dict(self._listed)

    def time_left_s(self) -> float | None:
        """Return what is left of this task's wall time; None where it has no end.

        The first call may go by what another task was told at any time since both run, by the
        clocks of two nodes; later ones by what Slurm says from then on.

        Raises:
            SlurmCommandError: Slurm does not answer.
        """
        name = queue_name(self._task)
        if not self._knows_limit:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                known = self._read(f"{_LIMITS}.{_last(_LIMITS, names_in(self._folder))}")
                left_s = known["left_s"][f"{name}@{self._attempt}"]
                self._knows_limit = True
                return None if left_s is None else left_s - (time.time() - known["time"])
        asked_at, listed = time.time(), self.tasks([job_of(name)])
        runs = [state for state in listed.values() if state.phase is Phase.RUNNING]
        if not self._knows_limit and len(runs) <= _MOST:
            left = {f"{state.task}@{state.restarts}": state.time_left_s for state in runs}
            with contextlib.suppress(OSError):
                number = _last(_LIMITS, names_in(self._folder)) + 1
                self._takes(f"{_LIMITS}.{number}", {"time": asked_at, "left_s": left})
                self._remove_before(_LIMITS, number)
        self._knows_limit = True
        return listed[name].time_left_s if name in listed else None

    def requeue(self, task: str) -> None:
        """Send this task back to the queue, with all that are to go there just then."""
        if self._attempt is not None:
            try:
                if self._requeue_together():
                    (self._folder / self._wish).unlink(missing_ok=True)
                    return
            except (OSError, ValueError, SlurmCommandError) as e:
                _log.info("%s is requeued alone: %s", task, e)
        self._batch = None
        self._client.requeue(task)

    def postpone(self, tasks: Sequence[str], delay_s: float) -> None:
        """Let this task, and those that were requeued with it, not start for so long."""
        batch, self._batch = self._batch, None
        if batch is None:
            self._client.postpone(tasks, delay_s)
            return
        name, carried = batch
        with contextlib.suppress(OSError):
            told = None if carried else self._await(f"{name}.postponed")
            if told is not None and told.get("delay_s") == delay_s:
                return
        self._client.postpone(carried or tasks, delay_s)
        if carried:
            with contextlib.suppress(OSError):  # then the others see to themselves
                done = json.dumps({"delay_s": delay_s})
                write_atomic(self._folder / f"{name}.postponed", done)

    def exclude(self, tasks: Sequence[str], hosts: Iterable[str]) -> None:
        """Keep tasks that wait away from some nodes."""
        self._client.exclude(tasks, hosts)

    def cancel(self, tasks: Sequence[str], *, pending_only: bool = False) -> None:
        """Cancel tasks."""
        self._client.cancel(tasks, pending_only=pending_only)

    # ---- through the folder -------------------------------------------------------------

    def _answer(self, kind: str, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return an answer to a question that is put from now on, by whomever."""
        before = _last(kind, names_in(self._folder))
        time.sleep(random.uniform(0.0, _GATHER_S))
        number = _last(kind, names_in(self._folder))
        if number == before:
            number += 1
            if self._takes(f"{kind}.{number}", {}):
                content = ask()
                self._remove_before(kind, number - 1)
                if len(content["tasks"]) <= _MOST:
                    write_atomic(self._folder / f"{kind}.{number}.done", json.dumps(content))
                return content
        return self._await(f"{kind}.{number}.done") or {}

    def _requeue_together(self) -> bool:
        """Return whether this task was requeued, by itself or another."""
        own = self._wish
        (self._folder / own).touch()
        time.sleep(_GATHER_S)
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            names = names_in(self._folder)
            batches = {n: self._read(f"batch.{n}") for n in _numbers("batch", names)}
            taken = {wish for batch in batches.values() for wish in batch.get("wishes", ())}
            mine = [n for n, batch in batches.items() if own in batch.get("wishes", ())]
            if mine:
                self._batch = f"batch.{mine[0]}", []
                return self._await(f"batch.{mine[0]}.requeued") is not None
            number = max(batches, default=0) + 1
            wishes = [own, *(w for w in sorted(names) if w not in taken and self._counts(w, own))]
            if self._takes(f"batch.{number}", {"wishes": wishes}):
                carried = list(dict.fromkeys(queue_name(_task_of(wish)) for wish in wishes))
                self._client.requeue_all(carried)
                self._batch = f"batch.{number}", carried
                self._remove_before("batch", number - 1)
                write_atomic(self._folder / f"batch.{number}.requeued", '{"done": true}')
                return True
        return False

    @property
    def _wish(self) -> str:
        return f"wish.{self._task}@{self._attempt}"

    def _remove_before(self, kind: str, number: int) -> None:
        """Remove what nobody waits for any more; whoever does all the same sees to itself."""
        for name in names_in(self._folder):
            of_kind = name.startswith(f"{kind}.")
            if of_kind and int(name.removeprefix(f"{kind}.").partition(".")[0]) < number:
                remove_behind(self._folder / name)

    def _counts(self, name: str, own: str) -> bool:
        """Tell whether a file is another task's wish for the attempt that runs."""
        if not name.startswith("wish.") or name == own:
            return False
        state = self._listed.get(queue_name(_task_of(name)))
        return state is not None and str(state.restarts) == name.rpartition("@")[2]

    def _takes(self, name: str, content: dict[str, Any]) -> bool:
        token = secrets.token_hex(8)
        return create_atomic(self._folder / name, json.dumps({**content, "token": token}))

    def _await(self, name: str) -> dict[str, Any] | None:
        """Return what somebody writes there soon; None if nobody does."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            if name in names_in(self._folder):
                return self._read(name)
            time.sleep(_LOOK_S)
        return None

    def _read(self, name: str) -> dict[str, Any]:
        return read_json(self._folder / name, read_undelegated) or {}


def _plain(tasks: dict[str, TaskState]) -> dict[str, Any]:
    return {"tasks": [asdict(state) for state in tasks.values()]}


def _task_of(wish: str) -> str:
    return wish.removeprefix("wish.").rpartition("@")[0]


def _numbers(kind: str, names: Iterable[str]) -> list[int]:
    """Return the numbers of the files ``<kind>.<n>``, in order (pure)."""
    found = (name.removeprefix(f"{kind}.") for name in names if name.startswith(f"{kind}."))
    return sorted(int(number) for number in found if number.isdecimal())


def _last(kind: str, names: Iterable[str]) -> int:
    return max(_numbers(kind, names), default=0)
