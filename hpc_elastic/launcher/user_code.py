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
import copyreg
import importlib.util
import inspect
import json
import logging
import os
import platform
import shutil
import site
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from hpc_elastic import _util
from hpc_elastic.agent import main_block
from hpc_elastic.errors import ConfigError, SubmissionError
from hpc_elastic.run import arguments
from hpc_elastic.run.directory import SUBMISSION, Entry, Submission
from hpc_elastic.run.registry import user
from hpc_elastic.shared_files import make_folder

_log = logging.getLogger(__name__)

ENVIRONMENT = (
    "CONDA_DEFAULT_ENV", "CONDA_PREFIX", "CUDA_HOME", "LD_LIBRARY_PATH", "LOADEDMODULES",
    "OMP_NUM_THREADS", "PATH", "PYTHONPATH", "SLURM_CONF", "VIRTUAL_ENV",
)  # fmt: skip
_ROOT = Path(_util.__file__).resolve().parent
PACKAGES = ("hpc_elastic", "hydra-core", "numpy", "omegaconf", "submitit", "torch")


def entry_of(
    function: Callable[..., Any], kind: Literal["hydra", "function"], args: Sequence[Any] = ()
) -> Entry:
    """Return the entry of a function at module level, or of an object whose class is there.

    A worker calls it with the frozen config, or with ``args``; ``args`` of a ``hydra`` entry are
    those of the command line. Raises ConfigError if workers could not import it.
    """
    attributes: dict[str, Any] | None = None
    named: Any = function
    if not hasattr(function, "__qualname__"):
        named = type(function)
        attributes = _attributes(function)
    qualname = named.__qualname__
    if "<" in qualname:
        remedy = "workers import the function by name: define it with `def` at module level; a "
        remedy += "decorator that returns another function needs functools.wraps"
        raise ConfigError("task function", qualname, remedy)
    if inspect.ismethod(function) and not inspect.isclass(function.__self__):
        remedy = "give the object itself, with a method __call__, or a function"
        raise ConfigError("task function", qualname, remedy)
    script, module = _source(named)
    is_main = False
    if kind == "hydra":
        script = script or _guarded_script()
        is_main = script is not None or function.__module__ == "__main__"
    if is_main:
        _report_left_out(function)
    return Entry(
        kind=kind, qualname=qualname, script=script, module=module, args=list(args),
        attributes=attributes, cwd=str(Path.cwd()), sys_path=search_path(), main_block=is_main,
    )  # fmt: skip


def _attributes(called: object) -> dict[str, Any]:
    """Return the attributes of an object, encoded, if they are all that it is made of."""
    kind: Any = type(called)
    try:
        made: tuple[Any, ...] = called.__reduce_ex__(2)  # type: ignore[assignment]
        is_plain = made[:2] == (copyreg.__newobj__, (kind,)) and isinstance(made[2], dict | None)  # type: ignore[attr-defined]
    except TypeError:
        is_plain = False
    if not is_plain or kind.__getstate__ is not object.__getstate__:
        remedy = "it has a state beside its attributes: give a function that makes the object"
        raise ConfigError("task function", kind.__qualname__, remedy)
    values = (made[2] or {}).items()
    return {name: arguments.encode(value, f"{kind.__name__}.{name}") for name, value in values}


