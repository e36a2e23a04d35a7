"""Everything on disk that a submission needs, written before the scheduler hears of it.

After `prepare`, ``<sweep>/.hpc_elastic`` and the run directories are complete: a script that is
rendered and not submitted can be handed to sbatch by hand and does the same.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpc_elastic import resources
from hpc_elastic.config import LauncherSettings, RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError, RunDirectoryError
from hpc_elastic.files import create_atomic, is_there, read_json, write_atomic
from hpc_elastic.rundir import Entry, RunDir, RunSpec, Submission
from hpc_elastic.settings import as_config
from hpc_elastic.slurm.site import time_limit_s
from hpc_elastic.submit import sbatch
from hpc_elastic.submit.grace import Grace
from hpc_elastic.submit.plan import Plan, PlannedArray, PlannedRun, has_gang
from hpc_elastic.submit.snapshot import link_snapshot, take_snapshot

T = TypeVar("T")

_WRITERS = 16
_SLOW_S = 0.01
"""For the files of one run: where they take longer, those of several are written at a time."""
_TRIES = 20


@dataclass(frozen=True)
class Prepared:
    """A plan whose files are written.

    Attributes:
        plan: What will be submitted.
        scripts: The batch script of each array; none with ``launcher=local``.
        name: Name of the jobs, from which run ids are made.
        run_ids: Of each run.
    """

    plan: Plan
    scripts: tuple[Path, ...]
    name: str
    run_ids: tuple[str, ...]


class ArrayTakenError(RunDirectoryError):
    """The number of an array was taken since it was chosen: the plan has to be made anew."""


def prepare(
    plan: Plan,
    entry: Entry,
    *,
    name: str,
    provenance: Mapping[str, Any] | None = None,
    graces: Sequence[Grace] | None = None,
) -> Prepared:
    """Write the run directories, the array files and the batch scripts.

    Args:
        plan: What will be submitted.
        entry: The user's function.
        name: Name of the user's script or function.
        provenance: Where the runs came from, for run.json.
        graces: What the tasks of each run get after SIGTERM; None: as on this machine.

    Raises:
        RunDirectoryError: a run directory can not be written, or holds another run.
        ArrayTakenError: see `with_free_numbers`; nothing was written.
        ConfigError: a setting can not be written into the batch script.
        SubmissionError: the snapshot of the code failed.
    """
    scripts = render_scripts(plan, name)  # refuses before anything is written
    try:
        Submission(plan.submission).logs.mkdir(parents=True, exist_ok=True)
        require_links(plan.submission)
        _require_unused(plan)
        written = write_arrays(plan, scripts)
        entry = take_snapshot(entry, plan.submission) if plan.launcher.snapshot else entry
        specs = _specs(plan, entry, name, graces or [Grace()] * len(plan.runs))
        _write_runs(plan, specs, dict(provenance or {}))
    except RunDirectoryError:
        raise
    except OSError as e:
        remedy = "choose another folder with hydra.sweep.dir=..."
        where = e.filename or plan.submission
        raise RunDirectoryError(f"{where}: {e.strerror or e}; {remedy}") from e
    return Prepared(plan, written, name, tuple(spec.run_id for spec in specs))


def require_links(folder: Path) -> None:
    """Try a hard link: the agents elect their leader by one, on whichever node they run.

    Raises:
        RunDirectoryError: the file system has none.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".links-") as trial:
        file = Path(trial, "file")
        file.touch()
        try:
            file.with_name("link").hardlink_to(file)
        except OSError as e:
            remedy = "choose one on another file system with hydra.sweep.dir=... (launch: run_dir)"
            why = f"{folder}: no hard links can be made in this directory ({e.strerror or e})"
            raise RunDirectoryError(f"{why}, by which agents elect their leader; {remedy}") from e


def remove_rendered(dirs: Sequence[Path], submission: Path) -> None:
    """Remove what a dry run has written for runs that are prepared anew.

    An array is removed if all its runs are among them, and no task of it has ever started: a script
    that is submitted by hand leaves its job id. One that still waits in the queue runs what is
    written now.

    Args:
        dirs: The run directories.
        submission: The sweep's ``.hpc_elastic``.
    """
    for array in Submission(submission).arrays():
        if array.job_id is not None or not array.tasks.exists():
            continue
        runs = {RunDir(path) for path in array.run_dirs()}
        if runs <= {RunDir(path) for path in dirs} and all(map(_was_dry_run, runs)):
            for run in runs:
                run.spec.unlink(missing_ok=True)
            array.script.unlink(missing_ok=True)
            array.tasks.unlink()


