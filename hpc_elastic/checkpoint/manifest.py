"""What a checkpoint holds, as data (pure, without torch).

Each rank describes what it wrote in a `RankPart`; rank 0 merges all parts into the `Manifest`,
which is the checkpoint: a file that it does not name does not count. A tensor is stored as boxes
(`Chunk`), so that every rank may write its own share, and another world size may read it.

Both are sealed as ``{"checksum": "xxh3_64:<hex>", "content": {...}}``; the checksum is that of the
content as canonical JSON, so a flipped bit in them is found too. It protects against damage, not
against somebody who may write into the folder.

So a manifest is only read back if it describes a checkpoint: the boxes of each tensor cover its
shape exactly once, and the boxes of a file are no more bytes than the file has. Whatever is made of
it is therefore as large as its files.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property, partial
from typing import Any, TypeVar

import xxhash

from hpc_elastic.errors import CheckpointCorruptError
from hpc_elastic.shared_files import LATEST_TIME

VERSION = 1  # of the format; a reader refuses later ones
MANIFEST = "manifest.json"
MANIFEST_BYTES = 256 << 20  # largest manifest that is read: one of millions of boxes

OWN_KINDS = ("positions", "values", "per_rank")
"""Of the values that each rank has for itself, those that belong to a key of the state."""

T = TypeVar("T")


@dataclass(frozen=True)
class Chunk:
    """One stored box of a tensor."""

    offsets: tuple[int, ...]  # where it begins in the whole tensor, in elements, by dimension
    sizes: tuple[int, ...]
    file: str  # name of the safetensors file, in the checkpoint's folder
    name: str
    """The stored tensor's name in that file. Its bytes are the box in row-major order, little
    endian, in the type that the entry names, whatever type the file's header gives: a type that
    safetensors lacks stands there as bytes."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the state."""

    shape: tuple[int, ...]  # of the whole tensor, over all ranks
    dtype: str  # as torch prints it, without ``torch.``, such as ``bfloat16``
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class FileEntry:
    """A file that a checkpoint needs."""

    name: str
    num_bytes: int
    checksum: str  # ``xxh3_64:`` and sixteen hexadecimal digits


@dataclass(frozen=True)
class Described:
    """What one rank has of that which is stored once."""

    structure: Mapping[str, str]  # checksums of names, shapes and types, by key
    names: tuple[str, ...] = ()  # of tensors, with type and shape: where new, and of rank 0
    samples: str = ""  # of the tensors by name, as base64; empty if this save compares none
    holders: tuple[int, ...] = ()  # first rank with the same part; -1: not compared
    values: Mapping[str, Any] = field(default_factory=dict)
    """What is no tensor, by key of the state; with the samples. Of what is long, a checksum."""


