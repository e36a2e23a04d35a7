"""Which part of the state each rank writes, decided on every rank without a word to the others.

Every rank sees the same names and global shapes (`equality` compares them), so all come to the same
decision:

- A plain tensor has to be the same on all ranks (DDP), which `equality` compares too. The bytes of
  all plain tensors, laid end to end in the order of their names, are cut into as many equal shares
  as there are ranks; a cut falls between two rows of a tensor. So each rank writes its share, and
  none writes twice.
- Tensors that each rank has for itself (``own``) are written by each rank, whole.
- A DTensor (FSDP2, tensor parallel, any mesh) is written where it is: torch's own planner decides
  which box of the tensor this rank holds. Ranks that hold the same box, along replicated
  dimensions of the mesh, cut it among them in the same way.
- Small tensors are written whole by the first rank that holds them: nothing is gained by
  spreading them. The statistics of BatchNorm differ between DDP's ranks until the next forward pass
  takes those of rank 0; the Checkpointer names all buffers of modules as such (``first``), and
  their numbers are not compared.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Literal, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor

from hpc_elastic.checkpoint.shard_file import ShardLayout, ShardPiece
from hpc_elastic.errors import CheckpointError

SPREAD_FROM_BYTES = 64 * 1024  # smaller tensors are written whole by one rank


def view(piece: ShardPiece, tensor: torch.Tensor) -> torch.Tensor:
    """Return a box as a view of the tensor of its name; not always contiguous."""
    mine = local(tensor)
    if 0 in piece.sizes:
        return mine.new_empty(piece.sizes)
    for dim, (start, size) in enumerate(zip(piece.start, piece.sizes, strict=True)):
        if size != mine.shape[dim]:
            mine = mine.narrow(dim, start, size)
    return mine


class Planner:
    """Plans saves, and remembers the last plan: the structure of a state hardly ever changes.

    Attributes:
        holders: Of the last plan, by each name that is stored once though there are several ranks:
            the first rank that holds the same part as this one, or -1 if this rank has it alone, or
            if it counts as rank 0 has it. A new mapping where the structure has changed.
    """

    def __init__(
        self, rank: int, world_size: int, replicated: Literal["spread", "first"] = "spread"
    ) -> None:
        """Ranks with the same data share the writing (``spread``), or the ``first`` writes all."""
        self._rank = rank
        self._world = tuple(range(world_size))
        self._replicated = replicated
        self._structure: Hashable = None
        self._plan = ShardLayout()
        self.holders: Mapping[str, int] = {}

    def plan(
        self,
        tensors: Mapping[str, torch.Tensor],
        first: Collection[str] = (),
        own: Collection[str] = (),
    ) -> ShardLayout:
        """Return what this rank writes (every rank, at each save; cheap for a known structure).

        ``first`` are the names of tensors that the first rank writes, whatever their size; ``own``
        those that each rank has for itself. What cannot be stored raises CheckpointError.
        """
        of_tensors = (
            (fqn, t.shape, t.dtype, isinstance(t, DTensor) and (t.device_mesh, t.placements))
            for fqn, t in tensors.items()
        )
        structure = frozenset(first), frozenset(own), tuple(of_tensors)
        if structure == self._structure:
            return self._plan
        pieces: list[ShardPiece] = []
        spread: dict[tuple[int, ...], list[_Held]] = {}
        first_holders = {}
        for fqn in sorted(tensors):
            if fqn in own:
                mine = _held(fqn, local(tensors[fqn]), (self._rank,))
                assert mine is not None
                pieces.append(replace(mine.whole, is_own=True))
                continue
            item = _held(fqn, tensors[fqn], self._world)
            first_holders[fqn] = -1
            if item is None:
                continue
            if len(item.holders) > 1 and fqn not in first:
                first_holders[fqn] = item.holders[0]
            large = item.whole.num_bytes >= SPREAD_FROM_BYTES and fqn not in first
            if large and self._replicated == "spread" and len(item.holders) > 1:
                spread.setdefault(item.holders, []).append(item)
            elif item.holders[0] == self._rank:
                pieces.append(item.whole)
        for holders, items in spread.items():
            sizes = [(item.num_rows, item.whole.num_bytes) for item in items]
            shares = share_rows(sizes, holders.index(self._rank), len(holders))
            for item, (begin, end) in zip(items, shares, strict=True):
                if begin < end:
                    pieces.append(item.rows(begin, end))
        self._plan = ShardLayout.of(pieces)
        self.holders = first_holders if len(self._world) > 1 else {}
        self._structure = structure
        return self._plan


def share_rows(
    items: Sequence[tuple[int, int]], index: int, num_shares: int
) -> list[tuple[int, int]]:
    """Cut tensors that lie end to end into equal shares (pure).

    Each item is the rows and the bytes of a tensor, both at least 1. Returns the first row of each
    tensor in the share, and the one after its last. Over all shares every row occurs exactly once.
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


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def dtype_of(name: str) -> torch.dtype:
    """Return torch's type of that name; raise CheckpointError if this torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"this torch has no tensors of type {name!r}: use a later version")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type as checkpoints have it, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


class _Held(NamedTuple):
    """The box of a tensor that this rank holds, and all ranks that hold the same."""

    whole: ShardPiece
    holders: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.whole.sizes[self._dim] if self.whole.sizes else 1

    @property
    def _dim(self) -> int:
        """The dimension along which the box is cut: the first that has anything to cut."""
        return next((dim for dim, size in enumerate(self.whole.sizes) if size > 1), 0)

    def rows(self, begin: int, end: int) -> ShardPiece:
        whole, dim = self.whole, self._dim
        offsets, sizes, start = map(list, (whole.offsets, whole.sizes, whole.start))
        if sizes:
            start[dim] = begin
            offsets[dim] += begin
            sizes[dim] = end - begin
        return replace(whole, offsets=tuple(offsets), sizes=tuple(sizes), start=tuple(start))


def _held(fqn: str, tensor: torch.Tensor, world: tuple[int, ...]) -> _Held | None:
    """Return which box of a tensor this rank holds; None if it has nothing of it."""
    problem = None
    if type(tensor).__name__ == "ShardedTensor":
        problem = "is a ShardedTensor: use fully_shard (FSDP2), whose shards are DTensors"
    elif tensor.layout is not torch.strided:
        problem = "is sparse: save it dense"
    elif tensor.is_quantized:
        problem = "is quantized: save its int_repr() and scales"
    elif tensor.is_meta:
        problem = "is on the meta device, so it has no values yet: materialize it"
    elif tensor.is_nested:
        problem = "is nested: save its values() and offsets()"
    if problem is not None:
        raise CheckpointError(f"{fqn} {problem}")
    shape = tuple(tensor.shape)
    whole = ShardPiece(
        fqn, shape, dtype_name(tensor.dtype), (0,) * len(shape), shape, (0,) * len(shape)
    )
    if not isinstance(tensor, DTensor):
        return _Held(whole, world)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    ranks = mesh.mesh
    offsets, sizes = _box_of(fqn, tensor)
    if 0 not in shape:
        if 0 in sizes:
            return None  # an uneven shard
        at = zip(tensor.placements, coordinate, strict=True)
        ranks = ranks[tuple(slice(None) if p.is_replicate() else i for p, i in at)]
        whole = replace(whole, offsets=offsets, sizes=sizes)
    return _Held(whole, tuple(sorted(ranks.flatten().tolist())))


def _box_of(fqn: str, tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of this rank's part; refuse partial sums, and what is no box."""
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


def _are_boxes(tensor: DTensor) -> bool:
    """Return whether the rows of each shard lie together in the whole tensor.

    They do not always where FSDP2 shards what tensor parallelism has sharded along the same
    dimension (a placement with a ``split_factor``), unless all shards are equally large.
    """
    mesh = tensor.device_mesh
    dims = [getattr(placement, "dim", None) for placement in tensor.placements]
    for i, (placement, dim) in enumerate(zip(tensor.placements, dims, strict=True)):
        factor = getattr(placement, "split_factor", None)
        if factor is None:
            continue
        later = prod(mesh.size(j) for j in range(i + 1, mesh.ndim) if dims[j] == dim)
        shards = prod(mesh.size(j) for j in range(mesh.ndim) if dims[j] == dim)
        if later != factor or dim is None or tensor.shape[dim] % shards != 0:
            return False
    return True
