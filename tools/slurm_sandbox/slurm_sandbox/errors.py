"""What can go wrong with a sandbox.

::

    SandboxError(RuntimeError)         anything below; its text says what to do
    +-- MissingPackagesError           programs are missing; names packages and command
    +-- NotUpError                     the named sandbox is not up
    +-- SandboxTimeoutError            a bounded wait ended; also a TimeoutError
    +-- CommandError                   a command failed; keeps argv, exit code and stderr
    +-- ReleaseError                   a release of Slurm can not be had here; says why

The package imports nothing from the rest of hpc_elastic, so the hierarchy is its own.
"""

from __future__ import annotations

from collections.abc import Sequence


class SandboxError(RuntimeError):
    """Base of all that the sandbox raises."""


class NotUpError(SandboxError):
    """The sandbox is not up: call ``up`` first."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"the Slurm sandbox {name!r} is not up; start it with: "
            f"scripts/slurm_sandbox.py up --name {name}"
        )


class MissingPackagesError(SandboxError):
    """Programs that the sandbox runs are not installed.

    Attributes:
        packages: Debian packages that hold them.
        command: The command that installs them, ready to paste.
    """

    def __init__(self, packages: Sequence[str], command: Sequence[str]) -> None:
        self.packages = tuple(packages)
        self.command = tuple(command)
        super().__init__(
            f"missing packages: {', '.join(packages)}\n"
            f"install them with: {' '.join(command)}\n"
            "or let `scripts/slurm_sandbox.py up --install` do it"
        )


class SandboxTimeoutError(SandboxError, TimeoutError):
    """Something did not happen in time; the text names it and ends with the daemon's log."""

    def __init__(self, what: str, timeout_s: float, log_tail: str = "") -> None:
        self.what = what
        self.timeout_s = timeout_s
        tail = f"\n{log_tail}" if log_tail else ""
        super().__init__(f"not within {timeout_s:g} s: {what}{tail}")


class CommandError(SandboxError):
    """A command that the sandbox ran failed.

    Attributes:
        argv: The command.
        exit_code: Its exit code.
        stderr: What it wrote to standard error.
    """

    def __init__(self, argv: Sequence[str], exit_code: int, stderr: str) -> None:
        self.argv = tuple(argv)
        self.exit_code = exit_code
        self.stderr = stderr
        super().__init__(f"{' '.join(argv)}: exit code {exit_code}: {stderr.strip()}")


class ReleaseError(SandboxError):
    """A release of Slurm that was asked for can not be had on this machine.

    Attributes:
        release: What was asked for, such as ``24.11``.
    """

    def __init__(self, release: str, why: str) -> None:
        self.release = release
        super().__init__(
            f"slurm={release!r} can not be had here: {why} (leave --slurm out for the Slurm that "
            "is installed)"
        )
