"""Train on scikit-learn's handwritten digits with Accelerate, with as many nodes as there are.

    python accelerated.py -m launcher=local nodes=1:2      two nodes, as processes on this machine
    python accelerated.py -m launcher=slurm nodes=1:4   one to four nodes of a Slurm cluster

Model and optimizer are prepared by Accelerate; the data and the checkpoints are ours, as in the
train.py of this project. docs/howto/huggingface.md gives the reasons.
"""

import hashlib
import time

import hydra
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic import Checkpointer, ElasticSampler, report


@hydra.main(version_base=None, config_path=".", config_name="accelerated")
def main(cfg: DictConfig) -> dict[str, object]:
    """Run in every worker; what it returns is the result of the run."""
    set_seed(cfg.seed)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    net = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), cfg.lr, momentum=0.9)
    )
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    sampler = ElasticSampler(data, cfg.batch_size, seed=cfg.seed)
    loader = DataLoader(data, batch_sampler=sampler)  # not prepared: it knows its share by itself

    checkpointer = Checkpointer({"net": net, "optimizer": optimizer, "sampler": sampler})
    checkpointer.load_latest()
    sampler.scale_gradients(model)
    for _ in sampler.epochs(cfg.epochs):
        for x, y in loader:
            x, y = x.to(accelerator.device), y.to(accelerator.device)
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            report(step=sampler.step, loss=loss, total_steps=sampler.total_steps)
            time.sleep(cfg.pause_s)
            checkpointer.save_if_due(sampler.step, every_s=cfg.save_every_s)
    checkpointer.save(sampler.step)

    accelerator.print(f"trained {sampler.step} steps, the last with {accelerator.num_processes}")
    bits = b"".join(p.detach().cpu().numpy().tobytes() for p in net.parameters())
    accelerator.end_training()
    return {"steps": sampler.step, "parameters": hashlib.sha256(bits).hexdigest()[:16]}


if __name__ == "__main__":
    main()
