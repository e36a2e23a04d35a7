"""torch's default process group, if the script has made one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def size() -> int | None:
    """Return its number of ranks; None if there is none."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        return None
    return int(dist.get_world_size())


def rank() -> int:
    """Return this process's rank in it; there is one."""
    return int(sys.modules["torch.distributed"].get_rank())


def sum_rows(row: Sequence[int]) -> list[int]:
    """Return the sum of the rows of all ranks (collective); the row itself if there is no group."""
    if size() is None:
        return list(row)
    import torch

    numbers = torch.tensor(row, dtype=torch.int64, device=device())
    torch.distributed.all_reduce(numbers)
    return [int(number) for number in numbers.tolist()]


def broadcast_row(row: Sequence[int]) -> list[int]:
    """Return rank 0's row, which has the same length on every rank (collective)."""
    import torch

    numbers = torch.tensor(row, dtype=torch.int64, device=device())
    torch.distributed.broadcast(numbers, src=0)
    return [int(number) for number in numbers.tolist()]


def device() -> torch.device:
    """Return a device whose tensors the group can send."""
    import torch

    backend = str(torch.distributed.get_backend())
    if "nccl" in backend and "gloo" not in backend:
        return gpu()
    return torch.device("cpu")


def gpu() -> torch.device:
    """Return this process's GPU: by ``init_process_group(device_id=)``, else the current one."""
    import torch

    group = None if size() is None else torch.distributed.group.WORLD
    bound = None if group is None else group.bound_device_id
    return bound or torch.device("cuda", torch.cuda.current_device())
