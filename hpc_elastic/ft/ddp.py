"""DistributedDataParallel over the Manager's changing group."""

# No `from __future__ import annotations`: torch compares those of the hook with its own types.

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed import GradBucket, ReduceOp, Work  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn import parallel

from hpc_elastic.ft.process_group import ProcessGroupDummy

if TYPE_CHECKING:
    from hpc_elastic.ft.manager import Manager


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's DDP whose gradients the Manager averages; several buckets may be under way at once.

    Parameters are not broadcast: the Manager fetches them from a peer. Buckets never change their
    layout, so a replica that has just started has the same as one that has run for a week. As with
    torch's, a parameter that any replica uses in a step gets the mean on all of them, and with
    ``broadcast_buffers`` (the default) all get the buffers of the first participant: once a step,
    when it is committed.

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
        used = _UsedParameters(manager, [p for p in module.parameters() if p.requires_grad])
        super().__init__(module, process_group=used, find_unused_parameters=True, **kwargs)
        self._used = used
        if self.broadcast_buffers:
            used.share_buffers = partial(_share_buffers, manager, module, self.parameters_to_ignore)
        self.register_comm_hook(manager, _average)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module."""
        self._used.note_gradients()
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]


class _UsedParameters(ProcessGroupDummy):
    """DDP's group of one, in which it asks all replicas which parameters a step has used.

    The answer is a count for each parameter that has gradients, in torch's order. The only other
    collective of a step beside the hook's is one of the buffers, if there are any.

    A replica that adds nothing may have used a parameter that no participant has used. torch would
    leave it its own gradient there, or a zero; it keeps the earlier one, as the participants do.
    """

    def __init__(self, manager: "Manager", parameters: list[nn.Parameter]) -> None:
        super().__init__(0, 1)
        self._manager, self._parameters = manager, parameters
        self.share_buffers: Callable[[], None] = lambda: None
        self._gradients: list[torch.Tensor | None] = []
        """Those before the first forward pass since the last collective."""

    def note_gradients(self) -> None:
        """Note the gradients, before a forward pass; a participant needs no copies."""
        if not self._gradients and torch.is_grad_enabled():
            copies = not self._manager.is_participating()
            grads = [p.grad for p in self._parameters]
            self._gradients = [g if g is None or not copies else g.clone() for g in grads]

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Work:
        if name != "allreduce":
            return super()._call(name, *args, **kwargs)
        (counts,) = args[0]
        work = self._manager.allreduce(counts, reduce_op=ReduceOp.SUM)
        self.share_buffers()
        before, self._gradients = self._gradients, []
        if not self._manager.is_participating():
            _after_backward(lambda: self._restore_gradients(before, counts.tolist()))
        return work

    def _restore_gradients(self, before: list[torch.Tensor | None], counts: list[int]) -> None:
        for p, grad, count in zip(self._parameters, before, counts, strict=True):
            if not count:  # without a copy, participation was not known yet: nothing was summed
                p.grad = torch.zeros_like(p) if grad is not None and grad is p.grad else grad


def _after_backward(call: Callable[[], None]) -> None:
    """Call a function after DDP has written the gradients; torch has no public way."""
    queue = Variable._execution_engine.queue_callback
    queue(lambda: queue(call))  # DDP queues its own between the two


def _average(manager: "Manager", bucket: GradBucket) -> Future[torch.Tensor]:
    work = manager.allreduce(bucket.buffer())
    return cast("Future[torch.Tensor]", work.get_future())


def _share_buffers(manager: "Manager", module: nn.Module, ignored: Collection[str] = ()) -> None:
    """Send the first participant's buffers; the others copy them when the step is committed."""
    buffers = [b.detach() for name, b in module.named_buffers() if name not in ignored]
    if not buffers:
        return
    packed = torch.cat([b.reshape(-1).view(torch.uint8) for b in buffers])
    rank = manager.participating_rank()
    if rank != 0:
        packed.zero_()
    manager.allreduce(packed, reduce_op=ReduceOp.SUM)  # of bytes: only one adds any

    def copy_received() -> None:
        for b, piece in zip(buffers, torch.split(packed, [b.nbytes for b in buffers]), strict=True):
            b.copy_(piece.clone().view(b.dtype).view_as(b))

    if rank != 0:
        manager.call_at_commit(copy_received)


class PureDistributedDataParallel(nn.Module):
    """Data parallelism without torch's reducer: one collective per parameter, and slow.

    All parameters are averaged at the end of a backward pass that gives one of them a gradient, so
    replicas may use different ones. Buffers are those of the first participant, as in
    `DistributedDataParallel`.

    Args:
        manager: The Manager.
        module: The model.
    """

    def __init__(self, manager: "Manager", module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._manager = manager
        self._is_queued = False
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._queue_average)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        self._is_queued = False  # if the last backward pass has failed
        return self.module(*args, **kwargs)

    def _queue_average(self, _: torch.Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            _after_backward(self._average)

    def _average(self) -> None:
        """Average what any participant has; more may be added to it then, or it is clipped."""
        self._is_queued = False
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        has = [p.grad is not None for p in parameters]
        counts = torch.tensor(has, dtype=torch.int32, device=parameters[0].device)
        self._manager.allreduce(counts, reduce_op=ReduceOp.SUM).wait()
        works = []
        for p, count in zip(parameters, counts.tolist(), strict=True):
            if not count:  # a spare's own
                p.grad = None
            else:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                works.append(self._manager.allreduce(p.grad))
        _share_buffers(self._manager, self.module)
        for work in works:
            work.wait()