@dataclass(frozen=True)
class RankPart:
    """What one rank wrote."""

    rank: int
    files: tuple[FileEntry, ...]
    tensors: Mapping[str, TensorEntry]  # by name; only this rank's chunks
    values: Mapping[str, Any]
    """By key of the state: everything that is no tensor, and where the tensors stand in it
    (`tree_codec`)."""
    rank_values: Mapping[str, Any]
    """What each rank has for itself: the states of its random number generators ("rng"), its
    "positions" in data, "values" that may be another rank's, too, and what it stores "per_rank"."""
    own: Mapping[str, str] = field(default_factory=dict)
    """Checksums of the tensors that each rank stores for itself, by the name that all ranks have;
    in ``tensors`` they stand as `own_name` has it."""
    described: Described | None = None  # None if there are no other ranks

    def to_json(self) -> str:
        """Return the text of the rank's part file."""
        return seal(_plain(self))

    @classmethod
    def from_json(cls, text: str) -> RankPart:
        """Read a part file; raise CheckpointCorruptError if it is no undamaged part."""
        body = unseal(text)
        with reading("part"):
            return cls(
                rank=_of(int, body["rank"]),
                files=_files(body["files"]),
                tensors=_tensors(body["tensors"]),
                values=_of(dict, body["values"]),
                rank_values=_of(dict, body["rank_values"]),
                own=_of(dict, body.get("own", {})),
                described=_described(body.get("described")),
            )


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint."""

    version: int
    step: int
    world_size: int
    created: float  # Unix seconds
    files: tuple[FileEntry, ...]
    tensors: Mapping[str, TensorEntry]  # by name; those that each rank has for itself by `own_name`
    values: Mapping[str, Any]  # rank 0's; see `RankPart.values`
    rank_values: Mapping[int, Mapping[str, Any]]
    run: str = ""  # its writer; empty if unknown, as in those of hpc_elastic 0.2.0 (`owner`)

    def to_json(self) -> str:
        """Return the text of ``manifest.json``."""
        return seal(_plain(self))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read ``manifest.json``; raise CheckpointCorruptError if it describes no checkpoint."""
        body = unseal(text)
        with reading("manifest"):
            if _of(int, body["version"]) > VERSION:
                raise CheckpointCorruptError(
                    f"the checkpoint has format {body['version']}, this hpc_elastic reads up to "
                    f"{VERSION}: install a later one"
                )
            manifest = cls(
                version=body["version"],
                step=_count(body["step"]),
                world_size=_count(body["world_size"]),
                created=float(body["created"]),
                files=_files(body["files"]),
                tensors=_tensors(body["tensors"]),
                values=_of(dict, body["values"]),
                rank_values={int(r): _of(dict, v) for r, v in body["rank_values"].items()},
                run=_of(str, body.get("run", "")),
            )
            if not 0 <= manifest.created < LATEST_TIME:
                raise ValueError(f"created at {manifest.created}")
        if problem := next(_problems(manifest), None):
            raise CheckpointCorruptError(problem)
        return manifest

    def own_names(self, rank: int) -> dict[str, str]:
        """Return the tensors that a rank has for itself: their names in its values, and here."""
        return self._own_names.get(rank, {})

    @cached_property
    def _own_names(self) -> dict[int, dict[str, str]]:
        found: dict[int, dict[str, str]] = {}
        for name in self.tensors:
            if "~rank" in name and (m := _OWN_NAME.fullmatch(name)):
                found.setdefault(int(m[2]), {})[m[1] + m[3]] = name
        return found

    def of_rank(self, rank: int, renamed: Mapping[str, str] = {}) -> Manifest:
        """Return the checkpoint as a rank has it; some names in its values may be renamed."""
        own = self._own_names
        of_ranks = {at for names in own.values() for at in names.values()}
        tensors = {name: entry for name, entry in self.tensors.items() if name not in of_ranks}
        tensors |= {name: self.tensors[at] for name, at in own.get(rank, {}).items()}
        tensors = {renamed.get(name, name): entry for name, entry in tensors.items()}
        return replace(self, tensors=tensors)

    def pieces(self) -> dict[str, dict[str, int]]:
        """Return the bytes of each stored box, by its file and its name there."""
        found: dict[str, dict[str, int]] = {file.name: {} for file in self.files}
        for fqn, entry in self.tensors.items():
            item_bytes = bytes_of_type(entry.dtype)
            for chunk in entry.chunks:
                boxes = found.setdefault(chunk.file, {})
                if chunk.name in boxes:
                    raise CheckpointCorruptError(
                        f"{fqn}: {chunk.name} of {chunk.file} belongs to another box too"
                    )
                boxes[chunk.name] = math.prod(chunk.sizes) * item_bytes
        return found


def own_name(name: str, rank: int) -> str:
    """Return the stored name of a rank's own tensor, ``data~rank1/buffer``: no key is like it."""
    key, slash, rest = name.partition("/")
    return f"{key}~rank{rank}{slash}{rest}"


_OWN_NAME = re.compile(r"([^/]*)~rank(\d+)((?:/.*)?)", re.DOTALL)


def checksum_of(data: bytes | memoryview) -> str:
    """Return the checksum of some bytes, as `FileEntry` has it."""
    return checksum_text(xxhash.xxh3_64_hexdigest(data))


def checksum_text(digits: str) -> str:
    """Return a checksum, given in hexadecimal digits, as `FileEntry` has it."""
    return f"xxh3_64:{digits}"


_PRIME = (1 << 127) - 1


def coverage_problem(shape: Sequence[int], chunks: Sequence[Chunk]) -> str | None:
    """Return what is wrong with the boxes of a tensor; None if they cover it exactly once.

    Let an element at (i, j, ...) be the monomial x^i y^j ... A box is the sum of its elements, a
    product of geometric series. The boxes cover the tensor exactly once if and only if their sum is
    the whole tensor's, as polynomials. Both are compared at a random point modulo a large prime:
    unequal ones agree there with a probability of degree / prime (Schwartz and Zippel), which is
    below 2^-50. So it takes two powers for each edge, however irregular the boxes are.
    """
    for chunk in chunks:
        sides = zip(chunk.offsets, chunk.sizes, shape, strict=False)
        is_inside = all(o >= 0 and s > 0 and o + s <= whole for o, s, whole in sides)
        has_its_sides = len(chunk.offsets) == len(chunk.sizes) == len(shape)
        if not has_its_sides or not (is_inside or 0 in chunk.sizes):
            return f"has a box outside of it: {list(chunk.offsets)} + {list(chunk.sizes)}"
    if 0 in shape:
        return None
    chunks = [chunk for chunk in chunks if 0 not in chunk.sizes]
    bases = [2 + secrets.randbelow(_PRIME - 2) for _ in shape]
    powers = [cache(partial(pow, base, mod=_PRIME)) for base in bases]
    total = 0
    for chunk in chunks:
        term = 1
        for power, offset, size in zip(powers, chunk.offsets, chunk.sizes, strict=True):
            term = term * (power(offset + size) - power(offset)) % _PRIME
        total += term
    whole = 1
    for power, size in zip(powers, shape, strict=True):
        whole = whole * (power(size) - 1) % _PRIME
    if total % _PRIME == whole:
        return None
    begins = [chunk.offsets for chunk in chunks]
    again = next((b for b, n in Counter(begins).items() if n > 1), None)
    num_stored = sum(math.prod(chunk.sizes) for chunk in chunks)
    if again is None and num_stored < math.prod(shape):
        return "has a hole: no rank wrote a part of it"
    return f"has a part that is stored twice{'' if again is None else f', at {list(again)}'}"


