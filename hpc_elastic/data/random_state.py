"""The random number generators of a process: Python's, NumPy's, torch's on CPU and on the GPU.

torch is seeded if the process has imported it; this module imports NumPy only.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np


class SeededIndices(list[int]):
    """The indices of one micro-batch; an iteration over them seeds the generators first.

    A DataLoader iterates over them in the process that loads, just before it fetches the samples.
    So the random numbers of the dataset and of ``collate_fn`` depend on the seed alone, for any
    number of loader workers.
    """

    def __init__(self, indices: list[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        seed_generators(self.seed)
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:  # list's own iterates
        return SeededIndices, (self[:], self.seed)


def seed_generators(seed: int) -> None:
    """Seed all generators, from 0 to 2^63 - 1."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    for generator in _torch_generators():
        generator.manual_seed(seed)


@contextlib.contextmanager
def restored_generators() -> Iterator[None]:
    """Restore the present states of all generators at the end."""
    generators = _torch_generators()
    states = [generator.get_state() for generator in generators]
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextlib.contextmanager
def seeded_torch_generator(seed: int) -> Iterator[None]:
    """Seed torch's default generator, and restore it at the end.

    A DataLoader draws from it at each start, and an interrupted training starts it once more. That
    would change the model's random numbers, such as those of dropout.
    """
    torch = sys.modules.get("torch")  # nothing to restore without torch
    if torch is None:
        yield
        return
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def _torch_generators() -> list[Any]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return []
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():  # False in a loader's forked worker
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators
