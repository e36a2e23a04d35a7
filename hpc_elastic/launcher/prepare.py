"""Everything on disk that a submission needs, written before the scheduler hears of it.

After `prepare`, ``<sweep>/.hpc_elastic`` and the run directories are complete: a script that is
rendered and not submitted can be handed to sbatch by hand and does the same.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import platform
import secrets
import shutil
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

from hpc_elastic import _util
from hpc_elastic.config.resolve import as_config
from hpc_elastic.config.schema import LauncherSettings, RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError, RunDirectoryError, SubmissionError
from hpc_elastic.launcher import batch_script
from hpc_elastic.launcher.batch_script import require_nodes, time_note
from hpc_elastic.launcher.plan import Plan, PlannedArray, PlannedRun, has_gang
from hpc_elastic.run.directory import SUBMISSION, Entry, RunDir, RunSpec, Submission
from hpc_elastic.run.registry import user
from hpc_elastic.shared_files import create_atomic, is_there, read_json, write_atomic
from hpc_elastic.slurm.client import SlurmClient, time_limit_s
from hpc_elastic.slurm.parsing import Preemption

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
        entry = take_snapshot(entry, plan.submission) if plan.launcher.code_snapshot else entry
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
        scale_up=settings.launcher.scale_up,
        scale_up_timeout_s=settings.launcher.scale_up_timeout_s,
        below_min_timeout_s=settings.launcher.below_min_timeout_s,
        interface=settings.launcher.interface,
        max_failed_rounds=settings.launcher.max_failed_rounds,
        max_requeues=settings.launcher.max_requeues,
        signal_delay_s=settings.launcher.signal_delay_s,
        preempt_grace_s=grace.preempted_s,
        kill_wait_s=grace.ended_s,
        preempt_signal=settings.launcher.preempt_signal,
        coallocate_min=has_gang(settings),
        ft=settings.ft,
        partition=_partition(settings.launcher),
        time_s=_time_s(settings.launcher),
        whole_nodes=batch_script.has_whole_nodes(settings.launcher),
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
    root = Path(_util.__file__).resolve().parent.parent
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
        if run.settings.launcher.code_snapshot:
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
    """Write down what was asked for, for a later `control` to go by."""
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
    script = batch_script.Script(
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
    return batch_script.render(script, read_template(settings.template))


def read_template(path: str | None) -> str:
    """Return the text of the packaged template, or of the user's own.

    Raises:
        ConfigError: the user's template can not be read.
    """
    packaged = _util.folder("sbatch_templates") / "array.sbatch.j2"
    try:
        return (Path(path) if path else packaged).read_text()
    except OSError as e:
        raise ConfigError("launcher.template", path, f"can not be read: {e.strerror}") from e


def overlapping(dirs: Sequence[Path]) -> Path | None:
    """Return a directory that two runs would share; None if each has its own (pure)."""
    seen: set[Path] = set()
    return next((d for d in dirs if d in seen or seen.add(d)), None)  # type: ignore[func-returns-value]


# ---- A copy of the user's code, taken at submission (``launcher.code_snapshot=true``)
# Without it, a task that waits in the queue runs whatever the files say when it starts. The copy
# holds what git tracks and what it does not ignore, once for a sweep; each run has a link to it.


_SNAPSHOT_TIMEOUT_S = 60.0


def take_snapshot(entry: Entry, submission: Path) -> Entry:
    """Copy the checkout that the entry is in, and return the entry as it is in the copy.

    Args:
        entry: The user's function where it lies now.
        submission: The sweep's ``.hpc_elastic``; the copy is its folder ``code``.

    Raises:
        SubmissionError: the code is in no git checkout, or could not be copied.
    """
    folder = Path(entry.script).parent if entry.script else Path(entry.cwd)
    top = _toplevel(folder)
    code = submission / "code"
    try:
        for name in own_files(_listed(top)):
            _copy(top / name, code / name)
    except OSError as e:
        raise SubmissionError(f"launcher.code_snapshot: can not copy {top} to {code}: {e}") from e
    return remap(entry, top, code)


def link_snapshot(run: Path, submission: Path) -> None:
    """Give a run directory its link ``code`` to the copy."""
    link = run / "code"
    if not link.is_symlink():
        link.symlink_to(submission / "code", target_is_directory=True)


def own_files(listed: Iterable[str]) -> list[str]:
    """Return the files that are not the output of earlier sweeps (pure).

    A sweep directory lies in the checkout as a rule, and is often not ignored: what is in it
    would be copied into itself.
    """
    paths = [PurePosixPath(name) for name in listed]
    sweeps = {p for path in paths for p in _sweeps_above(path)}
    return [str(path) for path in paths if sweeps.isdisjoint(path.parents)]


def remap(entry: Entry, top: Path, code: Path) -> Entry:
    """Return the entry with every path below ``top`` moved below ``code`` (pure)."""

    def moved(path: str) -> str:
        inside = Path(path).is_relative_to(top)
        return str(code / Path(path).relative_to(top)) if inside else path

    return replace(
        entry,
        script=moved(entry.script) if entry.script else None,
        cwd=moved(entry.cwd),
        sys_path=[moved(path) for path in entry.sys_path],
    )


def _sweeps_above(path: PurePosixPath) -> list[PurePosixPath]:
    return [p.parent for p in path.parents if p.name == SUBMISSION]


def _toplevel(folder: Path) -> Path:
    return Path(_git(folder, "rev-parse", "--show-toplevel").removesuffix("\n"))


def _listed(top: Path) -> list[str]:
    """Return the files of a checkout, those of its submodules included."""
    names = _git(top, "ls-files", "-co", "--exclude-standard", "-z").split("\0")
    files: list[str] = []
    for name in dict.fromkeys(filter(None, names)):
        path = top / name
        if path.is_dir() and not path.is_symlink():
            submodule = (path / ".git").exists()
            files += [f"{name.rstrip('/')}/{inner}" for inner in _listed(path)] if submodule else []
        elif path.is_symlink() or path.exists():
            files.append(name)
    return files


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target, follow_symlinks=False)


def _git(folder: Path, *args: str) -> str:
    argv = ["git", "-C", str(folder), *args]
    remedy = "`git init` there, or leave the setting off"
    try:
        done = _util.run(argv, timeout_s=_SNAPSHOT_TIMEOUT_S, errors="surrogateescape")
    except (OSError, subprocess.TimeoutExpired) as e:
        raise SubmissionError(f"launcher.code_snapshot needs git: {e}") from e
    if done.returncode != 0:
        why = done.stderr.strip()
        raise SubmissionError(
            f"launcher.code_snapshot copies a git checkout; {folder}: {why}. {remedy}"
        )
    return done.stdout


# ---- Where a run came from: enough to run it again, and nothing secret
# The environment is never written down as a whole: tokens live there. Only the variables named in
# `ENVIRONMENT` are, which choose software.


ENVIRONMENT = (
    "CONDA_DEFAULT_ENV",
    "CONDA_PREFIX",
    "CUDA_HOME",
    "LD_LIBRARY_PATH",
    "LOADEDMODULES",
    "OMP_NUM_THREADS",
    "PATH",
    "PYTHONPATH",
    "SLURM_CONF",
    "VIRTUAL_ENV",
)
PACKAGES = ("hpc_elastic", "hydra-core", "numpy", "omegaconf", "submitit", "torch")

_GIT_TIMEOUT_S = 10.0


def provenance(folder: Path) -> dict[str, Any]:
    """Return what is recorded in run.json about this submission (login node, once a sweep).

    Args:
        folder: A folder of the user's code; its git checkout is recorded, if it is in one.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "user": user(),
        "host": socket.gethostname(),
        "cwd": str(Path.cwd()),
        "argv": list(sys.argv),
        "python": sys.executable,
        "python_version": platform.python_version(),
        "packages": packages(),
        "environment": chosen_environment(os.environ),
        "git": git_state(folder),
    }


