"""Bit for bit the same after a restart: gradients that are added up in an order of their own.

A sum of floating-point numbers depends on the order in which they are added, and in a collective
that order depends on where in the buffer a number lies. DistributedDataParallel packs gradients
into buckets, and packs them anew after its first step, once it has seen in which order they come.
So from three workers on, a step that is the first one after a restart differs in the last bits from
the same step in a training that was not interrupted. (Two numbers have one sum, in either order.)

This module imports torch; the others of this package do not.
"""

from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel


def repeatable(model: DistributedDataParallel) -> DistributedDataParallel:
    """Have each gradient exchanged by itself, so that its sum does not depend on the bucket.

    With it, a training that is interrupted goes on bit for bit as if it were not, under the same
    world size, with algorithms that are deterministic themselves: CPUs, or a GPU under
    ``torch.use_deterministic_algorithms``. It costs a collective for each parameter instead of one
    for each bucket, so it is for tests, small models, and the search for a fault. FSDP needs none.

    Args:
        model: To be called on every rank, before the first backward, once. Its own communication
            hook is this, so it can have no other.

    Returns:
        The model.
    """
    model.register_comm_hook(model.process_group, _exchange_each)
    return model


def _exchange_each(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch's stubs lack it
) -> torch.futures.Future[torch.Tensor]:
    def exchange(gradient: torch.Tensor) -> Any:
        gradient.div_(group.size())
        return dist.all_reduce(gradient, group=group, async_op=True).get_future()

    done = torch.futures.collect_all([exchange(gradient) for gradient in bucket.gradients()])
    return done.then(lambda _: bucket.buffer())
