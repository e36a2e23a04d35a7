"""How much saves slow the steps of a training that uses every core."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from hpc_elastic.checkpoint import Checkpointer

ROUNDS = 5
STEPS = 60


def slowdown(state: dict[str, torch.Tensor], folder: Path) -> str:
    """Time the steps of a training, alone and with a save under way all the time, in turns."""
    steps = training()
    alone, beside = [], []
    number = itertools.count(1)
    with Checkpointer(folder / "steps", {"state": state}, keep_last=1) as c:
        c.save(next(number), urgent=True)
        for _ in range(ROUNDS):
            c.wait()
            alone += [next(steps) for _ in range(STEPS)]
            c.save(next(number))
            until = time.perf_counter() + sum(alone[-STEPS:])
            while time.perf_counter() < until and not c.is_idle:
                beside.append(next(steps))
    middle = statistics.median(alone), statistics.median(beside)
    return (
        f"a step of {1000 * middle[0]:.1f} ms takes {1000 * middle[1]:.1f} ms while a save is "
        f"written: {100 * (middle[1] / middle[0] - 1):+.1f} % (target: below 5 %)"
    )


def training() -> Iterator[float]:
    """Make steps; give the seconds of each."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(256, 512)
    while True:
        begin = time.perf_counter()
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield time.perf_counter() - begin
