"""Preemption notices: this node is to be left, why, and by when.

Whatever announces it, all becomes one notice with a reason and a deadline:

    source                                        reason       deadline
    SIGTERM                                       signal       preempt_grace_s after it; KillWait
                                                               after it if the task is ending
    the end of the task's wall time               time limit   that end
    the user signal; a file; the user's code      asked        signal_delay_s after it; as asked
    launcher.agent.notice_command                 asked        as it prints; else signal_delay_s

The deadline is when the node must have been left, with a reserve for what comes last: the workers
end, the task goes back to the queue. Until then the workers go on, and the run's leader arranges a
checkpoint, after which the node is left. It is left earlier where waiting can bring nothing.
"""

from __future__ import annotations

import logging
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hpc_elastic import _util
from hpc_elastic.agent.signals import SignalPipe
from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.rendezvous.messages import PreemptionNotice
from hpc_elastic.rendezvous.session import Session
from hpc_elastic.run.directory import Pool
from hpc_elastic.run.events import EventLog
from hpc_elastic.slurm.exit_action import ExitAction, Reason
from hpc_elastic.worker.shared_page import SharedPage, WorkerStatus

_log = logging.getLogger(__name__)

_RESERVE_S = 5.0
_SHARE_OF_LIMIT = 0.1
_AGREEMENT_S = 1.0
_SAFETY = 1.5
_SET_UP_S = 30.0
"""Workers that have reported no step for longer may do work that they do not report."""


def within(
    reason: Reason, left_s: float, now: float, signal: str | None = None
) -> PreemptionNotice:
    """Return the notice for a node that is taken after this many seconds."""
    return PreemptionNotice(reason, now + left_s - min(_RESERVE_S, left_s / 3), signal, left_s)


def of_signal(number: signal.Signals, pool: Pool, now: float) -> PreemptionNotice | None:
    """Return what a signal that came now (monotonic seconds) means; None: nothing."""
    if number is signal.SIGTERM:
        return within(Reason.SIGNAL, pool.terms.preempt_grace_s, now, number.name)
    if number.name == f"SIG{pool.launcher.preempt_signal}":
        return within(Reason.ASKED, pool.launcher.signal_delay_s, now, number.name)
    return None


def of_command(
    exit_code: int | None, output: str, signal_delay_s: float, now: float
) -> PreemptionNotice | None:
    """Return what ``launcher.agent.notice_command`` means that ended now; None: nothing.

    Exit code 0 with output is a notice; its first word may be the number of seconds that are left.
    """
    words = output.split()
    if exit_code != 0 or not words:
        return None
    is_number = re.fullmatch(r"\d{1,9}(\.\d+)?", words[0])
    return within(Reason.ASKED, float(words[0]) if is_number else signal_delay_s, now)


def of_departure(how: ExitAction | None, pool: Pool, now: float) -> PreemptionNotice:
    """Return what SIGTERM means once Slurm has reported how the task ends.

    ``how``: REQUEUE is a task that runs still; None: Slurm is silent. The signal came ``now``.
    """
    terms, runs = pool.terms, how in (ExitAction.REQUEUE, ExitAction.REPLACE)
    return within(Reason.SIGNAL, terms.preempt_grace_s if runs else terms.kill_wait_s, now)


def merged(known: PreemptionNotice | None, new: PreemptionNotice) -> PreemptionNotice:
    """Return one notice for two: the earlier deadline, and the first reason.

    A signal takes precedence over other reasons: its meaning is known only once Slurm has answered.
    """
    if known is None:
        return new
    signalled = new.reason is Reason.SIGNAL and known.reason is not Reason.SIGNAL
    return replace(new if signalled else known, by=min(known.by, new.by))


def of_time_limit(
    end: float, length_s: float, signal_delay_s: float, departure_s: float | None = None
) -> tuple[float, PreemptionNotice]:
    """Return when the notice of the end of the wall time is due, and the notice.

    All times are monotonic seconds. ``length_s`` is the whole wall time. The node is left at the
    earliest ``signal_delay_s`` before the end, at most a tenth of the whole. ``departure_s`` is how
    long it takes to save and to leave the node (`measured_departure_s`); None if unknown.
    """
    ahead_s = min(signal_delay_s, length_s * _SHARE_OF_LIMIT)
    if departure_s is not None:
        ahead_s = min(ahead_s, departure_s)
    return end - ahead_s, within(Reason.TIME_LIMIT, ahead_s, end - ahead_s)