def _was_dry_run(run: RunDir) -> bool:
    settings = read_json(run.settings) or {}
    return bool(settings.get("launcher", {}).get("dry_run"))


def next_array(submission: Path) -> int:
    """Return the first free array number: a sweep may be submitted in several batches."""
    return max((array.number for array in Submission(submission).arrays()), default=-1) + 1


def with_free_numbers(prepare_anew: Callable[[], T]) -> T:
    """Plan and prepare a submission, until nobody else has taken its arrays' numbers meanwhile.

    Several runs of one sweep may be resumed at the same moment.

    Args:
        prepare_anew: Makes the plan, and writes its files.

    Raises:
        ArrayTakenError: others were faster every time.
    """
    for _ in range(_TRIES - 1):
        try:
            return prepare_anew()
        except ArrayTakenError:
            continue
    return prepare_anew()


def make_run_id(name: str) -> str:
    """Return a new identity for a run: unique, and readable in logs."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def make_spec(
    plan: Plan,
    number: int,
    tasks: list[tuple[int, int]],
    *,
    entry: Entry,
    run_id: str,
    grace: Grace,
) -> RunSpec:
    """Return run.json of one run of the plan (pure), without its provenance."""
    settings = plan.runs[number].settings
    return RunSpec(
        run_id=run_id,
        min_nodes=settings.nodes.min,
        max_nodes=settings.nodes.max,
        nproc_per_node=settings.nproc_per_node,
        max_restarts=settings.launcher.max_restarts,
        entry=entry,
        submission=str(plan.submission),
        tasks=tasks,
        launcher=plan.backend,
        grow=settings.launcher.grow,
        grow_after_s=settings.launcher.grow_after_s,
        min_wait_s=settings.launcher.min_wait_s,
        interface=settings.launcher.interface,
        max_attempts_without_progress=settings.launcher.max_attempts_without_progress,
        max_requeues=settings.launcher.max_requeues,
        notice_s=settings.launcher.notice_s,
        grace_s=grace.preempted_s,
        kill_wait_s=grace.ended_s,
        notice_signal=settings.launcher.notice_signal,
        gang=has_gang(settings),
        ft=settings.ft,
        partition=_partition(settings.launcher),
        time_s=_time_s(settings.launcher),
        whole_nodes=sbatch.has_whole_nodes(settings.launcher),
        env=dict(settings.launcher.env),
        rendezvous=settings.launcher.rendezvous,
        agent=settings.launcher.agent,
    )


def _partition(launcher: LauncherSettings) -> str | None:
    return launcher.partition if isinstance(launcher, SlurmSettings) else None


def _time_s(launcher: LauncherSettings) -> float | None:
    by_hand = launcher.dry_run  # perhaps with another time
    if not isinstance(launcher, SlurmSettings) or by_hand or "time-min" in launcher.sbatch:
        return None
    time_limit = launcher.sbatch.get("time", launcher.time)
    return None if time_limit is None else time_limit_s(str(time_limit))


def python_path(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return what PYTHONPATH must hold for a task to find this package and its dependencies.

    The package itself only if it is used from a clone (``python train.py`` in it): there,
    ``-m hpc_elastic...`` would not be found from another directory. And what the user has in
    PYTHONPATH now, since torch may be there.
    """
    root = Path(resources.__file__).resolve().parent.parent
    installed = any(part in ("site-packages", "dist-packages") for part in root.parts)
    given = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    entries = [*([] if installed else [str(root)]), *(str(Path(p).absolute()) for p in given)]
    return tuple(dict.fromkeys(entries))


def _specs(plan: Plan, entry: Entry, name: str, graces: Sequence[Grace]) -> list[RunSpec]:
    tasks = plan.tasks()
    return [
        make_spec(
            plan, number, tasks[number],
            entry=entry, run_id=make_run_id(name), grace=graces[number],
        )
        for number in range(len(plan.runs))
    ]  # fmt: skip


def _require_unused(plan: Plan) -> None:
    for run in plan.runs:
        if is_there(RunDir(run.dir).spec):
            raise RunDir(run.dir).taken()


