"""A worker that runs a command, as torchrun would: the entry of ``hpc-elastic run``.

A Python command of the same interpreter runs in the worker's own process. So the optimizer's steps
are counted, a hang shows the script's stacks, and an error is reported with its traceback. Any
other command is a child process.
"""

from __future__ import annotations

import os
import pkgutil
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from hpc_elastic.agent.signals import do_nothing, name_of
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.worker import script_loops
from hpc_elastic.worker.own_checkpoints import KEY, OwnCheckpoints


class FailedCommandError(HpcElasticError):
    """A command has failed, or was not found; it would fail again if ``is_certain``."""

    def __init__(self, text: str, *, is_certain: bool) -> None:
        super().__init__(text)
        self.is_certain = is_certain


_CERTAIN_CODES = (2, 126, 127)
"""Exit codes for wrong arguments, and of shells for commands that cannot be run or found."""


own_checkpoints = OwnCheckpoints()
"""Of this worker; outside of a run it does nothing."""


def run_command(*argv: str) -> None:
    """Run a command in this worker; return once it has succeeded.

    Raises SystemExit if it has ended with exit code 0, perhaps at a preemption (the agent decides);
    FailedCommandError if it has failed, or was not found; and what a Python script raised.
    """
    inside = _in_process(argv)
    if inside is not None:
        sys.path[:] = dict.fromkeys([*search_folders(argv), *sys.path])
        _run_python(own_checkpoints.continued(inside))
        return
    shown = shlex.join(argv)
    if own_checkpoints.given:
        remedy = "needs a command that runs in the worker itself: python SCRIPT, or -m MODULE"
        raise FailedCommandError(f"{KEY} {remedy}; this is `{shown}`", is_certain=True)
    try:
        code = subprocess.call(argv)
    except OSError as e:
        is_certain = isinstance(e, FileNotFoundError | PermissionError | NotADirectoryError)
        text = f"cannot run `{shown}`: {e.strerror or e}"
        raise FailedCommandError(text, is_certain=is_certain) from None
    if code:
        how = f"by {name_of(-code)}" if code < 0 else f"with exit code {code}"
        text = f"`{shown}` ended {how}; its output is in this worker's log"
        raise FailedCommandError(text, is_certain=code in _CERTAIN_CODES)
    sys.exit(0)


def script_of(argv: Sequence[str]) -> Path | None:
    """Return the Python script that a command runs; None if it is another command."""
    is_python = re.fullmatch(r"python[\d.]*", Path(argv[0]).name)
    inside = _script_or_module(argv) if is_python else _in_process(argv)
    return Path(inside[0]) if inside is not None and inside[0] != "-m" else None


def _in_process(argv: Sequence[str]) -> Sequence[str] | None:
    """Return what follows the interpreter in a command that may run in this process."""
    path = shutil.which(argv[0])
    is_own = path is not None and _interpreter(path) == _interpreter(sys.executable)
    return _script_or_module(argv) if is_own else None


def _interpreter(path: str) -> tuple[str, str | None]:
    """Return the file of an interpreter, and its virtual environment; None outside of one.

    Environments of one interpreter have links to the same file. The environment is found as Python
    finds it: by pyvenv.cfg beside the link, or above it.
    """
    folder = Path(path).absolute().parent
    found = next((f for f in (folder, folder.parent) if (f / "pyvenv.cfg").is_file()), None)
    return os.path.realpath(path), None if found is None else os.path.realpath(found)


def _script_or_module(argv: Sequence[str]) -> Sequence[str] | None:
    """Return what follows an interpreter; None if it is neither a script nor ``-m`` a module."""
    rest = list(argv[1:])
    if rest[:1] == ["-u"]:  # a worker's output is unbuffered anyway
        del rest[0]
    is_module = rest[:1] == ["-m"] and len(rest) > 1
    is_script = bool(rest) and not rest[0].startswith("-")
    return rest if is_module or is_script else None


def search_folders(argv: Sequence[str]) -> list[str]:
    """Return what Python puts first on sys.path for a command that runs in the worker's process."""
    inside = _in_process(argv)
    if inside is None or os.environ.get("PYTHONSAFEPATH"):
        return []
    return [str(Path.cwd() if inside[0] == "-m" else Path(inside[0]).resolve().parent)]


def _run_python(rest: Sequence[str]) -> None:
    """Run ``python rest...`` here; an exit with code 0 is its success.

    The agent decides if the script handles SIGTERM: it may exit so at a preemption.
    """
    try:
        if rest[0] == "-m":
            sys.argv[:] = list(rest[1:])
            runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
            return
        sys.argv[:] = list(rest)
        path = Path(rest[0]).absolute()  # as Python has it: a script may change the folder
        if pkgutil.get_importer(str(path)) is None:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            main.__file__ = str(path)
            tree = script_loops.prepare(path.read_bytes(), str(path), vars(main))
            exec(compile(tree, str(path), "exec", dont_inherit=True), vars(main))
        else:  # a folder or an archive
            runpy.run_path(rest[0], run_name="__main__")
    except SystemExit as e:
        if e.code not in (None, 0) or signal.getsignal(signal.SIGTERM) is not do_nothing:
            raise
