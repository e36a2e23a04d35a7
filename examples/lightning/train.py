"""Train on scikit-learn's handwritten digits with Lightning, with as many nodes as there are.

    python train.py -m launcher=local nodes=1:2          two nodes, as processes on this machine
    python train.py -m launcher=slurm nodes=1:4       one to four nodes of a Slurm cluster
    python train.py -m launcher=local nodes=1:2 fsdp=true   with parameters sharded over the nodes

An ordinary LightningModule and Trainer. docs/howto/lightning.md lists the lines that change.
"""

import hashlib
import time

import hydra
import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic.data import ElasticSampler
from hpc_elastic.integrations.lightning import ElasticCheckpoint, ElasticLoader, world


class Digits(pl.LightningModule):
    """A small network that learns digits of 8 x 8 pixels."""

    def __init__(self, lr: float, pause_s: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10)
        )

    def configure_model(self) -> None:
        """Shard the parameters over all workers (FSDP2) where the strategy asks for it."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        """Return the mean loss over this worker's share of the batch."""
        time.sleep(self.hparams.pause_s)
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.9)


@hydra.main(version_base=None, config_path=".", config_name="train")
def main(cfg: DictConfig) -> dict[str, object]:
    """Run in every worker; what it returns is the result of the run."""
    pl.seed_everything(cfg.seed, verbose=False)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))

    sampler = ElasticSampler(data, cfg.batch_size, seed=cfg.seed)
    loader = ElasticLoader(DataLoader(data, batch_sampler=sampler))
    elastic = ElasticCheckpoint(every_s=cfg.save_every_s)
    trainer = pl.Trainer(
        max_epochs=cfg.epochs,
        strategy=ModelParallelStrategy(save_distributed_checkpoint=True) if cfg.fsdp else "ddp",
        callbacks=[elastic],
        logger=False,
        enable_progress_bar=False,
        **world(),
    )
    module = Digits(cfg.lr, cfg.pause_s)
    trainer.fit(module, loader, ckpt_path=elastic.newest())

    with torch.no_grad():
        accuracy = (module.net(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean().item()
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters())
    bits = b"".join(p.detach().cpu().numpy().tobytes() for p in whole)
    fingerprint = hashlib.sha256(bits).hexdigest()[:16]
    return {"accuracy": accuracy, "steps": trainer.global_step, "parameters": fingerprint}


if __name__ == "__main__":
    main()
