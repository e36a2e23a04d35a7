"""One island as a process: trains a small model by steps that sleep, and reports what it did.

python island.py FOLDER NAME SECONDS STEP_S SYNC_EVERY QUANTIZE
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hpc_elastic.ft import IslandDiLoCo, RoundPolicy

MIN_STEPS = 400
"""On a slow machine too, so that it learns."""


def model_of(name):
    """Return a model with other initial parameters on each island."""
    torch.manual_seed(sum(name.encode()))
    return nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 4))


def main():
    """Train until the time is over, and write what came of it."""
    folder, name, seconds, step_s, sync_every, quantize = sys.argv[1:]
    torch.set_num_threads(1)
    model = model_of(name)
    inner = torch.optim.SGD(model.parameters(), 0.02)
    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    policy = RoundPolicy(grace_s=1.0, turn_s=0.5)
    ends = time.monotonic() + float(seconds)
    steps, losses = 0, []
    with IslandDiLoCo(
        folder, name, list(model), inner, outer, int(sync_every),
        policy=policy, poll_s=0.05, quantize=quantize == "1",
    ) as islands:  # fmt: skip
        print("started", islands.round, flush=True)
        while time.monotonic() < ends or steps < MIN_STEPS:
            x = torch.randn(16, 64)
            inner.zero_grad()
            loss = (model(x) - x[:, :4]).square().mean()
            loss.backward()
            inner.step()
            steps += 1
            losses.append(loss.item())
            time.sleep(float(step_s))
        islands.finish(30)
    report = {
        "steps": steps, "tokens": islands.tokens, "round": islands.round,
        "held_up_s": islands.held_up_s, "losses": [losses[0], losses[-1]],
    }  # fmt: skip
    Path(folder, f"report.{name}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
    # threads of torch's autograd may abort the process while the interpreter ends, as
    # `worker_main._exit_process` describes: an island that had done all its work was lost so
    os._exit(0)
