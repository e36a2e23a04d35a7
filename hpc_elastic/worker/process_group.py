"""torch's default process group: the one that the script has made, and what its ranks exchange.

Everything is sent as tensors: torch's object collectives would pickle.
"""

from __future__ import annotations

import json
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

    numbers = _tensor_of(row)
    torch.distributed.all_reduce(numbers)
    return _row_of(numbers)


def broadcast_row(row: Sequence[int]) -> list[int]:
    """Return rank 0's row, which has the same length on every rank (collective)."""
    import torch

    numbers = _tensor_of(row)
    torch.distributed.broadcast(numbers, src=0)
    return _row_of(numbers)


def gather_rows(row: Sequence[int]) -> list[list[int]]:
    """Return the row of every rank, by rank; all have the same length, and int64 numbers."""
    import torch

    mine = _tensor_of(row)
    rows = [torch.empty_like(mine) for _ in range(size() or 1)]
    torch.distributed.all_gather(rows, mine)
    return [_row_of(numbers) for numbers in rows]


def _tensor_of(row: Sequence[int]) -> torch.Tensor:
    import torch

    return torch.tensor(row, dtype=torch.int64, device=device())


def _row_of(numbers: torch.Tensor) -> list[int]:
    row: list[int] = numbers.tolist()
    return row


def broadcast_json(value: Any, source: int) -> Any:
    """Return the value of one rank, which is plain JSON (collective)."""
    import torch

    block = _bytes_of(value if rank() == source else None)
    length = torch.tensor([len(block)], dtype=torch.int64, device=block.device)
    torch.distributed.broadcast(length, src=source)
    if rank() != source:
        block = block.new_empty(int(length.item()))
    torch.distributed.broadcast(block, src=source)
    return _value_of(block)


def gather_json(value: Any) -> list[Any]:
    """Return the value of every rank, by rank; they are plain JSON (collective)."""
    import torch

    mine = _bytes_of(value)
    counts = [count for (count,) in gather_rows([len(mine)])]
    padded = torch.nn.functional.pad(mine, (0, max(counts) - len(mine)))
    blocks = [torch.empty_like(padded) for _ in counts]
    torch.distributed.all_gather(blocks, padded)
    return [_value_of(block[:n]) for block, n in zip(blocks, counts, strict=True)]


def _bytes_of(value: Any) -> torch.Tensor:
    import torch

    data = bytearray(json.dumps(value).encode())
    return torch.frombuffer(data, dtype=torch.uint8).to(device())


def _value_of(block: torch.Tensor) -> Any:
    return json.loads(block.cpu().numpy().tobytes())


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
