"""What a step costs that goes through the package; ``python loop.py WAY FILE`` trains, as a rank.

CPU time of the main thread, and of all threads, in a step of a network that is nearly free, once
the first seconds are over, in which warm workers import torch on the same cores.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PEER, SAME, SAMPLER, WHOLE = (
    "torchrun", "hpc-elastic run, unchanged", "ElasticSampler", "report and save_if_due, too",
)  # fmt: skip
MOST_ADDED = {SAME: (PEER, 10.0), SAMPLER: (SAME, 15.0), WHOLE: (SAME, 40.0)}
"""Microseconds, and over what."""
SIZES = (1, 2, 8)
STEPS, BLOCKS, BATCH = 100, 20, 8
SETTLING = 160
"""Further blocks, of all ranks together, before those that count."""


def measure(repeats: int) -> tuple[Any, list[Any]]:
    from evidence.result import Column, Table, Target, figure

    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for _ in range(repeats):
        for size in SIZES:
            for way in (PEER, *MOST_ADDED):
                found.setdefault((size, way), []).append(launch(size, way))
    medians = {key: statistics.median(main for main, _ in of) for key, of in found.items()}
    rows = tuple(
        (way, *(figure(of) for size in SIZES for of in zip(*found[size, way], strict=True)))
        for way in (PEER, *MOST_ADDED)
    )
    targets = [
        Target(f"{way}, {size} ranks: more a step", most,
               medians[size, way] - medians[size, over], "us")
        for way, (over, most) in MOST_ADDED.items() for size in SIZES
    ]  # fmt: skip
    caption = f"CPU time, microseconds a step of {BATCH} samples a rank"
    whose = [f"{size} ranks, {of}" for size in SIZES for of in ("main thread", "all threads")]
    columns = (Column(""), *(Column(name, ".0f") for name in whose))
    return Table(caption, columns, rows), targets


def launch(size: int, way: str) -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix="operate-") as name:
        out, programs = Path(name, "out"), Path(sys.executable).parent
        command = [str(programs / "torchrun"), f"--nproc-per-node={size}"]
        if way != PEER:
            command = [str(programs / "hpc-elastic"), "run", f"nproc_per_node={size}", "--",
                       sys.executable]  # fmt: skip
        command += [__file__, way, str(out)]
        subprocess.run(command, check=True, cwd=name, capture_output=True, stdin=subprocess.DEVNULL)
        main, whole = json.loads(out.read_text())
        return main, whole


def main(way: str, out: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, after_step, blocks = dist.get_world_size(), list[Callable[[Any], object]](), []
    num_blocks = BLOCKS + SETTLING // size
    data, net = TensorDataset(torch.randn(STEPS * BATCH * size, 4)), torch.nn.Linear(4, 1)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer, epochs = torch.optim.SGD(net.parameters()), iter(range(num_blocks))
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data))
    if way in (SAMPLER, WHOLE):
        from hpc_elastic import Checkpointer, ElasticSampler, report

        sampler = ElasticSampler(data, BATCH * size)
        loader, epochs = DataLoader(data, batch_sampler=sampler), sampler.epochs(num_blocks)
        sampler.scale_gradients(model)
    if way == WHOLE:
        saver = Checkpointer({"net": net, "optimizer": optimizer, "sampler": sampler})
        saver.load_latest()
        after_step += [
            lambda loss: report(step=sampler.step, loss=loss, total_steps=10**9, lr=0.1),
            lambda _: saver.save_if_due(sampler.step, every_s=3600),
        ]
    for _ in epochs:
        begin = time.thread_time(), time.process_time()
        for (inputs,) in loader:
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            for then in after_step:
                then(loss)
        blocks.append((time.thread_time() - begin[0], time.process_time() - begin[1]))
    if dist.get_rank() == 0:
        of_each = zip(*blocks[-BLOCKS:], strict=True)
        out.write_text(json.dumps([1e6 / STEPS * statistics.median(of) for of in of_each]))
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
