"""DistributedDataParallel over the Manager's changing group."""

# No `from __future__ import annotations`: torch compares those of the hook with its own types.

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn import parallel

from hpc_elastic.ft.process_group import ProcessGroupDummy

if TYPE_CHECKING:
    from hpc_elastic.ft.manager import Manager


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's DDP whose gradients the Manager averages; several buckets may be under way at once.

    Parameters are not broadcast: the Manager fetches them from a peer. Buckets never change their
    layout, so a replica that has just started has the same as one that has run for a week.

    Args:
        manager: The Manager.
        module: The model, the same on all groups.
        kwargs: As torch's; ``find_unused_parameters`` is always True, since torch else changes the
            layout in the second step; ``process_group`` is the Manager's.

    Raises:
        ValueError: One of these two was given another value.
    """

    def __init__(self, manager: "Manager", module: nn.Module, **kwargs: Any) -> None:
        if not kwargs.pop("find_unused_parameters", True) or kwargs.get("static_graph"):
            raise ValueError(
                "find_unused_parameters=False, static_graph=True: torch would change the layout of "
                "the buckets after one step, unlike a replica that joins later; leave them out"
            )
        if kwargs.pop("process_group", None) is not None:
            raise ValueError("process_group: give it to the Manager instead")
        super().__init__(
            module,
            process_group=ProcessGroupDummy(0, 1),  # for the constructor of DDP
            find_unused_parameters=True,
            **kwargs,
        )
        self.register_comm_hook(manager, _average)


def _average(manager: "Manager", bucket: GradBucket) -> Future[torch.Tensor]:
    work = manager.allreduce(bucket.buffer())
    return cast("Future[torch.Tensor]", work.get_future())


class PureDistributedDataParallel(nn.Module):
    """Data parallelism without torch's reducer: one collective per parameter, and slow.

    Args:
        manager: The Manager.
        module: The model.
    """

    def __init__(self, manager: "Manager", module: nn.Module) -> None:
        super().__init__()
        self.module = module

        def average(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                manager.allreduce(parameter.grad)

        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(average)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)
