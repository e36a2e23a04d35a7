"""Where the tensors of a safetensors file lie, and reading pieces of them (without torch).

Files are read with pread(2), not mapped: a file that is cut short while it is read is an error
then, not a SIGBUS, and network file systems are asked for large pieces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hpc_elastic.errors import CheckpointCorruptError

_MAX_HEADER_BYTES = 100 << 20
"""As in the safetensors library."""
_MOST_AT_ONCE = 1 << 30
"""Linux reads a little less than 2 GiB in one call."""


class ShardFile:
    """One safetensors file, open for reading by several threads."""

    def __init__(self, path: Path) -> None:
        """Open the file and read its header.

        Raises:
            CheckpointCorruptError: it is no undamaged safetensors file, or can not be read.
        """
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise CheckpointCorruptError(f"{path} can not be opened: {e.strerror}") from e
        try:
            self.tensors = _tensors(*self._header())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            self.close()
            raise CheckpointCorruptError(f"{path} has no safetensors header: {e!r}") from e
        except BaseException:
            self.close()
            raise

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer of bytes from the file.

        Args:
            buffer: Contiguous and writable, of bytes.
            offset: Where to begin in the file, in bytes.

        Raises:
            CheckpointCorruptError: the file is shorter than that, or can not be read.
        """
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self._fd, [buffer[done : done + _MOST_AT_ONCE]], offset + done)
            except OSError as e:
                raise CheckpointCorruptError(f"{self.path} can not be read: {e}") from e
            if not got:
                end = offset + len(buffer)
                raise CheckpointCorruptError(f"{self.path} ends before byte {end}")
            done += got

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _header(self) -> tuple[dict[str, dict[str, Any]], int, int]:
        size = os.fstat(self._fd).st_size
        length = bytearray(8)
        self.read_into(memoryview(length), 0)
        header_bytes = int.from_bytes(length, "little")
        if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"a header of {header_bytes} bytes in a file of {size}")
        text = bytearray(header_bytes)
        self.read_into(memoryview(text), 8)
        return json.loads(text), 8 + header_bytes, size


def _tensors(
    header: Mapping[str, Mapping[str, Any]], begin: int, size: int
) -> dict[str, tuple[int, int]]:
    """Return the first byte of each tensor and the one after its last, by name."""
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        if not 0 <= first <= last <= size - begin:
            raise ValueError(f"{name} would lie at bytes {first} to {last} of {size - begin}")
        found[name] = (begin + first, begin + last)
    return found


@dataclass(frozen=True)
class Rows:
    """The bytes of a stored box that hold a part of it: rows of the same length, end to end.

    Attributes:
        dim: The dimension that the rows are counted along: the part is one element long along
            those before it.
        offset: Of the first row in the box, in bytes.
        num_bytes: Of one row.
        count: Number of rows.
        exact: Whether the rows hold nothing but the part.
    """

    dim: int
    offset: int
    num_bytes: int
    count: int
    exact: bool


def rows_of(
    sizes: Sequence[int], starts: Sequence[int], lengths: Sequence[int], itemsize: int
) -> Rows:
    """Find a part of a stored box (pure).

    Args:
        sizes: Of the stored box, which is in row-major order.
        starts: Where the part begins in the box.
        lengths: Of the part; none is 0.
        itemsize: Bytes of an element.
    """
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
