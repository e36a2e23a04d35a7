"""The nodes of a cluster, and what sinfo says of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpc_elastic.testing.fake_slurm.jobs import Job


@dataclass
class Node:
    """One node.

    Attributes:
        name: Its name.
        died: When it died, in epoch seconds; None: it lives.
        is_down: Whether the controller knows that it is dead, or was told so.
        is_drained: Whether it takes no further jobs.
        is_paused: Whether all its processes stand still.
    """

    name: str
    died: float | None = None
    is_down: bool = False
    is_drained: bool = False
    is_paused: bool = False

    @property
    def takes_jobs(self) -> bool:
        """Whether jobs may start on it; a dead one is trusted until its death is known."""
        return self.died is None and not (self.is_down or self.is_drained or self.is_paused)

    def state(self, jobs: Iterable[Job], num_cpus: int) -> str:
        """Return its state in Slurm's long form, such as ``idle`` or ``down*``."""
        here = [job for job in jobs if job.has_nodes and self.name in job.nodes]
        if self.is_down:
            return "down*" if self.died is not None else "down"
        if self.is_drained:
            return "draining" if here else "drained"
        if not here:
            return "idle"
        if all(job.ending is not None for job in here):
            return "completing"
        used = sum(num_cpus if j.request.exclusive else j.request.cpus for j in here)
        return "allocated" if used >= num_cpus else "mixed"


SHORT = {
    **{"idle": "idle", "mixed": "mix", "allocated": "alloc", "completing": "comp"},
    **{"down": "down", "down*": "down*", "draining": "drng", "drained": "drain"},
}
"""The short forms of the states."""
