"""What can go wrong with a fake Slurm, on either side of its socket."""

from __future__ import annotations


class FakeSlurmError(RuntimeError):
    """The fake Slurm does not run, does not answer, or never came to what was waited for."""


class FakeCommandError(FakeSlurmError):
    """A command on the fake Slurm failed.

    Attributes:
        argv: The command line.
        exit_code: Its exit code.
        stderr: What it wrote.
    """

    def __init__(self, argv: list[str], exit_code: int, stderr: str) -> None:
        self.argv, self.exit_code, self.stderr = argv, exit_code, stderr
        super().__init__(f"{' '.join(argv)}: exit code {exit_code}: {stderr.strip()}")


class Refusal(Exception):  # noqa: N818 (an answer of the command, no error of the program)
    """A command can not do what it was asked; raised inside the controller only.

    Attributes:
        stderr: What the command writes, its own name left out.
        exit_code: Its exit code.
    """

    def __init__(self, stderr: str, exit_code: int = 1) -> None:
        self.stderr, self.exit_code = stderr, exit_code
        super().__init__(stderr)


def unknown(what: str) -> Refusal:
    """Return the refusal of something that Slurm may know and the fake does not."""
    return Refusal(f"FakeSlurm does not know {what}")
