"""Cancel and resume of a run.

**Cancel**: all of its tasks and nothing else; it does not come back. A task may be requeueing
itself at this moment, and another may be submitting a replacement. So the mark ``<run>/cancelled``
is written first. A process that restarts a task checks for the mark afterwards, and cancels the
task again (`slurm.requeue`, `slurm.scheduler`); a task that starts although the mark exists ends at
once. Tasks that appear in the queue again are cancelled again until none is left.

The tasks get what ``scancel`` gives them: SIGTERM, and SIGKILL after Slurm's KillWait. Within that
time the run saves a checkpoint, as before any other end of a node. Local processes get as long as
their workers may take to stop.

**Resume**, of a run that has stopped: the same run directory, another generation of tasks. Where
the run runs, and on how many nodes, may change; the run itself may not. The config that the
training reads, its code and its secret stay as they were at the submission, and so does the
interpreter, if it still exists. The settings of the launcher are in ``run.json``.

The order of the steps ensures that a run can be resumed again if this process is killed between any
two of them, and that no task of an earlier generation can disturb it, whenever it comes back:

1. No task of the run is left, and the overrides are checked.
2. The files of a new array are written beside the old ones. No process reads them yet.
3. The log entry that begins the new generation is created (`rendezvous.log_entry.resume_entry`). It
   fences agents and workers of earlier generations. Of two concurrent resumes, one creates it.
4. result.json and the mark of a cancellation move to ``before-resume.<n>/``; run.json
   describes the new generation.
5. The array is submitted.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_elastic.config.resolve import put, read_env_file, read_override, resolve
from hpc_elastic.config.schema import RunSettings
from hpc_elastic.errors import ConfigError, RunDirectoryError, SlurmError, SubmissionError
from hpc_elastic.launcher import run_handle, submit
from hpc_elastic.launcher.plan import Plan, RunRequest
from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.log_entry import LogEntry, resume_entry
from hpc_elastic.report.run_view import end_limit_s, read_view, stop_s
from hpc_elastic.run import ownership, registry
from hpc_elastic.run.directory import RunDir, RunSpec
from hpc_elastic.run.events import COMMANDS, EventLog
from hpc_elastic.shared_files import make_folder, read_bytes, write_atomic
from hpc_elastic.site import QueuePolicy
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import Phase, TaskState
from hpc_elastic.slurm.scheduler import QueueSnapshot, Scheduler, moved

_POLL_S = 0.5
_CANCEL_AGAIN_S = 5.0
"""A task that still runs this long after it was cancelled is cancelled once more."""
_KILL_S = 10.0


@dataclass(frozen=True)
class CancelTarget:
    """A run to be cancelled; ``left`` are its tasks that have not ended."""

    run: RunDir
    spec: RunSpec
    result: str | None
    left: dict[str, TaskState]

    @classmethod
    def read(cls, path: Path) -> CancelTarget:
        """Return the present state of a run that this process may act on.

        Raises UntrustedRunError if it is another user's, or others may write it (`run.ownership`);
        RunDirectoryError if it is no run directory, or unreadable; SlurmError without an answer.
        """
        run = RunDir(path)
        spec = ownership.load_own(run, run.event_logs)
        left = Scheduler(run, spec).list_live_tasks()  # a run that ends after it has a result
        return cls(run, spec, run_handle.read_result_status(run), left)

    def __str__(self) -> str:
        """Return a summary of the tasks."""
        waiting = [t for t in self.left.values() if t.phase is Phase.PENDING]
        nodes = sorted({t.node for t in self.left.values() if t.phase is Phase.RUNNING})
        running = len(self.left) - len(waiting)
        where = f" (on {', '.join(filter(None, nodes))})" if any(nodes) else ""
        what = {f"{running} running{where}": running, f"{len(waiting)} waiting": len(waiting)}
        return ", ".join(text for text, count in what.items() if count) or "no task"

    def to_json(self, left: Iterable[TaskState] | None) -> dict[str, Any]:
        """Return the output of `cancel --json`; ``left`` is None if nothing was to be done."""
        return {
            "run_id": self.spec.run_id,
            "run": str(self.run.path),
            "result": self.result,
            "cancelled": [] if left is None else sorted(self.left),
            "left": sorted(task.task for task in left or ()),
        }


def nothing_to_do(target: CancelTarget) -> str | None:
    """Return why a run need not be cancelled, if so; RunDirectoryError if that is unknown."""
    run, mark = target.run, target.run.cancellation()
    if target.left:
        return None
    if target.result is not None:
        return f"{run.path} has ended already: it {target.result}"
    if mark is not None:
        return f"{run.path} was cancelled already{mark.by_whom}"
    if not Path(target.spec.submission).is_dir():
        raise RunDirectoryError(f"the run's tasks are unknown: {moved(target.spec)}")
    return f"{run.path} has no task that runs or waits; there is nothing to cancel"


def cancel(
    target: CancelTarget,
    *,
    wait_s: float,
    warn: Callable[[str], None],
    scheduler: Scheduler | None = None,
) -> list[TaskState]:
    """Cancel a run, and wait until its tasks are gone; return those that are left after ``wait_s``.

    ``warn`` receives messages for the user. Raises RunDirectoryError if the run belongs to another
    user, or its files name a job or a process that is none of its tasks: nothing was done. Raises
    SlurmError if Slurm refuses; tasks that were cancelled stay so.
    """
    run, spec = target.run, target.spec
    scheduler = scheduler or Scheduler(run, spec)
    scheduler.require_own_jobs(target.left)
    registry.mark_cancelled(run, warn)
    left = _end_tasks(scheduler, target, wait_s, warn)
    if spec.settings.backend == "slurm":  # other runs may stay away until its nodes are free
        QueuePolicy(run, spec, None, SlurmClient()).end_run()
    if run_handle.read_result_status(run) is not None:
        run.cancelled.unlink(missing_ok=True)  # it has ended by itself in the meantime
    return left


def _end_tasks(
    scheduler: Scheduler, target: CancelTarget, wait_s: float, warn: Callable[[str], None]
) -> list[TaskState]:
    """Cancel tasks until there are none; return those that are left after the time."""
    spec, known = target.spec, set(target.left)
    started = time.monotonic()
    kill_at = started + stop_s(spec) + _KILL_S
    cancelled_at: dict[str, float] = {}
    while True:
        now = time.monotonic()
        try:
            left = scheduler.list_live_tasks()
        except SlurmError as e:
            if now > started + wait_s:
                what = "Slurm does not answer: whether all tasks have ended is unknown"
                raise SlurmError(what) from e
            warn(f"trying again: {e}")
        else:
            if not left:
                return []
            if now > started + wait_s:
                return list(left.values())
            due = to_cancel(left.values(), cancelled_at, now)
            if new := left.keys() - known:  # replacements
                scheduler.require_own_jobs(new)
                known |= new
            scheduler.cancel_tasks(due)
            cancelled_at |= {task.task: now for task in due}
            for name in left if spec.settings.backend == "local" and now > kill_at else ():
                scheduler.kill_task(name)  # Slurm does so itself
        time.sleep(_POLL_S)


def to_cancel(
    left: Iterable[TaskState], cancelled_at: dict[str, float], now: float
) -> list[TaskState]:
    """Return the tasks to cancel now: those never cancelled yet, and those that are back (pure)."""

    def is_due(task: TaskState) -> bool:
        pause_s = _CANCEL_AGAIN_S if task.phase is Phase.RUNNING else 2 * _POLL_S
        return task.task not in cancelled_at or now - cancelled_at[task.task] >= pause_s

    return [task for task in left if task.phase in (Phase.PENDING, Phase.RUNNING) and is_due(task)]


# ---- resume


CHANGEABLE = ("nodes", "nproc_per_node")
"""Keys that may be changed, beside those of ``launcher``."""

_REMEDIES = {
    "launcher": "a run keeps its launcher; to change it, submit the run anew",
    "launcher.backend": "a run keeps its launcher; to change it, submit the run anew",
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


@dataclass(frozen=True)
class Resumption:
    """A run in its next generation, with the log entry that begins it."""

    run: RunDir
    spec: RunSpec
    plan: Plan
    entry: LogEntry

    @property
    def folder_before(self) -> Path:
        """Folder of the files of the earlier end."""
        return self.run.path / f"before-resume.{self.spec.generation}"

    def to_json(self, jobs: run_handle.SubmittedJobs, *, log: Path | None) -> dict[str, Any]:
        """Return what `hpc-elastic resume --json` prints."""
        return {
            "run_id": self.spec.run_id,
            "run": str(self.run.path),
            "launcher": self.spec.settings.backend,
            "generation": self.spec.generation,
            "nodes": str(self.spec.settings.nodes),
            "job_ids": list(jobs.job_ids),
            "result_job": jobs.result_job,
            "log": None if log is None else str(log),
        }


def resume(path: Path, overrides: Sequence[str]) -> tuple[Resumption, run_handle.RunHandle]:
    """Resume a run that has stopped, with other ``nodes``, ``nproc_per_node`` or ``launcher.*``.

    Raises RunDirectoryError if the run has tasks, has succeeded, is another user's, or cannot be
    read or written; ConfigError if an override cannot work; SubmissionError if another process is
    resuming it, or Slurm refuses, after which it can be resumed again; SlurmError if it is unknown
    whether the run has stopped.
    """
    run = RunDir(path)
    used = (run.hydra, run.rdzv, run.first_term, run.notices, run.avoided)
    run.complete(ownership.load_own(run, *used, run.event_logs, *_endings(run)))
    _, last = _last_entry(run)
    generation_before = 0 if last is None else last.generation
    spec = run.load()
    require_stopped(run, spec)
    settings = change_settings(spec.settings, overrides)
    resumption = submit.with_free_numbers(lambda: _prepare(run, spec, settings, generation_before))
    try:
        _begin_generation(resumption)
    except OSError as e:
        if isinstance(e, RunDirectoryError):
            raise
        remedy = "nothing was submitted; resume it again once that is cured"
        raise RunDirectoryError(f"{e.filename or path}: {e.strerror or e}: {remedy}") from e
    try:
        jobs = submit.start(resumption.plan)
    except BaseException:  # the generation has passed nevertheless
        for file in _endings(run):
            with contextlib.suppress(OSError):
                (resumption.folder_before / file.name).rename(file)
        raise
    with submit.released_on_failure(jobs):
        return resumption, _record(resumption, jobs)


def require_stopped(run: RunDir, spec: RunSpec) -> None:
    """Raise RunDirectoryError for a run that has succeeded or has tasks; SlurmError if unknown."""
    _, last = _last_entry(run)
    ending = None if last is None or last.ending is None else last.ending.status
    if "succeeded" in (run_handle.read_result_status(run), ending):
        remedy = "there is nothing to resume; to train on, submit a run that loads its checkpoint"
        raise RunDirectoryError(f"{run.path} has succeeded: {remedy}", remedy=remedy)
    left = Scheduler(run, spec).list_live_tasks()
    if left:  # once the run has ended, an epilog or a stage-out may take hours
        view = read_view(run.path, lambda specs: QueueSnapshot())  # by its files
        if view.ended is not None and view.now - view.ended.time > end_limit_s(spec):
            left = {n: task for n, task in left.items() if task.phase is not Phase.COMPLETING}
    if left:
        names = ", ".join(f"{task.task} ({task.state})" for task in list(left.values())[:4])
        more = f" and {len(left) - 4} more" if len(left) > 4 else ""
        remedy = f"to end it first: hpc-elastic cancel {run.path}"
        what = f"{run.path} still has tasks: {names}{more}"
        raise RunDirectoryError(f"{what}; {remedy}", remedy=f"leave it if it is to go on; {remedy}")


def _last_entry(run: RunDir) -> tuple[int, LogEntry | None]:
    """Return the last index of the run's log, and the newest entry that verifies."""
    try:
        return DecisionLog(run.rdzv, read_bytes(run.secret)).last()
    except OSError as e:
        why = f"{e.filename or run.rdzv}: {e.strerror or e}"
        raise RunDirectoryError(f"{why}; only the run's owner can resume it") from e


