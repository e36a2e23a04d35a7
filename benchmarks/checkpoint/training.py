"""How much saves slow the steps of a training that uses every core."""

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
from evidence.machine import MOST_STOLEN, Steal
from evidence.result import Cell, Column, Figure, Table, Target, figure
from torch.distributed.checkpoint import async_save  # type: ignore[attr-defined]

from checkpoint.candidates import State
from hpc_elastic.checkpoint import Checkpointer

ROUNDS = 12
MOST_SLOWER = 5.0
"""Per cent."""
SEGMENT_S = 1.5
"""Steps are made for so long alone, and at most so long beside a save, in turns."""
PATIENCE_S = 120.0
IsIdle = Callable[[], bool]
Begin = Callable[[int], IsIdle]
"""Begins the save of a step; what it returns tells whether the save has ended."""


@dataclass(frozen=True)
class Slowdown:
    """What saves did to the steps; seconds, and shares of a step.

    Attributes:
        name: Who saved.
        steps_s: Of the steps alone.
        slower: By how much they were slower beside a save, of each round that counts.
        saves_s: How long each save took.
    """

    name: str
    steps_s: list[float]
    slower: list[float]
    saves_s: list[float]

    @property
    def target(self) -> Target:
        value = 100 * statistics.median(self.slower) if self.slower else None
        why = "" if self.slower else "all rounds were disturbed"
        return Target("steps beside a save: slower by", MOST_SLOWER, value, "%", why=why)

    def row(self) -> tuple[Cell, ...]:
        slower = figure([100 * share for share in self.slower]) or "all rounds disturbed"
        left_out = f"{len(self.saves_s) - len(self.slower)} of {len(self.saves_s)}"
        steps = Figure(1000 * statistics.median(self.steps_s)) if self.steps_s else ""
        return self.name, steps, slower, figure(self.saves_s), left_out


def table(slowed: list[Slowdown]) -> Table:
    columns = (
        Column("saved by"), Column("steps, ms", ".1f"), Column("slower by, %", "+.1f"),
        Column("a save takes, s", ".1f"), Column("rounds left out"),
    )  # fmt: skip
    return Table("a training beside saves", columns, tuple(s.row() for s in slowed))


def slowdown(state: State, folder: Path, rounds: int) -> list[Slowdown]:
    steps = training()
    with Checkpointer({"state": state}, folder / "steps", keep_last=1) as c:
        ours = measured("ours", steps, our_saves(c), rounds)
    return [ours, measured("DCP async_save", steps, dcp_saves(state, folder / "dcp"), rounds)]


def measured(name: str, steps: Iterator[float], begin: Begin, rounds: int) -> Slowdown:
    found = Slowdown(name, [], [], [])
    for number in range(1, rounds + 1):
        before, stolen_before = segment(steps, lambda: False)
        is_idle, began = begin(number), time.perf_counter()
        beside, stolen_beside = segment(steps, is_idle)
        while not is_idle() and time.perf_counter() < began + PATIENCE_S:
            next(steps)
        found.saves_s.append(time.perf_counter() - began)
        if max(stolen_before, stolen_beside) <= MOST_STOLEN:
            found.slower.append(statistics.fmean(beside) / statistics.fmean(before) - 1)
            found.steps_s.extend(before)
        time.sleep(0.5)  # what is removed is discarded meanwhile
    return found


def segment(steps: Iterator[float], is_over: IsIdle) -> tuple[list[float], float]:
    """Make steps for a while; return what each took, and the share of CPU time the host took."""
    steal, end, taken = Steal(), time.perf_counter() + SEGMENT_S, [next(steps)]
    while time.perf_counter() < end and not is_over():
        taken.append(next(steps))
    return taken, steal.share()


def our_saves(c: Checkpointer) -> Begin:
    c.save(0, urgent=True)

    def begin(number: int) -> IsIdle:
        c.save(number)
        return lambda: c.is_idle

    return begin


def dcp_saves(state: State, folder: Path) -> Begin:
    def begin(number: int) -> IsIdle:
        shutil.rmtree(folder / str(number - 2), ignore_errors=True)
        saving = async_save(state, checkpoint_id=folder / str(number))
        assert isinstance(saving, Future)  # without a stager it is
        return saving.done

    return begin


def training() -> Iterator[float]:
    """Make steps; yield the seconds of each."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(256, 512)
    while True:
        begin = time.perf_counter()
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield time.perf_counter() - begin
