"""Requeue back-off of nodes that wait in vain, and recovery of lost tasks (pure).

Nodes that are too few, or that are not wanted, wait for ``below_min_timeout_s`` times 1 to 2, by
chance; then they are away for a time that is random. The range of the wait grows with every time
that the run has given all its nodes back. Of two runs that hold half of the nodes each, one gives
way: the other's tasks stand in the queue meanwhile, and get its nodes. For that a short time away
is enough. It doubles all the same, up to ten minutes, so that the tasks of a run that finds no
nodes for days start and end only now and then.

In a sweep, nodes that wait in vain go back within `SURE_S` or so. They are away for longer, because
the runs that hold what they lack let them start again as soon as there are nodes (``turns``).

Without ``below_min_timeout_s`` there is no queue, and nodes are kept. So are all that a run has if
one of their tasks may not be requeued any more (``max_requeues``): it would end, and the run
perhaps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from hpc_elastic.rendezvous.effects import Effect, Note, Postpone, Send, hosts_of
from hpc_elastic.rendezvous.log_entry import Agent, Failure, RoundRules
from hpc_elastic.slurm.job_state import Phase, TaskState, queue_name, remedy_of_end

SURE_S = 5.0
"""For so long a run is seen to wait in vain before it gives its nodes back: for some seconds Slurm
calls tasks running whose run has ended."""
AWAY_S = 15.0
"""How long nodes that were given back stay away, about, for the first time."""
_AWAY_IN_VAIN_S = 60.0
_LONGEST_AWAY_S = 600.0
_SHORTEST_AWAY_S = 10.0
"""A bad node's task is away for this long at least."""


@dataclass
class RequeueBackoff:
    """Nodes that were sent back to the queue, and when to send more; monotonic seconds."""

    rules: RoundRules
    rng: random.Random = field(default_factory=random.Random)
    times_requeued: int = 0
    """How often the run has given all its nodes back since its last round."""
    requeued: dict[str, int] = field(default_factory=dict)
    """Task -> attempt that was sent back."""
    last_delay_s: float = 0.0
    """How long nodes stay away that were all sent back."""
    _times: float = field(init=False)
    _in_vain_since: float | None = None

    def __post_init__(self) -> None:
        self._times = self.rng.uniform(1.0, 2.0 + self.times_requeued)

    def would_return(self, agents: Iterable[Agent]) -> bool:
        """Return whether the tasks of all of these may go back to the queue."""
        most = self.rules.max_requeues
        return most is None or all(agent.attempt < most for agent in agents)

    def is_over(self, waited_s: float) -> bool:
        """Return whether nodes have waited long enough."""
        wait = self.rules.below_min_timeout_s
        return wait is not None and waited_s >= wait * self._times

    def late(self, joined: Mapping[Agent, float], now: float) -> tuple[Agent, ...]:
        """Return who has waited for too long; ``joined`` says since when each waits."""
        if self.rules.below_min_timeout_s is None:
            return ()
        late = (a for a, since in joined.items() if self.is_over(now - since))
        return tuple(agent for agent in late if self.would_return([agent]))

    def is_in_vain(self, why: str | None, now: float) -> bool:
        """Return whether nodes have waited for nothing for long enough; None: they have not."""
        if why is None:
            self._in_vain_since = None
        elif self._in_vain_since is None:
            self._in_vain_since = now
        return self._in_vain_since is not None and now - self._in_vain_since >= SURE_S

    def time_away(self, base_s: float = AWAY_S) -> float:
        """Return how long nodes are to stay away that go back now."""
        longest = min(_LONGEST_AWAY_S, base_s * 2.0**self.times_requeued)
        return longest * self.rng.uniform(0.5, 1.5)

    def requeue(self, agents: tuple[Agent, ...], delay_s: float) -> list[Effect]:
        """Send nodes back to the queue for a while."""
        return self._requeue(agents, delay_s, {"all": False})

    def requeue_late(self, agents: tuple[Agent, ...]) -> list[Effect]:
        """Send back nodes that are not wanted."""
        return self.requeue(agents, self.time_away())

    def requeue_faulty(self, agents: tuple[Agent, ...]) -> list[Effect]:
        """Send back nodes that are to blame for failures: their tasks start elsewhere."""
        return self.requeue(agents, max(_SHORTEST_AWAY_S, self.time_away()))

    def requeue_all(self, agents: tuple[Agent, ...], why: str = "") -> list[Effect]:
        """Send all nodes back, and let none of the run's start for a while.

        Args:
            agents: Those that have nodes.
            why: Why they wait in vain; empty: they have waited for too long.
        """
        self.last_delay_s = self.time_away(_AWAY_IN_VAIN_S if why else AWAY_S)
        self.times_requeued += 1
        note, send = self._requeue(
            agents, self.last_delay_s, {"all": True, **({"why": why} if why else {})}
        )
        return [note, Postpone(self.last_delay_s), send]

    def _requeue(
        self, agents: tuple[Agent, ...], delay_s: float, fields: Mapping[str, object]
    ) -> list[Effect]:
        self.requeued |= {a.task: a.attempt for a in agents}
        named = {"nodes": len(agents), "hosts": hosts_of(agents)}
        note = Note("nodes_requeued", {**named, **fields, "delay_s": round(delay_s, 1)})
        return [note, Send(agents, {"type": "requeue", "delay_s": delay_s})]


