"""When a leader may ask Slurm how the run's tasks are (pure).

At once when a round begins to form or an agent has joined, else ever more seldom; never again
within ten times the time that the answer took, nor faster than five thousand tasks a second: a run
of ten thousand nodes may not hurt slurmctld.
"""

from __future__ import annotations

from dataclasses import dataclass

_SLURM_FIRST_S, _SLURM_LONGEST_S, _SLURM_SHARE = 0.5, 60.0, 10.0
_TASKS_PER_S = 5000


@dataclass
class Questions:
    """When a leader asks; times are its monotonic seconds."""

    about: float = -1.0
    """The forming that was asked about last, by its beginning."""
    asked_at: float | None = None
    """When the question was put that is not answered yet."""
    pause_s: float = _SLURM_FIRST_S
    due: float = 0.0
    not_before: float = 0.0

    def hurry(self) -> None:
        """Something has changed: ask as soon as is polite."""
        self.due = 0.0

    def ask(self, forming_since: float, now: float) -> bool:
        """Tell whether to ask now; then the question counts as put."""
        if forming_since != self.about:
            self.about, self.pause_s, self.due = forming_since, _SLURM_FIRST_S, now
        if self.asked_at is not None or now < max(self.due, self.not_before):
            return False
        self.asked_at = now
        return True

    def answered(self, num_tasks: int, now: float) -> float:
        """Note the answer's arrival; return when the question was put."""
        assert self.asked_at is not None
        asked_at, self.asked_at = self.asked_at, None
        work_s = num_tasks / _TASKS_PER_S
        self.not_before = now + max(_SLURM_FIRST_S / 2, _SLURM_SHARE * (now - asked_at), work_s)
        self.due = now + self.pause_s
        self.pause_s = min(_SLURM_LONGEST_S, 1.5 * self.pause_s)
        return asked_at
