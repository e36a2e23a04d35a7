"""A small training that fails on demand; docs/explanation/what-a-failure-looks-like.md uses it.

python train.py -m launcher=local nodes=2 fault=raise        rank 1 raises an error after step 30
"""

import importlib
import os
import signal
import sys
import threading
import time

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic import Checkpointer, ElasticSampler, report


@hydra.main(version_base=None, config_path=".", config_name="train")
def main(cfg: DictConfig) -> float:
    """Run in every worker; what it returns is the result of the run."""
    if cfg.fault == "import":
        importlib.import_module("flash_attention")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    points = torch.randn(2048, 16)
    data = TensorDataset(points, (points.sum(dim=1) > 0).long())
    net = nn.Linear(16, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    sampler = ElasticSampler(data, global_batch_size=64, seed=0)
    loader = DataLoader(data, batch_sampler=sampler)
    checkpointer = Checkpointer({"net": net, "optimizer": optimizer, "sampler": sampler})
    restored = checkpointer.load_latest()
    model = sampler.scale_gradients(DistributedDataParallel(net))
    loss = torch.tensor(0.0)
    for epoch in sampler.epochs(cfg.steps // 32):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            if sampler.step > cfg.at and cfg.fault == "diverge":
                loss = loss * float("nan")
            loss.backward()
            optimizer.step()
            report(step=sampler.step, loss=loss, total_steps=cfg.steps)
            time.sleep(cfg.pause_s)
            checkpointer.save_if_due(sampler.step, every_s=cfg.save_every_s)
            if (
                sampler.step == cfg.at
                and dist.get_rank() == cfg.rank
                and not (cfg.once and restored)
            ):
                fail(cfg.fault)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    return loss.item()


def fail(fault: str) -> None:
    """Fail in the way that the fault names."""
    if fault == "raise":
        raise ValueError("sample 1871: label 7, but the model has 2 classes")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
    if fault == "exit":
        sys.exit(0)
    if fault == "hang":
        threading.Event().wait()


if __name__ == "__main__":
    main()