# ---- Tasks that are gone, and are to start again soon (pure)
# Slurm holds a task that it requeues for two minutes, however idle the cluster is; and what it
# ends because of a preemption, the time limit or a dead node, it may not requeue at all; nor one
# whose agent was killed. A task that leaves in good order sees to that itself. One that could not
# is *brought back* by the leader: once Slurm has shown it so for ``CONFIRM_LOST_S``, and again
# every ``AGAIN_S`` until it has moved: Slurm may not have answered. Tasks that the run itself has
# given back are to stay away, and are left alone, unless Slurm says that they have ended: the
# node died before the agent had asked for its next attempt.
#
# A task that was to be brought back and has not moved for ``GIVE_UP_S`` has ended for good.
#
# A task may fail before its agent joins: its node cannot write its log, lacks the Python
# environment, or has no memory left. Slurm then calls it FAILED, or holds it for good. It is
# brought back too, to start on another node (`failure_policy`), until it has failed
# ``START_TRIES`` times in a row: what fails everywhere is no node's fault. A new leader counts
# anew.
#
# An attempt that fell silent, or that Slurm has counted as gone while it was still heard, has an
# end that nobody has seen: it may run still where it ran, and the task is not to start there yet
# (`hpc_elastic.slurm.requeue`).


CONFIRM_LOST_S = 2.0
"""A requeue changes the task's start time more than once while its last attempt ends."""
AGAIN_S = 15.0
GIVE_UP_S = 60.0

START_TRIES = 3

_Attempt = tuple[str, str, int | None]
"""A task, Slurm's word for its state, and how often it was requeued."""


@dataclass(frozen=True)
class FailedStart:
    """An attempt of a task that ended before its agent joined.

    Attributes:
        state: What Slurm says of it.
        hosts: Where the task has failed so in a row, this time last; empty where Slurm names none.
        is_last: Whether it is not tried again.
    """

    state: TaskState
    hosts: tuple[str, ...]
    is_last: bool


