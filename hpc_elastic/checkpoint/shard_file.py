"""The files of a rank: what is in them, how they are written and read (no torch).

The format is safetensors' own (8 bytes of length, a JSON header, then the data), which any reader
knows; its `save_file` makes a copy of everything and takes longer than the disk. The header is
filled up with spaces, so that the data begins at a page. A type that safetensors lacks stands as
bytes there; the manifest names it.

Through the page cache, a checkpoint costs seconds of CPU time per GiB, which the steps meanwhile
pay for, and turns out what the training reads. Direct writes (`O_DIRECT` of open(2)) cost next to
none, but want whole pages at page boundaries, in the file and in memory. What lies otherwise goes
through a buffer here, and so do small pieces. A second thread adds up the checksum meanwhile.

Files are read with pread(2), not mapped: a file that is cut short while it is read is an error
then, not a SIGBUS, and network file systems are asked for large pieces.

Reference: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import json
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import xxhash

from hpc_elastic.checkpoint.manifest import (
    MANIFEST_BYTES,
    Chunk,
    Described,
    FileEntry,
    RankPart,
    TensorEntry,
    bytes_of_type,
    checksum_of,
    checksum_text,
    own_name,
)
from hpc_elastic.errors import CheckpointCorruptError, CheckpointError
from hpc_elastic.shared_files import open_file, owner_writes, parse_json, read_text

BLOCK_BYTES = 16 << 20  # written at once
PAGE_BYTES = 4096  # no device asks for more
_SMALL_BYTES = 1 << 20  # smaller pieces of memory are gathered before they are written
_MAX_HEADER_BYTES = 100 << 20  # as in the safetensors library
_MOST_AT_ONCE = 1 << 30  # Linux reads a little less than 2 GiB in one call


_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip

_AMBIGUOUS = re.compile(r"__metadata__|.*\[[\d,]*\]", re.DOTALL)
"""Names of tensors that could be those of pieces, or of the format's own entry."""


