"""The settings that a leader's decisions go by (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rules:
    """What the run was submitted with; seconds throughout."""

    min_nodes: int
    max_nodes: int
    max_restarts: int
    start_timeout_s: float
    last_call_s: float
    grow: Literal["boundary", "now", "never"] = "boundary"
    grow_after_s: float = 60.0
    min_wait_s: float | None = None
    in_sweep: bool = False
    """Whether other runs may compete for the same nodes that were submitted together with it."""
    max_attempts_without_progress: int = 3
    max_requeues: int | None = None
    """How often a task may go back to the queue; None: as often as it has to."""
    ft: bool = False
    """Whether each node is a replica of its own (`replicas`)."""
