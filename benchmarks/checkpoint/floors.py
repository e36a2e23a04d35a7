"""What no checkpoint can be faster than: plain copies, writes and reads of the same bytes."""

import ctypes
import mmap
import os
from pathlib import Path

import torch
import xxhash

BLOCK_BYTES = 16 << 20


def touched(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return warm buffers for a state, each of which begins at a page."""
    buffers = {}
    for name, tensor in tensors.items():
        memory = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffers[name] = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).zero_()
    return buffers


def copy_by_memcpy(tensors: dict[str, torch.Tensor], to: dict[str, torch.Tensor]) -> None:
    """Copy a state, tensor by tensor, with the C library's memmove."""
    for name, tensor in tensors.items():
        ctypes.memmove(to[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)


def copy_by_torch(tensors: dict[str, torch.Tensor], to: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        to[name].copy_(tensor)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def write(tensors: dict[str, torch.Tensor], path: Path, *, direct: bool = False) -> None:
    """Write the bytes in large blocks, and sync; direct: past the page cache."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0))
    for tensor in tensors.values():
        view = bytes_of(tensor)
        for begin in range(0, len(view), BLOCK_BYTES):
            os.write(fd, view[begin : begin + BLOCK_BYTES])
    os.fsync(fd)
    os.close(fd)


def read_and_checksum(path: Path, to: dict[str, torch.Tensor]) -> None:
    """Read the bytes into tensors in large blocks, each checksummed at once."""
    checksum = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as f:
        for tensor in to.values():
            view = bytes_of(tensor)
            for begin in range(0, len(view), BLOCK_BYTES):
                block = view[begin : begin + BLOCK_BYTES]
                f.readinto(block)
                checksum.update(block)
    checksum.hexdigest()
