"""How long a checkpoint holds up the training, and how long until it is safe; beside torch's ways.

    python benchmarks/checkpoint.py --gib 1 --repeats 7 --directory /some/disk

- *blocked*: until the training loop may change the tensors again;
- *total*: until the checkpoint is on disk (ours: checksummed, synced and committed);
- *restore*: until the state is filled (ours: verified), *cold*, with nothing of the files in the
  page cache, and once more, *warm*. A first one does not count: a virtual machine may have to get
  the memory for the page cache from its host.

The floors are a copy of the same tensors into warm buffers (the C library's memmove, and torch's
copy), a plain write and fsync of the same bytes (through the page cache, and past it), and a plain
read with a checksum. All ways take turns, in a random order, on one state of tensors of
``--tensor-mib``, in one process of one rank; files are removed and the disk is synced in between.
Medians, and the range.

With ``--steps``, a training is timed too, alone and while a save is written, ours and DCP's.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint import floors
from checkpoint.candidates import WAYS, Way, begin_group
from checkpoint.training import slowdown
from rich.console import Console
from rich.table import Table

MEMCPY, TORCH_COPY = "floor: memmove into warm buffers", "floor: torch copy into warm buffers"
WRITE, DIRECT = "floor: write + fsync", "floor: direct write + fsync"
READ = "floor: read + checksum"
COLUMNS = ("blocked", "total", "cold restore", "warm restore")
Times = dict[tuple[str, str], list[float]]
"""Seconds by way and what was measured."""


def make_state(gib: float, tensor_mib: float) -> dict[str, torch.Tensor]:
    """Return random tensors of that size in all."""
    count = max(1, round(gib * 1024 / tensor_mib))
    elements = int(tensor_mib * (1 << 20) / 4)
    return {f"layer{i}.weight": torch.rand(elements) for i in range(count)}


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that something takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def measure(name: str, way: Way, folder: Path, times: Times, *, keep: bool) -> None:
    """Save once and restore once; the first time only warms up."""
    begin = time.perf_counter()
    blocked = way.save(folder / name)
    total = time.perf_counter() - begin
    restored = restores(lambda: way.restore(folder / name), folder)
    if keep:
        for what, seconds in zip(COLUMNS, (blocked, total, *restored), strict=True):
            times.setdefault((name, what), []).append(seconds)


def restores(restore: Callable[[], object], folder: Path) -> tuple[float, float]:
    """Return the seconds that reading takes without the page cache's help, and with it."""
    restore()
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    return timed(restore), timed(restore)


def measure_floors(state: dict, buffers: dict, folder: Path, times: Times) -> None:
    """Copy, write and read the same bytes."""

    def note(name: str, what: str, seconds: float) -> None:
        times.setdefault((name, what), []).append(seconds)

    note(MEMCPY, "blocked", timed(lambda: floors.copy_by_memcpy(state, buffers)))
    note(TORCH_COPY, "blocked", timed(lambda: floors.copy_by_torch(state, buffers)))
    path = folder / "raw"
    note(WRITE, "total", timed(lambda: floors.write(state, path)))
    clean(folder)
    note(DIRECT, "total", timed(lambda: floors.write(buffers, path, direct=True)))
    read = restores(lambda: floors.read_and_checksum(path, buffers), folder)
    for what, seconds in zip(COLUMNS[2:], read, strict=True):
        note(READ, what, seconds)


def clean(folder: Path) -> None:
    """Give every turn the same disk."""
    for path in folder.iterdir():
        if path.name == "ours":
            for step in path.glob("step-*"):
                shutil.rmtree(step)
        elif path.is_dir():
            shutil.rmtree(path)
        elif path.name == "raw":
            path.unlink()
    os.sync()


def run(args: argparse.Namespace, folder: Path) -> Times:
    """Let all ways take turns."""
    state = make_state(args.gib, args.tensor_mib)
    buffers = floors.touched(state)
    ways = {name: make(state) for name, make in WAYS.items() if name in args.ways}
    times: Times = {}
    for repeat in range(args.repeats + 1):
        turns = [*ways, "floors"]
        random.shuffle(turns)
        for name in turns:
            if name != "floors":
                measure(name, ways[name], folder, times, keep=repeat > 0)
            elif repeat > 0:
                measure_floors(state, buffers, folder, times)
            clean(folder)
    return times


def cell(seconds: list[float] | None) -> str:
    """Return a median and its range."""
    if not seconds:
        return ""
    middle = statistics.median(seconds)
    return f"{middle:.3f} [dim]({min(seconds):.3f}-{max(seconds):.3f})[/dim]"


def show(times: Times, args: argparse.Namespace) -> None:
    """Print the table and the ratios that are aimed at."""
    load = os.getloadavg()[0]
    title = f"{args.gib:g} GiB in tensors of {args.tensor_mib:g} MiB, seconds (load {load:.1f})"
    table = Table("", *COLUMNS, title=title)
    for name in dict.fromkeys(name for name, _ in times):
        table.add_row(name, *(cell(times.get((name, what))) for what in COLUMNS))
    console = Console()
    console.print(table)

    def cost(name: str, what: str) -> float:
        return statistics.median(times[name, what])

    def ratio(what: str, floor: str) -> str:
        return f"{cost('ours', what) / cost(floor, what):.2f}"

    if "ours" in args.ways:
        console.print(f"blocked / memmove: {ratio('blocked', MEMCPY)}; target: at most 1.3")
        threads = torch.get_num_threads()
        console.print(f"blocked / torch's copy ({threads} threads): {ratio('blocked', TORCH_COPY)}")
        if dcp := [name for name in args.ways if "DCP" in name]:
            best = min(dcp, key=lambda name: cost(name, "blocked"))
            console.print(f"blocked / {best}: {ratio('blocked', best)}; target: at most 1")
        console.print(f"total / write + fsync: {ratio('total', WRITE)}; target: at most 1.2")
        console.print(f"total / direct write + fsync: {ratio('total', DIRECT)}")
        for what in COLUMNS[2:]:
            console.print(f"{what} / read + checksum: {ratio(what, READ)}; target: at most 1.3")


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--tensor-mib", type=float, default=64.0, help="size of each tensor")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="where to write; default: a temporary one")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", action="store_true", help="time a training's steps too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="checkpoint-") as name:
        begin_group(Path(name))
        show(run(args, Path(name)), args)
        if args.steps:
            Console().print(slowdown(make_state(args.gib, args.tensor_mib), Path(name)))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