_TYPE = re.compile(r"(?:b?float|int|uint|complex|qu?int|bits)(\d+)\w*")
_LARGEST = 1 << 63  # no size and no number of bytes is as large
_MOST_DIMENSIONS = 64


def bytes_of_type(dtype: str) -> int:
    """Return the bytes of a type's element, by its name: torch's names contain the bits."""
    m = _TYPE.fullmatch(dtype)
    if dtype != "bool" and (m is None or len(m[1]) > 3):
        raise CheckpointCorruptError(f"{dtype!r:.80} is no type of tensors")
    return 1 if m is None else -(-int(m[1]) // 8)


def _problems(manifest: Manifest) -> Iterator[str]:
    """Yield why a manifest describes no checkpoint."""
    files = {file.name: file.num_bytes for file in manifest.files}
    if len(files) < len(manifest.files):
        yield "it names a file twice"
    for name, entry in manifest.tensors.items():
        num_bytes = math.prod(max(1, size) for size in entry.shape) * bytes_of_type(entry.dtype)
        if len(entry.shape) > _MOST_DIMENSIONS or num_bytes >= _LARGEST:
            yield f"{name:.80} is too large a tensor"
        elif problem := coverage_problem(entry.shape, entry.chunks):
            yield f"{name:.80}{list(entry.shape)} {problem}"
    for file, boxes in manifest.pieces().items():
        if file not in files:
            yield f"{file} is no file of the checkpoint, but a tensor is stored there"
        elif sum(boxes.values()) > files[file]:
            yield f"{file} has {files[file]} bytes, but its tensors have {sum(boxes.values())}"


def seal(content: Mapping[str, Any]) -> str:
    """Return JSON text with its own checksum."""
    body = _canonical(content)
    return f'{{"checksum":"{checksum_of(body.encode())}","content":{body}}}'


def unseal(text: str) -> dict[str, Any]:
    """Return the content of sealed text; raise CheckpointCorruptError if it has changed."""
    try:
        outer = json.loads(text)
        content, checksum = outer["content"], outer["checksum"]
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise CheckpointCorruptError(f"not readable as JSON: {e}") from e
    try:
        is_whole = isinstance(content, dict) and checksum == checksum_of(
            _canonical(content).encode()
        )
    except (ValueError, RecursionError) as e:
        raise CheckpointCorruptError(f"not readable as JSON: {e}") from e
    if not is_whole:
        raise CheckpointCorruptError("its checksum does not match its content")
    return content  # type: ignore[no-any-return]


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise a CheckpointCorruptError in the place of what a wrong form raises."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        raise CheckpointCorruptError(f"not the form of a {what}: {e!r:.200}") from e


def _plain(whole: RankPart | Manifest) -> dict[str, Any]:
    described = getattr(whole, "described", None)
    return {
        **{f.name: getattr(whole, f.name) for f in fields(whole)},
        **({} if described is None else {"described": asdict(described)}),
        "files": [[f.name, f.num_bytes, f.checksum] for f in whole.files],
        "tensors": {
            name: [t.shape, t.dtype, [[c.offsets, c.sizes, c.file, c.name] for c in t.chunks]]
            for name, t in whole.tensors.items()
        },
    }


def _files(rows: Any) -> tuple[FileEntry, ...]:
    return tuple(
        FileEntry(_file_name(name), _count(num_bytes), _of(str, checksum))
        for name, num_bytes, checksum in rows
    )


def _tensors(rows: Any) -> dict[str, TensorEntry]:
    return {
        fqn: TensorEntry(
            _numbers(shape),
            _of(str, dtype),
            tuple(
                Chunk(_numbers(offsets), _numbers(sizes), _file_name(file), _of(str, name))
                for offsets, sizes, file, name in chunks
            ),
        )
        for fqn, (shape, dtype, chunks) in rows.items()
    }


def _described(body: Any) -> Described | None:
    if body is None:
        return None
    return Described(
        structure=_of(dict, body["structure"]),
        names=tuple(_of(str, name) for name in body["names"]),
        samples=_of(str, body["samples"]),
        holders=tuple(_of(int, holder) for holder in body["holders"]),
        values=_of(dict, body["values"]),
    )


def _file_name(value: Any) -> str:
    """Refuse a name that leads out of the manifest's folder."""
    name = _of(str, value)
    if not name or "/" in name or name.startswith(".") or "\0" in name:
        raise ValueError(f"no file name: {name!r:.80}")
    return name


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(_count(value) for value in values)


def _count(value: Any) -> int:
    if not 0 <= _of(int, value) < _LARGEST:
        raise ValueError(f"no size: {value!r:.80}")
    return int(value)


def _of(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, found {value!r:.80}")
    return value
