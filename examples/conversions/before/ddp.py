"""Train on handwritten digits with DistributedDataParallel."""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=24)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--pause-s", type=float, default=0.05, help="stands for a larger model")
parser.add_argument("--checkpoint", type=Path, default=Path("digits.pt"))


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
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=48 // dist.get_world_size(), sampler=sampler)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    first_epoch = 0
    if args.checkpoint.exists():
        state = torch.load(args.checkpoint, map_location=device)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_epoch = state["epoch"] + 1
    model = DistributedDataParallel(net)
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            time.sleep(args.pause_s)
        if dist.get_rank() == 0:
            with torch.no_grad():
                accuracy = (net(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
            print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy:.3f}", flush=True)
            parts = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**state, "epoch": epoch}, args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
