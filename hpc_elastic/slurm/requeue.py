"""How a task goes back to the queue: taken by Slurm, or given back by itself. The effects.

What is to be done in which case is in `decision`. Here it is done, from within the task.

The two minutes. When the last process of a requeued attempt has ended, and the epilog with it,
Slurm looks at the task's start time, and *only if it lies in the past* sets it to two minutes
ahead. So the attempt that ends says itself when the next one may start: `scontrol requeue`, and
then `scontrol update starttime=now+D`, with D longer than it takes to end. Of 96 tries of array
elements with D = 3, 5, 10 and 30 s, after a preemption and without one, each started D seconds
later, and none was FAILED or had its credential revoked. Where D is too short (2 s and a process
that ended 0.7 s later, 5 s and an epilog of 7 s), the task is held for the two minutes, as if
nothing had been said: it is never worse than that, and a peer may release it then.

In a job of several nodes each agent does all this for the one job. One requeue is carried out, the
others are told that the job is pending; each postpones the start once more, so that the last agent
to end counts. Those that come late find the job COMPLETING, but requeued once more than they know
of: that too tells a requeue from a cancellation.

(Measured on Slurm 22.05; scontrol(1), slurm.conf(5) GraceTime.)
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol, cast

from hpc_elastic.errors import LocalQueueError, RunDirectoryError, SlurmCommandError
from hpc_elastic.rundir import RunDir
from hpc_elastic.slurm import replacement
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.decision import Departure, Facts, Reason, decide, row_of
from hpc_elastic.slurm.outputs import is_refused
from hpc_elastic.slurm.states import TaskState, job_of, queue_name

_log = logging.getLogger(__name__)

_KILLED_WITHIN_S = 120.0
"""Longer than Slurm's KillWait (30 s by default) between its SIGTERM and its SIGKILL."""

RETURN_DELAY_S = 10.0
"""When a task that was taken may start again, from the moment in which it requeues itself.

Longer than it takes for its last process, and the site's epilog, to end. Without an epilog 3 s are
enough for a process that ends within one. Too long costs the difference, too short two minutes.
"""


PARENT_REQUEUES = "HPC_ELASTIC_PARENT_REQUEUES"
"""Set where the agent's parent requeues the task, as submitit does: nothing is done here then."""

_TRIES = 10
_AGAIN_S = 3.0, 9.0
"""Between two tries, at random: all tasks of a run may ask a controller that has just come back."""

_COMES_BACK = (Departure.REQUEUE, Departure.REQUEUED)
_FAILURES = (SlurmCommandError, LocalQueueError)


class Scheduler(Protocol):
    """What a task needs of its scheduler: `SlurmClient`, or `LocalQueue` with launcher=local."""

    def tasks(self, job_ids: Iterable[str]) -> dict[str, TaskState]:
        """Return the tasks of these jobs by name."""

    def requeue(self, task: str) -> None:
        """Send a task back to the queue."""

    def postpone(self, tasks: Sequence[str], delay_s: float) -> None:
        """Let tasks that wait not start for so long."""

    def exclude(self, tasks: Sequence[str], hosts: Iterable[str]) -> None:
        """Keep tasks that wait away from some nodes."""

    def cancel(self, tasks: Sequence[str]) -> None:
        """Cancel tasks."""


def foresee(
    task: str, client: Scheduler, *, attempt: int | None = None, reason: Reason = Reason.SIGNAL
) -> Departure | None:
    """Ask Slurm what a notice means, and do nothing: how this task would go now (its agent).

    Args:
        task: As for `depart`.
        client: The scheduler.
        attempt: As for `depart`.
        reason: What the agent knows.

    Returns:
        EXIT: it was cancelled, there is nothing to wait for; STAY: the notice means nothing;
        others: it comes back. None: Slurm does not answer.
    """
    try:
        return decide(_ask(task, client, attempt, reason))
    except _FAILURES as e:
        _log.warning("what the notice means is not known: %s", e)
        return None


def depart(
    task: str,
    client: Scheduler,
    *,
    attempt: int | None = None,
    reason: Reason = Reason.SIGNAL,
    run: RunDir | None = None,
    note: Callable[[Facts], None] = lambda facts: None,
) -> Departure:
    """Go back to the queue if the task is to come back; return how it goes.

    The task may end at once after that, and should within seconds. Where Slurm, or the run's
    directory, does not answer, that is tried again for about a minute; then this call waits until
    Slurm has killed the task: one that was preempted it requeues by itself.
    From here on the process ignores SIGTERM (if this is its main thread).

    Args:
        task: The task this process is: ``<array job id>_<index>``, a job id, or
            ``<job id>.<node id>``.
        client: The scheduler.
        attempt: The attempt of the task that this process is, None if unknown.
        reason: Why it goes.
        run: Its run: whether that has ended, which nodes it avoids, and where another task is
            submitted in place of one that Slurm will not requeue. None: none of that is done.
        note: Is told what Slurm says before anything is done about it.

    Returns:
        REQUEUE, REQUEUED and REPLACE: the node comes back; EXIT: it does not; STAY: Slurm could
        not be reached, or the task is only suspended.
    """
    with _deaf_to_sigterm(for_good=True):
        try:
            return _patiently(lambda: _go(task, client, attempt, reason, RETURN_DELAY_S, run, note))
        except (*_FAILURES, OSError) as e:
            _log.warning("not requeued by ourselves, waiting for the scheduler to do it: %s", e)
            time.sleep(_KILLED_WITHIN_S)
            return Departure.STAY


