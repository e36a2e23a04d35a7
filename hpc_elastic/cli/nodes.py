"""``hpc-elastic node preempt`` and ``kill``: take one node from a run, with notice or without."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_elastic.cli import options
from hpc_elastic.errors import HpcElasticError, RunDirectoryError, SlurmError, near_miss
from hpc_elastic.slurm.job_state import LAUNCHER_ENDED, Phase, TaskState

if TYPE_CHECKING:
    from hpc_elastic.run.directory import RunDir, RunSpec
    from hpc_elastic.run.events import Event

_POLL_S = 0.5


@dataclass(frozen=True)
class NamedNode:
    """A node that a run has now."""

    run: RunDir
    spec: RunSpec
    task: str
    host: str
    attempt: int

    def __str__(self) -> str:
        """Return the node with its task, for messages."""
        return f"{self.host} (task {self.task}, attempt {self.attempt})"

    @property
    def json(self) -> dict[str, Any]:
        """The keys that ``--json`` has for the node."""
        return {
            "run_id": self.spec.run_id, "run": str(self.run.path), "task": self.task,
            "node": self.host, "attempt": self.attempt,
        }  # fmt: skip

    def write_event(self, kind: str, **fields: Any) -> None:
        """Write the event that a user takes this node; RunDirectoryError in another user's run."""
        from hpc_elastic.launcher.run_handle import COMMANDS
        from hpc_elastic.run.events import EventLog
        from hpc_elastic.run.registry import user
        from hpc_elastic.shared_files import make_folder

        log = self.run.events(COMMANDS)
        try:
            make_folder(log.parent)
            with log.open("a"):
                pass
        except OSError as e:
            remedy = "only its owner, and root, can take nodes from it"
            raise RunDirectoryError(f"{log}: {e.strerror}: {remedy}") from e
        EventLog(log, COMMANDS).write(
            kind, user=user(), host=self.host, node_task=self.task, **fields
        )


def find_node(run: Path, name: str) -> NamedNode:
    """Return a node of a run that this process may act on, by its name or its task's.

    The domain of the name may be left out. The error of a node that is not there lists the others.
    """
    from hpc_elastic.launcher.run_handle import read_result_status
    from hpc_elastic.run import ownership
    from hpc_elastic.run.directory import RunDir

    files = RunDir(run)
    spec = ownership.load_own(files, files.notices, files.event_logs)
    result, mark = read_result_status(files), files.cancellation()
    remedy = f"`hpc-elastic resume {spec.run_id}` restarts a run that has failed or was cancelled"
    if result is not None:
        what = f"{files.path} has ended ({result}), and has no nodes"
        raise RunDirectoryError(what, remedy=remedy)
    if mark is not None:
        what = f"{files.path} was cancelled{mark.by_whom}, and leaves its nodes"
        raise RunDirectoryError(what, remedy=remedy)
    states = _states(spec)
    hosts = {
        task: state.node or "an unknown node"
        for task, state in states.items()
        if state.phase is Phase.RUNNING
    }
    found = [task for task, host in hosts.items() if name in (task, host, host.partition(".")[0])]
    if len(found) != 1:
        if found:
            what = f"{name} has several tasks of the run; give one of them: {', '.join(found)}"
        elif name in states:
            what = f"task {name} has no node: it is {states[name].state}"
        elif not hosts:
            waiting = sum(state.phase is Phase.PENDING for state in states.values())
            what = f"{name}: the run has no node now; pending tasks: {waiting}"
        else:
            named = ", ".join(f"{host} (task {task})" for task, host in hosts.items())
            near = near_miss(name, hosts.values())
            what = f"{name} is not a node of the run{near}; its nodes: {named}"
        remedy = f"give a node or a task that `hpc-elastic status {spec.run_id}` shows as running"
        raise RunDirectoryError(what, remedy=remedy)
    (task,) = found
    return NamedNode(files, spec, task, hosts[task], states[task].restarts or 0)


def _states(spec: RunSpec) -> dict[str, TaskState]:
    """Return the run's tasks, the nodes of a co-allocated job one by one."""
    from hpc_elastic.slurm.scheduler import take_snapshot

    queue = take_snapshot([spec])
    states = queue.tasks_of(spec)
    if states is None:
        raise SlurmError(f"the nodes of the run are unknown: {queue.why_unknown(spec)}")
    return states


