"""Is this node fit to join? Looked at before it does, beside the imports, so that it costs no time.

GPUs         as many as the task was given are there, none is lost, and none is half full of
             somebody else's data (nvidia-smi, where there is one).
Arithmetic   a product of matrices of whole numbers is right to the last bit: on the CPU, and on
             each GPU in a process of its own (`gpu_check`), which holds no GPU memory afterwards.
Space        in /dev/shm, where data loaders and control pages live, and where the logs go. The
             latter is shared: that it is full is no fault of this node's, so it is only told.
Clock        is not further from the shared file system's than `SKEW_S`.

A node that is not fit is avoided by the run's tasks (excluded.json), and goes back to the queue.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic import _util
from hpc_elastic.agent.task_context import Task
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.slurm.environment import granted_gpus
from hpc_elastic.slurm.requeue import excluded
from hpc_elastic.slurm.scheduler import Scheduler

_log = logging.getLogger(__name__)

SKEW_S = 60.0
_LOG_BYTES = 64 << 20
_SHM_BYTES = 16 << 20
_NVIDIA_SMI_S = 20.0
_GPU_CHECK_S = 120.0
_WAIT_S = 5.0
"""For the checks that use no GPU, once everything is imported; those of GPUs have as much more."""
_SIZE = 192
_QUERY = ["--query-gpu=index,uuid,memory.total,memory.used", "--format=csv,noheader,nounits"]


@dataclass(frozen=True)
class Problem:
    """Why a node is not fit.

    Attributes:
        check: ``gpus``, ``memory``, ``arithmetic``, ``space`` or ``clock``.
        reason: For people.
        is_nodes: Whether it is this node's own; else it is told, and the node joins.
    """

    check: str
    reason: str
    is_nodes: bool = True


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it; memory in MiB."""

    index: str
    uuid: str
    total: int
    used: int


# ---- what is a problem (pure) -----------------------------------------------------------------


def parse_gpus(answer: str) -> list[Gpu]:
    """Return what nvidia-smi lists.

    Raises:
        ValueError: a line is no GPU that works; it is the message.
    """
    found = []
    for line in filter(None, map(str.strip, answer.splitlines())):
        try:
            index, uuid, total, used = (field.strip() for field in line.split(","))
            found.append(Gpu(index, uuid, int(total), int(used)))
        except ValueError as e:
            raise ValueError(line) from e
    return found


def judge_gpus(granted: Sequence[str], listed: Sequence[Gpu], *, shared: bool) -> Problem | None:
    """Compare what was granted with what is there.

    Args:
        granted: See `hpc_elastic.slurm.environment.granted_gpus`.
        listed: What nvidia-smi lists, which may be more than is this task's.
        shared: Whether others may use the same GPUs.
    """
    whole = [name for name in granted if not name.startswith("MIG-")]
    if len(listed) < len(whole):
        reason = f"{len(whole)} GPUs were granted, and nvidia-smi lists {len(listed)}"
        return Problem("gpus", reason)
    if shared or len(whole) < len(granted):
        return None
    ours = [g for g in listed if g.index in granted or g.uuid in granted]
    for gpu in ours:
        if gpu.used > gpu.total / 2:
            taken = f"{gpu.used} of its {gpu.total} MiB are taken by somebody else"
            return Problem("memory", f"GPU {gpu.index}: {taken}")
    return None


def judge_clock(skew_s: float, took_s: float) -> Problem | None:
    """Judge by how much the file system's clock is ahead, measured within so many seconds."""
    if abs(skew_s) - took_s <= SKEW_S:
        return None
    ahead = "behind" if skew_s > 0 else "ahead of"
    reason = f"this node's clock is {abs(skew_s):.0f} s {ahead} the shared file system's"
    return Problem("clock", f"{reason}: have it set (chrony, ntp)")


def judge_space(where: str, free: int, needed: int, *, is_nodes: bool) -> Problem | None:
    """Judge the free space of a file system, in bytes."""
    if free >= needed:
        return None
    reason = f"{where} has {free >> 20} MiB free, and {needed >> 20} are needed"
    return Problem("space", reason, is_nodes=is_nodes)


# ---- looking ------------------------------------------------------------------------------------


def check_arithmetic() -> Problem | None:
    """Multiply matrices of small whole numbers, and check the product exactly."""
    import numpy as np

    a = (np.arange(_SIZE * _SIZE).reshape(_SIZE, _SIZE) % 7).astype(np.int64)
    b = (a.T * 3 + 1) % 5
    expected = a @ b
    for kind in (np.float32, np.float64):
        if not (a.astype(kind) @ b.astype(kind) == expected).all():
            return Problem("arithmetic", f"a product of {kind.__name__} matrices is wrong")
    return None


def check_clock(folder: Path) -> Problem | None:
    """Write a file, and compare its time with ours."""
    before = time.time()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock.") as file:
        file.write(b"?")
        file.flush()
        os.fsync(file.fileno())
        written = Path(file.name).stat().st_mtime
    after = time.time()
    return judge_clock(written - (before + after) / 2, after - before)


