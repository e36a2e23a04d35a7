"""Settings and errors of a fake cluster, and what a command is given and prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

SOCKET = "controller"
"""The controller's socket in the cluster's directory."""
CONFIG = "config.json"
"""The controller's settings in the cluster's directory."""
COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo", "sacct", "srun")
MAX_NODES = 100


@dataclass(frozen=True)
class FakePartition:
    """One partition; every partition has all nodes.

    Attributes:
        tier: A job preempts jobs of lower tiers.
        preempt_mode: Fate of a preempted job: ``REQUEUE``, ``CANCEL``, or ``OFF`` if its jobs
            cannot be preempted.
        is_default: Whether it is the partition of jobs that name none.
    """

    name: str
    tier: int = 1
    preempt_mode: str = "REQUEUE"
    is_default: bool = False


@dataclass(frozen=True)
class FakeConfig:
    """Settings of a fake cluster; times are in seconds.

    Attributes:
        nodes: Number of nodes, 1 to 100: ``node1``, ``node2`` and so on.
        cpus_per_node: CPUs that each node claims, whatever the machine has.
        memory_mb: Memory that each node claims; a job that asks for more is refused.
        grace_s: Between a preemption's SIGTERM and the end of the job (GraceTime).
        kill_wait_s: Between the SIGTERM of a job that is ended and SIGKILL (KillWait).
        requeue_hold_s: How long a requeued job is held unless it has a start time. Slurm's own
            time is 120 s.
        node_timeout_s: Time until the controller marks a dead node down.
        max_array_size: The largest index of an array is one less.
        min_job_age_s: How long a job is remembered after its end.
    """

    nodes: int = 4
    cpus_per_node: int = 4
    memory_mb: int = 65536
    grace_s: float = 5.0
    kill_wait_s: float = 5.0
    requeue_hold_s: float = 3.0
    node_timeout_s: float = 2.0
    max_array_size: int = 1001
    min_job_age_s: float = 300.0

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise ValueError(f"nodes={self.nodes!r}: must be 1 to {MAX_NODES}")
        if self.cpus_per_node < 1:
            raise ValueError(f"cpus_per_node={self.cpus_per_node!r}: must be at least 1")
        for name in ("grace_s", "kill_wait_s", "requeue_hold_s", "node_timeout_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: must not be negative")

    @property
    def node_names(self) -> tuple[str, ...]:
        """The nodes' names, ``node1`` first."""
        return tuple(f"node{number}" for number in range(1, self.nodes + 1))

    @property
    def partitions(self) -> tuple[FakePartition, ...]:
        """The partitions: ``high`` preempts ``low``, whose jobs are requeued, and ``cancel``."""
        return (
            FakePartition("low", is_default=True),
            FakePartition("cancel", preempt_mode="CANCEL"),
            FakePartition("high", tier=10, preempt_mode="OFF"),
        )

    def partition(self, name: str) -> FakePartition:
        """Return a partition by its name, which must exist."""
        return next(p for p in self.partitions if p.name == name)

    def node_name(self, node: str | int) -> str:
        """Return the name of a node given as ``2``, ``"2"`` or ``"node2"``.

        Raises:
            ValueError: There is no such node.
        """
        text = str(node)
        name = f"node{text}" if text.isdecimal() else text
        if name not in self.node_names:
            raise ValueError(f"no node {text!r}: there are node1 to node{self.nodes}")
        return name


class FakeSlurmError(RuntimeError):
    """The fake Slurm does not run or answer, or a wait has timed out."""


class FakeCommandError(FakeSlurmError):
    """A command on the fake Slurm failed.

    Attributes:
        argv: The command line.
        exit_code: Its exit code.
        stderr: Its standard error.
    """

    def __init__(self, argv: list[str], exit_code: int, stderr: str) -> None:
        self.argv, self.exit_code, self.stderr = argv, exit_code, stderr
        super().__init__(f"{' '.join(argv)}: exit code {exit_code}: {stderr.strip()}")


class Refusal(Exception):  # noqa: N818 (a result of the command, not a defect)
    """A command refuses its arguments; raised inside the controller only.

    ``stderr`` is the command's message, without its name.
    """

    def __init__(self, stderr: str, exit_code: int = 1) -> None:
        self.stderr, self.exit_code = stderr, exit_code
        super().__init__(stderr)


def unknown(what: str) -> Refusal:
    """Return the refusal of something that the fake does not support."""
    return Refusal(f"FakeSlurm does not know {what}")


@dataclass(frozen=True)
class CommandCall:
    """One call of a command; ``now`` is when, ``stdin`` reads its standard input."""

    command: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    stdin: Callable[[], str]
    now: float


@dataclass(frozen=True)
class CommandOutput:
    """The output of a command, and its exit code."""

    stdout: str = ""
    stderr: str = ""
    code: int = 0


def refused(command: str, why: Refusal) -> CommandOutput:
    """Return the output of a command that refuses its arguments."""
    if why.stderr.startswith("FakeSlurm does not know"):
        code = 255 if command in ("sbatch", "srun") else 1
        return CommandOutput(stderr=f"{command}: {why.stderr}\n", code=code)
    prefix = f"{command}: error: " if command in ("sbatch", "srun", "scancel") else ""
    lines = [f"{prefix}{line}\n" for line in why.stderr.splitlines()]
    return CommandOutput(stderr="".join(lines), code=why.exit_code)
