"""The ranks that save and restore together, and what they have to agree on.

Only tensors are sent, and only by the constructor and by restoring, which all ranks call: a save
needs no collective.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpc_elastic.errors import CheckpointError
from hpc_elastic.run import fencing


@dataclass(frozen=True)
class RankGroup:
    """This process in its group.

    Attributes:
        rank: From 0.
        world_size: At least 1.
        token: Tells this group's staging folders from those of every other group, earlier ones of
            the same run included: lower-case letters and digits.
    """

    rank: int
    world_size: int
    token: str

    @classmethod
    def current(cls) -> RankGroup:
        """Return this process's group: the default process group, or itself alone.

        Collective, where torch.distributed is initialised.

        Raises:
            CheckpointError: there are several ranks, and torch.distributed is not initialised.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise CheckpointError(
                    f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but there is no process group: make "
                    "the Checkpointer after torch.distributed.init_process_group()"
                )
            return cls(0, 1, _record_token() or f"p{uuid.uuid4().hex[:16]}")
        number = int(uuid.uuid4().hex[:15], 16)
        token = f"p{_told_by_first(number):x}"
        return cls(dist.get_rank(), dist.get_world_size(), _record_token() or token)

    def told_by_first(self, value: int) -> int:
        """Return rank 0's value (every rank)."""
        return value if self.world_size == 1 else _told_by_first(value)

    def all_say(self, yes: bool) -> bool:
        """Tell whether all ranks say yes (every rank)."""
        if self.world_size == 1:
            return yes
        vote = torch.tensor([int(yes)], dtype=torch.int64, device=_device())
        dist.all_reduce(vote, op=dist.ReduceOp.MIN)
        return bool(vote.item())


def _told_by_first(value: int) -> int:
    told = torch.tensor([value], dtype=torch.int64, device=_device())
    dist.broadcast(told, src=0)
    return int(told.item())


def _device() -> torch.device:
    """Return a device whose tensors the default group can send."""
    backend = str(dist.get_backend())
    if "nccl" in backend and "gloo" not in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _record_token() -> str | None:
    """Return the name of the worker group among those of its run; None outside of a run."""
    return fencing.fencing_token()


# ---- Numbers and bytes between the ranks: only as tensors, and only where all ranks call
# Nothing is pickled, as torch's object collectives would.


def gather(group: RankGroup, row: Sequence[int]) -> list[list[int]]:
    """Return the row of every rank, by rank (every rank).

    Args:
        group: All ranks.
        row: Of the same length on each rank; from -2^63 to below 2^63.
    """
    if group.world_size == 1:
        return [list(row)]
    mine = torch.tensor(list(row), dtype=torch.int64, device=device())
    rows = [torch.empty_like(mine) for _ in range(group.world_size)]
    dist.all_gather(rows, mine)
    return [row.tolist() for row in rows]


def gather_all(group: RankGroup, rows: Sequence[Sequence[int]], width: int) -> list[list[int]]:
    """Return the rows of all ranks in one list (every rank).

    Args:
        group: All ranks.
        rows: Any number of them.
        width: Of each row, the same on every rank.
    """
    counts = [count for (count,) in gather(group, [len(rows)])]
    flat = [number for row in rows for number in row]
    flat += [0] * (max(counts) * width - len(flat))
    if not flat:
        return []
    return [
        list(numbers[i * width : (i + 1) * width])
        for numbers, count in zip(gather(group, flat), counts, strict=True)
        for i in range(count)
    ]


def tell(group: RankGroup, source: int, data: bytes = b"") -> bytes:
    """Return what one rank has to say to all (every rank).

    Args:
        group: All ranks.
        source: The rank that tells.
        data: What it tells; of the others, nothing counts.
    """
    if group.world_size == 1:
        return data
    length = torch.tensor([len(data)], dtype=torch.int64, device=device())
    dist.broadcast(length, src=source)
    block = torch.empty(int(length.item()), dtype=torch.uint8, device=device())
    if not len(block):
        return b""
    if group.rank == source:
        block.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(block, src=source)
    return block.cpu().numpy().tobytes()


def device() -> torch.device:
    """Return a device whose tensors the default group can send."""
    backend = str(dist.get_backend())
    if "nccl" in backend and "gloo" not in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Route:
    """The way of some data from one rank to others: to all, if there are several."""

    def __init__(self, group: RankGroup, source: int, sinks: Iterable[int]) -> None:
        self._group = group
        self.source = source
        self.sinks = sorted(set(sinks) - {source})

    @property
    def is_mine(self) -> bool:
        """Whether this rank has to take part."""
        among = self._group.rank == self.source or self._group.rank in self.sinks
        return bool(self.sinks) and (among or len(self.sinks) > 1)

    def carry(self, block: torch.Tensor) -> None:
        """Fill a block of bytes on the CPU with the source's (ranks whose route it is)."""
        moved = block.to(device())
        if len(self.sinks) > 1:
            dist.broadcast(moved, src=self.source)
        elif self._group.rank == self.source:
            dist.send(moved, dst=self.sinks[0])
        else:
            dist.recv(moved, src=self.source)
        if moved.device != block.device:
            block.copy_(moved)
