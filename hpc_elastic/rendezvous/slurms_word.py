"""What Slurm's word on a task means for the agent of that task (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Set

from hpc_elastic.rendezvous.failures import Failure
from hpc_elastic.rendezvous.record import Agent
from hpc_elastic.slurm.states import Phase, TaskState

_NOT_ITS_FAULT = ("NODE_FAIL", "PREEMPTED", "TIMEOUT")


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
    killed = state.state == "FAILED" and is_lost(state, lost_attempt)
    return killed or state.state in _NOT_ITS_FAULT


def is_lost(state: TaskState, lost_attempt: int | None) -> bool:
    """Whether the attempt that Slurm speaks of is one that was lost: it learns of that late."""
    if lost_attempt is None:
        return False
    return state.restarts is None or state.restarts <= lost_attempt


def hopeless(
    view: Mapping[str, TaskState], present: Set[str], min_nodes: int, max_nodes: int
) -> Failure | None:
    """Return why min nodes can not come together any more; None while they can.

    Args:
        view: Slurm's word.
        present: Tasks that have joined, or may yet run again although they have ended.
        min_nodes: Of the run.
        max_nodes: As many tasks the run has.
    """
    over = [
        state for task, state in view.items() if state.phase is Phase.ENDED and task not in present
    ]
    if max_nodes - len(over) >= min_nodes:
        return None
    why = f"{len(over)} of the run's {max_nodes} tasks have ended for good ({over[0].state})"
    message = f"{why}, and min nodes is {min_nodes}"
    return Failure(over[0].task, over[0].node, 0, 0, 0.0, message, phase="start")