def chosen_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that choose software, out of all."""
    return {name: environ[name] for name in ENVIRONMENT if name in environ}


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit and whether the tree differs from it; None outside git or without git."""
    argv = ["git", "-C", str(folder), "--no-optional-locks"]
    argv += ["status", "--porcelain=v2", "--branch"]
    try:
        done = _util.run(argv, timeout_s=_GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_git_status(done.stdout) if done.returncode == 0 else None


def parse_git_status(text: str) -> dict[str, Any]:
    """Read `git status --porcelain=v2 --branch`: header lines start with '#', changes do not."""
    lines = text.splitlines()
    oids = [line.split()[-1] for line in lines if line.startswith("# branch.oid")]
    commit = oids[0] if oids and oids[0] != "(initial)" else None
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}


def packages() -> dict[str, str | None]:
    """Return the versions of what a run is made of, without importing it; None: not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# ---- The user's function as an `Entry`: what a fresh Python process needs to find it again
# Nothing is pickled: a worker loads the same script or module and looks the name up in it. So the
# function must have such a name, and must come from a file; and loading the file must not submit
# it again, or train with nobody's settings.


def entry_of(
    function: Callable[..., Any],
    kind: Literal["hydra", "function"],
    args: Sequence[Any] = (),
) -> Entry:
    """Return the entry of a function at module level.

    Args:
        function: What `@hydra.main` was put on, or what is given to `hpc_elastic.launch`.
        kind: How a worker calls it: with the frozen config, or with ``args``.
        args: Arguments of a ``function`` entry, JSON only.

    Raises:
        ConfigError: workers could not import the function; says how to change that.
    """
    qualname = _qualname(function)
    script, module = _source(function)
    return Entry(
        kind=kind,
        qualname=qualname,
        script=script,
        module=module,
        args=list(args),
        cwd=str(Path.cwd()),
        sys_path=search_path(),
    )


def _qualname(function: Callable[..., Any]) -> str:
    qualname = getattr(function, "__qualname__", None)
    if qualname is None or "<" in qualname:
        remedy = "workers import the function by name: define it with `def` at module level"
        raise ConfigError("task function", qualname or repr(function), remedy)
    return str(qualname)


def _source(function: Callable[..., Any]) -> tuple[str | None, str | None]:
    """Return (script, module) of the function; one of the two is None."""
    name = function.__module__
    if name != "__main__":
        _require_importable(name)
        return None, name
    _require_guard()
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return None, spec.name
    file = getattr(main, "__file__", None)
    if file is None:
        remedy = "it was typed into an interpreter or a notebook: put it into a .py file"
        raise ConfigError("task function", function.__qualname__, remedy)
    return str(Path(file).resolve()), None


def _require_guard() -> None:
    """Refuse a script of which the statement that has led here runs whenever it is imported."""
    frame = inspect.currentframe()
    while frame is not None and not (
        frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
    ):
        frame = frame.f_back
    if frame is None:  # another thread than the one that runs the script
        return
    script, line = frame.f_code.co_filename, frame.f_lineno
    try:
        statements = ast.parse(Path(script).read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # changed meanwhile
        return
    for statement in statements:
        if statement.lineno <= line <= (statement.end_lineno or line):
            names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            if "__name__" not in names:
                why = f"line {line} runs whenever the file is imported, and workers import it"
                remedy = 'put it under `if __name__ == "__main__":`'
                raise ConfigError("script", script, f"{why}: {remedy}")


def _require_importable(name: str) -> None:
    try:
        found = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        remedy = "its module can not be imported by name; workers have to"
        raise ConfigError("task function", name, remedy)


def search_path() -> list[str]:
    """Return the entries of sys.path that a worker's interpreter would not have by itself."""
    paths = sysconfig.get_paths()
    own = {paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]}
    own |= {*site.getsitepackages(), site.getusersitepackages()}
    own |= {str(Path(p) / "lib-dynload") for p in (paths["stdlib"], paths["platstdlib"])}
    entries = [os.path.abspath(p) for p in sys.path]  # noqa: PTH100 - '' is the working directory
    kept = [p for p in entries if p not in own and not p.endswith(".zip") and Path(p).is_dir()]
    return list(dict.fromkeys(kept))


