"""The data of an elastic run as a framework wants it: an iterable with a length and a state.

A framework draws micro-batches, and steps the optimizer when it likes. So the loader gives out this
rank's micro-batches one by one, and is told of the step (`trained`): only then does the position
move that goes into a checkpoint (`hpc_elastic.data.sampler` has the reason).

A checkpoint of an epoch's last step is one of the next epoch's beginning to frameworks, but the
sampler goes on inside of the old one, of which nothing is left. Such a rest is passed over.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hpc_elastic.data import ElasticSampler
from hpc_elastic.errors import ConfigError


class ElasticLoader:
    """Goes through a DataLoader whose ``batch_sampler`` is an `ElasticSampler`.

    Attributes:
        sampler: The sampler.
        dataset: The loader's dataset, for frameworks that ask for its length.
        weight: What the mean loss of the micro-batch given out last is to be multiplied by
            (`hpc_elastic.data.batch`): not 1 where the ranks have shares of different size.

    Raises:
        ConfigError: the loader has another batch sampler.
    """

    fits_any_world_size = True

    def __init__(self, loader: Any) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        if not isinstance(sampler, ElasticSampler):
            raise ConfigError(
                "loader",
                sampler,
                "make it with batch_sampler=ElasticSampler(data, global_batch_size)",
            )
        self.sampler = sampler
        self.dataset = loader.dataset
        self.weight = 1.0
        self._loader = loader
        self._parts: Iterator[tuple[Any, float]] = iter(())

    def __len__(self) -> int:
        """Return this rank's micro-batches of a whole epoch, also where a part of it is done."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left of the epoch; of the next one if nothing is."""
        num_batches = 0
        while not num_batches:
            for batch in self.sampler.batches(self._loader):
                num_batches += 1
                self._parts = batch.micro_batches()
                for data, weight in self._parts:
                    self.weight = weight
                    yield data

    def trained(self) -> None:
        """Note that the optimizer steps with all that was given out since its last step.

        Raises:
            RuntimeError: that is not a whole global batch.
        """
        if next(self._parts, self) is not self:
            raise RuntimeError(
                "the optimizer stepped before this rank's last micro-batch of the global batch: "
                "accumulate all of them: its share of the global batch in steps of micro_batch_size"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state (every rank)."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, with any number of workers."""
        self.sampler.load_state_dict(state)


# ---- Which checkpoints of a framework count: those that were complete when they got their name
# A framework writes its checkpoints in a format and in an order of its own, and dies in between
# like any other program. So what it has written is flushed to the disk, and gets the name, or the
# mark, by which `newest_step` finds it only then.


def flush(path: Path) -> None:
    """Wait until a file, or all files of a folder, are on the disk."""
    for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def by_step(paths: Iterable[Path]) -> list[Path]:
    """Return those whose names end with a step (``checkpoint-120``, ``step-120.ckpt``), in order.

    By the number, not by the name: 100 comes after 99.
    """
    numbered = [(int(m[1]), path) for path in paths if (m := re.search(r"-(\d+)$", path.stem))]
    return [path for _, path in sorted(numbered)]
