"""The division of a global batch among any number of ranks, and the weights of its parts.

A global batch of n samples is cut into one share a rank, as even as n allows, and each share into
micro-batches of at most `micro_batch_size` samples. All ranks have the same number of
micro-batches, so that they take part in the same collectives, whichever way the model is wrapped. A
rank whose share is too small for that (more workers than samples) gets a sample of another share,
with weight 0.

Weights. Let W ranks average their gradients, as DistributedDataParallel and FSDP do, and let a
rank add up those of its micro-batches. With a loss that is the mean over a micro-batch of k
samples, the weight k * W / n makes the result the gradient of the mean over the global batch:
(1/W) * sum of (k W / n) * (1/k) * sum of gradients = (1/n) * sum of gradients. That is exact but
for rounding, however uneven the shares are.

Whatever depends on more than the sum of gradients depends on the world size: batch normalisation
sees one micro-batch (SyncBatchNorm: one micro-batch of each rank), also one of weight 0.

Workers of different speed (``throughput`` of ``launcher.pools``) have shares in proportion to it,
so that all of them finish a step at the same time; the formula of the weights is the same.

With virtual ranks (`virtual_ranks`), the batch is divided among those, and W above is their number:
each worker has the micro-batches of several of them, and the division depends on no world size.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_elastic._util import counted
from hpc_elastic.errors import ConfigError
from hpc_elastic.worker import process_group


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of one rank, as a part of a global batch."""

    offset: int  # its first sample, counted from the global batch's first one
    count: int  # its number of samples; 0 if the sample at ``offset`` has weight 0
    weight: float  # factor for its mean loss
    rank: int = 0

    @property
    def num_loaded(self) -> int:
        """Samples to load, with that of weight 0."""
        return max(1, self.count)


