"""A matrix product on each GPU of this process: ``python -m hpc_elastic.agent.gpu_check``.

It prints one line of JSON: ``{"problem": null}``, or the problem. The numbers are small integers,
so that every order of addition gives the same sum in each precision.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

_SIZE = 1024
_ROUNDED = 2**-7, 1.0
"""Relative and absolute tolerance of sums that are rounded to bfloat16."""


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


def main() -> None:
    """Check every device."""
    problem = None
    if torch.version.cuda or torch.version.hip:
        try:
            devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
            problem = problem_of(devices) if devices else "torch sees no GPU"
        except RuntimeError as e:
            problem = f"{type(e).__name__}: {str(e).splitlines()[0]}"
    print(json.dumps({"problem": problem}))


if __name__ == "__main__":
    main()
