"""A file of tensors that is complete and undamaged, or refused.

The format is safetensors', which any reader knows. The entry ``__metadata__`` holds a checksum for
each tensor, and one over all of that, so that a reader may take a part of a file and verify it.

Reference: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import xxhash

from hpc_elastic.errors import ConfigError, DamagedFileError
from hpc_elastic.shared_files import refresh

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100 << 20
"""As in the safetensors library."""
_BLOCK_BYTES = 16 << 20


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], values: Any) -> None:
    """Write a new file, and have the file system store it.

    If this fails, the file does not exist. ``values`` are any JSON, which the checksum covers.
    Raises ConfigError if a tensor has a type that the format lacks, and OSError if the file exists
    or cannot be written.
    """
    entries: dict[str, dict[str, Any]] = {}
    views: list[memoryview] = []
    begin = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ConfigError(f"tensor {name}", tensor.dtype, f"convert it to one of {[*_NAMES]}")
        raw: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        view = memoryview(raw)
        views.append(view)
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + len(view)],
            "xxh3_64": xxhash.xxh3_64_hexdigest(view),
        }
        begin += len(view)
    text = json.dumps({"values": values, "tensors": entries})
    plain = {n: {k: v for k, v in e.items() if k != "xxh3_64"} for n, e in entries.items()}
    metadata = {"hpc_elastic": text, "xxh3_64": xxhash.xxh3_64_hexdigest(text.encode())}
    header = json.dumps({"__metadata__": metadata, **plain}).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        for view in (memoryview(len(header).to_bytes(8, "little") + header), *views):
            rest = view
            while rest:
                rest = rest[os.write(fd, rest[:_BLOCK_BYTES]) :]
        os.fsync(fd)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


class TensorFile:
    """A file of `write_tensors` with its JSON ``values``, open for reading; a context manager."""

    values: Any

    def __init__(self, path: Path) -> None:
        """Open the file, verify its header; OSError if unreadable, DamagedFileError if damaged."""
        refresh(path)
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = int.from_bytes(self._read(8, 0), "little")
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            metadata = json.loads(self._read(size, 8))["__metadata__"]
            text = metadata["hpc_elastic"]
            if xxhash.xxh3_64_hexdigest(text.encode()) != metadata["xxh3_64"]:
                raise ValueError("another checksum")
            content = json.loads(text)
            self.values, self._entries = content["values"], content["tensors"]
            self._begin = 8 + size
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            self.close()
            if isinstance(e, DamagedFileError):
                raise
            raise DamagedFileError(f"the header of {path} is damaged: {e!r}") from e
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def header_bytes(self) -> int:
        """Size of what stands before the data of the tensors."""
        return self._begin

    @property
    def names(self) -> list[str]:
        """The names of the tensors, in the order in which they were written."""
        return list(self._entries)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in host memory; OSError if unreadable, DamagedFileError if damaged."""
        entry = self._entries.get(name)
        if entry is None:
            raise DamagedFileError(f"{self._path} has no tensor {name}")
        begin, end = entry["data_offsets"]
        data = self._read(end - begin, self._begin + begin)
        if xxhash.xxh3_64_hexdigest(data) != entry["xxh3_64"]:
            raise DamagedFileError(f"tensor {name} of {self._path} is damaged")
        dtype = _DTYPES[entry["dtype"]]
        if not data:
            return torch.empty(entry["shape"], dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(entry["shape"])

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _read(self, num_bytes: int, offset: int) -> bytearray:
        if offset + num_bytes > os.fstat(self._fd).st_size:
            raise DamagedFileError(f"{self._path} ends before byte {offset + num_bytes}")
        data = bytearray(num_bytes)
        view, done = memoryview(data), 0
        while done < num_bytes:
            got = os.preadv(self._fd, [view[done : done + _BLOCK_BYTES]], offset + done)
            if not got:
                raise DamagedFileError(f"{self._path} ends before byte {offset + num_bytes}")
            done += got
        return data
