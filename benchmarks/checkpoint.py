"""How long a checkpoint holds up the training, and how long until it is safe; beside torch's ways.

    python benchmarks/checkpoint.py --gib 1 --repeats 7 --directory /some/disk

METHODS.md says what is measured. Files are removed and the disk is synced between two turns.

*compared*: what the first save of several ranks does besides: samples of all tensors, which rank 0
compares; the same CPU time counts for each rank. With ``--steps``, a training is timed too, alone
and while a save is written, ours and DCP's.
"""

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint import floors, training
from checkpoint.candidates import WAYS, State, Way, begin_group
from evidence.machine import package_version
from evidence.result import Column, Figure, Peer, Result, Table, Target, figure
from evidence.show import about, options, present

from hpc_elastic.checkpoint.equality import Comparer
from hpc_elastic.checkpoint.owner import RankGroup
from hpc_elastic.checkpoint.sharding import Planner
from hpc_elastic.checkpoint.state import flatten

MEMCPY, TORCH_COPY = "floor: memmove into warm buffers", "floor: torch copy into warm buffers"
WRITE, DIRECT = "floor: write + fsync", "floor: direct write + fsync"
READ = "floor: read + checksum"
MOST_COMPARED_MS = 5.0
"""For each GB of the state, at the first save."""
COLUMNS = ("blocked", "total", "cold restore", "warm restore")
ABOUT = about("Checkpoints")
Times = dict[tuple[str, str], list[float]]
"""Seconds by way and what was measured."""


def make_state(gib: float, tensor_mib: float) -> dict[str, torch.Tensor]:
    count = max(1, round(gib * 1024 / tensor_mib))
    elements = int(tensor_mib * (1 << 20) / 4)
    return {f"layer{i}.weight": torch.rand(elements) for i in range(count)}


def timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def measure(name: str, way: Way, folder: Path, times: Times, *, keep: bool) -> None:
    """Save once and restore once; of the first time counts only for how long it blocked."""
    begin = time.perf_counter()
    blocked = way.save(folder / name)
    total = time.perf_counter() - begin
    restored = restores(lambda: way.restore(folder / name), folder)
    columns = COLUMNS if keep else ("first blocked",)
    for what, seconds in zip(columns, (blocked, total, *restored), strict=False):
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


def measure_floors(state: State, buffers: State, folder: Path, times: Times) -> None:
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


def comparisons(state: State, repeats: int) -> list[float]:
    """Return the milliseconds a GB that describing the state for a comparison takes; CPU time."""
    flat, planner = flatten({"state": state}), Planner(0, 2)
    planner.plan(flat.tensors, flat.first, flat.own)
    gigabytes = sum(tensor.nbytes for tensor in state.values()) / 1e9
    taken = []
    for number in range(repeats):
        comparer = Comparer(planner, RankGroup(0, 2, ""))
        begin = time.thread_time()
        comparer.describe(flat, number, compare=True)
        taken.append(1000 * (time.thread_time() - begin) / gigabytes)
    return taken


def table(times: Times, args: argparse.Namespace) -> Table:
    names = dict.fromkeys(name for name, _ in times)
    rows = tuple(
        (name, *(figure(times.get((name, what), [])) for what in COLUMNS)) for name in names
    )
    caption = f"{args.gib:g} GiB in tensors of {args.tensor_mib:g} MiB, seconds"
    return Table(caption, (Column(""), *(Column(what, ".3f") for what in COLUMNS)), rows)


def ratios(times: Times) -> Iterator[tuple[str, float, float | None]]:
    """Yield what ours costs beside floors and peers, and at most how much it is to be, if told."""

    def cost(name: str, what: str) -> float:
        return statistics.median(times[name, what])

    def ours(what: str, floor: str) -> float:
        return cost("ours", what) / cost(floor, what)

    yield "blocked / memmove", ours("blocked", MEMCPY), 1.3
    yield "first save / memmove", cost("ours", "first blocked") / cost(MEMCPY, "blocked"), 1.3
    copy = f"torch's copy ({torch.get_num_threads()} threads)"
    yield f"blocked / {copy}", ours("blocked", TORCH_COPY), None
    if dcp := [name for name, what in times if "DCP" in name and what == "blocked"]:
        best = min(dcp, key=lambda name: cost(name, "blocked"))
        yield f"blocked / {best}", ours("blocked", best), 1.0
    yield "total / write + fsync", ours("total", WRITE), 1.2
    yield "total / direct write + fsync", ours("total", DIRECT), 1.1
    for what in COLUMNS[2:]:
        yield f"{what} / read + checksum", ours(what, READ), 1.1


def result(
    times: Times, compared: list[float], slowed: list[training.Slowdown], args: argparse.Namespace
) -> Result:
    found = list(ratios(times)) if "ours" in args.ways else []
    untold = tuple((what, Figure(value)) for what, value, bound in found if bound is None)
    tables = [table(times, args)]
    tables += [Table("ratios without a target", (Column(""), Column("ratio", ".2f")), untold)]
    tables += [training.table(slowed)] if slowed else []
    targets = [Target(what, bound, value) for what, value, bound in found if bound is not None]
    if "ours" in args.ways:
        cost = statistics.median(compared)
        targets.append(Target("compared, at the first save", MOST_COMPARED_MS, cost, "ms a GB"))
    return Result(
        about=ABOUT
        if args.gib == 1
        else replace(ABOUT, title=f"{ABOUT.title} of {args.gib:g} GiB"),
        tables=tuple(tables),
        targets=(*targets, *(s.target for s in slowed if s.name == "ours")),
        peers=(Peer("torch", package_version("torch"), "torch.save and DCP"),),
        repeats=args.repeats,
    )


def main() -> None:
    parser = options(__doc__, repeats=7)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--tensor-mib", type=float, default=64.0, help="size of each tensor")
    parser.add_argument("--directory", type=Path, help="where to write; default: a temporary one")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", action="store_true", help="time a training's steps too")
    parser.add_argument("--rounds", type=int, default=training.ROUNDS, help="of the steps")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="checkpoint-") as name:
        begin_group(Path(name))
        times = run(args, Path(name))
        state = make_state(args.gib, args.tensor_mib)
        slowed = training.slowdown(state, Path(name), args.rounds) if args.steps else []
        dist.destroy_process_group()
    present(result(times, comparisons(state, args.repeats), slowed, args), args)


if __name__ == "__main__":
    main()
