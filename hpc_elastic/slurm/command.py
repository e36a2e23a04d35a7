"""One call of a command of Slurm's, which may hang: a dead controller, a wrapper script, NFS."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence

from hpc_elastic.errors import SlurmCommandError

_REAP_S = 1.0
_IGNORED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm sends what it sends to every process of a step, hence to the very command by which an agent
asks what its signal means."""
_NAMES = " ".join(number.name.removeprefix("SIG") for number in _IGNORED)
_DEAF = ["/bin/sh", "-c", f'trap "" {_NAMES}; exec "$@"', "sh"]
"""Runs a command that ignores them."""
_TRIES = 3


def call(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> str:
    """Return what a command prints.

    It runs in a process group of its own, which is killed as a whole if it does not answer: where
    `squeue` is a site's shell script, killing the shell alone would leave its child behind.

    Args:
        argv: The command line.
        env: Its environment, PATH included.
        timeout_s: How long it may take.

    Raises:
        SlurmCommandError: it is not installed, failed, or did not answer in time.
    """
    return answer(argv, env=env, timeout_s=timeout_s)[0]


def answer(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> tuple[str, str]:
    """Return what a command prints, and what it writes to standard error; as `call` otherwise."""
    for _ in range(_TRIES):
        code, output, errors = _run(argv, env, timeout_s)
        if -code not in _IGNORED:
            break  # else the shell was hit before it ignored that: the command has not begun
    if code != 0:
        raise SlurmCommandError(argv, code, errors.strip() or output)
    return output, errors


def _run(argv: Sequence[str], env: Mapping[str, str], timeout_s: float) -> tuple[int, str, str]:
    """Return a command's exit code, and what it has written."""
    process = _start(argv, env)
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as e:
        raise SlurmCommandError(argv, None, f"no answer within {timeout_s:g} s") from e
    finally:
        if process.returncode is None:
            _kill(process)
    return process.returncode, output, errors


def _start(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    try:
        if shutil.which(argv[0], path=env.get("PATH", os.defpath)) is None:
            raise FileNotFoundError(errno.ENOENT, "not found")
        return subprocess.Popen(
            [*_DEAF, *argv], env=env, text=True, errors="replace", process_group=0,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    except OSError as e:
        why = f"{e.strerror or e}; is Slurm installed here, and on PATH?"
        raise SlurmCommandError(argv, None, why) from e


def _kill(process: subprocess.Popen[str]) -> None:
    """End a command and all it started, and reap it, unless the kernel holds on to it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel, waiting for NFS
        process.wait(_REAP_S)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