@dataclass
class LostTaskRecovery:
    """What is known of the tasks that are gone; monotonic seconds of the leader."""

    possibly_alive: dict[str, str] = field(default_factory=dict)
    """Task -> the node where it may run still, for nobody has seen its end."""
    max_requeues: int | None = None
    """How often a task may go back to the queue; None: as often as it has to."""
    are_awaited: bool = False
    """Whether Slurm should be asked about some of them."""
    _over: frozenset[str] = frozenset()
    """Tasks that have ended for good."""
    _failed: dict[str, _Attempt] = field(default_factory=dict)
    """Task -> the attempt that failed last before its agent joined."""
    _tries: dict[str, list[str]] = field(default_factory=dict)
    """Place of a task -> the hosts of its attempts that failed so in a row; "" where unknown."""
    _seen: dict[_Attempt, float] = field(default_factory=dict)
    """Since when an attempt is seen that is to be brought back."""
    _brought: dict[_Attempt, float] = field(default_factory=dict)
    """When it was, first."""
    _tried: dict[_Attempt, float] = field(default_factory=dict)
    """When it was, last."""

    @property
    def are_due(self) -> bool:
        """Whether some are to be brought back as soon as Slurm has said so again."""
        return bool(self._seen)

    def lose_unseen(self, agent: Agent) -> None:
        """Note that an agent is gone, and that nobody has seen it end."""
        self.possibly_alive[agent.task] = agent.host

    @property
    def num_over(self) -> int:
        """How many tasks have ended for good."""
        return len(self._over)

    def joined(self, task: str) -> None:
        """An agent of this task has joined: its start has not failed."""
        self._failed.pop(task, None)
        self._tries.pop(_place(task), None)

    def failed_starts(
        self, view: Mapping[str, TaskState], lost: Mapping[str, int], here: Mapping[str, int]
    ) -> list[FailedStart]:
        """Return the attempts that failed before they joined, each of them once.

        Args:
            view: Slurm's answer.
            lost: Task -> attempt that was here, and is not any more (`last_here`).
            here: Task -> attempt that is here.
        """
        found: list[FailedStart] = []
        for task, state in view.items():
            key = _attempt(state)
            failed = start_failed(state, lost.get(task), here.get(task))
            if not failed or self._failed.get(task) == key:
                continue
            self._failed[task] = key
            self._tries.setdefault(_place(task), []).append(state.node)
            is_last = self._is_spent(state) or not self._may_be_tried(task)
            found.append(FailedStart(state, self.tried(task), is_last))
        return found

    def tried(self, task: str) -> tuple[str, ...]:
        """Return the hosts on which a task has failed in a row before it joined."""
        return tuple(dict.fromkeys(filter(None, self._tries.get(_place(task), ()))))

    def failed_on(self, tasks: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return those of the tasks that failed before they joined, each with the hosts."""
        return {task: self.tried(task) for task in tasks if task in self._failed}

    def _may_be_tried(self, task: str) -> bool:
        return len(self._tries.get(_place(task), ())) < START_TRIES

    def _is_retried(self, state: TaskState) -> bool:
        """Whether this attempt failed before it joined, and the task is to be tried elsewhere."""
        failed = self._failed.get(state.task) == _attempt(state)
        return failed and self._may_be_tried(state.task)

    def note_seen(self, task: str) -> None:
        """Note that an agent of this task is here, or was seen to end."""
        self.possibly_alive.pop(task, None)

    def update_awaited(self, lost: Collection[str]) -> None:
        """Find out whether tasks are awaited: a round has closed, or Slurm has answered."""
        self.are_awaited = bool(self.awaited(lost))

    def awaited(self, lost: Collection[str]) -> tuple[str, ...]:
        """Return those of the tasks that are gone that may yet come back."""
        return tuple(task for task in lost if task not in self._over)

    def due(
        self,
        view: Mapping[str, TaskState],
        lost: Mapping[str, int],
        requeued: Mapping[str, int],
        now: float,
    ) -> tuple[str, ...]:
        """Return the tasks that are to be brought back now.

        Args:
            view: Slurm's answer; empty: none.
            lost: Task -> attempt that was lost.
            requeued: Task -> attempt that the run has requeued itself.
            now: The time.
        """
        if not view:
            return ()
        gone = set(self._gone(view, lost, requeued))
        last = last_here(lost, requeued)
        wanted = {key for key in gone if self._is_to_be_tried(key, now)}
        self._seen = {key: self._seen.get(key, now) for key in wanted}
        sure = {key for key, since in self._seen.items() if now - since >= CONFIRM_LOST_S}
        for key in sure:
            del self._seen[key]
        self._brought = {**dict.fromkeys(sure, now), **self._brought}
        self._tried |= dict.fromkeys(sure, now)
        self._over = frozenset(self._ended(view, last, gone, now))
        self.update_awaited(lost)
        return tuple(sorted(task for task, _, _ in sure))

    def _is_to_be_tried(self, key: _Attempt, now: float) -> bool:
        if key not in self._brought:
            return True
        given_up = now - self._brought[key] >= GIVE_UP_S
        return not given_up and now - self._tried[key] >= AGAIN_S

    def returning(self, view: Mapping[str, TaskState], lost: Mapping[str, int]) -> set[str]:
        """Return the tasks that have ended, as Slurm says, and may yet run again.

        Args:
            view: Slurm's answer.
            lost: Task -> attempt that was here, and is not any more (`last_here`).
        """
        return {
            task
            for task, state in view.items()
            if self._may_return(state, lost.get(task)) and task not in self._over
        }

    def _is_spent(self, state: TaskState) -> bool:
        """Whether a task has ended, and may not be requeued any more."""
        spent = self.max_requeues is not None and (state.restarts or 0) >= self.max_requeues
        return spent and state.phase is Phase.ENDED

    def _may_return(self, state: TaskState, lost_attempt: int | None) -> bool:
        if self._is_spent(state):
            return False
        return may_return(state, lost_attempt) or self._is_retried(state)

    def _ended(
        self,
        view: Mapping[str, TaskState],
        lost: Mapping[str, int],
        gone: Collection[_Attempt],
        now: float,
    ) -> Iterator[str]:
        for task, state in view.items():
            if state.phase is Phase.ENDED and not self._may_return(state, lost.get(task)):
                yield task
        for key in gone:
            if now - self._brought.get(key, now) >= GIVE_UP_S:
                yield key[0]

    def _gone(
        self, view: Mapping[str, TaskState], lost: Mapping[str, int], requeued: Mapping[str, int]
    ) -> Iterator[_Attempt]:
        """Yield the attempts that are to be brought back."""
        last = last_here(lost, requeued)
        for task, state in view.items():
            attempt = lost.get(task)
            if state.phase is Phase.ENDED:
                wanted = self._may_return(state, last.get(task)) and queue_name(task) == task
            elif state.is_launch_held:
                wanted = self._is_retried(state)
            else:
                wanted = attempt is not None and state.is_held and requeued.get(task, -1) < attempt
                wanted = wanted and not is_lost(state, attempt)
            if wanted:
                yield _attempt(state)


def last_here(lost: Mapping[str, int], requeued: Mapping[str, int]) -> dict[str, int]:
    """Return the last attempt of each task that was here, and was lost or given back."""
    return {task: max(lost.get(task, -1), requeued.get(task, -1)) for task in {**lost, **requeued}}


def _attempt(state: TaskState) -> _Attempt:
    return state.task, state.state, state.restarts


def _place(task: str) -> str:
    """Return what a task and another that was submitted in its place have in common."""
    return task.rpartition("_")[2]


# ---- When a leader may ask Slurm how the run's tasks are (pure)
# At once when a round begins to form, else ever more seldom, but soon when an agent has joined;
# more seldom from the start (*gently*) where nobody waits for the answer but a task that was
# lost. However many agents join, it is asked no more often than for one. Never again within ten
# times the time that the answer took, nor faster than five thousand tasks a second: a run of ten
# thousand nodes may not hurt slurmctld.


_SLURM_FIRST_S, _SLURM_LONGEST_S, _SLURM_SHARE = 0.5, 60.0, 10.0
_LONGER = 2.0
_GENTLY_S = 5.0
_HURRIED_S = 10.0
_TASKS_PER_S = 5000


@dataclass
class SlurmPollSchedule:
    """When a leader asks; times are its monotonic seconds."""

    about: object = None
    """What was asked about last: another forming is asked about at once."""
    asked_at: float | None = None
    """When the question was put that is not answered yet."""
    pause_s: float = _SLURM_FIRST_S
    is_hurried: bool = False
    hurried_at: float = -math.inf
    """When the last question was put that was hurried."""
    due: float = 0.0
    not_before: float = 0.0

    def hurry(self) -> None:
        """Something has changed: ask soon, the first times at once, then every `_HURRIED_S`."""
        self.due = min(self.due, self.hurried_at + min(self.pause_s, _HURRIED_S))
        self.is_hurried = True

    def ask_within(self, pause_s: float, now: float) -> None:
        """Something is about to change: ask after so long, or as soon as is polite then."""
        self.due = min(self.due, now + pause_s)

    def ask(self, about: object, now: float, *, gently: bool = False) -> bool:
        """Return whether to ask now; then the question counts as put."""
        if about != self.about:
            self.about, self.pause_s = about, _GENTLY_S if gently else _SLURM_FIRST_S
            self.due = now + (_GENTLY_S if gently else 0.0)
        if self.asked_at is not None or now < max(self.due, self.not_before):
            return False
        self.asked_at = now
        if self.is_hurried:
            self.is_hurried, self.hurried_at = False, now
        return True

    def answered(self, num_tasks: int, now: float) -> float:
        """Note the answer's arrival; return when the question was put."""
        assert self.asked_at is not None
        asked_at, self.asked_at = self.asked_at, None
        work_s = num_tasks / _TASKS_PER_S
        self.not_before = now + max(_SLURM_FIRST_S / 2, _SLURM_SHARE * (now - asked_at), work_s)
        self.due = now + self.pause_s
        self.pause_s = min(_SLURM_LONGEST_S, _LONGER * self.pause_s)
        return asked_at


# ---- What Slurm's word on a task means for the agent of that task (pure)


_NOT_ITS_FAULT = ("NODE_FAIL", "PREEMPTED", "TIMEOUT")
_KILLED = ("FAILED", "OUT_OF_MEMORY")
"""What Slurm calls a task whose agent was killed; nearly all that fails before it joins, too."""
_NOT_LAUNCHED = ("BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL")
"""What Slurm calls a task that its node could not start."""
_NOT_LAUNCHED_REASON = "JobLaunchFailure"


def has_ended(agent: Agent, state: TaskState) -> bool:
    """Whether an agent is gone, which was last heard of before Slurm was asked.

    A task that is being ended takes its leave itself, though Slurm counts its next attempt already:
    between a requeue and its signal the agent is as well as ever.
    """
    if state.phase is Phase.COMPLETING:
        return False
    if state.restarts is not None and state.restarts > agent.attempt:
        return True
    return has_no_node(state)


def has_no_node(state: TaskState) -> bool:
    """Whether nothing of a task runs any more, or yet."""
    return state.phase in (Phase.ENDED, Phase.PENDING)


def may_return(state: TaskState, lost_attempt: int | None) -> bool:
    """Whether a task has ended that may be requeued or replaced: it has done nothing wrong.

    Args:
        state: What Slurm says of it.
        lost_attempt: Which attempt of it was lost; None: none. One that was a member, and was lost,
            and that Slurm calls FAILED, had its agent killed.
    """
    killed = state.state in _KILLED and is_lost(state, lost_attempt)
    return killed or state.state in _NOT_ITS_FAULT


def start_failed(
    state: TaskState, lost_attempt: int | None, attempt_here: int | None = None
) -> bool:
    """Whether an attempt has ended, or could not be started, before its agent joined.

    Args:
        state: What Slurm says of the task.
        lost_attempt: Which attempt of it was lost; None: none. That one had joined.
        attempt_here: Which attempt of it is here; None: none.
    """
    if state.is_launch_held:
        return True
    if state.state not in (*_KILLED, *_NOT_LAUNCHED) or is_lost(state, lost_attempt):
        return False
    return attempt_here is None or (state.restarts or 0) > attempt_here


def was_not_launched(state: TaskState) -> bool:
    """Whether Slurm itself says that the node could not start the task: no script is to blame."""
    launched = state.state not in _NOT_LAUNCHED and state.reason != _NOT_LAUNCHED_REASON
    return state.is_launch_held or not launched


def describe(state: TaskState) -> str:
    """Return Slurm's words for the state of a task, with its reason."""
    return f"{state.state}, {state.reason}" if state.reason else state.state


def is_lost(state: TaskState, lost_attempt: int | None) -> bool:
    """Whether the attempt that Slurm speaks of is one that was lost: it learns of that late."""
    if lost_attempt is None:
        return False
    return state.restarts is None or state.restarts <= lost_attempt


def hopeless(
    view: Mapping[str, TaskState],
    present: Set[str],
    min_nodes: int,
    max_nodes: int,
    tried: Callable[[str], Sequence[str]] = lambda task: (),
) -> Failure | None:
    """Return why min nodes cannot come together any more; None while they can.

    Args:
        view: Slurm's word.
        present: Tasks that have joined, or may yet run again although they have ended.
        min_nodes: Of the run.
        max_nodes: As many tasks the run has.
        tried: Returns the hosts on which a task failed before it joined.
    """
    over = [
        state for task, state in view.items() if state.phase is Phase.ENDED and task not in present
    ]
    if max_nodes - len(over) >= min_nodes:
        return None
    first = min(over, key=lambda state: not remedy_of_end(state.reason, state.state))
    why = f"{len(over)} of the run's {max_nodes} tasks have ended for good ({describe(first)})"
    hosts = ", ".join(tried(first.task))
    where = f"; this one was tried on {hosts}" if hosts else ""
    remedy = remedy_of_end(first.reason, first.state)
    message = f"{why}, and min nodes is {min_nodes}{where}{f': {remedy}' if remedy else ''}"
    return Failure(first.task, first.node, 0, 0, 0.0, message, phase="start")
