"""Elastic PyTorch runs on Slurm: start when one node is free, grow, shrink, survive preemption.

    from hpc_elastic import launch               start a function as an elastic run
    from hpc_elastic import report               a worker tells of its step and loss
    from hpc_elastic import should_checkpoint    is now the moment to save, on all ranks?
    from hpc_elastic import Checkpointer         atomic, verified, asynchronous checkpoints
    from hpc_elastic import checkpoint_boundary  a worker has a complete checkpoint
    from hpc_elastic import log_run_scalars     restarts and goodput into TensorBoard or W&B
    from hpc_elastic import fence                may this worker still commit a checkpoint?

All are loaded when they are first used: importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_elastic import fence
    from hpc_elastic.api import LaunchResult, launch
    from hpc_elastic.checkpoint import Checkpointer
    from hpc_elastic.preemption import leave_node, notice_left_s, should_checkpoint
    from hpc_elastic.reports import checkpoint_boundary, report
    from hpc_elastic.scalars import log_run_scalars

__all__ = [
    "Checkpointer",
    "LaunchResult",
    "checkpoint_boundary",
    "fence",
    "launch",
    "leave_node",
    "log_run_scalars",
    "notice_left_s",
    "report",
    "should_checkpoint",
]

_LAZY = {
    "Checkpointer": "hpc_elastic.checkpoint",
    "LaunchResult": "hpc_elastic.api",
    "checkpoint_boundary": "hpc_elastic.reports",
    "launch": "hpc_elastic.api",
    "leave_node": "hpc_elastic.preemption",
    "log_run_scalars": "hpc_elastic.scalars",
    "notice_left_s": "hpc_elastic.preemption",
    "report": "hpc_elastic.reports",
    "should_checkpoint": "hpc_elastic.preemption",
}


def __getattr__(name: str) -> Any:
    """Import what the package offers at its first use (PEP 562)."""
    if name == "fence":
        return importlib.import_module("hpc_elastic.fence")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List what is there and what would be imported."""
    return sorted({*globals(), *__all__})
