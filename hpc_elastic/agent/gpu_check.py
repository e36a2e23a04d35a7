"""A matrix product on each GPU of this process: ``python -m hpc_elastic.agent.gpu_check [NUMA]``.

It prints one line of JSON: ``{"problem": null, "slow": null, "cpus": [], "gpus": 8}``, or what is
wrong; ``gpus`` is the number that torch sees. The numbers are small integers, so that every order
of addition gives the same sum in each precision. A GPU is slow if it makes less than `_SLOW` of the
products of the median GPU of the node.

NUMA is a value of ``launcher.agent.numa``: then ``cpus`` are those near each GPU. Only a process
that has opened the GPUs knows where they are.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch

_SIZE = 1024
_MEASURED_S, _SLOW = 0.2, 0.7
_ROUNDED = 2**-7, 1.0  # relative and absolute tolerance of sums that are rounded to bfloat16


def problem_of(devices: Sequence[torch.device]) -> str | None:
    """Return what is wrong with the arithmetic of a device; they compute at the same time."""
    a = (torch.arange(_SIZE * _SIZE, dtype=torch.int64).reshape(_SIZE, _SIZE) * 31 % 7) - 3
    b = (a.T * 3) % 5 - 2
    expected = (a @ b).float()

    def of_one(device: torch.device) -> str | None:
        for kind in (torch.float32, torch.bfloat16):
            rtol, atol = _ROUNDED if kind is torch.bfloat16 else (0.0, 0.0)
            product = (a.to(device, kind) @ b.to(device, kind)).float().cpu()
            if not torch.allclose(product, expected, rtol=rtol, atol=atol):
                return f"GPU {device.index}: a product of {kind} matrices is wrong"
        return None

    with ThreadPoolExecutor(max(1, len(devices))) as pool:  # a context takes half a second
        return next(filter(None, pool.map(of_one, devices)), None)


def slow_gpu(devices: Sequence[torch.device]) -> str | None:
    """Return which GPU computes slower than the others of the node, at the same time as they do."""

    def rate(device: torch.device) -> float:
        a = torch.ones(_SIZE, _SIZE).to(device, torch.float32)
        begin, num = time.monotonic(), 0
        while num == 0 or time.monotonic() < begin + _MEASURED_S:
            (a @ a)[0, 0].item()  # once it is there
            num += 1
        return num / (time.monotonic() - begin)

    with ThreadPoolExecutor(max(1, len(devices))) as pool:
        rates = list(pool.map(rate, devices))
    share, device = min(zip(rates, devices, strict=True), key=lambda each: each[0])
    share /= median(rates)
    return (
        f"GPU {device.index} computes at {share:.0%} of the others' rate" if share < _SLOW else None
    )


def cpus_near(num_gpus: int, numa: str) -> list[list[int]]:
    """Return the CPUs to which torch would bind the worker of each GPU.

    Its function has a private name; test_preflight fails if torch changes it.
    """
    binding = importlib.import_module("torch.numa.binding")
    options = binding.NumaOptions(binding.AffinityMode(numa))
    find = binding._get_logical_cpus_to_bind_to
    return [sorted(find(gpu_index=i, numa_options=options)) for i in range(num_gpus)]


def main(numa: str | None = None) -> None:
    """Check every device."""
    problem, slow, cpus = None, None, list[list[int]]()
    devices: list[torch.device] = []
    if torch.version.cuda or torch.version.hip:
        try:
            devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
            problem = problem_of(devices) if devices else "torch sees no GPU"
            slow = slow_gpu(devices) if problem is None else None
        except RuntimeError as e:
            problem = f"{type(e).__name__}: {str(e).splitlines()[0]}"
        if numa is not None and problem is None:
            try:
                cpus = cpus_near(len(devices), numa)
            except Exception as e:  # the system's files, or torch's function
                print(f"launcher.agent.numa={numa}: {type(e).__name__}: {e}", file=sys.stderr)
    print(json.dumps({"problem": problem, "slow": slow, "cpus": cpus, "gpus": len(devices)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
