"""One node of a run, as `preempt` and `kill` name it, take it and see it go."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hpc_elastic.cli import options
from hpc_elastic.errors import HpcElasticError, RunDirectoryError, SlurmError, near_miss
from hpc_elastic.launcher.run_handle import COMMANDS, read_result_status
from hpc_elastic.run.directory import RunDir, RunSpec
from hpc_elastic.run.events import Event, EventLog, read_events
from hpc_elastic.run.registry import user
from hpc_elastic.slurm.job_state import LAUNCHER_ENDED, Phase, TaskState
from hpc_elastic.slurm.scheduler import Scheduler, require_killable, take_snapshot

_POLL_S = 0.5
_ASK_S = 5.0


@dataclass(frozen=True)
class NamedNode:
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


def find_node(run: Path, name: str) -> NamedNode:
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
    return NamedNode(files, spec, task, hosts[task], attempt)


def require_goes_on(run: RunDir) -> None:
    """Refuse a run that has ended, or is cancelled.

    Raises:
        RunDirectoryError: it has no node any more.
    """
    result, mark = read_result_status(run), run.cancellation()
    if result is not None:
        raise RunDirectoryError(f"{run.path} has ended: it {result}, and has no node any more")
    if mark is not None:
        raise RunDirectoryError(f"{run.path} was cancelled{mark.by_whom}: it gives up its nodes")


def _states(spec: RunSpec) -> dict[str, TaskState]:
    """Return the run's tasks, the nodes of a co-allocated job one by one."""
    queue = take_snapshot([spec])
    states = queue.tasks_of(spec)
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


def wait_until(node: NamedNode, is_gone: Callable[[], bool], wait_s: float) -> float | None:
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


def state_now(node: NamedNode) -> TaskState | None:
    """Return what the scheduler says of a node's task; None: it does not list it, or is silent."""
    try:
        return _states(node.spec).get(node.task)
    except HpcElasticError:
        return None


def left_alone(node: NamedNode) -> list[str]:
    """Return the tasks that nobody would bring back, for no task of the run has a node now.

    Raises:
        SlurmError: Slurm does not answer.
    """
    states = _states(node.spec)
    if any(state.phase is Phase.RUNNING for state in states.values()):
        return []
    ended = (task for task, state in states.items() if state.phase is Phase.ENDED)
    return list(dict.fromkeys([node.task, *ended]))


def is_lost(node: NamedNode, state: TaskState | None) -> bool:
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
        from hpc_elastic.shared_files import read_json

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


# ---- ``hpc-elastic kill``: let a run lose a node without notice


_WAIT_S = 60.0
_KILL_EXAMPLES = """
\b
Examples:
  hpc-elastic kill last local-1
  hpc-elastic kill runs/7 node3
  hpc-elastic kill last 4711_2 --json

\b
--json prints one object:
  run_id, run, task, node, attempt   what was killed; attempt: of the task
  gone     whether nothing of it runs any more
  after_s  after how many seconds
"""


@click.command(epilog=_KILL_EXAMPLES)
@options.run
@argument
@wait_option
@options.as_json
def kill_command(run: Path, node: str, wait_s: float | None, as_json: bool) -> int:
    """Kill the agent and the workers of NODE, as if it had died: to see what a run makes of that.

    NODE is a node's name (node3, local-1) or that of its task, as `hpc-elastic status` shows them.
    SIGKILL ends its processes at once and nothing is saved: what was done since the last checkpoint
    is done again. The node's task goes back to the queue, as that of a lost node does. The machine
    itself is left alone, and so are other jobs on it.

    The nodes of a co-allocated job cannot be killed one by one, and are refused; so is a run that
    has ended. The exit code is 1 if the node is still there after the time.
    """
    return kill(find_node(run, node), _WAIT_S if wait_s is None else wait_s, as_json)


def kill(node: NamedNode, wait_s: float, as_json: bool) -> int:
    """Kill a node's processes, wait until they are gone, and say what came of it.

    Returns:
        0 if they are, else 1.
    """
    require_killable(node.task)
    if not as_json:
        print(f"killing {node}: nothing is saved", flush=True)
    node.note("kill")
    Scheduler(node.run, node.spec).kill_task(node.task)
    after_s = wait_until(node, lambda: is_lost(node, state_now(node)), wait_s)
    if after_s is not None:
        _bring_back(node)
    if as_json:
        gone = after_s is not None
        print(json.dumps({**node.json, "gone": gone, "after_s": after_s}, indent=2))
    elif after_s is None:
        click.echo(f"{node.host} is still there after {wait_s:g} s", err=True)
    else:
        print(f"{node.host} is gone after {after_s:.1f} s; {_what_next(node)}")
    return 1 if after_s is None else 0


