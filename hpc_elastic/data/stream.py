"""The stream: sharded data that is read sequentially, each sample once an epoch.

The data is a list of shards (files, ranges, generators) of known lengths, and a function that reads
one shard from a given sample on. The epoch's order is computed, as the sampler's is: the n-th
sample of an epoch is a function of the shards' lengths, the seed and n alone. So the position in
the stream is one number, the same on every rank, and all rules of `sampler` hold: trained samples
count, a state fits any number of ranks and loader workers, and the ledger proves it.

How a computed order can be read forwards
-----------------------------------------
The epoch's shards, in a keyed permutation, form one sequence of samples. It is cut into *lanes* of
equal length, and the order cycles through the lanes, ``run`` samples of each at a time:

    position 0 .. run-1: lane 0     run .. 2 run - 1: lane 1     ...     then lane 0 again

Samples are shuffled in *windows*: each lane is cut into pieces of ``window`` samples, and each
piece is permuted with a key of its own. A reader of a lane reads forwards, and holds the samples of
one window that it has read and not yielded yet. It needs no state: a new reader starts at the
window's first sample. The windows of different lanes begin at different steps, so that they are not
all filled at once.

A global batch takes ``run`` samples of each of ``batch_lanes`` lanes, and there are ``period``
times as many lanes: step t takes the lanes of t mod period. A rank trains the same part of every
global batch, and a DataLoader deals micro-batches to its workers in turn. So each lane is read by
one worker of one rank where the numbers divide each other, and nothing is read twice. Where
they do not, or after the group has changed, several workers read a lane, and each skips the samples
of the others. That costs reading, and does not change what is trained.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_elastic.data.batch import BatchDivision
from hpc_elastic.data.epoch_plan import End, EpochPlan, Order, hashed
from hpc_elastic.data.sampler import ElasticSampler, ReplicaManager
from hpc_elastic.errors import ConfigError
from hpc_elastic.shared_files import read_json, write_atomic
from hpc_elastic.tree_codec import leaves, map_values
from hpc_elastic.worker import process_group

_log = logging.getLogger(__name__)

Read = Callable[[Any, int], Iterable[Any]]
"""Reads a shard from one of its samples on: ``read(shard, start)``."""

_REPORT_INTERVAL_S = 10.0
_MANY_READERS = 1.5
_MOST_LANES = 192
_PERIODS = (24, 12, 8, 4, 2, 1)  # numbers that most numbers of loader workers divide


class ElasticStream(ElasticSampler):
    """Yields every sample of sharded data once an epoch, read sequentially, for any world size.

    It is used as `ElasticSampler` is, with a dataset of its own:

        stream = ElasticStream(files, read, lengths, 128, seed=0)
        loader = DataLoader(stream.dataset, batch_sampler=stream, num_workers=4)
        for epoch in stream.epochs(10):
            for batch in stream.batches(loader):
                for samples, weight in batch.micro_batches(model): ...

    The state is a few numbers for any size of the shuffle buffer: a restart reads the buffer again.

    Args:
        shards: The arguments of ``read``: paths, numbers, or anything that can be sent to a
            loader's worker. The same in the same order on every rank and after each restart.
        read: Called as ``read(shard, start)`` in the process that loads; returns an iterable of
            the shard's samples from number ``start`` on, always the same ones. Where the format
            has no index, ``itertools.islice(samples, start, None)`` skips the others.
        lengths: Samples of each shard; `count_samples` counts unknown ones.
        global_batch_size: Samples of one optimizer step, as with `ElasticSampler`.
        seed: Seed of the order; the same on all ranks.
        micro_batch_size: Largest number of samples of a rank at a time, as with `ElasticSampler`.
        rank: As with `ElasticSampler`.
        world_size: As with `ElasticSampler`.
        shuffle: Shards in a new order each epoch, and samples shuffled in the buffer. False: the
            lanes go through the shards in the given order; with ``num_lanes=1`` so does the epoch.
        shuffle_buffer: Number of samples that are shuffled together, over all lanes and so over all
            workers, at least 1. A larger buffer takes more memory, and more reading after a
            restart.
        num_lanes: Number of places at which the data is read at the same time, over all workers of
            all ranks, at least 1. It should not be below the workers of the largest group. It may
            exceed the number of shards if ``read`` finds ``start`` without reading from the start
            of the shard. None: the number of shards, 192 at most. It is rounded down to a divisor
            of the global batch.
        end: Treatment of an epoch's last samples, as with `ElasticSampler`.
        name: Name of its ledger, as with `ElasticSampler`.
        virtual_ranks: As with `ElasticSampler`. The random numbers of ``collate_fn`` are then the
            same for any history, and those that ``read`` draws are not: a restart reads again.
        manager: A fault-tolerant manager, as with `ElasticSampler`. The replicas' shares change
            with their number, so more is read twice than without.

    Raises:
        ConfigError: An argument is out of range, or an epoch would have no batch.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        read: Read,
        lengths: Sequence[int],
        global_batch_size: int,
        seed: int = 0,
        *,
        micro_batch_size: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        shuffle_buffer: int = 1000,
        num_lanes: int | None = None,
        end: End = "keep",
        name: str | None = "train",
        virtual_ranks: int | None = None,
        manager: ReplicaManager | None = None,
    ) -> None:
        shards, numbers = list(shards), tuple(map(int, lengths))
        if len(numbers) != len(shards):
            remedy = f"give one for each of the {len(shards)} shards"
            raise ConfigError("lengths", f"{len(numbers)} numbers", remedy)
        for shard, number in zip(shards, numbers, strict=True):
            if number < 0:
                remedy = f"shard {shard!r:.200} cannot have a negative length"
                raise ConfigError("lengths", number, remedy)
        if shuffle_buffer < 1:
            raise ConfigError("shuffle_buffer", shuffle_buffer, "give at least one sample")
        if num_lanes is not None and num_lanes < 1:
            raise ConfigError("num_lanes", num_lanes, "give at least one, or None")
        super().__init__(
            sum(numbers), global_batch_size, seed, micro_batch_size=micro_batch_size, rank=rank,
            world_size=world_size, shuffle=shuffle, end=end, name=name,
            virtual_ranks=virtual_ranks, manager=manager,
        )  # fmt: skip
        self._layout = StreamLayout.of(
            numbers, seed, self._plan.batch.global_batch_size,
            num_lanes or min(len(shards), _MOST_LANES), shuffle_buffer if shuffle else 0,
        )  # fmt: skip
        self._plan = StreamPlan(**vars(self._plan), layout=self._layout, shards=_digest(shards))
        self.dataset: StreamDataset = StreamDataset(shards, read, self._layout)
        self._has_warned = self._are_facts_compared = False
        if manager is None:
            self._require_equal_facts()  # those of the shards, too

    def _require_loader(self, loader: Any) -> None:
        if getattr(loader, "dataset", self.dataset) is not self.dataset:
            raise ConfigError("dataset", loader.dataset, "create the loader with stream.dataset")
        super()._require_loader(loader)
        if not self._has_warned:
            self._has_warned = True
            self._warn_of_shared_lanes(getattr(loader, "num_workers", 0))

    def _warn_of_shared_lanes(self, num_workers: int) -> None:
        layout, batch = self._layout, self._plan.batch
        _, world_size = batch.group()
        num_readers = layout.num_readers(batch, max(1, num_workers))
        if num_readers > _MANY_READERS:
            _log.warning(
                "%.1f of this rank's workers read each shard, and skip each other's samples: "
                "give a num_workers that divides %d, micro-batches of %d samples, or other lanes",
                num_readers, layout.period, layout.run,
            )  # fmt: skip
        if world_size > layout.batch_lanes:
            _log.warning(
                "%d ranks share %d lanes of a batch, so several read the same shards: give more "
                "shards, or more lanes if the reader can seek", world_size, layout.batch_lanes,
            )  # fmt: skip


