"""The GPUs of this machine without torch: those that its drivers show, and what nvidia-smi reports.

The GPUs that a task was given stand in its environment: `hpc_elastic.slurm.environment`.
"""

from __future__ import annotations

import importlib.util
import runpy
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic import _util

NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU of this machine, by NVIDIA's driver."""
_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
"""A folder for each CPU and GPU, by AMD's; ``gpu_id`` is 0 of a CPU (kfd_topology.c in Linux)."""
SMI_TIMEOUT_S = 20.0
_LIST_TIMEOUT_S = 30.0
NOT_MEASURED = ("[N/A]", "[Not Supported]")
_INFOROM_CORRUPTED = 14
"""nvidia-smi(1): a warning about a memory for the board's own records, with which GPUs work."""


def driver_gpus() -> list[Path]:
    """Return a folder for each GPU of this machine, granted or not; no driver is called."""
    found = list(NVIDIA_GPUS.glob("*"))
    for path in _AMD_NODES.glob("*/gpu_id"):
        with suppress(OSError):  # a cgroup may hide it
            found += [path.parent] if path.read_text().strip() not in ("", "0") else []
    return found


def can_be_used_by_torch() -> bool:
    """Return whether the installed torch is built for GPUs; its file says so, without an import."""
    try:
        found = importlib.util.find_spec("torch")
        if found is None or found.origin is None:
            return True
        version = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    except Exception:  # whatever the file holds: torch itself will tell
        return True
    return any(version.get(kind) for kind in ("cuda", "hip", "rocm", "xpu"))


def has_nvidia_smi() -> bool:
    """Return whether nvidia-smi is installed; it is on login nodes, too."""
    return shutil.which("nvidia-smi") is not None


def count_devices() -> tuple[int, int] | None:
    """Return the numbers of GPUs and of MIG slices by nvidia-smi; None if it cannot be asked."""
    try:
        output = _util.run(["nvidia-smi", "-L"], timeout_s=_LIST_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    kinds = [line.split(maxsplit=1)[0] for line in output.splitlines() if line.strip()]
    return kinds.count("GPU"), kinds.count("MIG")


def query_gpus(what: str, fields: Iterable[str]) -> list[list[str]]:
    """Return the values of fields, for each GPU; an error of one GPU is a row like any other.

    ``what`` is ``gpu`` or ``remapped-rows``, with the fields of ``nvidia-smi --help-query-gpu`` and
    ``--help-query-remapped-rows``. Raises subprocess.TimeoutExpired; OSError if it cannot be
    started; ValueError if it reports an error, which is the message.
    """
    argv = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    done = _util.run(argv, timeout_s=SMI_TIMEOUT_S)
    if done.returncode not in (0, _INFOROM_CORRUPTED):
        raise ValueError((done.stdout + done.stderr).strip())
    lines = (line.strip() for line in done.stdout.splitlines())
    return [
        [value.strip() for value in line.split(",")]
        for line in lines
        if line and not line.startswith("WARNING:")
    ]


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it; memory in MiB.

    The memory is None where it is not measured, as on boards that share the host's; ``use``, the
    percentage of the last moments in which a kernel ran, also with MIG.
    """

    index: str
    uuid: str
    total: int | None
    used: int | None
    use: int | None = None

    def is_one_of(self, granted: Sequence[str]) -> bool:
        """Return whether it is one of `hpc_elastic.slurm.environment.granted_gpus`."""
        return self.index in granted or self.uuid in granted


def list_gpus() -> list[Gpu]:
    """Return this node's GPUs; errors are `query_gpus`'s, and ValueError for one that is broken."""
    fields = ("index", "uuid", "memory.total", "memory.used", "utilization.gpu")
    found = []
    for row in query_gpus("gpu", fields):
        try:
            index, uuid, *sizes, use = row
            total, used = (None if size in NOT_MEASURED else int(size) for size in sizes)
        except ValueError as e:
            raise ValueError(", ".join(row)) from e
        found.append(Gpu(index, uuid, total, used, int(use) if use.isdecimal() else None))
    return found
