"""Train on handwritten digits with Lightning."""

import sys
import time

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

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
    loader = DataLoader(data, batch_size=24, shuffle=True)
    trainer = pl.Trainer(max_epochs=EPOCHS, strategy="ddp", devices=1, num_nodes=2)
    trainer.fit(Digits(), loader)
    print("trained", flush=True)


if __name__ == "__main__":
    main()