@dataclass(frozen=True)
class StreamLayout:
    """The place of each position of an epoch in the shards (pure)."""

    lengths: tuple[int, ...]
    seed: int
    batch_lanes: int  # lanes of a global batch
    period: int  # steps after which the same lanes recur
    run: int  # samples of a lane at a time
    window: int  # samples of a lane that are shuffled together; 0 for no shuffling

    @classmethod
    def of(
        cls, lengths: tuple[int, ...], seed: int, global_batch: int, num_lanes: int, buffer: int
    ) -> StreamLayout:
        """Return the layout for a global batch, whose lanes all have the same share."""
        period = next(p for p in _PERIODS if p * p <= num_lanes)
        most = num_lanes // period
        batch_lanes = next(n for n in range(min(most, global_batch), 0, -1) if not global_batch % n)
        window = buffer and max(1, buffer // (batch_lanes * period))
        run = global_batch // batch_lanes
        return cls(lengths, seed, batch_lanes, period, run, window)

    @property
    def num_lanes(self) -> int:
        """Lanes of an epoch's sequence."""
        return self.batch_lanes * self.period

    @cached_property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return sum(self.lengths)

    def lane_begin(self, lane: int) -> int:
        """Return the start of a lane in the sequence; that of lane `num_lanes` is the end."""
        return self.num_samples * lane // self.num_lanes

    def places(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the lane of each position, and the number of samples before it in the lane."""
        num_lanes, (taken, edges) = self.num_lanes, self._rest
        lane = positions // self.run % num_lanes
        before = positions // (self.run * num_lanes) * self.run + positions % self.run
        # The rest of the lanes after the last whole round comes lane by lane.
        in_rest = positions >= taken * num_lanes
        places = positions[in_rest] - taken * num_lanes
        rest = np.searchsorted(edges, places, side="right") - 1
        lane[in_rest] = rest
        before[in_rest] = taken + places - edges[rest]
        return lane, before

    @cached_property
    def _rest(self) -> tuple[int, NDArray[np.int64]]:
        """Samples of a lane in whole rounds; the start of each lane's rest among the positions."""
        num_lanes = self.num_lanes
        taken = self.num_samples // (num_lanes * self.run) * self.run
        begins = np.array([self.lane_begin(lane) for lane in range(num_lanes + 1)], dtype=np.int64)
        return taken, begins - taken * np.arange(num_lanes + 1)

    def num_readers(self, batch: BatchDivision, num_workers: int) -> float:
        """Return the average number of a rank's workers, which take turns, that read one lane."""
        parts = batch.micro_batches(self.batch_lanes * self.run)
        readers: set[tuple[int, int]] = set()
        for step in range(math.lcm(self.period, num_workers)):
            first = step % self.period * self.batch_lanes
            for i, part in enumerate(parts, step * len(parts)):
                last = (part.offset + part.num_loaded - 1) // self.run
                lanes = range(part.offset // self.run, last + 1)
                readers.update((first + lane, i % num_workers) for lane in lanes)
        return len(readers) / len({lane for lane, _ in readers})

    def window_of(self, lane: int, before: int) -> range:
        """Return the window of a sample in its lane; only itself without shuffling."""
        if not self.window:
            return range(before, before + 1)
        shift = self.window * lane // self.num_lanes
        first = (before + shift) // self.window * self.window - shift
        size = self.lane_begin(lane + 1) - self.lane_begin(lane)
        return range(max(0, first), min(size, first + self.window))

    def shuffled(self, epoch: int, lane: int, window: range) -> NDArray[np.int64]:
        """Return the samples of a window in the order of an epoch."""
        seed = hashed(self.seed, lane, window.start)
        order = Order(len(window), seed, epoch, shuffle=self.window > 1)
        return order(np.arange(len(window))) + window.start

    def shards(self, epoch: int) -> list[int]:
        """Return the shards in the order of an epoch."""
        order = Order(len(self.lengths), self.seed, epoch, shuffle=self.window > 0)
        found: list[int] = order(np.arange(len(self.lengths))).tolist()
        return found


@dataclass(frozen=True)
class StreamPlan(EpochPlan):
    """The global batches of a stream's epoch; ``shards`` is a digest of the shards' names."""

    layout: StreamLayout
    shards: str

    def samples(self, epoch: int) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
        """Return the function from positions to the numbers of `StreamDataset`."""
        return lambda positions: epoch * self.length + positions % self.length

    def facts(self) -> dict[str, Any]:
        """Return the values that fix the order; the global batch is one of them."""
        lengths = " ".join(map(str, self.layout.lengths))
        return {
            **super().facts(),
            "global_batch": self.batch.global_batch_size,
            "num_lanes": self.layout.num_lanes,
            "shuffle_window": self.layout.window,
            "lengths": hashlib.sha256(lengths.encode()).hexdigest()[:16],
            "shards": self.shards,
        }


class StreamDataset:
    """Reads a stream's samples by number, in a DataLoader's worker or in the process itself.

    The number of a sample is its position, counted over all epochs. Any can be read at any time; it
    is fast if each lane's numbers are read in order.
    """

    def __init__(self, shards: Sequence[Any], read: Read, layout: StreamLayout) -> None:
        self._shards, self._read, self._layout = shards, read, layout
        self._epoch: _Epoch | None = None
        self._process = os.getpid()

    def __len__(self) -> int:
        return self._layout.num_samples

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        if self._process != os.getpid():  # files of the parent share one position
            self._epoch, self._process = None, os.getpid()
        size = self._layout.num_samples
        epoch = numbers[0] // size
        if self._epoch is None or self._epoch.number != epoch:
            self._epoch = _Epoch(epoch, self._shards, self._read, self._layout)
        positions = np.fromiter(numbers, dtype=np.int64)  # an iteration: see `SeededIndices`
        return self._epoch.get(positions % size)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_epoch": None, "_process": None}


class _Epoch:
    """One epoch in one process; ``begins``: the start of each shard, in order, and the end."""

    def __init__(
        self, number: int, shards: Sequence[Any], read: Read, layout: StreamLayout
    ) -> None:
        self.number, self.layout, self.read = number, layout, read
        order = layout.shards(number)
        self.shards = [shards[i] for i in order]
        self.begins: list[int] = [0, *np.cumsum([layout.lengths[i] for i in order]).tolist()]
        self._lanes: dict[int, _Lane] = {}

    def get(self, positions: NDArray[np.int64]) -> list[Any]:
        samples = []
        lanes, befores = self.layout.places(positions)
        for lane, before in zip(lanes.tolist(), befores.tolist(), strict=True):
            if lane not in self._lanes:
                self._lanes[lane] = _Lane(lane, self)
            samples.append(self._lanes[lane].get(before))
        return samples


class _Lane:
    """Reads one lane of an epoch forwards, and holds the samples of one window."""

    def __init__(self, number: int, epoch: _Epoch) -> None:
        self._number, self._epoch = number, epoch
        self._begin = epoch.layout.lane_begin(number)
        self._window = range(0)
        self._order: list[int] = []
        self._held: dict[int, Any] = {}
        self._samples: Iterator[Any] | None = None  # the rest of the open shard
        self._shard = self._next = -1
        """The shard, and the sample of the epoch's sequence that is read next."""

    def get(self, before: int) -> Any:
        layout = self._epoch.layout
        if before not in self._window:
            self._window = layout.window_of(self._number, before)
            shuffled = layout.shuffled(self._epoch.number, self._number, self._window)
            self._order = shuffled.tolist()
            self._held = {}
        wanted = self._begin + self._order[before - self._window.start]
        if wanted not in self._held:
            # Read up to it, from the window's first sample unless those before are held.
            first = self._begin + self._window.start
            if not first <= self._next <= wanted:
                self._seek(first)
                self._held = {}
            while self._next <= wanted:
                number = self._next
                self._held[number] = self._read()
        return self._held.pop(wanted)

    def _seek(self, number: int) -> None:
        """Move to a sample, by reading on in an open shard or by opening the shard there."""
        shard = bisect_right(self._epoch.begins, number) - 1
        if self._samples is None or shard != self._shard or number < self._next:
            self._samples, self._next = None, number
        while self._next < number:
            self._read()

    def _read(self) -> Any:
        begins = self._epoch.begins
        if self._samples is None:
            self._shard = bisect_right(begins, self._next) - 1
            shard, start = self._epoch.shards[self._shard], self._next - begins[self._shard]
            self._samples = iter(self._epoch.read(shard, start))
        try:
            sample = next(self._samples)
        except StopIteration:
            problem = f"ended before sample {self._next - begins[self._shard]}"
            raise ValueError(self._wrong_length(problem)) from None
        self._next += 1
        if self._next == begins[self._shard + 1]:
            if next(self._samples, self) is not self:
                raise ValueError(self._wrong_length("has more samples"))
            self._samples = None
        return sample

    def _wrong_length(self, problem: str) -> str:
        first, after = self._epoch.begins[self._shard : self._shard + 2]
        return (
            f"shard {self._epoch.shards[self._shard]!r:.200} has {after - first} samples by "
            f"`lengths`, but {problem}: correct lengths, and check that read(shard, start) yields "
            "the same samples every time, from start on (an IterableDataset that divides itself "
            "among a loader's workers does not)"
        )


def count_samples(
    shards: Sequence[Any], read: Read, file: str | os.PathLike[str] | None = None
) -> list[int]:
    """Count the samples of shards by reading all of them once (every rank; collective).

    With torch.distributed initialised, each rank counts a part of the shards. Use a reader that
    does as little work per sample as possible. A shard that never ends has no length: limit its
    ``read`` by `itertools.islice`, and give that length.

    Args:
        shards: The shards of `ElasticStream`.
        read: The reader of `ElasticStream`.
        file: A file for the lengths, on a file system that all ranks share: lengths in it are not
            counted again, unless the shards have changed. None keeps no file.

    Returns:
        The samples of each shard, the same on every rank.
    """
    size = process_group.size()
    rank, world_size = (0, 1) if size is None else (process_group.rank(), size)
    path, digest = Path(file) if file is not None else None, _digest(shards)
    known = read_json(path) if path and rank == 0 else None
    if known and known.get("shards") == digest and len(known["lengths"]) == len(shards):
        lengths = [int(length) for length in known["lengths"]]
    else:
        lengths = [-1 if rank == 0 else 0] * len(shards)
    lengths = process_group.sum_rows(lengths)
    if -1 not in lengths:
        return lengths
    lengths = [0] * len(shards)
    reported_at = time.monotonic()
    for i in range(rank, len(shards), world_size):
        count = 0
        for count, _ in enumerate(read(shards[i], 0), 1):
            if count % 1000 == 0 and time.monotonic() - reported_at > _REPORT_INTERVAL_S:
                reported_at = time.monotonic()
                text = "shard %.200r: %d samples so far; give lengths= if known"
                _log.info(text, shards[i], count)
        lengths[i] = count
    lengths = process_group.sum_rows(lengths)
    if path and rank == 0:
        write_atomic(path, json.dumps({"shards": digest, "lengths": lengths}))
    return lengths


def _digest(shards: Sequence[Any]) -> str:
    """Return a digest that changes with names and order of shards, but not if all are moved."""
    names = [_identity(shard) for shard in shards]
    paths = [name for name in leaves(names) if isinstance(name, str) and "/" in name]
    common = os.path.commonprefix(paths)  # noqa: RUF071  # of any texts, URLs too
    folder = common[: common.rfind("/") + 1]
    relative = map_values(names, lambda n: n.removeprefix(folder) if isinstance(n, str) else n)
    return hashlib.sha256(json.dumps(relative).encode()).hexdigest()[:16]


def _identity(shard: Any) -> Any:
    """Return the identity of a shard as JSON: texts, numbers, and lists of them."""
    if isinstance(shard, os.PathLike):
        return _identity(os.fspath(shard))
    if shard is None or isinstance(shard, str | float):
        return shard
    if hasattr(shard, "__index__"):  # NumPy's numbers, too
        return int(shard)
    if isinstance(shard, bytes):
        return shard.hex()
    if isinstance(shard, list | tuple):
        return [_identity(part) for part in shard]
    if isinstance(shard, dict):
        return [_identity(pair) for pair in shard.items()]
    return [type(shard).__qualname__]  # its repr may contain an address
