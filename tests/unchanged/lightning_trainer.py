"""A Lightning script without a line of this package: Trainer, loader, validation, schedule."""

import json
import os
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

SIZE, BATCH, EPOCHS = 73, 5, 6


class Line(pl.LightningModule):
    """A linear model."""

    def __init__(self) -> None:
        super().__init__()
        self.pause_s = float(os.environ.get("PAUSE_S", 0))
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, _):
        """Return the loss."""
        time.sleep(self.pause_s)
        x, y = batch
        loss = (self.layer(x) - y).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        """Log a loss."""
        x, y = batch
        self.log("val", (self.layer(x) - y).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        """Return an optimizer with moments, and a schedule of each step."""
        optimizer = torch.optim.Adam(self.parameters(), 0.02)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Lines(pl.LightningDataModule):
    """Samples of a linear function."""

    def __init__(self, shape: str = "map") -> None:
        super().__init__()
        self.shape = shape

    def setup(self, stage):
        """Make them."""
        x = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(1))
        self.data = TensorDataset(x, x.sum(1, keepdim=True) + x[:, :1].square())

    def train_dataloader(self):
        """Return the loader that a script has."""
        if self.shape == "stream":
            return DataLoader(Stream(self.data), batch_size=BATCH)
        if self.shape == "weighted":
            weights = WeightedRandomSampler([1.0] * SIZE, SIZE)
            return DataLoader(self.data, batch_size=BATCH, sampler=weights)
        if self.shape == "batches":
            batches = BatchSampler(RandomSampler(self.data), BATCH, drop_last=False)
            return DataLoader(self.data, batch_sampler=batches)
        return DataLoader(self.data, batch_size=BATCH, shuffle=True)

    def val_dataloader(self):
        """Return another one."""
        return DataLoader(self.data, batch_size=20)


class Stream(IterableDataset):
    """The samples in their order."""

    def __init__(self, data) -> None:
        self.data = data

    def __iter__(self):
        """Iterate."""
        return iter(self.data)


def write_result(module: Line, steps: int, file: str) -> None:
    """Write what a test compares."""
    parameters = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
    Path(file).write_text(json.dumps({"parameters": parameters, "steps": steps}))


if __name__ == "__main__":
    pl.seed_everything(0, verbose=False)
    data, model = Lines(*sys.argv[2:]), Line()
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=8, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    if sys.argv[2:]:
        trainer.fit(model, data)
    else:
        data.setup("fit")
        trainer.fit(model, data.train_dataloader(), data.val_dataloader())
    if trainer.is_global_zero:
        write_result(model, trainer.global_step, sys.argv[1])