def _guarded_script() -> str | None:
    """Return the script that called a function of a module, if workers can import it as well.

    It may have registered what the config needs. A program that an installer made does not count.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None or not str(file).endswith(".py"):
        return None
    try:
        _require_guard()
    except ConfigError:
        return None
    return str(Path(str(file)).absolute())


def _report_left_out(function: Callable[..., Any]) -> None:
    """Report statements that run before the function here, and do not run in workers."""
    main = sys.modules["__main__"]
    file = str(getattr(main, "__file__", ""))
    try:
        names = main_block.names_of(function, vars(main))
        _, left_out = main_block.split_block(Path(file).read_bytes(), names)
    except (OSError, SyntaxError, ValueError):  # changed meanwhile
        return
    if left_out:
        lines = f"{left_out[0].lineno}-{left_out[-1].end_lineno}"
        remedy = 'move them under `if __name__ == "__main__":`, or into the function'
        _log.warning("%s: lines %s do not run in workers; %s", file, lines, remedy)


def command_line() -> list[str]:
    """Return the arguments of this process, as they were before the script changed sys.argv."""
    main, words = sys.modules["__main__"], sys.orig_argv
    spec, file = getattr(main, "__spec__", None), str(getattr(main, "__file__", ""))
    for at, word in enumerate(words):
        if spec is None and word.endswith(".py") and Path(word).resolve() == Path(file).resolve():
            return words[at + 1 :]
        if spec and word == "-m" and spec.name in (words[at + 1], f"{words[at + 1]}.__main__"):
            return words[at + 2 :]
    return sys.argv[1:]


def _source(function: Callable[..., Any]) -> tuple[str | None, str | None]:
    """Return (script, module) of the function; one of the two is None."""
    name = function.__module__
    if name == main_block.AS_IMPORTED and name in sys.modules:  # a child of multiprocessing submits
        return str(Path(str(sys.modules[name].__file__)).absolute()), None
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
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if file is None:
        remedy = "it was typed into an interpreter or a notebook: put it into a .py file"
        raise ConfigError("task function", function.__qualname__, remedy)
    is_missing = False
    with suppress(OSError, SyntaxError, ValueError):  # changed meanwhile
        is_missing = main_block.is_in_block(Path(file).read_bytes(), function.__qualname__)
    if is_missing:
        remedy = 'workers do not run `if __name__ == "__main__":`: define it above that'
        raise ConfigError("task function", function.__qualname__, remedy)
    return (str(Path(file).absolute()), None) if spec is None else (None, spec.name)


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


def search_path(*, of_main: bool = True) -> list[str]:
    """Return the entries of sys.path that a worker's interpreter does not have by default.

    An empty entry stands for those that it has. ``of_main`` adds the folder of this program's main
    module.
    """
    paths = sysconfig.get_paths()
    own = {paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]}
    own |= {*site.getsitepackages(), site.getusersitepackages()}
    own |= {str(Path(p) / "lib-dynload") for p in (paths["stdlib"], paths["platstdlib"])}
    given = sys.path if of_main or sys.flags.safe_path else sys.path[1:]
    entries = [os.path.abspath(p) for p in given]  # noqa: PTH100 - '' is the working directory
    marked = ["" if p in own else p for p in entries if not p.endswith(".zip")]
    return list(dict.fromkeys(p for p in marked if not p or Path(p).is_dir()))


def source_folder(entry: Entry) -> Path:
    """Return a folder of the user's code.

    It is that of the script, or of the module: a console script may be called from anywhere. The
    code of an installed module, and of a command, is the working directory.
    """
    if entry.script:
        return Path(entry.script).resolve().parent
    spec = importlib.util.find_spec(entry.module) if entry.module else None
    file = Path((spec and spec.origin) or "")
    is_own = _ROOT in file.parents or not file.is_absolute()
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(file.parts)
    return Path(entry.cwd) if is_own or is_installed else file.parent


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
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def take_snapshot(entries: Sequence[Entry], submission: Path) -> list[Entry]:
    """Copy the checkout of the first entry to ``code``, and return the entries in the copy.

    Later submissions of the same sweep run from it: others of its runs use it. Raises
    SubmissionError if the code is in no git checkout, or could not be copied.
    """
    top = Path(_git(source_folder(entries[0]), "rev-parse", "--show-toplevel").removesuffix("\n"))
    editable = [path for path in _editable_folders(top) if path not in entries[0].sys_path]
    code = submission / "code"
    is_used = code.is_dir() and bool(Submission(submission).job_ids())
    try:
        for name in () if is_used else own_files(_listed(top)):
            make_folder((code / name).parent, parents=True)
            shutil.copy2(top / name, code / name, follow_symlinks=False)
    except OSError as e:
        raise SubmissionError(f"launcher.code_snapshot: cannot copy {top} to {code}: {e}") from e
    found = (replace(entry, sys_path=[*entry.sys_path, *editable]) for entry in entries)
    return [remap(entry, top, code) for entry in found]


def _editable_folders(top: Path) -> list[str]:
    """Return the folders of the packages in a checkout that editable installs import.

    setuptools imports them by a finder, so they are not in sys.path. Raises SubmissionError if a
    package's folder has another name than the package, so that no path has it.
    """
    found: dict[str, None] = {}
    for distribution in distributions():
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if not origin.get("dir_info", {}).get("editable"):
            continue
        for name in (distribution.read_text("top_level.txt") or "").split():
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                continue
            for place in map(Path, spec.submodule_search_locations or [spec.origin]):
                place = place.resolve()
                if place.is_relative_to(top) and place.stem != name:
                    why = f"the editable install imports {name} from {place}"
                    remedy = f"give the folder the name {name}, or leave the setting off"
                    raise SubmissionError(f"launcher.code_snapshot: {why}: {remedy}")
                if place.is_relative_to(top):
                    found[str(place.parent)] = None
    return list(found)


def link_snapshot(run: Path, submission: Path) -> None:
    """Give a run directory its link ``code`` to the copy."""
    if not (link := run / "code").is_symlink():
        link.symlink_to(submission / "code", target_is_directory=True)


def own_files(listed: Iterable[str]) -> list[str]:
    """Return the files that are no output of sweeps: a copy would contain itself (pure)."""
    paths = [PurePosixPath(name) for name in listed]
    sweeps = {p.parent for path in paths for p in path.parents if p.name == SUBMISSION}
    return [str(path) for path in paths if sweeps.isdisjoint(path.parents)]


def remap(entry: Entry, top: Path, code: Path) -> Entry:
    """Return the entry with paths below ``top``, which git names without links, in ``code``."""

    def moved(path: str) -> str:
        resolved = Path(path).resolve()
        return str(code / resolved.relative_to(top)) if resolved.is_relative_to(top) else path

    paths = [path and moved(path) for path in entry.sys_path]
    copied = [path for path in paths if Path(path).is_relative_to(code)]
    script = entry.script
    if script is not None:  # a link in the checkout is one in the copy
        beside = Path(moved(str(Path(script).parent)), Path(script).name)
        script = str(beside) if code in beside.parents else moved(script)
    first = list(dict.fromkeys([*copied, *paths]))  # the copy before what site.py adds
    return replace(entry, script=script, cwd=moved(entry.cwd), sys_path=first)


def _listed(top: Path) -> list[str]:
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
    try:
        done = _util.run(argv, timeout_s=60.0, errors="surrogateescape")
    except (OSError, subprocess.TimeoutExpired) as e:
        raise SubmissionError(f"launcher.code_snapshot needs git: {e}") from e
    if done.returncode != 0:
        why = f"{done.stderr.strip()}. `git init` there, or leave the setting off"
        raise SubmissionError(f"launcher.code_snapshot copies a git checkout; {folder}: {why}")
    return done.stdout
