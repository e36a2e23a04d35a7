"""Requeue of a task by itself.

`exit_action` decides; here the decision is carried out, from within the task.

The two minutes. When the last process of a requeued attempt has ended, and the epilog with it,
Slurm looks at the task's start time, and *only if it lies in the past* sets it to two minutes
ahead. So the attempt that ends sets the start of the next one: `scontrol requeue`, and then
`scontrol update starttime=now+D`, with D longer than it takes to end. Of 96 tries of array elements
with D = 3, 5, 10 and 30 s, after a preemption and without one, each started D seconds later, and
none was FAILED or had its credential revoked. Where D is too short (2 s and a process that ended
0.7 s later, 5 s and an epilog of 7 s), the task is held for the two minutes, as without a start
time: it is never worse than that, and a peer may release it then.

In a job of several nodes each agent does all this for the one job. One requeue is carried out; the
others fail because the job is pending; each postpones the start once more, so that the last agent
to end counts. Late ones find the job COMPLETING, with one restart more than their attempt: that too
distinguishes a requeue from a cancellation.

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
from collections.abc import Callable, Iterator

from hpc_elastic.errors import LocalQueueError, RunDirectoryError, SlurmCommandError
from hpc_elastic.run import job_of, queue_name
from hpc_elastic.run.directory import RunDir
from hpc_elastic.slurm import parsing
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.combined_requests import CombinedRequests
from hpc_elastic.slurm.exit_action import ExitAction, ExitFacts, Reason, decide, row_of
from hpc_elastic.slurm.local_queue import LocalQueue
from hpc_elastic.slurm.quarantine import avoided_nodes
from hpc_elastic.slurm.run_tasks import is_recorded, limit_of, resubmit

_log = logging.getLogger(__name__)

RETURN_DELAY_S = 10.0
"""Seconds from the moment in which a task requeues itself until it may start again.

Longer than it takes for its last process, and the site's epilog, to end. Without an epilog 3 s are
enough for a process that ends within one. Too long costs the difference, too short two minutes.
"""

PARENT_REQUEUES = "HPC_ELASTIC_PARENT_REQUEUES"
"""Set where the agent's parent requeues the task, as submitit does: nothing is done here then."""

_KILLED_WITHIN_S = 120.0
"""Longer than Slurm's KillWait (30 s by default) between its SIGTERM and its SIGKILL."""
_TRIES = 10
_AGAIN_S = 3.0, 9.0
"""Between two tries, at random: all tasks of a run may query a controller that just came back."""
_FAILURES = (SlurmCommandError, LocalQueueError)


TaskQueue = SlurmClient | LocalQueue | CombinedRequests


def predict_exit_action(
    task: str, client: TaskQueue, *, attempt: int | None = None
) -> ExitAction | None:
    """Return how this task would exit now after SIGTERM, as `requeue_or_exit`, and do nothing.

    EXIT: it was cancelled, there is nothing to wait for; STAY: the notice means nothing; others: it
    comes back. None if unknown: Slurm does not answer.
    """
    try:
        return decide(_facts(task, client, attempt, Reason.SIGNAL, None))
    except _FAILURES as e:
        _log.warning("the meaning of the notice is unknown: %s", e)
        return None


def requeue_or_exit(
    task: str,
    client: TaskQueue,
    *,
    attempt: int | None = None,
    reason: Reason = Reason.SIGNAL,
    run: RunDir | None = None,
    note: Callable[[ExitFacts], None] = lambda facts: None,
) -> ExitAction:
    """Go back to the queue if the task is to come back; return how it exits.

    The task should end within seconds after that. Where Slurm, or the run's directory, does not
    answer, that is tried again for about a minute; then this call waits until Slurm has killed the
    task: one that was preempted it requeues by itself. From here on the process ignores SIGTERM (if
    this is its main thread).

    Without ``run`` it is not known whether that has ended and which nodes it avoids, and no task is
    submitted in place of one that Slurm will not requeue. ``note`` receives the facts before
    anything is done. REQUEUE, REQUEUED and REPLACE: the node comes back; EXIT: it does not; STAY:
    Slurm could not be reached, or the task is only suspended.
    """
    delay_s = RETURN_DELAY_S
    with _deaf_to_sigterm(for_good=True):
        try:
            return _retry(lambda: _carry_out(task, client, attempt, reason, delay_s, run, note))
        except (*_FAILURES, OSError) as e:
            _log.warning("not requeued by ourselves, waiting for the scheduler to do it: %s", e)
            time.sleep(_KILLED_WITHIN_S)
            return ExitAction.STAY


