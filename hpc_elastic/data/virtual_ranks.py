"""Gradients that are bit for bit the same for any number of workers.

A fixed number V of virtual ranks stands in for the workers, the idea of EasyScale (M. Li et al.,
"EasyScale: Elastic Training with Consistent Accuracy and Improved Utilization on GPUs", SC 2023).
A global batch is divided among the virtual ranks. Worker r of W computes those from V r // W up to
V (r + 1) // W, one after the other. What a virtual rank computes depends on its number and on the
global batch alone: its samples, its kernels' shapes, its random numbers, and the buffers with which
it begins.

The order of the additions. A sum of floating-point numbers depends on it, so the gradients of the
virtual ranks are added up in one binary tree, which halves the range of virtual ranks again and
again. A worker adds up as it goes, and holds the sums of the largest subtrees in its own range: one
if W is a power of two that divides V, and at most 2 log2 V. Then each worker gets its part of all
those sums, a W-th of the elements, completes the tree for it, and sends the result to the others.
Where each worker holds one sum, this moves as many bytes as an all-reduce. One worker alone follows
the same tree, and sends nothing.

Buffers, such as the statistics of batch normalisation. Each virtual rank begins the step with those
of the step before. Those of virtual rank 0 are kept, as DistributedDataParallel keeps rank 0's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase

from hpc_elastic.data.batch import BatchDivision
from hpc_elastic.data.epoch_plan import EpochPlan
from hpc_elastic.data.random_state import restored_generators, seed_generators
from hpc_elastic.errors import ConfigError


@cache
def additions(first: int, last: int) -> frozenset[tuple[int, int, int]]:
    """Return the tree's additions: (first, middle, last) adds [middle, last) to [first, middle)."""
    if last - first < 2:
        return frozenset()
    middle = (first + last) // 2
    return additions(first, middle) | additions(middle, last) | {(first, middle, last)}


class PartialSum(NamedTuple):
    """The sum of the virtual ranks ``first`` to ``last``; without tensors, its place only."""

    first: int
    last: int
    tensors: list[torch.Tensor] | None = None


def push(sums: list[PartialSum], new: PartialSum, num_ranks: int) -> None:
    """Append to a stack of adjoining sums, and add up in place what has become possible."""
    while sums and (sums[-1].first, new.first, new.last) in additions(0, num_ranks):
        left = sums.pop()
        if left.tensors is not None and new.tensors is not None:
            torch._foreach_add_(left.tensors, new.tensors)
        new = PartialSum(left.first, new.last, left.tensors)
    sums.append(new)


def held_sums(ranks: range, num_ranks: int) -> list[PartialSum]:
    """Return the sums that a worker with these virtual ranks holds, without their tensors."""
    sums: list[PartialSum] = []
    for rank in ranks:
        push(sums, PartialSum(rank, rank + 1), num_ranks)
    return sums


