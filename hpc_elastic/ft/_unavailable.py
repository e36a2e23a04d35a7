"""torchft's names that have no implementation here: they can be imported, and raise when used.

A script that imports more than it uses runs unchanged. Whole modules of such names have no file:
`hpc_elastic.ft` registers them.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hpc_elastic.errors import HpcElasticError

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
NAMES = _WHOLE | {
    "coordination": dict.fromkeys(
        ("LighthouseClient", "ManagerClient", "ManagerServer", "Quorum", "QuorumMember"),
        _COORDINATION,
    ),
    "process_group": dict.fromkeys(("ProcessGroupXCCL", "ProcessGroupBabyXCCL"), _XPU),
}
"""Module -> name -> the remedy."""


class UnavailableError(HpcElasticError, NotImplementedError):
    """A name of torchft was used that has no implementation here; the message has the remedy."""


def find_name(module: str, name: str) -> Any:
    """Return what stands for a name of torchft's; raise AttributeError if there is none."""
    remedy = NAMES[module.rpartition(".")[2]].get(name)
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
        return find_name(self.__name__, name)


def modules(package: str) -> dict[str, ModuleType]:
    """Return the modules of the package, by full name, that have no other names."""
    return {f"{package}.{name}": _Module(f"{package}.{name}") for name in _WHOLE}