# ---- settings


def change_settings(before: RunSettings, overrides: Sequence[str]) -> RunSettings:
    """Return the settings to resume with (pure); raise ConfigError for a forbidden override."""
    config = before.as_config()
    for override in overrides:
        key, value = read_override(override)
        known = key in CHANGEABLE or (key.startswith("launcher.") and key not in _REMEDIES)
        if not known:
            raise ConfigError(key, value, _REMEDIES.get(key, _FROZEN))
        put(config, key, value)
    settings = resolve(config, overrides=list(overrides))
    launcher = replace(settings.launcher, wait=True, dry_run=False, code_snapshot=False)
    return replace(settings, launcher=launcher)


# ---- steps


def _prepare(
    run: RunDir, spec: RunSpec, settings: RunSettings, generation_before: int
) -> Resumption:
    """Write the files of the new array; the run is unchanged.

    `generation_before` was read before the check that no task is left; run.json may not have it
    yet.
    """
    plan = submit.lay_out([RunRequest(run.path, settings, spec.entry)], Path(spec.submission))
    (terms,) = submit.query_terms(plan)
    name = spec.run_id.rsplit("-", 3)[0]  # see `make_run_id`
    python = str(spec.provenance.get("python") or "")
    cwd = Path(str(spec.provenance.get("cwd") or spec.entry.cwd))
    scripts = submit.render_scripts(
        plan,
        name,
        python=python if python and Path(python).exists() else sys.executable,
        cwd=cwd if cwd.is_dir() else Path(spec.entry.cwd),
    )
    index, last = _last_entry(run)
    if (0 if last is None else last.generation) != generation_before:
        raise _resumed_by_another(run)
    try:
        submit.write_arrays(plan, scripts)
    except submit.ArrayTakenError:
        raise
    except OSError as e:
        why = f"{e.filename or plan.submission}: {e.strerror or e}"
        raise RunDirectoryError(f"{why}; nothing was changed") from e
    generation = max(spec.generation, generation_before) + 1
    settings = plan.runs[0].settings
    next_spec = replace(
        spec, tasks=plan.tasks[0], settings=settings, terms=terms, generation=generation,
        file_env=read_env_file(settings.launcher.env_file), hydra={},
    )  # fmt: skip
    return Resumption(run, next_spec, plan, resume_entry(index + 1, last, generation))


