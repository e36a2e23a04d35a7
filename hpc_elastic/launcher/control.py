"""Cancel a run: all of its tasks, and nothing else; it does not come back.

A task may be requeueing itself at this moment, and another may be submitting a replacement. So
``<run>/cancelled`` is written first, and whoever brings a task back looks for it afterwards, and
takes the task back (`slurm.requeue`, `slurm.scheduler`); a task that starts under
it ends at once. What is seen in the queue again is cancelled again until nothing is left.

The tasks get what ``scancel`` gives them: SIGTERM, and SIGKILL after Slurm's KillWait. Within that
time the run saves a checkpoint, as it does before any other end of a node. Local processes get as
long as their workers may take to stop.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_elastic.config.resolve import as_config, put, read_override, resolve
from hpc_elastic.config.schema import RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError, RunDirectoryError, SlurmError, SubmissionError
from hpc_elastic.launcher import prepare
from hpc_elastic.launcher.plan import Plan, PlannedRun
from hpc_elastic.launcher.prepare import Grace, Prepared, graces
from hpc_elastic.launcher.session import Submitted, lay_out, let_go_on_failure
from hpc_elastic.launcher.wait import COMMANDS, SubmittedTasks, mark, track
from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.log_entry import LogEntry, reopen
from hpc_elastic.rendezvous.term import make_term_folder
from hpc_elastic.run import registry
from hpc_elastic.run.directory import RunDir, RunSpec
from hpc_elastic.run.events import EventLog
from hpc_elastic.shared_files import read_json, write_atomic
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import Phase, TaskState
from hpc_elastic.slurm.scheduler import Scheduler, moved
from hpc_elastic.slurm.sweep_queue import SweepQueue

_log = logging.getLogger(__name__)

_POLL_S = 0.5
_AGAIN_S = 5.0
"""A task that still runs so long after it was cancelled is cancelled once more."""
_MARGIN_S = 30.0
_KILL_S = 10.0


@dataclass(frozen=True)
class CancelTarget:
    """What is to be cancelled.

    Attributes:
        run: The run.
        spec: Its description.
        result: How it ended, ``succeeded`` or ``failed``; None if it has left no result.
        left: Its tasks that have not ended.
    """

    run: RunDir
    spec: RunSpec
    result: str | None
    left: dict[str, TaskState]

    def __str__(self) -> str:
        """Return the tasks in words."""
        waiting = [t for t in self.left.values() if t.phase is Phase.PENDING]
        nodes = sorted({t.node for t in self.left.values() if t.phase is Phase.RUNNING})
        going = len(self.left) - len(waiting)
        where = f" (on {', '.join(filter(None, nodes))})" if any(nodes) else ""
        what = {f"{going} running{where}": going, f"{len(waiting)} waiting": len(waiting)}
        return ", ".join(text for text, count in what.items() if count) or "no task"


def look(path: Path) -> CancelTarget:
    """Return how a run stands.

    Raises:
        RunDirectoryError: it is no run directory, or may not be read.
        SlurmError: Slurm does not answer.
    """
    run = RunDir(path)
    spec = run.load()
    return CancelTarget(run, spec, read_result(run), Scheduler(run, spec).list_live_tasks())


def read_result(run: RunDir) -> str | None:
    """Return the status in result.json; None if there is none.

    Raises:
        RunDirectoryError: it is damaged, or may not be read.
    """
    try:
        result = read_json(run.result)
    except (OSError, ValueError) as e:
        raise RunDirectoryError(f"{run.result}: not readable: {e}") from e
    return None if result is None else str(result.get("status"))


def nothing_to_do(standing: CancelTarget) -> str | None:
    """Return why a run need not be cancelled; None if it must be.

    Raises:
        RunDirectoryError: its tasks are not known, for their files are gone.
    """
    run, mark = standing.run, standing.run.cancellation()
    if standing.left:
        return None
    if standing.result is not None:
        return f"{run.path} has ended already: it {standing.result}"
    if mark is not None:
        return f"{run.path} was cancelled already{mark.by_whom}"
    if not Path(standing.spec.submission).is_dir():
        raise RunDirectoryError(f"the run's tasks are not known: {moved(standing.spec)}")
    return f"{run.path} has no task that runs or waits; there is nothing to cancel"


def bound_s(spec: RunSpec) -> float:
    """Return how long the tasks of a run may take to end, in seconds (pure)."""
    stop_s = spec.kill_wait_s if spec.launcher == "slurm" else _local_s(spec)
    return stop_s + _MARGIN_S


def _local_s(spec: RunSpec) -> float:
    return max(spec.kill_wait_s, spec.agent.stop_timeout_s)


def cancel(
    standing: CancelTarget,
    *,
    wait_s: float,
    warn: Callable[[str], None],
    scheduler: Scheduler | None = None,
) -> list[TaskState]:
    """Cancel a run, and wait until its tasks are gone.

    Args:
        standing: As `look` found it.
        wait_s: How long to wait, at most.
        warn: Is told what the user should know.
        scheduler: Holds its tasks; None: that of its launcher.

    Returns:
        The tasks that are left; none if all went as it should.

    Raises:
        RunDirectoryError: the run is somebody else's; nothing was done.
        SlurmError: Slurm refuses. What was cancelled by then stays so.
    """
    run, spec = standing.run, standing.spec
    mark(run, warn)
    left = _end_all(scheduler or Scheduler(run, spec), spec, wait_s, warn)
    _let_others_start(run, spec)
    if read_result(run) is not None:
        run.cancelled.unlink(missing_ok=True)  # it came to its end meanwhile
    return left


def _let_others_start(run: RunDir, spec: RunSpec) -> None:
    """Let runs of the sweep start that stay away because this one had their nodes."""
    if spec.launcher != "slurm":
        return
    try:
        SweepQueue(run, spec, spec.partition, SlurmClient()).let_others_start(ends=True)
    except (SlurmError, OSError, RunDirectoryError) as e:
        _log.warning("other runs of the sweep may start minutes later: %s", e)


def _end_all(
    scheduler: Scheduler, spec: RunSpec, wait_s: float, warn: Callable[[str], None]
) -> list[TaskState]:
    """Cancel what there is until nothing is; return what is left after the time."""
    began = time.monotonic()
    kill_at = began + _local_s(spec) + _KILL_S
    told: dict[str, float] = {}
    while True:
        now, left = time.monotonic(), _ask(scheduler, warn)
        if left is not None:
            if not left:
                return []
            if now > began + wait_s:
                return list(left.values())
            due = to_tell(left.values(), told, now)
            scheduler.cancel_tasks(due)
            told |= {task.task: now for task in due}
            for name in left if spec.launcher == "local" and now > kill_at else ():
                scheduler.kill_task(name)  # Slurm does so itself
        elif now > began + wait_s:
            raise SlurmError("Slurm does not answer: whether all tasks have ended is not known")
        time.sleep(_POLL_S)


def to_tell(left: Iterable[TaskState], told: dict[str, float], now: float) -> list[TaskState]:
    """Return the tasks to cancel now: those that were not yet, and those that are back (pure).

    Args:
        left: Tasks that have not ended.
        told: When each was cancelled last.
        now: On the same clock.
    """
    return [
        task
        for task in left
        if task.phase in (Phase.PENDING, Phase.RUNNING)
        and (task.task not in told or now - told[task.task] >= _wait_s(task))
    ]


def _wait_s(task: TaskState) -> float:
    return _AGAIN_S if task.phase is Phase.RUNNING else 2 * _POLL_S


def _ask(scheduler: Scheduler, warn: Callable[[str], None]) -> dict[str, TaskState] | None:
    try:
        return scheduler.list_live_tasks()
    except SlurmError as e:
        warn(f"asking again: {e}")
        return None


def cancel_as_json(standing: CancelTarget, left: Iterable[TaskState] | None) -> dict[str, Any]:
    """Return what `hpc-elastic cancel --json` prints.

    Args:
        standing: As it was before.
        left: What is left now; None if there was nothing to do.
    """
    return {
        "run_id": standing.spec.run_id,
        "run": str(standing.run.path),
        "result": standing.result,
        "cancelled": [] if left is None else sorted(standing.left),
        "left": sorted(task.task for task in left or ()),
    }


# ---- Resume a run that has stopped: the same run directory, another generation of tasks
# The order of the steps is such that whoever is killed between two of them leaves a run that can
# be resumed again, and that no task of an earlier generation, whenever it may come back, can
# disturb:
#
# 1. It is seen that no task of the run is left, and what was asked for is checked.
# 2. The files of a new array are written beside the old ones. Nobody reads them yet.
# 3. The record that begins the new generation is created (`rendezvous.log_entry.reopen`). From
#    here on agents and workers of earlier generations are fenced. Of two who resume at once, one
#    creates it.
# 4. result.json and the mark of a cancellation move to ``before-resume.<n>/``; run.json names the
#    new generation and its tasks; settings.json what was asked for.
# 5. The array is submitted.
#
# Config, code and secret are what they were; so is the interpreter, if it is still there.


@dataclass(frozen=True)
class Resumption:
    """A run as it will go on.

    Attributes:
        run: The run.
        spec: Its next description.
        settings: What is asked for now.
        prepared: The plan of its new tasks.
        number: The number of the record that begins its generation.
        record: That record.
    """

    run: RunDir
    spec: RunSpec
    settings: RunSettings
    prepared: Prepared
    number: int
    record: LogEntry


def resume(path: Path, overrides: Sequence[str]) -> tuple[Resumption, Submitted]:
    """Resume a run that has stopped.

    Args:
        path: The run directory.
        overrides: ``nodes=...``, ``nproc_per_node=...`` and ``launcher.*=...``.

    Raises:
        RunDirectoryError: it goes on, has succeeded, or can not be read or written.
        ConfigError: an override can not be, or is one that would change the run itself.
        SubmissionError: somebody else resumes it at this moment, or Slurm refuses. In the latter
            case it can be resumed again.
        SlurmError: Slurm does not answer, so nobody knows whether it has stopped.
    """
    run = RunDir(path)
    run.load()  # whatever else it is, it is said first if it is no run
    before = _of(_last(run)[1])
    spec = run.load()
    require_stopped(run, spec)
    settings = changed(stored(run), overrides)
    resumption = prepare.with_free_numbers(lambda: _prepare(run, spec, settings, before))
    try:
        _begin(resumption)
    except OSError as e:
        if isinstance(e, RunDirectoryError):
            raise
        remedy = "nothing was submitted; resume it again once that is cured"
        raise RunDirectoryError(f"{e.filename or path}: {e.strerror or e}: {remedy}") from e
    try:
        handle = _hand_over(resumption.prepared)
    except BaseException:
        _put_back(run, _before(resumption))
        raise
    with let_go_on_failure(handle):
        return resumption, _note(resumption, handle)


def require_stopped(run: RunDir, spec: RunSpec) -> None:
    """Refuse a run that need not, or must not, be resumed.

    Raises:
        RunDirectoryError: it has succeeded, or tasks of it are left.
        SlurmError: Slurm does not answer.
    """
    if read_result(run) == "succeeded" or _last(run)[2] == "succeeded":
        remedy = "there is nothing to resume; to train on, submit a run that loads its checkpoint"
        raise RunDirectoryError(f"{run.path} has succeeded: {remedy}")
    left = Scheduler(run, spec).list_live_tasks()
    if left:
        names = ", ".join(f"{task.task} ({task.state})" for task in list(left.values())[:4])
        more = f" and {len(left) - 4} more" if len(left) > 4 else ""
        remedy = "to end it first: hpc-elastic cancel"
        raise RunDirectoryError(f"{run.path} still has tasks: {names}{more}; {remedy} {run.path}")


def _last(run: RunDir) -> tuple[int, LogEntry | None, str | None]:
    """Return the number of the last record, the newest that verifies, and how that ended the run.

    Raises:
        RunDirectoryError: they may not be read.
    """
    try:
        number, record = DecisionLog(run.rdzv, run.secret.read_bytes()).last()
    except OSError as e:
        why = f"{e.filename or run.rdzv}: {e.strerror or e}"
        raise RunDirectoryError(f"{why}; only the run's owner can resume it") from e
    ending = record.ending if record is not None else None
    return number, record, ending.status if ending is not None else None


def _of(record: LogEntry | None) -> int:
    """Return the generation that a record belongs to; run.json may not name it yet."""
    return 0 if record is None else record.generation


def _prepare(run: RunDir, spec: RunSpec, settings: RunSettings, before: int) -> Resumption:
    """Write the files of the new array, and return all that follows; the run is as it was.

    Args:
        run: The run.
        spec: Its description.
        settings: What is asked for.
        before: The generation of the last record, before it was seen that no task is left.

    Raises:
        SubmissionError: the run has been resumed since.
    """
    if spec.launcher == "local":
        from hpc_elastic.launcher import local
    plan = lay_out([PlannedRun(run.path, settings)], Path(spec.submission))
    if spec.launcher == "local":
        local.require_possible(plan)
    (grace,) = graces(plan.runs)
    name = job_name(spec)
    scripts = prepare.render_scripts(plan, name, python=_python(spec), cwd=_cwd(spec))
    number, record, _ = _last(run)
    if _of(record) != before:
        raise _resumed_by_another(run)
    generation = max(spec.generation, before) + 1
    try:
        written = prepare.write_arrays(plan, scripts)
    except prepare.ArrayTakenError:
        raise
    except OSError as e:
        why = f"{e.filename or plan.submission}: {e.strerror or e}"
        raise RunDirectoryError(f"{why}; nothing was changed") from e
    next_spec = next_of(spec, plan, grace, generation)
    reopened = reopen(number + 1, record, generation)
    prepared = Prepared(plan, written, name, (spec.run_id,))
    return Resumption(run, next_spec, settings, prepared, number + 1, reopened)


def job_name(spec: RunSpec) -> str:
    """Return the name that the run's id was made from (pure); see `prepare.make_run_id`."""
    return spec.run_id.rsplit("-", 3)[0]


