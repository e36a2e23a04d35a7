"""Submission of runs: planned, written, passed to Slurm or this machine, and returned as handles.

`hpc_elastic.launch` and the Hydra launcher (`sweep`) both call `submit`, and `wait.wait` after it.
Every file is written before anything is submitted: ``<sweep>/.hpc_elastic`` and the run directories
are complete then, and a script that is rendered and not submitted can be given to sbatch by hand,
with the same result.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hpc_elastic import _util
from hpc_elastic.config.resolve import read_env_file
from hpc_elastic.config.schema import LauncherSettings, LocalSettings, RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError, HpcElasticError, RunDirectoryError
from hpc_elastic.launcher import batch_script, detach
from hpc_elastic.launcher.plan import Plan, RunRequest, by_settings, make_plan
from hpc_elastic.launcher.run_handle import RunHandle, SubmittedJobs
from hpc_elastic.launcher.user_code import link_snapshot, provenance, take_snapshot
from hpc_elastic.launcher.wait import location, shown
from hpc_elastic.report.run_view import overrides_label
from hpc_elastic.run import fencing, ownership, registry
from hpc_elastic.run.directory import SUBMISSION, PoolTerms, RunDir, RunSpec, Submission
from hpc_elastic.run.redaction import is_secret
from hpc_elastic.shared_files import create_atomic, make_folder, names_in, write_atomic
from hpc_elastic.slurm.parsing import Preemption, has_submitted_nothing

RENDERED = "rendered: "
"""First part of the line with the path of each script in a dry run; `hpc-elastic submit` reads
it."""
LOCAL_GRACE_S = 30.0
"""Seconds between SIGTERM and SIGKILL of a process with ``launcher=local``."""

T = TypeVar("T")
_NUM_WRITERS = 16
_SLOW_S = 0.01
"""Seconds for the files of one run above which several runs are written at a time."""
_NUM_TRIES = 20


class ArrayTakenError(RunDirectoryError):
    """The number of an array was taken since it was chosen: plan again (`with_free_numbers`)."""


def submit(requests: Sequence[RunRequest], *, sweep: Path, name: str) -> list[RunHandle]:
    """Submit the runs of one sweep directory; ``name`` is that of the user's script or function.

    With ``launcher.dry_run=true`` the files are written, the plan is printed, and no run is
    returned. Raises HpcElasticError if nothing was submitted; if sbatch has refused it, the
    directories can be used again. The text of a KeyboardInterrupt states what has become of the
    runs.
    """
    is_again = detach.report_preparing(sweep)
    plan, specs = prepare(requests, sweep=sweep, name=name, is_again=is_again)
    folders = [run.dir for run in plan.runs]
    where = location(folders, sweep)
    if plan.launcher.dry_run:
        print(plan, *(f"{RENDERED}{script}" for script in plan.scripts), where, sep="\n")
        return []
    detach.report_starting(plan)
    with withdrawn_if_refused(plan):
        jobs = start(plan)
    with released_on_failure(jobs):
        detach.report_started(plan)
        by_id = dict(zip((spec.run_id for spec in specs), folders, strict=True))
        registry.add(by_id)
        handles = handles_of(plan, specs, jobs)
        detach.report_submission(plan, by_id, jobs)
        if detach.report_file() is None and not is_awaited(plan.launcher):
            print(plan, where, jobs.release(), sep="\n")
    return handles


def is_awaited(launcher: LauncherSettings) -> bool:
    """Return whether the launcher waits for its runs. Local runs end with it, so it always does."""
    return not launcher.dry_run and (launcher.wait or isinstance(launcher, LocalSettings))


def start(plan: Plan) -> SubmittedJobs:
    """Hand a plan, whose files are written, to Slurm or to this machine."""
    if plan.backend == "slurm":
        from hpc_elastic.launcher import slurm

        return slurm.submit(plan)
    from hpc_elastic.launcher import local

    return local.submit(plan)


def handles_of(plan: Plan, specs: Sequence[RunSpec], jobs: SubmittedJobs) -> list[RunHandle]:
    """Return the runs of a submitted plan, in its order."""
    ids = dict(zip((array.number for array in plan.arrays), jobs.job_ids, strict=True))
    handles = []
    for run, spec in zip(plan.runs, specs, strict=True):
        label, tasks = overrides_label(run.overrides), tuple(spec.task_names(ids))
        handles.append(RunHandle(run.dir, label, tasks, plan.submission, jobs))
    return handles


@contextmanager
def withdrawn_if_refused(plan: Plan) -> Iterator[None]:
    """Remove what was written for a plan if sbatch refuses its first array."""
    try:
        yield
    except HpcElasticError as e:
        arrays = [Submission(plan.submission).array(array.number) for array in plan.arrays]
        if has_submitted_nothing(e.__cause__) and all(array.job_id is None for array in arrays):
            for array in arrays:
                array.withdraw()
        raise


@contextmanager
def released_on_failure(jobs: SubmittedJobs) -> Iterator[None]:
    """Release jobs if a later step fails, and print that; local processes would run on."""
    try:
        yield
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(jobs.release()) from e
    except BaseException:
        print(jobs.release(), file=sys.stderr)
        raise


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Exit on Ctrl-C or SIGTERM with the message of the KeyboardInterrupt alone, if any."""
    try:
        with _util.sigterm_as_interrupt():
            yield
    except KeyboardInterrupt as e:
        print(str(e) or "interrupted: nothing was submitted", file=sys.stderr)
        sys.exit(130)