def check_shm() -> Problem | None:
    """Look how much space is left in /dev/shm."""
    free = shutil.disk_usage("/dev/shm").free
    return judge_space("/dev/shm", free, _SHM_BYTES, is_nodes=True)


def check_logs(folder: Path) -> Problem | None:
    """Look how much space is left where the logs go."""
    free = shutil.disk_usage(folder).free
    return judge_space(str(folder), free, _LOG_BYTES, is_nodes=False)


def check_gpus(granted: Sequence[str], *, shared: bool) -> Problem | None:
    """Ask nvidia-smi; nothing where there is none."""
    if not granted or shutil.which("nvidia-smi") is None:
        return None
    try:
        done = _util.run(["nvidia-smi", *_QUERY], timeout_s=_NVIDIA_SMI_S)
        if done.returncode != 0:
            raise ValueError((done.stdout + done.stderr).strip())
        return judge_gpus(granted, parse_gpus(done.stdout), shared=shared)
    except subprocess.TimeoutExpired:
        reason = f"nvidia-smi does not answer for {_NVIDIA_SMI_S:.0f} s"
    except (OSError, ValueError) as e:
        reason = f"nvidia-smi says: {e}"
    return Problem("gpus", reason)


def check_gpu_arithmetic(granted: Sequence[str]) -> Problem | None:
    """Let a process multiply matrices on each GPU.

    Raises:
        OSError: it can not be started, which says nothing of the GPUs.
    """
    if not granted:
        return None
    try:
        check = [sys.executable, "-m", "hpc_elastic.agent.gpu_check"]
        done = _util.run(check, timeout_s=_GPU_CHECK_S)
        problem = json.loads(done.stdout.strip().splitlines()[-1])["problem"]
    except subprocess.TimeoutExpired:
        problem = f"a product of matrices is not done after {_GPU_CHECK_S:.0f} s"
    except (ValueError, LookupError, TypeError):
        lines = done.stderr.strip().splitlines()
        problem = f"the check ended with code {done.returncode}: {(lines or ['?'])[-1]}"
    return Problem("arithmetic", problem) if problem else None


class Preflight:
    """The checks of one node, which run beside its imports.

    Args:
        folder: The task's logs, on the shared file system.
        granted: Its GPUs (`granted_gpus`).
        shared: Whether others may use them.
    """

    def __init__(self, folder: Path, granted: Sequence[str], *, shared: bool) -> None:
        self._problems: list[Problem] = []
        self._threads = [
            threading.Thread(target=self._run, args=(check,), daemon=True, name="preflight")
            for check in (
                lambda: self._in_turn(check_arithmetic, check_shm),
                lambda: self._in_turn(lambda: check_clock(folder), lambda: check_logs(folder)),
                lambda: check_gpus(granted, shared=shared) or check_gpu_arithmetic(granted),
            )
        ]
        self._wait_s = _WAIT_S + (_NVIDIA_SMI_S + _GPU_CHECK_S if granted else 0.0)
        for thread in self._threads:
            thread.start()

    def problems(self) -> list[Problem]:
        """Wait for the checks, and return what is wrong; the node's own first.

        A check that does not end in time says nothing: the file system may hang for a while.
        """
        deadline = time.monotonic() + self._wait_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return sorted(self._problems, key=lambda p: not p.is_nodes)

    def _run(self, check: Callable[[], Problem | None]) -> None:
        try:
            problem = check()
        except Exception as e:  # a check that fails says nothing about the node
            _log.warning("a check of this node failed itself: %s: %s", type(e).__name__, e)
            return
        if problem is not None:
            self._problems.append(problem)

    def _in_turn(self, *checks: Callable[[], Problem | None]) -> Problem | None:
        return next(_found(checks), None)


def _found(checks: Sequence[Callable[[], Problem | None]]) -> Iterator[Problem]:
    for check in checks:
        with contextlib.suppress(OSError):
            if problem := check():
                yield problem


def begin(task: Task) -> Preflight:
    """Begin to check a task's node (agent, before it imports torch)."""
    granted = [] if task.spec.nproc_per_node == "cpu" else granted_gpus(os.environ) or []
    shared = task.spec.launcher == "local" or "SLURM_SHARDS_ON_NODE" in os.environ
    return Preflight(task.logs, granted, shared=shared)


def keep_away(problem: Problem, task: Task, scheduler: Scheduler) -> bool:
    """Have the run's tasks avoid this node, unless as many as it may have are avoided already.

    So many at once are no bad nodes: what they have in common is to be looked at.

    Returns:
        Whether the task may go back to the queue, to start on another node.
    """
    host, why = task.slurm.node_name, f"preflight: {problem.reason}"
    if task.spec.launcher != "slurm" or len(excluded(task.run)) >= task.spec.max_nodes:
        return False
    try:
        scheduler.exclude_nodes([host], why)
    except (HpcElasticError, OSError) as e:
        _log.warning("%s may get tasks of this run again: %s", host, e)
    return True