def next_of(spec: RunSpec, plan: Plan, grace: Grace, generation: int) -> RunSpec:
    """Return a run's description in its next generation (pure)."""
    (tasks,) = plan.tasks()
    made = prepare.make_spec(plan, 0, tasks, entry=spec.entry, run_id=spec.run_id, grace=grace)
    return replace(made, provenance=spec.provenance, generation=generation)


def _python(spec: RunSpec) -> str:
    """Return the interpreter that the run was submitted with, if it is still there."""
    given = str(spec.provenance.get("python") or "")
    return given if given and Path(given).exists() else sys.executable


def _cwd(spec: RunSpec) -> Path:
    given = Path(str(spec.provenance.get("cwd") or spec.entry.cwd))
    return given if given.is_dir() else Path(spec.entry.cwd)


def _begin(resumption: Resumption) -> None:
    """Begin the new generation: from the first line on, the earlier one is over."""
    run, spec = resumption.run, resumption.spec
    register = DecisionLog(run.rdzv, run.secret.read_bytes())
    if not register.create(resumption.record):
        raise _resumed_by_another(run)
    make_term_folder(run, resumption.record.epoch)
    _put_away(run, _before(resumption))
    write_atomic(run.spec, spec.to_json(), mode=0o600)
    prepare.write_settings(run, resumption.settings)


