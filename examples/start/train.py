"""A script to start from: replace the data, the model and the loss by yours.

python train.py -m launcher=local nodes=1:2       two nodes, as processes on this machine
hpc-elastic events last                           what happened to the run
"""

import os

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic import Checkpointer, ElasticSampler, report


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """Run in every worker; what it returns is the result of the run."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    torch.manual_seed(cfg.seed)

    x = torch.randn(10_000, 32)
    data = TensorDataset(x, x.square().sum(dim=1, keepdim=True))
    net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 1)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), cfg.lr)

    sampler = ElasticSampler(data, cfg.batch_size, seed=cfg.seed)
    loader = DataLoader(data, batch_sampler=sampler)
    checkpointer = Checkpointer({"net": net, "optimizer": optimizer, "sampler": sampler})
    checkpointer.load_latest()
    model = sampler.scale_gradients(DistributedDataParallel(net))
    loss = torch.zeros(())
    for _ in sampler.epochs(cfg.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = mse_loss(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            report(step=sampler.step, loss=loss, total_steps=sampler.total_steps)
            checkpointer.save_if_due(sampler.step, every_s=cfg.save_every_s)
    checkpointer.save(sampler.step)
    dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    main()
