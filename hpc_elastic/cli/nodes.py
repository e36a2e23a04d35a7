"""One node of a run, as `preempt` and `kill` name it, take it and see it go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hpc_elastic.cli.queues import ask
from hpc_elastic.errors import HpcElasticError, RunDirectoryError, SlurmError, near_miss
from hpc_elastic.events import Event, EventLog, read_events
from hpc_elastic.known_runs import user
from hpc_elastic.rundir import RunDir, RunSpec
from hpc_elastic.slurm.states import Phase, TaskState
from hpc_elastic.submit.cancel import COMMANDS, read_result
from hpc_elastic.submit.outcome import cancellation

_POLL_S = 0.5
_ASK_S = 5.0


@dataclass(frozen=True)
class Node:
    """A node that a run has now.

    Attributes:
        run: The run.
        spec: Its description.
        task: The name of the node's task.
        host: The node's name.
        attempt: How often the task was requeued.
    """

    run: RunDir
    spec: RunSpec
    task: str
    host: str
    attempt: int

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.host} (task {self.task}, attempt {self.attempt})"

    @property
    def json(self) -> dict[str, Any]:
        """Return what ``--json`` says of it."""
        return {
            "run_id": self.spec.run_id, "run": str(self.run.path), "task": self.task,
            "node": self.host, "attempt": self.attempt,
        }  # fmt: skip

    def events(self, *kinds: str) -> list[Event]:
        """Return what this node's task has written of some kinds, in all its attempts."""
        found = read_events(self.run.event_logs)
        return [e for e in found if e["kind"] in kinds and e["task"] == self.task]

    def note(self, kind: str, **fields: Any) -> None:
        """Write down that a user takes this node.

        Raises:
            RunDirectoryError: the run belongs to somebody else.
        """
        log = self.run.events(COMMANDS)
        try:
            with log.open("a"):
                pass
        except OSError as e:
            remedy = "only its owner, and root, can take nodes from it"
            raise RunDirectoryError(f"{log}: {e.strerror}: {remedy}") from e
        EventLog(log, COMMANDS).write(
            kind, user=user(), host=self.host, node_task=self.task, **fields
        )


def find_node(run: Path, name: str) -> Node:
    """Return the node of a run that a user means.

    Args:
        run: The run directory.
        name: The node's name, with its domain or without; or its task's.

    Raises:
        RunDirectoryError: the run has ended or is cancelled, or has no such node; says which it
            has.
        SlurmError: Slurm does not answer.
    """
    files = RunDir(run)
    spec = files.load()
    require_goes_on(files)
    states = _states(spec)
    begun = {e["task"]: e for e in read_events(files.event_logs) if e["kind"] == "task"}
    hosts = {
        task: state.node or str(begun.get(task, {}).get("host", "an unknown node"))
        for task, state in states.items()
        if state.phase is Phase.RUNNING
    }
    found = [task for task, host in hosts.items() if name in (task, host, host.partition(".")[0])]
    if len(found) != 1:
        raise RunDirectoryError(_refusal(name, found, hosts, states))
    (task,) = found
    attempt = states[task].restarts
    attempt = int(begun.get(task, {}).get("attempt", 0)) if attempt is None else attempt
    return Node(files, spec, task, hosts[task], attempt)


def require_goes_on(run: RunDir) -> None:
    """Refuse a run that has ended, or is cancelled.

    Raises:
        RunDirectoryError: it has no node any more.
    """
    result, mark = read_result(run), cancellation(run)
    if result is not None:
        raise RunDirectoryError(f"{run.path} has ended: it {result}, and has no node any more")
    if mark is not None:
        raise RunDirectoryError(f"{run.path} was cancelled{mark.by_whom}: it gives up its nodes")


def _states(spec: RunSpec) -> dict[str, TaskState]:
    """Return the run's tasks, the nodes of a gang one by one."""
    queue = ask([spec])
    states = queue.of(spec)
    if states is None:
        raise SlurmError(f"the run's nodes are not known: {queue.why_unknown(spec)}")
    return states


def _refusal(
    name: str, found: Iterable[str], hosts: Mapping[str, str], states: Mapping[str, TaskState]
) -> str:
    """Say why a name is not that of one node, and what could be given (pure)."""
    several = ", ".join(found)
    if several:
        return f"{name} has several tasks of the run: give one of them ({several})"
    if name in states:
        return f"task {name} has no node: it is {states[name].state}"
    if not hosts:
        waiting = sum(state.phase is Phase.PENDING for state in states.values())
        return f"{name}: the run has no node now; tasks that wait for one: {waiting}"
    named = ", ".join(f"{host} (task {task})" for task, host in hosts.items())
    near = near_miss(name, hosts.values())
    return f"{name} is no node of the run{near}; its nodes: {named}"


def wait_until(node: Node, is_gone: Callable[[], bool], wait_s: float) -> float | None:
    """Wait until a node is gone, or its run has ended; return after how long.

    Returns:
        Seconds; None if it is still there after `wait_s`.
    """
    began = time.monotonic()
    while not (is_gone() or node.run.is_over):
        if time.monotonic() - began > wait_s:
            return None
        time.sleep(_POLL_S)
    return time.monotonic() - began


def state_now(node: Node) -> TaskState | None:
    """Return what the scheduler says of a node's task; None: it does not list it, or is silent."""
    try:
        return _states(node.spec).get(node.task)
    except HpcElasticError:
        return None


def left_alone(node: Node) -> list[str]:
    """Return the tasks that nobody would bring back, for no task of the run has a node now.

    Raises:
        SlurmError: Slurm does not answer.
    """
    states = _states(node.spec)
    if any(state.phase is Phase.RUNNING for state in states.values()):
        return []
    ended = (task for task, state in states.items() if state.phase is Phase.ENDED)
    return list(dict.fromkeys([node.task, *ended]))


def is_lost(node: Node, state: TaskState | None) -> bool:
    """Tell whether nothing runs any more of the attempt that had the node (pure)."""
    if state is None:
        return False
    return (state.restarts or 0) > node.attempt or state.phase in (Phase.ENDED, Phase.PENDING)


class NodeName(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """A node of the run that was named before; completed from its last group."""

    name = "node"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """Return the members of the group that begin so."""
        from click.shell_completion import CompletionItem

        from hpc_elastic.cli.options import find_run
        from hpc_elastic.files import read_json

        try:
            status = read_json(RunDir(find_run(str(ctx.params["run"]))).status) or {}
            hosts = [str(member["host"]) for member in status.get("members") or ()]
        except (HpcElasticError, OSError, ValueError, KeyError, TypeError):
            return []
        return [CompletionItem(host) for host in hosts if host.startswith(incomplete)]


argument = click.argument("node", type=NodeName(), metavar="NODE")
wait_option = click.option(
    "--wait-s", type=click.FloatRange(min=0), default=None, metavar="SECONDS",
    help="Wait so long for the node to be left. [default: 30 s more than it may take]",
)  # fmt: skip
