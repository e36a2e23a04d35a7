"""The data of an elastic run for frameworks: an iterable with a length and a state.

A framework draws micro-batches, and steps the optimizer on its own schedule. So the loader yields
this rank's micro-batches one by one, and `on_optimizer_step` reports the step: only then the
position moves that goes into a checkpoint (`hpc_elastic.data.sampler` has the reason).

For frameworks, a checkpoint of an epoch's last step is at the start of the next epoch. The sampler
continues inside of the old epoch without a batch left, so the loader skips such a rest.

A framework writes its checkpoints in its own format and order, and may be killed in between. So
what it has written is flushed to the disk first, and only then gets the name or the mark of a
complete checkpoint.

A script that is adapted without a change (``launcher.adapt``) gives the samples of a worker at a
time, and the sum over the workers is its batch. Here that sum is over the fewest workers of the
run, unless ``launcher.global_batch`` gives it, and stays the same for any number: a larger group
has smaller shares, so what fits into a worker's memory does so always. What cannot be made exact
is not guessed. The level that is printed says what a change of the group costs, and its reason
says why it is not the next one (docs/explanation/levels.md).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from hpc_elastic.config.schema import RunSettings
from hpc_elastic.data import ElasticSampler
from hpc_elastic.data.batch import BatchDivision
from hpc_elastic.errors import ConfigError
from hpc_elastic.integrations import tracking
from hpc_elastic.run.directory import RUN_DIR_VARIABLE, RunDir
from hpc_elastic.shared_files import sync_to_disk


class ElasticLoader:
    """Iterates over a DataLoader whose ``batch_sampler`` is an `ElasticSampler`.

    Attributes:
        weight: Factor for the mean loss of the last micro-batch (`hpc_elastic.data.batch`); not 1
            if the ranks have shares of different size.
        is_endless: Whether an iteration goes on with the next epoch: the framework ends its epochs
            by the number of batches, and they need not be those of the sampler.

    Raises:
        ConfigError: The loader has another batch sampler.
    """

    fits_any_world_size = True

    def __init__(self, loader: Any) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        if not isinstance(sampler, ElasticSampler):
            raise ConfigError(
                "loader",
                sampler,
                "create it with batch_sampler=ElasticSampler(data, global_batch_size)",
            )
        self.sampler = sampler
        self.dataset: Any = loader.dataset
        self.weight: float = 1.0
        self.is_endless = False
        self._loader = loader
        self._parts: Iterator[tuple[Any, float]] = iter(())

    @property
    def batch_sizes(self) -> tuple[int, int | None]:
        """The size of a global batch, and the number of samples if an epoch's last is smaller."""
        plan, size = self.sampler._plan, self.sampler._plan.batch.global_batch_size
        return size, plan.length if plan.end == "keep" and plan.length % size else None

    def __len__(self) -> int:
        """Return this rank's number of micro-batches of a whole epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of the epoch, or the next one if nothing is left."""
        num_batches = 0
        while self.is_endless or not num_batches:
            for batch in self.sampler.batches(self._loader):
                num_batches += 1
                self._parts = batch.micro_batches()
                for data, weight in self._parts:
                    self.weight = weight
                    yield data

    def on_optimizer_step(self) -> None:
        """Count the global batch as trained; RuntimeError if this rank's part is incomplete."""
        if next(self._parts, self) is not self:
            raise RuntimeError(
                "the optimizer stepped before this rank's last micro-batch of the global batch: "
                "accumulate all of them, its share of the global batch in steps of micro_batch_size"
            )
        self.sampler.on_optimizer_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state (every rank)."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, with any number of workers."""
        self.sampler.load_state_dict(state)


class _EqualParts(BatchDivision):
    def _num_micro_batches_of_a_rank(self, size: int) -> int:
        return super()._num_micro_batches_of_a_rank(self.global_batch_size)


def divide_equally(sampler: ElasticSampler) -> None:
    """Give an epoch's last, smaller batch as many micro-batches as others, some of weight 0."""
    batch = _EqualParts(**vars(sampler._plan.batch))
    sampler._plan = replace(sampler._plan, batch=batch)


_OPTIONS = (
    "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn",
    "multiprocessing_context", "prefetch_factor", "persistent_workers", "in_order",
)  # fmt: skip


def elastic_copy(theirs: Any, sampler: ElasticSampler) -> ElasticLoader:
    """Return an elastic loader of the data of a DataLoader, with its options."""
    options = {name: getattr(theirs, name) for name in _OPTIONS}
    return ElasticLoader(DataLoader(theirs.dataset, batch_sampler=sampler, **options))


def sync_all(path: Path) -> None:
    """Synchronise a file, or a folder with all that is in it, to the disk."""
    for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
        sync_to_disk(file)


def sort_by_step(paths: Iterable[Path]) -> list[Path]:
    """Return the paths sorted by the step with which their names end, as a number."""
    numbered = [(int(m[1]), path) for path in paths if (m := re.search(r"-(\d+)$", path.stem))]
    return [path for _, path in sorted(numbered)]


# ---- scripts without a change


REMEDY = "launcher.adapt=off leaves the script as it is"


def global_batch(of_worker: int) -> int:
    """Return the batch of this worker's run: ``launcher.global_batch``, or as above."""
    settings, on_node = own_settings()
    return settings.launcher.global_batch or of_worker * settings.nodes.min * on_node


def own_settings() -> tuple[RunSettings, int]:
    """Return the settings of this worker's run, and the number of workers on its node."""
    settings = RunDir(Path(os.environ[RUN_DIR_VARIABLE])).load().settings
    on_node = settings.nproc_per_node
    if not isinstance(on_node, int):
        on_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return settings, on_node


def print_level(framework: str, parts: str, *, level: int, why: str) -> None:
    """Print, on rank 0, what was adapted, and the level with its reason."""
    if tracking.is_logger():
        what = f"adapted: {framework} ({parts})" if parts else f"not adapted: {framework}"
        print(f"hpc_elastic: {what}, level {level}: {why}", file=sys.stderr)


def exact(batch: int) -> str:
    """Return the reason of level 3."""
    return f"each sample once an epoch, in batches of {batch} samples for any number of workers"


def why_not_exact(loader: Any) -> str | None:
    """Return why the order of a loader's samples is not known; None if it is."""
    kind: Any = type(loader)
    if kind is not DataLoader:
        return f"the train data is a {kind.__name__}, and not one DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return f"the loop draws from an IterableDataset ({type(loader.dataset).__name__})"
    if loader.batch_size is None:
        return "its order is that of a batch_sampler of the script's own"
    sampler = loader.sampler
    for what in (loader.batch_sampler, sampler):
        known = (BatchSampler, RandomSampler, SequentialSampler, DistributedSampler)
        if type(what) not in known:
            return f"its order is that of a {type(what).__name__}"
    if isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != len(loader.dataset)
    ):
        return "its RandomSampler draws a part of the samples, or some of them twice"
    if not loader.in_order:
        return "in_order=False"
    return None
