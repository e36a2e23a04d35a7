"""The commands that change a run: ``cancel``, ``resume``, ``node preempt`` and ``node kill``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_elastic import errors
from hpc_elastic._util import quoted
from hpc_elastic.cli import options

if TYPE_CHECKING:
    from hpc_elastic.run.directory import RunDir, RunSpec
    from hpc_elastic.run.events import Event
    from hpc_elastic.slurm.job_state import TaskState

_CANCEL_EXAMPLES = """
\b
Examples:
  hpc-elastic cancel last
  hpc-elastic cancel multirun/2030-01-31/12-00-00/3 --yes

\b
--json prints one object:
  run_id, run   the run's id and directory
  result        how it had ended already: "succeeded", "failed", or null
  cancelled     names of the tasks that were cancelled
  left          those of them that have not ended in time
"""


@click.command(epilog=_CANCEL_EXAMPLES)
@options.changed_run
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "--wait-s", type=click.FloatRange(min=0), default=None, metavar="SECONDS",
    help="Longest wait for the tasks to end. [default: 30 s more than they may take]",
)  # fmt: skip
@options.trust
@options.as_json
def cancel_command(run: Path, yes: bool, wait_s: float | None, as_json: bool) -> int:
    """End a run: its running tasks and its pending ones.

    Other runs of the same sweep go on. The tasks are ended as by scancel: SIGTERM, and SIGKILL
    after KillWait (by default 30 s). In that time the run saves a checkpoint at one step, from
    which `hpc-elastic resume` continues. A script that does not call should_checkpoint continues
    from its own last checkpoint.

    A task that is being requeued at this moment is ended too. The command returns when no task is
    left. On a terminal it asks for confirmation; without one, `last` needs --yes.

    The exit code is 1 if tasks are left after --wait-s, or the command was not confirmed. A run
    that has ended already is not changed, and the exit code is 0.
    """
    from hpc_elastic.launcher import control
    from hpc_elastic.launcher.run_handle import read_result_status
    from hpc_elastic.report.run_view import end_limit_s

    target = control.CancelTarget.read(run)
    done = control.nothing_to_do(target)
    if done is not None:
        options.print_json(target.to_json(None)) if as_json else print(done)
        return 0
    asks = not yes and sys.stdin is not None and sys.stdin.isatty()
    question = f"Cancel {target.spec.run_id}: {target}?"
    if not yes and not asks and click.get_current_context().meta[options.NAMED_LAST]:
        remedy = f"add --yes, or give the run's id ({target.spec.run_id})"
        raise click.UsageError(f"cancel last asks, and there is no terminal: {remedy}")
    if asks and not click.confirm(question, err=True):
        click.echo("not cancelled", err=True)
        if as_json:
            options.print_json(target.to_json(None))
        return 1
    bound = end_limit_s(target.spec) if wait_s is None else wait_s
    if not as_json:
        print(f"cancelling {target.spec.run_id}: {target}", flush=True)
    left = control.cancel(target, wait_s=bound, warn=lambda text: click.echo(text, err=True))
    if as_json:
        options.print_json(target.to_json(left))
        return 1 if left else 0
    if left:
        names = ", ".join(f"{task.task} ({task.state} {task.node})".strip() for task in left)
        click.echo(f"still there after {bound:g} s: {names}; they have received SIGTERM", err=True)
        return 1
    result = read_result_status(target.run)
    if result is not None:
        print(f"no task is left; the run {result} before it was cancelled")
        return 0
    print(f"cancelled; to continue from its last checkpoint: hpc-elastic resume {quoted(run)}")
    return 0


_RESUME_EXAMPLES = """
\b
Examples:
  hpc-elastic resume last
  hpc-elastic resume last nodes=2:8 launcher.partition=low launcher.time=12:00:00
  hpc-elastic resume multirun/2030-01-31/12-00-00/3 launcher.exclude=node17

\b
--json prints one object:
  run_id, run, launcher   as at the submission; run is the directory
  generation              number of times that the run was resumed
  nodes, job_ids          the requested nodes, and the jobs that request them
  result_job              the job of launcher.result_job; null without
  log                     launcher=local: the output of the launcher's process
