"""A notice: this node is to be left, why, and by when. Pure; `agent/preemption` finds them out.

Whatever announces it, all becomes one notice with a reason and a deadline:

    source                                        reason       deadline
    SIGTERM                                       signal       preempt_grace_s after it; KillWait
                                                               after it if the task is ending
    the end of the task's wall time               time limit   that end
    the user signal; a file; the user's code      asked        signal_delay_s after it; as asked

The deadline is when the node must have been left, with a reserve for what comes last: the workers
end, the task goes back to the queue. Until then the workers go on, and the run's leader arranges a
checkpoint, after which the node is left. It is left earlier where waiting can bring nothing.
"""

from __future__ import annotations

import logging
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from hpc_elastic.agent.signals import SignalPipe
from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.rendezvous import session
from hpc_elastic.run.events import EventLog
from hpc_elastic.slurm.exit_action import ExitAction, Reason
from hpc_elastic.worker.shared_page import SharedPage, WorkerStatus

_RESERVE_S = 5.0
_SHARE_OF_LIMIT = 0.1
_SET_UP_S = 30.0
"""Workers that have reported no step for longer may do work that they do not report."""


@dataclass(frozen=True)
class PreemptionNotice:
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
class PreemptionConfig:
    """What the run has recorded of notices since its submission.

    Attributes:
        signal_delay_s: How long before the end of the wall time the node is left.
        preempt_grace_s: Seconds between SIGTERM and SIGKILL when the task is preempted.
        kill_wait_s: The same when it is cancelled, or out of time.
        user_signal: Stands for "leave this node".
    """

    signal_delay_s: float
    preempt_grace_s: float
    kill_wait_s: float
    user_signal: signal.Signals


def within(
    reason: Reason, left_s: float, now: float, signal: str | None = None
) -> PreemptionNotice:
    """Return the notice for a node that is taken after this many seconds."""
    return PreemptionNotice(reason, now + left_s - min(_RESERVE_S, left_s / 3), signal, left_s)


def of_signal(
    number: signal.Signals, terms: PreemptionConfig, now: float
) -> PreemptionNotice | None:
    """Return what a signal means; None: nothing."""
    if number is signal.SIGTERM:
        return within(Reason.SIGNAL, terms.preempt_grace_s, now, number.name)
    if number is terms.user_signal:
        return within(Reason.ASKED, terms.signal_delay_s, now, number.name)
    return None


def of_departure(how: ExitAction | None, terms: PreemptionConfig, now: float) -> PreemptionNotice:
    """Return what SIGTERM means once Slurm has reported how the task ends.

    Args:
        how: `slurm.requeue.predict_exit_action`; REQUEUE is a task that runs still. None: Slurm is
            silent.
        terms: The run's.
        now: When the signal came.
    """
    runs = how in (ExitAction.REQUEUE, ExitAction.REPLACE)
    return within(Reason.SIGNAL, terms.preempt_grace_s if runs else terms.kill_wait_s, now)


def merged(known: PreemptionNotice | None, new: PreemptionNotice) -> PreemptionNotice:
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

    def ahead_s(self, signal_delay_s: float) -> float:
        """Return how long before the end the node is left: at most a tenth of the whole."""
        return min(signal_delay_s, self.length_s * _SHARE_OF_LIMIT)

    def notice_at(self, signal_delay_s: float) -> float:
        """Return when the notice is due, in monotonic seconds."""
        return self.end - self.ahead_s(signal_delay_s)

    def notice(self, signal_delay_s: float) -> PreemptionNotice:
        """Return the notice."""
        return within(
            Reason.TIME_LIMIT, self.ahead_s(signal_delay_s), self.notice_at(signal_delay_s)
        )


def first_spread_s(num_tasks: int) -> float:
    """Return over how many seconds the tasks of an array ask for a time limit of Slurm's own.

    The first of a run asks for all; the later the others come, the fewer ask with it.
    """
    return min(30.0, float(num_tasks - 1))


def spread_s(num_tasks: int) -> float:
    """Return over how many seconds the tasks of an array ask Slurm, not to do it all at once."""
    return min(30.0, num_tasks / 100)


def why_leave_now(
    notice: PreemptionNotice,
    workers: Sequence[WorkerStatus],
    now: float,
    *,
    since: float,
    saves_itself: bool,
) -> str | None:
    """Return why to wait no longer for a checkpoint; None: wait.

    Args:
        notice: The notice.
        workers: What this node's workers have reported.
        now: Monotonic seconds.
        since: When they were started.
        saves_itself: Whether a script that neither polls when to save nor reports its checkpoints
            may reach its own next one in the time that is left.
    """
    if now >= notice.by:
        return "its time is up"
    asks = any(w.passed is not None or w.boundary is not None for w in workers)
    steps = any(w.step is not None for w in workers)
    if not asks and not steps and now - since < _SET_UP_S:
        return "its workers have made no step"
    if not asks and not saves_itself:
        return "its script does not report when it saves"
    return None


