"""What the adapters of unchanged scripts share (``launcher.adapt``): the batch, and what they say.

`adapted_lightning` and `adapted_huggingface` do for a script what its author would write with
`lightning` and `huggingface`. A worker loads them when its script has imported the framework
(`agent.worker_main`), so they cost other processes nothing. They wrap the framework's public
methods, each in one place, and use the integration itself for all else.

A script gives the samples of a worker at a time, and the sum over the workers is its batch. Here
that sum is over the fewest workers of the run, unless ``launcher.global_batch`` gives it, and stays
the same for any number: a larger group has smaller shares, so what fits into a worker's memory does
so always.

What cannot be made exact is not guessed. The level that is printed says what a change of the group
costs, and its reason says why it is not the next one (docs/explanation/levels.md).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hpc_elastic.integrations import tracking
from hpc_elastic.run.directory import RUN_DIR_VARIABLE, RunDir

REMEDY = "launcher.adapt=off leaves the script as it is"


def global_batch(of_worker: int) -> int:
    """Return the batch of this worker's run: ``launcher.global_batch``, or as above."""
    settings = RunDir(Path(os.environ[RUN_DIR_VARIABLE])).load().settings
    on_node = settings.nproc_per_node
    if not isinstance(on_node, int):
        on_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return settings.launcher.global_batch or of_worker * settings.nodes.min * on_node


def print_level(framework: str, parts: str, *, level: int, why: str) -> None:
    """Print, on rank 0, what was adapted, and the level with its reason."""
    if tracking.is_logger():
        what = f"adapted: {framework} ({parts})" if parts else f"not adapted: {framework}"
        print(f"hpc_elastic: {what}, level {level}: {why}", file=sys.stderr)


def exact(batch: int) -> str:
    """Return the reason of level 3."""
    return f"each sample once an epoch, in batches of {batch} samples for any number of workers"
