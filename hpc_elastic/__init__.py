"""Elastic PyTorch runs on Slurm: start when one node is free, grow, shrink, survive preemption.

    launch               start a function as an elastic run
    Run                  a submitted run: its state and result, to cancel or resume it
    ElasticExecutor      functions as elastic runs, by concurrent.futures
    Checkpointer         atomic, verified, asynchronous checkpoints
    follow_checkpoints   use each new checkpoint of another run, beside its training
    ElasticSampler       each sample once an epoch, for any number of workers
    report               report the step, the loss and other metrics of a worker
    should_checkpoint    whether to save at this step, the same on all ranks
    mark_checkpoint      announce a checkpoint that the script saved by itself
    preemption_deadline  when this node is taken
    release_node         give this worker's node back
    check_fence          raise if this worker may no longer commit a checkpoint
    log_run_metrics      restarts and goodput in an experiment tracker
    HpcElasticError      base class of the errors in `hpc_elastic.errors`

Each is imported at its first use, so that `import hpc_elastic` is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_elastic.api import ElasticExecutor, LaunchResult, Run, launch
    from hpc_elastic.checkpoint import (
        Checkpointer,
        CheckpointOptions,
        MemoryTier,
        follow_checkpoints,
    )
    from hpc_elastic.data import ElasticSampler, GlobalBatch
    from hpc_elastic.errors import HpcElasticError
    from hpc_elastic.run.fencing import check_fence
    from hpc_elastic.worker.checkpoint_trigger import (
        preemption_deadline,
        release_node,
        should_checkpoint,
    )
    from hpc_elastic.worker.reporting import log_run_metrics, mark_checkpoint, report

__all__ = [
    "CheckpointOptions",
    "Checkpointer",
    "ElasticExecutor",
    "ElasticSampler",
    "GlobalBatch",
    "HpcElasticError",
    "LaunchResult",
    "MemoryTier",
    "Run",
    "check_fence",
    "follow_checkpoints",
    "launch",
    "log_run_metrics",
    "mark_checkpoint",
    "preemption_deadline",
    "release_node",
    "report",
    "should_checkpoint",
]

_MODULES = {
    "api": ("ElasticExecutor", "LaunchResult", "Run", "launch"),
    "checkpoint": ("CheckpointOptions", "Checkpointer", "MemoryTier", "follow_checkpoints"),
    "data": ("ElasticSampler", "GlobalBatch"),
    "errors": ("HpcElasticError",),
    "run.fencing": ("check_fence",),
    "worker.checkpoint_trigger": ("preemption_deadline", "release_node", "should_checkpoint"),
    "worker.reporting": ("log_run_metrics", "mark_checkpoint", "report"),
}


def __getattr__(name: str) -> Any:
    """Import what the package offers at its first use (PEP 562)."""
    for module, names in _MODULES.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List what is there and what would be imported."""
    return sorted({*globals(), *__all__})
