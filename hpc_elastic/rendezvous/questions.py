"""When a leader may ask Slurm how the run's tasks are (pure).

At once when a round begins to form, else ever more seldom, but soon when an agent has joined; more
seldom from the start (*gently*) where nobody waits for the answer but a task that was lost. However
many agents join, it is asked no more often than for one. Never again within ten times the time that
the answer took, nor faster than five thousand tasks a second: a run of ten thousand nodes may not
hurt slurmctld.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_SLURM_FIRST_S, _SLURM_LONGEST_S, _SLURM_SHARE = 0.5, 60.0, 10.0
_LONGER = 2.0
_GENTLY_S = 5.0
_HURRIED_S = 10.0
_TASKS_PER_S = 5000


@dataclass
class Questions:
    """When a leader asks; times are its monotonic seconds."""

    about: object = None
    """What was asked about last: another forming is asked about at once."""
    asked_at: float | None = None
    """When the question was put that is not answered yet."""
    pause_s: float = _SLURM_FIRST_S
    is_hurried: bool = False
    hurried_at: float = -math.inf
    """When the last question was put that was hurried."""
    due: float = 0.0
    not_before: float = 0.0

    def hurry(self) -> None:
        """Something has changed: ask soon, the first times at once, then every `_HURRIED_S`."""
        self.due = min(self.due, self.hurried_at + min(self.pause_s, _HURRIED_S))
        self.is_hurried = True

    def ask_within(self, pause_s: float, now: float) -> None:
        """Something is about to change: ask after so long, or as soon as is polite then."""
        self.due = min(self.due, now + pause_s)

    def ask(self, about: object, now: float, *, gently: bool = False) -> bool:
        """Tell whether to ask now; then the question counts as put."""
        if about != self.about:
            self.about, self.pause_s = about, _GENTLY_S if gently else _SLURM_FIRST_S
            self.due = now + (_GENTLY_S if gently else 0.0)
        if self.asked_at is not None or now < max(self.due, self.not_before):
            return False
        self.asked_at = now
        if self.is_hurried:
            self.is_hurried, self.hurried_at = False, now
        return True

    def answered(self, num_tasks: int, now: float) -> float:
        """Note the answer's arrival; return when the question was put."""
        assert self.asked_at is not None
        asked_at, self.asked_at = self.asked_at, None
        work_s = num_tasks / _TASKS_PER_S
        self.not_before = now + max(_SLURM_FIRST_S / 2, _SLURM_SHARE * (now - asked_at), work_s)
        self.due = now + self.pause_s
        self.pause_s = min(_SLURM_LONGEST_S, _LONGER * self.pause_s)
        return asked_at
