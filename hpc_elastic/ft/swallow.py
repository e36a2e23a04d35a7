"""Groups that wrap another one: errors swallowed, errors planted, or all handed to a Manager."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceOp, Work

from hpc_elastic.ft.pg_base import ProcessGroup
from hpc_elastic.ft.pg_wrapper import ProcessGroupWrapper
from hpc_elastic.ft.work import DummyWork

if TYPE_CHECKING:
    from hpc_elastic.ft.manager import Manager

_log = logging.getLogger(__name__)


class ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper):
    """Swallow errors: a failed operation, and all later ones, seem to succeed and do nothing.

    `error` tells what happened; `configure` begins anew. So a model's code needs no handling of
    errors, and who drives it looks once a step.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg=pg)
        self._error: Exception | None = None

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Forget the error, and configure the wrapped group."""
        self._error = None
        super().configure(*args, **kwargs)

    def report_error(self, e: Exception) -> None:
        """Record an error: nothing is done any more until `configure`."""
        self._error = e

    def error(self) -> Exception | None:
        """Return the last error since `configure`; None if there was none."""
        return self._error

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Work:
        result = args[0] if args else None
        if self._error is not None:
            return DummyWork(result)
        try:
            return _SwallowingWork(super()._call(name, *args, **kwargs), result, self.report_error)
        except Exception as e:
            _log.warning("%s failed, and is swallowed: %s", name, e)
            self.report_error(e)
            return DummyWork(result)


class _SwallowingWork(Work):
    def __init__(self, work: Work, result: Any, report: Callable[[Exception], None]) -> None:
        super().__init__()
        self._work = work
        self._result = result
        self._report = report

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            return self._work.wait() if timeout is None else self._work.wait(timeout)
        except Exception as e:
            self._report(e)
            return True

    def get_future(self) -> Any:
        def swallow(future: torch.futures.Future[Any]) -> Any:
            try:
                return future.value()
            except Exception as e:
                self._report(e)
                return self._result

        return self._work.get_future().then(swallow)


class FakeProcessGroupWrapper(ProcessGroupWrapper):
    """Plant errors, for tests of whoever uses a group."""

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg=pg)
        self._future_error: Exception | None = None

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Forget the planted error, and configure the wrapped group."""
        self._future_error = None
        super().configure(*args, **kwargs)

    def report_future_error(self, e: Exception) -> None:
        """Let the next operation fail with this, in its `wait` and its future."""
        self._future_error = e

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Work:
        work = super()._call(name, *args, **kwargs)
        planted, self._future_error = self._future_error, None
        return work if planted is None else _FailedWork(work, planted)


class _FailedWork(Work):
    def __init__(self, work: Work, error: Exception) -> None:
        super().__init__()
        self._work = work
        self._error = error

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()
        raise self._error

    def get_future(self) -> Any:
        def fail(future: torch.futures.Future[Any]) -> Any:
            raise self._error

        return self._work.get_future().then(fail)


class ManagedProcessGroup(ProcessGroupWrapper):
    """Hand allreduces to a Manager: a group whose size is the number of contributors.

    Errors go to the Manager, and are told by its `should_commit`.
    """

    def __init__(self, manager: Manager) -> None:
        super().__init__(pg=manager._pg)
        self._manager = manager

    def allreduce(self, tensors: Any, opts: Any = None, **options: Any) -> Work:  # type: ignore[override]
        """Reduce one tensor over those that contribute.

        Args:
            tensors: One tensor, or a list of one.
            opts: torch's AllreduceOptions, or a ReduceOp; the sum by default.
            options: Of torch's other forms of the call; ``op`` counts.

        Raises:
            ValueError: several tensors: give each to a call of its own.
        """
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if len(listed) != 1:
            raise ValueError(f"{len(listed)} tensors: a Manager reduces one a call")
        op = opts.reduceOp if isinstance(opts, AllreduceOptions) else options.get("op", opts)
        return self._manager.allreduce(listed[0], reduce_op=ReduceOp.SUM if op is None else op)

    def size(self) -> int:
        """Return the number of contributors."""
        return self._manager.num_participants()
