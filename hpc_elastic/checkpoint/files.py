"""Writes safetensors files: in large blocks, checksummed by a second thread meanwhile, and synced.

The format is safetensors' own (8 bytes of length, a JSON header, then the data), which any reader
knows; its `save_file` makes a copy of everything and takes longer than the disk. The header is
filled up with spaces, so that the data begins at a page. A type that safetensors lacks stands as
bytes there; the manifest names it.

Reference: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from hpc_elastic.checkpoint.equality import Described
from hpc_elastic.checkpoint.manifest import (
    MANIFEST_BYTES,
    Chunk,
    FileEntry,
    RankPart,
    TensorEntry,
    checksum_of,
    own_name,
)
from hpc_elastic.checkpoint.shard_file import BLOCK_BYTES, PAGE_BYTES, BlockFile
from hpc_elastic.checkpoint.sharding import ShardLayout, ShardPiece
from hpc_elastic.errors import CheckpointCorruptError, CheckpointError
from hpc_elastic.shared_files import owner_writes, read_text

_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip

_AMBIGUOUS = re.compile(r"__metadata__|.*\[[\d,]*\]", re.DOTALL)
"""Names of tensors that could be those of pieces, or of the format's own entry."""


@dataclass(frozen=True)
class HostSnapshot:
    """What a rank saves, held still: it does not change while it is written."""

    layout: ShardLayout
    data: Sequence[memoryview]
    """The bytes of the pieces, in their order: all in one, or one for each."""
    values: Mapping[str, Any]
    rank_values: Mapping[str, Any] = field(default_factory=dict)
    described: Described | None = None
    keep: object = None
    """Owns the memory of the data."""

    def bytes_of(self, index: int) -> memoryview:
        """Return the bytes of a piece of the layout."""
        begin = self.layout.begins[index]
        end = begin + self.layout.pieces[index].num_bytes
        return self.data[0][begin:end] if len(self.data) == 1 else self.data[index]


def write_part(
    folder: Path,
    rank: int,
    snapshot: HostSnapshot,
    *,
    sync: bool = True,
    on_block: Callable[[int], None] = lambda _: None,
    replaced: Path | None = None,
) -> RankPart:
    """Write ``shard-<rank>.safetensors`` and, once it is complete, ``part-<rank>.json``.

    The folder has no such files yet. ``sync``: both are to survive a loss of power. ``on_block`` is
    called with the bytes of each block that was written and, in another thread, with 0 after each
    that was added up; what it raises ends the writing. ``replaced`` is the folder of the checkpoint
    that this one may replace: if this rank's shard there has the same content, it gets a second
    name here. Raises OSError if the folder cannot be written, or is full.
    """
    path = folder / f"shard-{rank}.safetensors"
    part_name = f"part-{rank}.json"
    shard = replaced and _link_same(path, snapshot, replaced / part_name, on_block)
    shard = shard or _write_shard(path, snapshot, sync, on_block)
    tensors: dict[str, TensorEntry] = {}
    own = {}
    for i, piece in enumerate(snapshot.layout.pieces):
        name = own_name(piece.fqn, rank) if piece.is_own else piece.fqn
        chunk = Chunk(piece.offsets, piece.sizes, path.name, _chunk_name(piece))
        earlier = tensors[name].chunks if name in tensors else ()
        tensors[name] = TensorEntry(piece.shape, piece.dtype, (*earlier, chunk))
        if piece.is_own:
            form = f"{piece.dtype}{list(piece.shape)}"
            own[piece.fqn] = f"{form} {checksum_of(snapshot.bytes_of(i))}"
    part = RankPart(
        rank=rank,
        files=(shard,),
        tensors=tensors,
        values=snapshot.values if rank == 0 else {},
        rank_values=snapshot.rank_values,
        own=own,
        described=snapshot.described,
    )
    write_text(folder / part_name, part.to_json(), sync=sync)
    return part


def _blocks_of(snapshot: HostSnapshot) -> Iterator[memoryview]:
    for view in [memoryview(_header_of(snapshot.layout)), *snapshot.data]:
        for begin in range(0, len(view), BLOCK_BYTES):
            yield view[begin : begin + BLOCK_BYTES]


def _write_shard(
    path: Path, snapshot: HostSnapshot, sync: bool, on_block: Callable[[int], None]
) -> FileEntry:
    file = BlockFile(path, direct=sync)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="hpc-elastic-checksum") as pool:
            try:
                entry = pool.submit(_entry_of, path, snapshot, on_block).result
            except RuntimeError:  # no thread can be started, or the program ends
                entry = partial(_entry_of, path, snapshot, on_block)
            for block in _blocks_of(snapshot):
                file.write(block)
                on_block(len(block))
            file.finish(sync=sync)
            return entry()
    finally:
        file.close()


def _entry_of(path: Path, snapshot: HostSnapshot, on_block: Callable[[int], None]) -> FileEntry:
    """Return the checksum and the size that a shard has once it is written."""
    checksum, num_bytes = xxhash.xxh3_64(), 0
    for block in _blocks_of(snapshot):
        checksum.update(block)
        num_bytes += len(block)
        on_block(0)
    return FileEntry(path.name, num_bytes, f"xxh3_64:{checksum.hexdigest()}")


def _link_same(
    path: Path, snapshot: HostSnapshot, part: Path, on_block: Callable[[int], None]
) -> FileEntry | None:
    """Give the shard of another part a second name, if it has this content; else None."""
    try:
        (entry,) = RankPart.from_json(read_text(part, MANIFEST_BYTES)).files
    except (OSError, ValueError, CheckpointCorruptError):
        return None
    if entry != _entry_of(path, snapshot, on_block):
        return None
    try:
        os.link(part.with_name(entry.name), path)
    except OSError:  # a file system without hard links, for example
        return None
    return entry


def write_text(path: Path, text: str, *, sync: bool = True) -> None:
    """Create a small file, complete or not at all."""
    staged = path.with_name(f".{path.name}.new")
    with open(staged, "xb", opener=owner_writes) as f:
        f.write(text.encode())
        if sync:
            f.flush()
            os.fsync(f.fileno())
    staged.rename(path)


def _header_of(layout: ShardLayout) -> bytes:
    """Return a safetensors file up to its data."""
    header = {}
    for piece, begin in zip(layout.pieces, layout.begins, strict=True):
        form: dict[str, Any] = {"dtype": "U8", "shape": [piece.num_bytes]}
        if piece.dtype in _NAMES:
            form = {"dtype": _NAMES[piece.dtype], "shape": piece.sizes}
        header[_chunk_name(piece)] = {**form, "data_offsets": [begin, begin + piece.num_bytes]}
    if len(header) < len(layout.pieces):
        raise CheckpointError("two pieces of a checkpoint have one name: a tensor is planned twice")
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-(len(text) + 8) // PAGE_BYTES) * PAGE_BYTES - 8)
    return len(text).to_bytes(8, "little") + text


def _chunk_name(piece: ShardPiece) -> str:
    """Return a piece's name in its file: its tensor's, and its place if it is not all of it.

    No two pieces have the same. A whole tensor whose own name looks like that of a piece, or is the
    one that the format keeps for itself, gets an empty place.
    """
    if piece.sizes != piece.shape:
        return f"{piece.fqn}[{','.join(map(str, piece.offsets))}]"
    return f"{piece.fqn}[]" if _AMBIGUOUS.fullmatch(piece.fqn) else piece.fqn
