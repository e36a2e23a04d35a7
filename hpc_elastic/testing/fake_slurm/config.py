"""What a fake cluster is like: its nodes, its partitions, and how long things take on it."""

from __future__ import annotations

from dataclasses import dataclass

MAX_NODES = 100


@dataclass(frozen=True)
class Partition:
    """One partition; all have all nodes.

    Attributes:
        name: Its name.
        tier: A job takes nodes from jobs of lower tiers.
        preempt_mode: What becomes of a job that is taken: ``REQUEUE``, ``CANCEL``, or ``OFF``: it
            can not be.
        is_default: Whether jobs that name none are in it.
    """

    name: str
    tier: int = 1
    preempt_mode: str = "REQUEUE"
    is_default: bool = False


@dataclass(frozen=True)
class FakeConfig:
    """What a fake cluster should be like; times are in seconds.

    Attributes:
        nodes: Number of nodes, 1 to 100: ``node1``, ``node2`` and so on.
        cpus_per_node: CPUs that each node claims, whatever the machine has.
        memory_mb: Memory that each node claims; a job that asks for more is refused.
        grace_s: Between a preemption's SIGTERM and its end (GraceTime).
        kill_wait_s: Between the SIGTERM of a job that is ended and SIGKILL (KillWait).
        requeue_hold_s: How long a requeued job has to wait unless it is told otherwise. Slurm's
            own time is 120 s.
        node_timeout_s: How long a node may be dead before the controller says so.
        max_array_size: The largest index of an array is one less.
        min_job_age_s: How long a job that has ended is remembered.
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
    def partitions(self) -> tuple[Partition, ...]:
        """The partitions: ``low`` is preempted by ``high`` and requeued, ``cancel`` is not."""
        return (
            Partition("low", is_default=True),
            Partition("cancel", preempt_mode="CANCEL"),
            Partition("high", tier=10, preempt_mode="OFF"),
        )

    def partition(self, name: str) -> Partition:
        """Return a partition by its name, which must exist."""
        return next(p for p in self.partitions if p.name == name)

    def node_name(self, node: str | int) -> str:
        """Return the name of a node given as ``2``, ``"2"`` or ``"node2"``.

        Raises:
            ValueError: there is no such node.
        """
        text = str(node)
        name = f"node{text}" if text.isdecimal() else text
        if name not in self.node_names:
            raise ValueError(f"no node {text!r}: there are node1 to node{self.nodes}")
        return name


# ---- What can go wrong with a fake Slurm, on either side of its socket


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
