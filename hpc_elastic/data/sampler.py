"""The sampler: the next samples, for any history of world sizes.

All ranks go through one order of the epoch's samples, a function of seed and epoch alone, one
global batch at a time. The position in it is one number, the same on every rank, and that number is
the state: any number of workers can load it and continue after the last trained sample.

Trained samples count, not drawn ones. A loader draws ahead in its worker processes, which moves
nothing. The position moves when the last micro-batch of a global batch is done
(`GlobalBatch.micro_batches` has ended). A state that is taken right after the optimizer's step
includes that batch, and one that is taken before the step does not (`_UnsteppedBatches`).

A plain loop over the DataLoader makes one step of each item. The sampler sees only draws, so it
hands the items out itself (`_hand_out_items`), and `plain_loop` counts them.

An epoch ends when the loop over its batches does. A state taken inside of the loop
continues inside of the epoch, even if no batch of it is left, so that the code after the loop, such
as an evaluation, still runs. A state taken after the loop continues with the next epoch.

Fault-tolerant replicas
-----------------------
A manager (`hpc_elastic.ft`, or torchft's) keeps processes alive while others join and leave. The
loop is the same, and two things are determined at each step, once its quorum is known:

- The division of the batch: among the participants, and in each among the ranks of its group. The
  manager averages over the participants, so the weights of `batch` hold unchanged.
- The position: the batch counts once the manager has committed its step. Otherwise the participants
  of the next step take the same batch again. A replica that was healed has the position of the
  state that it was healed with.

A replica that does not contribute, because it heals or is a spare, takes part in the same
collectives. It is a `_NonParticipant`, with a sample of weight 0 for each micro-batch of others.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from hpc_elastic._util import counted
from hpc_elastic.data.batch import BatchDivision, GlobalBatch, MicroBatch
from hpc_elastic.data.epoch_plan import End, EpochPlan, SamplePosition, hashed
from hpc_elastic.data.ledger import LedgerWriter, most_workers
from hpc_elastic.data.random_state import SeededIndices, seeded_torch_generator
from hpc_elastic.errors import ConfigError, InexactError
from hpc_elastic.worker import optimizer_steps, process_group, reporting

if TYPE_CHECKING:
    from hpc_elastic.data.plain_loop import PlainLoop, TrainedModels

_log = logging.getLogger(__name__)

_STATE_VERSION = 1
_BLOCK = 4096  # number of indices that are computed at once: a call costs 0.2 to 1 ms, even for few


class ReplicaManager(Protocol):
    """The interface of a fault-tolerant manager; methods about the quorum wait for it."""

    def current_step(self) -> int:
        """Return the number of committed steps."""

    def participating_rank(self) -> int | None:
        """Return this replica's rank among the participants; None if it is not one."""

    def is_participating(self) -> bool:
        """Return whether this replica contributes."""

    def num_participants(self) -> int:
        """Return the number of replicas in the average; 0 before the first quorum."""

    def register_state_dict_fn(
        self,
        key: str,
        load_state_dict: Callable[[dict[str, Any]], None],
        state_dict: Callable[[], dict[str, Any]],
    ) -> None:
        """Add a part to the state that heals a replica."""


_driven = WeakSet[Any]()  # the samplers whose `ElasticSampler.epochs` this process trains
_num_unnamed: WeakKeyDictionary[ReplicaManager, int] = WeakKeyDictionary()
"""The unnamed samplers of each manager so far; the script fixes their order in every process."""
_num_compared = Counter[str]()
"""Comparisons with other ranks so far, by key: the n-th of one rank is the n-th of the others."""


