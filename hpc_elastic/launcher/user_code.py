"""The user's code at submission: its function as an `Entry`, its origin, and a copy of it.

Nothing is pickled: a worker loads the same script or module and looks the function up in it. So the
function needs a name at module level and a file; and loading the file must not submit it again.

The origin is recorded in run.json: enough to run it again, and nothing secret. Of the environment
only the variables in `ENVIRONMENT`, which choose software, are recorded, since tokens live there.

With ``launcher.code_snapshot=true`` the runs of a sweep use a copy of the code: what git tracks and
what it does not ignore. Without it, a task that waits in the queue runs the files as they are when
it starts.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import platform
import shutil
import site
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from hpc_elastic import _util
from hpc_elastic.errors import ConfigError, SubmissionError
from hpc_elastic.run.directory import SUBMISSION, Entry, Submission
from hpc_elastic.run.registry import user
from hpc_elastic.shared_files import make_folder

ENVIRONMENT = (
    *("CONDA_DEFAULT_ENV", "CONDA_PREFIX", "CUDA_HOME", "LD_LIBRARY_PATH", "LOADEDMODULES"),
    *("OMP_NUM_THREADS", "PATH", "PYTHONPATH", "SLURM_CONF", "VIRTUAL_ENV"),
)
PACKAGES = ("hpc_elastic", "hydra-core", "numpy", "omegaconf", "submitit", "torch")


def entry_of(
    function: Callable[..., Any],
    kind: Literal["hydra", "function"],
    args: Sequence[Any] = (),
) -> Entry:
    """Return the entry of a function at module level.

    Args:
        function: The function decorated with `@hydra.main`, or the argument of
            `hpc_elastic.launch`.
        kind: How a worker calls it: with the frozen config, or with ``args``.
        args: Arguments of a ``function`` entry, JSON values.

    Raises:
        ConfigError: Workers could not import the function; names the remedy.
    """
    qualname = getattr(function, "__qualname__", None)
    if qualname is None or "<" in qualname:
        remedy = "workers import the function by name: define it with `def` at module level"
        raise ConfigError("task function", qualname or repr(function), remedy)
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


def _source(function: Callable[..., Any]) -> tuple[str | None, str | None]:
    """Return (script, module) of the function; one of the two is None."""
    name = function.__module__
    if name != "__main__":
        try:
            is_importable = importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):
            is_importable = False
        if not is_importable:
            remedy = "its module cannot be imported by name, as workers have to"
            raise ConfigError("task function", name, remedy)
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
    """Refuse a script whose submitting statement runs whenever the script is imported."""
    frame = inspect.currentframe()
    while frame is not None and not (
        frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
    ):
        frame = frame.f_back
    if frame is None:  # another thread runs the script
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


def search_path() -> list[str]:
    """Return the entries of sys.path that a worker's interpreter does not have by default."""
    paths = sysconfig.get_paths()
    own = {paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]}
    own |= {*site.getsitepackages(), site.getusersitepackages()}
    own |= {str(Path(p) / "lib-dynload") for p in (paths["stdlib"], paths["platstdlib"])}
    entries = [os.path.abspath(p) for p in sys.path]  # noqa: PTH100 - '' is the working directory
    kept = [p for p in entries if p not in own and not p.endswith(".zip") and Path(p).is_dir()]
    return list(dict.fromkeys(kept))


def source_folder(entry: Entry) -> Path:
    """Return a folder of the user's code."""
    return Path(entry.script).parent if entry.script else Path(entry.cwd)


def provenance(entry: Entry) -> dict[str, Any]:
    """Return what run.json records about the origin of a submission (login node, once a sweep)."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "user": user(),
        "host": socket.gethostname(),
        "cwd": str(Path.cwd()),
        "argv": list(sys.argv),
        "python": sys.executable,
        "python_version": platform.python_version(),
        "packages": packages(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "git": git_state(source_folder(entry)),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit, and whether the tree differs from it; None outside git or without git."""
    argv = ["git", "-C", str(folder), "--no-optional-locks"]
    argv += ["status", "--porcelain=v2", "--branch"]
    try:
        done = _util.run(argv, timeout_s=10.0)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_git_status(done.stdout) if done.returncode == 0 else None


def parse_git_status(text: str) -> dict[str, Any]:
    """Parse `git status --porcelain=v2 --branch`: header lines start with '#', changes do not."""
    lines = text.splitlines()
    oids = [line.split()[-1] for line in lines if line.startswith("# branch.oid")]
    commit = oids[0] if oids and oids[0] != "(initial)" else None
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}


def packages() -> dict[str, str | None]:
    """Return the versions of the packages of a run, without importing them; None if absent."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def take_snapshot(entries: Sequence[Entry], submission: Path) -> list[Entry]:
    """Copy the checkout of the first entry, and return the entries in the copy.

    Later submissions of the same sweep run from the copy of the first: others of its runs use it.

    Args:
        entries: The user's functions in the checkout, at least one.
        submission: The sweep's ``.hpc_elastic``; the copy is its folder ``code``.

    Raises:
        SubmissionError: The code is in no git checkout, or could not be copied.
    """
    top = Path(_git(source_folder(entries[0]), "rev-parse", "--show-toplevel").removesuffix("\n"))
    code = submission / "code"
    is_used = code.is_dir() and bool(Submission(submission).job_ids())
    try:
        for name in () if is_used else own_files(_listed(top)):
            make_folder((code / name).parent, parents=True)
            shutil.copy2(top / name, code / name, follow_symlinks=False)
    except OSError as e:
        raise SubmissionError(f"launcher.code_snapshot: cannot copy {top} to {code}: {e}") from e
    return [remap(entry, top, code) for entry in entries]


def link_snapshot(run: Path, submission: Path) -> None:
    """Give a run directory its link ``code`` to the copy."""
    link = run / "code"
    if not link.is_symlink():
        link.symlink_to(submission / "code", target_is_directory=True)


def own_files(listed: Iterable[str]) -> list[str]:
    """Return the files that are not output of sweeps (pure).

    A sweep directory usually lies in the checkout, and often git does not ignore it: its files
    would be copied into itself.
    """
    paths = [PurePosixPath(name) for name in listed]
    sweeps = {p.parent for path in paths for p in path.parents if p.name == SUBMISSION}
    return [str(path) for path in paths if sweeps.isdisjoint(path.parents)]


def remap(entry: Entry, top: Path, code: Path) -> Entry:
    """Return the entry with every path below ``top`` moved to ``code`` (pure)."""

    def moved(path: str) -> str:
        inside = Path(path).is_relative_to(top)
        return str(code / Path(path).relative_to(top)) if inside else path

    return replace(
        entry,
        script=moved(entry.script) if entry.script else None,
        cwd=moved(entry.cwd),
        sys_path=[moved(path) for path in entry.sys_path],
    )


def _listed(top: Path) -> list[str]:
    """Return the files of a checkout, including those of its submodules."""
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


def _git(folder: Path, *args: str) -> str:
    argv = ["git", "-C", str(folder), *args]
    remedy = "`git init` there, or leave the setting off"
    try:
        done = _util.run(argv, timeout_s=60.0, errors="surrogateescape")
    except (OSError, subprocess.TimeoutExpired) as e:
        raise SubmissionError(f"launcher.code_snapshot needs git: {e}") from e
    if done.returncode != 0:
        why = done.stderr.strip()
        raise SubmissionError(
            f"launcher.code_snapshot copies a git checkout; {folder}: {why}. {remedy}"
        )
    return done.stdout
