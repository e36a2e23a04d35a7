"""What a task does once it has been told to go: SIGTERM says neither why nor what comes next.

Slurm preempts in two stages: SIGTERM to the steps, and the requeue when the grace time is over. A
task that *ends* within the grace has ended for good, its job is FAILED and is not requeued; so a
preempted task has to requeue itself, or to stay until it is killed. Slurm's word tells the cases
apart: while the grace lasts the task is still RUNNING, whereas one that was cancelled, or whose
time is up, is on its way out already. (Measured on Slurm 22.05; scontrol(1), slurm.conf(5)
GraceTime.)
"""

from __future__ import annotations

import logging
import signal
import time
from enum import Enum

from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.states import Phase, TaskState

_log = logging.getLogger(__name__)

_KILLED_WITHIN_S = 120.0
"""Longer than Slurm's KillWait (30 s by default) between its SIGTERM and its SIGKILL."""


class Departure(Enum):
    """How a task goes."""

    REQUEUE = "requeue"
    EXIT = "exit"
    STAY = "stay"


def departure(state: TaskState | None) -> Departure:
    """Decide how a task goes that got SIGTERM.

    Args:
        state: What Slurm says of the task now; None if it does not know it any more.
    """
    if state is not None and state.phase is Phase.RUNNING:
        return Departure.REQUEUE
    return Departure.EXIT


def depart(task: str, client: SlurmClient) -> Departure:
    """Go back to the queue if the task was preempted; return how it goes.

    The task may end at once after that. Where Slurm can not be reached from this node, this call
    waits until Slurm has killed the task: then it requeues it by itself. A requeued task is held
    back by Slurm for two minutes, from the moment the last process of this attempt has ended.

    Args:
        task: The task this process is, as squeue prints it.
        client: How to reach Slurm.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm sends another one with the requeue
    try:
        how = departure(client.tasks([task.partition("_")[0]]).get(task))
        if how is Departure.REQUEUE:
            client.requeue(task)
    except SlurmCommandError as e:
        _log.warning("not requeued by ourselves, waiting for Slurm to do it: %s", e)
        how = Departure.STAY
        time.sleep(_KILLED_WITHIN_S)
    return how