def _resumed_by_another(run: RunDir) -> SubmissionError:
    remedy = "look again with hpc-elastic status"
    return SubmissionError(f"{run.path} is being resumed by somebody else: {remedy}")


def _before(resumption: Resumption) -> Path:
    return resumption.run.path / f"before-resume.{resumption.spec.generation}"


def _put_away(run: RunDir, folder: Path) -> None:
    """Move what says that the run is over out of the way, and forget what was asked of nodes."""
    folder.mkdir(exist_ok=True)
    for file in (run.result, run.cancelled, run.status, run.excluded):
        with contextlib.suppress(FileNotFoundError):
            file.rename(folder / file.name)
    claimed = run.rdzv.glob("term.*/notice.*")
    for asked in (*run.notices.glob("*"), *claimed, *run.avoided.glob("*")):
        asked.unlink(missing_ok=True)


def _put_back(run: RunDir, folder: Path) -> None:
    """Let the run be as it was: nothing was submitted. Its generation has passed all the same."""
    for file in (run.result, run.cancelled, run.status, run.excluded):
        with contextlib.suppress(OSError):
            (folder / file.name).rename(file)


def _hand_over(prepared: Prepared) -> SubmittedTasks:
    if prepared.plan.backend == "slurm":
        from hpc_elastic.launcher import slurm

        return slurm.submit(prepared)
    from hpc_elastic.launcher import local

    return local.submit(prepared)


