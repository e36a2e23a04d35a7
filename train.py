"""Train a small network on scikit-learn's handwritten digits, with as many nodes as there are.

    python train.py -m launcher=local nodes=1:2          two nodes, as processes on this machine
    python train.py -m launcher=slurm nodes=1:4          one to four nodes of a Slurm cluster
    python train.py -m launcher=slurm nodes=1:4 lr=0.1,0.001          a sweep

Ordinary DistributedDataParallel code. When nodes come or go, every worker starts again in a group
of the new size, at the step that was saved: no step is made twice for a node whose leaving was
announced, no sample is seen twice or never, and the batch stays the same for any number of nodes.
"""

import math
import os
import time

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic import Checkpointer, ElasticSampler, report


@hydra.main(version_base=None, config_path=".", config_name="train")
def main(cfg: DictConfig) -> float:
    """Run in every worker; what it returns is the result of the run."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")

    train_set, test_set = digits(device)
    accuracy = evaluate(train(cfg, train_set, device), test_set)
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.2%} on held-out digits", flush=True)
    dist.destroy_process_group()
    return accuracy


def digits(device: torch.device) -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 digits of 8 x 8 pixels to learn from, and 360 others to be judged by."""
    images, labels = load_digits(return_X_y=True)
    arrays = train_test_split(
        (images / 16).astype("float32"), labels, test_size=360, stratify=labels, random_state=0
    )
    x_train, x_test, y_train, y_test = (torch.as_tensor(array, device=device) for array in arrays)
    return TensorDataset(x_train, y_train), TensorDataset(x_test, y_test)


def train(cfg: DictConfig, data: TensorDataset, device: torch.device) -> nn.Module:
    """Train to the last epoch, from where the newest checkpoint left off."""
    torch.manual_seed(cfg.seed)
    net = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10)).to(
        device
    )
    optimizer = torch.optim.SGD(net.parameters(), cfg.lr, momentum=0.9, nesterov=True)
    sampler = ElasticSampler(data, cfg.batch_size, seed=cfg.seed)
    loader = DataLoader(data, batch_sampler=sampler)
    checkpointer = Checkpointer({"net": net, "optimizer": optimizer, "sampler": sampler})
    checkpointer.load_latest()

    model = sampler.scale_gradients(DistributedDataParallel(net))
    loss = torch.tensor(math.nan)  # after a restart, an epoch may have no batch left
    for epoch in sampler.epochs(cfg.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            report(step=sampler.step, loss=loss, total_steps=sampler.total_steps)
            time.sleep(cfg.pause_s)
            checkpointer.save_if_due(sampler.step, every_s=cfg.save_every_s)

        if dist.get_rank() == 0:
            world_size = dist.get_world_size()
            print(f"epoch {epoch}: loss {loss.item():.4f} (world size {world_size})", flush=True)
    checkpointer.save(sampler.step)
    return net


@torch.no_grad()
def evaluate(net: nn.Module, data: TensorDataset) -> float:
    """Return the share of digits that are recognised; each worker looks at its part of them."""
    images, labels = data[dist.get_rank() :: dist.get_world_size()]
    correct = (net(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(correct)
    return correct.item() / len(data)


if __name__ == "__main__":
    main()
