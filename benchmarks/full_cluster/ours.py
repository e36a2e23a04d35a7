"""The training as a run of hpc_elastic: ``ours.py FOLDER SETTINGS`` submits it, and waits."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from full_cluster.work import Training


def train(folder: str) -> None:
    from hpc_elastic import mark_checkpoint, should_checkpoint

    training = Training(Path(folder), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    while not training.is_complete:
        training.make_step()
        if should_checkpoint(training.step, every_s=15.0) or training.is_complete:
            training.save()
            mark_checkpoint(step=training.step)


def submit(folder: str, settings: str) -> None:
    """Submit `train`, and wait, as a launcher on a login node does."""
    from hpc_elastic import launch

    launch(
        train, folder, nproc_per_node=1, launcher="slurm", run_dir=Path(folder, "run"),
        **json.loads(settings),
    )  # fmt: skip


if __name__ == "__main__":
    submit(*sys.argv[1:])
