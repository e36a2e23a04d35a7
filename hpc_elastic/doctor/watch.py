"""Waiting for the probe, bounded, on the login node."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from hpc_elastic.doctor.job import ProbeJob
from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.slurm.states import Phase, TaskState

_T = TypeVar("_T")
POLL_S = 0.5
Say = Callable[[str], None]


def until(condition: Callable[[], _T | None], timeout_s: float) -> _T | None:
    """Wait for something; return None if it does not come in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found or time.monotonic() > deadline:
            return found
        time.sleep(POLL_S)


class Watch:
    """Slurm's word on the tasks of a probe; the last one counts where there is no newer one."""

    def __init__(self, job: ProbeJob, say: Say) -> None:
        self._job = job
        self._say = say
        self._states: dict[int, TaskState] = {}

    def states(self) -> dict[int, TaskState]:
        """Ask squeue."""
        try:
            self._states = self._job.states()
        except SlurmCommandError as e:
            self._say(f"Slurm does not answer: {e.stderr.strip()[:100]}")
        return self._states

    def in_phase(self, *phases: Phase) -> list[int]:
        """Return the tasks in some phases, as last heard."""
        return [i for i, state in self._states.items() if state.phase in phases]

    def wait_for_start(self, patience_s: float, rest_s: float) -> list[int]:
        """Wait until all tasks run; return those that do.

        Args:
            patience_s: How long the first may take.
            rest_s: How long the others may take after the first.
        """
        deadline = time.monotonic() + patience_s
        first_seen = False
        while time.monotonic() < deadline:
            self.states()
            running = self.in_phase(Phase.RUNNING)
            ended = self.in_phase(Phase.ENDED)
            if len(running) + len(ended) == self._job.num_nodes:
                return running
            if running and not first_seen:
                first_seen, deadline = True, time.monotonic() + rest_s
            self._say(self._what())
            time.sleep(POLL_S)
        return self.in_phase(Phase.RUNNING)

    def waiting(self) -> dict[int, str]:
        """Return why tasks wait, in Slurm's words."""
        pending = self.in_phase(Phase.PENDING)
        return {i: self._states[i].reason or "no reason is given" for i in pending}

    def _what(self) -> str:
        running = len(self.in_phase(Phase.RUNNING))
        pending = (self._states[i].reason for i in self.in_phase(Phase.PENDING))
        reasons = ", ".join(sorted({reason for reason in pending if reason})) or "starting"
        return f"job {self._job.job_id}: {running} of {self._job.num_nodes} nodes run ({reasons})"
