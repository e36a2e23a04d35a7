"""Train a small network on scikit-learn's handwritten digits, with as many nodes as there are.

    python train.py launcher=local nodes=1:2          two nodes, as processes on this machine
    python train.py launcher=slurm nodes=1:4          one to four nodes of a Slurm cluster
    python train.py -m launcher=slurm nodes=1:4 lr=0.1,0.01          a sweep

Ordinary DistributedDataParallel code. When a node comes or goes, every worker is started again in
a group of the new size, so two habits make a script elastic: resume from the newest checkpoint,
and divide one fixed global batch among however many workers there are.
"""

import os
import time
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hpc_elastic import checkpoint_boundary, fence, report  # optional: see the README


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
    """Train to the last epoch, starting after the newest one that has a checkpoint."""
    torch.manual_seed(cfg.seed)
    net = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10)).to(
        device
    )
    optimizer = torch.optim.SGD(net.parameters(), cfg.lr, momentum=0.9, nesterov=True)

    checkpoint = Path(HydraConfig.get().runtime.output_dir, "checkpoint.pt")
    first_epoch = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1

    world_size = dist.get_world_size()
    sampler = DistributedSampler(data, seed=cfg.seed)
    batches = DataLoader(data, max(1, cfg.batch_size // world_size), sampler=sampler)
    model = DistributedDataParallel(net)
    total_steps = cfg.epochs * len(batches)
    for epoch in range(first_epoch, cfg.epochs):
        sampler.set_epoch(epoch)
        loss_sum = torch.zeros((), device=device)
        for i, (images, labels) in enumerate(batches):
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
            step = epoch * len(batches) + i + 1
            report(step=step, loss=loss.item(), total_steps=total_steps)
            time.sleep(cfg.pause_s)

        dist.all_reduce(loss_sum)
        if dist.get_rank() == 0:
            save(checkpoint, net=net.state_dict(), optimizer=optimizer.state_dict(), epoch=epoch)
            mean_loss = loss_sum.item() / (len(batches) * world_size)
            print(f"epoch {epoch}: loss {mean_loss:.4f} (world size {world_size})", flush=True)
        checkpoint_boundary(step=(epoch + 1) * len(batches))  # a good moment for nodes to join
    return net


def save(path: Path, **state: object) -> None:
    """Replace a checkpoint in one step: whoever is killed here leaves the old one or the new."""
    staged = path.with_suffix(".tmp")
    torch.save(state, staged)
    fence.check()
    staged.replace(path)


@torch.no_grad()
def evaluate(net: nn.Module, data: TensorDataset) -> float:
    """Return the share of digits that are recognised; each worker looks at its part of them."""
    images, labels = data[dist.get_rank() :: dist.get_world_size()]
    correct = (net(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(correct)
    return correct.item() / len(data)


if __name__ == "__main__":
    main()
