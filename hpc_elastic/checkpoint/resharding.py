"""Read a checkpoint back into the present state, under any world size and mesh.

torch.distributed.checkpoint plans the place of each part of each stored box. It gets its
metadata from our manifest, never from a pickle. The bytes that are needed are read, straight into
the tensor where that is contiguous in memory. The checksum of a file is compared on the way:
threads read ahead, and the blocks are added up in their order.

`state.Filling` calls, for each object of the state: `targets` (which tensors to fill: the present
ones, or new ones for a fresh optimizer), then `read`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from hpc_elastic import tree_codec
from hpc_elastic.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry, checksum_text
from hpc_elastic.checkpoint.shard_file import ShardFile
from hpc_elastic.checkpoint.sharding import bytes_of, dtype_name, dtype_of, local
from hpc_elastic.errors import CheckpointCorruptError, CheckpointError
from hpc_elastic.worker import optimizer_steps

BLOCK_BYTES = 16 << 20  # large pieces are read in blocks of this size, several at a time
_GAP_BYTES = 1 << 20  # what no tensor gets is read in blocks of this size
_MOST_THREADS = 4


def read(
    manifest: Manifest,
    folder: Path,
    into: Mapping[str, torch.Tensor],
    verified: Sequence[FileEntry] = (),
) -> None:
    """Fill tensors, by the manifest's names, from a checkpoint, in place (no communication).

    They may be DTensors of any mesh. ``verified`` are files to read whole, and to compare with
    their checksums on the way. Raises CheckpointError if a tensor does not fit;
    CheckpointCorruptError, with tensors filled in part or with what is damaged, if a file does not.
    """
    reader = _Reader(manifest, folder, verified)
    planner, plan = _plan(reader, manifest, into)
    with torch.no_grad():
        reader.read(plan, planner)


def files_needed(manifest: Manifest, into: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the files that `read` would read on this rank; raise as it does."""
    reader = _Reader(manifest, Path())
    _, plan = _plan(reader, manifest, into)
    return {reader.chunk(item).file for item in plan.items if 0 not in item.lengths}


def targets(
    manifest: Manifest,
    wanted: Iterable[str],
    present: Mapping[str, torch.Tensor],
    like: Mapping[str, torch.Tensor],
    own: Container[str] = (),
) -> dict[str, torch.Tensor]:
    """Return a tensor to fill for each name that is wanted, or CheckpointError.

    ``present`` ones are used. ``like`` has the parameter that a new tensor belongs to: one of the
    parameter's shape gets its device, and its shards if it is a DTensor; others are made on the
    CPU. ``own`` are the names of tensors that this rank has for itself: of a DTensor, its part.
    """
    found = {}
    for fqn in wanted:
        if fqn in present:
            found[fqn] = present[fqn]
        elif fqn in manifest.tensors:
            found[fqn] = _new(manifest.tensors[fqn], like.get(fqn), is_own=fqn in own)
        else:
            raise CheckpointError(f"{fqn} is not in the checkpoint of step {manifest.step}")
    return found


def like_parameters(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], prefix: str
) -> dict[str, torch.Tensor]:
    """Return the parameter that each tensor of a saved optimizer state belongs to.

    Only the keys of the state matter; the names of its tensors begin with the prefix.
    """
    parameters = parameters_of(optimizer, saved, prefix)
    return {
        f"{prefix}/state/{tree_codec.escape(number)}/{path}": parameters[number]
        for number, state in (saved["state"].items() if parameters else ())
        if number in parameters
        for path in _paths(state)
        if path != "step"  # torch moves it to where this optimizer wants it
    }


def parameters_of(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], prefix: str = ""
) -> dict[Any, torch.Tensor]:
    """Return the parameters of an optimizer by their keys in its saved state.

    torch numbers them over all groups, in their order. There are none if the state dict is not of
    torch's form: such an optimizer loads it itself. Other groups raise CheckpointError.
    """
    groups = saved.get("param_groups")
    if not isinstance(groups, list) or not isinstance(saved.get("state"), dict):
        return {}
    if not all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups):
        return {}
    then, now = ([len(g["params"]) for g in part] for part in (groups, optimizer.param_groups))
    if then != now:
        raise CheckpointError(
            f"{prefix}: the saved optimizer has {then} parameters in its groups, the present one "
            f"{now}: make it for the same parameters in the same groups"
        )
    keys = (number for group in groups for number in group["params"])
    return dict(zip(keys, optimizer_steps.parameters_of(optimizer), strict=True))


def _paths(state: Any) -> Iterator[str]:
    below: Iterable[tuple[Any, Any]] = enumerate(state) if isinstance(state, list | tuple) else ()
    for key, value in state.items() if isinstance(state, dict) else below:
        name = tree_codec.escape(key)
        if isinstance(value, dict | list | tuple):
            yield from (f"{name}/{rest}" for rest in _paths(value))
        else:
            yield name