def measured_departure_s(workers: Sequence[WorkerStatus]) -> float | None:
    """Return the seconds from a notice until a group has saved, with a reserve; None if unknown.

    The group agrees on a step ahead of all ranks, and reaches it within two steps. A save may take
    twice as long as the last one. A worker that has not saved yet has restored: that takes about as
    long.
    """
    longest_s = 0.0
    for worker in workers:
        save_s = worker.restore_s if worker.save_s is None else worker.save_s
        if save_s is None or worker.step is None or worker.step_time is None:
            return None
        num_steps = worker.step - (worker.step if worker.first_step is None else worker.first_step)
        if num_steps < 1 or worker.first_time is None:
            return None
        step_s = (worker.step_time - worker.first_time) / num_steps
        longest_s = max(longest_s, _AGREEMENT_S + 2 * step_s + 2 * save_s)
    return _SAFETY * longest_s if workers else None


def why_leave_now(
    notice: PreemptionNotice,
    workers: Sequence[WorkerStatus],
    now: float,
    *,
    since: float,
    saves_itself: bool,
) -> str | None:
    """Return why to wait no longer for a checkpoint; None: wait.

    The workers were started ``since``. ``saves_itself``: a script that neither polls when to save
    nor reports its checkpoints may reach its own next one in the time that is left.
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


_LOOK_AGAIN_S = 2.0  # the end of the wall time is asked for once more, so long before the notice
_ASK_SILENT_S = 60.0
_COMMAND_EVERY_S, _COMMAND_S = 5.0, 10.0
"""Pause between two calls of ``notice_command``, and how long one may take."""
_SOONER_S = 1.0  # a deadline that has come nearer by less is not sent again


class PreemptionState:
    """The notice of one task, wherever it comes from. May be used from any thread."""

    def __init__(self, events: EventLog) -> None:
        self.current: PreemptionNotice | None = None
        self.departure_s: float | None = None
        """How long it takes to leave the node; None until that is known."""
        self._events = events
        self._lock = threading.Lock()
        self._leader: Session | None = None
        self._closed = False

    def close(self) -> None:
        """Ignore further notices: the node is left."""
        with self._lock:
            self._closed = True

    def add(self, new: PreemptionNotice) -> None:
        """Add a notice, and pass on what is new about it."""
        with self._lock:
            if self._closed:
                return
            before, notice = self.current, merged(self.current, new)
            self.current = notice
            if (
                before is not None
                and notice.reason is before.reason
                and before.by - notice.by <= _SOONER_S
            ):
                return
            if self._leader is not None:
                self._leader.add_notice(notice)
        # last, and without the lock: the file system may hang, and the grace runs
        found = {"signal": notice.signal, "given_s": notice.given_s}
        fields = {name: value for name, value in found.items() if value is not None}
        left_s = round(notice.by - time.monotonic(), 1)
        _log.info("this node must be left within %.0f s: %s", left_s, notice.reason.value)
        self._events.write("preemption_notice", reason=notice.reason.value, left_s=left_s, **fields)

    def connect(self, leader: Session) -> None:
        """Pass notices on to the run from now on, and the one that came before."""
        with self._lock:
            self._leader = leader
            if self.current is not None:
                leader.add_notice(self.current)


class DrainController:
    """What a round's workers and agent do at a notice; ``why_leave``: why to wait no longer."""

    def __init__(
        self,
        leader: Session,
        notices: PreemptionState,
        pages: Sequence[SharedPage],
        why_leave: Callable[[PreemptionNotice, Sequence[WorkerStatus], float], str | None],
    ) -> None:
        self._leader = leader
        self._notices = notices
        self._pages = pages
        self._why_leave = why_leave
        self._leaves = False

    def poll(self, now: float) -> None:
        """Pass a notice to the workers, and leave once waiting is pointless."""
        workers = [page.read() for page in self._pages]
        departure_s = measured_departure_s(workers)
        if departure_s is not None:
            self._notices.departure_s = departure_s
        if self._leader.leader_notice is not None:
            self._notices.add(self._leader.leader_notice)
        asked = [worker.leave_by for worker in workers if worker.leave_by is not None]
        if asked:
            self._notices.add(PreemptionNotice(Reason.ASKED, min(asked)))
        notice = self._notices.current
        if notice is None or self._leaves:
            return
        for page in self._pages:
            page.set_deadline(notice.by)
        why = self._why_leave(notice, workers, now)
        if why is not None:
            _log.warning("this node is left now: %s", why)
            self._leaves = True
            self._leader.leave_now()


@dataclass(frozen=True)
class TimeLimitSource:
    """What Slurm reports about this task. Both calls may block for seconds.

    ``time_left_s`` returns what is left of its wall time, None where it has no end, and raises
    `SlurmCommandError` where Slurm does not answer.
    """

    predict_exit: Callable[[], ExitAction | None]  # if it ended now; None: Slurm is silent
    time_left_s: Callable[[], float | None]
    known_left_s: float | None = None  # the same, as far as it is known without a query
    spread_s: float = 0.0  # within which all tasks query whether their limit was changed
    first_spread_s: float = 0.0  # the same for the first query, where nothing is known


