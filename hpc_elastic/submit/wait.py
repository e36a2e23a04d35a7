"""Wait until every run has ended, from their files; the scheduler is asked seldom, for all at once.

A run has ended when its result.json is there. If all its tasks have left the queue and it is
not, nobody is left to write it: after a grace period (the file may be on its way through a
network file system) the run counts as lost. `judge` decides that; `Waiter` looks and remembers.

A read that fails says nothing of the run: on NFS a file that is replaced every second may be stale
before it is read, and a server may be away for minutes. The run is looked at again.

The files of a run say nearly everything, so they are read at every poll. The scheduler is asked
once in `ASK_S` while something is expected of it: tasks wait, or a group has changed, or the leader
has stopped writing. While every run has a leader it is asked once in `ASK_LED_S`, for the leaders
of those that form a group ask it themselves, and once in `ASK_SETTLED_S` while all train. It never
spends more than `ANSWER_SHARE` of the time on the answers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hpc_elastic.agent.gang import states_of
from hpc_elastic.errors import SlurmError
from hpc_elastic.events import Event, EventReader
from hpc_elastic.files import read_json
from hpc_elastic.mount import Mount
from hpc_elastic.rundir import STATUS_SELDOM_S, RunDir
from hpc_elastic.slurm.reasons import remedy
from hpc_elastic.slurm.states import Phase, TaskState
from hpc_elastic.submit.backend import Handle, TrackedRun
from hpc_elastic.submit.outcome import Outcome, log_tails, lost, read_outcome
from hpc_elastic.submit.progress import Display, Row, row_of

GRACE_S = 5.0
"""How long a result may be on its way after the last task has gone."""
ASK_S = 4.0
"""Seconds between two questions to the scheduler while something is expected to change."""
ASK_LED_S = 12.0
"""Seconds between two questions while the leaders of all runs write, and no group has changed."""
ASK_SETTLED_S = 60.0
"""Seconds between two questions while every run trains and its leader writes."""
ANSWER_SHARE = 0.05
"""The share of the time that the scheduler may take to answer."""
FRESH_S = 5.0
"""A leader writes status.json about once a second, or every `STATUS_SELDOM_S` and that much later;
after this time it is expected to be gone."""
UNREADABLE_S = 30.0
"""How long a run may be unreadable before the user is told."""

_LONGEST_ERROR = 600
"""Characters of a failed worker's error at most: the run's log files hold all of it."""

Verdict = Literal["going", "gone", "lost"]


def judge(
    states: Iterable[TaskState], *, gone_since: float | None, now: float, grace_s: float = GRACE_S
) -> Verdict:
    """Say what has become of a run that has left no result so far (pure).

    Args:
        states: Its tasks, as far as the scheduler still lists them.
        gone_since: When it was first seen without a task that runs or will; None if it was not.
        now: On the same clock.
        grace_s: How long its result may be on its way.
    """
    if any(state.phase is not Phase.ENDED for state in states):
        return "going"
    gone_for = 0.0 if gone_since is None else now - gone_since
    return "lost" if gone_for > grace_s else "gone"


@dataclass
class _Memory:
    """What is remembered of one run between two looks."""

    gone_since: float | None = None
    last_seen: dict[str, str] = field(default_factory=dict)
    warned: bool = False
    stuck: frozenset[str] = frozenset()
    unreadable: tuple[float, OSError] | None = None
    """Since when, and why; None if the last look went well."""
    num_restarts_told: int = 0
    restarts: dict[int, Event] = field(default_factory=dict)
    """The ``restart`` events read so far, by their number."""
    events: EventReader | None = None
    updated: object = None
    """The time in the status that was read last, by the leader's clock."""
    updated_at: float = -math.inf
    """When that was first read, by ours."""
    group: tuple[object, ...] = ()
    """The phase, the number of nodes and of those that wait, in that status."""
    group_since: float = -math.inf
    """When they were first read."""

    def note(self, status: Mapping[str, Any], now: float) -> None:
        """Remember what status.json says, and since when."""
        if status.get("updated") != self.updated:
            self.updated, self.updated_at = status.get("updated"), now
        group = tuple(status.get(name) for name in ("phase", "nodes", "joined"))
        if group != self.group:
            self.group, self.group_since = group, now

    def pause_s(self, asked_at: float, now: float, fresh_s: float) -> float:
        """Return the time between two questions to the scheduler, for the sake of this run.

        Args:
            asked_at: When the scheduler was asked last.
            now: The time.
            fresh_s: So old the status of a leader that lives may be.
        """
        if self.gone_since is not None:
            return 0.0  # for `GRACE_S`: the run is lost, or its tasks come back
        if now - self.updated_at >= fresh_s or self.group_since > asked_at:
            return ASK_S
        return ASK_SETTLED_S if self.group[0] == "training" else ASK_LED_S


