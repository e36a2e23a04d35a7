"""State of a node: what sinfo's word and its marks mean for a task that waits. Pure.

sinfo prints a word and marks behind it, such as ``idle~``. Some marks keep no task away: Slurm
starts a node that saves power (``~``, ``#``, ``%``, ``!``), and ``-`` marks one that backfill
has planned for a waiting job. A node that does not answer (``*``), is about to boot (``@``,
``^``) or is in a maintenance reservation (``$``) starts no task.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpc_elastic.run.directory import RunSpec
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.parsing import QueuedJob
from hpc_elastic.slurm.run_tasks import jobs_of

_PLAN = "-"
_HARMLESS = f"~#%!+{_PLAN}"
_SILENT = "*"
_MARKS = f"{_HARMLESS}{_SILENT}@^$"
_SHORT = {
    **{"alloc": "allocated", "mix": "mixed", "comp": "completing", "plnd": "planned"},
    **{"drain": "drained", "drng": "draining", "failg": "failing"},
}
_DRAINED = ("draining", "drained", "failing", "fail")
_LOST = {
    *(*_DRAINED, "down", "error", "future", "inval", "maint", "unknown", "reboot", "perfctrs"),
    *("no_respond", "not_responding"),
}


@dataclass(frozen=True)
class NodeState:
    """State of one node: sinfo's word in its long form, such as ``idle``, and its marks."""

    word: str
    marks: str = ""

    @classmethod
    def parse(cls, text: str) -> NodeState:
        """Return the state that sinfo prints as this text."""
        text = text.strip().lower()
        word = text.rstrip(_MARKS)
        return cls(_SHORT.get(word, word), text[len(word) :])

    @property
    def name(self) -> str:
        """The word, with those marks that keep tasks away."""
        return self.word + "".join(mark for mark in self.marks if mark not in _HARMLESS)

    @property
    def is_idle(self) -> bool:
        """Whether it runs nothing and takes tasks; it may be planned for a waiting job."""
        return self.name in ("idle", "planned")

    @property
    def is_planned(self) -> bool:
        """Whether it is idle, and backfill has planned a waiting job there."""
        return self.is_idle and (self.word == "planned" or _PLAN in self.marks)

    @property
    def is_busy(self) -> bool:
        """Whether it has a job, and takes tasks once that has ended."""
        return self.name in ("allocated", "mixed", "completing")

    @property
    def is_drained(self) -> bool:
        """Whether it gets no new jobs, because an administrator or Slurm drains it."""
        return self.word in _DRAINED

    @property
    def is_lost(self) -> bool:
        """Whether it will not come to a job that waits."""
        return _SILENT in self.marks or self.word in _LOST


def list_drained(client: SlurmClient, hosts: Iterable[str]) -> dict[str, str]:
    """Return those of some nodes that are drained, each with its state in sinfo's words."""
    found = client.each_node(None, hosts)
    return {node: state for node, state in found.items() if NodeState.parse(state).is_drained}


_LEFT_AHEAD_S = 600.0
"""How long before a reservation its nodes are left."""


def list_reserved(
    reservations: Iterable[QueuedJob], ends: Mapping[str, float], now: float
) -> dict[str, str]:
    """Return the nodes that a reservation takes soon, before their tasks end, each with its start.

    Slurm starts no job that would reach into a reservation, and makes none over jobs that run,
    unless it has the flag IGNORE_JOBS: that of a maintenance, which ends these jobs (pure).
    """
    found: dict[str, str] = {}
    for begin, each in _near(reservations, now):
        start = time.strftime("reserved from %H:%M", time.localtime(begin))
        found |= {node: start for node in each.nodes if ends.get(node, 0.0) > begin}
    return found


def _near(reservations: Iterable[QueuedJob], now: float) -> list[tuple[float, QueuedJob]]:
    """Return those before which nodes are left now, each with its start."""
    return [
        (each.starts_at, each)
        for each in reservations
        if each.starts_at is not None
        and "IGNORE_JOBS" in each.reason
        and now < each.starts_at < now + _LEFT_AHEAD_S
    ]


def query_reserved(client: SlurmClient, spec: RunSpec) -> dict[str, str]:
    """Return the nodes of a run for `list_reserved`; its tasks are listed if one is near."""
    now, reservations = time.time(), client.reservations()
    if not _near(reservations, now):
        return {}
    tasks = client.tasks(jobs_of(spec)).values()
    left_s = ((t.node, math.inf if t.time_left_s is None else t.time_left_s) for t in tasks)
    return list_reserved(reservations, {node: now + left for node, left in left_s}, now)