def requeue_after(
    task: str,
    client: TaskQueue,
    delay_s: float,
    *,
    attempt: int | None = None,
    run: RunDir | None = None,
) -> ExitAction:
    """Requeue a task that cannot use its node, to start in `delay_s` seconds at the earliest.

    What fails is tried again, and SIGTERM ignored unless this call fails, as by `requeue_or_exit`.
    A delay below `RETURN_DELAY_S` counts as that. The last process should end within it; if it
    takes longer, Slurm's two minutes follow. Returns EXIT if the task was cancelled in the
    meantime, or its run has ended. After a SlurmCommandError, LocalQueueError or OSError the task
    still has its node, and a SIGTERM that came during the call is lost.
    """
    delay_s = max(delay_s, RETURN_DELAY_S)
    with _deaf_to_sigterm():
        return _retry(lambda: _carry_out(task, client, attempt, Reason.ASKED, delay_s, run))


@contextlib.contextmanager
def _deaf_to_sigterm(*, for_good: bool = False) -> Iterator[None]:
    """Ignore the SIGTERM of a requeue (main thread); after an error only if `for_good`."""
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


def _retry(act: Callable[[], ExitAction]) -> ExitAction:
    """Do what may be done twice, until it works once; raise the last error."""
    for _ in range(_TRIES - 1):
        try:
            return act()
        except (*_FAILURES, OSError) as e:
            pause_s = random.uniform(*_AGAIN_S)
            _log.warning("to be tried again in %.0f s: %s", pause_s, e)
            time.sleep(pause_s)
    return act()


def _facts(
    task: str, client: TaskQueue, attempt: int | None, reason: Reason, run: RunDir | None
) -> ExitFacts:
    state = client.tasks([job_of(task)]).get(queue_name(task))
    if state is not None and state.state == "PENDING" and state.restarts == attempt:
        raise SlurmCommandError(["squeue"], 0, f"its answer is older than this attempt of {task}")
    if run is None:
        return ExitFacts(reason, state, attempt)
    try:
        spec = run.load()
    except RunDirectoryError as e:  # then it forbids nothing
        _log.warning("launcher.max_requeues is ignored: %s", e)
        return ExitFacts(reason, state, attempt, run_ended=run.is_over)
    left = spec.requeues_left(attempt)
    is_former = spec.generation > 0 and not is_recorded(spec, task)  # from before a resume
    ended = run.is_over or is_former
    return ExitFacts(reason, state, attempt, run_ended=ended, requeues_left=left)


def _carry_out(
    task: str,
    client: TaskQueue,
    attempt: int | None,
    reason: Reason,
    delay_s: float,
    run: RunDir | None,
    note: Callable[[ExitFacts], None] = lambda facts: None,
) -> ExitAction:
    """Do what is decided; set the time at which a task that comes back may start."""
    queue = client.slurm if isinstance(client, CombinedRequests) else client
    facts = _facts(task, client, attempt, reason, run)
    note(facts)
    rule = row_of(facts)
    how = rule.action
    _log.info("%s: %s, so %s", task, rule.name, how.value)
    if PARENT_REQUEUES in os.environ:
        return how
    if how is ExitAction.REQUEUE:
        try:
            client.requeue(task)
        except SlurmCommandError as e:
            if not parsing.is_refused(e):
                raise
            how = ExitAction.REPLACE
            _log.warning("Slurm does not requeue %s, so %s: %s", task, how.value, e)
        else:
            if run is not None and run.is_over:
                _log.warning("%s: the run was cancelled meanwhile: not requeued", task)
                queue.cancel([task])
                return ExitAction.EXIT
    if how is ExitAction.REPLACE:
        assert not isinstance(queue, LocalQueue), "the local launcher refuses nothing"
        made = None if run is None else resubmit(run, task, queue)
        return ExitAction.EXIT if made is None else how
    if how in (ExitAction.REQUEUE, ExitAction.REQUEUED):
        limit_s = None  # the full one again after a fitted one (`site.limits`)
        with contextlib.suppress(RunDirectoryError):
            limit_s = None if run is None else limit_of(run.load(), task)
        try:
            client.postpone([task], delay_s, time_limit_s=limit_s)
        except _FAILURES as e:
            _log.warning("%s may start again late, or too soon: %s", task, e)
        hosts, over = ([], []) if run is None else avoided_nodes(run, task)
        try:
            if hosts or over:
                queue.exclude([task], hosts, but=over)
        except _FAILURES as e:
            _log.warning("%s may start on %s again: %s", task, ", ".join(sorted(hosts)), e)
    return how
