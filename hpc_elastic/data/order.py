"""The order of an epoch's samples: a permutation that is computed, not stored (pure).

The sample at a position is found by enciphering the position, so any part of the order of any
epoch costs the same, and nothing has to be kept: no list of indices, not even for 10^9 samples.

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

import numpy as np
from numpy.typing import NDArray

VERSION = 1
"""To be raised if the same seed and epoch ever give another order: old positions mean nothing."""

_ROUNDS = 12


class Order:
    """The samples of one epoch, by position.

    Args:
        num_samples: Length of the dataset, 1 to 2^62.
        seed: Any integer.
        epoch: Any integer; each has its own order.
        shuffle: False leaves the samples in the dataset's order.
    """

    def __init__(self, num_samples: int, seed: int, epoch: int, *, shuffle: bool = True) -> None:
        self._num_samples = num_samples
        self._keys = _keys(seed, epoch) if shuffle else None
        left = math.isqrt(num_samples - 1) + 1
        right = -(-num_samples // left)
        self._left, self._right = np.uint64(left), np.uint64(right)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples' indices in the dataset.

        Args:
            positions: From 0; those behind the last sample begin again at the first.
        """
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
    """Return 64 bits that look random and depend on all of these."""
    text = " ".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
