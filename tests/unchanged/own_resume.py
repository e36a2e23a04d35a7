"""A script whose loop is not known, but its option; it writes its files in place."""

import argparse
import json
import os
import shutil
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--resume", default="", type=str, metavar="PATH", help="the last checkpoint")
parser.add_argument("--out", default="out", type=Path)
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8)
begin = 0
if args.resume:
    found = torch.load(args.resume, weights_only=True)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    begin = found["epoch"]


def note(name, epoch):
    """Add a line to a file."""
    with Path(name).open("a") as log:
        log.write(f"{epoch}\n")


class Deadly:
    """Kills the process while a file is written that has it, once."""

    def __reduce__(self):
        if not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return int, ()


for epoch in range(begin, 8):
    for _, (x,) in zip(range(4), loader, strict=False):
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        dist.barrier()
        if rank == 0:
            note("steps", epoch)
        time.sleep(float(os.environ.get("PAUSE_S", "0")))
    if rank == 0:
        args.out.mkdir(exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if os.environ.get("DIES_IN_SAVE_OF") == str(epoch):
            state["what"] = Deadly()
        torch.save({"epoch": epoch + 1, **state}, args.out / "checkpoint.pt")
        torch.save(model.state_dict(), args.out / "weights.pt")
        if epoch % 3 == 0:
            shutil.copyfile(args.out / "checkpoint.pt", args.out / "model_best.pt")
        note("epochs", epoch)
if rank == 0:
    Path("result.json").write_text(json.dumps([p.tolist() for p in model.parameters()]))
dist.destroy_process_group()
