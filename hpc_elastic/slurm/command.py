"""One call of a command of Slurm's."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence

from hpc_elastic import commands
from hpc_elastic.errors import SlurmCommandError

_IGNORED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm sends what it sends to every process of a step, hence to the very command by which an agent
asks what its signal means."""
_NAMES = " ".join(number.name.removeprefix("SIG") for number in _IGNORED)
_DEAF = ["/bin/sh", "-c", f'trap "" {_NAMES}; exec "$@"', "sh"]
"""Runs a command that ignores them."""
_TRIES = 3


def call(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> str:
    """Return what a command prints.

    One that does not answer is killed with all that it has started (`commands.run`).

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
        done = _run(argv, env, timeout_s)
        if -done.returncode not in _IGNORED:
            break  # else the shell was hit before it ignored that: the command has not begun
    if done.returncode != 0:
        raise SlurmCommandError(argv, done.returncode, done.stderr.strip() or done.stdout)
    return done.stdout, done.stderr


def _run(
    argv: Sequence[str], env: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    try:
        if shutil.which(argv[0], path=env.get("PATH", os.defpath)) is None:
            raise FileNotFoundError(errno.ENOENT, "not found")
        return commands.run([*_DEAF, *argv], env=env, timeout_s=timeout_s)
    except subprocess.TimeoutExpired as e:
        raise SlurmCommandError(argv, None, f"no answer within {timeout_s:g} s") from e
    except OSError as e:
        why = f"{e.strerror or e}; is Slurm installed here, and on PATH?"
        raise SlurmCommandError(argv, None, why) from e
