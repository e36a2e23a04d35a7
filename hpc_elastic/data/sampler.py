"""The sampler: which samples come next, for any history of world sizes.

All ranks go through one order of the epoch's samples, a function of seed and epoch alone, a global
batch at a time; the position in it is one number that is the same on every rank. That number is
the state: whoever loads it, with however many workers, goes on behind the last sample trained.

What counts is what was trained, not what was drawn. A loader draws ahead, in its worker processes
and without being asked; that moves nothing. The position moves when a global batch's last
micro-batch has been gone through (`GlobalBatch.micro_batches` has ended), and so a state that is
taken right after the optimizer's step holds that batch, and one that is taken before it does not.

With a fault-tolerant ``manager``, replicas come and go while the loop goes on, and the position
moves when the manager has committed the step; `replica_batches` has the rules. The loop is the
same.

An epoch ends when the loop over `ElasticSampler.batches` does. A state taken inside of the loop
goes on inside of the epoch, even if no batch of it is left: what the script does after the loop,
such as an evaluation, is done then. A state taken after the loop goes on with the next epoch.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hpc_elastic.data.batch import BatchDivision, GlobalBatch, MicroBatch, PartSource
from hpc_elastic.data.epoch_plan import End, EpochPlan, SamplePosition, hashed
from hpc_elastic.data.ledger import LedgerWriter
from hpc_elastic.data.replica_batches import ReplicaManager, StepReplicas, number_of_unnamed
from hpc_elastic.errors import ConfigError

_log = logging.getLogger(__name__)

_STATE_VERSION = 1


class ElasticSampler:
    """Gives every sample once an epoch, whatever happens to the world size in between.

    Give it to a DataLoader as its ``batch_sampler``, to the checkpoint as a part of the state, and
    go through the loader by `batches`. For map-style datasets; `ElasticStream` is for data that is
    read forwards. torchdata's StatefulDataLoader works as well. If only that is saved and not the
    sampler, its state comes to be known when the first loop begins, as always with torchdata:
    `epochs` counts from 0 until then.

    Random numbers: beginning a loader does not touch torch's, so the model's are the same after a
    restart if they are in the checkpoint. Those that a dataset draws in a loader's worker process
    come from seed, epoch and the step at which the loop was begun: they differ after a restart,
    unless the dataset derives them from the index.

    Args:
        dataset: The map-style dataset, or its number of samples, at least 1.
        global_batch_size: Samples of one optimizer step, all ranks together; at least 1. It stays
            the same for any world size.
        seed: Seed of the order; the same on all ranks.
        micro_batch_size: The most samples that a rank takes at once, at least 1: what fits into its
            memory. None: a rank takes its whole share at once.
        rank: The worker's rank among those that divide the data. None: the rank in
            torch.distributed, or else the variables RANK and WORLD_SIZE, or else 0 of 1. Give both
            where ranks share data: with tensor parallelism, the data-parallel rank and size.
        world_size: The number of workers that divide the data; None as with ``rank``.
        shuffle: A new order each epoch; False: the dataset's own order.
        end: What becomes of an epoch's last samples, if they fill no global batch. "keep" trains on
            a smaller one, so that each sample is trained once; "drop" leaves them out; "pad" fills
            the batch with the epoch's first samples.
        name: Of its ledger, a word; each sampler of a script needs its own. None writes no ledger:
            for a sampler that is not trained with, and where ranks share data (tensor parallelism)
            for all of them but one. With a manager, samplers without a name have to be made in
            the same order in every replica: that tells them apart when one is healed.
        manager: A fault-tolerant manager (`hpc_elastic.ft.Manager`) whose replicas share
        each
            batch. ``rank`` is then that inside of the replica's group. The sampler adds
            itself to the state that heals a replica. Not for LocalSGD and DiLoCo, where the
            manager's steps are not the optimizer's.

    Raises:
        ConfigError: an argument is out of range, or an epoch would have no batch.
    """

    fits_any_world_size = True
    """For `Checkpointer`: the state is the same on all ranks, and another number can go on."""

    def __init__(
        self,
        dataset: Sized | int,
        global_batch_size: int,
        seed: int = 0,
        *,
        micro_batch_size: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        end: End = "keep",
        name: str | None = "train",
        manager: ReplicaManager | None = None,
    ) -> None:
        batch = BatchDivision(global_batch_size, micro_batch_size, rank, world_size)
        length = len(dataset) if isinstance(dataset, Sized) else dataset
        length = _whole("dataset", length, "give the dataset, or its number of samples")
        number = _whole("seed", seed, "give a whole number, the same on all ranks")
        self._plan = EpochPlan(length, number, shuffle, end, batch)
        self._place = SamplePosition()
        self._drawn: tuple[EpochPlan, SamplePosition] | None = None
        """With a manager: how batches are divided, and from where on they are drawn."""
        self._draws: Draws | None = None
        self._items = Items()
        self._num_loaded = 0
        self._book = LedgerWriter(name, batch.group, is_replica=manager is not None)
        self._cohort = StepReplicas(manager) if manager is not None else None
        if manager is not None:
            self._unnamed = None if name else number_of_unnamed(manager)
            key = f"hpc_elastic.data.{name or self._unnamed}"
            manager.register_state_dict_fn(key, self._heal, self._healing_state)

    @property
    def epoch(self) -> int:
        """The epoch that is being trained, from 0."""
        return self._now().epoch

    @property
    def position(self) -> int:
        """Samples of the epoch that were trained, all ranks together."""
        return self._now().position

    @property
    def step(self) -> int:
        """Global batches that were trained, over the whole run."""
        return self._now().step

    @property
    def num_batches(self) -> int:
        """Global batches of a whole epoch, the same for any world size."""
        return self._plan.num_batches

    def __len__(self) -> int:
        """Return this rank's micro-batches of a whole epoch, as a DataLoader counts them."""
        plan, _ = self._drawn or (self._plan, self._place)
        return plan.num_micro_batches

    def __iter__(self) -> Draws:
        """Draw this rank's micro-batches, as lists of indices, from where the training is.

        For the loader, which may draw ahead as it likes: that moves nothing.
        """
        plan, place = self._drawn or (self._plan, self._place)
        self._draws = Draws(plan, place, SamplerState(self._state, self._adopt))
        return self._draws

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs to train, from the one where the training is up to num_epochs - 1.

        One whose loop over `batches` was left early comes again, with the batches that are left.

        Raises:
            RuntimeError: nothing of an epoch was trained, so it would come again for ever.
        """
        while self.epoch < num_epochs:
            begin = self._place
            yield self.epoch
            if self._now() == begin:
                raise RuntimeError(
                    f"nothing of epoch {self.epoch} was trained: go through sampler.batches(loader)"
                )

    def batches(self, loader: Any) -> Iterator[GlobalBatch]:
        """Yield the global batches that are left of the epoch.

        With a manager, a batch whose step was not committed comes again; and in a replica that was
        healed the loop goes on in the epoch in which the others are, to its end.

        Args:
            loader: A DataLoader whose ``batch_sampler`` is this, or anything that yields one item
                for each list of indices, in order.

        Raises:
            ConfigError: the loader has another batch sampler, or another order.
            RuntimeError: the last batch was left before its end, a state was loaded meanwhile, or
                the loader does not go with the sampler.
        """
        require_loader_of(self, loader)
        self._items.close()
        if self._cohort is None:
            self._feed(loader, self._plan, self._place)
            self._book.begin(self._plan, self._place)
        num_loaded = self._num_loaded
        while self._plan.size(self.position):
            batch = self._global_batch(loader)
            try:
                yield batch
            except GeneratorExit:  # the loop was left: the loader's workers end now
                self._items.close()
                raise
            if self._num_loaded != num_loaded:
                raise RuntimeError("a state was loaded inside of the loop: begin the loop again")
            if not batch.is_complete:
                raise RuntimeError(
                    f"step {batch.step} was left before the last of its micro_batches(), with "
                    "which the ranks exchange gradients: go through all of them"
                )
            self._now()
            if self._cohort:
                self._cohort.end()
            self._book.flush_if_due()
        self._items.close(must_have_ended=self._cohort is None)
        self._place = replace(self._place, epoch=self.epoch + 1, position=0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: a few numbers, the same on all ranks.

        To be called on every rank at a checkpoint, whoever saves it: the ledger is written then.
        With a manager, on the ranks of the replica that saves.
        """
        if not self._items.inside:
            self._now()
            self._book.flush()
        return self._state(self._place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken, with any number of workers.

        Another global batch or another ``end`` is allowed. With a manager, load its state as well.

        Raises:
            ConfigError: the state is of another dataset length, seed or order, where the position
                would mean other samples.
        """
        if self._items.inside:
            return  # it is torchdata's, which has the draws load what counts: see Keeper.adopt
        self._load(state)
        self._num_loaded += 1
        if state["global_batch"] != (size := self._plan.batch.global_batch_size):
            _log.warning("the global batch was %d, and is %d now", state["global_batch"], size)

    def _load(self, state: dict[str, Any]) -> None:
        self._plan.require_same_order(state)
        self._place = _place(state)
        self._book.loaded(state["made_by"], self._place.step)

    def _state(self, place: SamplePosition) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            **self._plan.facts(),
            "global_batch": self._plan.batch.global_batch_size,
            **asdict(place),
            "made_by": self._book.made_by(inside=self._items.inside and self._cohort is None),
        }

    def _adopt(self, state: dict[str, Any]) -> SamplePosition:
        """Follow a loader that was restored; the sampler's own state, if loaded, is no older."""
        if _place(state) > self._place:
            inside, self._items.inside = self._items.inside, False
            self.load_state_dict(state)
            self._items.inside = inside
        return self._place

    def _heal(self, state: dict[str, Any]) -> None:
        """Go on from another replica's state; the manager's doing.

        Raises:
            ConfigError: it is that of another sampler.
        """
        try:
            self._load(state)
        except ConfigError as e:
            if self._unnamed is None:
                raise
            remedy = (
                f"the replica's state for the sampler {self._unnamed} is another one's ({e}): make "
                "samplers without a name in the same order in every replica, or give them names"
            )
            raise ConfigError("name", None, remedy) from e
        if self._cohort:
            self._cohort.healed()

    def _healing_state(self) -> dict[str, Any]:
        """Return the state for another replica: what led to it is on record from now on."""
        self._book.flush()
        return self._state(self._place)

    def _now(self) -> SamplePosition:
        """Return where the training is: with a manager, behind the steps that it has committed."""
        if self._cohort and (num_steps := self._cohort.num_committed(self._place)):
            if self._book.is_written:
                self._book.begin_quorum(self._cohort.quorum_id(), self._plan, self._place)
            self._go_on(num_steps)
        return self._place

    def _go_on(self, num_steps: int) -> None:
        before = self._plan.next_batch(self._place)
        self._place = self._plan.after(before, num_steps)
        if num_steps == 1:
            size = self._plan.size(before.position)
            offset, count = (0, size) if self._cohort else self._plan.batch.share(size)
            self._book.trained(before, before.position + offset, count)

    def _feed(self, loader: Any, plan: EpochPlan, place: SamplePosition) -> None:
        """Have the loader give the batches from a place on, divided as in a plan."""
        if self._cohort:
            self._drawn = plan, place
        rank, _ = plan.batch.group()
        seed = hashed(plan.seed, place.epoch, place.step, rank) >> 1
        before = self._place
        self._items.open(loader, seed)
        adopted = self._place != before  # the loader had a state of its own
        self._items.next = plan, self._place if adopted else place

    def _global_batch(self, loader: Any) -> GlobalBatch:
        plan, place = self._plan, self._place

        def begin(batch: GlobalBatch) -> list[MicroBatch]:
            nonlocal plan, place
            plan, place = self._begin_step()
            batch.is_at(place.step + 1, place.epoch, plan.size(place.position))
            if self._items.next != (plan, place):
                self._feed(loader, plan, place)
            return plan.batch.micro_batches(batch.num_samples)

        def load() -> Any:
            return self._items.load(lambda: self._draws.begin if self._draws else None)

        def trained() -> None:
            self._items.next = plan, plan.after(place, 1)
            if self._cohort is None:
                self._go_on(1)

        source = PartSource(begin, load, trained)
        return GlobalBatch(place.step + 1, place.epoch, plan.size(place.position), source)

    def _begin_step(self) -> tuple[EpochPlan, SamplePosition]:
        """Return how the present batch is divided, and where it begins."""
        if self._cohort is None:
            return self._plan, self._place
        division, place = self._cohort.begin(self._plan, self._place)
        if not self._cohort.heals:
            self._place = place
        return replace(self._plan, batch=division), self._plan.next_batch(place)


def _whole(key: str, value: Any, remedy: str) -> int:
    """Return an argument as an int.

    Raises:
        ConfigError: It is not a whole number.
    """
    try:
        return operator.index(value)
    except TypeError as e:
        raise ConfigError(key, value, remedy) from e


def _place(state: dict[str, Any]) -> SamplePosition:
    return SamplePosition(state["epoch"], state["position"], state["step"])


# ---- What stands between a sampler and its loader: the draws it hands out, and the items it gets


_BLOCK = 1024
"""Indices that are computed at once: a call costs 0.2 ms, however few they are."""


@dataclass(frozen=True)
class SamplerState:
    """The sampler as torchdata's StatefulDataLoader meets it, behind its draws."""

    save: Callable[[SamplePosition], dict[str, Any]]
    """Return the state of a training that is at a place."""
    adopt: Callable[[dict[str, Any]], SamplePosition]
    """Go on from a state if it is further than the sampler is; return where it is then."""


class Draws:
    """One rank's micro-batches from a place to the end of its epoch, as lists of indices.

    torchdata's StatefulDataLoader takes the state of this iterator right after each draw, and
    gives it out once the micro-batch that was drawn then has been yielded. So what it knows is how
    far the loop is, and not how far the workers have read ahead.
    """

    def __init__(self, plan: EpochPlan, place: SamplePosition, keeper: SamplerState) -> None:
        self._plan, self._keeper = plan, keeper
        self._start(place)

    def _start(self, place: SamplePosition) -> None:
        self.begin = self._done = self._drawn = place
        self._samples = self._plan.samples(place.epoch)
        self._queue: deque[tuple[list[int], SamplePosition]] = deque()

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
        places: list[SamplePosition] = []
        num_drawn = 0
        while num_drawn < _BLOCK and (size := self._plan.size(self._drawn.position)):
            first, before = self._drawn.position, self._drawn
            for part in self._plan.batch.micro_batches(size):
                begin = first + part.offset
                positions.append(np.arange(begin, begin + part.num_loaded))
                places.append(before)
                num_drawn += part.num_loaded
            self._drawn = places[-1] = SamplePosition(before.epoch, first + size, before.step + 1)
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
        self.next: tuple[EpochPlan, SamplePosition] | None = None
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

    def load(self, begin: Callable[[], SamplePosition | None]) -> Any:
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