# ---- Detects that this node is to be left, and reports it to the run
# `PreemptionState` holds the one notice of a task, wherever it comes from. `PreemptionWatcher` is
# a thread that waits for signals and for the end of the wall time; it may ask Slurm, which can
# take seconds, and nothing of the training waits for it.


_log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 2.0
"""The end of the wall time is asked for once more, so long before the notice."""
_ASK_SILENT_S = 60.0
_SOONER_S = 1.0
"""A deadline that has come nearer by less is not sent again."""


class PreemptionReporter(Protocol):
    """The part of `rendezvous.session.Session` that is used here."""

    @property
    def leave_request(self) -> session.LeaveRequest | None:
        """What was reported to the leader about this node."""

    def add_notice(self, reason: str, left_s: float) -> None:
        """Put this node under notice."""

    def leave_now(self) -> None:
        """Leave because of the notice, without waiting for the round."""


class PreemptionState:
    """The notice of one task, if it has one. May be used from any thread."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._notice: PreemptionNotice | None = None
        self._leader: PreemptionReporter | None = None
        self._closed = False

    @property
    def current(self) -> PreemptionNotice | None:
        """The notice; None as long as there is none."""
        return self._notice

    def close(self) -> None:
        """Take in no more: the node is left."""
        with self._lock:
            self._closed = True

    def add(self, new: PreemptionNotice) -> None:
        """Take in a notice, and pass on what is new about it."""
        with self._lock:
            if self._closed:
                return
            before, self._notice = self._notice, merged(self._notice, new)
            notice = self._notice
            is_news = before is None or self._is_news(before, notice)
            if is_news:
                self._send_notice(notice)
        if is_news:  # last, and without the lock: the file system may hang, and the grace runs
            self._write(notice)

    def connect(self, leader: PreemptionReporter) -> None:
        """Pass notices on to the run from now on, and the one that came before."""
        with self._lock:
            self._leader = leader
            if self._notice is not None:
                self._send_notice(self._notice)

    def _write(self, notice: PreemptionNotice) -> None:
        left_s = notice.by - time.monotonic()
        found = {"signal": notice.signal, "given_s": notice.given_s}
        fields = {name: value for name, value in found.items() if value is not None}
        self._events.write(
            "preemption_notice", reason=notice.reason.value, left_s=round(left_s, 1), **fields
        )

    def _send_notice(self, notice: PreemptionNotice) -> None:
        if self._leader is not None:
            left_s = max(0.0, notice.by - time.monotonic())
            self._leader.add_notice(notice.reason.value, left_s)

    @staticmethod
    def _is_news(before: PreemptionNotice, now: PreemptionNotice) -> bool:
        return now.reason is not before.reason or before.by - now.by > _SOONER_S


class DrainController:
    """What the workers of one round, and their agent, do about a notice.

    Args:
        leader: The session.
        notices: Where the notice is.
        pages: The workers' control pages.
        why_leave: Returns why to wait no longer, and None to wait, from the notice, the reports of
            the workers, and the monotonic seconds.
    """

    def __init__(
        self,
        leader: PreemptionReporter,
        notices: PreemptionState,
        pages: Sequence[SharedPage],
        why_leave: Callable[[PreemptionNotice, Sequence[WorkerStatus], float], str | None],
    ) -> None:
        self._leader = leader
        self._notices = notices
        self._pages = pages
        self._why_leave = why_leave
        self._heard: session.LeaveRequest | None = None
        self._wish: float | None = None
        self._shown: float | None = None
        self._leaves = False

    def poll(self, now: float) -> None:
        """Pass a notice to the workers, and leave once waiting is pointless."""
        workers = [page.read() for page in self._pages]
        self._hear_of(workers)
        notice = self._notices.current
        if notice is None or self._leaves:
            return
        if notice.by != self._shown:
            self._shown = notice.by
            for page in self._pages:
                page.set_deadline(notice.by)
        why = self._why_leave(notice, workers, now)
        if why is not None:
            _log.warning("this node is left now: %s", why)
            self._leaves = True
            self._leader.leave_now()

    def _hear_of(self, workers: Sequence[WorkerStatus]) -> None:
        """Take in what the leader knows, and what the workers' scripts want."""
        heard = self._leader.leave_request
        if heard is not None and heard != self._heard:
            self._heard = heard
            self._notices.add(PreemptionNotice(Reason.ASKED, heard.deadline))
        wish = min((w.leave_by for w in workers if w.leave_by is not None), default=None)
        if wish is not None and wish != self._wish:
            self._wish = wish
            self._notices.add(PreemptionNotice(Reason.ASKED, wish))


