"""How long a task lives after SIGTERM, as it is frozen for each run (login node).

The agents could not ask: while a preemption's grace runs down there is no time, and all nodes of a
partition would ask at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from hpc_elastic.config import SlurmSettings
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.outputs import Preemption
from hpc_elastic.submit.plan import PlannedRun
from hpc_elastic.submit.refusals import require_nodes, time_note

LOCAL_S = 30.0


@dataclass(frozen=True)
class Grace:
    """Seconds between SIGTERM and SIGKILL.

    Attributes:
        preempted_s: When the task is preempted.
        ended_s: When it is cancelled, or out of time.
    """

    preempted_s: float = LOCAL_S
    ended_s: float = LOCAL_S


def graces(runs: Sequence[PlannedRun], client: SlurmClient | None = None) -> list[Grace]:
    """Return what the tasks of each run get, asking Slurm once for each partition.

    A Slurm that does not answer is taken to have its own defaults. With the answer it is seen
    whether the partition can hold the run at all.

    Args:
        runs: The runs of a plan.
        client: The caller of Slurm's commands.

    Raises:
        ConfigError: a partition has fewer nodes than a run's minimum.
    """

    @cache
    def ask(partition: str | None) -> Preemption:
        return (client or SlurmClient()).preemption(partition)

    notes: dict[str, None] = {}
    for run in runs:
        if isinstance(run.settings.launcher, SlurmSettings):
            partitions = ask(run.settings.launcher.partition).partitions
            require_nodes(run.settings, partitions)
            if note := time_note(run.settings.launcher, partitions):
                notes[note] = None
    for note in notes:
        print(note, file=sys.stderr)
    return [
        _of(run.settings.launcher.grace_s, ask(run.settings.launcher.partition))
        if isinstance(run.settings.launcher, SlurmSettings)
        else _of(run.settings.launcher.grace_s, None)
        for run in runs
    ]


def _of(given_s: float | None, known: Preemption | None) -> Grace:
    """Return a run's grace (pure); what the user says of a preemption goes before what Slurm says.

    Where both are known, a task that is cancelled has no longer than one that is preempted.
    """
    found = (
        Grace() if known is None else Grace(known.grace_s + known.kill_wait_s, known.kill_wait_s)
    )
    return found if given_s is None else Grace(given_s, min(given_s, found.ended_s))
