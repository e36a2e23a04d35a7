"""Holds a state still: copies it into host memory that is used again for every save.

Fresh memory of small pages costs many times the copy itself, since each page is a fault. So the
buffer has huge pages where the system has them: a copy into those costs little more the first time.
It is made and touched in the background as soon as its size is known, and kept; it is pinned where
the state is on a GPU. Both go in pieces, and a save comes in between: it copies into what there is,
and waits for no pinning; that of 20 GB takes many seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from hpc_elastic.checkpoint import sharding
from hpc_elastic.checkpoint.shard_file import HostSnapshot, ShardLayout, address_of
from hpc_elastic.checkpoint.state import Flat

_PIECE_BYTES = 64 << 20
_YIELD_S = 0.001


class Snapshots:
    """Makes snapshots of one state's tensors, in one buffer, which only grows."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._num_touched = self.num_pinned = 0  # bytes from the beginning of the buffer
        self._gpu: torch.device | None = None  # None too if the system pins no more
        self._lock, self._is_wanted = threading.Lock(), False
        self._warm_up: threading.Thread | None = None
        self._views: tuple[ShardLayout, list[torch.Tensor]] | None = None

    def warm_up(self, flat: Flat, num_bytes: int) -> None:
        """Begin to make the buffer in the background; it ends early if the program does."""
        try:
            with self._lock:
                self._reserve(flat, num_bytes)
        except Exception as e:
            if not is_out_of_memory(e):  # the first save meets that again, and logs it
                raise
        else:
            self._prepare()

    def wait_until_warm(self) -> None:
        """Wait until all is done in the background that is possible."""
        if self._warm_up is not None:
            self._warm_up.join()

    def copy(self, flat: Flat, layout: ShardLayout) -> HostSnapshot:
        """Copy what is planned; when it returns, the state may change. Valid until the next call.

        Raises what `is_out_of_memory` detects if there is no memory for the buffer.
        """
        self._is_wanted = True
        with self._lock:
            self._is_wanted = False
            memory = self._reserve(flat, layout.num_bytes)
            devices = set()
            placed = zip(layout.pieces, layout.begins, self._views_of(memory, layout), strict=True)
            for piece, begin, to in placed:
                source = sharding.view(piece, flat.tensors[piece.fqn])
                if source.is_cuda:
                    devices.add(source.device)
                    for part, to_part in _within_pieces(source, to, begin):
                        to_part.copy_(part, non_blocking=True)
                else:
                    to.copy_(source)
            for device in devices:
                torch.cuda.current_stream(device).synchronize()
            self._num_touched = max(self._num_touched, layout.num_bytes)
        if self._gpu is not None and self.num_pinned < len(memory):
            self._prepare()
        data = [memoryview(memory)[: layout.num_bytes]]
        return HostSnapshot(layout, data, flat.values, flat.rank_values, keep=memory)

    def borrow(self, flat: Flat, layout: ShardLayout) -> HostSnapshot:
        """Return a snapshot in the state's CPU memory: it may not change until that is written."""
        if any(tensor.device.type != "cpu" for tensor in flat.tensors.values()):
            return self.copy(flat, layout)
        views = [sharding.view(piece, flat.tensors[piece.fqn]) for piece in layout.pieces]
        tensors = [view.resolve_conj().resolve_neg().contiguous() for view in views]
        data = [sharding.bytes_of(tensor) for tensor in tensors]
        return HostSnapshot(layout, data, flat.values, flat.rank_values, keep=tensors)

    def _reserve(self, flat: Flat, num_bytes: int) -> mmap.mmap:
        if self._map is not None and len(self._map) >= num_bytes:
            return self._map
        if self._map is not None:
            for begin in range(0, self.num_pinned, _PIECE_BYTES):
                _cudart().cudaHostUnregister(address_of(self._map) + begin)
        else:
            self._gpu = next((t.device for t in flat.tensors.values() if t.is_cuda), None)
        self._map, self._views, self._num_touched, self.num_pinned = None, None, 0, 0
        num_bytes = max(num_bytes, mmap.PAGESIZE)
        self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A DataLoader's workers are forked: they would make each page a fault again.
        self._map.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without them
            self._map.madvise(mmap.MADV_HUGEPAGE)
        return self._map

    def _prepare(self) -> None:
        """Touch and pin the buffer in the background, unless that is under way."""

        def prepare() -> None:
            while threading.main_thread().is_alive():
                if self._is_wanted:  # a lock is not fair
                    time.sleep(_YIELD_S)
                    continue
                with self._lock:
                    if not self._prepare_piece():
                        return

        if self._warm_up is None or not self._warm_up.is_alive():
            self._warm_up = threading.Thread(target=prepare, name="checkpoint-warm-up")
            with contextlib.suppress(RuntimeError):  # no thread can be started: a save does without
                self._warm_up.start()

    def _prepare_piece(self) -> bool:
        """Pin the next piece, or touch it; return whether there may be another one."""
        assert self._map is not None
        address, size = address_of(self._map), len(self._map)
        if self._gpu is not None and self.num_pinned < size:
            begin, end = self.num_pinned, min(self.num_pinned + _PIECE_BYTES, size)
            with torch.cuda.device(self._gpu):  # of this thread: else it has a context on GPU 0
                if int(_cudart().cudaHostRegister(address + begin, end - begin, 0)) == 0:
                    self.num_pinned, self._num_touched = end, max(end, self._num_touched)
                    return True
                with contextlib.suppress(RuntimeError):  # else the next kernel raises it
                    torch.zeros(1, device=self._gpu)
                self._gpu = None
        begin, end = self._num_touched, min(self._num_touched + _PIECE_BYTES, size)
        ctypes.memset(address + begin, 0, end - begin)
        self._num_touched = end
        return end < size

    def _views_of(self, memory: mmap.mmap, layout: ShardLayout) -> list[torch.Tensor]:
        known = self._views  # the planner keeps its plan while the structure is the same
        if known is None or known[0] is not layout:
            whole, views = torch.frombuffer(memory, dtype=torch.uint8), []
            for piece, begin in zip(layout.pieces, layout.begins, strict=True):
                data = whole[begin : begin + piece.num_bytes]
                views.append(data.view(getattr(torch, piece.dtype)).view(piece.sizes))
            self._views = known = layout, views
        return known[1]


def _within_pieces(
    source: torch.Tensor, to: torch.Tensor, begin: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parts of a copy, each inside a piece: CUDA copies to no two registered ranges.

    ``to`` has the same shape, is contiguous and begins at ``begin`` in the buffer, in bytes.
    """
    left = [(source, to)]
    while left:
        source, to = left.pop()
        room = _PIECE_BYTES - begin % _PIECE_BYTES
        if to.nbytes <= room:
            yield source, to
            begin += to.nbytes
            continue
        row_bytes = to[0].nbytes
        num = room // row_bytes
        if num == 0:
            left += [(source[1:], to[1:]), (source[0], to[0])]
        else:
            left += [(source[num:], to[num:]), (source[:num], to[:num])]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python or torch means that there is no more memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    is_torchs = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or is_torchs


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
