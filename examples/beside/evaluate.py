"""Evaluate each new checkpoint of a run of train.py while it trains, on a node of its own.

    python train.py -m launcher=slurm nodes=1:8 hydra.sweep.dir=runs/digits
    python examples/beside/evaluate.py -m launcher=slurm run=runs/digits/0

It is a run as any other: where its node is preempted, it goes on on another one. It ends with the
training.
"""

import hydra
import torch
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from hpc_elastic import follow_checkpoints, report


@hydra.main(version_base=None, config_path=".", config_name="evaluate")
def main(cfg: DictConfig) -> dict[str, float]:
    """Return the accuracy on held-out digits by step."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        (images / 16).astype("float32"), labels, test_size=360, stratify=labels, random_state=0
    )
    x, y = torch.as_tensor(parts[1]), torch.as_tensor(parts[3])
    net = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10))
    found = {}
    for step in follow_checkpoints({"net": net}, cfg.run, poll_s=cfg.poll_s):
        with torch.no_grad():
            accuracy = (net(x).argmax(dim=1) == y).float().mean().item()
        found[str(step)] = accuracy
        print(f"step {step}: accuracy {accuracy:.2%}", flush=True)
        report(step=step, accuracy=accuracy)
    return found


if __name__ == "__main__":
    main()
