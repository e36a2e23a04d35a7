"""Elastic PyTorch runs on Slurm: start when one node is free, grow, shrink, survive preemption.

    from hpc_elastic import launch   start a function as an elastic run, from a program
    from hpc_elastic import report   tell the launcher about step and loss, from a worker

Both are loaded when they are first used: importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_elastic.api import LaunchResult, launch
    from hpc_elastic.control import report

__all__ = ["LaunchResult", "launch", "report"]

_LAZY = {
    "LaunchResult": "hpc_elastic.api",
    "launch": "hpc_elastic.api",
    "report": "hpc_elastic.control",
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