@dataclass(frozen=True)
class TimeLimitSource:
    """What Slurm reports about this task. Both calls may block for seconds.

    Attributes:
        foresee: How the task would go now; None where Slurm does not answer.
        time_left_s: What is left of its wall time, None where it has no end; raises
            `SlurmCommandError` where Slurm does not answer.
        told_left_s: What is known of it without asking; None: nothing.
        spread_s: All tasks together ask within this many seconds whether their limit was changed.
        first_spread_s: And for it, where nothing is known.
    """

    foresee: Callable[[], ExitAction | None]
    time_left_s: Callable[[], float | None]
    told_left_s: float | None = None
    spread_s: float = 0.0
    first_spread_s: float = 0.0


class PreemptionWatcher:
    """Turns signals and the approaching end of the wall time into notices, on a thread.

    Args:
        caught: The signals of this process.
        terms: The run's.
        notices: Where notices go.
        scheduler: Slurm; None for a task that has none, and no time limit.
    """

    def __init__(
        self,
        caught: SignalPipe,
        terms: PreemptionConfig,
        notices: PreemptionState,
        scheduler: TimeLimitSource | None,
    ) -> None:
        self._caught = caught
        self._terms = terms
        self._notices = notices
        self._scheduler = scheduler
        self._started_at = time.monotonic()
        self._limit: TimeLimit | None = None
        self._ask_at: float | None = None
        self._plan_first_look()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)

    def start(self) -> None:
        """Begin to watch, from the signals that have come already on."""
        self._thread.start()

    def close(self) -> None:
        """Watch no longer."""
        self._ended.set()
        self._caught.wake()
        self._thread.join(timeout=1.0)  # it may wait for Slurm

    def _run(self) -> None:
        while not self._ended.is_set():
            for number in self._caught.wait(self._wait_s()):
                notice = of_signal(number, self._terms, time.monotonic())
                if notice is not None:
                    _log.warning("this node is to be left: %s", number.name)
                    self._notices.add(notice)
                    self._ask_what_it_means(notice)
            self._look_at_clock()

    def _ask_what_it_means(self, notice: PreemptionNotice) -> None:
        if notice.reason is not Reason.SIGNAL or self._scheduler is None:
            return
        came_at = time.monotonic()
        how = self._scheduler.foresee()
        self._notices.add(of_departure(how, self._terms, came_at))

    # ---- the wall time ------------------------------------------------------------------

    def _plan_first_look(self) -> None:
        if self._scheduler is None:
            return
        if self._scheduler.told_left_s is None:
            self._ask_at = self._started_at + random.uniform(0.0, self._scheduler.first_spread_s)
        else:
            self._plan(self._started_at + self._scheduler.told_left_s)

    def _plan(self, end: float) -> None:
        """Plan the notice, and a look shortly before it: limits get extended."""
        self._limit = TimeLimit(end, end - self._started_at)
        again_at = (
            self._limit.notice_at(self._terms.signal_delay_s) - _LOOK_AGAIN_S - self._random_s()
        )
        self._ask_at = again_at if again_at > time.monotonic() + _LOOK_AGAIN_S else None

    def _random_s(self) -> float:
        """Return a delay that keeps the tasks of a run from asking Slurm all at once."""
        return random.uniform(0.0, self._scheduler.spread_s if self._scheduler else 0.0)

    def _wait_s(self) -> float | None:
        due = [at for at in (self._ask_at, self._notice_at) if at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    @property
    def _notice_at(self) -> float | None:
        return None if self._limit is None else self._limit.notice_at(self._terms.signal_delay_s)

    def _look_at_clock(self) -> None:
        if self._ask_at is not None and time.monotonic() >= self._ask_at:
            self._ask_for_end()
        notice_at = self._notice_at
        if self._limit is not None and notice_at is not None and time.monotonic() >= notice_at:
            self._notices.add(self._limit.notice(self._terms.signal_delay_s))
            self._limit = None

    def _ask_for_end(self) -> None:
        assert self._scheduler is not None
        asked_at, self._ask_at = time.monotonic(), None
        try:
            left_s = self._scheduler.time_left_s()
        except SlurmCommandError as e:
            _log.warning("Slurm does not report how much time is left: %s", e)
            self._ask_at = asked_at + _ASK_SILENT_S + self._random_s()
            return
        if left_s is None:
            self._limit = None
        else:
            self._plan(asked_at + left_s)
