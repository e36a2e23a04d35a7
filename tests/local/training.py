"""A small training on gloo that goes on until it is told to stop."""

import json
import os
import time
from pathlib import Path

GIVE_UP_S = 180.0


def train(folder: str) -> int:
    """Step until ``folder/stop`` exists; return the number of steps of this round.

    ``folder/round-<n>.json`` says where the round's store is, and ``folder/steps`` grows by a line
    with the world size for each step.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if rank == 0:
        where = {"address": os.environ["MASTER_ADDR"], "port": int(os.environ["MASTER_PORT"])}
        Path(folder, f"round-{os.environ['HPC_ELASTIC_ROUND']}.json").write_text(json.dumps(where))
    until, steps = time.monotonic() + GIVE_UP_S, 0
    while True:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        steps += 1
        stop = torch.tensor(int(Path(folder, "stop").exists() or time.monotonic() > until))
        dist.all_reduce(stop)
        if rank == 0:
            with Path(folder, "steps").open("a") as f:
                f.write(f"{size}\n")
        if stop.item():
            dist.destroy_process_group()
            return steps
        time.sleep(0.05)
