"""Per-step fault tolerance: a training loop that outlives its peers and its coordinator.

    from hpc_elastic.ft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

`manager` shows the use, `messages` has the theory, and `docs/reference/torchft.md` the differences
from torchft, which has the same names. All are imported on first use: the package itself needs no
torch. torchft's names that have no implementation here can be imported, and raise when used, so a
script that imports more than it uses runs unchanged; whole modules of such names have no file.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpc_elastic.errors import HpcElasticError

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
}
"""Homes of the names; `islands` has its own, and `ft.process_group` all process groups."""
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in __all__ and name not in _UNAVAILABLE["process_group"]:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME.get(name, "ft.process_group" if "ProcessGroup" in name else "islands")
    its_name = "OptimizerWrapper" if name == "Optimizer" else name
    value = getattr(importlib.import_module(f"hpc_elastic.{home}"), its_name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__})


# ---- torchft's names without an implementation

_COORDINATION = (
    "the servers and clients of a quorum exchange signed messages of their own: write the "
    "algorithm with Manager (start_quorum, allreduce, should_commit) and a LighthouseServer"
)
_QUANTIZED = (
    "its kernels need Triton and a GPU, and none was available to write and measure them: "
    "use Manager.allreduce, or a process group's collectives"
)
_XPU = "no XPU was available to test one: use ProcessGroupGloo, which copies through the CPU"
_STREAMS = "use torch.accelerator's streams, events and synchronize()"
_OTEL = "a run writes its events and metrics to files: see `hpc-elastic events` and `status`"

_WHOLE: dict[str, dict[str, str]] = {
    "collectives": dict.fromkeys(
        ("allocate_reduce_scatter_output", "allreduce_quantized", "get_padded_sizes",
         "reduce_scatter_quantized"), _QUANTIZED,
    ),
    "multiprocessing_dummy_context": dict.fromkeys(
        ("DummyContext", "get_context"), "no process group here needs a subprocess: leave it out"
    ),
    "otel": dict.fromkeys(("TeeLogExporter", "setup_logger", "shutdown"), _OTEL),
    "quantization": dict.fromkeys(
        ("fused_dequantize_from_fp8", "fused_quantize_into_fp8", "fused_reduce_fp8"), _QUANTIZED
    ),
    "torchcomms": {"ProcessGroupTorchComms": "use ProcessGroupNCCL or ProcessGroupGloo"},
    "torchx": {"hsdp": "start the script with launcher=slurm ft=true, or with torchrun"},
    "utils": dict.fromkeys(("get_stream_context", "record_event", "synchronize"), _STREAMS),
}  # fmt: skip
"""Modules that have no other names."""
_UNAVAILABLE = _WHOLE | {
    "coordination": dict.fromkeys(
        ("LighthouseClient", "ManagerClient", "ManagerServer", "Quorum", "QuorumMember"),
        _COORDINATION,
    ),
    "process_group": dict.fromkeys(("ProcessGroupXCCL", "ProcessGroupBabyXCCL"), _XPU),
}
"""Module -> name -> the remedy."""


class UnavailableError(HpcElasticError, NotImplementedError):
    """A name of torchft was used that has no implementation here; the message has the remedy."""


def find_unavailable(module: str, name: str) -> Any:
    """Return what stands for a name of torchft's; raise AttributeError if there is none."""
    remedy = _UNAVAILABLE[module.rpartition(".")[2]].get(name)
    if remedy is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def refuse(self: object, *args: Any, **kwargs: Any) -> None:
        raise UnavailableError(f"{module}.{name} has no implementation here: {remedy}")

    doc = (
        f"torchft's name, without an implementation: {remedy}.\n\n"
        "Args:\n    args: Not used.\n    kwargs: Not used.\n\n"
        "Raises:\n    UnavailableError: Always."
    )
    return type(name, (), {"__init__": refuse, "__doc__": doc, "__module__": module})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return find_unavailable(self.__name__, name)


for _name in _WHOLE:
    sys.modules[f"{__name__}.{_name}"] = _Module(f"{__name__}.{_name}")
