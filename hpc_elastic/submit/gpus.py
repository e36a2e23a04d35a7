"""Which GPUs of this machine each node of a local run gets.

Local nodes are processes on one machine; left alone, each would take GPU 0. So, as long as there
are GPUs at all, the nodes of a run get equal shares of them, in order, through
CUDA_VISIBLE_DEVICES:

    4 GPUs, nodes=1:2     node 0 gets 0,1 and node 1 gets 2,3
    8 GPUs, nodes=3       two each; the last two are not used
    1 GPU, nodes=1:2      refused: two processes of a group can not share a GPU in NCCL
    nproc_per_node=cpu    no node gets any: the workers are to run on CPUs

Different runs of a sweep share the machine's GPUs. The machine's GPUs are those of
CUDA_VISIBLE_DEVICES if that is set, else all. torch is not asked: it takes seconds to import.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from hpc_elastic import commands
from hpc_elastic.config import Nproc
from hpc_elastic.errors import ConfigError
from hpc_elastic.slurm.environment import GPUS, listed_gpus
from hpc_elastic.submit.plan import PlannedRun
from hpc_elastic.words import counted

_PROC = Path("/proc/driver/nvidia/gpus")
_TIMEOUT_S = 20.0


def machine_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that a process with this environment may use, as CUDA names them."""
    given = environ.get(GPUS)
    return [str(n) for n in range(_count())] if given is None else listed_gpus(given)


def share(gpus: Sequence[str], slot: int, num_nodes: int) -> list[str]:
    """Return the GPUs of one node: consecutive ones, as many as every other node gets (pure).

    Args:
        gpus: The machine's.
        slot: Which node, from 0.
        num_nodes: The most nodes that the run may have.
    """
    size = len(gpus) // num_nodes
    return list(gpus[slot * size : (slot + 1) * size])


def variables(gpus: Sequence[str], nproc: Nproc, *, slot: int, num_nodes: int) -> dict[str, str]:
    """Return what a node finds in its environment of GPUs; nothing where there are none (pure)."""
    if not gpus:
        return {}
    return {GPUS: "" if nproc == "cpu" else ",".join(share(gpus, slot, num_nodes))}


def require_enough(runs: Iterable[PlannedRun], gpus: Sequence[str]) -> None:
    """Refuse a run with more nodes than there are GPUs, if it would use them (pure).

    Raises:
        ConfigError: a run has such nodes; names both numbers.
    """
    for run in runs:
        nodes = run.settings.nodes
        if gpus and nodes.max > len(gpus) and run.settings.nproc_per_node != "cpu":
            value = nodes.max if nodes.min == nodes.max else f"{nodes.min}:{nodes.max}"
            most = counted(len(gpus), "node")
            remedy = (
                f"launcher=local gives each of the {nodes.max} nodes GPUs of its own, and this "
                f"machine has {counted(len(gpus), 'GPU')}; ask for {most} at most, or set "
                "nproc_per_node=cpu to use none"
            )
            raise ConfigError("nodes", value, remedy)


@cache
def _count() -> int:
    try:
        done = commands.run(["nvidia-smi", "-L"], timeout_s=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return len(list(_PROC.iterdir())) if _PROC.is_dir() else 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
