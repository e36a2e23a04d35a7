"""What Slurm's word on a task means for the agent of that task (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

from hpc_elastic.rendezvous.failures import Failure
from hpc_elastic.rendezvous.record import Agent
from hpc_elastic.slurm.reasons import remedy_of_end
from hpc_elastic.slurm.states import Phase, TaskState

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
    if state.phase is Phase.LEAVING:
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
    """Return why min nodes can not come together any more; None while they can.

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