def _begin_generation(resumption: Resumption) -> None:
    """Begin the new generation: once its log entry is created, the earlier one is over."""
    run = resumption.run
    if not DecisionLog(run.rdzv, read_bytes(run.secret)).create(resumption.entry):
        raise _resumed_by_another(run)
    from hpc_elastic.rendezvous.term import make_term_folder  # imports asyncio

    make_term_folder(run, resumption.entry.term)
    make_folder(resumption.folder_before)
    for file in _endings(run):
        with contextlib.suppress(FileNotFoundError):
            file.rename(resumption.folder_before / file.name)
    claimed = run.rdzv.glob("term.*/notice.*")
    for request in (*run.notices.glob("*"), *claimed, *run.avoided.glob("*")):
        request.unlink(missing_ok=True)
    write_atomic(run.spec, resumption.spec.to_json(), mode=0o600)
    run.settings.unlink(missing_ok=True)


def _endings(run: RunDir) -> tuple[Path, ...]:
    return (run.result, run.cancelled, run.status, run.excluded)


def _resumed_by_another(run: RunDir) -> SubmissionError:
    remedy = "see hpc-elastic status"
    return SubmissionError(f"{run.path} is being resumed by another process: {remedy}")


def _record(resumption: Resumption, jobs: run_handle.SubmittedJobs) -> run_handle.RunHandle:
    run = resumption.run
    EventLog(run.events(COMMANDS), COMMANDS).write(
        "resume", user=registry.user(), host=socket.gethostname(),
        generation=resumption.spec.generation, nodes=str(resumption.spec.settings.nodes),
    )  # fmt: skip
    with contextlib.suppress(OSError):
        if run.path not in {known.path for known in registry.newest_first()}:
            registry.add({resumption.spec.run_id: run.path})
    (handle,) = submit.handles_of(resumption.plan, [resumption.spec], jobs)
    return handle
