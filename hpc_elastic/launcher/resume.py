"""Resume a run that has stopped: the same run directory, another generation of tasks.

Where the run runs, and on how many nodes, may change; the run itself may not. The config that the
training reads, its code and its secret stay as they were at the submission, and so does the
interpreter, if it still exists. The settings of the launcher are in ``settings.json``.

The order of the steps ensures that a run can be resumed again if this process is killed between any
two of them, and that no task of an earlier generation can disturb it, whenever it comes back:

1. No task of the run is left, and the overrides are checked.
2. The files of a new array are written beside the old ones. No process reads them yet.
3. The log entry that begins the new generation is created (`rendezvous.log_entry.reopen`). It
   fences agents and workers of earlier generations. Of two concurrent resumes, one creates it.
4. result.json and the mark of a cancellation move to ``before-resume.<n>/``; run.json and
   settings.json describe the new generation.
5. The array is submitted.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_elastic.config.resolve import as_config, put, read_override, resolve
from hpc_elastic.config.schema import RunSettings
from hpc_elastic.errors import ConfigError, RunDirectoryError, SubmissionError
from hpc_elastic.launcher import prepare
from hpc_elastic.launcher.plan import Plan, RunRequest
from hpc_elastic.launcher.run_handle import COMMANDS, RunHandle, SubmittedJobs, read_result_status
from hpc_elastic.launcher.submit import handles_of, released_on_failure, start
from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.log_entry import LogEntry, reopen
from hpc_elastic.rendezvous.term import make_term_folder
from hpc_elastic.run import registry
from hpc_elastic.run.directory import RunDir, RunSpec
from hpc_elastic.run.events import EventLog
from hpc_elastic.shared_files import write_atomic
from hpc_elastic.slurm.scheduler import Scheduler

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
    """A run in its next generation.

    Attributes:
        run: The run.
        spec: Its next description.
        settings: Its settings.
        plan: The plan of its new tasks.
        scripts: Their batch scripts.
        entry: The log entry that begins the generation.
    """

    run: RunDir
    spec: RunSpec
    settings: RunSettings
    plan: Plan
    scripts: tuple[Path, ...]
    entry: LogEntry

    @property
    def folder_before(self) -> Path:
        """Folder of the files of the earlier end."""
        return self.run.path / f"before-resume.{self.spec.generation}"

    def to_json(self, job_ids: Sequence[str], *, log: Path | None) -> dict[str, Any]:
        """Return what `hpc-elastic resume --json` prints."""
        return {
            "run_id": self.spec.run_id,
            "run": str(self.run.path),
            "launcher": self.spec.launcher,
            "generation": self.spec.generation,
            "nodes": as_config(self.settings)["nodes"],
            "job_ids": list(job_ids),
            "log": None if log is None else str(log),
        }


def resume(path: Path, overrides: Sequence[str]) -> tuple[Resumption, RunHandle]:
    """Resume a run that has stopped.

    Args:
        path: The run directory.
        overrides: ``nodes=...``, ``nproc_per_node=...`` and ``launcher.*=...``.

    Raises:
        RunDirectoryError: The run has tasks, has succeeded, or cannot be read or written.
        ConfigError: An override is malformed, or would change the run itself.
        SubmissionError: Another process is resuming it, or Slurm refuses. In the latter case it can
            be resumed again.
        SlurmError: Slurm does not answer, so it is unknown whether the run has stopped.
    """
    run = RunDir(path)
    run.load()  # the first error if it is no run
    _, last = _last_entry(run)
    generation_before = 0 if last is None else last.generation
    spec = run.load()
    require_stopped(run, spec)
    settings = change_settings(read_settings(run), overrides)
    resumption = prepare.with_free_numbers(lambda: _prepare(run, spec, settings, generation_before))
    try:
        _begin_generation(resumption)
    except OSError as e:
        if isinstance(e, RunDirectoryError):
            raise
        remedy = "nothing was submitted; resume it again once that is cured"
        raise RunDirectoryError(f"{e.filename or path}: {e.strerror or e}: {remedy}") from e
    try:
        jobs = start(resumption.plan, resumption.scripts)
    except BaseException:
        _restore_endings(resumption)
        raise
    with released_on_failure(jobs):
        return resumption, _record(resumption, jobs)


def require_stopped(run: RunDir, spec: RunSpec) -> None:
    """Refuse a run that has succeeded, or of which tasks are left.

    Raises:
        RunDirectoryError: It is one of these.
        SlurmError: Slurm does not answer.
    """
    _, last = _last_entry(run)
    ending = None if last is None or last.ending is None else last.ending.status
    if "succeeded" in (read_result_status(run), ending):
        remedy = "there is nothing to resume; to train on, submit a run that loads its checkpoint"
        raise RunDirectoryError(f"{run.path} has succeeded: {remedy}")
    left = Scheduler(run, spec).list_live_tasks()
    if left:
        names = ", ".join(f"{task.task} ({task.state})" for task in list(left.values())[:4])
        more = f" and {len(left) - 4} more" if len(left) > 4 else ""
        remedy = "to end it first: hpc-elastic cancel"
        raise RunDirectoryError(f"{run.path} still has tasks: {names}{more}; {remedy} {run.path}")


def _last_entry(run: RunDir) -> tuple[int, LogEntry | None]:
    """Return the last index of the run's log, and the newest entry that verifies.

    Raises:
        RunDirectoryError: The log is unreadable.
    """
    try:
        return DecisionLog(run.rdzv, run.secret.read_bytes()).last()
    except OSError as e:
        why = f"{e.filename or run.rdzv}: {e.strerror or e}"
        raise RunDirectoryError(f"{why}; only the run's owner can resume it") from e


# ---- settings


def read_settings(run: RunDir) -> dict[str, Any]:
    """Return the settings of the last submission or resumption, as a config tree.

    Raises:
        RunDirectoryError: The file is missing or malformed.
    """
    try:
        found = json.loads(run.settings.read_text())
    except FileNotFoundError as e:
        raise RunDirectoryError(f"{run.path} has no settings.json: it cannot be resumed") from e
    except (OSError, ValueError) as e:
        raise RunDirectoryError(f"{run.settings}: not readable: {e}") from e
    if not isinstance(found, dict):
        raise RunDirectoryError(f"{run.settings}: not readable: it holds no settings")
    return found


def change_settings(before: Mapping[str, Any], overrides: Sequence[str]) -> RunSettings:
    """Return the settings to resume a run with (pure).

    Args:
        before: The settings so far, see `read_settings`.
        overrides: Overrides of Hydra, such as ``nodes=1:4`` or ``launcher.partition=gpu``.

    Raises:
        ConfigError: Names the first override that is not allowed, and the remedy.
    """
    config: dict[str, Any] = json.loads(json.dumps(before))
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

    Args:
        run: The run.
        spec: Its description.
        settings: Its new settings.
        generation_before: Generation of the last log entry, from before it was checked that no task
            is left. run.json may not have it yet.

    Raises:
        SubmissionError: The run has been resumed since.
    """
    plan = prepare.lay_out([RunRequest(run.path, settings, spec.entry)], Path(spec.submission))
    (preemption,) = prepare.query_backend(plan)
    name = spec.run_id.rsplit("-", 3)[0]  # see `prepare.make_run_id`
    scripts = prepare.render_scripts(plan, name, python=_python(spec), cwd=_cwd(spec))
    index, last = _last_entry(run)
    if (0 if last is None else last.generation) != generation_before:
        raise _resumed_by_another(run)
    try:
        written = prepare.write_arrays(plan, scripts)
    except prepare.ArrayTakenError:
        raise
    except OSError as e:
        why = f"{e.filename or plan.submission}: {e.strerror or e}"
        raise RunDirectoryError(f"{why}; nothing was changed") from e
    generation = max(spec.generation, generation_before) + 1
    made = prepare.make_spec(plan, 0, entry=spec.entry, run_id=spec.run_id, preemption=preemption)
    next_spec = replace(made, provenance=spec.provenance, generation=generation)
    return Resumption(run, next_spec, settings, plan, written, reopen(index + 1, last, generation))