class PreemptionWatcher:
    """Turns signals and the approaching end of the wall time into notices, on a thread.

    It may query Slurm, which can take seconds: nothing of the training waits for it, nor does the
    notice of the time limit, which comes as it was planned. ``notice_command`` runs on a thread of
    its own. ``report`` gets, once, why that fails; ``avoid`` the seconds within which the node
    goes, before the notice.
    """

    def __init__(
        self,
        caught: SignalPipe,
        pool: Pool,
        notices: PreemptionState,
        scheduler: TimeLimitSource,
        report: Callable[[str], object] = lambda why: None,
        avoid: Callable[[float], object] = lambda left_s: None,
    ) -> None:
        self._report, self._avoid = report, avoid
        self._caught = caught
        self._pool = pool
        self._notices = notices
        self._scheduler = scheduler
        self._started_at = time.monotonic()
        self._end = self._started_at  # of the wall time, while the notice is planned
        self._planned: tuple[float, PreemptionNotice] | None = None  # due when; the notice
        self._ask_at: float | None = None
        if scheduler.known_left_s is not None:
            self._plan(self._started_at + scheduler.known_left_s)
        else:
            self._ask_at = self._started_at + random.uniform(0.0, scheduler.first_spread_s)
        self._lock = threading.RLock()  # held to read or change when a query and the notice are due
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)

    def start(self) -> None:
        """Begin to watch, from the signals that have come already on."""
        self._thread.start()
        command = self._pool.launcher.agent.notice_command
        if command is not None:
            run = threading.Thread(target=self._run_command, args=(command,), daemon=True)
            run.start()

    def close(self) -> None:
        """Watch no longer."""
        self._ended.set()
        self._caught.wake()
        self._thread.join(timeout=1.0)  # it may wait for Slurm

    def _run(self) -> None:
        while not self._ended.is_set():
            for number in self._caught.wait(self._wait_s()):
                came_at = time.monotonic()
                notice = of_signal(number, self._pool, came_at)
                if notice is None:
                    continue
                _log.warning("this node is to be left: %s", number.name)
                self._notices.add(notice)
                if notice.reason is Reason.SIGNAL:
                    how = self._scheduler.predict_exit()
                    self._notices.add(of_departure(how, self._pool, came_at))
            self._check_clock()

    def _run_command(self, command: str) -> None:
        has_failed = False
        while not self._ended.is_set():
            code, output, why = _util.run_shell(command, timeout_s=_COMMAND_S)
            is_answer = code is not None and 0 <= code <= 125  # else it was killed, or is not there
            if not (is_answer or has_failed):
                has_failed = True
                self._report(why)
            now, delay_s = time.monotonic(), self._pool.launcher.signal_delay_s
            notice = of_command(code, output, delay_s, now)
            if notice is not None:
                _log.warning("launcher.agent.notice_command: %s", output.strip()[:200])
                self._avoid(notice.given_s or delay_s)
                self._notices.add(notice)
                return
            self._ended.wait(_COMMAND_EVERY_S)

    def _plan(self, end: float) -> None:
        """Plan the notice, and a query shortly before it: limits get extended."""
        self._end = end
        self._planned = self._notice_of_end(None)
        # at random, so that not all tasks of a run ask at once
        again_at = self._planned[0] - _LOOK_AGAIN_S - random.uniform(0.0, self._scheduler.spread_s)
        self._ask_at = again_at if again_at > time.monotonic() + _LOOK_AGAIN_S else None

    def _notice_of_end(self, departure_s: float | None) -> tuple[float, PreemptionNotice]:
        length_s, delay_s = self._end - self._started_at, self._pool.launcher.signal_delay_s
        return of_time_limit(self._end, length_s, delay_s, departure_s)

    def _wait_s(self) -> float | None:
        with self._lock:
            due = [
                at for at in (self._ask_at, self._planned and self._planned[0]) if at is not None
            ]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _check_clock(self) -> None:
        """Start a query for the time that is left, and add the notice, where that is due."""
        with self._lock:
            if self._ask_at is not None and time.monotonic() >= self._ask_at:
                self._ask_at = None
                _in_background(self._query_limit)
            if self._planned is not None and time.monotonic() >= self._planned[0]:
                self._planned = self._notice_of_end(self._notices.departure_s)  # perhaps later
                if time.monotonic() >= self._planned[0]:
                    self._notices.add(self._planned[1])
                    self._planned = None

    def _query_limit(self) -> None:
        asked_at = time.monotonic()
        try:
            left_s = self._scheduler.time_left_s()
        except SlurmCommandError as e:
            _log.warning("Slurm does not report how much time is left: %s", e)
            with self._lock:
                spread_s = random.uniform(0.0, self._scheduler.spread_s)
                self._ask_at = asked_at + _ASK_SILENT_S + spread_s
        else:
            with self._lock:
                self._planned = None
                if left_s is not None:
                    self._plan(asked_at + left_s)
        self._caught.wake()


def _in_background(call: Callable[[], None]) -> None:
    threading.Thread(target=call, daemon=True).start()
