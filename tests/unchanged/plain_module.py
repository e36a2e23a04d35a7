"""A plain loop at module level: a schedule, an average, a best value, the samples it trained."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PAUSE_S = float(os.environ.get("PAUSE_S", 0))

dist.init_process_group("gloo")
torch.manual_seed(0)
numbers = torch.arange(74)
x = torch.randn(74, 4)
data = TensorDataset(numbers, x, x.sum(1, keepdim=True))
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)).eval()
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n / 9))
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, batch_size=2, sampler=sampler)
torch.manual_seed(dist.get_rank())
best, num_better, num_steps, history = float("inf"), 0, 0, []
log = Path(f"samples-{os.getpid()}.jsonl").open("w", buffering=1)  # noqa: SIM115
for epoch in range(4):
    sampler.set_epoch(epoch)
    model.train()
    total = 0.0
    for i, (number, inputs, wanted) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()
        optimizer.step()
        average.update_parameters(net)
        scheduler.step()
        num_steps += 1
        total += loss.item()
        log.write(json.dumps([epoch, i, number.tolist()]) + "\n")
        time.sleep(PAUSE_S)
    model.eval()
    with torch.no_grad():
        error = nn.functional.mse_loss(average(x), x.sum(1, keepdim=True)).item()
    history.append(error)
    if error < best:
        best, num_better = error, num_better + 1
log.close()
if dist.get_rank() == 0:
    both = [*net.parameters(), *average.parameters()]
    parameters = torch.cat([p.detach().flatten() for p in both])
    found = {"parameters": parameters.tolist(), "steps": num_steps, "history": history}
    found |= {"best": best, "better": num_better, "rate": scheduler.get_last_lr()}
    Path(sys.argv[1]).write_text(json.dumps(found))
dist.destroy_process_group()