def _what_next(node: NamedNode) -> str:
    """Say whether the task of a node that is gone starts again."""
    if node.run.is_over:
        return "its task does not come back: the run has ended"
    left = node.spec.requeues_left(node.attempt)
    if left is not None and left <= 0:
        return f"its task does not come back, by launcher.max_requeues={node.spec.max_requeues}"
    state = state_now(node)
    if state is not None and state.reason == LAUNCHER_ENDED:
        return f"its task does not come back: {LAUNCHER_ENDED}"
    return "its task starts again as soon as a node is free"


def _bring_back(node: NamedNode) -> None:
    """Let the tasks of a run without any node come back: no leader is left to see to it.

    The last one may have been killed by another command at the same time.
    """
    gone = left_alone(node)
    if gone:
        Scheduler(node.run, node.spec).restart_tasks(gone)


# ---- ``hpc-elastic preempt``: take a node from a run, with notice


_MARGIN_S = 30.0
_PREEMPT_EXAMPLES = """
\b
Examples:
  hpc-elastic preempt last local-1
  hpc-elastic preempt runs/7 node3 --grace-s 60
  hpc-elastic preempt last 4711_2 --json

\b
--json prints one object:
  run_id, run, task, node, attempt   what was preempted; attempt: of the task
  grace_s     the time that it was given
  left        whether it was left in time
  after_s     after how many seconds
  step        the step that all ranks saved before; null: none
  comes_back  whether its task went back to the queue; null: it was not left
"""


@click.command(epilog=_PREEMPT_EXAMPLES)
@options.run
@argument
@click.option(
    "--grace-s", type=click.FloatRange(min=0), default=None, metavar="SECONDS",
    help="The time that the node is given. [default: the run's launcher.preempt_grace_s]",
)  # fmt: skip
@wait_option
@options.as_json
def preempt_command(
    run: Path, node: str, grace_s: float | None, wait_s: float | None, as_json: bool
) -> int:
    """Take NODE from a run with notice, as a preemption does: it saves, leaves and comes back.

    NODE is a node's name (node3, local-1) or that of its task, as `hpc-elastic status` shows them.
    All ranks save at one step, the node's workers are stopped, the others go on, and the node's
    task goes back to the queue. It starts again as soon as a node is free. This needs no right but
    that to write into the run directory: a notice file tells the run's leader.

    The command returns when the node was left. The exit code is 1 if it was not in time; a notice
    that nobody has taken by then is withdrawn. A run that has ended is refused.
    """
    found = find_node(run, node)
    return preempt(
        found, found.spec.preempt_grace_s if grace_s is None else grace_s, wait_s, as_json
    )


def preempt(node: NamedNode, grace_s: float, wait_s: float | None, as_json: bool) -> int:
    """Give a node notice, wait until it is left, and say what came of it.

    Returns:
        0 if it was left, or the run has ended meanwhile; else 1.
    """
    from hpc_elastic.shared_files import write_atomic

    wait_s = grace_s + _MARGIN_S if wait_s is None else wait_s
    if not as_json:
        print(f"preempting {node}: it has {grace_s:g} s to save and to leave", flush=True)
    before = len(node.events("task_exited"))
    num_stops = len(_stops(node))
    node.note("preempt", grace_s=grace_s)
    notice = node.run.notices / node.task
    node.run.notices.mkdir(exist_ok=True)
    write_atomic(notice, f"{grace_s:g}\n")
    after_s = wait_until(node, lambda: len(node.events("task_exited")) > before, wait_s)
    left = node.events("task_exited")[before:]
    told = {
        **node.json, "grace_s": grace_s, "left": bool(left),
        "after_s": None if after_s is None else round(after_s, 1),
        "step": next((s["step"] for s in _stops(node)[num_stops:] if s.get("step")), None),
        "comes_back": left[0].get("how") in ("requeue", "requeued", "replace") if left else None,
    }  # fmt: skip
    unread = after_s is None and _withdraw(notice)
    if as_json:
        print(json.dumps(told, indent=2))
    elif after_s is None:
        why = "no leader has taken the notice, which is withdrawn" if unread else "it was told to"
        click.echo(f"{node.host} was not left within {wait_s:g} s: {why}", err=True)
    else:
        print(_outcome(node, told))
    return 1 if after_s is None else 0


def _stops(node: NamedNode) -> list[dict[str, Any]]:
    """Return when rounds of the run were stopped."""
    from hpc_elastic.run.events import read_events

    return [e for e in read_events(node.run.event_logs) if e["kind"] == "round_stopped"]


def _withdraw(notice: Path) -> bool:
    """Take a notice back; return False if it was taken already."""
    try:
        notice.unlink()
    except FileNotFoundError:
        return False
    return True


def _outcome(node: NamedNode, told: dict[str, Any]) -> str:
    if not told["left"]:
        return f"the run has ended; {node.host} is left with it"
    saved = "" if told["step"] is None else f"; all ranks saved step {told['step']}"
    back = "starts again as soon as a node is free" if told["comes_back"] else "does not come back"
    return f"{node.host} was left after {told['after_s']} s{saved}; its task {back}"