class ElasticSampler:
    """Batch sampler that yields every sample once an epoch, for any changes of the world size.

    Pass it to a DataLoader as its ``batch_sampler``, and put it into the checkpoint's state. Then
    iterate over the DataLoader, if each item is one step and the model is given to
    `scale_gradients`; or over `batches`, with gradient accumulation, with a manager, with other
    loaders, and where something between the loader and the loop draws ahead.

    It is for map-style datasets; `ElasticStream` is for data that can only be read sequentially.
    torchdata's StatefulDataLoader works with `batches`. If only that loader is saved and not the
    sampler, its state is known when the first loop begins, as always with torchdata; `epochs`
    counts from 0 until then.

    Random numbers: starting a loader leaves torch's generator alone, so the model's numbers are the
    same after a restart if the generator is in the checkpoint. The numbers that a dataset draws in
    a loader's worker process depend on seed, epoch and the step at which the loop began. They
    differ after a restart, unless the dataset derives them from the index, or with
    ``virtual_ranks``.

    Args:
        dataset: The map-style dataset, or its number of samples, at least 1.
        global_batch_size: Samples of one optimizer step, all ranks together; at least 1. It stays
            the same for any world size.
        seed: Seed of the order; the same on all ranks.
        micro_batch_size: Largest number of samples of a rank at a time, at least 1: what fits into
            its memory. None: a rank takes its whole share at once.
        rank: The worker's rank among those that divide the data. None: the rank in
            torch.distributed, or else the variables RANK and WORLD_SIZE, or else 0 of 1. Give both
            where ranks share data: with tensor parallelism, the data-parallel rank and size.
        world_size: The number of workers that divide the data; None as with ``rank``.
        shuffle: A new order each epoch; False: the dataset's own order.
        end: Treatment of an epoch's last samples if they do not fill a global batch. "keep" trains
            a smaller batch, so that each sample is trained once; "drop" leaves them out; "pad"
            fills the batch with the epoch's first samples.
        name: Name of its ledger, a word; each sampler of a script needs its own. None writes no
            ledger: for a sampler that is not used for training, and where ranks share data (tensor
            parallelism) for all of them but one. With a manager, unnamed samplers have to be
            created in the same order in every replica, which identifies them during a heal.
        virtual_ranks: Divide each batch among this number of virtual ranks, at least the largest
            number of workers, so that the training is bit for bit the same for any number of
            workers. The model goes to `average_gradients`, and the loop is one over `batches`.
            Not with a manager.
        manager: A fault-tolerant manager (`hpc_elastic.ft.Manager`) whose replicas share each
            batch. ``rank`` is then the rank in the replica's group. The sampler adds itself to the
            state that heals a replica. Not for LocalSGD and DiLoCo, where the manager's steps are
            not the optimizer's.

    Raises:
        ConfigError: An argument is out of range, or an epoch would have no batch.
    """

    fits_any_world_size = True
    """For `Checkpointer`: the state is the same on all ranks, and fits any number of ranks."""

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
        virtual_ranks: int | None = None,
        manager: ReplicaManager | None = None,
    ) -> None:
        batch = BatchDivision(
            global_batch_size, micro_batch_size, rank, world_size, virtual_ranks=virtual_ranks
        )
        if virtual_ranks is not None and manager is not None:
            remedy = "leave it out: with a manager, the average is of the replicas that take part"
            raise ConfigError("virtual_ranks", virtual_ranks, remedy)
        length = len(dataset) if isinstance(dataset, Sized) else dataset
        for key, value, remedy in (
            ("dataset", length, "give the dataset, or its number of samples"),
            ("seed", seed, "give a whole number, the same on all ranks"),
        ):
            if not hasattr(value, "__index__"):
                raise ConfigError(key, value, remedy)
        self._plan = EpochPlan(operator.index(length), operator.index(seed), shuffle, end, batch)
        self._place = SamplePosition()
        self._drawn: tuple[EpochPlan, SamplePosition] | None = None  # with a manager
        self._items = _LoaderItems()
        self._num_loaded = 0
        self._are_facts_compared = False
        self._num_epochs: int | None = None
        self._loop: PlainLoop | None = None
        self._models: TrainedModels | None = None
        self._unstepped = _UnsteppedBatches()
        self._virtual_ranks: Any = None
        _hand_out_items()
        self._ledger = LedgerWriter(name, batch.group, is_replica=manager is not None)
        self._replicas = _StepReplicas(manager) if manager is not None else None
        if manager is not None:
            self._unnamed = None
            if not name:
                number = _num_unnamed[manager] = _num_unnamed.get(manager, 0) + 1
                self._unnamed = f"unnamed.{number}"
            key = f"hpc_elastic.data.{name or self._unnamed}"
            manager.register_state_dict_fn(key, self._load_healed_state, self._healing_state)
        else:
            self._require_equal_facts()

    @property
    def epoch(self) -> int:
        """The present epoch, from 0."""
        return self._update_position().epoch

    @property
    def position(self) -> int:
        """Trained samples of the epoch, all ranks together."""
        return self._update_position().position

    @property
    def step(self) -> int:
        """Trained global batches, over the whole run."""
        return self._update_position().step

    @property
    def step_in_epoch(self) -> int:
        """Trained global batches of the epoch: the number of a loop's next item, from 0.

        A loop in a resumed epoch begins behind what was trained, so ``enumerate(loader)`` counts
        from 0 there: ``enumerate(loader, sampler.step_in_epoch)`` counts on.
        """
        return self.num_batches - self._plan.batches_from(self.position)

    @property
    def num_batches(self) -> int:
        """Global batches of a whole epoch, the same for any world size."""
        return self._plan.num_batches

    @property
    def total_steps(self) -> int | None:
        """Global batches of all epochs that were given to `epochs`; None before."""
        return None if self._num_epochs is None else self._num_epochs * self.num_batches

    def __len__(self) -> int:
        """Return this rank's micro-batches of a whole epoch, as a DataLoader counts them."""
        plan, _ = self._drawn or (self._plan, self._place)
        return plan.num_micro_batches

    def __iter__(self) -> MicroBatchDraws:
        """Draw this rank's micro-batches, as lists of indices, from the present position.

        The loader calls it, and may draw ahead: that moves nothing.

        Raises:
            ConfigError: The loop trains, and is neither one over a DataLoader nor over `batches`.
        """
        if not self._items.inside and self._replicas is None and _records_gradients():
            raise _unknown_loader("an iterator of the batch sampler")
        plan, place = self._drawn or (self._plan, self._place)
        self._items.draws = MicroBatchDraws(plan, place, save=self._state, adopt=self._adopt)
        return self._items.draws

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs to train, from the present one up to num_epochs - 1.

        An epoch whose loop ended early is repeated with the remaining batches. A plain loop that
        ends with its first item, and trains nothing, is the last one.

        Raises:
            RuntimeError: No item was drawn, so the epoch would be repeated for ever.
        """
        self._num_epochs = num_epochs
        _driven.add(self)
        try:
            while self.epoch < num_epochs:
                begin = self._place
                yield self.epoch
                if self._update_position() != begin or (self._models and self._models.left_loop):
                    continue
                if self._loop is None or not self._loop.num_drawn:
                    raise RuntimeError(
                        f"nothing of epoch {self.epoch} was trained: iterate over a torch "
                        "DataLoader with batch_sampler=sampler, or over sampler.batches(loader)"
                    )
                text = "epoch %d: the loop has ended before it trained an item: the last epoch"
                _log.warning(text, self.epoch)
                return
        finally:
            _driven.discard(self)

    def scale_gradients(self, model: Any) -> Any:
        """Let a model's gradients count by samples in a plain loop over the DataLoader.

        Ranks average their gradients, and the share of a global batch may be larger on one rank
        than on another. Each ``backward()`` in the loop is multiplied by the weight of this rank's
        share (`hpc_elastic.data.batch`), where it begins: what it makes of the mean loss is right
        for any model. `torch.autograd.grad` returns the derivative as always, and so does
        ``backward(inputs=...)`` of data. Where all shares are equal nothing is done.

        Args:
            model: What the optimizer trains, wrapped or not (DistributedDataParallel, FSDP). Call
                it for each model, as often as you like.

        Returns:
            The same model.
        """
        if self._plan.batch.virtual_ranks is not None:
            remedy = "call average_gradients(model), with the bare module, and loop over batches()"
            raise ConfigError("virtual_ranks", self._plan.batch.virtual_ranks, remedy)
        if self._models is None:
            from hpc_elastic.data.plain_loop import TrainedModels  # it imports torch

            self._models = TrainedModels()
        self._models.add(model)
        return model

    def average_gradients(self, model: Any, process_group: Any = None) -> Any:
        """Let a model's gradients be bit for bit the same for any number of workers.

        It needs ``virtual_ranks``, and takes the place of DistributedDataParallel: once the loop
        over a batch's `GlobalBatch.micro_batches` has ended, each parameter's ``grad`` is the
        average over the virtual ranks, on every worker. Gradients from before are added to it, as
        by ``backward()``; gradient scalers, clipping and schedules work as always.

        In the loop over the micro-batches, the generators of Python, NumPy and torch (CPU and
        present GPU) are seeded for each micro-batch, from the sampler's seed, the step and the
        place in the batch. After it they are as before. The loader's process is seeded for each
        micro-batch too, when the fetch iterates over the indices, so random augmentation is the
        same for any history and any number of loader workers. A dataset whose ``__getitems__``
        does not iterate has to derive its random numbers from the indices.

        Buffers that the model changes, such as the statistics of batch normalisation, are those of
        virtual rank 0. Before the first step the workers take over the parameters and buffers of
        worker 0. A worker holds up to log2(virtual_ranks) + 1 copies of the gradients.

        Args:
            model: The bare module, whole on every worker; not DistributedDataParallel or FSDP.
            process_group: The group of the workers that divide the data; None: the default group.

        Returns:
            The same model.

        Raises:
            ConfigError: The sampler has no virtual ranks, or the model is wrapped or sharded.
        """
        from hpc_elastic.data.virtual_ranks import VirtualRanks  # it imports torch

        if self._plan.batch.virtual_ranks is None:
            remedy = "give ElasticSampler(virtual_ranks=16), or wrap the model and scale_gradients"
            raise ConfigError("virtual_ranks", None, remedy)
        self._virtual_ranks = VirtualRanks(model, self._plan, process_group)
        return model

    def batches(self, loader: Any) -> Iterator[GlobalBatch]:
        """Yield the remaining global batches of the epoch.

        With a manager, a batch whose step was not committed is repeated. In a replica that was
        healed the loop continues in the epoch of the others, to its end.

        Args:
            loader: A DataLoader whose ``batch_sampler`` is this, or anything that yields one item
                for each list of indices, in order.

        Raises:
            ConfigError: The loader has another batch sampler, or another order; or there are
                virtual ranks without `average_gradients`.
            RuntimeError: The last batch was not completed, a state was loaded meanwhile, or the
                loader does not fit the sampler.
        """
        self._begin_loop(loader)
        num_loaded = self._num_loaded
        while self._plan.size(self.position):
            batch = self._global_batch(loader)
            try:
                yield batch
            except GeneratorExit:  # the loop ended early: end the loader's workers
                self._items.close_loader()
                self._leave_loop()
                raise
            if self._num_loaded != num_loaded:
                raise RuntimeError("a state was loaded inside of the loop: begin the loop again")
            if not batch.is_complete:
                raise RuntimeError(
                    f"step {batch.step} ended before the last of its micro_batches(), with which "
                    "the ranks exchange gradients: iterate over all of them"
                )
            self._update_position()
            if self._replicas:
                self._replicas.in_position = False
            self._ledger.flush_if_due()
        self._items.close_loader(must_have_ended=self._replicas is None)
        self._place = SamplePosition(self.epoch + 1, 0, self._place.step)
        self._unstepped.clear()

    def _begin_loop(self, loader: Any) -> None:
        self._require_loader(loader)
        if self._plan.batch.virtual_ranks and not self._virtual_ranks and _records_gradients():
            remedy = "model = sampler.average_gradients(model), before the loop"
            raise ConfigError("average_gradients", "not called", remedy)
        if self._loop is not None:
            self._loop.close()
        self._items.close_loader()
        if self._replicas is None:
            if self._models is not None:
                self._models.begin_loop()
            if self._is_beside_another():
                self._leave_loop()
            self._require_equal_facts()
            self._start_loader(loader, self._plan, self._place)
            self._require_own_state()
            self._ledger.begin_segment(self._plan, self._place)
            optimizer_steps.watch()

    def _is_beside_another(self) -> bool:
        """Return whether this one's epochs repeat in those of another sampler (`zip`).

        A loop without an item would end the other one's, too.
        """
        if self._num_epochs is None and any(other is not self for other in _driven):
            return True
        module = sys.modules.get("hpc_elastic.data.plain_loop")
        return module is not None and module.is_beside_another()

    def _leave_loop(self) -> None:
        """Begin the next epoch if nothing of this one is left."""
        if self._replicas is None and not self._plan.size(self._place.position):
            self._place = SamplePosition(self._place.epoch + 1, 0, self._place.step)

    def _require_loader(self, loader: Any) -> None:
        """Refuse a loader with another sampler, or one that shows that it changes the order."""
        if getattr(loader, "batch_sampler", self) is not self:
            remedy = (
                "make it with batch_sampler=sampler, and no batch_size, shuffle, sampler, drop_last"
            )
            raise ConfigError("batch_sampler", loader.batch_sampler, remedy)
        if getattr(loader, "in_order", True) is not True:
            remedy = "weights go with the order: leave it True"
            raise ConfigError("in_order", loader.in_order, remedy)
        if (interval := getattr(loader, "snapshot_every_n_steps", 1)) != 1:
            remedy = "the sampler's state is a few numbers: leave it 1"
            raise ConfigError("snapshot_every_n_steps", interval, remedy)

    def _require_own_state(self) -> None:
        """Refuse to train from the first sample on where a checkpoint goes on from a later step."""
        restored = reporting.restored_step()
        if restored and not self._num_loaded and _records_gradients():
            remedy = (
                f"a checkpoint of step {restored} was restored without the state of this sampler, "
                "so it would train the samples before that step again: put it into the state of "
                'the Checkpointer ({"sampler": sampler, ...}), and create it before load_latest(); '
                "or give options=CheckpointOptions(boundary=False) to a Checkpointer that only "
                "reads initial weights"
            )
            raise InexactError("state", "without the sampler", remedy)

    def _require_equal_facts(self) -> None:
        """Compare what fixes order, batches and weights with the other ranks; else ConfigError.

        A seed of each rank's own (``seed=cfg.seed + rank``) gives each rank an order of its own, in
        which samples are trained twice or never. The first rank that comes leaves its facts in the
        store of the process group, and the others compare theirs. It takes no collective and waits
        for no other rank, so a rank may have samplers that the others lack. One without a name, as
        for an evaluation, is only compared with those that differ in nothing but the seed.
        """
        plan = self._plan
        if self._are_facts_compared or plan.batch.rank is not None or process_group.size() is None:
            return
        # private to torch
        store = sys.modules["torch.distributed"].distributed_c10d._get_default_store()
        batch_size = plan.batch.global_batch_size
        facts = {**plan.facts(), "global_batch_size": batch_size, "end": plan.end}
        kind = self._ledger.name or json.dumps({**facts, "seed": None})
        key = f"hpc_elastic/data/{kind}/{_num_compared[kind]}"
        _num_compared[kind] += 1
        mine = json.dumps({"rank": process_group.rank(), **facts})
        theirs = json.loads(store.compare_set(key, "", mine))
        for fact, value in facts.items():
            if theirs[fact] != value:
                remedy = f"rank {theirs['rank']} has {theirs[fact]!r}: give the same on all ranks"
                raise InexactError("dataset" if fact == "dataset_len" else fact, value, remedy)
        self._are_facts_compared = True

    def _plain_loop(self, loader: Any) -> Iterator[Any]:
        """Yield the items of a loop over the DataLoader itself; each is one step."""
        batch = self._plan.batch
        if batch.virtual_ranks is not None:
            remedy = (
                "a step has several micro-batches, and a loop over the DataLoader makes a step of "
                "each item: iterate over sampler.batches(loader)"
            )
            raise ConfigError("virtual_ranks", batch.virtual_ranks, remedy)
        if self._replicas is not None:
            remedy = (
                "iterate over sampler.batches(loader): who takes part in a step is known once its "
                "quorum is"
            )
            raise ConfigError("manager", "given", remedy)
        if (num := batch.num_micro_batches(batch.global_batch_size)) > 1:
            remedy = (
                f"a step has {num} micro-batches here, and a loop over the DataLoader makes a step "
                "of each item: iterate over sampler.batches(loader)"
            )
            raise ConfigError("micro_batch_size", batch.micro_batch_size, remedy)
        trains = _records_gradients()
        if trains and self._models is None:
            remedy = (
                "model = sampler.scale_gradients(model), before the loop: a rank's share of the "
                "batch may be smaller than another's, with this number of ranks or a later one"
            )
            raise InexactError("scale_gradients", "not called", remedy)
        if not trains:
            self._require_sample_for_each_rank()
        self._begin_loop(loader)
        yield from self._hand_out(trains=trains)

    def _hand_out(self, *, trains: bool) -> Iterator[Any]:
        from hpc_elastic.data.plain_loop import PlainLoop  # it imports torch

        plan, place, items, num_loaded = self._plan, self._place, self._items, self._num_loaded
        models, count = self._models if trains else None, functools.partial(self._advance, 1)
        loop = self._loop = PlainLoop(plan, models, count=count, is_new=not num_loaded)
        try:
            while size := plan.size(place.position):
                loop.before_draw()
                if loop.has_ended or self._num_loaded != num_loaded:
                    what = "another loop has begun" if loop.has_ended else "a state was loaded"
                    raise RuntimeError(f"{what} inside of the loop: begin the loop again")
                item = items.next_item()
                (part,) = items.micro_batches(size)
                loop.hand_out(place, part.weight)
                place = SamplePosition(place.epoch, place.position + size, place.step + 1)
                items.next = plan, place
                yield item
                self._ledger.flush_if_due()
            loop.end_epoch()
            self._items.close_loader(must_have_ended=True)
        finally:
            loop.close()
            if self._loop is loop:
                self._items.close_loader()
                if self._num_loaded == num_loaded:
                    self._leave_loop()

    def _require_sample_for_each_rank(self) -> None:
        """Accept a plan for an evaluation: it would count a sample of weight 0 with the others."""
        batch = self._plan.batch
        whole = batch.global_batch_size
        sizes = [self._plan.size(0), self._plan.size(self._plan.length // whole * whole)]
        smallest = min(size for size in sizes if size)
        num_ranks = batch.group()[1]
        if batch.rank is None:
            num_ranks = max(num_ranks, most_workers())
        if num_ranks > smallest:
            remedy = (
                f"a batch has {counted(smallest, 'sample')}, and there may be "
                f"{counted(num_ranks, 'rank')}: one without a share gets a sample of another, and "
                "a loop over the loader counts it; give end='drop', another global_batch_size, or "
                "iterate over sampler.batches(loader) and leave out what has the weight 0"
            )
            raise InexactError("global_batch_size", whole, remedy)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: a few numbers, the same on all ranks.

        Call it on every rank at a checkpoint, even if only one saves: it writes the ledger. With a
        manager, call it on the ranks of the replica that saves.

        Raises:
            ConfigError: It is unknown whether the parameters hold the present item of a plain loop:
                they were changed without an optimizer, or an epoch has ended with gradients that
                are held.
        """
        if self._items.inside:
            return self._state(self._place)
        self._update_position()
        if self._models is not None:
            self._models.require_known_state()
        self._ledger.flush()
        return self._state(self._unstepped.first_place or self._place)

    def on_optimizer_step(self) -> None:
        """Count the batch as trained whose micro-batches have ended: its step is this one."""
        self._unstepped.clear()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a state, with any number of workers.

        Another global batch or another ``end`` is allowed. With a manager, load its state as well.

        Raises:
            ConfigError: The state has another dataset length, seed or order, so that the position
                would mean other samples.
        """
        if self._items.inside:
            return  # torchdata's call; its state reaches `MicroBatchDraws.load_state_dict`
        self._load(state)
        self._num_loaded += 1
        if state["global_batch"] != (size := self._plan.batch.global_batch_size):
            _log.warning("the global batch was %d, and is %d now", state["global_batch"], size)
        if state.get("virtual_ranks") != (num := self._plan.batch.virtual_ranks):
            text = "virtual_ranks was %s, and is %s now: the training does not continue bit for bit"
            _log.warning(text, state.get("virtual_ranks"), num)

    def _load(self, state: dict[str, Any]) -> None:
        self._plan.require_same_order(state)
        self._place = _place(state)
        self._unstepped.clear()
        if self._models is not None:
            self._models.left_loop = None
        self._ledger.on_state_loaded(state["made_by"], self._place.step)

    def _state(self, place: SamplePosition) -> dict[str, Any]:
        batch, inside = self._plan.batch, self._items.inside and self._replicas is None
        return {
            "version": _STATE_VERSION,
            **self._plan.facts(),
            "global_batch": batch.global_batch_size,
            **({"virtual_ranks": batch.virtual_ranks} if batch.virtual_ranks else {}),
            **place._asdict(),
            "made_by": self._ledger.state_maker(inside=inside),
        }

    def _adopt(self, state: dict[str, Any]) -> SamplePosition:
        """Take over the state of a restored loader, unless the sampler's own is newer."""
        if _place(state) > self._place:
            inside, self._items.inside = self._items.inside, False
            self.load_state_dict(state)
            self._items.inside = inside
        return self._place

    def _load_healed_state(self, state: dict[str, Any]) -> None:
        try:
            self._load(state)
        except ConfigError as e:
            if self._unnamed is None:
                raise
            remedy = (
                f"the replica's state for the sampler {self._unnamed} is of another one ({e}): "
                "create unnamed samplers in the same order in every replica, or name them"
            )
            raise ConfigError("name", None, remedy) from e
        if self._replicas:
            self._replicas.in_position = True

    def _healing_state(self) -> dict[str, Any]:
        """Return the state for another replica, once the ledger has its steps."""
        self._ledger.flush()
        return self._state(self._place)

    def _update_position(self) -> SamplePosition:
        """Return the position; with a manager, after the steps that it has committed."""
        if self._replicas and (num_steps := self._replicas.num_committed(self._place)):
            if self._ledger.is_written:
                self._ledger.begin_quorum_segment(
                    self._replicas.quorum_id(), self._plan, self._place
                )
            self._advance(num_steps)
        return self._place

    def _advance(self, num_steps: int) -> None:
        before = self._plan.next_batch(self._place)
        self._place = self._plan.after(before, num_steps)
        if num_steps == 1 and self._ledger.is_written:
            size = self._plan.size(before.position)
            offset, count = (0, size) if self._replicas else self._items.share(size)
            self._ledger.record_step(before, before.position + offset, count)

    def _start_loader(self, loader: Any, plan: EpochPlan, place: SamplePosition) -> None:
        if self._replicas:
            self._drawn = plan, place
        rank, _ = plan.batch.group()
        seed = hashed(plan.seed, place.epoch, place.step, rank) >> 1
        before = self._place
        self._items.open_loader(loader, seed, plan.batch)
        adopted = self._place != before  # from the loader's own state
        self._items.next = plan, self._place if adopted else place

    def _global_batch(self, loader: Any) -> GlobalBatch:
        plan, place = self._plan, self._place

        def begin_batch(batch: GlobalBatch) -> list[MicroBatch]:
            nonlocal plan, place
            if self._replicas is None:
                plan, place = self._plan, self._place
            else:
                division, start = self._replicas.begin_step(self._plan, self._place)
                if self._replicas.in_position:
                    self._place = start
                plan, place = replace(self._plan, batch=division), self._plan.next_batch(start)
            batch.step, batch.epoch = place.step + 1, place.epoch
            batch.num_samples = plan.size(place.position)
            if self._items.next != (plan, place):
                self._start_loader(loader, plan, place)
            if self._replicas is None:
                self._unstepped.on_begin()
            return self._items.micro_batches(batch.num_samples)

        def on_trained() -> None:
            self._items.next = plan, plan.after(place, 1)
            if self._replicas is None:
                self._unstepped.on_end(self._place)
                self._advance(1)

        return GlobalBatch(
            place.step + 1, place.epoch, plan.size(place.position), begin=begin_batch,
            load=self._items.next_item, on_trained=on_trained, virtual_ranks=self._virtual_ranks,
        )  # fmt: skip