@dataclass(frozen=True)
class BatchDivision:
    """The size of a global batch, and its division among the workers.

    The fields are the arguments of `ElasticSampler`, or ConfigError. Ranks that are given are taken
    to be equally fast.
    """

    global_batch_size: int
    micro_batch_size: int | None = None
    rank: int | None = None
    world_size: int | None = None
    virtual_ranks: int | None = None

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            is_needed = key == "global_batch_size"
            is_whole = hasattr(value, "__index__") and not isinstance(value, bool)
            if not is_whole and (is_needed or value is not None):  # NumPy's are, 48.0 is not
                remedy = "give a whole number" + ("" if is_needed else ", or None")
                raise ConfigError(key, value, remedy)
        if (size := self.global_batch_size) < 1:
            raise ConfigError("global_batch_size", size, "give at least one sample")
        if (most := self.micro_batch_size) is not None and most < 1:
            raise ConfigError("micro_batch_size", most, "give at least one sample, or None")
        if (self.rank is None) != (self.world_size is None):
            raise ConfigError("rank", self.rank, "give both rank and world_size, or neither")
        if self.rank is not None and not 0 <= self.rank < (self.world_size or 0):
            last = (self.world_size or 0) - 1
            raise ConfigError("rank", self.rank, f"give one from 0 to {last}, below world_size")
        self.ranks_of(0)  # refuses too few virtual ranks

    def ranks_of(self, worker: int) -> range:
        """Return the ranks, its own or virtual ones, whose shares a worker computes."""
        if self.virtual_ranks is None:
            return range(worker, worker + 1)
        _, world_size = self.group()
        if self.virtual_ranks < world_size:
            remedy = (
                f"each of the {counted(world_size, 'worker')} needs a virtual rank: give at least "
                "the largest number of workers that the run may have, or use fewer nodes"
            )
            raise ConfigError("virtual_ranks", self.virtual_ranks, remedy)
        num_ranks = self.virtual_ranks
        return range(num_ranks * worker // world_size, num_ranks * (worker + 1) // world_size)

    def group(self) -> tuple[int, int]:
        """Return rank and world size; to be called once torch.distributed is initialised."""
        if self.rank is not None and self.world_size is not None:
            return self.rank, self.world_size
        if (size := process_group.size()) is not None:
            return process_group.rank(), size
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    def num_micro_batches(self, size: int) -> int:
        """Return the number of micro-batches that this rank makes of a global batch of that size.

        It is the same on all ranks, unless workers have different numbers of virtual ranks.
        """
        ranks = self.ranks_of(self.group()[0])
        return len(ranks) * self._num_micro_batches_of_a_rank(size)

    def _num_micro_batches_of_a_rank(self, size: int) -> int:
        cuts = self._cuts(size)
        largest_share = max(1, *(stop - start for start, stop in itertools.pairwise(cuts)))
        return -(-largest_share // (self.micro_batch_size or largest_share))

    @property
    def _num_ranks(self) -> int:
        return self.virtual_ranks or self.group()[1]

    def _cuts(self, size: int) -> tuple[int, ...]:
        num, is_given = self._num_ranks, self.rank is not None or self.virtual_ranks is not None
        known = () if is_given else decode_throughputs(os.environ.get(THROUGHPUTS_VARIABLE, ""))
        return _cuts(size, known if len(known) == num else num)

    def share(self, size: int, ranks: range | None = None) -> tuple[int, int]:
        """Return (offset, count) of the share of these ranks, by default its own, of a batch."""
        ranks = self.ranks_of(self.group()[0]) if ranks is None else ranks
        cuts = self._cuts(size)
        return cuts[ranks.start], cuts[ranks.stop] - cuts[ranks.start]

    def micro_batches(self, size: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of a global batch of that size."""
        found = []
        num_ranks, num_parts = self._num_ranks, self._num_micro_batches_of_a_rank(size)
        for rank in self.ranks_of(self.group()[0]):
            first, count = self.share(size, range(rank, rank + 1))
            cuts = [first + count * i // num_parts for i in range(num_parts + 1)]
            found += [
                MicroBatch(
                    min(start, size - 1), stop - start, (stop - start) * num_ranks / size, rank
                )
                for start, stop in itertools.pairwise(cuts)
            ]
        return found


THROUGHPUTS_VARIABLE = "HPC_ELASTIC_THROUGHPUTS"
"""Throughputs of the ranks of a worker's group, such as ``8*1000,16*2500``; unset if equal."""
THROUGHPUT_UNIT = 1000  # whole numbers of a throughput of 1


def encode_throughputs(ranks: Iterable[int]) -> str:
    """Return the value of `THROUGHPUTS_VARIABLE`; empty if all ranks are equally fast."""
    runs = [(len(list(group)), value) for value, group in itertools.groupby(ranks)]
    return ",".join(f"{count}*{value}" for count, value in runs) if len(runs) > 1 else ""


@functools.lru_cache(maxsize=8)
def decode_throughputs(text: str) -> tuple[int, ...]:
    """Return the throughput of each rank; empty if all are equally fast."""
    runs = [run.partition("*") for run in text.split(",") if run]
    return tuple(int(value) for count, _, value in runs for _ in range(int(count)))


@functools.lru_cache(maxsize=8)
def _cuts(size: int, throughputs: tuple[int, ...] | int) -> tuple[int, ...]:
    """Return where the shares of a batch begin, and its end, by number or throughputs of ranks."""
    if isinstance(throughputs, int):
        return tuple(size * rank // throughputs for rank in range(throughputs + 1))
    before = tuple(itertools.accumulate(throughputs, initial=0))
    return tuple(size * each // before[-1] for each in before)


def check(global_batch: int, max_nodes: int, nproc_per_node: int | None) -> str | None:
    """Return why a global batch is too small for the most workers (login node; pure), or None.

    ``nproc_per_node`` is None if unknown before the nodes are.
    """
    if global_batch < 1:
        return f"a global batch of {global_batch} samples is too small: give at least 1"
    workers = max_nodes * (nproc_per_node or 1)
    if workers <= global_batch:
        return None
    most = global_batch // (nproc_per_node or 1)
    fewer = f"at most {counted(most, 'node')}" if most else "fewer workers a node"
    have = "has" if max_nodes == 1 else "have"
    return (
        f"{counted(max_nodes, 'node')} {have} {workers} workers or more, and a global batch of "
        f"{counted(global_batch, 'sample')} cannot give each of them one: give {fewer}, or a "
        f"global batch of at least {workers}"
    )


class GlobalBatch:
    """One global batch as this rank sees it (`ElasticSampler.batches` makes them).

    Attributes:
        step: Number of the optimizer step that it makes, from 1, over the whole run.
        epoch: Its epoch, from 0.
        num_samples: Its samples, all ranks together.

    With a fault-tolerant manager they are estimates until `micro_batches` begins, because only then
    the participants are known; a step that was not committed is repeated.
    """

    def __init__(
        self,
        step: int,
        epoch: int,
        num_samples: int,
        *,
        begin: Callable[[GlobalBatch], list[MicroBatch]],
        load: Callable[[], Any],
        on_trained: Callable[[], None],
        virtual_ranks: Any = None,
    ) -> None:
        self.step = step
        self.epoch = epoch
        self.num_samples = num_samples
        self._begin, self._load, self._on_trained = begin, load, on_trained
        self._virtual_ranks = virtual_ranks
        self._begun = False
        self._parts: list[MicroBatch] = []
        self.is_complete: bool = False
        """Whether all of its micro-batches have been yielded."""

    def micro_batches(self, *models: Any) -> Iterator[tuple[Any, float]]:
        """Yield this rank's micro-batches as the loader returned them, with their weights.

        Multiply the mean loss of each by its weight, then call ``backward()``. The global batch
        counts as trained once the loop has ended, so step the optimizer right after it.

        Args:
            *models: Wrapped models whose gradients are exchanged once a global batch: all but the
                last micro-batch run under their ``no_sync()`` (DistributedDataParallel, FSDP), or
                without ``set_requires_gradient_sync`` (FSDP2). Other models are left alone. Without
                this argument the result is the same, with more communication.

        Raises:
            RuntimeError: It was called before for this batch, or the loader ended too early.
        """
        if self._begun:
            raise RuntimeError(
                "micro_batches() of a batch can be called once: keep list(batch.micro_batches())"
            )
        self._begun = True
        self._parts = self._begin(self)
        if self._virtual_ranks is None:
            last = len(self._parts) - 1
            for i, part in enumerate(self._parts):
                data = self._load()
                with _gradient_exchange(models, now=i == last):
                    yield data, part.weight
        else:
            yield from self._of_virtual_ranks()
        self.is_complete = True
        self._on_trained()

    def _of_virtual_ranks(self) -> Iterator[tuple[Any, float]]:
        with self._virtual_ranks.global_batch():
            for rank, parts in itertools.groupby(self._parts, key=lambda part: part.rank):
                with self._virtual_ranks.rank(rank):
                    for part in parts:
                        data = self._load()
                        self._virtual_ranks.seed(self.step, part.offset)
                        yield data, part.weight

    def mean(self, values: Sequence[Any]) -> float:
        """Return the mean over the global batch, bit for bit the same for any number of workers.

        It needs `ElasticSampler.average_gradients`. All workers call it, as it communicates; with
        a GPU it waits for the values.

        Args:
            values: A mean over each of this worker's micro-batches, in their order, such as the
                losses before they are multiplied by their weights: numbers, or tensors of one
                element.

        Raises:
            RuntimeError: The sampler has no virtual ranks, or there is not one value for each
                micro-batch.
        """
        if self._virtual_ranks is None:
            raise RuntimeError("mean() needs virtual ranks and sampler.average_gradients(model)")
        if not self.is_complete or len(values) != len(self._parts):
            raise RuntimeError(
                f"{len(values)} values for {len(self._parts)} micro-batches: give one of each, "
                "after the loop over micro_batches()"
            )
        weights = [part.weight for part in self._parts]
        return float(self._virtual_ranks.mean(values, weights))


@contextlib.contextmanager
def _gradient_exchange(models: tuple[Any, ...], *, now: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for model in models:
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(now)
            elif hasattr(model, "no_sync") and not now:
                stack.enter_context(model.no_sync())
        yield