def give_back(
    task: str,
    client: Scheduler,
    delay_s: float,
    *,
    attempt: int | None = None,
    run: RunDir | None = None,
) -> Departure:
    """Give this task's node back: requeue the task, to start no sooner than after some time.

    For a task that holds a node it can not use. What fails is tried again, as in `depart`. Its last
    process should end within `delay_s`; if it takes longer, Slurm's two minutes follow. From here
    on the process ignores SIGTERM (if this is its main thread), unless this call fails.

    Args:
        task: As for `depart`.
        client: The scheduler.
        delay_s: From now; never taken for less than `RETURN_DELAY_S`.
        attempt: As for `depart`.
        run: As for `depart`.

    Returns:
        EXIT if the task was cancelled in the meantime, or its run has ended; else it comes back.

    Raises:
        SlurmCommandError: Slurm can not be reached or refuses; the task has its node still. A
            SIGTERM that came during the call is lost.
        LocalQueueError: The local launcher does not answer; likewise.
        OSError: The run's directory can not be read; likewise.
    """
    delay_s = max(delay_s, RETURN_DELAY_S)
    with _deaf_to_sigterm():
        return _patiently(lambda: _go(task, client, attempt, Reason.ASKED, delay_s, run))


@contextlib.contextmanager
def _deaf_to_sigterm(*, for_good: bool = False) -> Iterator[None]:
    """Ignore the SIGTERM that Slurm sends with a requeue; after an error, only if `for_good`.

    Off the main thread nothing is changed: handlers can be set there only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    except BaseException:
        if not for_good:
            signal.signal(signal.SIGTERM, handler)
        raise


def _patiently(act: Callable[[], Departure]) -> Departure:
    """Do what may be done twice, until it works once; at last raise why it does not."""
    for _ in range(_TRIES - 1):
        try:
            return act()
        except (*_FAILURES, OSError) as e:
            pause_s = random.uniform(*_AGAIN_S)
            _log.warning("to be tried again in %.0f s: %s", pause_s, e)
            time.sleep(pause_s)
    return act()


def _go(
    task: str,
    client: Scheduler,
    attempt: int | None,
    reason: Reason,
    delay_s: float,
    run: RunDir | None,
    note: Callable[[Facts], None] = lambda facts: None,
) -> Departure:
    facts = _ask(task, client, attempt, reason, run)
    note(facts)
    return _carry_out(task, client, facts, delay_s, run)


def _ask(
    task: str,
    client: Scheduler,
    attempt: int | None,
    reason: Reason,
    run: RunDir | None = None,
) -> Facts:
    state = client.tasks([job_of(task)]).get(queue_name(task))
    if run is None:
        return Facts(reason, state, attempt)
    try:
        spec = run.load()
    except RunDirectoryError as e:  # then it forbids nothing
        _log.warning("launcher.max_requeues is not looked at: %s", e)
        return Facts(reason, state, attempt, run_ended=run.is_over)
    left = spec.requeues_left(attempt)
    ended = run.is_over or not replacement.is_of(spec, task)
    return Facts(reason, state, attempt, run_ended=ended, requeues_left=left)


def _carry_out(
    task: str, client: Scheduler, facts: Facts, delay_s: float, run: RunDir | None
) -> Departure:
    """Do what is decided; a task that comes back is told when it may start."""
    how = decide(facts)
    _log.info("%s: %s, so %s", task, row_of(facts).name, how.value)
    if PARENT_REQUEUES in os.environ:
        return how
    if how is Departure.REQUEUE and not _requeue(task, client):
        return _carry_out(task, client, replace(facts, refused=True), delay_s, run)
    if how is Departure.REPLACE:
        slurm = cast(SlurmClient, client)  # the local launcher refuses nothing
        made = None if run is None else replacement.replace(run, task, slurm)
        return Departure.EXIT if made is None else how
    if how is Departure.REQUEUE and run is not None and run.is_over:
        return _take_back(task, client)
    if how in _COMES_BACK:
        _start_after(task, client, delay_s)
        _keep_away(task, client, run)
    return how


def _requeue(task: str, client: Scheduler) -> bool:
    """Requeue a task; return False if Slurm will not."""
    try:
        client.requeue(task)
    except SlurmCommandError as e:
        if not is_refused(e):
            raise
        _log.warning("Slurm does not requeue %s: %s", task, e)
        return False
    return True


def _take_back(task: str, client: Scheduler) -> Departure:
    """Cancel a task that was requeued while its run was cancelled: it is not to come back."""
    _log.warning("%s: the run was cancelled meanwhile, so it does not come back", task)
    client.cancel([task])
    return Departure.EXIT


def _start_after(task: str, client: Scheduler, delay_s: float) -> None:
    try:
        client.postpone([task], delay_s)
    except _FAILURES as e:
        _log.warning("%s may start again late, or too soon: %s", task, e)


def _keep_away(task: str, client: Scheduler, run: RunDir | None) -> None:
    """Let the next attempt avoid the nodes that the run avoids."""
    hosts = replacement.excluded(run) if run is not None else {}
    try:
        if hosts:
            client.exclude([task], hosts)
    except _FAILURES as e:
        _log.warning("%s may start on %s again: %s", task, ", ".join(sorted(hosts)), e)