"""


@click.command(epilog=_RESUME_EXAMPLES)
@options.changed_run
@click.argument("overrides", nargs=-1, metavar="[OVERRIDE]...")
@options.trust
@options.as_json
def resume_command(run: Path, overrides: tuple[str, ...], as_json: bool) -> int:
    """Restart a run that has stopped, in the same run directory, and return at once.

    The run has failed, was cancelled, or has lost all its tasks. It continues from its last good
    checkpoint in new tasks, as after any other loss of all its nodes: logs and events are appended,
    and rounds are counted on. Its number of restarts begins at 0 again, and its list of excluded
    nodes is empty again; launcher.exclude=... excludes nodes.

    OVERRIDE is nodes=..., nproc_per_node=... or launcher.KEY=..., as at the submission. All other
    settings and the config of the training stay the same; other overrides are refused. The code is
    that of the script's files now, or of its snapshot with launcher.code_snapshot=true.

    A run that still has tasks, or has succeeded, is refused. If this command is interrupted, the
    run can be resumed again.
    """
    from hpc_elastic.cli.submit import print_run
    from hpc_elastic.launcher.control import resume
    from hpc_elastic.run.directory import RunDir

    local = RunDir(run).load().settings.backend == "local"
    if local:
        resumed = _resume_locally(run, overrides)
    else:
        resumption, handle = resume(run, overrides)
        resumed = resumption.to_json(handle.jobs, log=None)
    if as_json:
        options.print_json(resumed)
        return 0
    where = f"output in {resumed['log']}" if local else f"job {' '.join(resumed['job_ids'])}"
    print(f"resumed with nodes={resumed['nodes']} ({where})")
    print_run(resumed["run_id"], run)
    return 0


def _resume_locally(run: Path, overrides: Sequence[str]) -> dict[str, Any]:
    from hpc_elastic.launcher import detach

    def work(report: Callable[[dict[str, Any]], None]) -> None:
        from hpc_elastic._util import sigterm_as_interrupt
        from hpc_elastic.launcher.control import resume
        from hpc_elastic.launcher.submit import released_on_failure
        from hpc_elastic.launcher.wait import wait

        with sigterm_as_interrupt():
            resumption, handle = resume(run, overrides)
            with released_on_failure(handle.jobs):
                log = detach.log_of(resumption.plan)
                detach.leave_terminal(log)
                report(resumption.to_json(handle.jobs, log=log))
            wait([handle], poll_interval_s=resumption.plan.launcher.poll_interval_s)

    resumed = detach.in_background(work)
    error = resumed.get("error")
    if error or not resumed:
        why = error["message"] if error else "the launcher ended; its traceback is above"
        options.print_message(why)
        raise errors.ScriptError("the launcher", 1, error)
    return resumed


_POLL_S = 0.5
_KILL_WAIT_S = 60.0
_PREEMPT_MARGIN_S = 30.0


@dataclass(frozen=True)
class NamedNode:
    """A node that a run has now."""

    run: RunDir
    spec: RunSpec
    task: str
    host: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.host} (task {self.task}, attempt {self.attempt})"

    def to_json(self, **found: Any) -> dict[str, Any]:
        """Return the node with what was found, as ``--json`` prints it."""
        return {
            "run_id": self.spec.run_id, "run": str(self.run.path), "task": self.task,
            "node": self.host, "attempt": self.attempt, **found,
        }  # fmt: skip

    @property
    def state(self) -> TaskState | None:
        """The state of its task; None if the scheduler lists none, or does not answer."""
        try:
            return _states(self.spec).get(self.task)
        except errors.HpcElasticError:
            return None

    def wait_until(self, is_gone: Callable[[], bool], wait_s: float) -> float | None:
        """Wait until it is gone, or its run has ended; return the seconds, None if it is not."""
        began = time.monotonic()
        while not (is_gone() or self.run.is_over):
            if time.monotonic() - began > wait_s:
                return None
            time.sleep(_POLL_S)
        return time.monotonic() - began

    def write_event(self, kind: str, **fields: Any) -> None:
        """Write the event that a user takes this node; RunDirectoryError in another user's run."""
        from hpc_elastic.run.events import COMMANDS, EventLog
        from hpc_elastic.run.registry import user
        from hpc_elastic.shared_files import make_folder

        log = self.run.events(COMMANDS)
        try:
            make_folder(log.parent)
            with log.open("a"):
                pass
        except OSError as e:
            remedy = "only its owner, and root, can take nodes from it"
            raise errors.RunDirectoryError(f"{log}: {e.strerror}: {remedy}") from e
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
    from hpc_elastic.slurm.job_state import Phase

    files = RunDir(run)
    spec = ownership.load_own(files, files.notices, files.event_logs)
    result, mark = read_result_status(files), files.cancellation()
    remedy = f"`hpc-elastic resume {spec.run_id}` restarts a run that has failed or was cancelled"
    if result is not None:
        what = f"{files.path} has ended ({result}), and has no nodes"
        raise errors.RunDirectoryError(what, remedy=remedy)
    if mark is not None:
        what = f"{files.path} was cancelled{mark.by_whom}, and leaves its nodes"
        raise errors.RunDirectoryError(what, remedy=remedy)
    states = _states(spec)
    running = {task: state for task, state in states.items() if state.phase is Phase.RUNNING}
    hosts = {task: state.node or "an unknown node" for task, state in running.items()}
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
            near = errors.near_miss(name, hosts.values())
            what = f"{name} is not a node of the run{near}; its nodes: {named}"
        remedy = f"give a node or a task that `hpc-elastic status {spec.run_id}` shows as running"
        raise errors.RunDirectoryError(what, remedy=remedy)
    (task,) = found
    return NamedNode(files, spec, task, hosts[task], states[task].restarts or 0)