# ---- How long a task lives after SIGTERM, as it is frozen for each run (login node)
# The agents could not ask: while a preemption's grace runs down there is no time, and all nodes
# of a partition would ask at once.


LOCAL_S = 30.0


@dataclass(frozen=True)
class Grace:
    """Seconds between SIGTERM and SIGKILL.

    Attributes:
        preempted_s: When the task is preempted.
        ended_s: When it is cancelled, or out of time.
    """

    preempted_s: float = LOCAL_S
    ended_s: float = LOCAL_S


def graces(runs: Sequence[PlannedRun], client: SlurmClient | None = None) -> list[Grace]:
    """Return what the tasks of each run get, asking Slurm once for each partition.

    A Slurm that does not answer is taken to have its own defaults. With the answer it is seen
    whether the partition can hold the run at all.

    Args:
        runs: The runs of a plan.
        client: The caller of Slurm's commands.

    Raises:
        ConfigError: a partition has fewer nodes than a run's minimum.
    """

    @cache
    def ask(partition: str | None) -> Preemption:
        return (client or SlurmClient()).preemption(partition)

    notes: dict[str, None] = {}
    for run in runs:
        if isinstance(run.settings.launcher, SlurmSettings):
            partitions = ask(run.settings.launcher.partition).partitions
            require_nodes(run.settings, partitions)
            if note := time_note(run.settings.launcher, partitions):
                notes[note] = None
    for note in notes:
        print(note, file=sys.stderr)
    return [
        _of(run.settings.launcher.preempt_grace_s, ask(run.settings.launcher.partition))
        if isinstance(run.settings.launcher, SlurmSettings)
        else _of(run.settings.launcher.preempt_grace_s, None)
        for run in runs
    ]


def _of(given_s: float | None, known: Preemption | None) -> Grace:
    """Return a run's grace (pure); what the user says of a preemption goes before what Slurm says.

    Where both are known, a task that is cancelled has no longer than one that is preempted.
    """
    found = (
        Grace() if known is None else Grace(known.grace_s + known.kill_wait_s, known.kill_wait_s)
    )
    return found if given_s is None else Grace(given_s, min(given_s, found.ended_s))
