"""One call of a command that may hang: a dead controller, a GPU's driver, NFS, a wrapper script."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Literal

_REAP_S = 1.0


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    errors: Literal["replace", "surrogateescape"] = "replace",
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, or give it up.

    `subprocess.run` waits for good for one that it has killed and the kernel holds on to. The
    command has a process group of its own, which is killed as a whole: where it is a shell script,
    killing the shell alone would leave its child behind.

    Args:
        argv: The command line.
        timeout_s: How long it may take; the call lasts `_REAP_S` longer at most.
        env: Its environment; None: this process's.
        errors: What becomes of bytes that are no UTF-8; to name files, ``surrogateescape``.

    Returns:
        Its exit code, and what it has written.

    Raises:
        OSError: it can not be started.
        subprocess.TimeoutExpired: it has not answered in time.
    """
    process = subprocess.Popen(
        argv, env=env, text=True, errors=errors, process_group=0,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        output, error_output = process.communicate(timeout=timeout_s)
    finally:
        if process.returncode is None:
            _give_up(process)
    return subprocess.CompletedProcess(argv, process.returncode, output, error_output)


def _give_up(process: subprocess.Popen[str]) -> None:
    """End a command and all it started, and reap it, unless the kernel holds on to it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_S)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
