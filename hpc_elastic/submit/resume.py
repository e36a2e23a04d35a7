"""Resume a run that has stopped: the same run directory, another generation of tasks.

The order of the steps is such that whoever is killed between two of them leaves a run that can be
resumed again, and that no task of an earlier generation, whenever it may come back, can disturb:

1. It is seen that no task of the run is left, and what was asked for is checked.
2. The files of a new array are written beside the old ones. Nobody reads them yet.
3. The record that begins the new generation is created (`rendezvous.record.reopen`). From here on
   agents and workers of earlier generations are fenced. Of two who resume at once, one creates it.
4. result.json and the mark of a cancellation move to ``before-resume.<n>/``; run.json names the new
   generation and its tasks; settings.json what was asked for.
5. The array is submitted.

Config, code and secret are what they were; so is the interpreter, if it is still there.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_elastic import known_runs
from hpc_elastic.config import RunSettings, SlurmSettings
from hpc_elastic.errors import RunDirectoryError, SubmissionError
from hpc_elastic.events import EventLog
from hpc_elastic.files import write_atomic
from hpc_elastic.rendezvous.record import Record, reopen
from hpc_elastic.rendezvous.register import Register
from hpc_elastic.rendezvous.run_files import make_term_folder
from hpc_elastic.rundir import RunDir, RunSpec
from hpc_elastic.settings import as_config
from hpc_elastic.submit import prepare
from hpc_elastic.submit.backend import Handle, track
from hpc_elastic.submit.cancel import COMMANDS, read_result
from hpc_elastic.submit.changes import changed, stored
from hpc_elastic.submit.grace import Grace, graces
from hpc_elastic.submit.living import tasks_of
from hpc_elastic.submit.plan import Plan, PlannedRun
from hpc_elastic.submit.prepare import Prepared
from hpc_elastic.submit.session import Submitted, lay_out, let_go_on_failure


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
    record: Record


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
    left = tasks_of(spec).left()
    if left:
        names = ", ".join(f"{task.task} ({task.state})" for task in list(left.values())[:4])
        more = f" and {len(left) - 4} more" if len(left) > 4 else ""
        remedy = "to end it first: hpc-elastic cancel"
        raise RunDirectoryError(f"{run.path} still has tasks: {names}{more}; {remedy} {run.path}")


def _last(run: RunDir) -> tuple[int, Record | None, str | None]:
    """Return the number of the last record, the newest that verifies, and how that ended the run.

    Raises:
        RunDirectoryError: they may not be read.
    """
    try:
        number, record = Register(run.rdzv, run.secret.read_bytes()).last()
    except OSError as e:
        why = f"{e.filename or run.rdzv}: {e.strerror or e}"
        raise RunDirectoryError(f"{why}; only the run's owner can resume it") from e
    ending = record.ending if record is not None else None
    return number, record, ending.status if ending is not None else None


def _of(record: Record | None) -> int:
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
        from hpc_elastic.submit import local
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
    register = Register(run.rdzv, run.secret.read_bytes())
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


def _hand_over(prepared: Prepared) -> Handle:
    if prepared.plan.backend == "slurm":
        from hpc_elastic.submit import slurm_backend

        return slurm_backend.submit(prepared)
    from hpc_elastic.submit import local

    return local.submit(prepared)


def _note(resumption: Resumption, handle: Handle) -> Submitted:
    """Write down that the run was resumed."""
    run, plan = resumption.run, resumption.prepared.plan
    EventLog(run.events(COMMANDS), COMMANDS).write(
        "resume",
        user=known_runs.user(),
        host=socket.gethostname(),
        generation=resumption.spec.generation,
        nodes=as_config(resumption.settings)["nodes"],
    )
    with contextlib.suppress(OSError):
        if run.path not in {known.path for known in known_runs.newest_first()}:
            known_runs.add({resumption.spec.run_id: run.path})
    return Submitted(handle, track(plan, handle.job_ids, [""]), plan.launcher.poll_s)


def as_json(resumption: Resumption, job_ids: Sequence[str], *, log: Path | None) -> dict[str, Any]:
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
