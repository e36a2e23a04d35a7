"""How a task goes back to the queue: taken by Slurm, or given back by itself.

SIGTERM says neither why nor what comes next. Slurm preempts in two stages: SIGTERM to the steps,
and the requeue when the grace time is over. A task that *ends* within the grace has ended for
good, its job is FAILED and is not requeued; so a preempted task has to requeue itself, or to stay
until it is killed. Slurm's word tells the cases apart: while the grace lasts the task is still
RUNNING, whereas one that was cancelled, or whose time is up, is on its way out already. To requeue
a cancelled task is to be avoided: it would come back.

The two minutes. When the last process of a requeued attempt has ended, and the epilog with it,
Slurm looks at the task's start time, and *only if it lies in the past* sets it to two minutes
ahead. So the attempt that ends says itself when the next one may start: `scontrol requeue`, and
then `scontrol update starttime=now+D`, with D longer than it takes to end. Of 96 tries of array
elements with D = 3, 5, 10 and 30 s, after a preemption and without one, each started D seconds
later, and none was FAILED or had its credential revoked. Where D is too short (2 s and a process
that ended 0.7 s later, 5 s and an epilog of 7 s), the task is held for the two minutes, as if
nothing had been said: it is never worse than that.

In a job of several nodes each agent does all this for the one job. One requeue is carried out, the
others are told that the job is pending; each postpones the start once more, so that the last agent
to end counts. Those that come late find the job COMPLETING, but requeued once more than they know
of: that too tells a requeue from a cancellation.

(Measured on Slurm 22.05; scontrol(1), slurm.conf(5) GraceTime.)
"""

from __future__ import annotations

import logging
import signal
import time
from enum import Enum

from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.states import Phase, TaskState, job_of, queue_name

_log = logging.getLogger(__name__)

_KILLED_WITHIN_S = 120.0
"""Longer than Slurm's KillWait (30 s by default) between its SIGTERM and its SIGKILL."""

RETURN_DELAY_S = 10.0
"""When a task that was taken may start again, from the moment in which it requeues itself.

Longer than it takes for its last process, and the site's epilog, to end. Without an epilog 3 s are
enough for a process that ends within one. Too long costs the difference, too short two minutes.
"""


class Departure(Enum):
    """How a task goes."""

    REQUEUE = "requeue"
    REQUEUED = "requeued"  # by somebody else: Slurm, a user, or another node of the same job
    EXIT = "exit"
    STAY = "stay"


_COMES_BACK = (Departure.REQUEUE, Departure.REQUEUED)


def departure(state: TaskState | None, attempt: int | None = None) -> Departure:
    """Decide how a task goes that got SIGTERM.

    Args:
        state: What Slurm says of the task now; None if it does not know it any more.
        attempt: How often the task had been requeued when this attempt began, None if unknown.
    """
    if state is None:
        return Departure.EXIT
    if state.phase is Phase.RUNNING:
        return Departure.REQUEUE
    if state.phase is Phase.LEAVING and attempt is not None and (state.restarts or 0) > attempt:
        return Departure.REQUEUED
    return Departure.EXIT


def depart(task: str, client: SlurmClient, *, attempt: int | None = None) -> Departure:
    """Go back to the queue if the task was taken; return how it goes.

    The task may end at once after that, and should within seconds. Where Slurm can not be reached
    from this node, this call waits until Slurm has killed the task: then it requeues it by itself.
    From here on the process ignores SIGTERM (on its main thread only).

    Args:
        task: The task this process is: ``<array job id>_<index>``, a job id, or
            ``<job id>.<node id>``.
        client: How to reach Slurm.
        attempt: The attempt of the task that this process is, None if unknown.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm sends another one with the requeue
    try:
        return _return(task, client, RETURN_DELAY_S, attempt)
    except SlurmCommandError as e:
        _log.warning("not requeued by ourselves, waiting for Slurm to do it: %s", e)
        time.sleep(_KILLED_WITHIN_S)
        return Departure.STAY


def give_back(
    task: str, client: SlurmClient, delay_s: float, *, attempt: int | None = None
) -> Departure:
    """Give this task's node back: requeue the task, to start no sooner than after some time.

    For a task that holds a node it can not use. Its last process should end within `delay_s`; if
    it takes longer, Slurm's two minutes follow. On the main thread only: from here on the process
    ignores SIGTERM, unless this call fails.

    Args:
        task: As for `depart`.
        client: How to reach Slurm.
        delay_s: From now; never taken for less than `RETURN_DELAY_S`.
        attempt: As for `depart`.

    Returns:
        EXIT if the task was cancelled in the meantime, or has run out of time; else it comes back.

    Raises:
        SlurmCommandError: Slurm can not be reached or refuses; the task has its node still. A
            SIGTERM that came during the call is lost.
    """
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm sends one with the requeue
    try:
        return _return(task, client, max(delay_s, RETURN_DELAY_S), attempt)
    except SlurmCommandError:
        signal.signal(signal.SIGTERM, handler)
        raise


def _return(task: str, client: SlurmClient, delay_s: float, attempt: int | None) -> Departure:
    """Requeue a task that runs, and say when it may start, as long as it is known to come back."""
    state = client.tasks([job_of(task)]).get(queue_name(task))
    how = departure(state, attempt)
    if how is Departure.REQUEUE:
        client.requeue(task)
    if how in _COMES_BACK:
        _start_after(task, client, delay_s)
    return how


def _start_after(task: str, client: SlurmClient, delay_s: float) -> None:
    try:
        client.postpone([task], delay_s)
    except SlurmCommandError as e:
        _log.warning("Slurm will start %s again in two minutes at the earliest: %s", task, e)
