"""Requeue back-off of waiting nodes, and recovery of lost tasks (pure).

Nodes that are too few, or that the group does not admit, wait for ``below_min_timeout_s`` times a
random factor of 1 to 2. Then they stay in the queue for a random time. The range of the factor
grows each time the run requeues all its nodes, up to `LONGEST_WAIT`. Of two runs that hold half of
the nodes each, one gives way: the tasks of the other run are in the queue meanwhile, and get its
nodes. A short time in the queue is enough for that. It doubles nevertheless, up to ten minutes, so
that the tasks of a run that finds no nodes for days rarely start.

Nodes go back after about `SURE_S` if other runs of the user hold what they lack. They stay longer
in the queue, because those runs let them start as soon as there are nodes (`site.siblings`).

Without ``below_min_timeout_s`` nodes are kept. They are also kept if one of their tasks has used up
its ``max_requeues``: the task would end, and perhaps the run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from hpc_elastic.rendezvous.effects import Effect, Note, Postpone, Send, hosts_of
from hpc_elastic.rendezvous.log_entry import Agent, Failure, RoundRules
from hpc_elastic.rendezvous.messages import Requeue
from hpc_elastic.run import queue_name
from hpc_elastic.slurm.job_state import Phase, TaskState, remedy_of_end

SURE_S = 5.0
"""A wait must be pointless for this long before the run requeues its nodes: for some seconds Slurm
reports tasks of a run as running that has ended."""
AWAY_S = 15.0  # mean time that requeued nodes stay away for the first time
_AWAY_IN_SWEEP_S = 60.0
_LONGEST_AWAY_S, _DOUBLINGS = 600.0, 10
LONGEST_WAIT = 5.0  # nodes below min nodes wait at most this many times ``below_min_timeout_s``
_UNLIMITED_S = 1e9
_SHORTEST_AWAY_S = 10.0  # lower limit for the task of a faulty node


@dataclass
class RequeueBackoff:
    """Requeued nodes, and when to requeue more; monotonic seconds."""

    rules: RoundRules
    rng: random.Random = field(default_factory=random.Random)
    times_requeued: int = 0  # how often the run has requeued all its nodes since its last round
    requeued: dict[str, int] = field(default_factory=dict)  # task -> attempt that was requeued
    last_delay_s: float = 0.0  # delay of the last requeue of all nodes
    _wait_factor: float = field(init=False)
    _pointless_since: float | None = None

    def __post_init__(self) -> None:
        self._wait_factor = self.rng.uniform(1.0, min(2.0 + self.times_requeued, LONGEST_WAIT))

    def may_requeue(self, agents: Iterable[Agent]) -> bool:
        """Return whether the tasks of all these agents may go back to the queue."""
        most = self.rules.max_requeues
        return most is None or all(agent.attempt < most for agent in agents)

    def is_over(self, waited_s: float, *, longest: bool = False) -> bool:
        """Return whether nodes have waited long enough; ``longest``: as long as any may wait."""
        wait = self.rules.below_min_timeout_s
        factor = LONGEST_WAIT if longest else self._wait_factor
        return wait is not None and waited_s >= wait * factor

    def is_pointless(self, why: str | None, now: float) -> bool:
        """Return whether the wait has been pointless for `SURE_S`; ``why`` is None if it is not."""
        if why is None:
            self._pointless_since = None
        elif self._pointless_since is None:
            self._pointless_since = now
        return self._pointless_since is not None and now - self._pointless_since >= SURE_S

    def time_away(self, base_s: float = AWAY_S) -> float:
        """Return a random time for which nodes stay away that are requeued now."""
        longest_s = min(_LONGEST_AWAY_S, base_s * 2.0 ** min(self.times_requeued, _DOUBLINGS))
        return longest_s * self.rng.uniform(0.5, 1.5)

    def requeue(self, agents: tuple[Agent, ...], delay_s: float | None = None) -> list[Effect]:
        """Requeue nodes for a time; None: for `time_away`."""
        return self._requeue(agents, self.time_away() if delay_s is None else delay_s, all=False)

    def requeue_faulty(self, agents: tuple[Agent, ...]) -> list[Effect]:
        """Requeue nodes that are to blame for failures: their tasks start elsewhere."""
        return self.requeue(agents, max(_SHORTEST_AWAY_S, self.time_away()))

    def requeue_all(self, agents: tuple[Agent, ...], why: str = "") -> list[Effect]:
        """Requeue all nodes, and postpone the start of the run's tasks.

        ``why`` states that their wait is pointless; it is empty if they have waited too long.
        """
        self.last_delay_s = self.time_away(_AWAY_IN_SWEEP_S if why else AWAY_S)
        self.times_requeued += 1
        fields = {"why": why} if why else {}
        note, send = self._requeue(agents, self.last_delay_s, all=True, **fields)
        return [note, Postpone(self.last_delay_s), send]

    def _requeue(self, agents: tuple[Agent, ...], delay_s: float, **fields: object) -> list[Effect]:
        self.requeued |= {a.task: a.attempt for a in agents}
        named = {"nodes": len(agents), "hosts": hosts_of(agents)}
        note = Note("nodes_requeued", {**named, **fields, "delay_s": round(delay_s, 1)})
        return [note, Send(agents, Requeue(delay_s))]


def longest_join_s(join_timeout_s: float, below_min_timeout_s: float | None) -> float:
    """Return how long an agent waits for a round: longer than the leader, which requeues it."""
    if below_min_timeout_s is None:
        return _UNLIMITED_S
    return max(join_timeout_s, (LONGEST_WAIT + 1.0) * below_min_timeout_s)


CONFIRM_LOST_S = 2.0
"""A requeue changes the task's start time more than once while its last attempt ends."""
AGAIN_S = 15.0
GIVE_UP_S = 60.0

