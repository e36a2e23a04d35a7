"""A worker that runs a command, as torchrun would: the entry of ``hpc-elastic run``.

A Python command of the same interpreter runs in the worker's own process. So the optimizer's steps
are counted, a hang shows the script's stacks, and an error is reported with its traceback. Any
other command is a child process.
"""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_elastic.errors import HpcElasticError


def run_command(*argv: str) -> None:
    """Run a command in this worker; return once it has succeeded.

    Raises:
        HpcElasticError: It ended with an exit code that is not 0, or by a signal, or was not found.
        BaseException: What a Python script raised.
    """
    inside = _in_process(argv)
    if inside is not None:
        _run_python(inside)
        return
    shown = shlex.join(argv)
    try:
        code = subprocess.call(argv)
    except OSError as e:
        raise HpcElasticError(f"cannot run `{shown}`: {e.strerror or e}") from None
    if code:
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        raise HpcElasticError(f"`{shown}` ended {how}; its output is in this worker's log")


def script_of(argv: Sequence[str]) -> Path | None:
    """Return the Python script that a command runs; None if it is another command."""
    inside = _in_process(argv)
    return Path(inside[0]) if inside is not None and inside[0] != "-m" else None


def _in_process(argv: Sequence[str]) -> Sequence[str] | None:
    """Return what follows the interpreter in a command that may run in this process."""
    name, *rest = argv
    path = shutil.which(name)
    if path is None or os.path.realpath(path) != os.path.realpath(sys.executable):
        return None
    if rest[:1] == ["-u"]:  # a worker's output is unbuffered anyway
        del rest[0]
    is_module = rest[:1] == ["-m"] and len(rest) > 1
    is_script = bool(rest) and not rest[0].startswith("-")
    return rest if is_module or is_script else None


def _run_python(rest: Sequence[str]) -> None:
    """Run ``python rest...`` here; an exit with code 0 is its success."""
    try:
        if rest[0] == "-m":
            sys.argv[:] = list(rest[1:])
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = list(rest)
            sys.path.insert(0, str(Path(rest[0]).resolve().parent))
            runpy.run_path(rest[0], run_name="__main__")
    except SystemExit as e:
        if e.code not in (None, 0):
            raise
