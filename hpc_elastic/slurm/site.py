"""Asks Slurm of the cluster as a whole: for the doctor, on the login node and on others."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.command import answer
from hpc_elastic.slurm.outputs import (
    NODES_FORMAT,
    Partition,
    is_ended,
    parse_config,
    parse_controllers,
    parse_node_states,
    parse_partitions,
    parse_start,
    parse_version,
)

_SECONDS = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)


class SiteClient(SlurmClient):
    """Asks Slurm of the cluster. Every method raises `SlurmCommandError`, as `SlurmClient`."""

    def config(self) -> dict[str, str]:
        """Return the cluster's settings by name, as in slurm.conf."""
        return parse_config(self._run(["scontrol", "show", "config"]))

    def version(self, command: str) -> str:
        """Return the version that one of Slurm's commands tells, such as ``22.05.8``."""
        return parse_version(self._run([command, "--version"]))

    def ping(self) -> str:
        """Return which controllers answer, in scontrol's words."""
        return parse_controllers(self._run(["scontrol", "ping"]))

    def all_partitions(self) -> list[Partition]:
        """Return the partitions, those hidden from the user included."""
        return parse_partitions(self._run(["scontrol", "-a", "-o", "show", "partition"]))

    def node_states(self, partition: str | None = None) -> dict[str, int]:
        """Return how many nodes are in which state, such as ``idle``; by default of all.

        Args:
            partition: Name of a partition, or several with commas.
        """
        where = ["-p", partition] if partition else ["-a"]
        return parse_node_states(self._run(["sinfo", "-h", *where, "-o", NODES_FORMAT]))

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
        return parse_start(errors.strip() or output)

    def signal(self, task: str, name: str) -> None:
        """Send a signal to every process of a task's steps.

        Args:
            task: As for `cancel`.
            name: Such as ``USR2``.
        """
        self._run(["scancel", f"--signal={name}", task])

    def kill(self, tasks: Sequence[str]) -> None:
        """Send SIGKILL to every process of some tasks, their batch scripts included.

        Tasks that have ended are passed over.
        """
        try:
            self._run(["scancel", "--full", "--signal=KILL", *tasks])
        except SlurmCommandError as e:
            if not is_ended(e):
                raise


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
