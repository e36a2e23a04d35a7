"""A script that trains with virtual ranks: `python virtual_rank_runs.py FOLDER NUM_STEPS`.

FOLDER/curve gets a line for each step: its number, the loss, a digest of the parameters, the number
of workers. Steps are slow until FOLDER/fast exists.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic import Checkpointer, ElasticSampler, report

FOLDER, NUM_STEPS = Path(sys.argv[1]), int(sys.argv[2])


def main() -> None:
    """Train up to the last step."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    x = torch.randn(192, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1)
    )
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    sampler = ElasticSampler(data, 48, virtual_ranks=16)
    loader = DataLoader(data, batch_sampler=sampler)
    model = sampler.average_gradients(net)
    checkpointer = Checkpointer({"net": net, "optimizer": optimizer, "sampler": sampler})
    checkpointer.load_latest()
    for _ in sampler.epochs(NUM_STEPS):
        for batch in sampler.batches(loader):
            optimizer.zero_grad()
            losses = []
            for (inputs, targets), weight in batch.micro_batches():
                loss = mse_loss(model(inputs), targets)
                (weight * loss).backward()
                losses.append(loss)
            optimizer.step()
            write(batch.step, batch.mean(losses), net)
            if batch.step == NUM_STEPS:
                return
            if not (FOLDER / "fast").exists():
                time.sleep(0.1)
            report(step=batch.step, total_steps=NUM_STEPS)
            checkpointer.save_if_due(batch.step, every_s=3)


def write(step: int, loss: float, net: nn.Module) -> None:
    """Write the line of a step."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if rank == 0:
        digest = hashlib.sha256()
        for tensor in net.state_dict().values():
            digest.update(tensor.numpy().tobytes())
        with (FOLDER / "curve").open("a") as curve:
            curve.write(f"{step} {loss.hex()} {digest.hexdigest()} {size}\n")


if __name__ == "__main__":
    main()
