"""What a worker has published on its control page, as its agent reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Progress:
    """What a worker last published; None where it has published nothing yet."""

    step: int | None
    samples: int | None
    loss: float | None
    step_time: float | None
    """Unix seconds at which ``step`` was reported."""
    total_steps: int | None
    boundary: int | None
    """The last step whose checkpoint was announced."""
    held: int
    """Not 0: the worker stays there; the number of the request that it obeys."""
    passed: int | None = None
    """The last step at which it asked whether to save."""
    waiting: int = 0
    """The number of the last proposal that it waited, or waits, for."""
    wanted: int = 0
    """How often it has asked for a checkpoint of the group."""
    leave_by: float | None = None
    """Monotonic seconds by which the script wants its node to be left."""
    first_step: int | None = None
    """The first step that it has made, beyond what it restored."""
    first_time: float | None = None
    """Unix seconds at which ``first_step`` was reported."""
    restored: int | None = None
    """The step of the checkpoint that it restored."""
    restore_s: float | None = None
    """Seconds that it took to look for a checkpoint and to restore it."""
    blocked_s: float = 0.0
    """Seconds for which checkpoints have held up its training, all together."""
    counted: bool = False
    """The script reports no steps: they are counted, from what was restored on, else from 0."""
    pulse: int = 0
    """How often it has reported anything: a sign of life, whatever the step."""
    busy_s: float = 0.0
    """How long it was at something that is no step, in all, but for what is under way."""
    num_unsaved: int = 0
    """How many of its checkpoints could not be written."""
    unsaved: int | None = None
    """The step of the last one of those."""
    stored: int | None = None
    """The last step of which it has seen a checkpoint come into the directory."""
    returned: bool = False
    """Whether the user's function has returned: the only sign that the worker has succeeded."""
    busy: int = 0
    """Not 0: it does something long that is no step, such as a checkpoint (`reports.busy`)."""


class Page(Protocol):
    """Where it is read: a `hpc_elastic.control.ControlPage`, or what stands for one."""

    def read(self) -> Progress:
        """Return what the worker last published."""
