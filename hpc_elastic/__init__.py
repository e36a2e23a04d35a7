"""Elastic PyTorch runs on Slurm: start when one node is free, grow, shrink, survive preemption.

    from hpc_elastic import launch               start a function as an elastic run
    from hpc_elastic import report               a worker tells of its step and loss
    from hpc_elastic import should_checkpoint    is now the moment to save, on all ranks?
    from hpc_elastic import Checkpointer         atomic, verified, asynchronous checkpoints
    from hpc_elastic import checkpoint_boundary  a worker has a complete checkpoint
    from hpc_elastic import log_run_scalars     restarts and goodput into TensorBoard or W&B
    from hpc_elastic import check_fence          may this worker still commit a checkpoint?

All are loaded when they are first used: importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_elastic.api import LaunchResult, launch
    from hpc_elastic.checkpoint import Checkpointer
    from hpc_elastic.run.fencing import check_fence
    from hpc_elastic.worker.checkpoint_trigger import leave_node, notice_left_s, should_checkpoint
    from hpc_elastic.worker.reporting import checkpoint_boundary, log_run_scalars, report

__all__ = [
    "Checkpointer",
    "LaunchResult",
    "check_fence",
    "checkpoint_boundary",
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
    "check_fence": "hpc_elastic.run.fencing",
    "checkpoint_boundary": "hpc_elastic.worker.reporting",
    "launch": "hpc_elastic.api",
    "leave_node": "hpc_elastic.worker.checkpoint_trigger",
    "log_run_scalars": "hpc_elastic.worker.reporting",
    "notice_left_s": "hpc_elastic.worker.checkpoint_trigger",
    "report": "hpc_elastic.worker.reporting",
    "should_checkpoint": "hpc_elastic.worker.checkpoint_trigger",
}


def __getattr__(name: str) -> Any:
    """Import what the package offers at its first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List what is there and what would be imported."""
    return sorted({*globals(), *__all__})