class _Flat:
    """A gradient of each parameter, in one flat tensor for each type of parameter.

    The number of workers divides the lengths. ``marks`` is a view for the marks of a step.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], num_marks: int, size: int) -> None:
        lengths: dict[tuple[torch.dtype, torch.device], int] = {}
        places = []
        for p in parameters:
            kind = p.dtype, p.device
            places.append((kind, lengths.setdefault(kind, 0)))
            lengths[kind] += p.numel()
        of_marks, before_marks = next(iter(lengths.items()))
        lengths[of_marks] += num_marks
        flat = {
            (dtype, device): torch.zeros(-(-length // size) * size, dtype=dtype, device=device)
            for (dtype, device), length in lengths.items()
        }
        self.tensors = list(flat.values())
        self.views = [
            flat[kind][begin : begin + p.numel()].view(p.shape)
            for p, (kind, begin) in zip(parameters, places, strict=True)
        ]
        self.marks = flat[of_marks][before_marks : before_marks + num_marks]
        self._parts = [tensor.chunk(size) for tensor in self.tensors]

    def part(self, worker: int) -> list[torch.Tensor]:
        return [parts[worker] for parts in self._parts]


class _Exchange:
    """The sums of all workers become the average on each of them; the buffers are reused."""

    def __init__(
        self,
        division: BatchDivision,
        process_group: Any,
        parameters: Sequence[torch.Tensor],
        num_marks: int,
    ) -> None:
        self._worker, self._size = division.group()
        self._num_ranks = division.virtual_ranks or 1
        self._group: Any = process_group or dist.group.WORLD
        self._held = [
            held_sums(division.ranks_of(worker), self._num_ranks) for worker in range(self._size)
        ]
        if self._size > 1:
            num_own = len(self._held[self._worker])
            self._sent = [_Flat(parameters, num_marks, self._size) for _ in range(num_own)]
            part = self._sent[0].part(0)
            self._received = [
                [[torch.empty_like(tensor) for tensor in part] for _ in held]
                for worker, held in enumerate(self._held)
                if worker != self._worker
            ]
            self._received.insert(self._worker, [flat.part(self._worker) for flat in self._sent])

    def average(self, sums: Sequence[PartialSum], marks: Sequence[bool]) -> list[bool]:
        """Complete the tree in the first sum; return which marks any worker has set."""
        tensors = sums[0].tensors
        assert tensors is not None
        if self._size == 1:
            torch._foreach_mul_(tensors, 1 / self._num_ranks)
            return list(marks)
        for each, flat in zip(sums, self._sent, strict=True):
            torch._foreach_copy_(flat.views, each.tensors or [])
            flat.marks.zero_()
        result = self._sent[0]
        result.marks.copy_(torch.tensor(marks, dtype=result.marks.dtype))
        self._send(
            lambda peer: [flat.part(peer) for flat in self._sent], self._received.__getitem__
        )
        total: list[PartialSum] = []
        for held, received in zip(self._held, self._received, strict=True):
            for each, parts in zip(held, received, strict=True):
                push(total, each._replace(tensors=parts), self._num_ranks)
        (root,) = total
        assert root.tensors is not None
        torch._foreach_mul_(root.tensors, 1 / self._num_ranks)
        own = result.part(self._worker)
        if root.tensors[0] is not own[0]:
            torch._foreach_copy_(own, root.tensors)
        self._send(lambda peer: [own], lambda peer: [result.part(peer)])
        torch._foreach_copy_(tensors, result.views)
        # Reading the marks waits for a GPU, and where all of its own are set they are known.
        return list(marks) if all(marks) else [mark > 0 for mark in result.marks.tolist()]

    def _send(
        self,
        sent: Callable[[int], list[list[torch.Tensor]]],
        received: Callable[[int], list[list[torch.Tensor]]],
    ) -> None:
        operations = []
        for peer in range(self._size):
            if peer == self._worker:
                continue
            address = dist.get_global_rank(self._group, peer)
            for operation, parts in ((dist.isend, sent(peer)), (dist.irecv, received(peer))):
                flat = [tensor for part in parts for tensor in part]
                operations += [
                    dist.P2POp(operation, tensor, address, self._group, tag)
                    for tag, tensor in enumerate(flat)
                ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def broadcast(tensors: Sequence[torch.Tensor], process_group: Any) -> None:
    """Overwrite tensors with those of worker 0, in one message for each type."""
    group = process_group or (dist.group.WORLD if dist.is_initialized() else None)
    if group is None or dist.get_world_size(group) == 1:
        return
    for kind in dict.fromkeys((t.dtype, t.device) for t in tensors):
        of_kind = [t for t in tensors if (t.dtype, t.device) == kind]
        flat = torch.cat([t.reshape(-1) for t in of_kind])
        dist.broadcast(flat, dist.get_global_rank(group, 0), group=group)
        values = torch.split(flat, [t.numel() for t in of_kind])
        for tensor, value in zip(of_kind, values, strict=True):
            tensor.copy_(value.view_as(tensor))


class _Common(NamedTuple):
    """A buffer at the beginning of a step, and a copy of it."""

    buffer: torch.Tensor
    version: int
    copy: torch.Tensor


class _Buffers:
    """The buffers of a model. Those that do not change cost a comparison of two numbers.

    torch counts the changes of a tensor, but not those by batch normalisation. So the buffers of
    its modules, and those that the first step has changed, always count as ``changed``.
    """

    def __init__(self, model: nn.Module) -> None:
        found = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._places = [(module._buffers, name) for module, name in found]
        self._always = [isinstance(module, _NormBase) for module, _ in found]
        self._is_first_step = True
        self._common: list[_Common | None] = [None] * len(found)
        self._kept: dict[int, torch.Tensor] = {}
        self.changed = [False] * len(found)

    def begin_step(self) -> None:
        for i, (buffer, common) in enumerate(zip(self._now(), self._common, strict=True)):
            if common is None or self._has_changed(i, buffer, common):
                self._common[i] = _Common(buffer, buffer._version, buffer.clone())
        self._kept = {}
        self.changed = [False] * len(self._places)

    def end_rank(self, rank: int) -> None:
        """Undo what a virtual rank has changed; keep what virtual rank 0 has."""
        for i, (buffer, common) in enumerate(zip(self._now(), self._common, strict=True)):
            assert common is not None
            if self._is_first_step and not torch.equal(buffer, common.copy):
                self._always[i] = True
            if self._has_changed(i, buffer, common):
                self.changed[i] = True
                if rank == 0:
                    self._kept[i] = buffer.clone()
                buffer.copy_(common.copy)
                self._common[i] = _Common(buffer, buffer._version, common.copy)

    def _has_changed(self, i: int, buffer: torch.Tensor, common: _Common) -> bool:
        is_same = buffer is common.buffer and buffer._version == common.version
        return self._always[i] or not is_same

    def end_step(self, changed: Sequence[bool], process_group: Any) -> None:
        """Take over the buffers that any worker has ``changed``, as virtual rank 0 has them."""
        self._is_first_step = False
        now = self._now()
        for i, kept in self._kept.items():
            now[i].copy_(kept)
        taken = [b for b, is_changed in zip(now, changed, strict=True) if is_changed]
        broadcast(taken, process_group)

    def _now(self) -> list[torch.Tensor]:
        return [buffers[name] for buffers, name in self._places]  # type: ignore[misc]


class VirtualRanks:
    """The virtual ranks of a training of a bare module (`ElasticSampler.average_gradients`)."""

    def __init__(self, model: nn.Module, plan: EpochPlan, process_group: Any) -> None:
        _require_bare(model)
        self._model, self._plan, self._group = model, plan, process_group
        self._division = plan.batch
        self._parameters: list[nn.Parameter] = []
        self._layout: list[tuple[int, torch.dtype, torch.device]] = []
        self._sums: list[PartialSum] = []
        self._has_gradient: list[bool] = []

    @contextlib.contextmanager
    def global_batch(self) -> Iterator[None]:
        """Compute a global batch: at the end gradients are averaged, generators restored."""
        self._prepare()
        before = [p.grad for p in self._parameters]
        for p in self._parameters:
            p.grad = None
        self._sums, self._has_gradient = [], [False] * len(self._parameters)
        with torch.no_grad():
            self._buffers.begin_step()
        with restored_generators():
            yield
        with torch.no_grad():
            changed = [*self._has_gradient, *self._buffers.changed]
            marks = self._exchange.average(self._sums, changed)
            average = self._sums[0].tensors or []
            self._sums = []
            for p, old, new, is_set in zip(self._parameters, before, average, marks, strict=False):
                p.grad = new if is_set else None
                if old is not None:  # the optimizer's gradients were not set to None
                    p.grad = old.add_(new)
            self._buffers.end_step(marks[len(self._parameters) :], self._group)

    @contextlib.contextmanager
    def rank(self, rank: int) -> Iterator[None]:
        """Compute a virtual rank: its gradients, none sparse, are added up at the end."""
        yield
        gradients = []
        for i, p in enumerate(self._parameters):
            if p.grad is not None and p.grad.is_sparse:
                raise ConfigError("sparse", True, "virtual ranks add dense gradients: leave it out")
            self._has_gradient[i] |= p.grad is not None
            gradients.append(torch.zeros_like(p) if p.grad is None else p.grad)
            p.grad = None
        with torch.no_grad():
            push(self._sums, PartialSum(rank, rank + 1, gradients), self._num_ranks)
            self._buffers.end_rank(rank)

    def seed(self, step: int, offset: int) -> None:
        """Seed the generators for the model's part of a micro-batch (`EpochPlan.random_seed`)."""
        seed_generators(self._plan.random_seed(step, offset, "model"))

    def mean(self, values: Sequence[Any], weights: Sequence[float]) -> float:
        """Return the weighted mean of values over all micro-batches, an exact sum (all workers)."""
        worker, size = self._division.group()
        flat = [torch.as_tensor(value).detach().double().reshape(1) for value in values]
        numbers = torch.cat(flat)
        products = [x * w for x, w in zip(numbers.tolist(), weights, strict=True) if w]
        if size > 1:
            per_rank = len(weights) // len(self._division.ranks_of(worker))
            most = per_rank * -(-self._num_ranks // size)
            products += [0.0] * (most - len(products))
            own = torch.tensor(products, dtype=torch.double, device=self._parameters[0].device)
            found = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(found, own, group=self._group)
            products = torch.cat(found).tolist()
        return math.fsum(products) / self._num_ranks

    @property
    def _num_ranks(self) -> int:
        return self._division.virtual_ranks or 1

    def _prepare(self) -> None:
        """Begin with the parameters that are trained now, and at first take over worker 0's."""
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        layout = [(id(p), p.dtype, p.device) for p in parameters]
        if layout == self._layout:
            return
        if not parameters:
            raise ConfigError("model", type(self._model).__name__, "no parameter requires_grad")
        _, size = self._division.group()
        in_group = dist.get_world_size(self._group) if dist.is_initialized() else 1
        if in_group != size:
            remedy = (
                f"the sampler has {size}: initialize torch.distributed before the loop, and give "
                "average_gradients the process group of the sampler's ranks"
            )
            raise ConfigError("process_group", f"{in_group} ranks", remedy)
        with torch.no_grad():
            broadcast([*self._model.parameters(), *self._model.buffers()], self._group)
        self._parameters, self._layout = parameters, layout
        self._buffers = _Buffers(self._model)
        num_marks = len(parameters) + len(self._buffers.changed)
        self._exchange = _Exchange(self._division, self._group, parameters, num_marks)


def _require_bare(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, SyncBatchNorm):
            remedy = "its statistics depend on the number of workers: use BatchNorm"
            raise ConfigError("model", "SyncBatchNorm", remedy)
        if hasattr(module, "no_sync") or hasattr(module, "set_requires_gradient_sync"):
            remedy = (
                "it exchanges gradients in an order that depends on the number of workers: give "
                "the bare module, whole on each worker"
            )
            raise ConfigError("model", type(module).__name__, remedy)
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):
            remedy = f"{name} is sharded: give a module that is whole on each worker"
            raise ConfigError("model", type(parameter).__name__, remedy)