def _note(resumption: Resumption, handle: SubmittedTasks) -> Submitted:
    """Write down that the run was resumed."""
    run, plan = resumption.run, resumption.prepared.plan
    EventLog(run.events(COMMANDS), COMMANDS).write(
        "resume",
        user=registry.user(),
        host=socket.gethostname(),
        generation=resumption.spec.generation,
        nodes=as_config(resumption.settings)["nodes"],
    )
    with contextlib.suppress(OSError):
        if run.path not in {known.path for known in registry.newest_first()}:
            registry.add({resumption.spec.run_id: run.path})
    return Submitted(handle, track(plan, handle.job_ids, [""]), plan.launcher.poll_interval_s)


def resume_as_json(
    resumption: Resumption, job_ids: Sequence[str], *, log: Path | None
) -> dict[str, Any]:
    """Return what `hpc-elastic resume --json` prints."""
    launcher = resumption.settings.launcher
    return {
        "run_id": resumption.spec.run_id,
        "run": str(resumption.run.path),
        "launcher": "slurm" if isinstance(launcher, SlurmSettings) else "local",
        "generation": resumption.spec.generation,
        "nodes": as_config(resumption.settings)["nodes"],
        "job_ids": list(job_ids),
        "log": None if log is None else str(log),
    }


# ---- What may be changed when a run is resumed
# Where and on how many nodes it runs may be changed, what it is may not. The config that the
# training reads, and its code, are frozen at the submission: changing them would make another run
# of it. What was asked of the launcher stands in ``settings.json``.


