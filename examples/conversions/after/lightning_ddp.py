"""Train on handwritten digits with Lightning."""

import sys
import time

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic import ElasticSampler
from hpc_elastic.integrations.lightning import ElasticCheckpoint, ElasticLoader, world

EPOCHS, PAUSE_S = int(sys.argv[1]), float(sys.argv[2])


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        time.sleep(PAUSE_S)
        x, y = batch
        return cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    pl.seed_everything(0, verbose=False)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    sampler = ElasticSampler(data, global_batch_size=48)
    loader = ElasticLoader(DataLoader(data, batch_sampler=sampler))
    elastic = ElasticCheckpoint(every_s=2)
    trainer = pl.Trainer(max_epochs=EPOCHS, strategy="ddp", callbacks=[elastic], **world())
    trainer.fit(Digits(), loader, ckpt_path=elastic.newest())
    print("trained", flush=True)


if __name__ == "__main__":
    main()
