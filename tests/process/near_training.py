"""A training whose saves go to memory only, but for the first."""

import os
import time
from pathlib import Path

GIVE_UP_S = 180.0


def train(folder: str) -> int:
    """Step and save until ``folder/stop`` exists; return the last step.

    ``folder/began`` grows by a line with the step and the world size for each start, and
    ``folder/saved`` holds the last step that all ranks have saved, ``folder/node-<rank>`` the
    process ids of the agent and the worker, and the agent's folder in memory.
    """
    import torch
    import torch.distributed as dist

    from hpc_elastic.checkpoint import Checkpointer, MemoryTier

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, here = dist.get_rank(), Path(folder)
    place = f"{os.getppid()} {os.getpid()} {os.environ['HPC_ELASTIC_CONTROL_DIR']}"
    (here / f"node-{rank}").write_text(place)
    weights = torch.zeros(1000)
    tiers, until = MemoryTier(shared_every=1_000_000), time.monotonic() + GIVE_UP_S
    with Checkpointer({"weights": weights}, here / "checkpoints", memory_tier=tiers) as ckpt:
        step = ckpt.load_latest() or 0
        assert bool((weights == step).all())
        if rank == 0:
            with (here / "began").open("a") as f:
                f.write(f"{step} {dist.get_world_size()}\n")
        while True:
            step += 1
            weights.fill_(step)
            ckpt.save(step)
            ckpt.wait()
            stop = torch.tensor(int((here / "stop").exists() or time.monotonic() > until))
            dist.all_reduce(stop)
            if rank == 0:
                (here / "saved.new").write_text(str(step))
                (here / "saved.new").replace(here / "saved")
            if stop.item():
                return step
            time.sleep(0.02)
