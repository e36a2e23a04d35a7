"""The order of an epoch's samples, a computed permutation, and its global batches (pure).

The sample at a position is the encrypted position, so any part of the order of any epoch costs the
same, and nothing is stored: no list of indices, not even for 10^9 samples.

The cipher is a Feistel network over pairs (left, right) in Z_a x Z_b with a * b just above the
number of samples: rounds add a keyed hash of one half to the other half, modulo a or b, and each
can be undone, so the whole is a permutation of a * b numbers. What falls behind the last sample is
enciphered again until it does not ("cycle walking"), which keeps it a permutation. Both are from
J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002. The hash is the
finalizer of SplitMix64 (G. Steele, D. Lea, C. Flood, OOPSLA 2014); it makes a good shuffle, and no
secret. Keys come from seed and epoch by BLAKE2, so that the order is the same with any version of
NumPy or torch, on any machine, and for any world size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from hpc_elastic.data.batch import BatchDivision
from hpc_elastic.errors import ConfigError

VERSION = 1
"""Raise it if the same seed and epoch give another order, which makes old positions invalid."""

_ROUNDS = 12


class Order:
    """The samples of one epoch, by position; ``num_samples`` is at most 2^62."""

    def __init__(self, num_samples: int, seed: int, epoch: int, *, shuffle: bool = True) -> None:
        self._num_samples = num_samples
        self._keys = _keys(seed, epoch) if shuffle else None
        left = math.isqrt(num_samples - 1) + 1
        right = -(-num_samples // left)
        self._left, self._right = np.uint64(left), np.uint64(right)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples' indices in the dataset; positions after the last wrap around."""
        positions = positions % self._num_samples
        if self._keys is None:
            return positions
        samples = self._encipher(positions.astype(np.uint64), self._keys)
        while (outside := samples >= self._num_samples).any():
            samples[outside] = self._encipher(samples[outside], self._keys)
        return samples.astype(np.int64)

    def _encipher(self, x: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x // self._right, x % self._right
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            left = (left + _mix(right ^ even) % self._left) % self._left
            right = (right + _mix(left ^ odd) % self._right) % self._right
        return left * self._right + right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    keys = [hashed(VERSION, seed, epoch, i) for i in range(_ROUNDS)]
    return np.array(keys, dtype=np.uint64)


def hashed(*numbers: int) -> int:
    """Return a 64-bit hash of some numbers."""
    text = " ".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


End = Literal["keep", "drop", "pad"]


class SamplePosition(NamedTuple):
    """A position in the training: samples of the epoch, steps of the run, all ranks together."""

    epoch: int = 0
    position: int = 0
    step: int = 0


@dataclass(frozen=True)
class EpochPlan:
    """The global batches of an epoch; the fields are the arguments of `ElasticSampler`."""

    length: int
    seed: int
    shuffle: bool
    end: End
    batch: BatchDivision

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError("dataset", self.length, "the dataset has no samples")
        if self.end not in get_args(End):
            raise ConfigError("end", self.end, f"give one of {', '.join(get_args(End))}")
        if not self.size(0):
            remedy = f"it drops all {self.length} samples: give a smaller one, or end='keep'"
            raise ConfigError("global_batch_size", self.batch.global_batch_size, remedy)

    def size(self, position: int) -> int:
        """Return the size of the global batch at a position; 0 at the end of the epoch."""
        left, whole = self.length - position, self.batch.global_batch_size
        if left >= whole or (left > 0 and self.end == "pad"):
            return whole
        return max(0, left) if self.end == "keep" else 0

    def after(self, place: SamplePosition, num_steps: int) -> SamplePosition:
        """Return the position after a number of steps; an epoch's end is still in that epoch."""
        whole = self.batch.global_batch_size
        epoch, position, ahead = place.epoch, place.position, num_steps
        if (end := position + ahead * whole) <= self.length:
            return SamplePosition(epoch, end, place.step + ahead)
        left = self.batches_from(position)
        if ahead > left:
            epochs, ahead = divmod(ahead - left - 1, self.num_batches)
            epoch, position, ahead = epoch + 1 + epochs, 0, ahead + 1
        position += ahead * whole
        if self.end == "keep":
            position = min(position, max(self.length, place.position))
        return SamplePosition(epoch, position, place.step + num_steps)

    def steps(
        self, place: SamplePosition, num_steps: int
    ) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Yield the next steps' samples, of all ranks, as `ledger.Span`: a row per rule."""
        whole = self.batch.global_batch_size
        while num_steps > 0:
            place = self.next_batch(place)
            full = (self.length - place.position) // whole
            count = min(num_steps, max(1, full))  # a smaller batch is the last one of the epoch
            size = self.size(place.position)
            yield place.step + 1, count, place.epoch, place.position, size, size
            place, num_steps = self.after(place, count), num_steps - count

    def next_batch(self, place: SamplePosition) -> SamplePosition:
        """Return the start of the next batch, which may be in the next epoch."""
        has_more = self.size(place.position) > 0
        return place if has_more else SamplePosition(place.epoch + 1, 0, place.step)

    def batches_from(self, position: int) -> int:
        """Return the number of global batches from a position to the end of the epoch."""
        full, rest = divmod(max(0, self.length - position), self.batch.global_batch_size)
        return full + (rest > 0 and self.end != "drop")

    @property
    def num_batches(self) -> int:
        """Global batches of a whole epoch."""
        return self.batches_from(0)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a whole epoch, of each rank."""
        full = self.length // self.batch.global_batch_size
        last = self.size(full * self.batch.global_batch_size)
        num_micro_batches = full * self.batch.num_micro_batches(self.batch.global_batch_size)
        return num_micro_batches + (self.batch.num_micro_batches(last) if last else 0)

    def samples(self, epoch: int) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
        """Return the function from positions of an epoch to samples."""
        return Order(self.length, self.seed, epoch, shuffle=self.shuffle)

    def random_seed(self, step: int, offset: int, use: Literal["loader", "model"]) -> int:
        """Return the seed of a micro-batch, from 0 to 2^63 - 1; the first step is 1."""
        return hashed(self.seed, step, offset, ("loader", "model").index(use)) >> 1

    def facts(self) -> dict[str, Any]:
        """Return the values that fix the order; a position is meaningless without them."""
        known = {"dataset_len": self.length, "seed": self.seed}
        return {**known, "shuffle": self.shuffle, "order": VERSION}

    def require_same_order(self, state: dict[str, Any]) -> None:
        """Accept the state of a sampler with the same order; else raise ConfigError."""
        for key, mine in self.facts().items():
            if state.get(key) != mine:
                remedy = (
                    f"the state was taken with {key}={state.get(key)!r}, and its position would "
                    "mean other samples: use that again, or start without the state"
                )
                raise ConfigError(key, mine, remedy)
