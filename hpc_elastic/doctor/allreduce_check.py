"""An all_reduce of torch across the nodes of the probe: whether it works, and how fast.

It runs in a process of its own, on the nodes only, because it may hang; then it is killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from hpc_elastic import _util

TIMEOUT_S = 120.0
_GROUP_TIMEOUT = timedelta(seconds=60)
"""Longer than the import of torch may differ between nodes."""
_NUM_FLOATS = 1 << 20


@dataclass(frozen=True)
class AllreduceResult:
    """Result of the all_reduce on one node.

    ``import_s`` is the import time of torch, None if the import failed. ``bandwidths`` are bytes
    per second of an all_reduce of 4 MiB, by backend. ``problems`` are errors by backend (or
    ``torch``).
    """

    import_s: float | None = None
    cuda_devices: int = 0
    bandwidths: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def run_allreduce(
    rank: int, world_size: int, host: str, port: int, variables: Mapping[str, str]
) -> AllreduceResult:
    """Run the all_reduce in a process, bounded in time; ``port`` is free at ``host``, rank 0's."""
    argv = [sys.executable, "-P", "-m", "hpc_elastic.doctor.allreduce_check"]
    argv += [str(rank), str(world_size), host, str(port)]
    try:
        done = _util.run(argv, timeout_s=TIMEOUT_S, env={**os.environ, **variables})
    except subprocess.TimeoutExpired:
        return AllreduceResult(problems={"torch": f"no end within {TIMEOUT_S:.0f} s"})
    try:
        return AllreduceResult(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        last = done.stderr.strip().splitlines()[-1:] or ["it ended without a message"]
        return AllreduceResult(problems={"torch": last[0][:300]})


def measure_allreduce(rank: int, world_size: int, host: str, port: int) -> AllreduceResult:
    """Run an all_reduce through every available backend (in that process)."""
    start = time.monotonic()
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    import_s = time.monotonic() - start
    devices = torch.cuda.device_count()
    bandwidths: dict[str, float] = {}
    problems: dict[str, str] = {}
    try:
        store = TCPStore(host, port, world_size, is_master=rank == 0, timeout=_GROUP_TIMEOUT)
    except Exception as e:  # torch raises RuntimeError and its own
        return AllreduceResult(import_s, devices, {}, {"gloo": _first_line(e)})
    for backend in ("gloo", "nccl") if devices else ("gloo",):
        try:
            bandwidths[backend] = _reduce(backend, rank, world_size, store)
        except Exception as e:
            problems[backend] = _first_line(e)
    store.set(f"done-{rank}", "")
    if rank == 0 and not problems:  # rank 0 serves the store until all are done
        store.wait([f"done-{r}" for r in range(world_size)], _GROUP_TIMEOUT)
    return AllreduceResult(import_s, devices, bandwidths, problems)


def _reduce(backend: str, rank: int, world_size: int, store: Any) -> float:
    """Return the bandwidth of an all_reduce; raise RuntimeError on a failure or a wrong sum."""
    import torch
    from torch import distributed
    from torch.distributed.distributed_c10d import PrefixStore

    named = PrefixStore(backend, store)
    distributed.init_process_group(
        backend, store=named, rank=rank, world_size=world_size, timeout=_GROUP_TIMEOUT
    )
    try:
        device = "cuda:0" if backend == "nccl" else "cpu"
        tensor = torch.full((_NUM_FLOATS,), float(rank + 1), device=device)
        distributed.all_reduce(tensor)
        if tensor[-1].item() != world_size * (world_size + 1) / 2:
            raise RuntimeError(f"the sum of the ranks came back as {tensor[-1].item()}")
        start = time.monotonic()
        distributed.all_reduce(tensor)
        tensor[0].item()
        return 4 * _NUM_FLOATS / (time.monotonic() - start)
    finally:
        distributed.destroy_process_group()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


if __name__ == "__main__":
    answer = measure_allreduce(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    print(json.dumps(asdict(answer)), flush=True)
    os._exit(0)  # a failed group may hang at exit