class _Reader:
    """Reads what torch.distributed.checkpoint has planned; names are those of the manifest."""

    def __init__(
        self, manifest: Manifest, folder: Path, verified: Sequence[FileEntry] = ()
    ) -> None:
        self._manifest = manifest
        self._folder = folder
        self._verified = verified
        self._chunks = {
            (fqn, chunk.offsets): chunk
            for fqn, entry in manifest.tensors.items()
            for chunk in entry.chunks
        }

    def metadata(self) -> Metadata:
        """Return the manifest as torch.distributed.checkpoint has it."""
        found: dict[str, Any] = {}
        for fqn, entry in self._manifest.tensors.items():
            boxes = [(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
            found[fqn] = TensorStorageMetadata(
                TensorProperties(dtype=dtype_of(entry.dtype)),
                torch.Size(entry.shape),
                [ChunkStorageMetadata(offsets, sizes) for offsets, sizes in boxes],
            )
        return Metadata(found)

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Fill what was planned."""
        with ExitStack() as stack:
            names = {self.chunk(item).file for item in plan.items}
            names |= {entry.name for entry in self._verified}
            files = {n: stack.enter_context(closing(ShardFile(self._folder / n))) for n in names}
            sums = {entry.name: _Checksum(files[entry.name], entry) for entry in self._verified}
            pieces = [p for item in plan.items for p in self._pieces(item, files, planner)]
            pieces.sort(key=lambda piece: (piece.file.path, piece.offset))
            for piece, data in _read_ahead(pieces):
                if piece.file.path.name in sums:
                    sums[piece.file.path.name].add(data, piece.offset)
            for checksum in sums.values():
                checksum.compare()

    def chunk(self, item: ReadItem) -> Chunk:
        """Return the stored box that a planned item is read from."""
        index = item.storage_index
        return self._chunks[index.fqn, tuple(index.offset or ())]

    def _pieces(
        self, item: ReadItem, files: Mapping[str, ShardFile], planner: LoadPlanner
    ) -> Iterable[_Piece]:
        """Return what is to be read for one planned item, cut into blocks."""
        if item.type is not LoadItemType.TENSOR or 0 in item.lengths:
            return []
        chunk, fqn = self.chunk(item), item.storage_index.fqn
        dtype = dtype_of(self._manifest.tensors[fqn].dtype)
        starts = tuple(item.storage_offsets)
        rows = rows_of(chunk.sizes, starts, tuple(item.lengths), dtype.itemsize)
        file = files[chunk.file]
        begin, end = file.tensors.get(chunk.name, (0, -1))
        if end - begin != prod(chunk.sizes) * dtype.itemsize:
            found = f"{end - begin} bytes of it" if chunk.name in file.tensors else "none"
            raise CheckpointCorruptError(
                f"{file.path} should hold {chunk.name}{list(chunk.sizes)}, but has {found}"
            )
        target = planner.resolve_tensor(item).detach()[(0,) * rows.dim]
        inner = slice(rows.dim + 1, None)
        whole = _Piece(
            file, begin + rows.offset, rows, chunk.sizes[inner], starts[inner],
            target if target.dim() else target.unsqueeze(0), dtype,
        )  # fmt: skip
        return whole.blocks()


@dataclass(frozen=True)
class Rows:
    """The bytes of a stored box that hold a part of it: rows of the same length, end to end.

    They are counted along ``dim``: the part is one element long along those before it. ``offset``
    is that of the first row in the box, in bytes; ``exact``: they hold nothing but the part.
    """

    dim: int
    offset: int
    num_bytes: int
    count: int
    exact: bool


def rows_of(
    sizes: Sequence[int], starts: Sequence[int], lengths: Sequence[int], itemsize: int
) -> Rows:
    """Find a part of a stored box in row-major order; no length of the part is 0 (pure)."""
    dim = next((d for d, length in enumerate(lengths) if length > 1), max(len(lengths) - 1, 0))
    strides = [prod(sizes[d + 1 :]) * itemsize for d in range(len(sizes))]
    before = zip(starts[: dim + 1], strides, strict=False)
    return Rows(
        dim=dim,
        offset=sum(start * stride for start, stride in before),
        num_bytes=strides[dim] if strides else itemsize,
        count=lengths[dim] if lengths else 1,
        exact=tuple(lengths[dim + 1 :]) == tuple(sizes[dim + 1 :]),
    )


@dataclass(frozen=True)
class _Piece:
    """Some rows of a stored box, and the memory that they belong in."""

    file: ShardFile
    offset: int
    rows: Rows
    inner: tuple[int, ...]  # sizes of a stored row
    starts: tuple[int, ...]  # where in a row the wanted part begins
    target: torch.Tensor
    dtype: torch.dtype

    def blocks(self) -> Iterable[_Piece]:
        at_once = max(1, BLOCK_BYTES // self.rows.num_bytes)
        for first in range(0, self.rows.count, at_once):
            target = self.target[first : first + at_once]
            yield replace(self, offset=self.offset + first * self.rows.num_bytes, target=target)

    @torch.no_grad()  # a setting of each thread
    def read(self) -> memoryview:
        """Fill the memory; return the bytes as they are in the file."""
        target = self.target
        in_order = target.is_contiguous() and not (target.is_conj() or target.is_neg())
        if self.rows.exact and target.device.type == "cpu" and in_order:
            data = bytes_of(target)
            self.file.read_into(data, self.offset)
            return data
        pinned, size = target.device.type == "cuda", (target.shape[0], *self.inner)
        scratch = torch.empty(size, dtype=self.dtype, pin_memory=pinned, device="cpu")
        data = bytes_of(scratch)
        self.file.read_into(data, self.offset)
        for dim, start in enumerate(self.starts, start=1):
            scratch = scratch.narrow(dim, start, target.shape[dim])
        target.copy_(scratch)
        return data


def _read_ahead(pieces: Iterable[_Piece]) -> Iterator[tuple[_Piece, memoryview]]:
    """Read pieces, several at a time; yield each with its bytes, in their order."""
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, thread_name_prefix="hpc-elastic-read") as pool:
        begun = deque[tuple[_Piece, Any]]()
        for piece in pieces:
            begun.append((piece, pool.submit(piece.read)))
            if len(begun) > 2 * threads:
                first, done = begun.popleft()
                yield first, done.result()
        for first, done in begun:
            yield first, done.result()


class _Checksum:
    """The checksum of a file whose pieces are read in order; it reads what lies between them."""

    def __init__(self, file: ShardFile, entry: FileEntry) -> None:
        self._file, self._entry = file, entry
        self._sum, self._end = xxhash.xxh3_64(), 0

    def add(self, data: memoryview, offset: int) -> None:
        """Add a piece; one that begins before the end of another is passed over."""
        if offset >= self._end:
            self._read_until(offset)
            self._sum.update(data)
            self._end = offset + len(data)

    def compare(self) -> None:
        self._read_until(self._entry.num_bytes)
        if checksum_text(self._sum.hexdigest()) != self._entry.checksum:
            raise CheckpointCorruptError(
                f"{self._file.path} was changed: its checksum does not match"
            )

    def _read_until(self, end: int) -> None:
        scratch = memoryview(bytearray(max(0, min(_GAP_BYTES, end - self._end))))
        while self._end < end:
            part = scratch[: end - self._end]
            self._file.read_into(part, self._end)
            self._sum.update(part)
            self._end += len(part)


def _plan(
    reader: _Reader, manifest: Manifest, into: Mapping[str, torch.Tensor]
) -> tuple[LoadPlanner, LoadPlan]:
    for fqn, tensor in into.items():
        entry, mine, now = manifest.tensors.get(fqn), local(tensor), dtype_name(tensor.dtype)
        if entry is None:
            raise CheckpointError(f"{fqn} is not in the checkpoint")
        if tuple(tensor.shape) != entry.shape:
            raise CheckpointError(
                f"{fqn} has shape {list(entry.shape)} in the checkpoint, but {list(tensor.shape)} "
                "now: build the model with the settings that it was saved with"
            )
        sides = zip(mine.shape, mine.stride(), strict=True)
        if any(stride == 0 < size - 1 for size, stride in sides):
            raise CheckpointError(
                f"{fqn} is an expanded view, several of its elements are one in memory: put "
                "tensor.clone() into the state"
            )
        if now != entry.dtype:
            raise CheckpointError(
                f"{fqn} is {entry.dtype} in the checkpoint, but {now} now: convert the model to "
                f"{entry.dtype} before it is restored"
            )
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(into), reader.metadata(), is_coordinator=False)
    return planner, planner.create_local_plan()


def _new(entry: TensorEntry, parameter: torch.Tensor | None, *, is_own: bool) -> torch.Tensor:
    dtype = dtype_of(entry.dtype)
    if parameter is None:
        return torch.empty(entry.shape, dtype=dtype, device="cpu")
    mine = local(parameter)
    if tuple(mine.shape if is_own else parameter.shape) != entry.shape:
        return torch.empty(entry.shape, dtype=dtype, device="cpu")
    if not isinstance(parameter, DTensor):
        return torch.empty(entry.shape, dtype=dtype, device=parameter.device)
    return DTensor.from_local(
        torch.empty_like(mine, dtype=dtype), parameter.device_mesh,
        parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
