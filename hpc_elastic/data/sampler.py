"""The sampler: the next samples, for any history of world sizes.

All ranks go through one order of the epoch's samples, a function of seed and epoch alone, one
global batch at a time. The position in it is one number, the same on every rank, and that number is
the state: any number of workers can load it and continue after the last trained sample.

Trained samples count, not drawn ones. A loader draws ahead in its worker processes, which moves
nothing. The position moves when the last micro-batch of a global batch is done
(`GlobalBatch.micro_batches` has ended). So a state that is taken right after the optimizer's step
includes that batch, and one that is taken before the step does not.

A plain loop over the DataLoader makes one step of each item. The sampler sees only draws, so it
hands the items out itself (`_hand_out_items`), and an item counts as trained once the loop has it.

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
collectives. It is a `NonParticipant`, with a sample of weight 0 for each micro-batch of the others.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import asdict, is_dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from hpc_elastic.data.batch import BatchDivision, GlobalBatch, MicroBatch
from hpc_elastic.data.epoch_plan import End, EpochPlan, SamplePosition, hashed
from hpc_elastic.data.ledger import LedgerWriter
from hpc_elastic.data.random_state import SeededIndices, seeded_torch_generator
from hpc_elastic.errors import ConfigError

_log = logging.getLogger(__name__)

_STATE_VERSION = 1
_BLOCK = 1024
"""Number of indices that are computed at once: a call costs 0.2 ms, even for few."""


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


_num_unnamed: WeakKeyDictionary[ReplicaManager, int] = WeakKeyDictionary()
"""The unnamed samplers of each manager so far; the script fixes their order in every process."""


class ElasticSampler:
    """Batch sampler that yields every sample once an epoch, for any changes of the world size.

    Pass it to a DataLoader as its ``batch_sampler``, and put it into the checkpoint's state. Then
    iterate over the DataLoader, if each item is one step and the model is given to
    `scale_gradients`; or over `batches`, with gradient accumulation, with a manager, with other
    loaders, and where something between the loader and the loop draws ahead.

    It is for map-style datasets; `ElasticStream` is for data that is read forwards. torchdata's
    StatefulDataLoader works with `batches`. If only that loader is saved and not the sampler, its
    state is known when the first loop begins, as always with torchdata; `epochs` counts from 0
    until then.

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
        self._drawn: tuple[EpochPlan, SamplePosition] | None = None
        """With a manager: the division of batches, and the position from which they are drawn."""
        self._items = LoaderItems()
        self._num_loaded = 0
        self._num_epochs: int | None = None
        self._weight: float | None = None
        """Of the item that a plain loop has; None while there is no such loop."""
        self._scales_gradients = False
        self._virtual_ranks: Any = None
        _hand_out_items()
        self._ledger = LedgerWriter(name, batch.group, is_replica=manager is not None)
        self._replicas = StepReplicas(manager) if manager is not None else None
        if manager is not None:
            self._unnamed = None
            if not name:
                number = _num_unnamed[manager] = _num_unnamed.get(manager, 0) + 1
                self._unnamed = f"unnamed.{number}"
            key = f"hpc_elastic.data.{name or self._unnamed}"
            manager.register_state_dict_fn(key, self._load_healed_state, self._healing_state)

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
        """
        plan, place = self._drawn or (self._plan, self._place)
        self._items.draws = MicroBatchDraws(plan, place, save=self._state, adopt=self._adopt)
        return self._items.draws

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs to train, from the present one up to num_epochs - 1.

        An epoch whose loop ended early is repeated with the remaining batches.

        Raises:
            RuntimeError: Nothing of an epoch was trained, so it would be repeated for ever.
        """
        self._num_epochs = num_epochs
        while self.epoch < num_epochs:
            begin = self._place
            yield self.epoch
            if self._update_position() == begin:
                raise RuntimeError(
                    f"nothing of epoch {self.epoch} was trained: iterate over a torch DataLoader "
                    "with batch_sampler=sampler, or over sampler.batches(loader)"
                )

    def scale_gradients(self, model: Any) -> Any:
        """Let a model's gradients count by samples in a plain loop over the DataLoader.

        Ranks average their gradients, and the share of a global batch may be larger on one rank
        than on another. A hook on the model's output multiplies what flows back from the mean loss
        by the weight of this rank's share (`hpc_elastic.data.batch`). Where all shares are equal it
        does nothing.

        Args:
            model: The wrapped module (DistributedDataParallel, FSDP), which the loop calls. Its
                output is a tensor, or lists, tuples, mappings and dataclasses of tensors.

        Returns:
            The same model.
        """
        if self._plan.batch.virtual_ranks is not None:
            remedy = "call average_gradients(model), with the bare module, and loop over batches()"
            raise ConfigError("virtual_ranks", self._plan.batch.virtual_ranks, remedy)

        def scale(_module: Any, _arguments: Any, output: Any) -> None:
            if self._weight is None or not _records_gradients():
                return  # outside of the loop, or an evaluation
            found = [tensor for tensor in _find_tensors(output) if tensor.requires_grad]
            if not found:
                raise RuntimeError(
                    f"the model returned a {type(output).__name__} without a tensor that requires "
                    "a gradient: iterate over sampler.batches(loader), and weight the loss"
                )
            if self._weight != 1.0:
                for tensor in found:
                    tensor.register_hook(functools.partial(operator.mul, self._weight))

        model.register_forward_hook(scale)
        self._scales_gradients = True
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
        require_loader_of(self, loader)
        if self._plan.batch.virtual_ranks and not self._virtual_ranks and _records_gradients():
            remedy = "model = sampler.average_gradients(model), before the loop"
            raise ConfigError("average_gradients", "not called", remedy)
        self._items.close_loader()
        if self._replicas is None:
            self._start_loader(loader, self._plan, self._place)
            self._ledger.begin_segment(self._plan, self._place)
        num_loaded = self._num_loaded
        while self._plan.size(self.position):
            batch = self._global_batch(loader)
            try:
                yield batch
            except GeneratorExit:  # the loop ended early: end the loader's workers
                self._items.close_loader()
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
        self._place = replace(self._place, epoch=self.epoch + 1, position=0)

    def _plain_loop(self, loader: Any) -> Iterator[Any]:
        """Yield the items of a loop over the DataLoader itself; each is one step.

        Raises:
            ConfigError: The sampler has a manager, virtual ranks, or micro-batches, or no scaled
                model.
        """
        if self._plan.batch.virtual_ranks is not None:
            remedy = (
                "a step has several micro-batches, and a loop over the DataLoader makes a step of "
                "each item: iterate over sampler.batches(loader)"
            )
            raise ConfigError("virtual_ranks", self._plan.batch.virtual_ranks, remedy)
        if self._replicas is not None:
            remedy = (
                "iterate over sampler.batches(loader): who takes part in a step is known once its "
                "quorum is"
            )
            raise ConfigError("manager", "given", remedy)
        if (num := self._plan.batch.num_micro_batches(self._plan.batch.global_batch_size)) > 1:
            remedy = (
                f"a step has {num} micro-batches here, and a loop over the DataLoader makes a step "
                "of each item: iterate over sampler.batches(loader)"
            )
            raise ConfigError("micro_batch_size", self._plan.batch.micro_batch_size, remedy)
        if _records_gradients() and not self._scales_gradients:
            remedy = (
                "model = sampler.scale_gradients(model), before the loop: a rank's share of the "
                "batch may be smaller than another's, with this number of ranks or a later one"
            )
            raise ConfigError("scale_gradients", "not called", remedy)
        try:
            for batch in self.batches(loader):
                micro_batches = batch.micro_batches()
                item, self._weight = next(micro_batches)
                next(micro_batches, None)  # it counts as trained
                yield item
        finally:
            self._weight = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state: a few numbers, the same on all ranks.

        Call it on every rank at a checkpoint, even if only one saves: it writes the ledger. With a
        manager, call it on the ranks of the replica that saves.
        """
        if not self._items.inside:
            self._update_position()
            self._ledger.flush()
        return self._state(self._place)

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
            _log.warning(
                "virtual_ranks was %s, and is %s now: the training does not continue bit for bit",
                state.get("virtual_ranks"),
                num,
            )

    def _load(self, state: dict[str, Any]) -> None:
        self._plan.require_same_order(state)
        self._place = _place(state)
        self._ledger.on_state_loaded(state["made_by"], self._place.step)

    def _state(self, place: SamplePosition) -> dict[str, Any]:
        virtual_ranks = self._plan.batch.virtual_ranks
        return {
            "version": _STATE_VERSION,
            **self._plan.facts(),
            "global_batch": self._plan.batch.global_batch_size,
            **({"virtual_ranks": virtual_ranks} if virtual_ranks else {}),
            **asdict(place),
            "made_by": self._ledger.state_maker(
                inside=self._items.inside and self._replicas is None
            ),
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
        """Return the state for another replica, with the ledger of its steps written."""
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
        if num_steps == 1:
            size = self._plan.size(before.position)
            offset, count = (0, size) if self._replicas else self._plan.batch.share(size)
            self._ledger.record_step(before, before.position + offset, count)

    def _start_loader(self, loader: Any, plan: EpochPlan, place: SamplePosition) -> None:
        """Start the loader at a position, with batches divided as in a plan."""
        if self._replicas:
            self._drawn = plan, place
        rank, _ = plan.batch.group()
        seed = hashed(plan.seed, place.epoch, place.step, rank) >> 1
        before = self._place
        self._items.open_loader(loader, seed)
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
            return plan.batch.micro_batches(batch.num_samples)

        def on_trained() -> None:
            self._items.next = plan, plan.after(place, 1)
            if self._replicas is None:
                self._advance(1)

        return GlobalBatch(
            place.step + 1,
            place.epoch,
            plan.size(place.position),
            begin=begin_batch,
            load=self._items.next_item,
            on_trained=on_trained,
            virtual_ranks=self._virtual_ranks,
        )


def _place(state: dict[str, Any]) -> SamplePosition:
    return SamplePosition(state["epoch"], state["position"], state["step"])


class NonParticipant(BatchDivision):
    """The share of a replica that does not contribute."""

    def share(self, size: int, ranks: range | None = None) -> tuple[int, int]:
        """Return no sample."""
        return 0, 0


class StepReplicas:
    """The replicas of the present step, and the outcome of the step.

    Args:
        manager: The fault-tolerant manager.

    Attributes:
        in_position: Whether the step began at the sampler's position, or the sampler was healed
            since; False between two steps.
    """

    def __init__(self, manager: ReplicaManager) -> None:
        self._manager = manager
        self.in_position = False

    def begin_step(
        self, plan: EpochPlan, place: SamplePosition
    ) -> tuple[BatchDivision, SamplePosition]:
        """Begin a step.

        Args:
            plan: The sampler's plan.
            place: The sampler's position.

        Returns:
            The division of the batch, and the position of the other replicas. It differs from the
            sampler's if this replica is about to be healed, or only its manager's state was loaded.

        Raises:
            RuntimeError: No quorum was started.
            ConfigError: The manager is behind the sampler.
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
            division: BatchDivision = NonParticipant(*sizes, 0, world_size)
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
        """Return the number of steps committed since the sampler was at a position."""
        ahead = self._manager.current_step() - place.step
        return max(0, ahead) if self.in_position else 0

    def quorum_id(self) -> int:
        """Return the number of the quorum of the present step.

        Raises:
            ConfigError: The manager has no quorum id.
        """
        quorum_id = getattr(self._manager, "quorum_id", None)
        if quorum_id is None:
            remedy = "use hpc_elastic.ft.Manager, or name=None on the sampler: it writes no ledger"
            raise ConfigError("manager", type(self._manager).__name__, remedy)
        return int(quorum_id())


