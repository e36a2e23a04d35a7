"""A group of one member, which moves nothing and always succeeds."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work

from hpc_elastic.ft.pg_wrapper import ProcessGroupWrapper
from hpc_elastic.ft.work import DummyWork


class ProcessGroupDummy(ProcessGroupWrapper):
    """Pretend to do what a group of one member does, for code that insists on a group.

    Attributes:
        configure_count: How often it was configured.
    """

    def __init__(self, rank: int, world: int) -> None:
        """Be that one member.

        Raises:
            ValueError: another rank than 0, or another size than 1.
        """
        if (rank, world) != (0, 1):
            raise ValueError(f"rank={rank}, world={world}: a dummy group is rank 0 of 1")
        super().__init__()
        self.configure_count = 0

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Count the call."""
        self.configure_count += 1

    def abort(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""

    def errored(self) -> Exception | None:
        """Return None: nothing fails here."""
        return None

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing."""

    def size(self) -> int:
        """Return 1."""
        return 1

    def rank(self) -> int:
        """Return 0."""
        return 0

    def getBackendName(self) -> str:  # noqa: N802
        """Return its name."""
        return "hpc-elastic-dummy"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Work:
        if name in _COPIES and len(args) > 1:
            for to, source in zip(_flat(args[0]), _flat(args[1]), strict=False):
                to.copy_(source)
        return DummyWork(None if name in _NOTHING else args[0])


def _flat(tensors: Any) -> Iterable[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [t for each in tensors for t in _flat(each)]


_COPIES = {
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base",
    "alltoall", "alltoall_base", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor_coalesced", "_reduce_scatter_base",
}  # fmt: skip
_NOTHING = {"barrier", "send", "recv", "recv_anysource"}
