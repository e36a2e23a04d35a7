"""Where the tensors of a safetensors file lie, and reading pieces of them (without torch).

Files are read with pread(2), not mapped: a file that is cut short while it is read is an error
then, not a SIGBUS, and network file systems are asked for large pieces.

Reference: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import os
from pathlib import Path

from hpc_elastic.errors import CheckpointCorruptError
from hpc_elastic.shared_files import open_file, parse_json

_MAX_HEADER_BYTES = 100 << 20
"""As in the safetensors library."""
_MOST_AT_ONCE = 1 << 30
"""Linux reads a little less than 2 GiB in one call."""


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
        """Fill a contiguous, writable buffer of bytes from an offset of the file.

        Raises:
            CheckpointCorruptError: the file is shorter than that, or cannot be read.
        """
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