class MicroBatchDraws:
    """One rank's micro-batches from a position to the end of its epoch, as lists of indices.

    torchdata's StatefulDataLoader takes the state of this iterator right after each draw, and
    returns it once the micro-batch of that draw has been yielded. So its state is the progress of
    the loop, and not how far the workers have read ahead.

    Args:
        plan: The plan of the epoch.
        place: The position from which it draws.
        save: Returns the sampler's state at a position.
        adopt: Loads a state if it is newer than the sampler's; returns the resulting position.
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
        self.begin = self._done = self._drawn = place
        self._samples = self._plan.samples(place.epoch)
        self._queue: deque[tuple[list[int], SamplePosition]] = deque()

    def __iter__(self) -> MicroBatchDraws:
        return self

    def __next__(self) -> list[int]:
        if not self._queue:
            self._draw_block()
        if not self._queue:
            raise StopIteration
        indices, self._done = self._queue.popleft()
        return indices

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state after the last global batch that was drawn completely."""
        return self._save(self._done)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Draw from the position of the state, or from the sampler's if that is newer."""
        self._start(self._adopt(state))

    def _draw_block(self) -> None:
        """Draw global batches until there are `_BLOCK` indices."""
        positions: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        places: list[SamplePosition] = []
        seeds: list[int] = []
        is_seeded = self._plan.batch.virtual_ranks is not None
        num_drawn = 0
        while num_drawn < _BLOCK and (size := self._plan.size(self._drawn.position)):
            first, before = self._drawn.position, self._drawn
            for part in self._plan.batch.micro_batches(size):
                begin = first + part.offset
                positions.append(np.arange(begin, begin + part.num_loaded))
                places.append(before)
                if is_seeded:
                    seeds.append(self._plan.random_seed(before.step + 1, part.offset, "loader"))
                num_drawn += part.num_loaded
            self._drawn = places[-1] = SamplePosition(before.epoch, first + size, before.step + 1)
        if positions:
            samples = self._samples(np.concatenate(positions))
            cuts = np.cumsum([len(p) for p in positions])[:-1]
            indices: Iterable[list[int]] = (part.tolist() for part in np.split(samples, cuts))
            if is_seeded:
                indices = itertools.starmap(SeededIndices, zip(indices, seeds, strict=True))
            self._queue.extend(zip(indices, places, strict=True))