@dataclass(frozen=True)
class ShardPiece:
    """One box of one tensor, which this rank writes."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    offsets: tuple[int, ...]  # where the box begins in the whole tensor
    sizes: tuple[int, ...]
    start: tuple[int, ...]  # where the box begins in the tensor that this rank has in memory
    is_own: bool = False  # whether each rank stores its own tensor of that name

    @property
    def num_bytes(self) -> int:
        """Size of the box in memory."""
        return prod(self.sizes) * bytes_of_type(self.dtype)

    @property
    def stored_name(self) -> str:
        """Its name in its file: its tensor's, and its place if it is not all of it.

        No two pieces have the same: a whole tensor that is named like a piece, or like the format's
        own entry, gets an empty place.
        """
        if self.sizes != self.shape:
            return f"{self.fqn}[{','.join(map(str, self.offsets))}]"
        return f"{self.fqn}[]" if _AMBIGUOUS.fullmatch(self.fqn) else self.fqn


@dataclass(frozen=True)
class ShardLayout:
    """What this rank writes, and where each piece begins in the file's data, in bytes.

    No piece needs to be padded to be aligned: the largest types come first.
    """

    pieces: tuple[ShardPiece, ...] = ()
    begins: tuple[int, ...] = ()
    num_bytes: int = 0

    @classmethod
    def of(cls, pieces: Iterable[ShardPiece]) -> ShardLayout:
        """Give each piece its place; those of one type and size are in the order of their names."""
        ordered = sorted(pieces, key=lambda p: (-bytes_of_type(p.dtype), -p.num_bytes, p.fqn))
        *begins, end = itertools.accumulate((piece.num_bytes for piece in ordered), initial=0)
        return cls(tuple(ordered), tuple(begins), end)

    def header(self) -> bytes:
        """Return a safetensors file up to its data."""
        header = {}
        for piece, begin in zip(self.pieces, self.begins, strict=True):
            form: dict[str, Any] = {"dtype": "U8", "shape": [piece.num_bytes]}
            if piece.dtype in _NAMES:
                form = {"dtype": _NAMES[piece.dtype], "shape": piece.sizes}
            header[piece.stored_name] = {**form, "data_offsets": [begin, begin + piece.num_bytes]}
        if len(header) < len(self.pieces):
            raise CheckpointError(
                "two pieces of a checkpoint have one name: a tensor is planned twice"
            )
        text = json.dumps(header, separators=(",", ":")).encode()
        text = text.ljust(-(-(len(text) + 8) // PAGE_BYTES) * PAGE_BYTES - 8)
        return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class HostSnapshot:
    """What a rank saves, held still: it does not change while it is written."""

    layout: ShardLayout
    data: Sequence[memoryview]  # bytes of the pieces, in order: all in one, or one for each
    values: Mapping[str, Any]
    rank_values: Mapping[str, Any] = field(default_factory=dict)
    described: Described | None = None
    keep: object = None  # owns the memory of the data

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
    """Write ``shard-<rank>.safetensors`` and, once that is complete, ``part-<rank>.json``.

    ``sync``: both are to survive a loss of power. ``on_block`` is called with the bytes of each
    block that was written and, in another thread, with 0 after each that was added up; what it
    raises ends the writing. ``replaced`` is the folder of the checkpoint that this one may replace:
    if this rank's shard there has the same content, it gets a second name here.
    """
    path = folder / f"shard-{rank}.safetensors"
    part_name = f"part-{rank}.json"
    shard = replaced and _link_same(path, snapshot, replaced / part_name, on_block)
    shard = shard or _write_shard(path, snapshot, sync, on_block)
    tensors: dict[str, TensorEntry] = {}
    own = {}
    for i, piece in enumerate(snapshot.layout.pieces):
        name = own_name(piece.fqn, rank) if piece.is_own else piece.fqn
        chunk = Chunk(piece.offsets, piece.sizes, path.name, piece.stored_name)
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
    for view in [memoryview(snapshot.layout.header()), *snapshot.data]:
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
    checksum, num_bytes = xxhash.xxh3_64(), 0
    for block in _blocks_of(snapshot):
        checksum.update(block)
        num_bytes += len(block)
        on_block(0)
    return FileEntry(path.name, num_bytes, checksum_text(checksum.hexdigest()))


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


def address_of(memory: memoryview | mmap.mmap) -> int:
    """Return where writable memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class BlockFile:
    """A file that did not exist before, open for writing from its beginning on."""

    def __init__(self, path: Path, *, direct: bool) -> None:
        """Create the file; direct: past the page cache, if the file system can (tmpfs cannot)."""
        memory = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._buffer = memoryview(memory)
        self._held = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._direct = False
        if direct:
            with contextlib.suppress(OSError):
                self._set_direct(on=True)

    def write(self, data: memoryview) -> None:
        """Append bytes; the last of them may stay in the buffer."""
        while data:
            at_once = len(data) >= _SMALL_BYTES
            if at_once and self._direct:
                aligned = self._held % PAGE_BYTES == 0 and not data.readonly
                at_once = aligned and address_of(data) % PAGE_BYTES == 0
            if at_once:
                self._flush()
                part = data[: min(len(data), BLOCK_BYTES) // PAGE_BYTES * PAGE_BYTES]
                self._put(part)
            else:
                part = data[: BLOCK_BYTES - self._held]
                self._buffer[self._held : self._held + len(part)] = part
                self._held += len(part)
                if self._held == BLOCK_BYTES:
                    self._flush()
            data = data[len(part) :]

    def finish(self, *, sync: bool) -> None:
        """Write what is left; sync: the file is to survive a loss of power."""
        whole = self._held // PAGE_BYTES * PAGE_BYTES
        self._put(self._buffer[:whole])
        if whole < self._held:
            self._set_direct(on=False)
            self._put(self._buffer[whole : self._held])
        self._held = 0
        if sync:
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file, without what is left in the buffer."""
        os.close(self._fd)

    def _flush(self) -> None:
        self._put(self._buffer[: self._held])
        self._held = 0

    def _put(self, data: memoryview) -> None:
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except OSError as e:
                if e.errno != errno.EINVAL or not self._direct:
                    raise
                self._set_direct(on=False)  # it wants more than whole pages

    def _set_direct(self, *, on: bool) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        wanted = flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
        if wanted != flags:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, wanted)
        self._direct = on


class ShardFile:
    """One safetensors file, open for reading by several threads."""

    def __init__(self, path: Path) -> None:
        """Open an undamaged safetensors file (else CheckpointCorruptError), and read its header."""
        self.path = path
        try:
            self._file = open_file(path)
        except OSError as e:
            raise CheckpointCorruptError(f"{path} cannot be opened: {e.strerror or e}") from e
        self._fd = self._file.fileno()
        try:
            self.tensors = self._tensors()
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            self.close()
            raise CheckpointCorruptError(f"{path} has no safetensors header: {e!r:.200}") from e
        except BaseException:
            self.close()
            raise

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a writable buffer from an offset; CheckpointCorruptError if the file cannot."""
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self._fd, [buffer[done : done + _MOST_AT_ONCE]], offset + done)
            except OSError as e:
                raise CheckpointCorruptError(f"{self.path} cannot be read: {e}") from e
            if not got:
                end = offset + len(buffer)
                raise CheckpointCorruptError(f"{self.path} ends before byte {end}")
            done += got

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._file.close()

    def _tensors(self) -> dict[str, tuple[int, int]]:
        """Return the first byte of each tensor and the one after its last, by name."""
        size = os.fstat(self._fd).st_size
        length = bytearray(8)
        self.read_into(memoryview(length), 0)
        header_bytes = int.from_bytes(length, "little")
        if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"a header of {header_bytes} bytes in a file of {size}")
        text = bytearray(header_bytes)
        self.read_into(memoryview(text), 8)
        begin, found = 8 + header_bytes, {}
        for name, entry in parse_json(bytes(text), self.path).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                if type(first) is not int or type(last) is not int:
                    raise TypeError(f"{name:.80} lies at bytes {first!r:.80} to {last!r:.80}")
                if not 0 <= first <= last <= size - begin:
                    raise ValueError(
                        f"{name} would lie at bytes {first} to {last} of {size - begin}"
                    )
                found[name] = (begin + first, begin + last)
        return found