class Waiter:
    """Looks after the runs of one submission.

    Args:
        handle: The submission.
        runs: Its runs.
        display: Shows progress and messages.
        poll_s: Interval between two looks.
        clock: Seconds, monotonic.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        handle: Handle,
        runs: Sequence[TrackedRun],
        display: Display,
        *,
        poll_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._handle = handle
        self._runs = list(runs)
        self._display = display
        self._poll_s = poll_s
        self._clock = clock
        self._sleep = sleep
        self._outcomes: dict[int, Outcome] = {}
        self._rows: dict[int, Row] = {}
        self._memory = [_Memory() for _ in self._runs]
        seldom = any(not Mount.of(run.dir).is_local for run in self._runs[:1])
        self._fresh_s = FRESH_S + seldom * STATUS_SELDOM_S
        self._asked_at, self._answer_s = -math.inf, 0.0
        self._silent = ""
        self._blind = False

    def wait(self) -> list[Outcome]:
        """Block until every run has ended; return how, in the order of the runs."""
        while True:
            self.look()
            if len(self._outcomes) == len(self._runs):
                return [self._outcomes[number] for number in range(len(self._runs))]
            self._sleep(self._poll_s)

    def look(self) -> None:
        """Poll once: the scheduler if it is time, then the files of every run that goes on."""
        tasks = self._ask() if self._is_time_to_ask() else None
        for number, run in enumerate(self._runs):
            if number not in self._outcomes:
                self._look_at(number, run, tasks)
        self._tell_of_unreadable()
        self._display.show([self._rows[number] for number in sorted(self._rows)])

    def _is_time_to_ask(self) -> bool:
        now = self._clock()
        going = [m for n, m in enumerate(self._memory) if n not in self._outcomes]
        pause_s = min((m.pause_s(self._asked_at, now, self._fresh_s) for m in going), default=0.0)
        pause_s = max(pause_s, self._answer_s / ANSWER_SHARE)
        return now - self._asked_at >= pause_s

    def _ask(self) -> Mapping[str, TaskState] | None:
        """Return what the scheduler lists; None while it does not answer, said once."""
        self._asked_at = self._clock()
        try:
            tasks = self._handle.tasks()
        except (SlurmError, OSError) as e:
            slurm = isinstance(e, SlurmError)
            if not self._silent:
                what = "Slurm does not answer" if slurm else "the tasks can not be looked up"
                self._display.say(f"{what}, the runs are not affected: {e}")
            self._silent = "Slurm answers again" if slurm else "the tasks can be looked up again"
            return None
        finally:
            self._answer_s = self._clock() - self._asked_at
        if self._silent:
            self._display.say(self._silent)
        self._silent = ""
        return tasks

    def _look_at(
        self, number: int, run: TrackedRun, listed: Mapping[str, TaskState] | None
    ) -> None:
        states = None if listed is None else list(states_of(run.tasks, listed).values())
        outcome = self._outcome_of(run, self._memory[number], states)
        if outcome is not None:
            self._outcomes[number] = outcome
        before, status = self._rows.get(number), _status(run.paths)
        self._rows[number] = row_of(run, status, states, outcome, before)
        if status is not None:
            self._memory[number].note(status, self._clock())
            self._tell_of_restarts(run, self._memory[number], status)

    def _outcome_of(
        self, run: TrackedRun, memory: _Memory, states: list[TaskState] | None
    ) -> Outcome | None:
        """Return how a run ended; None if it has not, or nobody can say at the moment."""
        try:
            outcome = read_outcome(run)
            if outcome is None and states is not None:
                outcome = self._missing(run, memory, states)
        except OSError as e:
            since = memory.unreadable[0] if memory.unreadable else self._clock()
            memory.unreadable = (since, e)
            return None
        memory.unreadable = None
        return outcome

    def _tell_of_unreadable(self) -> None:
        """Say once that runs can not be read for long, and once that they all can again."""
        found = [memory.unreadable for memory in self._memory if memory.unreadable]
        errors = [error for since, error in found if self._clock() - since >= UNREADABLE_S]
        if errors and not self._blind:
            what = f"{len(errors)} of {len(self._runs)} runs can not be read, and may have ended"
            self._display.say(f"{what}; they are looked at again and again: {errors[0]}")
            self._blind = True
        elif self._blind and not found:
            self._display.say("the runs can be read again")
            self._blind = False

    def _tell_of_restarts(
        self, run: TrackedRun, memory: _Memory, status: Mapping[str, Any]
    ) -> None:
        """Print the error behind each restart, once.

        The events are read only when status.json counts a restart that was not told yet. A file
        system that shows them late is asked again at the next look.
        """
        spent, allowed = int(status.get("restarts") or 0), status.get("max_restarts")
        if spent <= memory.num_restarts_told:
            return
        memory.events = memory.events or EventReader(run.paths.event_logs)
        try:
            _note_restarts(memory.restarts, memory.events.new())
        except OSError:
            return
        while (event := memory.restarts.get(memory.num_restarts_told + 1)) is not None:
            memory.num_restarts_told += 1
            error = str(event.get("failure") or "")
            shown = error if len(error) <= _LONGEST_ERROR else f"{error[:_LONGEST_ERROR]}..."
            count = f"restart {memory.num_restarts_told} of {allowed}"
            self._display.say(f"[{run.name}] {run.label}".rstrip() + f": {count}: {shown}")

    def _missing(self, run: TrackedRun, memory: _Memory, states: list[TaskState]) -> Outcome | None:
        """Return the outcome of a run that has no result; None if one may still come."""
        memory.last_seen.update({state.task: _describe(state) for state in states})
        self._warn(memory, run, states)
        self._warn_of_stuck(memory, run, states)
        verdict = judge(states, gone_since=memory.gone_since, now=self._clock(), grace_s=GRACE_S)
        if verdict == "going":
            memory.gone_since = None
        elif memory.gone_since is None:
            memory.gone_since = self._clock()
        return lost(run, memory.last_seen) if verdict == "lost" else None

    def _warn(self, memory: _Memory, run: TrackedRun, states: Iterable[TaskState]) -> None:
        """Tell of the first task that failed while others wait: they may wait for hours."""
        failed = [state for state in states if state.state == "FAILED"]
        if failed and not memory.warned:
            memory.warned = True
            head = f"task {failed[0].task} of {run.label or run.name} failed"
            self._display.say("\n".join([head, *log_tails(run, 1)]))

    def _warn_of_stuck(self, memory: _Memory, run: TrackedRun, states: Iterable[TaskState]) -> None:
        """Tell once of each reason for which tasks would wait for ever."""
        waiting = {s.reason: s.task for s in states if s.state == "PENDING" and remedy(s.reason)}
        for reason in sorted(waiting.keys() - memory.stuck):
            head = f"task {waiting[reason]} of {run.label or run.name} will not start by itself"
            self._display.say(f"{head} ({reason}): {remedy(reason)}")
        memory.stuck |= waiting.keys()


def _note_restarts(restarts: dict[int, Event], events: Iterable[Event]) -> None:
    """Add the ``restart`` events by number; a resumed run counts its restarts from 0 again."""
    for event in events:
        if event["kind"] == "resume":
            restarts.clear()
        elif event["kind"] == "restart":
            restarts[int(event["restarts"])] = event


_SHOWN: dict[str, tuple[type, ...]] = {
    "phase": (str,),
    "updated": (int, float),
    **dict.fromkeys(("nodes", "joined", "step", "total_steps"), (int,)),
    **dict.fromkeys(("restarts", "max_restarts"), (int,)),
    **dict.fromkeys(("loss", "steps_per_s"), (int, float)),
}
"""What is shown of status.json, and of what type it is."""


def _status(run: RunDir) -> dict[str, Any] | None:
    """Return what is shown of the run's status.json, as far as it is what it should be.

    Returns:
        None if there is none, or it cannot be read just now.
    """
    try:
        status = read_json(run.status)
    except OSError:
        return None
    if status is None:
        return None
    return {n: status[n] for n, kind in _SHOWN.items() if isinstance(status.get(n), kind)}


def _describe(state: TaskState) -> str:
    return f"{state.state} ({state.reason})" if state.reason else state.state
