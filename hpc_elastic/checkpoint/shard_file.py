"""Files of a checkpoint: written in large blocks past the page cache, read in pieces (no torch).

Through the page cache, a checkpoint costs seconds of CPU time per GiB, which the steps meanwhile
pay for, and turns out what the training reads. Direct writes (`O_DIRECT` of open(2)) cost next to
none, but want whole pages at page boundaries, in the file and in memory. What lies otherwise goes
through a buffer here, and so do small pieces.

Files are read with pread(2), not mapped: a file that is cut short while it is read is an error
then, not a SIGBUS, and network file systems are asked for large pieces.

Reference: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path

from hpc_elastic.errors import CheckpointCorruptError
from hpc_elastic.shared_files import open_file, parse_json

BLOCK_BYTES = 16 << 20
"""Written at once."""
PAGE_BYTES = 4096
"""No device asks for more."""
_SMALL_BYTES = 1 << 20
"""Smaller pieces of memory are gathered before they are written."""
_MAX_HEADER_BYTES = 100 << 20
"""As in the safetensors library."""
_MOST_AT_ONCE = 1 << 30
"""Linux reads a little less than 2 GiB in one call."""


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