def _write_runs(plan: Plan, specs: Sequence[RunSpec], provenance: dict[str, Any]) -> None:
    def write(run: PlannedRun, spec: RunSpec) -> None:
        spec.provenance.update(provenance)
        RunDir(run.dir).create(spec)
        write_settings(RunDir(run.dir), run.settings)
        if run.settings.launcher.snapshot:
            link_snapshot(run.dir, plan.submission)

    several_at_once(write, plan.runs, specs)


def several_at_once(write: Callable[..., None], *of_each_run: Sequence[Any]) -> None:
    """Write the files of all runs: a shared file system takes its time for each, but takes many.

    Where it takes none, threads would only wait for the interpreter's lock.

    Args:
        write: Writes those of one run.
        of_each_run: What it is called with, for each run.

    Raises:
        Exception: what the first call raised that did; later ones may not have been made.
    """
    remaining = zip(*of_each_run, strict=True)
    began = time.monotonic()
    for number, arguments in enumerate(remaining, 1):
        write(*arguments)
        if time.monotonic() - began > number * _SLOW_S:
            break
    with ThreadPoolExecutor(_WRITERS, "hpc_elastic-files") as pool:
        for _ in pool.map(lambda arguments: write(*arguments), remaining):
            pass


def write_settings(run: RunDir, settings: RunSettings) -> None:
    """Write down what was asked for, for a later `resume` to go by."""
    write_atomic(run.settings, json.dumps(as_config(settings), indent=1) + "\n", mode=0o600)


def write_arrays(plan: Plan, scripts: Mapping[int, str]) -> tuple[Path, ...]:
    """Write the files of all arrays of a plan, whose numbers are its own from here on.

    Returns:
        The batch scripts.

    Raises:
        ArrayTakenError: see `with_free_numbers`; nothing was written.
        OSError: one could not be written.
    """
    submission = Submission(plan.submission)
    ours: list[Path] = []
    for array in plan.arrays:
        content = {**plan.array_file(array), "token": secrets.token_hex(8)}
        text = json.dumps(content, indent=1) + "\n"
        file = submission.array(array.number).tasks
        if not create_atomic(file, text):
            for mine in ours:
                mine.unlink()
            raise ArrayTakenError(f"{file} was made by another submission: submit again")
        ours.append(file)
    for number, text in scripts.items():
        write_atomic(submission.array(number).script, text)
    return tuple(submission.array(k).script for k in scripts)


def render_scripts(
    plan: Plan, name: str, *, python: str = sys.executable, cwd: Path | None = None
) -> dict[int, str]:
    """Return the text of the batch script of each array, by number; none with launcher=local.

    Args:
        plan: What will be submitted.
        name: Name of the jobs where ``launcher.job_name`` gives none.
        python: The interpreter of the tasks.
        cwd: Where setup lines run; None: here.

    Raises:
        ConfigError: a setting can not be written into a batch script.
    """
    if plan.backend != "slurm":
        return {}
    where = cwd or Path.cwd()
    return {a.number: _render_array(plan, a, name, python, where) for a in plan.arrays}


def _render_array(plan: Plan, array: PlannedArray, name: str, python: str, cwd: Path) -> str:
    settings = array.launcher
    assert isinstance(settings, SlurmSettings)
    script = sbatch.Script(
        settings=settings,
        job_name=settings.job_name or name,
        num_tasks=len(array.tasks),
        submission=plan.submission,
        array=array.number,
        gang=array.gang,
        python=python,
        cwd=cwd,
        python_path=python_path(os.environ),
    )
    return sbatch.render(script, read_template(settings.template))


def read_template(path: str | None) -> str:
    """Return the text of the packaged template, or of the user's own.

    Raises:
        ConfigError: the user's template can not be read.
    """
    packaged = resources.folder("sbatch_templates") / "array.sbatch.j2"
    try:
        return (Path(path) if path else packaged).read_text()
    except OSError as e:
        raise ConfigError("launcher.template", path, f"can not be read: {e.strerror}") from e


def overlapping(dirs: Sequence[Path]) -> Path | None:
    """Return a directory that two runs would share; None if each has its own (pure)."""
    seen: set[Path] = set()
    return next((d for d in dirs if d in seen or seen.add(d)), None)  # type: ignore[func-returns-value]
