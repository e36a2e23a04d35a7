"""Means of tensors over the replicas, under way while something else is done.

Used by `local_sgd`. Tensors are sent one by one, or packed into buckets, which is faster where
there are many small ones. Errors are the manager's: it records them, and does not commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from hpc_elastic.ft.manager import Manager


class Averaging:
    """The mean of each tensor over the replicas; begins at once.

    Args:
        manager: Asked for the mean; its quorum has to be started.
        tensors: Floating-point; they hold the means once `wait` has returned, and garbage if the
            manager does not commit. Not to be touched before.
        bucket_bytes: Tensors of one type and device are packed into buckets of at most so many
            bytes, a larger one by itself; None sends each by itself.
        should_quantize: As in `Manager.allreduce`.
    """

    def __init__(
        self,
        manager: Manager,
        tensors: Sequence[torch.Tensor],
        *,
        bucket_bytes: int | None = None,
        should_quantize: bool = False,
    ) -> None:
        self._buckets = (
            [[t] for t in tensors] if bucket_bytes is None else list(_packed(tensors, bucket_bytes))
        )
        self._stream = _side_stream()
        with self._stream or nullcontext():
            self._flat = [_flattened(bucket) for bucket in self._buckets]
            self._works: list[Any] = [
                manager.allreduce(flat, should_quantize=should_quantize) for flat in self._flat
            ]

    def wait(self) -> None:
        """Wait until all tensors hold their means, or the manager has recorded an error."""
        with self._stream or nullcontext():
            for bucket, flat, work in zip(self._buckets, self._flat, self._works, strict=True):
                work.wait()
                _unpack(flat, bucket)
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)
        self._works, self._flat, self._buckets = [], [], []


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, sharing its memory; others as they are."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def like(shard: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return a shard as a DTensor that is laid out like another; for others the shard itself."""
    if not isinstance(whole, DTensor):
        return shard
    sharded: torch.Tensor = DTensor.from_local(
        shard, whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride()
    )
    return sharded


def _side_stream() -> torch.Stream | None:
    """Return a stream beside the training's that sees what the training has done so far."""
    if not torch.accelerator.is_available():
        return None
    stream = torch.Stream(device=torch.accelerator.current_accelerator())
    stream.wait_stream(torch.accelerator.current_stream())
    return stream


def _packed(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors in buckets; their order is the same on all replicas."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in by_kind.values():
        bucket: list[torch.Tensor] = []
        for tensor in same:
            if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket


def _flattened(bucket: list[torch.Tensor]) -> torch.Tensor:
    """Return one tensor with the contents of all; of a single one itself."""
    return bucket[0] if len(bucket) == 1 else torch.cat([t.reshape(-1) for t in bucket])


def _unpack(flat: torch.Tensor, bucket: list[torch.Tensor]) -> None:
    if len(bucket) > 1:
        pieces = torch.split(flat, [t.numel() for t in bucket])
        for tensor, piece in zip(bucket, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))