class LoaderItems:
    """The items of a loader, one for each draw.

    Attributes:
        inside: Whether a call of the loader is running: a state that is requested then is the
            loader's own, and not a checkpoint's.
        next: The plan and the position of the next item.
        draws: The loader's draws; None if it has not begun to draw.
    """

    def __init__(self) -> None:
        self.inside = False
        self.next: tuple[EpochPlan, SamplePosition] | None = None
        self.draws: MicroBatchDraws | None = None
        self._items: Iterator[Any] = iter(())
        self._checked = False

    def open_loader(self, loader: Any, seed: int) -> None:
        """Start a loader.

        Args:
            loader: The loader.
            seed: Seed of its worker processes.
        """
        self._items = iter(())  # ends the workers of a loader that ended early
        with self._loader_running(), seeded_torch_generator(seed):
            self._items = iter(loader)
        self._checked = False

    def next_item(self) -> Any:
        """Return the next item.

        Raises:
            RuntimeError: The loader does not fit the sampler.
        """
        place = self.next and self.next[1]
        with self._loader_running():
            try:
                item = next(self._items)
            except StopIteration:
                raise RuntimeError(f"the loader ended at {place}: {_ONE_EACH}") from None
        begin = self.draws.begin if self.draws else None
        if not self._checked and begin != place:
            raise RuntimeError(
                f"the loader began at {begin}, the training is at {place}: load the state before "
                "the loader is started, or its own state is taken"
            )
        self._checked = True
        return item

    def close_loader(self, *, must_have_ended: bool = False) -> None:
        """End the loader.

        Raises:
            RuntimeError: `must_have_ended` is set, and it has further items.
        """
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
    if module is None or hasattr(module.DataLoader.__iter__, "__wrapped__"):
        return
    loader_class: Any = module.DataLoader
    of_torch: Callable[[Any], Iterator[Any]] = loader_class.__iter__

    @functools.wraps(of_torch)
    def iterate(loader: Any) -> Iterator[Any]:
        sampler = loader.batch_sampler
        is_plain = type(loader) is loader_class
        if is_plain and isinstance(sampler, ElasticSampler) and not sampler._items.inside:
            return sampler._plain_loop(loader)
        return of_torch(loader)

    loader_class.__iter__ = iterate


def _records_gradients() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and torch.is_grad_enabled()


def _find_tensors(output: Any) -> Iterator[Any]:
    """Yield the tensors of a model's output."""
    if hasattr(output, "requires_grad"):
        yield output
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _find_tensors(value)
    elif isinstance(output, Mapping):
        yield from _find_tensors(list(output.values()))
    elif is_dataclass(output):
        yield from _find_tensors(list(vars(output).values()))


_ONE_EACH = "it must yield one item for each list of indices of its batch_sampler, in order"


def require_loader_of(sampler: object, loader: Any) -> None:
    """Accept a loader that draws from this sampler, as far as that can be checked.

    Raises:
        ConfigError: It has another sampler, or changes the order.
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