# ---- files


def prepare(
    requests: Sequence[RunRequest], *, sweep: Path, name: str, is_again: bool = False
) -> tuple[Plan, list[RunSpec]]:
    """Plan the runs of one sweep directory, and write all their files.

    ``is_again``: a launcher of the same submission was killed before it submitted them, and its
    files are replaced. Raises HpcElasticError as `lay_out`, `query_terms` and `write` do.
    """
    for request in requests:
        if (words := request.settings.launcher.resume_args) and not request.entry.is_command:
            remedy = "is for commands of `hpc-elastic run`; a function or a Hydra script has none"
            raise ConfigError("launcher.resume_args", words, remedy)
    found = provenance(requests[0].entry)
    _note_secrets([override for request in requests for override in request.overrides])
    if flags := lost_flags(sys.flags.optimize, sys.warnoptions, os.environ):
        print(f"{flags}: workers have no flags of this Python, but its variables", file=sys.stderr)
    dirs = [request.dir for request in requests]
    remove_rendered(dirs, sweep / SUBMISSION, of_any=is_again)

    def prepare_again() -> tuple[Plan, list[RunSpec]]:
        plan = lay_out(requests, sweep / SUBMISSION)
        return plan, write(plan, name, provenance=found, terms=query_terms(plan))

    return with_free_numbers(prepare_again)