def _place(state: dict[str, Any]) -> SamplePosition:
    return SamplePosition(state["epoch"], state["position"], state["step"])


class _NonParticipant(BatchDivision):
    """The share of a replica that does not contribute."""

    def share(self, size: int, ranks: range | None = None) -> tuple[int, int]:
        return 0, 0


class _UnsteppedBatches:
    """Batches of the long form whose micro-batches have ended, and no optimizer has stepped since.

    Once an optimizer has stepped with a batch, the next ones wait for it, too: a state that is
    taken before ``optimizer.step()`` does not hold them, as the parameters do not. The first one
    waits where there is an optimizer of torch. Else a batch counts when its micro-batches have
    ended.
    """

    def __init__(self) -> None:
        self._begin: SamplePosition | None = None
        self._num_steps = 0  # of optimizers when the last batch began
        self._has_begun = self._waits = self._is_first = False

    @property
    def first_place(self) -> SamplePosition | None:
        """The position before the first of them; None if there is none."""
        if self._begin is None or optimizer_steps.num_steps() != self._num_steps:
            return None
        if self._is_first and not optimizer_steps.is_there_an_optimizer():
            return None
        return self._begin

    def on_begin(self) -> None:
        num = optimizer_steps.num_steps()
        if self._num_steps != num:
            self._waits = self._has_begun
        if self._num_steps != num or not self._waits:
            self._begin = None
        self._is_first, self._has_begun = not self._has_begun, True
        self._num_steps = num

    def on_end(self, begin: SamplePosition) -> None:
        if (self._waits or self._is_first) and self._begin is None:
            self._begin = begin

    def clear(self) -> None:
        self._begin = None


