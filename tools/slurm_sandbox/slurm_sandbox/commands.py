"""Running a command and waiting for a condition, both bounded, both with errors that say what."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .errors import CommandError, SandboxTimeoutError

Completed = subprocess.CompletedProcess[str]
_POLL_S = 0.05
_TAIL_LINES = 12
TREE_MARK = "hpc-elastic-slurm"
"""A file that every unpacked release of Slurm has beside its ``bin``."""


def search_path(env: Mapping[str, str]) -> str:
    """Return PATH with the folders of daemons' programs, which a shell by sudo may lack."""
    return f"{env.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"


def machine_path(env: Mapping[str, str]) -> str:
    """Return `search_path` without the programs of unpacked releases of Slurm."""
    folders = dict.fromkeys(search_path(env).split(":"))
    return ":".join(folder for folder in folders if not Path(folder, "..", TREE_MARK).exists())


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    check: bool = True,
    timeout_s: float = 60.0,
) -> Completed:
    """Run a command to its end and return what it wrote.

    Raises:
        CommandError: It failed and `check` is set.
        SandboxTimeoutError: It did not end in time (and was killed).
    """
    environment = os.environ if env is None else env
    try:
        done = subprocess.run(
            argv,
            env={**environment, "PATH": search_path(environment)},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SandboxTimeoutError(f"end of `{' '.join(argv)}`", timeout_s) from error
    if check and done.returncode:
        raise CommandError(argv, done.returncode, done.stderr)
    return done


def wait_until(
    what: str | Callable[[], str],
    condition: Callable[[], bool],
    timeout_s: float,
    *,
    log: Path | None = None,
) -> None:
    """Wait until the condition holds.

    Args:
        what: What is waited for, in words that fit after "not within 10 s:"; a function is asked
            when time is up, and can name what is missing then.
        condition: Asked over and over; what it raises ends the wait.
        timeout_s: Seconds to wait at most.
        log: The log whose end belongs into the error.

    Raises:
        SandboxTimeoutError: It did not hold in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            text = what if isinstance(what, str) else what()
            raise SandboxTimeoutError(text, timeout_s, tail(log) if log else "")
        time.sleep(_POLL_S)


def tail(log: Path) -> str:
    """Return the last lines of a log, headed by its path."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError as error:
        return f"({log}: {error.strerror})"
    return "\n".join([f"--- end of {log}:", *lines])
