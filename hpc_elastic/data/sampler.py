"""The sampler: which samples come next, for any history of world sizes.

All ranks go through one order of the epoch's samples, a function of seed and epoch alone, a global
batch at a time; the position in it is one number that is the same on every rank. That number is
the state: whoever loads it, with however many workers, goes on behind the last sample trained.

What counts is what was trained, not what was drawn. A loader draws ahead, in its worker processes
and without being asked; that moves nothing. The position moves when a global batch's last
micro-batch has been gone through (`GlobalBatch.parts` has ended), and so a state that is taken
right after the optimizer's step holds that batch, and one that is taken before it does not.

An epoch ends when the loop over `ElasticSampler.batches` does. A state taken inside of the loop
goes on inside of the epoch, even if no batch of it is left: what the script does after the loop,
such as an evaluation, is done then. A state taken after the loop goes on with the next epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from hpc_elastic.data.batch import ElasticBatch, GlobalBatch, PartSource
from hpc_elastic.data.draws import Draws, Items, Keeper, require_loader_of
from hpc_elastic.data.ledger import Ledger, Stretch, origin
from hpc_elastic.data.order import hashed
from hpc_elastic.data.plan import End, Place, Plan, require_word

_log = logging.getLogger(__name__)

_STATE_VERSION = 1


class ElasticSampler:
    """Gives every sample once an epoch, whatever happens to the world size in between.

    Give it to a DataLoader as its ``batch_sampler``, to the checkpoint as a part of the state, and
    go through the loader by `batches`. For map-style datasets: a stream has no position that
    another number of workers could go on from. torchdata's StatefulDataLoader works as well. If
    only that is saved and not the sampler, its state comes to be known when the first loop
    begins, as always with torchdata: `epochs` counts from 0 until then.

    Random numbers: beginning a loader does not touch torch's, so the model's are the same after a
    restart if they are in the checkpoint. Those that a dataset draws in a loader's worker process
    come from seed, epoch and the step at which the loop was begun: they differ after a restart,
    unless the dataset derives them from the index.

    Args:
        dataset_len: Number of samples, at least 1.
        seed: Of the order; the same on all ranks.
        batch: How many samples make a step, and how they are divided; a number is a global batch.
        shuffle: A new order each epoch; False: the dataset's own order.
        end: What becomes of an epoch's last samples, if they fill no global batch. "keep" trains on
            a smaller one, so that each sample is trained once; "drop" leaves them out; "pad" fills
            the batch with the epoch's first samples.
        name: Of its ledger, a word; each sampler of a script needs its own. None writes no ledger:
            for a sampler that is not trained with, and where ranks share data (tensor parallelism)
            for all of them but one.

    Raises:
        ConfigError: an argument is out of range, or an epoch would have no batch.
    """

    def __init__(
        self,
        dataset_len: int,
        seed: int,
        *,
        batch: ElasticBatch | int,
        shuffle: bool = True,
        end: End = "keep",
        name: str | None = "train",
    ) -> None:
        batch = batch if isinstance(batch, ElasticBatch) else ElasticBatch(batch)
        self._plan = Plan(int(dataset_len), int(seed), shuffle, end, batch)
        self._place = Place()
        self._draws: Draws | None = None
        self._items = Items()
        self._num_loaded = 0
        self._name = name
        self._origin = None
        if name is not None:
            require_word(name)
            self._origin = origin()
        self._ledger: Ledger | None = None
        self._parent: tuple[int, int] | None = None
        self._begun = False

    @property
    def epoch(self) -> int:
        """The epoch that is being trained, from 0."""
        return self._place.epoch

    @property
    def position(self) -> int:
        """Samples of the epoch that were trained, all ranks together."""
        return self._place.position

    @property
    def step(self) -> int:
        """Global batches that were trained, over the whole run."""
        return self._place.step

    @property
    def num_batches(self) -> int:
        """Global batches of a whole epoch, the same for any world size."""
        return self._plan.num_batches

    def __len__(self) -> int:
        """Return this rank's micro-batches of a whole epoch, as a DataLoader counts them."""
        return self._plan.num_parts

    def __iter__(self) -> Draws:
        """Draw this rank's micro-batches, as lists of indices, from where the training is.

        For the loader, which may draw ahead as it likes: that moves nothing.
        """
        self._draws = Draws(self._plan, self._place, Keeper(self._state, self._adopt))
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
            if self._place == begin:
                raise RuntimeError(
                    f"nothing of epoch {self.epoch} was trained: go through sampler.batches(loader)"
                )

    def batches(self, loader: Any) -> Iterator[GlobalBatch]:
        """Yield the global batches that are left of the epoch.

        Args:
            loader: A DataLoader whose ``batch_sampler`` is this, or anything that yields one item
                for each list of indices, in order.

        Raises:
            ConfigError: the loader has another batch sampler, or another order.
            RuntimeError: the last batch was left before its end, a state was loaded meanwhile, or
                the loader does not go with the sampler.
        """
        require_loader_of(self, loader)
        self._items.open(loader, self._loader_seed())
        self._begin_stretch()
        num_loaded, begin = self._num_loaded, self._place
        while size := self._plan.size(self.position):
            batch = self._global_batch(size, begin)
            yield batch
            if self._num_loaded != num_loaded:
                raise RuntimeError("a state was loaded inside of the loop: begin the loop again")
            if self.step != batch.step:
                raise RuntimeError(
                    f"step {batch.step} was left before the last of its parts(), with which the "
                    "ranks exchange gradients: go through all of them"
                )
            if self._ledger:
                self._ledger.flush_if_due()
        self._items.close()
        self._place = replace(self._place, epoch=self.epoch + 1, position=0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: a few numbers, the same on all ranks.

        To be called on every rank at a checkpoint, whoever saves it: the ledger is written then.
        """
        if self._ledger and not self._items.inside:
            self._ledger.flush(sync=True)
        return self._state(self._place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken, with any number of workers.

        Another global batch or another ``end`` is allowed.

        Raises:
            ConfigError: the state is of another dataset length, seed or order, where the position
                would mean other samples.
        """
        if self._items.inside:
            return  # it is torchdata's, which has the draws load what counts: see Keeper.adopt
        self._plan.require_same_order(state)
        self._place = _place(state)
        made_by = state["made_by"]
        is_ours = made_by and self._origin and made_by["run_id"] == self._origin.run_id
        self._parent = tuple(made_by["stretch"]) if is_ours else None
        self._num_loaded += 1
        self._begun = False
        if state["global_batch"] != (size := self._plan.batch.global_batch):
            _log.warning("the global batch was %d, and is %d now", state["global_batch"], size)

    def _state(self, place: Place) -> dict[str, Any]:
        made_by = None
        if self._origin and (stretch := self._made_by()):
            made_by = {"run_id": self._origin.run_id, "stretch": list(stretch)}
        return {
            "version": _STATE_VERSION,
            **self._plan.facts(),
            "global_batch": self._plan.batch.global_batch,
            **asdict(place),
            "made_by": made_by,
        }

    def _loader_seed(self) -> int:
        """Return a seed for the loader's workers, another for each rank, epoch and restart."""
        rank, _ = self._plan.batch.group()
        return hashed(self._plan.seed, self.epoch, self.step, rank) >> 1

    def _made_by(self) -> tuple[int, int] | None:
        """Return the stretch that a state of now is of; the parent's, if nothing has begun yet."""
        if self._origin and (self._begun or self._items.inside):
            return self._origin.record, self._num_loaded
        return self._parent

    def _adopt(self, state: dict[str, Any]) -> Place:
        """Follow a loader that was restored; the sampler's own state, if loaded, is no older."""
        if _place(state) > self._place:
            inside, self._items.inside = self._items.inside, False
            self.load_state_dict(state)
            self._items.inside = inside
        return self._place

    def _global_batch(self, size: int, begin: Place) -> GlobalBatch:
        here = self._place
        after = Place(here.epoch, here.position + size, here.step + 1)

        def load() -> Any:
            return self._items.load(lambda: self._draws.begin if self._draws else None, begin)

        def trained() -> None:
            self._place = after
            if self._ledger:
                offset, count = self._plan.batch.share(size)
                self._ledger.add(after.step, here.epoch, here.position + offset, count)

        source = PartSource(self._plan.batch.parts(size), load, trained)
        return GlobalBatch(after.step, here.epoch, size, source)

    def _begin_stretch(self) -> None:
        """Write down from which state on this group trains, once for each state loaded."""
        if self._begun or self._origin is None or self._name is None:
            return
        rank, world_size = self._plan.batch.group()
        if self._ledger is None:
            self._ledger = Ledger.of(self._origin, self._name, rank)
        here = self._place
        self._ledger.begin(
            Stretch(
                name=self._name,
                stretch=(self._origin.record, self._num_loaded),
                parent=self._parent,
                **asdict(here),
                rank=rank,
                world_size=world_size,
                facts=self._plan.facts(),
                end=self._plan.end,
                global_batch=self._plan.batch.global_batch,
            )
        )
        self._begun = True


def _place(state: dict[str, Any]) -> Place:
    return Place(state["epoch"], state["position"], state["step"])
