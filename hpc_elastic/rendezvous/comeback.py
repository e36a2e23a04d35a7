"""Tasks that are gone, and are to start again soon (pure).

Slurm holds a task that it requeues for two minutes, however idle the cluster is; and what it ends
because of a preemption, the time limit or a dead node, it may not requeue at all; nor one whose
agent was killed. A task that leaves in good order sees to that itself. One that could not is
*brought back* by the leader: once Slurm has shown it so for ``SURE_S``, and again every ``AGAIN_S``
until it has moved: Slurm may not have answered. Tasks that the run itself has given back are to
stay away, and are left alone, unless Slurm says that they have ended: the node died before the
agent had asked for its next attempt.

A task that was to be brought back and has not moved for ``GIVE_UP_S`` has ended for good.

A task may fail before its agent joins: its node can not write its log, lacks the Python
environment, or has no memory left. Slurm then calls it FAILED, or holds it for good. It is brought
back too, to start on another node (`blame`), until it has failed ``START_TRIES`` times in a row:
what fails everywhere is no node's fault. A new leader counts anew.

An attempt that fell silent, or that Slurm has counted as gone while it was still heard, has an end
that nobody has seen: it may run still where it ran, and the task is not to start there yet
(`hpc_elastic.slurm.last_nodes`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from hpc_elastic.rendezvous import slurms_word
from hpc_elastic.rendezvous.record import Agent
from hpc_elastic.slurm.states import Phase, TaskState, queue_name

SURE_S = 2.0
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
class Comebacks:
    """What is known of the tasks that are gone; monotonic seconds of the leader."""

    unseen: dict[str, str] = field(default_factory=dict)
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

    def vanished(self, agent: Agent) -> None:
        """An agent is gone, and nobody has seen it end."""
        self.unseen[agent.task] = agent.host

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
            failed = slurms_word.start_failed(state, lost.get(task), here.get(task))
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

    def seen(self, task: str) -> None:
        """An agent of this task is here, or was seen to end."""
        self.unseen.pop(task, None)

    def look(self, lost: Collection[str]) -> None:
        """See whether any are awaited: a round has closed, a task has come, Slurm has answered."""
        self.are_awaited = bool(self.awaited(lost))

    def awaited(self, lost: Collection[str]) -> tuple[str, ...]:
        """Return those of the tasks that are gone that may yet come back."""
        return tuple(task for task in lost if task not in self._over)

    def due(
        self,
        view: Mapping[str, TaskState],
        lost: Mapping[str, int],
        away: Mapping[str, int],
        now: float,
    ) -> tuple[str, ...]:
        """Return the tasks that are to be brought back now.

        Args:
            view: Slurm's answer; empty: none.
            lost: Task -> attempt that was lost.
            away: Task -> attempt that the run has given back.
            now: The time.
        """
        if not view:
            return ()
        gone = set(self._gone(view, lost, away))
        last = last_here(lost, away)
        wanted = {key for key in gone if self._is_to_be_tried(key, now)}
        self._seen = {key: self._seen.get(key, now) for key in wanted}
        sure = {key for key, since in self._seen.items() if now - since >= SURE_S}
        for key in sure:
            del self._seen[key]
        self._brought = {**dict.fromkeys(sure, now), **self._brought}
        self._tried |= dict.fromkeys(sure, now)
        self._over = frozenset(self._ended(view, last, gone, now))
        self.look(lost)
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
        return slurms_word.may_return(state, lost_attempt) or self._is_retried(state)

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
        self, view: Mapping[str, TaskState], lost: Mapping[str, int], away: Mapping[str, int]
    ) -> Iterator[_Attempt]:
        """Yield the attempts that are to be brought back."""
        last = last_here(lost, away)
        for task, state in view.items():
            attempt = lost.get(task)
            if state.phase is Phase.ENDED:
                wanted = self._may_return(state, last.get(task)) and queue_name(task) == task
            elif state.is_launch_held:
                wanted = self._is_retried(state)
            else:
                wanted = attempt is not None and state.is_held and away.get(task, -1) < attempt
                wanted = wanted and not slurms_word.is_lost(state, attempt)
            if wanted:
                yield _attempt(state)


def last_here(lost: Mapping[str, int], away: Mapping[str, int]) -> dict[str, int]:
    """Return the last attempt of each task that was here, and was lost or given back."""
    return {task: max(lost.get(task, -1), away.get(task, -1)) for task in {**lost, **away}}


def _attempt(state: TaskState) -> _Attempt:
    return state.task, state.state, state.restarts


def _place(task: str) -> str:
    """Return what a task and another that was submitted in its place have in common."""
    return task.rpartition("_")[2]