def _python(spec: RunSpec) -> str:
    """Return the interpreter that the run was submitted with, if it still exists."""
    given = str(spec.provenance.get("python") or "")
    return given if given and Path(given).exists() else sys.executable


def _cwd(spec: RunSpec) -> Path:
    given = Path(str(spec.provenance.get("cwd") or spec.entry.cwd))
    return given if given.is_dir() else Path(spec.entry.cwd)


def _begin_generation(resumption: Resumption) -> None:
    """Begin the new generation: once its log entry is created, the earlier one is over."""
    run = resumption.run
    if not DecisionLog(run.rdzv, run.secret.read_bytes()).create(resumption.entry):
        raise _resumed_by_another(run)
    make_term_folder(run, resumption.entry.epoch)
    resumption.folder_before.mkdir(exist_ok=True)
    for file in _endings(run):
        with contextlib.suppress(FileNotFoundError):
            file.rename(resumption.folder_before / file.name)
    claimed = run.rdzv.glob("term.*/notice.*")
    for request in (*run.notices.glob("*"), *claimed, *run.avoided.glob("*")):
        request.unlink(missing_ok=True)
    write_atomic(run.spec, resumption.spec.to_json(), mode=0o600)
    prepare.write_settings(run, resumption.settings)


def _restore_endings(resumption: Resumption) -> None:
    """Restore the files of a run that was not submitted. Its generation has passed nevertheless."""
    for file in _endings(resumption.run):
        with contextlib.suppress(OSError):
            (resumption.folder_before / file.name).rename(file)


def _endings(run: RunDir) -> tuple[Path, ...]:
    return (run.result, run.cancelled, run.status, run.excluded)


def _resumed_by_another(run: RunDir) -> SubmissionError:
    remedy = "see hpc-elastic status"
    return SubmissionError(f"{run.path} is being resumed by another process: {remedy}")


def _record(resumption: Resumption, jobs: SubmittedJobs) -> RunHandle:
    """Record the resumption in the run's events and the user's list of runs."""
    run = resumption.run
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
    (handle,) = handles_of(resumption.plan, jobs)
    return handle