def _states(spec: RunSpec) -> dict[str, TaskState]:
    """Return the run's tasks, the nodes of a co-allocated job one by one."""
    from hpc_elastic.slurm.scheduler import take_snapshot

    queue = take_snapshot([spec])
    states = queue.tasks_of(spec)
    if states is None:
        raise errors.SlurmError(f"the nodes of the run are unknown: {queue.why_unknown(spec)}")
    return states


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
        except (errors.HpcElasticError, OSError, ValueError, KeyError, TypeError):
            return []
        return [CompletionItem(host) for host in hosts if host.startswith(incomplete)]


argument = click.argument("node", type=NodeName(), metavar="NODE")
wait_option = click.option(
    "--wait-s", type=click.FloatRange(min=0), default=None, metavar="SECONDS",
    help="Longest wait for the node to leave. [default: 30 s more than it may take]",
)  # fmt: skip


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
    return kill(find_node(run, node), _KILL_WAIT_S if wait_s is None else wait_s, as_json)


def kill(node: NamedNode, wait_s: float, as_json: bool) -> int:
    """Kill a node's processes, wait, and print the outcome; return 0 if they have ended, else 1."""
    from hpc_elastic.slurm.job_state import LAUNCHER_ENDED, Phase
    from hpc_elastic.slurm.scheduler import Scheduler, require_killable

    require_killable(node.task)
    scheduler = Scheduler(node.run, node.spec)
    scheduler.require_own_jobs([node.task])
    if not as_json:
        print(f"killing {node}: nothing is saved", flush=True)
    node.write_event("kill")
    scheduler.kill_task(node.task)

    def has_ended() -> bool:
        state = node.state
        over = (Phase.ENDED, Phase.PENDING)
        return state is not None and (state.has_replaced(node.attempt) or state.phase in over)

    after_s = node.wait_until(has_ended, wait_s)
    if after_s is not None:
        states = _states(node.spec)
        if not any(state.phase is Phase.RUNNING for state in states.values()):
            # the run has lost its last node, and has no leader to restart its tasks
            ended = (task for task, state in states.items() if state.phase is Phase.ENDED)
            scheduler.restart_tasks(list(dict.fromkeys([node.task, *ended])))
    if as_json:
        options.print_json(node.to_json(gone=after_s is not None, after_s=after_s))
    elif after_s is None:
        click.echo(f"{node.host} is still there after {wait_s:g} s", err=True)
    else:
        left, why = node.spec.requeues_left(node.attempt), ""
        if node.run.is_over:
            why = "the run has ended"
        elif left is not None and left <= 0:
            why = f"launcher.max_requeues={node.spec.settings.launcher.max_requeues}"
        elif (state := node.state) is not None and state.reason == LAUNCHER_ENDED:
            why = LAUNCHER_ENDED
        back = f"is not restarted: {why}" if why else "starts again as soon as a node is free"
        print(f"{node.host} is gone after {after_s:.1f} s; its task {back}")
    return 1 if after_s is None else 0


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
    wait_s = grace_s + _PREEMPT_MARGIN_S if wait_s is None else wait_s
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
    after_s = found.wait_until(lambda: bool(exits()), wait_s)
    left = exits()
    comes_back = left[0].get("how") in ("requeue", "requeued", "replace") if left else None
    step = next((e["step"] for e in since if e["kind"] == "round_stopped" and e.get("step")), None)
    why = "it has its notice"
    if after_s is None:
        with suppress(FileNotFoundError):  # a leader has read it
            notice.unlink()
            why = "no leader has read the notice, which is withdrawn"
    if as_json:
        after_s = None if after_s is None else round(after_s, 1)
        options.print_json(found.to_json(
            grace_s=grace_s, left=bool(left), after_s=after_s, step=step, comes_back=comes_back,
        ))  # fmt: skip
    elif after_s is None:
        click.echo(f"{found.host} has not left within {wait_s:g} s: {why}", err=True)
    elif not left:
        print(f"the run has ended, and with it {found.host} has left")
    else:
        saved = "" if step is None else f"; all ranks saved step {step}"
        back = "starts again as soon as a node is free" if comes_back else "is not restarted"
        print(f"{found.host} left after {after_s:.1f} s{saved}; its task {back}")
    return 1 if after_s is None else 0
