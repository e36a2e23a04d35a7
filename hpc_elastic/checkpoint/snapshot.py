"""Holds a state still: copies it into host memory that is used again for every save.

Fresh memory costs many times the copy itself, since each page is a fault. So the buffer is made and
touched in the background as soon as its size is known, and kept; it is pinned where the state is on
a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpc_elastic.checkpoint.files import FileLayout, HostSnapshot, address_of, lay_out
from hpc_elastic.checkpoint.sharding import ShardPiece
from hpc_elastic.checkpoint.state import Flat

_TOUCH_BYTES = 16 << 20


class Snapshots:
    """Makes snapshots of one state's tensors, in one buffer, which only grows."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._is_pinned: bool | None = None
        self._lock = threading.Lock()
        self._pieces: Sequence[ShardPiece] | None = None
        self._layout = FileLayout((), (), 0)
        self._views: tuple[mmap.mmap, list[torch.Tensor]] | None = None

    def warm_up(self, flat: Flat, num_bytes: int) -> None:
        """Begin to make the buffer in the background; it ends early if the program does.

        Args:
            flat: The state; it has whether memory is to be pinned.
            num_bytes: What a snapshot will probably take.
        """

        def reserve() -> None:
            try:
                self._reserve(flat, num_bytes)
            except Exception as e:
                if not is_out_of_memory(e):  # the first save meets that again, and logs it
                    raise

        thread = threading.Thread(target=reserve, name="checkpoint-warm-up")
        with contextlib.suppress(RuntimeError):  # no thread is to be had: the first save makes it
            thread.start()

    def copy(
        self, flat: Flat, pieces: Sequence[ShardPiece], rank_values: Mapping[str, Any]
    ) -> HostSnapshot:
        """Copy the pieces; when it returns, the state may change.

        The snapshot is valid until the next call.

        Raises:
            Exception: there is no memory for the buffer, by `is_out_of_memory`.
        """
        layout = self._layout_of(pieces)
        memory = self._reserve(flat, layout.num_bytes)
        devices = set()
        for piece, to in zip(layout.pieces, self._views_of(memory), strict=True):
            source = piece.view(flat.tensors[piece.fqn])
            to.copy_(source, non_blocking=source.is_cuda)
            devices.add(source.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        data = [memoryview(memory)[: layout.num_bytes]]
        return HostSnapshot(layout, data, flat.values, rank_values, keep=memory)

    def borrow(
        self, flat: Flat, pieces: Sequence[ShardPiece], rank_values: Mapping[str, Any]
    ) -> HostSnapshot:
        """Return a snapshot in the state's own memory, as far as it is on the CPU.

        The state may not change until it is written.
        """
        if any(tensor.device.type != "cpu" for tensor in flat.tensors.values()):
            return self.copy(flat, pieces, rank_values)
        layout = self._layout_of(pieces)
        views = [piece.view(flat.tensors[piece.fqn]) for piece in layout.pieces]
        tensors = [view.resolve_conj().resolve_neg().contiguous() for view in views]
        data = [_bytes_of(tensor) for tensor in tensors]
        return HostSnapshot(layout, data, flat.values, rank_values, keep=tensors)

    def _reserve(self, flat: Flat, num_bytes: int) -> mmap.mmap:
        """Return memory of at least a size, every page of it touched."""
        with self._lock:
            if self._map is not None and len(self._map) >= num_bytes:
                return self._map
            gpu = next((t.device for t in flat.tensors.values() if t.is_cuda), None)
            if self._is_pinned is None:
                self._is_pinned = gpu is not None
            if self._map is not None and self._is_pinned:
                _cudart().cudaHostUnregister(address_of(self._map))
            self._map = None
            num_bytes = max(num_bytes, mmap.PAGESIZE)
            made = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # A DataLoader's workers are forked: they would make each page a fault again.
            made.madvise(mmap.MADV_DONTFORK)
            address = address_of(made)
            for begin in range(0, num_bytes, _TOUCH_BYTES):
                if not threading.main_thread().is_alive():
                    break
                ctypes.memset(address + begin, 0, min(_TOUCH_BYTES, num_bytes - begin))
            if self._is_pinned:
                with torch.cuda.device(gpu):  # of this thread: else it has a context on GPU 0
                    error = _cudart().cudaHostRegister(address, num_bytes, 0)
                    self._is_pinned = int(error) == 0
                    if not self._is_pinned:
                        with contextlib.suppress(RuntimeError):  # else the next kernel raises it
                            torch.zeros(1, device=gpu)
            self._map = made
            return made

    def _layout_of(self, pieces: Sequence[ShardPiece]) -> FileLayout:
        if pieces is not self._pieces:  # the planner keeps its list while the structure is the same
            self._pieces, self._layout, self._views = pieces, lay_out(pieces), None
        return self._layout

    def _views_of(self, memory: mmap.mmap) -> list[torch.Tensor]:
        if self._views is None or self._views[0] is not memory:
            whole, views = torch.frombuffer(memory, dtype=torch.uint8), []
            for piece, begin in zip(self._layout.pieces, self._layout.begins, strict=True):
                data = whole[begin : begin + piece.num_bytes]
                views.append(data.view(getattr(torch, piece.dtype)).view(piece.sizes))
            self._views = memory, views
        return self._views[1]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python or torch means that there is no more memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    is_torchs = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or is_torchs


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
