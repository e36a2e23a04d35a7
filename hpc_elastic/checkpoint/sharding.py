"""Which part of the state each rank writes, decided on every rank without a word to the others.

Every rank sees the same names and global shapes, so all come to the same decision:

- A plain tensor is taken to be the same on all ranks (DDP). The bytes of all plain tensors, laid
  end to end in the order of their names, are cut into as many equal shares as there are ranks; a
  cut falls between two rows of a tensor. So each rank writes its share, and none writes twice.
- A DTensor (FSDP2, tensor parallel, any mesh) is written where it is: torch's own planner decides
  which box of the tensor this rank holds. Ranks that hold the same box, along replicated
  dimensions of the mesh, cut it among them in the same way.
- Small tensors are written whole by the first rank that holds them: nothing is gained by
  spreading them, and what is small and not really equal stays of one rank. The statistics of
  BatchNorm differ between DDP's ranks until the next forward pass takes those of rank 0; the
  Checkpointer names all buffers of modules as such (``first``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from hpc_elastic.errors import CheckpointError

SPREAD_FROM_BYTES = 64 * 1024
"""Smaller tensors are written whole by one rank."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes in the whole tensor, in elements."""


@dataclass(frozen=True)
class ShardPiece:
    """One box of one tensor, which this rank writes.

    Attributes:
        fqn: Name of the tensor in the state.
        shape: Of the whole tensor, over all ranks.
        dtype: As torch prints it, without ``torch.``.
        offsets: Where the box begins in the whole tensor.
        sizes: Of the box.
        start: Where the box begins in the tensor that this rank has in memory.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the size of the box in memory."""
        return prod(self.sizes) * dtype_of(self.dtype).itemsize

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the box as a view of the tensor of that name; not always contiguous."""
        view = local(tensor)
        if 0 in self.sizes:
            return view.new_empty(self.sizes)
        for dim, (start, size) in enumerate(zip(self.start, self.sizes, strict=True)):
            if size != view.shape[dim]:
                view = view.narrow(dim, start, size)
        return view


class Planner:
    """Plans saves, and remembers the last plan: the structure of a state hardly ever changes."""

    def __init__(
        self, rank: int, world_size: int, replicated: Literal["spread", "first"] = "spread"
    ) -> None:
        """Prepare.

        Args:
            rank: This process's rank.
            world_size: Number of ranks.
            replicated: ``spread``: ranks that hold the same data share the writing; ``first``:
                the first of them writes all.
        """
        self._rank = rank
        self._world = tuple(range(world_size))
        self._replicated = replicated
        self._structure: Hashable = None
        self._plan: list[ShardPiece] = []

    def plan(
        self, tensors: Mapping[str, torch.Tensor], first: Collection[str] = ()
    ) -> list[ShardPiece]:
        """Return what this rank writes (every rank, at each save; cheap for a known structure).

        Args:
            tensors: All tensors of the state, by name; the same names on every rank.
            first: Names of those that the first rank writes, whatever their size.

        Returns:
            The boxes, by name; none for a rank whose share is empty.

        Raises:
            CheckpointError: a tensor cannot be stored; names it, the reason and the remedy.
        """
        structure = (
            tuple((fqn, *_structure(t)) for fqn, t in tensors.items()),
            frozenset(first),
        )
        if structure != self._structure:
            self._plan = self._make(tensors, frozenset(first))
            self._structure = structure
        return self._plan

    def _make(self, tensors: Mapping[str, torch.Tensor], first: frozenset[str]) -> list[ShardPiece]:
        held: dict[tuple[int, ...], list[_Held]] = {}
        for fqn in sorted(tensors):
            item = _held(fqn, tensors[fqn], self._world)
            if item is not None:
                held.setdefault(item.holders, []).append(item)
        pieces = [
            piece for holders, items in held.items() for piece in self._share(holders, items, first)
        ]
        return sorted(pieces, key=lambda piece: piece.fqn)

    def _share(
        self, holders: tuple[int, ...], items: Sequence[_Held], first: frozenset[str]
    ) -> Iterable[ShardPiece]:
        def is_spread(item: _Held) -> bool:
            large = item.num_bytes >= SPREAD_FROM_BYTES and item.fqn not in first
            return large and self._replicated == "spread" and len(holders) > 1

        if holders[0] == self._rank:
            yield from (item.piece() for item in items if not is_spread(item))
        spread = [item for item in items if is_spread(item)]
        sizes = [(item.rows, item.num_bytes) for item in spread]
        shares = share_rows(sizes, holders.index(self._rank), len(holders))
        for item, (begin, end) in zip(spread, shares, strict=True):
            if begin < end:
                yield item.piece(begin, end)


def share_rows(
    items: Sequence[tuple[int, int]], index: int, num_shares: int
) -> list[tuple[int, int]]:
    """Cut tensors that lie end to end into equal shares (pure).

    Args:
        items: Rows and bytes of each tensor, both at least 1.
        index: Which share is asked for, from 0.
        num_shares: How many there are.

    Returns:
        The first row of each tensor in the share, and the one after its last; equal where the
        share has none of it. Over all shares every row occurs exactly once.
    """
    total = sum(num_bytes for _, num_bytes in items)
    cuts = (total * index // num_shares, total * (index + 1) // num_shares)
    shares, start = [], 0
    for rows, num_bytes in items:
        begin, end = (
            min(max((2 * (cut - start) * rows + num_bytes) // (2 * num_bytes), 0), rows)
            for cut in cuts
        )
        shares.append((begin, end))
        start += num_bytes
    return shares


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor in memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def box_of(fqn: str, tensor: torch.Tensor) -> Box | None:
    """Return which box of a tensor this rank holds; None if it is not in the tensor's mesh.

    Raises:
        CheckpointError: the shards are partial sums, or are no boxes.
    """
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    if tensor.device_mesh.get_coordinate() is None:
        return None
    if any(p.is_partial() for p in tensor.placements):
        raise CheckpointError(
            f"{fqn} is a DTensor of partial sums {tensor.placements}: redistribute it to Shard or "
            "Replicate before it is saved"
        )
    (item,) = create_default_local_save_plan({fqn: tensor}, is_coordinator=True).items
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    sizes = tuple(chunk.sizes)
    if sizes != tuple(local(tensor).shape) or not _are_boxes(tensor):
        raise CheckpointError(
            f"{fqn}{list(tensor.shape)} is sharded as {tensor.placements} over a mesh of "
            f"{tuple(tensor.device_mesh.shape)}, so that a rank's rows do not lie together: make "
            "the sharded dimension a multiple of the number of shards"
        )
    return tuple(chunk.offsets), sizes


def dtype_of(name: str) -> torch.dtype:
    """Return torch's type of that name.

    Raises:
        CheckpointError: this torch has none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"this torch has no tensors of type {name!r}: use a later version")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type as checkpoints have it, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class _Held:
    """The box of a tensor that this rank holds, and all ranks that hold the same."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    box: Box
    holders: tuple[int, ...]
    num_bytes: int

    @property
    def _dim(self) -> int:
        """The dimension along which the box is cut: the first that has anything to cut."""
        return next((dim for dim, size in enumerate(self.box[1]) if size > 1), 0)

    @property
    def rows(self) -> int:
        """Number of rows that the box can be cut into."""
        return self.box[1][self._dim] if self.box[1] else 1

    def piece(self, begin: int = 0, end: int | None = None) -> ShardPiece:
        """Return the rows from ``begin`` to before ``end``; all of them by default."""
        offsets, sizes = (list(numbers) for numbers in self.box)
        start = [0] * len(sizes)
        if sizes and end is not None:
            start[self._dim] = begin
            offsets[self._dim] += begin
            sizes[self._dim] = end - begin
        return ShardPiece(
            self.fqn, self.shape, self.dtype, tuple(offsets), tuple(sizes), tuple(start)
        )


def _held(fqn: str, tensor: torch.Tensor, world: tuple[int, ...]) -> _Held | None:
    _refuse(fqn, tensor)
    box = box_of(fqn, tensor)
    if box is None:
        return None
    holders = world
    if isinstance(tensor, DTensor):
        holders = _holders(tensor)
        if 0 in box[1] and 0 not in tensor.shape:
            return None  # an uneven shard: this rank has nothing
        if 0 in tensor.shape:
            box = (0,) * tensor.dim(), tuple(tensor.shape)
            holders = tuple(sorted(tensor.device_mesh.mesh.flatten().tolist()))
    num_bytes = prod(box[1]) * tensor.dtype.itemsize
    return _Held(fqn, tuple(tensor.shape), dtype_name(tensor.dtype), box, holders, num_bytes)


def _holders(tensor: DTensor) -> tuple[int, ...]:
    """Return the ranks that hold the same box of a DTensor as this one, this one included."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    same = tuple(
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(tensor.placements, coordinate, strict=True)
    )
    return tuple(sorted(tensor.device_mesh.mesh[same].flatten().tolist()))


