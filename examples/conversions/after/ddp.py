"""Train on handwritten digits with DistributedDataParallel."""

import argparse
import math
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic import Checkpointer, ElasticSampler, report

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=24)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--pause-s", type=float, default=0.05, help="stands for a larger model")


def main() -> None:
    args = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16).float(), torch.tensor(labels)
    data, held_out = TensorDataset(x[:1536], y[:1536]), (x[1536:].to(device), y[1536:].to(device))
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    sampler = ElasticSampler(data, global_batch_size=48)
    loader = DataLoader(data, batch_sampler=sampler)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    parts = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
    checkpointer = Checkpointer({**parts, "sampler": sampler})
    checkpointer.load_latest()
    model = sampler.scale_gradients(DistributedDataParallel(net))
    loss = torch.tensor(math.nan)  # an epoch that is resumed at its end has no batch
    for epoch in sampler.epochs(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            time.sleep(args.pause_s)
            report(step=sampler.step, loss=loss, total_steps=sampler.total_steps)
            checkpointer.save_if_due(sampler.step)
        if dist.get_rank() == 0:
            with torch.no_grad():
                accuracy = (net(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
            print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy:.3f}", flush=True)
    checkpointer.save(sampler.step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
