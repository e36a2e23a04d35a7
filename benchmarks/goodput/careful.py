"""The training as a careful user of torchrun writes it: ``careful.py FOLDER``.

- The global batch is divided among the workers that there are, and the data's order is a function
  of the step, so that every sample is used once.
- SIGTERM sets a flag. The flag travels with an all-reduce at each step, so that all ranks stop
  after the same one, and the first saves: nothing is lost to what announces itself. All end with
  an error then, because torchrun takes 0 for the end of the training, and starts the others again.
- The first rank saves every 15 seconds as well, for what does not announce itself.
- A checkpoint is replaced in one step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from goodput.workload import (
    CHECKPOINT_S,
    GLOBAL_BATCH,
    NUM_SAMPLES,
    SEED,
    Trail,
    dataset,
    loss_of,
    network,
)  # fmt: skip

STOPPED = 1
_asked: list[int] = []


def main(folder: Path) -> None:
    """Train until told to stop, and end the process."""
    signal.signal(signal.SIGTERM, lambda number, _: _asked.append(number))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net, optimizer = network()
    step = restore(folder, net, optimizer)
    model, trail, saved_at = DistributedDataParallel(net), Trail(folder, step), time.monotonic()
    data = dataset()
    while True:
        step += 1
        train_step(model, optimizer, *data[share(step)])
        trail.step(step)
        stop, due = agreed(bool(_asked), time.monotonic() - saved_at > CHECKPOINT_S)
        if stop or due:
            save(folder, net, optimizer, step)
            saved_at = time.monotonic()
        if stop:
            dist.barrier()  # nobody ends before it is saved
            os._exit(STOPPED)  # Python's own way takes a second with torch


def share(step: int) -> torch.Tensor:
    """Return the indices of this rank's samples of a step."""
    epoch, number = divmod(step - 1, NUM_SAMPLES // GLOBAL_BATCH)
    order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(SEED + epoch))
    batch = order[number * GLOBAL_BATCH : (number + 1) * GLOBAL_BATCH]
    return batch[dist.get_rank() :: dist.get_world_size()]


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> None:
    """Make one step."""
    optimizer.zero_grad()
    loss_of(model, inputs, targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def agreed(*flags: bool) -> list[bool]:
    """Tell which flags are set on any rank."""
    found = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [bool(flag) for flag in found]


def save(folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Replace the checkpoint (first rank)."""
    if dist.get_rank() == 0:
        staged = folder / "checkpoint.new"
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, staged)
        staged.replace(folder / "checkpoint.pt")


def restore(folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take the checkpoint up, and return its step; 0 if there is none."""
    path = folder / "checkpoint.pt"
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
