"""The bytes of tensors: where they are, and memory to receive them into."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_libc = ctypes.CDLL(None, use_errno=True)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether a tensor's elements lie side by side, in whatever order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without history, its elements side by side; a copy only if it has to be."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor if is_dense(tensor.shape, tensor.stride()) else tensor.contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a plain tensor, as bytes in one dimension."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def view(raw: torch.Tensor) -> memoryview:
    """Return bytes on the CPU as a buffer that shares their memory."""
    return memoryview(raw.numpy())  # type: ignore[arg-type]  # NumPy's stubs before 3.12


def allocate(num_bytes: int) -> torch.Tensor:
    """Return fresh bytes on the CPU, in huge pages if they are many.

    Fresh memory in small pages costs several times what the copy into it does.
    """
    raw = torch.empty(num_bytes, dtype=torch.uint8)
    begin = -(-raw.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    length = (raw.data_ptr() + num_bytes - begin) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if length > 0:  # a hint: where the system refuses it, pages are small
        _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return raw


def reader(raw: torch.Tensor) -> Callable[[int, int], memoryview]:
    """Return a function that gives a range of a tensor's bytes; on a GPU it copies just that.

    To be called when the bytes are final for the calling thread's stream; the ranges may be asked
    for by other threads.
    """
    if raw.device.type == "cpu":
        buffer = view(raw)
        return lambda begin, end: buffer[begin:end]
    if raw.device.type != "cuda":
        return lambda begin, end: view(raw[begin:end].cpu())
    written = torch.cuda.Event()  # type: ignore[no-untyped-call]
    written.record(torch.cuda.current_stream(raw.device))
    stream = torch.cuda.Stream(raw.device)  # type: ignore[no-untyped-call]

    def read(begin: int, end: int) -> memoryview:
        # A stream of its own: the training's next kernels are not waited for.
        bounce = torch.empty(end - begin, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(stream):
            stream.wait_event(written)
            bounce.copy_(raw[begin:end], non_blocking=True)
        stream.synchronize()
        return view(bounce)

    return read
