"""Which global batches an epoch has, and how far a training is in it (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from hpc_elastic.data import order
from hpc_elastic.data.batch import ElasticBatch
from hpc_elastic.errors import ConfigError

End = Literal["keep", "drop", "pad"]


@dataclass(frozen=True, order=True)
class Place:
    """How far a training is.

    Attributes:
        epoch: The epoch that is being trained, from 0.
        position: How much of its order was trained, all ranks together.
        step: Global batches that were trained over the whole run.
    """

    epoch: int = 0
    position: int = 0
    step: int = 0


@dataclass(frozen=True)
class Plan:
    """An epoch's samples as global batches: what `ElasticSampler` was given.

    Raises:
        ConfigError: a value is out of range, or an epoch would have no batch.
    """

    length: int
    seed: int
    shuffle: bool
    end: End
    batch: ElasticBatch

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError("dataset_len", self.length, "the dataset has no samples")
        if self.end not in get_args(End):
            raise ConfigError("end", self.end, f"give one of {', '.join(get_args(End))}")
        if not self.size(0):
            remedy = f"it drops all {self.length} samples: give a smaller one, or end='keep'"
            raise ConfigError("global_batch", self.batch.global_batch, remedy)

    def size(self, position: int) -> int:
        """Return the size of the global batch at a position; 0 where the epoch ends."""
        left, whole = self.length - position, self.batch.global_batch
        if left >= whole or (left > 0 and self.end == "pad"):
            return whole
        return max(0, left) if self.end == "keep" else 0

    def after(self, place: Place, num_steps: int) -> Place:
        """Return the place that is so many steps further; at an epoch's end it is still in it.

        Args:
            place: Where to begin.
            num_steps: From 0.
        """
        whole = self.batch.global_batch
        left = self._batches_from(place.position)
        epoch, position, ahead = place.epoch, place.position, num_steps
        if ahead > left:
            epochs, ahead = divmod(ahead - left - 1, self.num_batches)
            epoch, position, ahead = epoch + 1 + epochs, 0, ahead + 1
        position += ahead * whole
        if self.end == "keep":
            position = min(position, max(self.length, place.position))
        return Place(epoch, position, place.step + num_steps)

    def steps(self, place: Place, num_steps: int) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Yield what the steps behind a place train, all ranks together, as rows of a ledger.

        Of the form of `ledger.Span`: steps that follow one rule are one row.

        Args:
            place: Where to begin.
            num_steps: From 0.
        """
        whole = self.batch.global_batch
        while num_steps > 0:
            place = self.next_batch(place)
            full = (self.length - place.position) // whole
            count = min(num_steps, max(1, full))  # what is no full batch is the epoch's last one
            size = self.size(place.position)
            yield place.step + 1, count, place.epoch, place.position, size, size
            place, num_steps = self.after(place, count), num_steps - count

    def next_batch(self, place: Place) -> Place:
        """Return where the next batch begins: in the next epoch, if none of this one is left."""
        has_more = self.size(place.position) > 0
        return place if has_more else Place(place.epoch + 1, 0, place.step)

    def _batches_from(self, position: int) -> int:
        full, rest = divmod(max(0, self.length - position), self.batch.global_batch)
        return full + (rest > 0 and self.end != "drop")

    @property
    def num_batches(self) -> int:
        """Global batches of a whole epoch."""
        return self._batches_from(0)

    @property
    def num_parts(self) -> int:
        """Micro-batches of a whole epoch, of each rank."""
        full = self.length // self.batch.global_batch
        last = self.size(full * self.batch.global_batch)
        num_parts = full * self.batch.num_parts(self.batch.global_batch)
        return num_parts + (self.batch.num_parts(last) if last else 0)

    def samples(self, epoch: int) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
        """Return what gives the sample at each position of an epoch."""
        return order.Order(self.length, self.seed, epoch, shuffle=self.shuffle)

    def facts(self) -> dict[str, Any]:
        """Return what decides which sample is where: a position means nothing without it."""
        return {
            "dataset_len": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "order": order.VERSION,
        }

    def require_same_order(self, state: dict[str, Any]) -> None:
        """Accept the state of a sampler with the same order.

        Raises:
            ConfigError: it had another; names what differs.
        """
        for key, mine in self.facts().items():
            if state.get(key) != mine:
                remedy = (
                    f"the state was taken with {key}={state.get(key)!r}, and its position would "
                    "mean other samples: use that again, or start without the state"
                )
                raise ConfigError(key, mine, remedy)


def require_word(name: str) -> None:
    """Accept a name that can be a part of a file's name.

    Raises:
        ConfigError: it can not.
    """
    if not re.fullmatch(r"[\w-]+", name):
        raise ConfigError("name", name, "give letters, digits, '_' and '-' only")
