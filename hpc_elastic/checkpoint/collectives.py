"""The ranks that save and restore together, and what they exchange.

Collectives are called by the constructor of a `Checkpointer` and by `load_latest`, which all ranks
call; a save needs none. Everything is sent as tensors: torch's object collectives would pickle.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpc_elastic.checkpoint import owner
from hpc_elastic.errors import CheckpointError
from hpc_elastic.run import fencing
from hpc_elastic.worker import process_group


@dataclass(frozen=True)
class RankGroup:
    """This process in its group; every method is for all ranks together.

    Attributes:
        token: Distinguishes this group's staging folders from those of every other group, of
            this run or of another: lower-case letters and digits.
        run: Rank 0's run; `owner.NO_RUN` outside of one.
    """

    rank: int
    world_size: int
    token: str
    run: str = owner.NO_RUN

    @classmethod
    def current(cls) -> RankGroup:
        """Return this process's group: the default process group, or itself alone.

        Collective, where torch.distributed is initialised. Raises CheckpointError if there are
        several ranks, and it is not.
        """
        size = process_group.size()
        if size is not None:
            group = cls(dist.get_rank(), size, "")
        elif int(os.environ.get("WORLD_SIZE", "1")) == 1:
            group = cls(0, 1, "")
        else:
            raise CheckpointError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but there is no process group: make "
                "the Checkpointer after torch.distributed.init_process_group()"
            )
        run = owner.Owner.current().run if group.rank == 0 else ""
        run = group.broadcast_bytes(0, run.encode()).decode()
        number = group.broadcast_int(int(uuid.uuid4().hex[:15], 16))
        token = fencing.fencing_token()
        token = f"p{number:x}" if token is None else f"{token}u{owner.tag(run)}"
        return cls(group.rank, group.world_size, token, run)

    def broadcast_int(self, value: int) -> int:
        """Return rank 0's value."""
        return self.broadcast_row([value])[0]

    def broadcast_row(self, row: Sequence[int]) -> list[int]:
        """Return rank 0's row, which has the same length on every rank."""
        if self.world_size == 1:
            return list(row)
        return process_group.broadcast_row(row)

    def broadcast_bytes(self, source: int, data: bytes = b"") -> bytes:
        """Return the bytes of one rank."""
        if self.world_size == 1:
            return data
        length = torch.tensor([len(data)], dtype=torch.int64, device=process_group.device())
        dist.broadcast(length, src=source)
        block = torch.empty(int(length.item()), dtype=torch.uint8, device=process_group.device())
        if not len(block):
            return b""
        if self.rank == source:
            block.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(block, src=source)
        return block.cpu().numpy().tobytes()

    def all_agree(self, yes: bool) -> bool:
        """Return whether all ranks vote yes."""
        return all(vote for (vote,) in self.gather([int(yes)]))

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        """Return the row of every rank, by rank; all have the same length, and int64 numbers."""
        if self.world_size == 1:
            return [list(row)]
        mine = torch.tensor(row, dtype=torch.int64, device=process_group.device())
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(rows, mine)
        return [row.tolist() for row in rows]

    def gather_rows(self, rows: Sequence[Sequence[int]], width: int) -> list[list[int]]:
        """Return the rows of all ranks in one list; each rank has any number of this width."""
        counts = [count for (count,) in self.gather([len(rows)])]
        flat = [number for row in rows for number in row]
        flat += [0] * (max(counts) * width - len(flat))
        if not flat:
            return []
        return [
            list(numbers[i * width : (i + 1) * width])
            for numbers, count in zip(self.gather(flat), counts, strict=True)
            for i in range(count)
        ]
