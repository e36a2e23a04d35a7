"""The ranks that save and restore together, and what they have to agree on.

Only tensors are sent, and only by the constructor and by restoring, which all ranks call: a save
needs no collective.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpc_elastic import fence
from hpc_elastic.errors import CheckpointError


@dataclass(frozen=True)
class Group:
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
    def current(cls) -> Group:
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
    return fence.token()
