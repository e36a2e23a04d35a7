"""A script that trains as a user's would, and whose workers die now and then."""

import os
import signal
import time
from pathlib import Path

LENGTH, GLOBAL_BATCH, NUM_EPOCHS = 90, 8, 3
KILLED_AT = {1: (7, "1"), 2: (16, "0")}
"""In the nth round, after this step, the worker of this rank is killed."""


def train(folder: str) -> int:
    """Train with a checkpoint every third step; return the number of steps."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    from hpc_elastic.data import ElasticSampler

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = TensorDataset(torch.arange(LENGTH))
    sampler = ElasticSampler(LENGTH, GLOBAL_BATCH, seed=1)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=1)
    checkpoint = Path(folder, "checkpoint.pt")
    if checkpoint.exists():
        sampler.load_state_dict(torch.load(checkpoint, weights_only=True))
    dist.barrier()
    for _ in sampler.epochs(NUM_EPOCHS):
        for batch in sampler.batches(loader):
            for (numbers,), weight in batch.micro_batches():
                total = weight * numbers.double().mean()
            dist.all_reduce(total)  # as the exchange of gradients does, this waits for all
            if batch.step % 3 == 0:
                _save(checkpoint, sampler.state_dict())
            _die(batch.step)
    dist.destroy_process_group()
    return sampler.step


def _save(checkpoint: Path, state: object) -> None:
    import torch
    import torch.distributed as dist

    dist.barrier()  # all have written their ledgers
    if dist.get_rank() == 0:
        staged = checkpoint.with_suffix(".tmp")
        torch.save(state, staged)
        staged.replace(checkpoint)


def _die(step: int) -> None:
    step_of, rank = KILLED_AT.get(int(os.environ["HPC_ELASTIC_ROUND"]), (None, None))
    if (step, os.environ["RANK"]) == (step_of, rank):
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