class _StepReplicas:
    """The replicas of the present step, and the outcome of the step.

    ``in_position``: the step began at the sampler's position, or the sampler was healed since.
    """

    def __init__(self, manager: ReplicaManager) -> None:
        self._manager = manager
        self.in_position = False

    def begin_step(
        self, plan: EpochPlan, place: SamplePosition
    ) -> tuple[BatchDivision, SamplePosition]:
        """Begin a step; return the division of the batch, and the position of the other replicas.

        That differs from the sampler's ``place`` if this replica is about to be healed, or only its
        manager's state was loaded.
        """
        rank, group_size = plan.batch.group()
        world_size = self._manager.num_participants() * group_size
        if not world_size:
            raise RuntimeError(
                "there is no quorum: call optimizer.zero_grad() or manager.start_quorum() before "
                "batch.micro_batches()"
            )
        replica_rank = self._manager.participating_rank()
        sizes = plan.batch.global_batch_size, plan.batch.micro_batch_size
        if replica_rank is None or not self._manager.is_participating():
            division: BatchDivision = _NonParticipant(*sizes, 0, world_size)
        else:
            division = BatchDivision(*sizes, replica_rank * group_size + rank, world_size)
        ahead = self._manager.current_step() - place.step
        if ahead < 0:
            remedy = (
                f"the manager is at step {self._manager.current_step()}: load its state from the "
                "checkpoint as well as the sampler's, or neither of them"
            )
            raise ConfigError("step", place.step, remedy)
        self.in_position = ahead == 0 or self._manager.is_participating()
        return division, plan.after(place, ahead)

    def num_committed(self, place: SamplePosition) -> int:
        ahead = self._manager.current_step() - place.step
        return max(0, ahead) if self.in_position else 0

    def quorum_id(self) -> int:
        quorum_id = getattr(self._manager, "quorum_id", None)
        if quorum_id is None:
            remedy = "use hpc_elastic.ft.Manager, or name=None on the sampler: it writes no ledger"
            raise ConfigError("manager", type(self._manager).__name__, remedy)
        return int(quorum_id())