START_TRIES, OUTAGE_TRIES = 3, 8
_OUTAGE_PAUSE_S, _LONGEST_OUTAGE_PAUSE_S = 60.0, 600.0

_Attempt = tuple[str, str, int | None]  # a task, its state in Slurm, and how often it was requeued


@dataclass(frozen=True)
class FailedStart:
    """An attempt of a task that ended before its agent joined.

    ``hosts`` are those where the task has failed so in a row, the last one last; empty if unknown.
    After ``is_last`` the task is not tried again.
    """

    state: TaskState
    hosts: tuple[str, ...]
    is_last: bool


@dataclass
class LostTaskRecovery:
    """The lost tasks of a run; monotonic seconds of the leader.

    Slurm holds a task that it requeues for two minutes, even on an idle cluster. It may not requeue
    a task at all that it ended because of a preemption, the time limit or a dead node, nor a task
    whose agent was killed. A task that exits cleanly requeues itself. The leader *restarts* any
    other: once Slurm has reported it so for ``CONFIRM_LOST_S``, and again every ``AGAIN_S`` until
    it moves, since a command to Slurm may be lost. Tasks that the run itself requeued stay away,
    unless Slurm reports that they have ended: the node died before the agent requested the next
    attempt of its task.

    A restarted task that has not moved for ``GIVE_UP_S`` has ended for good.

    A task may fail before its agent joins: its node cannot write its log, lacks the Python
    environment, or has no memory left. Slurm then reports it as FAILED, or holds it for good. The
    leader restarts it too, on another node (`failure_policy`), until it has failed ``START_TRIES``
    times in a row: a failure on every node is not the fault of a node. A new leader counts from
    zero. A run that has trained shows that its tasks can start: the file system may be away, for
    instance. So its tasks are tried ``OUTAGE_TRIES`` times more on any node, with growing pauses,
    in an hour.

    The end of an attempt is unknown if its heartbeats stopped, or if Slurm reported its end while
    its agent still sent messages. It may still run on its node, and the task must not start there
    yet (`hpc_elastic.slurm.requeue`).
    """

    possibly_alive: dict[str, str] = field(default_factory=dict)
    """Task -> the node where it may still run, since its end is unknown."""
    max_requeues: int | None = None
    """How often a task may go back to the queue; None: without limit."""
    has_trained: bool = False  # whether the run has had a round
    are_awaited: bool = False  # whether to query Slurm about some of them
    _over: frozenset[str] = frozenset()  # tasks that have ended for good
    _failed: dict[str, _Attempt] = field(default_factory=dict)
    """Task -> its last attempt that failed before its agent joined."""
    _places: dict[str, int | str] = field(default_factory=dict)
    """Task -> its place, of those that failed so."""
    _tries: dict[int | str, list[str]] = field(default_factory=dict)
    """Place of a task -> the hosts of its failed starts in a row; "" if unknown."""
    _seen: dict[_Attempt, float] = field(default_factory=dict)
    """Since when Slurm reports an attempt that the leader has to restart."""
    _restarted: dict[_Attempt, float] = field(default_factory=dict)  # time of the first restart
    _last_tried: dict[_Attempt, float] = field(default_factory=dict)  # time of the last restart

    @property
    def are_due(self) -> bool:
        """Whether some are to be restarted as soon as Slurm confirms their state."""
        return bool(self._seen)

    @property
    def num_over(self) -> int:
        """How many tasks have ended for good."""
        return len(self._over)

    def on_join(self, agent: Agent) -> None:
        """Record that an agent has joined: the start of its task has not failed."""
        self._failed.pop(agent.task, None)
        self._tries.pop(agent.slot, None)
        self._tries.pop(agent.task, None)

    def failed_starts(
        self, view: Mapping[str, TaskState], lost: Mapping[str, int], here: Mapping[str, int]
    ) -> list[FailedStart]:
        """Return, once, the attempts that failed before they joined (``lost``: see `last_here`).

        ``here`` has, by task, the attempt that is connected.
        """
        found: list[FailedStart] = []
        for task, state in view.items():
            failed = start_failed(state, lost.get(task), here.get(task))
            if not failed or self._failed.get(task) == _attempt(state):
                continue
            self._failed[task] = _attempt(state)
            self._places[task] = _place(state)
            self._tries.setdefault(_place(state), []).append(state.node)
            is_last = self._is_spent(state) or not self._is_retried(state)
            found.append(FailedStart(state, self.tried_hosts(task), is_last))
        return found

    def tried_hosts(self, task: str) -> tuple[str, ...]:
        """Return the hosts on which a task has failed in a row before it joined."""
        tries = self._tries.get(self._places.get(task, task), ())
        return tuple(dict.fromkeys(filter(None, tries)))

    def failed_on(self, tasks: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return those of the tasks that failed before they joined, each with the hosts."""
        failed = (task for task in tasks if task in self._failed)
        return {t: self.tried_hosts(t) if self._num_tries(t) < START_TRIES else () for t in failed}

    def _num_tries(self, task: str) -> int:
        return len(self._tries.get(self._places.get(task, task), ()))

    def update_awaited(self, lost: Collection[str]) -> None:
        """Update ``are_awaited`` after a round has closed or Slurm has answered."""
        self.are_awaited = bool(self.awaited_tasks(lost))

    def awaited_tasks(self, lost: Collection[str]) -> tuple[str, ...]:
        """Return the lost tasks that may yet come back."""
        return tuple(task for task in lost if task not in self._over)

    def tasks_to_restart(
        self,
        view: Mapping[str, TaskState],
        lost: Mapping[str, int],
        requeued: Mapping[str, int],
        now: float,
    ) -> tuple[str, ...]:
        """Return the tasks to restart now; ``view`` is Slurm's answer, empty if there is none.

        By task, ``lost`` has the attempt that was lost, ``requeued`` the one that the run has
        requeued.
        """
        if not view:
            return ()
        last = last_here(lost, requeued)
        stuck = {
            _attempt(state)
            for task, state in view.items()
            if self._is_stuck(task, state, lost.get(task, -1), requeued.get(task, -1))
        }
        self._restarted = {key: at for key, at in self._restarted.items() if key in stuck}
        self._last_tried = {key: at for key, at in self._last_tried.items() if key in stuck}
        for key in stuck:
            if (num_more := self._num_tries(key[0]) - START_TRIES) >= 0:
                pause_s = min(_OUTAGE_PAUSE_S * 2.0**num_more, _LONGEST_OUTAGE_PAUSE_S)
                self._last_tried.setdefault(key, now + pause_s - AGAIN_S)
        given_up = {k for k in stuck if now - self._restarted.get(k, now) >= GIVE_UP_S}
        tried = {k for k in stuck if now - self._last_tried.get(k, -math.inf) < AGAIN_S}
        self._seen = {key: self._seen.get(key, now) for key in stuck - given_up - tried}
        sure = {key for key, since in self._seen.items() if now - since >= CONFIRM_LOST_S}
        for key in sure:
            del self._seen[key]
        self._restarted = {**dict.fromkeys(sure, now), **self._restarted}
        self._last_tried |= dict.fromkeys(sure, now)
        ended = {
            task
            for task, state in view.items()
            if state.phase is Phase.ENDED and not self._may_return(state, last.get(task))
        }
        self._over = frozenset(ended.union(task for task, _, _ in given_up))
        self.update_awaited(lost)
        return tuple(sorted(task for task, _, _ in sure))

    def returning_tasks(self, view: Mapping[str, TaskState], lost: Mapping[str, int]) -> set[str]:
        """Return the tasks that have ended, and may yet run again (``lost``: see `last_here`)."""
        left = ((task, state) for task, state in view.items() if task not in self._over)
        return {task for task, state in left if self._may_return(state, lost.get(task))}

    def _is_retried(self, state: TaskState) -> bool:
        """Return whether this attempt failed before it joined, and the task is tried elsewhere."""
        failed = self._failed.get(state.task) == _attempt(state)
        most = START_TRIES + (OUTAGE_TRIES if self.has_trained else 0)
        return failed and len(self._tries.get(_place(state), ())) < most

    def _is_spent(self, state: TaskState) -> bool:
        """Return whether a task has ended, and may not be requeued any more."""
        spent = self.max_requeues is not None and (state.restarts or 0) >= self.max_requeues
        return spent and state.phase is Phase.ENDED

    def _may_return(self, state: TaskState, lost_attempt: int | None) -> bool:
        """Return whether a task has ended that may be requeued or replaced: it is not at fault.

        Slurm reports a lost attempt as FAILED if its agent was killed.
        """
        if self._is_spent(state):
            return False
        killed = state.state in _KILLED and is_lost(state, lost_attempt)
        return killed or state.state in _NOT_ITS_FAULT or self._is_retried(state)

    def _is_stuck(self, task: str, state: TaskState, lost: int, requeued: int) -> bool:
        """Return whether a task does not run again unless the leader restarts it."""
        if state.phase is Phase.ENDED:
            return self._may_return(state, max(lost, requeued)) and queue_name(task) == task
        if state.is_launch_held:
            return self._is_retried(state)
        return requeued < lost and state.is_held and not is_lost(state, lost)


def last_here(lost: Mapping[str, int], requeued: Mapping[str, int]) -> dict[str, int]:
    """Return the last attempt of each task that was connected, and was lost or requeued."""
    return {task: max(lost.get(task, -1), requeued.get(task, -1)) for task in {**lost, **requeued}}


def _attempt(state: TaskState) -> _Attempt:
    return state.task, state.state, state.restarts


def _place(state: TaskState) -> int | str:
    """Return what a task and another that was submitted in its place have in common."""
    return state.task if state.slot is None else state.slot


_SLURM_FIRST_S, _SLURM_LONGEST_S, _SLURM_SHARE = 0.5, 60.0, 10.0
_LONGER = 2.0
_GENTLY_S = 5.0
_HURRIED_S = 10.0
_TASKS_PER_S = 5000


@dataclass
class SlurmPollSchedule:
    """Times of a leader's queries of the tasks of a run; its monotonic seconds.

    It queries at once when a round begins to form, then less and less often, but soon after an
    agent has joined. The interval is longer from the start (*gently*) if only a lost task depends
    on the answer. Many agents that join cause no more queries than one. To limit the load on
    slurmctld, the leader waits at least ten times the latency of the last answer, and queries at
    most five thousand tasks a second.
    """

    about: object = None  # subject of the last query: another forming is queried at once
    queried_at: float | None = None  # time of the query that is not answered yet
    pause_s: float = _SLURM_FIRST_S
    is_hurried: bool = False
    hurried_at: float = -math.inf  # time of the last hurried query
    due: float = 0.0
    not_before: float = 0.0

    def hurry(self) -> None:
        """Query soon after a change: the first times at once, then every `_HURRIED_S`."""
        self.due = min(self.due, self.hurried_at + min(self.pause_s, _HURRIED_S))
        self.is_hurried = True

    def query_within(self, pause_s: float, now: float) -> None:
        """Query after this time, since a change is about to come, or once the load allows."""
        self.due = min(self.due, now + pause_s)

    def begin_query(self, about: object, now: float, *, gently: bool = False) -> bool:
        """Return whether to query now; if so, the query counts as sent."""
        if about != self.about:
            self.about, self.pause_s = about, _GENTLY_S if gently else _SLURM_FIRST_S
            self.due = now + (_GENTLY_S if gently else 0.0)
        if self.queried_at is not None or now < max(self.due, self.not_before):
            return False
        self.queried_at = now
        if self.is_hurried:
            self.is_hurried, self.hurried_at = False, now
        return True

    def end_query(self, num_tasks: int, now: float) -> float:
        """Record the arrival of an answer; return the time of its query."""
        assert self.queried_at is not None
        queried_at, self.queried_at = self.queried_at, None
        work_s = num_tasks / _TASKS_PER_S
        self.not_before = now + max(_SLURM_FIRST_S / 2, _SLURM_SHARE * (now - queried_at), work_s)
        self.due = now + self.pause_s
        self.pause_s = min(_SLURM_LONGEST_S, _LONGER * self.pause_s)
        return queried_at


_NOT_ITS_FAULT = ("NODE_FAIL", "PREEMPTED", "TIMEOUT")
_KILLED = ("FAILED", "OUT_OF_MEMORY")
"""States of a task whose agent was killed, and of most that fail before their agent joins."""
_NOT_LAUNCHED = ("BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL")
"""States of a task that its node could not start."""


def has_ended(agent: Agent, state: TaskState) -> bool:
    """Return whether an agent has ended from which no message came since Slurm was queried.

    A COMPLETING task reports its own exit: its agent may still run, although Slurm shows the next
    restart count already.
    """
    if state.phase is Phase.COMPLETING:
        return False
    return (state.restarts or 0) > agent.attempt or has_no_node(state)


def has_no_node(state: TaskState) -> bool:
    """Return whether no process of a task runs, any more or yet."""
    return state.phase in (Phase.ENDED, Phase.PENDING)


def start_failed(
    state: TaskState, lost_attempt: int | None, attempt_here: int | None = None
) -> bool:
    """Return whether an attempt has ended, or could not start, before its agent joined.

    Of the same task, ``lost_attempt`` was lost, and so had joined; ``attempt_here`` is connected.
    """
    if state.is_launch_held:
        return True
    if state.state not in (*_KILLED, *_NOT_LAUNCHED) or is_lost(state, lost_attempt):
        return False
    return attempt_here is None or (state.restarts or 0) > attempt_here


def was_not_launched(state: TaskState) -> bool:
    """Return whether Slurm reports that the node could not start the task."""
    failed = state.state in _NOT_LAUNCHED or state.reason == "JobLaunchFailure"
    return state.is_launch_held or failed


def describe(state: TaskState) -> str:
    """Return the state of a task as Slurm names it, with its reason."""
    return f"{state.state}, {state.reason}" if state.reason else state.state


def is_lost(state: TaskState, lost_attempt: int | None) -> bool:
    """Return whether Slurm's state is about an attempt that was lost: Slurm is late to notice."""
    return lost_attempt is not None and (state.restarts or 0) <= lost_attempt


def min_nodes_unreachable(
    view: Mapping[str, TaskState],
    present: Set[str],
    rules: RoundRules,
    tried_hosts: Callable[[str], Sequence[str]],
) -> Failure | None:
    """Return why min nodes cannot come together any more; None while they can.

    ``present`` are tasks that have joined, or may yet run again although they have ended.
    ``tried_hosts`` returns the hosts on which a task failed before it joined.
    """
    absent = (state for task, state in view.items() if task not in present)
    over = [state for state in absent if state.phase is Phase.ENDED]
    if rules.max_nodes - len(over) >= rules.min_nodes:
        return None
    first = min(over, key=lambda state: not remedy_of_end(state.reason, state.state))
    why = f"{len(over)} of the run's {rules.max_nodes} tasks have ended for good"
    hosts = ", ".join(tried_hosts(first.task))
    where = f"; this one was tried on {hosts}" if hosts else ""
    remedy = remedy_of_end(first.reason, first.state)
    message = f"{why} ({describe(first)}), and min nodes is {rules.min_nodes}{where}"
    message += f": {remedy}" if remedy else ""
    return Failure(first.task, first.node, 0, 0, 0.0, message, phase="start")
