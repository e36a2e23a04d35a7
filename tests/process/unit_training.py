"""A training of replicas of several nodes: FSDP2 inside a replica, the mean across replicas.

Each worker writes a line for each committed step to ``folder/<slot of its node>.<pid>``, and at the
end the hash of its shard.
"""

import hashlib
import json
import os
import time
from datetime import timedelta
from pathlib import Path

TIMEOUT = timedelta(seconds=30)
STEP_S = 0.02


def train_sharded(folder: str) -> str:
    """Train until the folder has a file ``stop`` with a step; return the hash of the shard."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from hpc_elastic.ft import Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    task, _, replica = os.environ["HPC_ELASTIC_FENCE_REPLICA"].split(":")
    slot = int(task.rpartition("_")[2])
    log = (Path(folder) / f"{slot}.{os.getpid()}").open("a")
    stop = Path(folder) / "stop"

    def note(**fields: object) -> None:
        log.write(json.dumps({"at": time.time(), "replica": int(replica), **fields}) + "\n")
        log.flush()

    dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.manual_seed(slot)
    draws = torch.Generator().manual_seed(slot)
    model = fully_shard(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
    )
    optimizer = Optimizer(manager, inner)
    note(started=dist.get_rank())
    while not stop.exists() or manager.current_step() < int(stop.read_text()):
        step = manager.current_step()
        optimizer.zero_grad()
        x = torch.randn(4, 16, generator=draws)
        (model(x) - x.flip(1)).square().mean().backward()
        for parameter in model.parameters():
            manager.allreduce(parameter.grad.to_local())
        optimizer.step()
        made = manager.current_step() > step
        size = manager.num_participants()
        note(**{"made" if made else "failed": True}, step=manager.current_step(), size=size)
        time.sleep(STEP_S)
    shards = torch.cat([p.detach().to_local().flatten() for p in model.parameters()])
    digest = hashlib.blake2b(shards.numpy().tobytes(), digest_size=8).hexdigest()
    note(digest=digest, rank=dist.get_rank())
    manager.shutdown()
    return digest
