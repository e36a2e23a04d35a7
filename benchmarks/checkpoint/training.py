"""How much saves slow the steps of a training that uses every core."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
import torch.distributed.checkpoint as dcp
from rich.table import Table

from checkpoint.candidates import State
from hpc_elastic.checkpoint import Checkpointer

ROUNDS = 12
SEGMENT_S = 1.5
"""Steps are made for so long alone, and at most so long beside a save, in turns."""
PATIENCE_S = 120.0
MOST_STOLEN = 0.05
"""A round in which the host took more of the cores than that says nothing about saves."""
IsIdle = Callable[[], bool]
Begin = Callable[[int], IsIdle]
"""Begins the save of a step; what it returns tells whether the save has ended."""


def slowdown(state: State, folder: Path) -> Table:
    """Time the steps of a training, alone and beside saves."""
    table = Table("saved by", "steps", "slower by (target: 5 %)", "a save takes", "rounds left out")
    steps = training()
    with Checkpointer(folder / "steps", {"state": state}, keep_last=1) as c:
        table.add_row("ours", *measured(steps, our_saves(c)))
    table.add_row("DCP async_save", *measured(steps, dcp_saves(state, folder / "dcp")))
    return table


def measured(steps: Iterator[float], begin: Begin) -> tuple[str, str, str, str]:
    """Return a row of the table, but for its name."""
    slower, lengths, alone = [], [], []
    for number in range(1, ROUNDS + 1):
        before, stolen_before = segment(steps, lambda: False)
        is_idle, began = begin(number), time.perf_counter()
        beside, stolen_beside = segment(steps, is_idle)
        while not is_idle() and time.perf_counter() < began + PATIENCE_S:
            next(steps)
        lengths.append(time.perf_counter() - began)
        if max(stolen_before, stolen_beside) <= MOST_STOLEN:
            slower.append(statistics.fmean(beside) / statistics.fmean(before) - 1)
            alone += before
        time.sleep(0.5)  # what is removed is discarded meanwhile
    if not slower:
        return "", "all rounds disturbed", f"{statistics.median(lengths):.1f} s", f"{ROUNDS}"
    span = f"{100 * min(slower):+.0f} to {100 * max(slower):+.0f}"
    return (
        f"{1000 * statistics.median(alone):.1f} ms",
        f"{100 * statistics.median(slower):+.1f} % ({span})",
        f"{statistics.median(lengths):.1f} s",
        f"{ROUNDS - len(slower)} of {ROUNDS}",
    )


def segment(steps: Iterator[float], is_over: IsIdle) -> tuple[list[float], float]:
    """Make steps for a while; return what each took, and the share of CPU time the host took."""
    before, end, taken = psutil.cpu_times(), time.perf_counter() + SEGMENT_S, [next(steps)]
    while time.perf_counter() < end and not is_over():
        taken.append(next(steps))
    after = psutil.cpu_times()
    passed = sum(after[:8]) - sum(before[:8])
    return taken, (after.steal - before.steal) / max(passed, 1e-3)


def our_saves(c: Checkpointer) -> Begin:
    """Return how we save."""
    c.save(0, urgent=True)

    def begin(number: int) -> IsIdle:
        c.save(number)
        return lambda: c.is_idle

    return begin


def dcp_saves(state: State, folder: Path) -> Begin:
    """Return how torch.distributed.checkpoint saves."""

    def begin(number: int) -> IsIdle:
        shutil.rmtree(folder / str(number - 2), ignore_errors=True)
        return dcp.async_save(state, checkpoint_id=folder / str(number)).done

    return begin


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
