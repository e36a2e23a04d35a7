"""A step's collectives over the replica groups, whose errors cost the step and nothing else."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TypeVar, cast

import torch
from torch.distributed import ReduceOp, Work
from torch.distributed.distributed_c10d import AllreduceOptions
from torch.futures import Future

from hpc_elastic.ft.background import Background
from hpc_elastic.ft.one_step import Step
from hpc_elastic.ft.told import Told
from hpc_elastic.ft.work import DummyWork, ManagedWork, swallow_errors

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Reducing(Told):
    """The part of `Manager` between `start_quorum` and `should_commit`."""

    _entering: Background | None = None

    def _ready(self) -> Step:
        """Wait for the quorum, and return the step that is under way; see `Manager`."""
        raise NotImplementedError

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,
        reduce_op: ReduceOp | ReduceOp.RedOpType = ReduceOp.AVG,
    ) -> Work:
        """Reduce a tensor over all replica groups, in place.

        The mean is over those who contribute; others add zero. An error is recorded, never raised;
        after the first one this does nothing any more, and the tensor's content is of no use.

        Args:
            tensor: The same shape and type on all groups.
            should_quantize: Accepted, without effect.
            reduce_op: AVG (floating point only), or another that the process group has.

        Returns:
            Work whose future holds the tensor; neither holds errors.

        Raises:
            ValueError: the mean of integers was asked for.
            RuntimeError, TimeoutError, LeftQuorumError: as `wait_quorum`.
        """
        is_mean = reduce_op == ReduceOp.AVG
        if is_mean and not torch.is_floating_point(tensor):
            raise ValueError(f"the mean of {tensor.dtype} is not defined: use ReduceOp.SUM")
        step = self._ready()
        if step.error is not None:
            return DummyWork(tensor)
        if self._share.rank is None:
            tensor.zero_()
        try:
            options = AllreduceOptions()
            options.reduceOp = cast(ReduceOp, ReduceOp.SUM if is_mean else reduce_op)
            work = self._pg.allreduce([tensor], options)
        except Exception as e:
            self._break(step, e)
            return DummyWork(tensor)
        divisor = self._share.size if is_mean else 1
        managed = ManagedWork(work, tensor, divisor, lambda e: self._break(step, e))
        step.used_device |= tensor.device.type != "cpu"
        step.works.append(managed)
        return managed

    def report_error(self, e: Exception) -> None:
        """Say that this step's gradient is of no use: it is not committed, here or elsewhere.

        Args:
            e: Why. All members of the quorum are told at once.
        """
        if self._this is not None:
            self._break(self._this, e)

    def _break(self, step: Step, error: Exception) -> None:
        """Record an error of a step, on any thread, and tell the other members."""
        if step.fail(error):
            _log.info("step %d failed: %s", self._newest.step, error)
            if step is self._this and self._entering is None:
                self._membership.report(self._link.quorum_id, f"a member met an error: {error}")

    def wrap_future(
        self, fut: Future[T], default: T, timeout: timedelta | None = None
    ) -> Future[T]:
        """Return a future that holds a default where the other fails, which is then reported.

        Args:
            fut: The one to follow.
            default: Its value after an error, or when it takes too long.
            timeout: None: the Manager's.
        """
        step = self._this
        seconds = self._limits.timeout_s if timeout is None else timeout.total_seconds()

        def failed(error: Exception) -> None:
            if step is not None:
                self._break(step, error)

        return swallow_errors(fut, default, seconds, failed)
