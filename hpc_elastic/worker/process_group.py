"""torch's default process group, if the script has made one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def world() -> Any:
    """Return it; None if there is none."""
    dist = sys.modules.get("torch.distributed")
    return dist.group.WORLD if dist is not None and dist.is_available() else None


def size() -> int | None:
    """Return its number of ranks; None if there is none."""
    group = world()
    return None if group is None else int(group.size())


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

    bound = None if (group := world()) is None else group.bound_device_id
    return bound or torch.device("cuda", torch.cuda.current_device())
