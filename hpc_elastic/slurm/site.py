"""What Slurm says of the cluster as a whole: for the doctor, on the login node and on others.

Only formats that have been the same from Slurm 20 to 26 are read: ``scontrol show config``,
``scontrol -o show partition``, and sinfo's own format strings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.command import answer
from hpc_elastic.slurm.outputs import parse_config, parse_rows, parse_time_left

_SECONDS = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_JOB = re.compile(r"\A(sbatch: )?(Job \d+ )?")
_STATES_FORMAT = "%D|%T"


@dataclass(frozen=True)
class Partition:
    """A partition, as scontrol shows it.

    Attributes:
        name: Its name.
        state: ``UP``, ``DOWN``, ``DRAIN`` or ``INACTIVE``.
        is_default: Whether jobs that name none come here.
        max_time_s: Longest wall time of a job; None without a limit.
        grace_s: Seconds between a preemption's SIGTERM and the end.
        preempt_mode: ``OFF``, ``REQUEUE``, ``CANCEL``, ``SUSPEND``, or several with commas.
        num_nodes: How many nodes it has.
        max_nodes: The most nodes of one job; None without a limit.
    """

    name: str
    state: str = "UP"
    is_default: bool = False
    max_time_s: float | None = None
    grace_s: int = 0
    preempt_mode: str = "OFF"
    num_nodes: int = 0
    max_nodes: int | None = None


class SiteClient(SlurmClient):
    """Asks Slurm of the cluster. Every method raises `SlurmCommandError`, as `SlurmClient`."""

    def config(self) -> dict[str, str]:
        """Return the cluster's settings by name, as in slurm.conf."""
        return parse_config(self._run(["scontrol", "show", "config"]))

    def version(self, command: str) -> str:
        """Return the version that one of Slurm's commands tells, such as ``22.05.8``."""
        output = self._run([command, "--version"]).strip()
        return output.rpartition(" ")[2]

    def ping(self) -> str:
        """Return which controllers answer, in scontrol's words."""
        return " ".join(self._run(["scontrol", "ping"]).split())

    def all_partitions(self) -> list[Partition]:
        """Return the partitions, those hidden from the user included."""
        return parse_partitions(self._run(["scontrol", "-a", "-o", "show", "partition"]))

    def node_states(self, partition: str | None = None) -> dict[str, int]:
        """Return how many nodes are in which state, such as ``idle``; by default of all.

        Args:
            partition: Name of a partition, or several with commas.
        """
        where = ["-p", partition] if partition else ["-a"]
        return parse_node_states(self._run(["sinfo", "-h", *where, "-o", _STATES_FORMAT]))

    def accounting_answers(self) -> None:
        """Ask sacct for nothing; it fails where there is no accounting."""
        self._run(["sacct", "-n", "-X", "-S", "now", "-o", "JobID"])

    def test_only(self, script: str) -> str:
        """Let sbatch validate a script, and return when it would start, in sbatch's words.

        Raises:
            SlurmCommandError: sbatch would refuse it; its standard error says why.
        """
        argv = ["sbatch", "--test-only", script]
        output, errors = answer(argv, env=self._outside(), timeout_s=self.timeout_s)
        return _JOB.sub("", errors.strip() or output.strip())

    def signal(self, task: str, name: str) -> None:
        """Send a signal to every process of a task's steps.

        Args:
            task: As for `cancel`.
            name: Such as ``USR2``.
        """
        self._run(["scancel", f"--signal={name}", task])

    def kill(self, tasks: Sequence[str]) -> None:
        """Send SIGKILL to every process of some tasks, their batch scripts included."""
        self._run(["scancel", "--full", "--signal=KILL", *tasks])


def reachable(client: SlurmClient, task: str) -> dict[str, str | None]:
    """Ask squeue and scontrol, from wherever this runs, and return what is wrong with each.

    Args:
        client: How to reach Slurm.
        task: A task of the user's.

    Returns:
        By the command's name; None: it answers.
    """
    site = SiteClient(client.timeout_s)
    problems: dict[str, str | None] = {}
    for command, ask in (("squeue", lambda: client.tasks([task])), ("scontrol", site.config)):
        try:
            ask()
            problems[command] = None
        except SlurmCommandError as e:
            problems[command] = e.stderr.strip()[:300]
    return problems


def parse_partitions(output: str) -> list[Partition]:
    """Return the partitions in what ``scontrol -o show partition`` printed (pure)."""
    return [_partition(row) for row in parse_rows(output) if "PartitionName" in row]


def _partition(row: dict[str, str]) -> Partition:
    return Partition(
        name=row["PartitionName"],
        state=row.get("State", "UP"),
        is_default=row.get("Default") == "YES",
        max_time_s=parse_time_left(row.get("MaxTime", "")),
        grace_s=_number(row.get("GraceTime")) or 0,
        preempt_mode=row.get("PreemptMode", "OFF"),
        num_nodes=_number(row.get("TotalNodes")) or 0,
        max_nodes=_number(row.get("MaxNodes")),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def parse_node_states(output: str) -> dict[str, int]:
    """Return the number of nodes by state in what sinfo printed (pure).

    A mark behind the state, such as ``*`` for a node that does not answer, makes it another one;
    but for those that say how power is saved.
    """
    counts: dict[str, int] = {}
    for line in output.splitlines():
        number, _, state = line.strip().partition("|")
        if number.isdecimal():
            name = state.strip().rstrip("~#%+@!^-")
            counts[name] = counts.get(name, 0) + int(number)
    return counts


def time_limit_s(text: str) -> float | None:
    """Return the seconds of a wall time as sbatch takes it (pure); None for UNLIMITED.

    Minutes, ``MM:SS``, ``HH:MM:SS``, ``D-HH``, ``D-HH:MM`` or ``D-HH:MM:SS``.
    """
    m = _SECONDS.fullmatch(text.strip())
    if m is None:
        return None
    days, *rest = m.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return float(((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds)
    if len(parts) == 1:
        return parts[0] * 60.0
    hours, minutes, seconds = (0, *parts)[-3:]
    return float((hours * 60 + minutes) * 60 + seconds)