class MicroBatchDraws:
    """One rank's micro-batches from a position to the end of its epoch, as lists of indices.

    torchdata's StatefulDataLoader takes the state of this iterator right after each draw, and
    returns it once the micro-batch of that draw has been yielded. So its state is the progress of
    the loop, and not how far the workers have read ahead. ``adopt`` loads a state that is newer
    than the sampler's, and returns the resulting position.
    """

    def __init__(
        self,
        plan: EpochPlan,
        place: SamplePosition,
        *,
        save: Callable[[SamplePosition], dict[str, Any]],
        adopt: Callable[[dict[str, Any]], SamplePosition],
    ) -> None:
        self._plan, self._save, self._adopt = plan, save, adopt
        self._start(place)

    def _start(self, place: SamplePosition) -> None:
        self.begin, self._num_done = place, 0
        self._draws = self._draw_from(place)

    def __iter__(self) -> MicroBatchDraws:
        return self

    def __next__(self) -> list[int]:
        return next(self._draws)

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state after the last global batch that was drawn completely."""
        return self._save(self._plan.after(self.begin, self._num_done))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Draw from the position of the state, or from the sampler's if that is newer."""
        self._start(self._adopt(state))

    def _draw_from(self, place: SamplePosition) -> Iterator[list[int]]:
        """Yield the indices; about `_BLOCK` of them, of equal batches, are computed together."""
        plan = self._plan
        samples, is_seeded = plan.samples(place.epoch), plan.batch.virtual_ranks is not None
        while size := plan.size(place.position):
            parts = plan.batch.micro_batches(size)
            ends = list(itertools.accumulate(part.num_loaded for part in parts))
            most = -(-_BLOCK // ends[-1])
            _, num_batches, *_ = next(plan.steps(place, most))
            of_batch = [np.arange(part.offset, part.offset + part.num_loaded) for part in parts]
            firsts = place.position + size * np.arange(num_batches)
            rows = samples(firsts[:, None] + np.concatenate(of_batch)).tolist()
            for step, row in enumerate(rows, place.step + 1):
                for part, end in zip(parts, ends, strict=True):
                    self._num_done += end == ends[-1]
                    indices = row if len(parts) == 1 else row[end - part.num_loaded : end]
                    if is_seeded:
                        seed = plan.random_seed(step, part.offset, "loader")
                        indices = SeededIndices(indices, seed)
                    yield indices
            place = plan.after(place, num_batches)


class _LoaderItems:
    """The items of a loader, one for each draw.

    ``inside``: a call of the loader is running, and a state that is requested then is the loader's
    own, and not a checkpoint's.
    """

    def __init__(self) -> None:
        self.inside = False
        self.next: tuple[EpochPlan, SamplePosition] | None = None
        self.draws: MicroBatchDraws | None = None
        self.micro_batches: Callable[[int], list[MicroBatch]]
        self.share: Callable[[int], tuple[int, int]]
        self._items: Iterator[Any] = iter(())
        self._checked = False

    def open_loader(self, loader: Any, seed: int, batch: BatchDivision) -> None:
        """Start a loader whose worker processes have this seed."""
        self.micro_batches = functools.cache(batch.micro_batches)  # each size is divided once
        self.share = functools.cache(batch.share)
        self._items = iter(())  # ends the workers of a loader that ended early
        with self._loader_running(), seeded_torch_generator(seed):
            self._items = iter(loader)
        self._checked = False

    def next_item(self) -> Any:
        place, self.inside = self.next and self.next[1], True
        try:
            item = next(self._items)
        except StopIteration:
            raise RuntimeError(f"the loader ended at {place}: {_ONE_EACH}") from None
        finally:
            self.inside = False
        if not self._checked and (begin := self.draws and self.draws.begin) != place:
            raise RuntimeError(
                f"the loader began at {begin}, the training is at {place}: load the state before "
                "the loader is started, or its own state is taken"
            )
        self._checked = True
        return item

    def close_loader(self, *, must_have_ended: bool = False) -> None:
        with self._loader_running():
            if must_have_ended and next(self._items, self) is not self:
                raise RuntimeError(f"the loader has items after the end of the epoch: {_ONE_EACH}")
        self._items = iter(())
        self.next = None

    @contextlib.contextmanager
    def _loader_running(self) -> Iterator[None]:
        self.inside = True
        try:
            yield
        finally:
            self.inside = False


def _hand_out_items() -> None:
    """Let a torch DataLoader hand out its items through its batch sampler, if that is elastic.

    torch calls a batch sampler for what is drawn, and has no call for what the loop has received;
    the difference is what loader workers have read ahead.
    """
    module = sys.modules.get("torch.utils.data")  # where there is no torch, there is no DataLoader
    if module is None or hasattr(module.DataLoader.__iter__, _MARK):
        return
    loader_class: Any = module.DataLoader
    of_before: Callable[[Any], Iterator[Any]] = loader_class.__iter__

    @functools.wraps(of_before)
    def iterate(loader: Any) -> Iterator[Any]:
        sampler = loader.batch_sampler
        if not isinstance(sampler, ElasticSampler) or sampler._items.inside:
            return of_before(loader)
        if type(loader).__iter__ is loader_class.__iter__:
            return sampler._plain_loop(loader)
        if _records_gradients():
            raise _unknown_loader(type(loader).__name__)
        return of_before(loader)

    setattr(iterate, _MARK, True)
    loader_class.__iter__ = iterate


_MARK = "_hands_out_elastic_items"
"""Marks our own ``__iter__``; `functools.wraps` copies it to a wrapper that others put around."""


def _unknown_loader(what: str) -> ConfigError:
    remedy = (
        "its own __iter__ may draw ahead, so it is unknown which item the loop has: iterate over "
        "sampler.batches(loader)"
    )
    return InexactError("loader", what, remedy)


def _records_gradients() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and torch.is_grad_enabled()


_ONE_EACH = "it must yield one item for each list of indices of its batch_sampler, in order"
