"""Health checks of a node before it joins, run beside the imports so that they cost no time.

GPUs         All GPUs of the task are there, and other users' data fills less than half of each
             (nvidia-smi, if installed). Signs of a GPU that is, or will be, slower than the others
             are only reported: `_SIGNS`, and the rate of the products below.
Arithmetic   A product of integer matrices is exact: on the CPU, and on each GPU in a process of its
             own (`gpu_check`), which holds no GPU memory afterwards.
Space        In /dev/shm, which data loaders and shared pages use, and in the folder of the logs.
             The latter is shared, so a full one is only reported.
Clock        It differs from the shared file system's by at most `SKEW_S`.

The run's tasks avoid a node that fails for a time, and its task goes back to the queue
(`node_agent.exclude_node`). Then the node is checked again.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_elastic import _util, gpus

_log = logging.getLogger(__name__)

SKEW_S = 60.0
_LOG_BYTES = 64 << 20
_SHM, _SHM_BYTES = Path("/dev/shm"), 16 << 20
_GPU_CHECK_S = 120.0
_WAIT_S = 5.0  # longest wait after the imports for checks without a GPU; those of GPUs get more
_SIZE = 192
_WIDTH, _WIDEST = "pcie.link.width.current", "pcie.link.width.max"
_SIGNS = {
    "ecc.errors.uncorrected.volatile.total": (("0",), "uncorrected ECC errors"),
    "clocks_throttle_reasons.hw_slowdown": (("Not Active",), "slowed down by heat or power"),
    _WIDTH: ((), "lanes of its PCIe link are down"),
    "remapped_rows.pending": (("0", "No"), "rows of memory that a reset replaces"),
    "remapped_rows.failure": (("0", "No"), "rows of memory that cannot be replaced"),
}
"""What nvidia-smi shows of a sound GPU, and what another value is a sign of."""


@dataclass(frozen=True)
class Problem:
    """A failed check of a node: ``gpus``, ``memory``, ``arithmetic``, ``space`` or ``clock``.

    ``is_nodes``: it is this node's own; otherwise it is only reported, and the node joins.
    """

    check: str
    reason: str
    is_nodes: bool = True


def judge_gpus(
    granted: Sequence[str], listed: Sequence[gpus.Gpu], *, shared: bool
) -> Problem | None:
    """Compare the granted GPUs, perhaps ``shared`` with others, with those of nvidia-smi."""
    whole = [name for name in granted if not name.startswith("MIG-")]
    if len(listed) < len(whole):
        reason = f"{len(whole)} GPUs were granted, but nvidia-smi lists {len(listed)}"
        return Problem("gpus", reason)
    if shared or len(whole) < len(granted):
        return None
    for gpu in listed:
        if gpu.is_one_of(granted) and gpu.total and (gpu.used or 0) > gpu.total / 2:
            taken = f"{gpu.used} of its {gpu.total} MiB are used by others"
            return Problem("memory", f"GPU {gpu.index}: {taken}")
    return None


def judge_clock(skew_s: float, took_s: float) -> Problem | None:
    """Check by how much the file system's clock is ahead, with the precision of the measurement."""
    if abs(skew_s) - took_s <= SKEW_S:
        return None
    ahead = "behind" if skew_s > 0 else "ahead of"
    reason = f"this node's clock is {abs(skew_s):.0f} s {ahead} the shared file system's"
    return Problem("clock", f"{reason}: have it set (chrony, ntp)")


def check_space(folder: Path, needed: int, *, is_nodes: bool) -> Problem | None:
    """Check the free space, in bytes, of a folder's file system; ``is_nodes``: it is the node's."""
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return None
    reason = f"{folder} has {free >> 20} MiB free, and {needed >> 20} are needed"
    return Problem("space", reason, is_nodes=is_nodes)


def check_arithmetic() -> Problem | None:
    """Multiply matrices of small integers, and check the product exactly."""
    import numpy as np

    a = (np.arange(_SIZE * _SIZE).reshape(_SIZE, _SIZE) % 7).astype(np.int64)
    b = (a.T * 3 + 1) % 5
    expected = a @ b
    for kind in (np.float32, np.float64):
        if not (a.astype(kind) @ b.astype(kind) == expected).all():
            return Problem("arithmetic", f"a product of {kind.__name__} matrices is wrong")
    return None


def check_clock(folder: Path) -> Problem | None:
    """Write a file, and compare its time with this node's."""
    before = time.time()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock.") as file:
        file.write(b"?")
        file.flush()
        os.fsync(file.fileno())
        written = Path(file.name).stat().st_mtime
    after = time.time()
    return judge_clock(written - (before + after) / 2, after - before)


def check_gpus(granted: Sequence[str], *, shared: bool) -> Problem | None:
    """Check the GPUs by nvidia-smi; None without it."""
    if not granted or not gpus.has_nvidia_smi():
        return None
    try:
        return judge_gpus(granted, gpus.list_gpus(), shared=shared)
    except subprocess.TimeoutExpired:
        reason = f"nvidia-smi does not answer for {gpus.SMI_TIMEOUT_S:.0f} s"
    except (OSError, ValueError) as e:
        reason = f"nvidia-smi reports: {e}"
    return Problem("gpus", reason)


