"""Simulated GPUs: torch's CUDA build, unchanged, on a machine without any.

A library that is preloaded stands for CUDA's runtime, the part of its driver that torch calls, and
NCCL; torch's operators are computed by the CPU's kernels in the order of the streams. So torch's
own allocators, streams, events, `ProcessGroupNCCL` and its watchdog run as they are.

`build` compiles the libraries once for each torch, and a `SimulatedGpus` is one machine: its
`environment` is that of the processes that see its GPUs, its `events` are what they did.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .build import BuildError, Libraries, build

__all__ = ["BuildError", "Libraries", "SimulatedGpus", "build"]

_STARTUP, _BIN = (Path(__file__).parent / name for name in ("startup", "bin"))


@dataclass(frozen=True)
class SimulatedGpus:
    """The GPUs of one machine, and their faults.

    Attributes:
        libraries: From `build`.
        directory: Of the machine: its events, and the meeting places of NCCL. Processes with the
            same directory are on the same machine.
        count: Number of GPUs.
        memory_mb: Of each GPU.
        pinned_mb: Of the host, at most; a pin beyond that fails. None is without a limit.
        delay_us: Before each operation of a stream.
        copy_mb_s: Rate of copies; 0 is without a limit.
        pin_mb_s: Rate at which memory of the host is pinned; 0 is without a limit.
        exclusive: EXCLUSIVE_PROCESS mode: a GPU has the context of one process at most.
        mig: CUDA shows one GPU to each process, the first of CUDA_VISIBLE_DEVICES.
        nccl_error_ms: From a peer's death to NCCL's asynchronous error; below 0 is never.
        nccl_abort_ms: Duration of an abort.
        nccl_hanging_init: No communicator comes up.
        smi: What nvidia-smi shows: ``well``, ``lost`` (an error, exit code 15), ``inforom`` (a
            warning, exit code 14), ``not-measured`` ([N/A]), ``hang``,
            ``worn`` (ECC errors, heat, a narrow PCIe link).
    """

    libraries: Libraries
    directory: Path
    count: int = 2
    memory_mb: int = 2048
    pinned_mb: int | None = None
    delay_us: int = 0
    copy_mb_s: int = 0
    pin_mb_s: int = 0
    exclusive: bool = False
    mig: bool = False
    nccl_error_ms: int = 300
    nccl_abort_ms: int = 20
    nccl_hanging_init: bool = False
    smi: str = "well"
    _base: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)

    def environment(self) -> dict[str, str]:
        """Return the environment of a process that sees these GPUs, and only these."""
        env = {k: v for k, v in self._base.items() if k != "CUDA_VISIBLE_DEVICES"}
        for each in fields(self)[2:-1]:
            value = getattr(self, each.name)
            if value is not None:
                text = value if isinstance(value, str) else str(int(value))
                env[f"SIMULATED_GPU_{each.name.upper()}"] = text
        env["SIMULATED_GPU_DIR"] = str(self.directory)
        env["SIMULATED_GPU_OPERATORS"] = str(self.libraries.operators)
        env["LD_PRELOAD"] = str(self.libraries.runtime)
        paths = [str(_STARTUP), self._base.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        env["PATH"] = os.pathsep.join(filter(None, (str(_BIN), self._base.get("PATH", ""))))
        env["OMP_NUM_THREADS"] = "1"
        return env

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of a name, in their order.

        ``context`` is a primary context that was made, with device, thread and call; ``pinned``
        host memory; ``nccl_init``, ``nccl_abort``, ``nccl_error`` and ``duplicate_gpu`` are NCCL's;
        ``kernel`` is one that no operator stands for.
        """
        try:
            lines = (self.directory / "events").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def contexts(self) -> dict[tuple[str, int], set[int]]:
        """Return the GPUs on which each process has a context, by its host and process id."""
        found: dict[tuple[str, int], set[int]] = {}
        for event in self.events("context"):
            found.setdefault((event["host"], event["pid"]), set()).add(event["device"])
        return found


@contextmanager
def machine_directory() -> Iterator[Path]:
    """Return a directory in memory for one machine, and remove it at the end."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="simulated-gpu-",
        dir=memory if memory.is_dir() else None,
        ignore_cleanup_errors=True,
    ) as folder:
        yield Path(folder)
