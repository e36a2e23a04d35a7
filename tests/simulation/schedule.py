"""What schedules have in common, whatever they simulate: how one is played, and its outcome."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from simulation.world import World


@dataclass
class Tally:
    """What became of one schedule, or of many."""

    schedules: int = 0
    cpu_s: float = 0.0
    """Processor time that they took; 0 for a single one."""
    virtual_s: float = 0.0
    events: int = 0
    checks: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)
    """Seed -> what did not hold, with the last lines of the trace."""

    def add(self, other: Tally) -> None:
        """Count another outcome of the same kind in."""
        for name, value in vars(other).items():
            if isinstance(value, dict):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)


T = TypeVar("T", bound=Tally)
T_co = TypeVar("T_co", bound=Tally, covariant=True)


class Schedule(Protocol, Generic[T_co]):
    """One random schedule, all of whose chance comes from its seed."""

    seed: int
    world: World

    @property
    def scenario(self) -> object:
        """Its parameters, for people."""

    def run(self) -> None:
        """Run it; raises if something happened that must never happen."""

    def outcome(self) -> T_co:
        """Return what was counted so far."""


def play(schedule: Schedule[T]) -> T:
    """Run one schedule; what did not hold is in the outcome's ``failures``."""
    try:
        schedule.run()
    except Exception as e:  # the protocol's own errors are findings too
        outcome = schedule.outcome()
        what = f"seed {schedule.seed}: {type(e).__name__}: {e}"
        outcome.failures[schedule.seed] = f"{what}\n{schedule.scenario}\n{format_trace(schedule)}"
        return outcome
    return schedule.outcome()


def format_trace(schedule: Schedule[T]) -> str:
    """Return the trace as text."""
    return "\n".join(
        f"{now:9.3f}  {who:6}  {what} {detail}" for now, who, what, detail in schedule.world.trace
    )