def lost_flags(optimize: int, warnings: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the flags of a Python that its workers lack, each with the variable for it (pure)."""
    own = [w for w in warnings if w not in environ.get("PYTHONWARNINGS", "").split(",")]
    flags = [f"-W {w} (PYTHONWARNINGS={w})" for w in own]
    if optimize and "PYTHONOPTIMIZE" not in environ:
        flags.append(f"-{'O' * optimize} (PYTHONOPTIMIZE={optimize})")
    return ", ".join(flags)


def require_one_process(environ: Mapping[str, str]) -> None:
    """Refuse a process that torchrun or srun has started beside others: each would submit (pure).

    Only the first process of a step of Slurm may: it may be the user's shell.
    """
    if fencing.VARIABLE in environ:
        return  # a worker of a run may submit another run
    is_in_step = environ.get("SLURM_PROCID", "0") != "0"
    for key, is_one in (("WORLD_SIZE", "RANK" in environ), ("SLURM_STEP_NUM_TASKS", is_in_step)):
        if is_one and (number := environ.get(key, "1")) != "1":
            remedy = f"each of these {number} processes would start a run of its own: start one, "
            remedy += "or leave the launcher out ('~launcher') to train in them"
            raise ConfigError(key, number, remedy)


def _note_secrets(overrides: Sequence[str]) -> None:
    """Print a note if a secret for the workers is in the arguments of this process."""
    given = re.findall(r"launcher\.env\.(\w+)=", "\n".join(overrides))
    for name in filter(is_secret, dict.fromkeys(given)):
        remedy = "launcher.env_file=PATH reads variables from a file that only you can read"
        where = "can be read by all users of this machine in the arguments of this process"
        print(f"launcher.env.{name} {where}: {remedy}", file=sys.stderr)


def lay_out(requests: Sequence[RunRequest], submission: Path) -> Plan:
    """Return the plan for runs in one sweep directory; launcher.harvest is decided here.

    Raises ConfigError if the runs cannot be of one submission; SubmissionError if Slurm does not
    answer.
    """
    shared = [folder for folder, num in Counter(r.dir for r in requests).items() if num > 1]
    if shared:
        remedy = "two runs have this directory; make it depend on the run: ${hydra.job.num}"
        raise ConfigError("hydra.sweep.subdir", str(shared[0]), remedy)
    for settings in {id(request.settings): request.settings for request in requests}.values():
        batch, nproc = settings.launcher.global_batch, settings.nproc_per_node
        if batch is not None:
            from hpc_elastic.data.batch import check

            wrong = check(batch, settings.nodes.max, nproc if isinstance(nproc, int) else None)
            if wrong is not None:
                raise ConfigError("launcher.global_batch", batch, wrong)
    launcher, size = requests[0].settings.launcher, 1 << 30
    if isinstance(launcher, SlurmSettings):
        from hpc_elastic.launcher.slurm import adopt_shell, choose_harvest, max_array_size

        size = max_array_size(dry_run=launcher.dry_run)
        requests = choose_harvest(adopt_shell(requests, os.environ))
    return make_plan(requests, submission, max_array_size=size, first_array=next_array(submission))


def query_terms(plan: Plan) -> list[list[PoolTerms]]:
    """Return the terms of each run's pools; ConfigError if they cannot hold a run."""
    if plan.backend == "slurm":
        from hpc_elastic.launcher.slurm import query_partitions

        known = zip(plan.runs, query_partitions(plan.runs), strict=True)
        return [terms_of(run.settings, preemptions) for run, preemptions in known]
    if not plan.launcher.dry_run:
        from hpc_elastic.launcher.local import require_possible

        require_possible(plan)
    return [terms_of(run.settings) for run in plan.runs]


def write(
    plan: Plan,
    name: str,
    *,
    provenance: Mapping[str, Any] | None = None,
    terms: Sequence[list[PoolTerms]] = (),
) -> list[RunSpec]:
    """Write the run directories, the array files and the batch scripts of a plan.

    ``terms`` are those of each run's pools, by default as on this machine. Raises ConfigError if a
    setting cannot be written into the batch script; RunDirectoryError if a run directory cannot be
    used; SubmissionError if the snapshot of the code failed.
    """
    scripts = render_scripts(plan, name)  # refuses before anything is written
    try:
        logs = Submission(plan.submission).logs
        ownership.claim(plan.submission, logs)
        make_folder(logs)
        _require_links(plan.submission)
        there = {folder: names_in(folder) for folder in {run.dir.parent for run in plan.runs}}
        used_before = set()
        for request in plan.runs:
            run = RunDir(request.dir)
            if run.path.name not in there[run.path.parent]:
                continue
            names = names_in(run.path)
            if run.spec.name in names:
                raise run.taken_error()
            used = (run.rdzv, run.results, run.notices, run.event_logs, run.hydra, run.tasks)
            ownership.claim(run.path, *used)
            if {run.rdzv.name, run.hydra.name} & names:
                used_before.add(run.path)
        write_arrays(plan, scripts)
        entries = [run.entry for run in plan.runs]
        if plan.launcher.code_snapshot:
            entries = take_snapshot(entries, plan.submission)
        terms = terms or by_settings(plan.runs, terms_of)
        specs = [
            RunSpec(
                make_run_id(name, run.dir), str(plan.submission), tasks, entry, run.settings, own,
                file_env, provenance=dict(provenance or {}), hydra=hydra,
            )
            for run, tasks, entry, own, file_env, hydra in zip(
                plan.runs, plan.tasks, entries, terms,
                by_settings(plan.runs, lambda own: read_env_file(own.launcher.env_file)),
                _write_shared_texts(plan), strict=True,
            )
        ]  # fmt: skip

        def write_run(request: RunRequest, spec: RunSpec) -> None:
            RunDir(request.dir).create(spec)
            if request.dir in used_before:
                RunDir(request.dir).complete(spec, anew=True)
            if request.settings.launcher.code_snapshot:
                link_snapshot(request.dir, plan.submission)

        write_concurrently(write_run, plan.runs, specs)
    except RunDirectoryError:
        raise
    except OSError as e:
        remedy = "choose another folder with hydra.sweep.dir=..."
        where = e.filename or plan.submission
        raise RunDirectoryError(f"{where}: {e.strerror or e}; {remedy}") from e
    return specs


def _write_shared_texts(plan: Plan) -> list[dict[str, list[Any]]]:
    """Return `RunSpec.hydra` of each run; write the pieces that several runs of an array have."""
    arrays = [tasks[0][0] for tasks in plan.tasks]
    counts: dict[int, Counter[str]] = {array: Counter() for array in arrays}
    for array, run in zip(arrays, plan.runs, strict=True):
        for pieces in run.hydra_files.values():
            counts[array].update(pieces)
    numbers: dict[int, dict[str, int]] = {}
    for array, count in counts.items():
        shared = [piece for piece, num in count.items() if num > 1]
        numbers[array] = {piece: number for number, piece in enumerate(shared)}
        if shared:
            texts = Submission(plan.submission).array(array).texts
            write_atomic(texts, json.dumps(shared) + "\n", mode=0o600)
    found: list[dict[str, list[Any]]] = []
    for array, run in zip(arrays, plan.runs, strict=True):
        number_of = numbers[array].get  # but of overrides, one piece, which lists of runs read
        items = run.hydra_files.items()
        found.append({k: [number_of(p, p) if v[1:] else p for p in v] for k, v in items})
    return found


def terms_of(
    settings: RunSettings, preemptions: Sequence[Preemption] | None = None
) -> list[PoolTerms]:
    """Return the terms of the tasks of each pool; None: those of this machine."""
    found = list[PoolTerms]()
    known: Sequence[Preemption | None] = preemptions or [None] * len(settings.shares)
    for (_, launcher), preemption in zip(settings.shares, known, strict=True):
        # Seconds between SIGTERM and SIGKILL. A given grace takes precedence over Slurm's, and a
        # task that is cancelled has no more time than one that is preempted.
        preempt_grace_s = kill_wait_s = LOCAL_GRACE_S
        if preemption is not None:
            kill_wait_s = preemption.kill_wait_s
            preempt_grace_s = preemption.grace_s + kill_wait_s
        if launcher.preempt_grace_s is not None:
            preempt_grace_s = launcher.preempt_grace_s
            kill_wait_s = min(kill_wait_s, preempt_grace_s)
        whole_nodes = batch_script.has_whole_nodes(launcher)
        found.append(PoolTerms(preempt_grace_s, kill_wait_s, whole_nodes))
    return found


def make_run_id(name: str, folder: Path | None = None) -> str:
    """Return the run id that a folder is named by, or a new one: unique, and readable in logs."""
    given = "" if folder is None else folder.name
    if re.fullmatch(rf"{re.escape(name)}-\d{{8}}-\d{{6}}-[0-9a-f]{{8}}", given):
        return given
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


# ---- arrays


def next_array(submission: Path) -> int:
    """Return the first free array number: a sweep may be submitted in several batches."""
    return max((array.number for array in Submission(submission).arrays()), default=-1) + 1


def with_free_numbers(prepare_again: Callable[[], T]) -> T:
    """Prepare a submission, again if others take its numbers; raise ArrayTakenError at the end."""
    for _ in range(_NUM_TRIES - 1):
        try:
            return prepare_again()
        except ArrayTakenError:
            continue
    return prepare_again()


def write_arrays(plan: Plan, scripts: Mapping[int, str]) -> None:
    """Write the array files of a plan, which then owns their numbers; or ArrayTakenError."""
    submission = Submission(plan.submission)
    ours: list[Path] = []
    for array in plan.arrays:
        content = {**plan.array_file(array), "token": secrets.token_hex(8)}
        file = submission.array(array.number).tasks
        if not create_atomic(file, json.dumps(content, indent=1) + "\n"):
            for mine in ours:
                mine.unlink()
            raise ArrayTakenError(f"{file} was made by another submission: submit again")
        ours.append(file)
    for number, text in scripts.items():
        write_atomic(submission.array(number).script, text)


def render_scripts(
    plan: Plan, name: str, *, python: str = sys.executable, cwd: Path | None = None
) -> dict[int, str]:
    """Return the text of each array's batch script by number; its setup lines run in ``cwd``."""
    texts: dict[int, str] = {}
    for array in plan.arrays if plan.backend == "slurm" else ():
        settings = array.launcher
        assert isinstance(settings, SlurmSettings)
        script = batch_script.Script(
            settings, job_name=settings.job_name or name, num_tasks=len(array.tasks),
            submission=plan.submission, array=array.number, coallocated=array.coallocated,
            python=python, cwd=cwd or Path.cwd(), python_path=batch_script.python_path(os.environ),
            trusting=ownership.is_trusting(),
        )  # fmt: skip
        texts[array.number] = batch_script.render(script, read_template(settings.template))
    return texts


def read_template(path: str | None) -> str:
    """Return the text of the packaged template or the user's; raise ConfigError if unreadable."""
    packaged = _util.folder("sbatch_templates") / "array.sbatch.j2"
    try:
        return (Path(path) if path else packaged).read_text()
    except OSError as e:
        raise ConfigError("launcher.template", path, f"cannot be read: {e.strerror}") from e


# ---- run directories


def write_concurrently(write_run: Callable[..., None], *of_each_run: Sequence[Any]) -> None:
    """Write all runs' files, several at a time where a file system is slow."""

    def written() -> Iterator[None]:
        remaining = zip(*of_each_run, strict=True)
        started = time.monotonic()
        for number, arguments in enumerate(remaining, 1):
            write_run(*arguments)
            yield
            if time.monotonic() - started > number * _SLOW_S:
                break
        with ThreadPoolExecutor(_NUM_WRITERS, "hpc_elastic-files") as pool:
            yield from pool.map(lambda arguments: write_run(*arguments), remaining)

    for _ in shown(written(), "runs written", len(of_each_run[0])):
        pass


def open_sweep(folder: Path) -> None:
    """Make the sweep directory, or RunDirectoryError; ConfigError in one process of several."""
    require_one_process(os.environ)
    probe = folder / ".hpc_elastic-probe"
    try:
        make_folder(folder, parents=True)
        probe.touch()
        probe.unlink()
    except OSError as e:
        remedy = "choose a folder on the shared file system with hydra.sweep.dir=..."
        what = f"cannot write to the sweep directory {folder}: {e}"
        raise RunDirectoryError(f"{what}; {remedy}") from e


def _require_links(folder: Path) -> None:
    """Make a hard link: agents elect their leader by one, on any node."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".links-") as trial:
        file = Path(trial, "file")
        file.touch()
        try:
            file.with_name("link").hardlink_to(file)
        except OSError as e:
            remedy = "choose one on another file system with hydra.sweep.dir=... (launch: run_dir)"
            why = f"{folder}: no hard links can be made in this directory ({e.strerror or e})"
            raise RunDirectoryError(f"{why}, by which agents elect their leader; {remedy}") from e


def remove_rendered(dirs: Sequence[Path], submission: Path, *, of_any: bool = False) -> None:
    """Remove the files of a dry run, of runs that are prepared again; with ``of_any``, of any call.

    An array is removed if all its runs are among them, and no task of it has ever started: the
    tasks of a script that is submitted by hand record its job id. A task of it that still waits in
    the queue runs what is written now.
    """
    for array in Submission(submission).arrays():
        if array.job_id is not None or not array.tasks.exists():
            continue
        runs = {RunDir(path) for path in array.run_dirs()}
        is_ours = runs <= {RunDir(path) for path in dirs}
        if is_ours and (of_any or all(map(_was_dry_run, runs))):
            array.withdraw()


def _was_dry_run(run: RunDir) -> bool:
    try:
        return run.load().settings.launcher.dry_run
    except RunDirectoryError:
        return False  # the error follows, if the directory is to be used
