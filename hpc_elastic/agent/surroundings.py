"""What a task prepares before torch is imported: its workers' environment, and the first spares.

The agent imports torch itself, which takes seconds. Spares that are started before that import it
at the same time, so a node is ready that much earlier.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

from hpc_elastic.agent.lookup import Task
from hpc_elastic.agent.spares import Spares
from hpc_elastic.config import Nproc
from hpc_elastic.files import read_json
from hpc_elastic.slurm.environment import GPUS, listed_gpus

_OPEN_FILES = 65_536
_THREADS = "OMP_NUM_THREADS"
_GIVEN_THREADS = os.environ.get(_THREADS)
"""The user's own, before anything is set here."""
_CPUS_PER_SPARE = 8
"""While the workers train, one spare may import at a time for each so many CPUs."""


def worker_command(task: Task) -> tuple[str, ...]:
    """Return the command line of this task's workers."""
    return (sys.executable, "-u", "-m", "hpc_elastic.agent.worker", str(task.run.path))


def first_spares(task: Task) -> Spares:
    """Start the spares of a task, in the environment of its workers as far as they depend on it."""
    wanted = task.spec.nproc_per_node
    num_workers = likely_workers(wanted, task.slurm.cpus_on_node, os.environ, _num_gpu_devices())
    prepare_environment(task, num_workers)
    num_warming = max(1, len(os.sched_getaffinity(0)) // _CPUS_PER_SPARE)
    slots = num_workers if task.spec.agent.spares else 0
    spares = Spares(slots, worker_command(task), num_warming=num_warming)
    spares.fill(paced=False)
    return spares


def likely_workers(wanted: Nproc, cpus: int, env: Mapping[str, str], num_devices: int) -> int:
    """Return how many workers a node will run, most likely, without asking torch (pure).

    Args:
        wanted: As for `supervise.num_workers`.
        cpus: The CPUs that Slurm gave the task on this node.
        env: The task's environment, in which Slurm says which GPUs are its own.
        num_devices: GPUs of the machine.
    """
    if isinstance(wanted, int):
        return wanted
    if wanted == "cpu":
        return cpus
    gpus = len(listed_gpus(env[GPUS])) if GPUS in env else num_devices
    return max(1, min(gpus, num_devices))


def _num_gpu_devices() -> int:
    return sum(bool(re.fullmatch(r"nvidia\d+", device.name)) for device in Path("/dev").iterdir())


def prepare_environment(task: Task, num_workers: int) -> None:
    """Set what a process reads when it starts; may be repeated for another number of workers."""
    cpus = min(task.slurm.cpus_on_node, len(os.sched_getaffinity(0)))
    share = task.spec.agent.omp_num_threads or max(1, cpus // num_workers)
    os.environ[_THREADS] = _GIVEN_THREADS or str(share)
    os.environ.update(task.spec.env)


def allow_connections() -> None:
    """Let this process have as many open files as a leader may need, within the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


def is_training(status: Path) -> bool:
    """Tell whether a run has a group that trains, by what its leader last wrote."""
    try:
        return (read_json(status) or {}).get("phase") == "training"
    except (OSError, ValueError):
        return False
