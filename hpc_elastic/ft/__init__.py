"""Per-step fault tolerance: a training loop that outlives its peers and its coordinator.

    from hpc_elastic.ft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

`manager` shows the use, `messages` has the theory, and `docs/reference/torchft.md` the differences
from torchft, which has the same names. All are imported on first use: the package itself needs no
torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from hpc_elastic.ft import _unavailable

if TYPE_CHECKING:
    from hpc_elastic.ft.checkpointing import CheckpointTransport, HTTPTransport
    from hpc_elastic.ft.data import DistributedSampler
    from hpc_elastic.ft.ddp import DistributedDataParallel, PureDistributedDataParallel
    from hpc_elastic.ft.gloo import ProcessGroupBabyGloo, ProcessGroupGloo
    from hpc_elastic.ft.local_sgd import DiLoCo, LocalSGD
    from hpc_elastic.ft.manager import (
        ExceptionWithTraceback,
        LeftQuorumError,
        Manager,
        WorldSizeMode,
    )
    from hpc_elastic.ft.nccl import ProcessGroupBabyNCCL, ProcessGroupNCCL
    from hpc_elastic.ft.optim import OptimizerWrapper
    from hpc_elastic.ft.optim import OptimizerWrapper as Optimizer
    from hpc_elastic.ft.process_group import (
        ErrorSwallowingProcessGroupWrapper,
        ManagedProcessGroup,
        ProcessGroup,
        ProcessGroupDummy,
    )
    from hpc_elastic.islands import (
        ContributionHead,
        DivergedIslandError,
        IslandDiLoCo,
        IslandTimeoutError,
        OuterRound,
        RoundPolicy,
        load_global_parameters,
    )

__all__ = [
    "CheckpointTransport", "ContributionHead", "DiLoCo", "DistributedDataParallel",
    "DistributedSampler", "DivergedIslandError", "ErrorSwallowingProcessGroupWrapper",
    "ExceptionWithTraceback", "HTTPTransport", "IslandDiLoCo", "IslandTimeoutError",
    "LeftQuorumError", "LocalSGD", "ManagedProcessGroup", "Manager", "Optimizer",
    "OptimizerWrapper", "OuterRound", "ProcessGroup", "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL", "ProcessGroupDummy", "ProcessGroupGloo", "ProcessGroupNCCL",
    "PureDistributedDataParallel", "RoundPolicy", "WorldSizeMode", "load_global_parameters",
]  # fmt: skip

_MODULES = {
    "ft.checkpointing": ("CheckpointTransport", "HTTPTransport"),
    "ft.data": ("DistributedSampler",),
    "ft.ddp": ("DistributedDataParallel", "PureDistributedDataParallel"),
    "ft.local_sgd": ("DiLoCo", "LocalSGD"),
    "ft.manager": ("ExceptionWithTraceback", "LeftQuorumError", "Manager", "WorldSizeMode"),
    "ft.optim": ("Optimizer", "OptimizerWrapper"),
    "islands": (
        "ContributionHead", "DivergedIslandError", "IslandDiLoCo", "IslandTimeoutError",
        "OuterRound", "RoundPolicy", "load_global_parameters",
    ),
}  # fmt: skip
"""Homes of the names; that of all others is `ft.process_group`."""
_HOME = {name: module for module, names in _MODULES.items() for name in names}
sys.modules.update(_unavailable.modules(__name__))


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in __all__ and name not in _unavailable.NAMES["process_group"]:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME.get(name, "ft.process_group")
    its_name = "OptimizerWrapper" if name == "Optimizer" else name
    value = getattr(importlib.import_module(f"hpc_elastic.{home}"), its_name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__})