def check_gpu_health(granted: Sequence[str]) -> Problem | None:
    """Look for signs of a GPU that slows the others down; none where nvidia-smi shows none.

    Source: nvidia-smi(1), and ``nvidia-smi --help-query-gpu``, ``--help-query-remapped-rows``.
    """
    if not granted or not gpus.has_nvidia_smi():
        return None
    shown: dict[str, dict[str, str]] = {}
    of_rows = [name for name in _SIGNS if name.startswith("remapped_rows.")]
    for query, uuid, names in (
        ("gpu", "uuid", ["index", *(name for name in _SIGNS if name not in of_rows), _WIDEST]),
        ("remapped-rows", "gpu_uuid", of_rows),
    ):
        fields = [uuid, *names]
        try:
            rows = gpus.query_gpus(query, fields)
        except subprocess.TimeoutExpired:
            return None  # `check_gpus` meets that as well
        except ValueError:
            continue
        for values in rows:
            if len(values) == len(fields):
                shown.setdefault(values[0], {}).update(zip(fields, values, strict=True))
    signs = []
    for uuid, gpu in shown.items():
        if not {"?", uuid, gpu.get("index")} & {*granted}:
            continue
        for name, (well, sign) in _SIGNS.items():
            if name in gpu and gpu[name] not in (*(well or (gpu[_WIDEST],)), *gpus.NOT_MEASURED):
                signs.append(f"GPU {gpu.get('index', uuid)}: {sign} ({gpu[name]})")
    return Problem("gpus", "; ".join(signs), is_nodes=False) if signs else None


def check_gpu_arithmetic(
    granted: Sequence[str], numa: str | None = None, seen: dict[str, Any] | None = None
) -> Problem | None:
    """Multiply matrices on each GPU in a process of its own.

    ``seen`` receives what the process prints: the number of the GPUs, and, if ``numa``
    (``launcher.agent.numa``) is given and they are known, the CPUs near each. An OSError, if the
    process cannot be started, shows nothing about the GPUs.
    """
    if not granted or not gpus.can_be_used_by_torch():
        return None
    try:
        check = [sys.executable, "-P", "-m", "hpc_elastic.agent.gpu_check", *filter(None, [numa])]
        done = _util.run(check, timeout_s=_GPU_CHECK_S)
        found = json.loads(done.stdout.strip().splitlines()[-1])
        problem = found["problem"]
        if seen is not None:
            seen |= found
            if numa is not None and not seen["cpus"] and not problem:
                _log.error("workers are not bound to CPUs: %s", done.stderr.strip()[-300:])
        if problem is None and found.get("slow"):
            return Problem("gpus", found["slow"], is_nodes=False)
    except subprocess.TimeoutExpired:
        problem = f"a product of matrices is not done after {_GPU_CHECK_S:.0f} s"
    except (ValueError, LookupError, TypeError):
        lines = done.stderr.strip().splitlines()
        problem = f"the check ended with code {done.returncode}: {(lines or ['?'])[-1]}"
    return Problem("arithmetic", problem) if problem else None


class Preflight:
    """The checks of one node, which run beside its imports.

    ``folder`` is that of the task's logs, on the shared file system; ``granted`` are its GPUs
    (`granted_gpus`), ``shared``: others may use them too.
    """

    def __init__(
        self, folder: Path, granted: Sequence[str], *, shared: bool, numa: str | None = None
    ) -> None:
        self._seen: dict[str, Any] = {}
        self._problems: list[Problem] = []
        self._threads = [
            threading.Thread(target=self._run, args=checks, daemon=True, name="preflight")
            for checks in (
                (check_arithmetic, lambda: check_space(_SHM, _SHM_BYTES, is_nodes=True)),
                (
                    lambda: check_clock(folder),
                    lambda: check_space(folder, _LOG_BYTES, is_nodes=False),
                ),
                (
                    lambda: check_gpus(granted, shared=shared),
                    lambda: check_gpu_arithmetic(granted, numa, self._seen),
                ),
                (lambda: check_gpu_health(granted),),
            )
        ]
        self._wait_s = _WAIT_S + (gpus.SMI_TIMEOUT_S + _GPU_CHECK_S if granted else 0.0)
        for thread in self._threads:
            thread.start()

    @property
    def cpus(self) -> list[list[int]]:
        """The CPUs near each GPU, with `numa`, once `problems` has returned."""
        return list(self._seen.get("cpus", ()))

    @property
    def num_gpus(self) -> int | None:
        """How many GPUs torch sees, once `problems` has returned; None if unknown."""
        return self._seen.get("gpus")

    def problems(self) -> list[Problem]:
        """Wait for the checks, and return the problems; the node's own first.

        A check that does not end in time has no result: the file system may hang for a while.
        """
        deadline = time.monotonic() + self._wait_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return sorted(self._problems, key=lambda p: not p.is_nodes)

    def _run(self, *checks: Callable[[], Problem | None]) -> None:
        for check in checks:
            try:
                problem = check()
            except Exception as e:  # an error of the check shows nothing about the node
                _log.warning("a check of this node could not run: %s: %s", type(e).__name__, e)
                continue
            if problem is not None:
                self._problems.append(problem)
                return
