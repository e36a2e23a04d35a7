"""Train like train.py, with replicas whose processes survive changes of the other nodes.

    python examples/train_ft.py -m launcher=local nodes=2:3   replicas as processes on this machine
    python examples/train_ft.py -m launcher=slurm nodes=2:4   two to four nodes of a Slurm cluster

Each node is a replica with the whole model. A node that dies costs the others the step in which it
died, and no restart. A node that joins receives the newest state from the memory of the others.
Checkpoints on disk are for the case that all nodes are lost. See docs/howto/fault-tolerance.md.
"""

import hashlib
import time

import hydra
import torch
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic import Checkpointer, ElasticSampler, ft, report


@hydra.main(version_base=None, config_path=".", config_name="train_ft")
def main(cfg: DictConfig) -> float:
    """Run in every replica; what it returns is the result of the run."""
    torch.manual_seed(cfg.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, test_set = digits(device)
    net = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10)).to(
        device
    )
    train(cfg, net, train_set)
    accuracy = evaluate(net, test_set)
    print(f"accuracy {accuracy:.2%} on held-out digits, parameters {fingerprint(net)}", flush=True)
    return accuracy


def digits(device: torch.device) -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 digits of 8 x 8 pixels to learn from, and 360 others to be judged by."""
    images, labels = load_digits(return_X_y=True)
    arrays = train_test_split(
        (images / 16).astype("float32"), labels, test_size=360, stratify=labels, random_state=0
    )
    x_train, x_test, y_train, y_test = (torch.as_tensor(array, device=device) for array in arrays)
    return TensorDataset(x_train, y_train), TensorDataset(x_test, y_test)


def train(cfg: DictConfig, net: nn.Module, data: TensorDataset) -> None:
    """Train to the last epoch, with the replicas present at each step."""
    sgd = torch.optim.SGD(net.parameters(), cfg.lr, momentum=0.9, nesterov=True)

    def load(state: dict) -> None:
        net.load_state_dict(state["net"])
        sgd.load_state_dict(state["sgd"])

    manager = ft.Manager(
        pg=ft.ProcessGroupNCCL() if torch.cuda.is_available() else ft.ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "sgd": sgd.state_dict()},
        min_replica_size=1,
    )
    sampler = ElasticSampler(data, cfg.batch_size, seed=cfg.seed, manager=manager)
    batches = DataLoader(data, batch_sampler=sampler)
    state = {"net": net, "optimizer": sgd, "sampler": sampler, "manager": manager}
    checkpointer = Checkpointer(state)
    checkpointer.load_latest()

    model, optimizer = ft.DistributedDataParallel(manager, net), ft.Optimizer(manager, sgd)
    for _ in sampler.epochs(cfg.epochs):
        for batch in sampler.batches(batches):
            optimizer.zero_grad()  # the quorum: who is there?
            for (images, labels), weight in batch.micro_batches(model):
                loss = weight * cross_entropy(model(images), labels)
                loss.backward()
            optimizer.step()  # if all went well; else the same batch comes again
            report(step=sampler.step, loss=loss, total_steps=sampler.total_steps)
            time.sleep(cfg.pause_s)
            checkpointer.save_if_due(sampler.step, every_s=cfg.save_every_s)
        if manager.participating_rank() == 0:
            replicas = manager.num_participants()
            print(f"epoch {batch.epoch}: loss {loss.item():.4f} (replicas {replicas})", flush=True)
    if manager.participating_rank() == 0:
        checkpointer.save(sampler.step)
    manager.shutdown()


@torch.no_grad()
def evaluate(net: nn.Module, data: TensorDataset) -> float:
    """Return the share of digits that are recognised."""
    images, labels = data[:]
    return (net(images).argmax(dim=1) == labels).float().mean().item()


def fingerprint(net: nn.Module) -> str:
    """Return what is equal on all replicas if all their parameters are, to the last bit."""
    digest = hashlib.sha256()
    for parameter in net.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
