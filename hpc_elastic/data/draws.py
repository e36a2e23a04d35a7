"""What stands between a sampler and its loader: the draws it hands out, and the items it gets."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpc_elastic.data.plan import Place, Plan
from hpc_elastic.errors import ConfigError

_BLOCK = 1024
"""Indices that are computed at once: a call costs 0.2 ms, however few they are."""


@dataclass(frozen=True)
class Keeper:
    """The sampler as torchdata's StatefulDataLoader meets it, behind its draws."""

    save: Callable[[Place], dict[str, Any]]
    """Return the state of a training that is at a place."""
    adopt: Callable[[dict[str, Any]], Place]
    """Go on from a state if it is further than the sampler is; return where it is then."""


class Draws:
    """One rank's micro-batches from a place to the end of its epoch, as lists of indices.

    torchdata's StatefulDataLoader takes the state of this iterator right after each draw, and
    gives it out once the micro-batch that was drawn then has been yielded. So what it knows is how
    far the loop is, and not how far the workers have read ahead.
    """

    def __init__(self, plan: Plan, place: Place, keeper: Keeper) -> None:
        self._plan, self._keeper = plan, keeper
        self._start(place)

    def _start(self, place: Place) -> None:
        self.begin = self._done = self._drawn = place
        self._samples = self._plan.samples(place.epoch)
        self._queue: deque[tuple[list[int], Place]] = deque()

    def __iter__(self) -> Draws:
        return self

    def __next__(self) -> list[int]:
        if not self._queue:
            self._draw_block()
        if not self._queue:
            raise StopIteration
        indices, self._done = self._queue.popleft()
        return indices

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state behind the last global batch that was drawn whole."""
        return self._keeper.save(self._done)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Draw from where the state was taken; if the sampler is further, from there."""
        self._start(self._keeper.adopt(state))

    def _draw_block(self) -> None:
        """Draw global batches until there are many indices."""
        positions: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        places: list[Place] = []
        num_drawn = 0
        while num_drawn < _BLOCK and (size := self._plan.size(self._drawn.position)):
            first, before = self._drawn.position, self._drawn
            for part in self._plan.batch.parts(size):
                begin = first + part.offset
                positions.append(np.arange(begin, begin + part.num_loaded))
                places.append(before)
                num_drawn += part.num_loaded
            self._drawn = places[-1] = Place(before.epoch, first + size, before.step + 1)
        if positions:
            samples = self._samples(np.concatenate(positions))
            cuts = np.cumsum([len(p) for p in positions])[:-1]
            indices = (part.tolist() for part in np.split(samples, cuts))
            self._queue.extend(zip(indices, places, strict=True))


class Items:
    """What a loader makes of the draws, one item a draw.

    Attributes:
        inside: The loader is at work: what it asks of the sampler is no checkpoint's doing.
        next: What the next item is of: how batches are divided, and where in the training.
    """

    def __init__(self) -> None:
        self.inside = False
        self.next: tuple[Plan, Place] | None = None
        self._items: Iterator[Any] = iter(())
        self._checked = False

    def open(self, loader: Any, seed: int) -> None:
        """Begin to go through a loader.

        Args:
            loader: The loader.
            seed: What its worker processes derive their random numbers from.
        """
        self._items = iter(())  # ends the worker processes of a loader that was left early
        with self._inside(), _own_randomness(seed):
            self._items = iter(loader)
        self._checked = False

    def load(self, begin: Callable[[], Place | None]) -> Any:
        """Return the next item.

        Args:
            begin: Says where the loader's draws began; None if it drew nothing.

        Raises:
            RuntimeError: the loader does not go with the sampler.
        """
        place = self.next and self.next[1]
        with self._inside():
            try:
                item = next(self._items)
            except StopIteration:
                raise RuntimeError(f"the loader ended at {place}: {_ONE_EACH}") from None
        if not self._checked and begin() != place:
            raise RuntimeError(
                f"the loader began at {begin()}, the training is at {place}: load the state before "
                "the loader is gone through, or asked for its own state"
            )
        self._checked = True
        return item

    def close(self, *, must_have_ended: bool = False) -> None:
        """Be done with the loader.

        Raises:
            RuntimeError: it has to have ended, and has not.
        """
        with self._inside():
            if must_have_ended and next(self._items, self) is not self:
                raise RuntimeError(f"the loader goes on behind the end of the epoch: {_ONE_EACH}")
        self._items = iter(())
        self.next = None

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self.inside = True
        try:
            yield
        finally:
            self.inside = False


@contextlib.contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    """Give torch's default generator another seed for a while.

    A DataLoader draws from it whenever it is begun, and a training that was interrupted begins it
    once more: the model's random numbers, as for dropout, would be others from there on.
    """
    torch = sys.modules.get("torch")  # without it there is nothing to guard
    if torch is None:
        yield
        return
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


_ONE_EACH = "it must yield one item for each list of indices of its batch_sampler, in order"


def require_loader_of(sampler: object, loader: Any) -> None:
    """Accept a loader that draws from this sampler, as far as can be seen.

    Raises:
        ConfigError: it has another, changes the order, or would skip when it is restored.
    """
    if getattr(loader, "batch_sampler", sampler) is not sampler:
        remedy = (
            "make it with batch_sampler=sampler, and no batch_size, shuffle, sampler, drop_last"
        )
        raise ConfigError("batch_sampler", loader.batch_sampler, remedy)
    if getattr(loader, "in_order", True) is not True:
        raise ConfigError("in_order", loader.in_order, "weights go with the order: leave it True")
    if (interval := getattr(loader, "snapshot_every_n_steps", 1)) != 1:
        remedy = "the sampler's state is a few numbers: leave it 1"
        raise ConfigError("snapshot_every_n_steps", interval, remedy)
