#!/usr/bin/env python3
"""What does a step cost whose gradients are the same bits for any number of workers?

    python benchmarks/virtual_ranks.py --repeats 25

`ABOUT` says what is measured. The second way has the price of the small micro-batches; the third
adds that of the tree, the random numbers and the exchange.
"""

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from evidence.result import About, Column, Peer, Result, Table, figure
from evidence.show import options, present
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic.data import ElasticSampler

VIRTUAL_RANKS, GLOBAL_BATCH = 16, 64
WORKERS = (1, 2, 4)
PLAIN, SMALL, VIRTUAL = "DDP", "DDP, small micro-batches", f"virtual_ranks={VIRTUAL_RANKS}"
LENGTH = 1 << 20
MODELS = {"MLP of 0.1 MB": (32, 128, 10), "MLP of 10 MB": (512, 1200, 2)}
"""Width of its inputs, of its layers, and the number of steps that are timed together."""
ABOUT = About(
    title="Virtual ranks",
    measured=f"A step of {GLOBAL_BATCH} samples on 1, 2 and 4 workers (gloo, one thread each) in "
    f"three ways that take turns in the same processes: DistributedDataParallel with each worker's "
    f"share at once; the same with the micro-batches of {VIRTUAL_RANKS} virtual ranks, "
    f"{GLOBAL_BATCH // VIRTUAL_RANKS} samples each, by gradient accumulation; and "
    f"`virtual_ranks={VIRTUAL_RANKS}`. The data comes from an `ElasticSampler` in all. The ratios "
    "are medians over pairs of neighbouring blocks of steps.",
    does_not_show=(
        "GPUs and NCCL: there the exchange after the last backward is not hidden behind it, as "
        "DDP's is, and seeding costs a few launches.",
        "Two machines: all workers share the 2 cores, so that 4 workers take turns, and what is "
        "sent goes through memory.",
        "Large micro-batches: the fewer samples a virtual rank has, the more its fixed costs "
        "count; 4 samples of an MLP are an extreme.",
    ),
)
PEERS = (
    Peer("EasyScale", why="there is no package of it to install"),
    Peer("torch.nn.parallel.DistributedDataParallel", torch.__version__, "the floor"),
)
Times = dict[str, list[float]]
"""Seconds of a step in each block, by way."""


def block_of(way: str, width: int, hidden: int) -> Callable[[int], float]:
    """Return a function that makes a number of steps in one way, and returns the seconds of one."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, hidden)]
    net = nn.Sequential(*layers, nn.ReLU(), nn.Linear(hidden, width))
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    small = GLOBAL_BATCH // VIRTUAL_RANKS
    sampler = ElasticSampler(
        LENGTH, GLOBAL_BATCH, name=None, micro_batch_size=small if way == SMALL else None,
        virtual_ranks=VIRTUAL_RANKS if way == VIRTUAL else None,
    )  # fmt: skip
    x = torch.randn(1, width).expand(LENGTH, width)
    batches = sampler.batches(DataLoader(TensorDataset(x, x), batch_sampler=sampler))
    model = sampler.average_gradients(net) if way == VIRTUAL else DistributedDataParallel(net)

    def steps(num: int) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(num):
            optimizer.zero_grad()
            for (inputs, targets), weight in next(batches).micro_batches(model):
                (weight * mse_loss(model(inputs), targets)).backward()
            optimizer.step()
        return (time.perf_counter() - begin) / num

    return steps


def work(rank: int, num_workers: int, repeats: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store-{num_workers}", rank=rank,
        world_size=num_workers,
    )  # fmt: skip
    turns = random.Random(1)  # the same on all
    found: dict[str, Times] = {}
    for name, (width, hidden, num_steps) in MODELS.items():
        blocks = {way: block_of(way, width, hidden) for way in (PLAIN, SMALL, VIRTUAL)}
        times = found[name] = {way: [] for way in blocks}
        for repeat in range(repeats + 1):
            for way in turns.sample(list(blocks), len(blocks)):
                seconds = blocks[way](num_steps)
                if repeat:  # the first one warms up
                    times[way].append(seconds)
    if rank == 0:
        torch.save(found, f"{folder}/times-{num_workers}.pt")
    dist.barrier()
    dist.destroy_process_group()


def rows(num_workers: int, times: Times) -> list[tuple]:
    def ratio(way: str, other: str):
        return figure([a / b for a, b in zip(times[way], times[other], strict=True)])

    return [
        (
            str(num_workers), way, figure([seconds * 1e3 for seconds in times[way]]),
            "" if way == PLAIN else ratio(way, PLAIN),
            ratio(way, SMALL) if way == VIRTUAL else "",
        )
        for way in (PLAIN, SMALL, VIRTUAL)
    ]  # fmt: skip


def main() -> None:
    given = options(__doc__, repeats=25).parse_args()
    with tempfile.TemporaryDirectory(prefix="virtual-ranks-") as folder:
        found: dict[int, dict[str, Times]] = {}
        for num_workers in WORKERS:
            mp.spawn(work, (num_workers, given.repeats, folder), num_workers)
            found[num_workers] = torch.load(Path(folder, f"times-{num_workers}.pt"))
    columns = (
        Column("workers"), Column("way"), Column("step, ms", ".3g"),
        Column("x DDP", ".2f"), Column("x DDP, small micro-batches", ".2f"),
    )  # fmt: skip
    tables = tuple(
        Table(name, columns, tuple(row for n in WORKERS for row in rows(n, found[n][name])))
        for name in MODELS
    )
    present(Result(ABOUT, tables, (), PEERS, repeats=given.repeats), given)


if __name__ == "__main__":
    main()