CHANGEABLE = ("nodes", "nproc_per_node")
"""Keys beside those of ``launcher``."""

_REMEDIES = {
    "launcher": "a run stays with its launcher; to change it, submit the run anew",
    "launcher.backend": "a run stays with its launcher; to change it, submit the run anew",
    "ft": "whether nodes are replicas is decided when a run is submitted",
    "launcher.wait": "resume never waits; to watch the run: hpc-elastic wait, or status --watch",
    "launcher.dry_run": "resume has no dry run",
    "launcher.code_snapshot": "the code of a run stays as it was at the submission",
    "launcher.queue_order": "it orders the runs of a sweep, and one alone is resumed",
    "launcher.global_batch": "it is a part of the training, whose config stays as it was",
}
_FROZEN = (
    "the config of a run is frozen; only nodes, nproc_per_node and launcher.* can be given here. "
    "To train with another value, submit a new run"
)


def stored(run: RunDir) -> dict[str, Any]:
    """Return what was asked for when the run was submitted or resumed last, as a config tree.

    Raises:
        RunDirectoryError: it is not there, or not readable.
    """
    config = run.hydra / "config.yaml"
    try:
        if run.settings.exists():
            found = json.loads(run.settings.read_text())
        else:  # submitted before there was such a file
            import yaml

            found = yaml.safe_load(config.read_text())
    except FileNotFoundError as e:
        raise RunDirectoryError(f"{run.path} has no settings.json: it can not be resumed") from e
    except (OSError, ValueError) as e:
        raise RunDirectoryError(f"{run.settings}: not readable: {e}") from e
    if not isinstance(found, dict):
        raise RunDirectoryError(f"{run.settings}: not readable: it holds no settings")
    return found


def changed(before: Mapping[str, Any], overrides: Sequence[str]) -> RunSettings:
    """Return the settings to resume a run with (pure).

    Args:
        before: What was asked for, see `stored`.
        overrides: Hydra's, such as ``nodes=1:4`` or ``launcher.partition=gpu``.

    Raises:
        ConfigError: names the first that can not be, and says what to do instead.
    """
    config: dict[str, Any] = json.loads(json.dumps(before))
    for override in overrides:
        key, value = read_override(override)
        require_changeable(key, value)
        put(config, key, value)
    settings = resolve(config, overrides=list(overrides))
    launcher = replace(settings.launcher, wait=True, dry_run=False, code_snapshot=False)
    return replace(settings, launcher=launcher)


def require_changeable(key: str, value: object) -> None:
    """Refuse a key that is a part of the run itself.

    Raises:
        ConfigError: says why, and what to do instead.
    """
    known = key in CHANGEABLE or (key.startswith("launcher.") and key not in _REMEDIES)
    if not known:
        raise ConfigError(key, value, _REMEDIES.get(key, _FROZEN))
