"""The ranks that save and restore together, and what they exchange.

Collectives are called by the constructor of a `Checkpointer` and by `load_latest`, which all ranks
call; a save needs none. Everything is sent as tensors: torch's object collectives would pickle.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
        run, nonce = group.broadcast_json([run, uuid.uuid4().hex[:15]])
        token = fencing.fencing_token()
        token = f"p{nonce}" if token is None else f"{token}u{owner.tag(run)}"
        return cls(group.rank, group.world_size, token, run)

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        """Return the value of one rank, which is plain JSON."""
        if self.world_size == 1:
            return value
        block = _bytes_of(value if self.rank == source else None)
        length = torch.tensor([len(block)], dtype=torch.int64, device=block.device)
        dist.broadcast(length, src=source)
        if self.rank != source:
            block = block.new_empty(int(length.item()))
        dist.broadcast(block, src=source)
        return _value_of(block)

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

    def gather_json(self, value: Any) -> list[Any]:
        """Return the value of every rank, by rank; they are plain JSON."""
        if self.world_size == 1:
            return [value]
        mine = _bytes_of(value)
        counts = [count for (count,) in self.gather([len(mine)])]
        padded = torch.nn.functional.pad(mine, (0, max(counts) - len(mine)))
        blocks = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(blocks, padded)
        return [_value_of(block[:n]) for block, n in zip(blocks, counts, strict=True)]


def _bytes_of(value: Any) -> torch.Tensor:
    data = bytearray(json.dumps(value).encode())
    return torch.frombuffer(data, dtype=torch.uint8).to(process_group.device())


def _value_of(block: torch.Tensor) -> Any:
    return json.loads(block.cpu().numpy().tobytes())
