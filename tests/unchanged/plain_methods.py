"""A plain loop in the methods of a class, with all that is trained in its attributes."""

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Progress:
    """What is counted."""

    steps: int = 0
    best: float = 1e9
    losses: list = field(default_factory=list)


class Trainer:
    """Trains a model for some epochs."""

    def __init__(self, model: nn.Module, data: TensorDataset, pause_s: float) -> None:
        self.rank, self.pause_s = dist.get_rank(), pause_s
        self.model = DistributedDataParallel(model)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=4, sampler=self.sampler)
        self.test_loader = DataLoader(data, batch_size=49)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.9)
        self.progress = Progress()

    def _run_batch(self, inputs: torch.Tensor, wanted: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(inputs), wanted).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.progress.steps += 1
        time.sleep(self.pause_s)

    def _run_epoch(self, epoch: int) -> None:
        size = len(next(iter(self.loader))[0])
        print(f"epoch {epoch}: {len(self.loader)} batches of {size}")
        self.sampler.set_epoch(epoch)
        self.model.train()
        for inputs, wanted in self.loader:
            self._run_batch(inputs, wanted)

    @torch.no_grad()
    def _test(self) -> float:
        self.model.eval()
        losses = [nn.functional.mse_loss(self.model(x), y).item() for x, y in self.test_loader]
        return sum(losses) / len(losses)

    def train(self, epochs: int) -> None:
        """Train, and test after each epoch."""
        for epoch in range(epochs):
            self._run_epoch(epoch)
            loss = self._test()
            self.progress.best = min(self.progress.best, loss)
            self.progress.losses.append(loss)


def main(result: str) -> None:
    """Train, and write what has come of it."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(98, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = Trainer(model, data, float(os.environ.get("PAUSE_S", 0)))
    trainer.train(4)
    if trainer.rank == 0:
        parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
        found = {"parameters": parameters.tolist(), **vars(trainer.progress)}
        Path(result).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
