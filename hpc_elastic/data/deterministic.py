"""An all-reduce of gradients whose sums do not depend on DDP's buckets."""

from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel


def deterministic_allreduce(model: DistributedDataParallel) -> DistributedDataParallel:
    """Exchange each gradient by itself, so that an interrupted training continues bit for bit.

    A sum of floating-point numbers depends on the order of the additions. In a collective that
    order depends on the place in the buffer, and DistributedDataParallel rearranges its buckets
    after its first step. So from three workers on, the first step after a restart differs in the
    last bits from the same step of an uninterrupted training.

    With this both are equal, under the same world size and with deterministic algorithms (CPUs, or
    a GPU under ``torch.use_deterministic_algorithms``). It costs one collective per parameter
    instead of one per bucket, so it is for tests, small models, and the search for a fault. FSDP
    does not need it.

    Args:
        model: Call it once on every rank, before the first backward. This is the model's
            communication hook, so it can have no other.

    Returns:
        The model.
    """
    model.register_comm_hook(model.process_group, _exchange_each)
    return model


def _exchange_each(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch's stubs lack it
) -> torch.futures.Future[torch.Tensor]:
    def average(gradient: torch.Tensor) -> Any:
        gradient.div_(group.size())
        return dist.all_reduce(gradient, group=group, async_op=True).get_future()

    done = torch.futures.collect_all([average(gradient) for gradient in bucket.gradients()])
    return done.then(lambda _: bucket.buffer())
