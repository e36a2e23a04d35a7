"""This host as a process finds it: limits, clock, interpreter. The same on login node and nodes."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from hpc_elastic.mount import Mount

_LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "memlock": resource.RLIMIT_MEMLOCK,
    "as": resource.RLIMIT_AS,
}
SLURM_COMMANDS = ("sbatch", "squeue", "scontrol", "scancel", "sinfo")
_RDMA = Path("/sys/class/infiniband")
_UNSYNCHRONISED = 5
"""TIME_ERROR of adjtimex(2): no time service keeps the clock."""
_TIMEX_BYTES = 512


@dataclass(frozen=True)
class Host:
    """What a process finds on its host.

    Attributes:
        name: The host's name.
        limits: Soft and hard limit by name; None where there is no limit.
        clock_kept: Whether a time service keeps the clock; None where that can not be told.
        python: Path of the interpreter.
        python_fs: Type of the file system that the interpreter's environment lies on.
        missing_commands: Slurm's commands that are not on PATH.
        cpus: CPUs that this process may use.
        memory_bytes: Memory of the machine.
        has_infiniband: Whether it has an RDMA device.
    """

    name: str
    limits: dict[str, tuple[int | None, int | None]]
    clock_kept: bool | None
    python: str
    python_fs: str
    missing_commands: tuple[str, ...]
    cpus: int
    memory_bytes: int
    has_infiniband: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Host:
        """Return it from `to_json`."""
        limits = {name: (soft, hard) for name, (soft, hard) in raw["limits"].items()}
        missing = tuple(raw["missing_commands"])
        return cls(**{**raw, "limits": limits, "missing_commands": missing})


def look() -> Host:
    """Look at this host."""
    return Host(
        name=socket.gethostname(),
        limits={name: _limit(number) for name, number in _LIMITS.items()},
        clock_kept=_clock_kept(),
        python=sys.executable,
        python_fs=Mount.of(Path(sys.prefix)).kind,
        missing_commands=tuple(name for name in SLURM_COMMANDS if shutil.which(name) is None),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        has_infiniband=_RDMA.is_dir() and any(_RDMA.iterdir()),
    )


def _limit(number: int) -> tuple[int | None, int | None]:
    soft, hard = resource.getrlimit(number)
    return tuple(None if n == resource.RLIM_INFINITY else n for n in (soft, hard))  # type: ignore[return-value]


def _clock_kept() -> bool | None:
    """Ask the kernel; adjtimex(2) with no modes set only reads, and may be forbidden."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _UNSYNCHRONISED
