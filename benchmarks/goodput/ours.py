"""The training as a user of hpc_elastic writes it; ``ours.py FOLDER SHARED SETTINGS`` submits it.

The trail goes into a folder that this machine sees at once, all else into the shared one.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from goodput.workload import CHECKPOINT_S, GLOBAL_BATCH, SEED, Trail, dataset, loss_of, network
from hpc_elastic import Checkpointer, should_checkpoint
from hpc_elastic.data import ElasticSampler

EPOCHS = 1_000_000


def train(folder: str, shared: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net, optimizer = network()
    data = dataset()
    sampler = ElasticSampler(data, GLOBAL_BATCH, seed=SEED)
    loader = DataLoader(data, batch_sampler=sampler)
    state = {"net": net, "optimizer": optimizer, "sampler": sampler}
    checkpoints = Checkpointer(state, Path(shared, "checkpoints"))
    trail = Trail(Path(folder), checkpoints.load_latest() or 0)
    model = DistributedDataParallel(net)
    for _ in sampler.epochs(EPOCHS):
        for batch in sampler.batches(loader):
            optimizer.zero_grad()
            for (inputs, targets), weight in batch.micro_batches(model):
                (weight * loss_of(model, inputs, targets)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            trail.step(batch.step)
            if should_checkpoint(batch.step, every_s=CHECKPOINT_S):
                checkpoints.save(batch.step)


def submit(folder: str, shared: str, settings: str) -> None:
    from hpc_elastic import launch

    launch(
        train, folder, shared, nodes="1:4", nproc_per_node=1, launcher="slurm",
        run_dir=Path(shared, "run"), wait=False, **json.loads(settings),
    )  # fmt: skip


if __name__ == "__main__":
    submit(*sys.argv[1:])
