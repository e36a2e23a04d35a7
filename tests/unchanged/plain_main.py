"""A plain loop in main() and train(): arguments, accumulation, a scaler, steps counted globally."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

num_steps = 0


def train(args, model, device, loader, optimizer, scaler, epoch):
    """Train an epoch."""
    global num_steps
    model.train()
    seen = 0
    for batch, (inputs, wanted) in enumerate(loader):
        inputs, wanted = inputs.to(device), wanted.to(device)
        loss = nn.functional.mse_loss(model(inputs), wanted) / 2
        scaler.scale(loss).backward()
        seen += len(inputs)
        if (batch + 1) % 2 == 0 or batch + 1 == len(loader):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            num_steps += 1
            time.sleep(args.pause_s)
        if batch % args.log_interval == 0:
            print(f"epoch {epoch}, batch {batch}: {seen} samples, loss {loss.item():.4f}")


def test(model, device, loader):
    """Return the mean loss."""
    model.eval()
    total = 0.0
    with torch.no_grad():
        for inputs, wanted in loader:
            total += nn.functional.mse_loss(model(inputs.to(device)), wanted.to(device)).item()
    return total / len(loader)


def main():
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--log-interval", type=int, default=5)
    parser.add_argument("--pause-s", type=float, default=float(os.environ.get("PAUSE_S", 0)))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    args.rank, args.workers = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    torch.manual_seed(0)
    inputs = torch.randn(98, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    test_loader = DataLoader(data, batch_size=49)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=7)
    best_loss = 1e9
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        train(args, model, device, loader, optimizer, scaler, epoch)
        loss = test(model, device, test_loader)
        best_loss = min(best_loss, loss)
        scheduler.step()
    if args.rank == 0:
        parameters = torch.cat([p.detach().flatten() for p in net.parameters()])
        found = {"parameters": parameters.tolist(), "steps": num_steps, "best": best_loss}
        args.result.write_text(json.dumps({**found, "scale": scaler.get_scale()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