def _are_boxes(tensor: DTensor) -> bool:
    """Return whether the rows of each shard lie together in the whole tensor.

    They do not always where FSDP2 shards what tensor parallelism has sharded along the same
    dimension (a placement with a ``split_factor``), unless all shards are equally large.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    for i, placement in enumerate(placements):
        factor = getattr(placement, "split_factor", None)
        if factor is None:
            continue
        dim = _dim_of(placement)
        later = [j for j in range(i + 1, mesh.ndim) if _dim_of(placements[j]) == dim]
        shards = prod(mesh.size(j) for j in range(mesh.ndim) if _dim_of(placements[j]) == dim)
        even = dim is not None and tensor.shape[dim] % shards == 0
        if prod(mesh.size(j) for j in later) != factor or not even:
            return False
    return True


def _dim_of(placement: Placement) -> int | None:
    return getattr(placement, "dim", None)


def _structure(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.dtype, tensor.device_mesh, tensor.placements
    return tensor.shape, tensor.dtype


def _refuse(fqn: str, tensor: torch.Tensor) -> None:
    """Refuse what is no plain array of numbers in memory."""
    problems: list[tuple[Callable[[torch.Tensor], bool], str]] = [
        (_is_old_shard, "is a ShardedTensor: use fully_shard (FSDP2), whose shards are DTensors"),
        (lambda t: t.layout is not torch.strided, "is sparse: save it dense"),
        (lambda t: t.is_quantized, "is quantized: save its int_repr() and scales"),
        (lambda t: t.is_meta, "is on the meta device, so it has no values yet: materialize it"),
        (lambda t: t.is_nested, "is nested: save its values() and offsets()"),
    ]
    for is_so, what in problems:
        if is_so(tensor):
            raise CheckpointError(f"{fqn} {what}")


def _is_old_shard(tensor: object) -> bool:
    return type(tensor).__name__ == "ShardedTensor"
