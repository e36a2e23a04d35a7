"""A notice: this node is to be left, why, and by when. Pure; `agent/notices` finds them out.

Whatever announces it, all becomes one notice with a reason and a deadline:

    source                                        reason       deadline
    SIGTERM                                       signal       grace_s after it; KillWait after it
                                                               where the task is being ended already
    the end of the task's wall time               time limit   that end
    the user signal; a file; the user's code      asked        notice_s after it; as asked

The deadline is when the node must have been left, with a reserve for what comes last: the workers
end, the task goes back to the queue. Until then the workers go on, and the run's leader arranges a
checkpoint, after which the node is left. It is left earlier where waiting can bring nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hpc_elastic.progress import Progress
from hpc_elastic.slurm.decision import Departure, Reason

_RESERVE_S = 5.0
_SHARE_OF_LIMIT = 0.1
_SET_UP_S = 30.0
"""Workers that have told of no step for longer may be at work that they do not tell of."""


@dataclass(frozen=True)
class Notice:
    """This node is to be left.

    Attributes:
        reason: Why.
        by: By when, in monotonic seconds.
        signal: Name of the signal that announced it; None: it was something else.
        given_s: How much time was given, from the announcement on; None: unknown.
    """

    reason: Reason
    by: float
    signal: str | None = field(default=None, compare=False)
    given_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Terms:
    """What the run knows of notices since its submission.

    Attributes:
        notice_s: How long before the end of the wall time the node is left.
        grace_s: Seconds between SIGTERM and SIGKILL when the task is preempted.
        kill_wait_s: The same when it is cancelled, or out of time.
        user_signal: Stands for "leave this node".
    """

    notice_s: float
    grace_s: float
    kill_wait_s: float
    user_signal: signal.Signals


def within(reason: Reason, left_s: float, now: float, signal: str | None = None) -> Notice:
    """Return the notice for a node that is gone after so many seconds."""
    return Notice(reason, now + left_s - min(_RESERVE_S, left_s / 3), signal, left_s)


def of_signal(number: signal.Signals, terms: Terms, now: float) -> Notice | None:
    """Return what a signal means; None: nothing."""
    if number is signal.SIGTERM:
        return within(Reason.SIGNAL, terms.grace_s, now, number.name)
    if number is terms.user_signal:
        return within(Reason.ASKED, terms.notice_s, now, number.name)
    return None


def of_departure(how: Departure | None, terms: Terms, now: float) -> Notice:
    """Return what SIGTERM means once Slurm has said how the task goes.

    Args:
        how: `slurm.requeue.foresee`; REQUEUE is a task that runs still. None: Slurm is silent.
        terms: The run's.
        now: When the signal came.
    """
    runs = how in (Departure.REQUEUE, Departure.REPLACE)
    return within(Reason.SIGNAL, terms.grace_s if runs else terms.kill_wait_s, now)


def merged(known: Notice | None, new: Notice) -> Notice:
    """Return one notice for two: the earlier deadline, and the first reason.

    But a signal goes before other reasons: what it means, Slurm has to be asked.
    """
    if known is None:
        return new
    signalled = new.reason is Reason.SIGNAL and known.reason is not Reason.SIGNAL
    return replace(new if signalled else known, by=min(known.by, new.by))


@dataclass(frozen=True)
class TimeLimit:
    """The wall time of a task.

    Attributes:
        end: When it is over, in monotonic seconds.
        length_s: How long it is as a whole.
    """

    end: float
    length_s: float

    def ahead_s(self, notice_s: float) -> float:
        """Return how long before the end the node is left: at most a tenth of the whole."""
        return min(notice_s, self.length_s * _SHARE_OF_LIMIT)

    def notice_at(self, notice_s: float) -> float:
        """Return when the notice is due, in monotonic seconds."""
        return self.end - self.ahead_s(notice_s)

    def notice(self, notice_s: float) -> Notice:
        """Return the notice."""
        return within(Reason.TIME_LIMIT, self.ahead_s(notice_s), self.notice_at(notice_s))


def first_spread_s(num_tasks: int) -> float:
    """Return over how many seconds the tasks of an array ask for a time limit of Slurm's own.

    The first of a run asks for all; the later the others come, the fewer ask with it.
    """
    return min(30.0, float(num_tasks - 1))


def spread_s(num_tasks: int) -> float:
    """Return over how many seconds the tasks of an array ask Slurm, not to do it all at once."""
    return min(30.0, num_tasks / 100)


def why_leave_now(
    notice: Notice, workers: Sequence[Progress], now: float, *, since: float, saves_itself: bool
) -> str | None:
    """Tell why to wait no longer for a checkpoint; None: wait.

    Args:
        notice: The notice.
        workers: What this node's workers have told.
        now: Monotonic seconds.
        since: When they were started.
        saves_itself: Whether a script that neither asks when to save nor tells that it has may get
            to its own next checkpoint in the time that is left.
    """
    if now >= notice.by:
        return "its time is up"
    asks = any(w.passed is not None or w.boundary is not None for w in workers)
    steps = any(w.step is not None for w in workers)
    if not asks and not steps and now - since < _SET_UP_S:
        return "its workers have made no step"
    if not asks and not saves_itself:
        return "its script does not say when it saves"
    return None
