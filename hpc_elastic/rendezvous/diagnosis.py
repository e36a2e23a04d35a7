"""Says in words what a group that has not formed is waiting for (pure)."""

from __future__ import annotations

from collections.abc import Callable

from hpc_elastic.rendezvous.machine import Machine
from hpc_elastic.slurm.states import Phase as SlurmPhase
from hpc_elastic.slurm.states import TaskState
from hpc_elastic.words import counted

_MAX_NAMED = 20


def waiting_for(machine: Machine, log_of: Callable[[str, int], str | None]) -> str:
    """Return who has joined and who is missing: tasks, hosts, Slurm's word, and their logs.

    Args:
        machine: The leader's, while a round forms.
        log_of: (task, attempt) -> where that attempt's log is; None if nobody knows.
    """
    least = machine.rules.min_nodes
    have = "has" if least == 1 else "have"
    here = f"{len(machine.joined)} of at least {counted(least, 'node')} {have} joined"
    missing = machine.missing()
    if not missing:
        return f"{here}; no other task of the run is known to run or to be queued"
    named = [_describe(task, machine, log_of) for task in missing[:_MAX_NAMED]]
    more = f", and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
    return f"{here}; missing: {'; '.join(named)}{more}"


def _describe(task: str, machine: Machine, log_of: Callable[[str, int], str | None]) -> str:
    state = (machine.muster.view or {}).get(task)
    member = next((a for a in machine.muster.unsettled if a.task == task), None)
    if member is not None:
        what = f"{task} on {member.host}, which was told to stop its workers and to join again"
        attempt = member.attempt
    elif state is None:
        return task
    else:
        what, attempt = f"{task} ({_slurms_word(state)})", state.restarts or 0
        if state.phase is not SlurmPhase.RUNNING:
            return what
    log = log_of(task, attempt)
    return f"{what}, log {log}" if log else what


def _slurms_word(state: TaskState) -> str:
    where = f" on {state.node}" if state.node else ""
    why = f", {state.reason}" if state.reason else ""
    return f"{state.state}{where}{why}"
