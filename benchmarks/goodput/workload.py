"""What every peer trains: a real small network on made-up data, in steps of a known length.

A worker's part of a step takes so long per sample that it computes, as on an accelerator that is
kept busy; so a step of two nodes takes twice as long as one of four, and the global batch is the
same. Forward, backward, the all-reduce and the optimizer are real.
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

GLOBAL_BATCH = 48
"""Divisible by every number of nodes."""
SAMPLE_S = 0.025
"""A step of four nodes takes 0.3 s, of one node 1.2 s."""
CHECKPOINT_S = 15.0
"""Between two periodic checkpoints."""
NUM_SAMPLES = 48_000
_WIDTH = 64
SEED = 0


def dataset() -> torch.utils.data.TensorDataset:
    """Return the data; the same in every process."""
    made = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(NUM_SAMPLES, _WIDTH, generator=made)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Linear(_WIDTH, 256), nn.ReLU(), nn.Linear(256, 1))
    return net, torch.optim.AdamW(net.parameters(), 1e-3)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of some samples, after as long as they take."""
    time.sleep(SAMPLE_S * len(inputs))
    return nn.functional.mse_loss(model(inputs), targets)


class Trail:
    """What the first worker of a group leaves: when the group began, and when each step was done.

    ``resumed``: steps that the group found in its checkpoint.
    """

    def __init__(self, folder: Path, resumed: int) -> None:
        self._file = None
        if dist.get_rank() == 0:
            joined = time.time()
            first = {"joined": joined, "world_size": dist.get_world_size(), "resumed": resumed}
            path = folder / f"{joined}-{os.uname().nodename}.trail"
            self._file = path.open("w", buffering=1)
            self._file.write(json.dumps(first) + "\n")

    def step(self, number: int) -> None:
        if self._file is not None:
            self._file.write(f"{time.time()} {number}\n")
