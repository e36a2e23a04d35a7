"""Writes safetensors files: in large blocks, each checksummed, and synced.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from hpc_elastic.checkpoint.block_file import BLOCK_BYTES, PAGE_BYTES, BlockFile
from hpc_elastic.checkpoint.manifest import Chunk, FileEntry, Part, TensorEntry
from hpc_elastic.checkpoint.sharding import Piece, dtype_of
from hpc_elastic.errors import CheckpointError

_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip

_AMBIGUOUS = re.compile(r"__metadata__|.*\[[\d,]*\]", re.DOTALL)
"""Names of tensors that could be those of pieces, or of the format's own entry."""

Watch = Callable[[int], None]
"""Is told after each block how many bytes it had; what it raises ends the writing."""


@dataclass(frozen=True)
class Layout:
    """Where each piece stands in the file's data."""

    pieces: tuple[Piece, ...]
    """In the file's order: no piece needs to be padded to be aligned, the largest come first."""
    begins: tuple[int, ...]
    """Bytes from the beginning of the data."""
    num_bytes: int


@dataclass(frozen=True)
class Image:
    """What a rank saves, held still: nobody changes it while it is written."""

    layout: Layout
    data: Sequence[memoryview]
    """The bytes of the pieces, in their order; cut anywhere."""
    values: Mapping[str, Any]
    rank_values: Mapping[str, Any] = field(default_factory=dict)
    keep: object = None
    """Owns the memory of the data."""


def lay_out(pieces: Iterable[Piece]) -> Layout:
    """Give each piece its place."""
    ordered = sorted(pieces, key=lambda p: (-dtype_of(p.dtype).itemsize, -p.num_bytes))
    begins, end = [], 0
    for piece in ordered:
        begins.append(end)
        end += piece.num_bytes
    return Layout(tuple(ordered), tuple(begins), end)


def write_part(
    folder: Path,
    rank: int,
    image: Image,
    *,
    sync: bool = True,
    watch: Watch = lambda _: None,
) -> Part:
    """Write ``shard-<rank>.safetensors`` and, once it is complete, ``part-<rank>.json``.

    Args:
        folder: Exists; has no such files yet.
        rank: Whose part it is.
        image: What to write.
        sync: Whether both are to survive a loss of power.
        watch: See `Watch`.

    Raises:
        OSError: the folder can not be written, or is full.
    """
    shard = folder / f"shard-{rank}.safetensors"
    data = [memoryview(header_of(image.layout)), *image.data]
    entry = _write(shard, data, sync=sync, watch=watch)
    part = Part(
        rank=rank,
        files=(entry,),
        tensors=_entries(image.layout, shard.name),
        values=image.values if rank == 0 else {},
        rank_values=image.rank_values,
    )
    write_text(folder / f"part-{rank}.json", part.to_json(), sync=sync)
    return part


def write_text(path: Path, text: str, *, sync: bool = True) -> None:
    """Create a small file, complete or not at all."""
    staged = path.with_name(f".{path.name}.new")
    with staged.open("xb") as f:
        f.write(text.encode())
        if sync:
            f.flush()
            os.fsync(f.fileno())
    staged.rename(path)


def header_of(layout: Layout) -> bytes:
    """Return a safetensors file up to its data."""
    header = {
        chunk_name(piece): {
            **_form(piece),
            "data_offsets": [begin, begin + piece.num_bytes],
        }
        for piece, begin in zip(layout.pieces, layout.begins, strict=True)
    }
    if len(header) < len(layout.pieces):
        raise CheckpointError("two pieces of a checkpoint have one name: a tensor is planned twice")
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-(len(text) + 8) // PAGE_BYTES) * PAGE_BYTES - 8)
    return len(text).to_bytes(8, "little") + text


def chunk_name(piece: Piece) -> str:
    """Return a piece's name in its file: its tensor's, and its place if it is not all of it.

    No two pieces have the same. A whole tensor whose own name looks like that of a piece, or is the
    one that the format keeps for itself, gets an empty place.
    """
    if piece.sizes != piece.shape:
        return f"{piece.fqn}[{','.join(map(str, piece.offsets))}]"
    return f"{piece.fqn}[]" if _AMBIGUOUS.fullmatch(piece.fqn) else piece.fqn


def _form(piece: Piece) -> dict[str, Any]:
    if piece.dtype in _NAMES:
        return {"dtype": _NAMES[piece.dtype], "shape": piece.sizes}
    return {"dtype": "U8", "shape": [piece.num_bytes]}


def _entries(layout: Layout, file: str) -> dict[str, TensorEntry]:
    chunks: dict[str, list[Chunk]] = {}
    forms: dict[str, Piece] = {}
    for piece in layout.pieces:
        chunk = Chunk(piece.offsets, piece.sizes, file, chunk_name(piece))
        chunks.setdefault(piece.fqn, []).append(chunk)
        forms[piece.fqn] = piece
    return {
        fqn: TensorEntry(piece.shape, piece.dtype, tuple(chunks[fqn]))
        for fqn, piece in forms.items()
    }


def _write(path: Path, data: Iterable[memoryview], *, sync: bool, watch: Watch) -> FileEntry:
    checksum, num_bytes = xxhash.xxh3_64(), 0
    file = BlockFile(path, direct=sync)
    try:
        for block in _blocks(data):
            checksum.update(block)
            file.write(block)
            num_bytes += len(block)
            watch(len(block))
        file.finish(sync=sync)
    finally:
        file.close()
    return FileEntry(path.name, num_bytes, f"xxh3_64:{checksum.hexdigest()}")


def _blocks(data: Iterable[memoryview]) -> Iterator[memoryview]:
    for view in data:
        for begin in range(0, len(view), BLOCK_BYTES):
            yield view[begin : begin + BLOCK_BYTES]