def wait_until(node: NamedNode, is_gone: Callable[[], bool], wait_s: float) -> float | None:
    """Wait until a node is gone, or its run has ended; return the seconds, None if it is not."""
    began = time.monotonic()
    while not (is_gone() or node.run.is_over):
        if time.monotonic() - began > wait_s:
            return None
        time.sleep(_POLL_S)
    return time.monotonic() - began


def state_now(node: NamedNode) -> TaskState | None:
    """Return the state of a node's task; None if the scheduler lists none, or does not answer."""
    try:
        return _states(node.spec).get(node.task)
    except HpcElasticError:
        return None


class NodeName(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """A node of the run; completed with the members of its last group."""

    name = "node"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """Return the nodes of the group that begin with `incomplete`."""
        from click.shell_completion import CompletionItem

        from hpc_elastic.run.directory import RunDir
        from hpc_elastic.shared_files import read_json

        try:
            status = read_json(RunDir(options.find_run(str(ctx.params["run"]))).status) or {}
            hosts = [str(member["host"]) for member in status.get("members") or ()]
        except (HpcElasticError, OSError, ValueError, KeyError, TypeError):
            return []
        return [CompletionItem(host) for host in hosts if host.startswith(incomplete)]


argument = click.argument("node", type=NodeName(), metavar="NODE")
wait_option = click.option(
    "--wait-s", type=click.FloatRange(min=0), default=None, metavar="SECONDS",
    help="Longest wait for the node to leave. [default: 30 s more than it may take]",
)  # fmt: skip


# ---- ``hpc-elastic node kill``


_WAIT_S = 60.0
_KILL_EXAMPLES = """
\b
Examples:
  hpc-elastic node kill last local-1
  hpc-elastic node kill runs/7 node3
  hpc-elastic node kill last 4711_2 --json

\b
--json prints one object:
  run_id, run, task, node, attempt   the node, and the attempt of its task
  gone     whether its processes have ended
  after_s  after how many seconds
"""


@click.command(epilog=_KILL_EXAMPLES)
@options.changed_run
@argument
@wait_option
@options.trust
@options.as_json
def kill_command(run: Path, node: str, wait_s: float | None, as_json: bool) -> int:
    """Kill the agent and the workers of NODE, to test how a run handles the loss of a node.

    NODE is the name of a node (node3, local-1) or of its task, as in `hpc-elastic status`. SIGKILL
    ends its processes at once, and nothing is saved: the steps since the last checkpoint are
    repeated. The node's task is requeued, as after the loss of a node. The machine and other jobs
    on it are not affected.

    The nodes of a co-allocated job cannot be killed one by one, and are refused; so is a run that
    has ended. The exit code is 1 if the node is still there after --wait-s.
    """
    return kill(find_node(run, node), _WAIT_S if wait_s is None else wait_s, as_json)


def kill(node: NamedNode, wait_s: float, as_json: bool) -> int:
    """Kill a node's processes, wait, and print the outcome; return 0 if they have ended, else 1."""
    from hpc_elastic.slurm.scheduler import Scheduler, require_killable

    require_killable(node.task)
    scheduler = Scheduler(node.run, node.spec)
    scheduler.require_own_jobs([node.task])
    if not as_json:
        print(f"killing {node}: nothing is saved", flush=True)
    node.write_event("kill")
    scheduler.kill_task(node.task)

    def has_ended() -> bool:
        """Whether the attempt that had the node has ended."""
        state = state_now(node)
        return state is not None and (
            (state.restarts or 0) > node.attempt or state.phase in (Phase.ENDED, Phase.PENDING)
        )

    after_s = wait_until(node, has_ended, wait_s)
    if after_s is not None:
        states = _states(node.spec)
        if not any(state.phase is Phase.RUNNING for state in states.values()):
            # the run has lost its last node, and has no leader to restart its tasks
            ended = (task for task, state in states.items() if state.phase is Phase.ENDED)
            scheduler.restart_tasks(list(dict.fromkeys([node.task, *ended])))
    if as_json:
        printed = {**node.json, "gone": after_s is not None, "after_s": after_s}
        options.print_json(printed)
    elif after_s is None:
        click.echo(f"{node.host} is still there after {wait_s:g} s", err=True)
    else:
        print(f"{node.host} is gone after {after_s:.1f} s; {_what_next(node)}")
    return 1 if after_s is None else 0


def _what_next(node: NamedNode) -> str:
    """Return whether the task of a killed node starts again, and why not."""
    if node.run.is_over:
        return "its task is not restarted: the run has ended"
    left = node.spec.requeues_left(node.attempt)
    if left is not None and left <= 0:
        most = node.spec.settings.launcher.max_requeues
        return f"its task is not restarted: launcher.max_requeues={most}"
    state = state_now(node)
    if state is not None and state.reason == LAUNCHER_ENDED:
        return f"its task is not restarted: {LAUNCHER_ENDED}"
    return "its task starts again as soon as a node is free"


# ---- ``hpc-elastic node preempt``


_MARGIN_S = 30.0
_PREEMPT_EXAMPLES = """
\b
Examples:
  hpc-elastic node preempt last local-1
  hpc-elastic node preempt runs/7 node3 --grace-s 60
  hpc-elastic node preempt last 4711_2 --json

\b
--json prints one object:
  run_id, run, task, node, attempt   the node, and the attempt of its task
  grace_s     the grace period in seconds
  left        whether the node left in time
  after_s     after how many seconds
  step        the step that all ranks saved before it left, or null
  comes_back  whether its task was requeued; null if the node has not left
"""


@click.command(epilog=_PREEMPT_EXAMPLES)
@options.changed_run
@argument
@click.option(
    "--grace-s", type=click.FloatRange(min=0), default=None, metavar="SECONDS",
    help="Grace period of the node. [default: launcher.preempt_grace_s of the run]",
)  # fmt: skip
@wait_option
@options.trust
@options.as_json
def preempt_command(
    run: Path, node: str, grace_s: float | None, wait_s: float | None, as_json: bool
) -> int:
    """Preempt NODE: all ranks save a checkpoint, the node leaves the run, and is requeued.

    NODE is the name of a node (node3, local-1) or of its task, as in `hpc-elastic status`. All
    ranks save at one step, the workers of the node are stopped, the others go on, and the node's
    task is requeued. It starts again as soon as a node is free. The command writes a notice file
    into the run directory, which the run's leader reads; it needs no other permission.

    The command returns when the node has left. The exit code is 1 if it has not left in time; a
    notice that no leader has read by then is withdrawn. A run that has ended is refused.
    """
    from hpc_elastic.run.events import EventReader
    from hpc_elastic.shared_files import make_folder, write_atomic

    found = find_node(run, node)
    grace_s = min(t.preempt_grace_s for t in found.spec.terms) if grace_s is None else grace_s
    wait_s = grace_s + _MARGIN_S if wait_s is None else wait_s
    if not as_json:
        print(f"preempting {found}: it has {grace_s:g} s to save and leave", flush=True)
    since: list[Event] = []
    log = EventReader(found.run.event_logs)
    log.skip()

    def exits() -> list[Event]:
        since.extend(log.new())
        return [e for e in since if (e["kind"], e["task"]) == ("task_exited", found.task)]

    found.write_event("preempt", grace_s=grace_s)
    notice = found.run.notices / found.task
    make_folder(found.run.notices)
    write_atomic(notice, f"{grace_s:g}\n")
    after_s = wait_until(found, lambda: bool(exits()), wait_s)
    left = exits()
    comes_back = left[0].get("how") in ("requeue", "requeued", "replace") if left else None
    stops = (e["step"] for e in since if e["kind"] == "round_stopped" and e.get("step"))
    step = next(stops, None)
    why = "it has its notice"
    if after_s is None:
        with suppress(FileNotFoundError):  # a leader has read it
            notice.unlink()
            why = "no leader has read the notice, which is withdrawn"
    if as_json:
        after_s = None if after_s is None else round(after_s, 1)
        printed = {
            **found.json, "grace_s": grace_s, "left": bool(left), "after_s": after_s,
            "step": step, "comes_back": comes_back,
        }  # fmt: skip
        options.print_json(printed)
    elif after_s is None:
        click.echo(f"{found.host} has not left within {wait_s:g} s: {why}", err=True)
    elif not left:
        print(f"the run has ended, and with it {found.host} has left")
    else:
        saved = "" if step is None else f"; all ranks saved step {step}"
        back = "starts again as soon as a node is free" if comes_back else "is not restarted"
        print(f"{found.host} left after {after_s:.1f} s{saved}; its task {back}")
    return 1 if after_s is None else 0
