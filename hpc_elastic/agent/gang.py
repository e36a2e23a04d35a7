"""A gang: the min part of a run as one job of several nodes, each with its agent.

To Slurm it is one job with one state. It is submitted with ``--no-kill``, so that it outlives the
loss of a node, and Slurm then takes that node out of the job: node i of the job's list is no
longer the node whose id is i. So the first nodes write down what the job was given.

The batch script runs on the first node, and may die with it: the other agents go on, but nothing
is left that would end the job after them, and Slurm would keep its nodes for as long as its time
limit allows. The next few agents see to that. (Both measured on Slurm 22.05.)
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_elastic.errors import SlurmError
from hpc_elastic.files import is_there, read_json, write_atomic
from hpc_elastic.rundir import ArrayFiles, RunSpec, Submission
from hpc_elastic.slurm import nodelist, replacement
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.environment import SlurmEnvironment
from hpc_elastic.slurm.states import Phase, TaskState, queue_name

_log = logging.getLogger(__name__)

DEPUTIES = 4
"""So many nodes, by their ids, do what must be done once for the gang, lest one may be lost."""

_ORPHANED_AFTER_S = 10.0
_POLL_S = 0.2
_LOST = "NODE_FAIL"


@dataclass(frozen=True)
class GangNodes:
    """The nodes that a gang was given in one attempt, by node id."""

    attempt: int
    hosts: tuple[str, ...]


def record(files: ArrayFiles, slurm: SlurmEnvironment) -> None:
    """Write down which nodes the gang has (its first agents, at their start).

    Raises:
        SlurmEnvironmentError: the node list of the step does not parse.
    """
    nodes = GangNodes(slurm.restart_count, tuple(slurm.hosts))
    if slurm.node_id < DEPUTIES and recorded(files) != nodes:
        text = json.dumps({"attempt": nodes.attempt, "hosts": nodes.hosts})
        write_atomic(files.nodes, text + "\n")


def recorded(files: ArrayFiles) -> GangNodes | None:
    """Return which nodes the gang had when it last started; None if nobody has written it down."""
    try:
        raw = read_json(files.nodes) or {}
        return GangNodes(int(raw["attempt"]), tuple(map(str, raw["hosts"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def run_states(spec: RunSpec, listed: Mapping[str, TaskState]) -> dict[str, TaskState]:
    """Return the states of a run's tasks out of what the scheduler lists, its gang's node by node.

    Args:
        spec: The run.
        listed: What the scheduler says, by its own names; of other runs' tasks, too.
    """
    return states_of(replacement.current_names(spec), listed, _gang_of(spec))


def _gang_of(spec: RunSpec) -> dict[str, GangNodes]:
    """Return the recorded nodes of the gang, whose slots are the first, by the job it is now."""
    job = replacement.jobs_of(spec)[0] if spec.gang else None
    if job is None:
        return {}
    nodes = recorded(Submission(Path(spec.submission)).array(spec.tasks[0][0]))
    return {job: nodes} if nodes else {}


def states_of(
    tasks: Iterable[str],
    listed: Mapping[str, TaskState],
    gangs: Mapping[str, GangNodes] | None = None,
) -> dict[str, TaskState]:
    """Return the states of tasks out of what squeue lists, where a gang is one line (pure).

    Args:
        tasks: Names of tasks, of both kinds.
        listed: What squeue says, by its own names.
        gangs: What is recorded of the gangs' nodes, by job id.

    Returns:
        By name, in the order given; without the tasks that squeue does not list.
    """
    states: dict[str, TaskState] = {}
    split: dict[str, Sequence[TaskState]] = {}
    for task in tasks:
        job, _, node_id = task.partition(".")
        if job not in listed:
            continue
        if not node_id:
            states[task] = listed[job]
            continue
        if job not in split:
            split[job] = _by_node(listed[job], (gangs or {}).get(job))
        nodes, at = split[job], int(node_id)
        states[task] = replace(nodes[at] if at < len(nodes) else listed[job], task=task)
    return states


def _by_node(job: TaskState, given: GangNodes | None) -> list[TaskState]:
    """Return a job's state as those of its nodes, by node id; without any where it has none."""
    now = _expanded(job.node)
    if given is None or job.restarts not in (given.attempt, None) or not now:
        return [replace(job, node=node) for node in now]
    runs = job.phase is Phase.RUNNING
    kept = set(now)
    return [
        replace(job, node=host, state=_LOST if runs and host not in kept else job.state)
        for host in given.hosts
    ]


def _expanded(nodes: str) -> list[str]:
    try:
        return nodelist.expand(nodes) if nodes else []
    except ValueError:
        return []


def mark_end(logs: Path, slurm: SlurmEnvironment) -> None:
    """Tell the deputies that the agent beside the batch script has ended by itself."""
    if slurm.node_id == 0:
        (logs / "ended").touch()


def end_if_orphaned(
    task: str,
    first_logs: Path,
    client: SlurmClient,
    *,
    wait_s: float = _ORPHANED_AFTER_S,
) -> bool:
    """Cancel the gang's job if its batch script is gone (deputies, once the run has ended).

    It is taken for gone where the agent beside it does not end as well: Slurm's own word on the
    node comes after minutes only. Where just that agent was killed, the job had nothing more to do.

    Args:
        task: This task.
        first_logs: Log folder of the gang's first task, in this attempt.
        client: How to reach Slurm.
        wait_s: How long the agents of a run take to end, at most.

    Returns:
        Whether the job was cancelled.
    """
    deadline = time.monotonic() + wait_s
    while not is_there(first_logs / "ended"):
        if time.monotonic() >= deadline:
            return _cancel(queue_name(task), client)
        time.sleep(_POLL_S)
    return False


def _cancel(job: str, client: SlurmClient) -> bool:
    _log.warning("the batch script of job %s is gone with its node: the job is cancelled", job)
    try:
        client.cancel([job])
    except SlurmError as e:
        _log.warning("job %s was not cancelled and holds its nodes: %s", job, e)
        return False
    return True
