"""Process groups that are aborted and reconfigured within one process, and their works and errors.

The names are torchft's. `ProcessGroupGloo` (`gloo`) and `ProcessGroupNCCL` (`nccl`) do the work, on
top of `reconfigurable`; the groups of this module wrap or imitate one. torchft's groups in a
subprocess (Baby*) are these as well: both backends can be aborted in their own process.
"""

# ruff: noqa: D102  (the methods override documented ones)

from __future__ import annotations

import importlib
import logging
import math
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed.distributed_c10d import AllreduceOptions, BroadcastOptions, ReduceOp, Work
from torch.futures import Future

from hpc_elastic.block_int8 import dequantize, quantize
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.ft import _unavailable
from hpc_elastic.ft.futures import make_future

__all__ = [
    "AbortedError",
    "CollectiveTimeoutError",
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "ManagedProcessGroup",
    "NotConfiguredError",
    "ProcessGroup",
    "ProcessGroupBabyGloo",  # noqa: F822 - by __getattr__
    "ProcessGroupBabyNCCL",  # noqa: F822 - by __getattr__
    "ProcessGroupDummy",
    "ProcessGroupError",
    "ProcessGroupGloo",  # noqa: F822 - by __getattr__
    "ProcessGroupNCCL",  # noqa: F822 - by __getattr__
    "ProcessGroupWrapper",
]

DEFAULT_TIMEOUT = timedelta(seconds=60)
_BACKENDS = {
    f"ProcessGroup{kind}{name}": f"hpc_elastic.ft.{name.lower()}"
    for kind in ("", "Baby")
    for name in ("Gloo", "NCCL")
}
MAX_QUANTIZED = 7
"""Members up to which an exchange of all codes is less than a float32 ring allreduce."""
_log = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    """Import a backend on first use: torchft has them in this module, which they are built on."""
    if name not in _BACKENDS:
        return _unavailable.find_name(__name__, name)
    return getattr(importlib.import_module(_BACKENDS[name]), name)


# ---- errors, derived from RuntimeError as torch's are, so scripts that expect those need no change


class ProcessGroupError(HpcElasticError, RuntimeError):
    """An operation of a process group failed."""


class NotConfiguredError(ProcessGroupError):
    """The group has no members yet, or was shut down: call `configure` first."""


class AbortedError(ProcessGroupError):
    """The group was aborted: pending operations have failed, and `configure` forms a new one."""


class CollectiveTimeoutError(ProcessGroupError, TimeoutError):
    """An operation, or `configure`, took too long; the message names it, its group and seconds."""


# ---- groups


class ProcessGroup(TorchProcessGroup):
    """Base of all process groups of this package: torch's, which can be reconfigured in place.

    A script, DDP or a `DeviceMesh` holds one object for the whole training; the Manager calls
    `configure` whenever there is a new quorum. Rank and size change then, so do not keep them.

    The collectives take the arguments of `torch.distributed.ProcessGroup`'s methods of the same
    name (lists of tensors, and an options object), and return a Work.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group_name: str | None = None

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Form the group of a new quorum; all members call it, and the group before is given up.

        Args:
            store_addr: ``host:port/prefix`` of a TCPStore; the prefix must never have been used.
            replica_id: Name of this member, for messages.
            rank: Of this member, from 0.
            world_size: Number of members, at least 1.
            quorum_id: For messages.
            group_rank: This worker's rank inside its replica group.
            group_world_size: Number of workers of a replica group.
            global_ranks: The members' ranks in the whole job, for torch's flight recorder.

        Raises:
            CollectiveTimeoutError: A member did not come in time; the message names it. Request
                another quorum.
            AbortedError: `abort` was called meanwhile.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be configured")

    def abort(self, errored: bool = True) -> None:
        """Fail everything that is pending (any thread); the next `configure` forms a new group.

        Args:
            errored: Whether it is an error, which `errored` returns until then.
        """

    def shutdown(self) -> None:
        """Leave the group on purpose; what has been sent still arrives."""

    def errored(self) -> Exception | None:
        """Return why the group has to be reconfigured; None if it need not be."""
        return None

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of each later operation and of each later `configure`."""
        raise NotImplementedError(f"{type(self).__name__} has no time-out")

    def size(self) -> int:
        """Return the number of members."""
        raise NotImplementedError(f"{type(self).__name__} has no size")

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return the name under which `register` registers it."""
        raise NotImplementedError(f"{type(self).__name__} has no name")

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> Work:
        """Broadcast one tensor from the rank ``root``."""
        opts = BroadcastOptions()
        opts.rootRank = root
        return self.broadcast([tensor], opts)

    def register(self, name: str) -> ProcessGroup:
        """Register the group with torch, once, for DeviceMesh and functional collectives.

        torch's default group must be initialized. For torch it is a group of this rank alone,
        since a mesh cannot hold a size that changes.

        Args:
            name: Unique in this process.

        Returns:
            This very object, with a group name.
        """
        group_name = f"{self.getBackendName()}:{name}"
        devices = ["cpu"] + [d for d in ("cuda", "xpu") if getattr(torch, d).is_available()]
        dist.Backend.register_backend(group_name, lambda *_: self, devices=devices)
        made = dist.new_group(
            ranks=[dist.get_rank()], backend=group_name, group_desc=group_name,
            timeout=timedelta(minutes=1),  # not used
        )  # fmt: skip
        return cast(ProcessGroup, made)

    def unregister(self) -> None:
        """Undo `register`."""
        dist.destroy_process_group(self)

    @property
    def group_name(self) -> Any:
        """torch's name of the group, once it is registered."""
        if self._group_name is None:
            raise ValueError("the process group has no name: call register() first")
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class ProcessGroupWrapper(ProcessGroup):
    """A group that passes every operation to another one; subclasses change some of them.

    All operations go through `_call`, so a subclass changes all of them in one method.
    """

    def __init__(
        self, timeout: timedelta = DEFAULT_TIMEOUT, pg: ProcessGroup | None = None
    ) -> None:
        """Wrap ``pg``, or nothing if the subclass brings a group of its own."""
        super().__init__(0, 1)
        self._pg = pg
        self._timeout = timeout

    @property
    def parent(self) -> TorchProcessGroup:
        """The group that does the operations; raise NotConfiguredError if there is none yet."""
        return self._wrapped()

    def configure(self, *args: Any, **kwargs: Any) -> None:
        self._wrapped().configure(*args, **kwargs)

    def abort(self, errored: bool = True) -> None:
        self._wrapped().abort(errored)

    def shutdown(self) -> None:
        self._wrapped().shutdown()

    def errored(self) -> Exception | None:
        return self._wrapped().errored()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._wrapped().set_timeout(timeout)

    def size(self) -> int:
        return self.parent.size()

    def rank(self) -> int:
        """Return this member's rank; 0 as long as there are no members."""
        try:
            return self.parent.rank()
        except RuntimeError:
            return 0

    def getBackendName(self) -> str:  # noqa: N802
        return self._wrapped().getBackendName()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pg={self._pg})"

    def _wrapped(self) -> ProcessGroup:
        if self._pg is None:
            what = f"{type(self).__name__} wraps no group"
            raise NotConfiguredError(f"{what}: give one, or call configure() first")
        return self._pg

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Work:
        work: Work = getattr(self.parent, name)(*args, **kwargs)
        return work


def _operation(name: str) -> Callable[..., Work]:
    def operation(self: ProcessGroupWrapper, *args: Any, **kwargs: Any) -> Work:
        return self._call(name, *args, **kwargs)

    operation.__name__ = name
    operation.__doc__ = f"Start `torch.distributed.ProcessGroup.{name}` (see `_call`)."
    return operation


for _name in (
    "allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "_allgather_base", "alltoall", "alltoall_base", "barrier",
    "broadcast", "gather", "scatter", "reduce", "reduce_scatter",
    "reduce_scatter_tensor_coalesced", "_reduce_scatter_base", "send", "recv", "recv_anysource",
):  # fmt: skip
    # torch's C++ code, and torch.distributed, call all overloads of these by name
    setattr(ProcessGroupWrapper, _name, _operation(_name))


class ProcessGroupDummy(ProcessGroupWrapper):
    """A group of one member that moves nothing and always succeeds.

    For code that insists on a group.

    Attributes:
        configure_count: Number of calls of `configure`.
    """

    def __init__(self, rank: int, world: int) -> None:
        """Create the group.

        Raises:
            ValueError: The rank is not 0, or the size is not 1.
        """
        if (rank, world) != (0, 1):
            raise ValueError(f"rank={rank}, world={world}: a dummy group is rank 0 of 1")
        super().__init__(pg=ProcessGroup(0, 1))
        self.configure_count: int = 0

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Count the call."""
        self.configure_count += 1

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing."""

    def size(self) -> int:
        """Return 1."""
        return 1

    def getBackendName(self) -> str:  # noqa: N802
        """Return its name."""
        return "hpc-elastic-dummy"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Work:
        if name in _COPYING and len(args) > 1:
            for to, source in zip(_flat(args[0]), _flat(args[1]), strict=False):
                to.copy_(source)
        return DummyWork(None if name in _WITHOUT_RESULT else args[0])


def _flat(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    is_list = isinstance(tensors, Iterable)  # else None, the options of a barrier
    return [t for each in tensors for t in _flat(each)] if is_list else []


_COPYING = {
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base",
    "alltoall", "alltoall_base", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor_coalesced", "_reduce_scatter_base",
}  # fmt: skip
_WITHOUT_RESULT = {"barrier", "send", "recv", "recv_anysource"}


class ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper):
    """A group whose failed operation, and all later ones, seem to succeed and do nothing.

    `error` returns what happened, and `configure` clears it. So a model's code needs no error
    handling, and its caller checks once a step.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg=pg)
        self._error: Exception | None = None

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Clear the error, and configure the wrapped group."""
        self._error = None
        super().configure(*args, **kwargs)

    def report_error(self, e: Exception) -> None:
        """Record an error: operations do nothing until `configure`."""
        self._error = e

    def error(self) -> Exception | None:
        """Return the last error since `configure`; None if there was none."""
        return self._error

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Work:
        result = args[0] if args else None
        if self._error is not None:
            return DummyWork(result)

        def swallow(call: Callable[[], Any]) -> Any:
            try:
                return call()
            except Exception as e:
                self.report_error(e)
                return result

        try:
            return AlteredWork(super()._call(name, *args, **kwargs), swallow)
        except Exception as e:
            _log.warning("%s failed, and its error is swallowed: %s", name, e)
            self.report_error(e)
            return DummyWork(result)


class AlteredWork(Work):
    """A work whose outcome a function may alter: it gets a call that returns it or raises."""

    def __init__(self, work: Work, alter: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._work = work
        self._alter = alter

    def wait(self, timeout: timedelta | None = None) -> bool:
        work = self._work
        self._alter(lambda: work.wait() if timeout is None else work.wait(timeout))
        return True

    def get_future(self) -> Any:
        return self._work.get_future().then(lambda future: self._alter(future.value))


def sum_quantized(group: ProcessGroup, tensor: torch.Tensor) -> Work:
    """Begin to sum a floating-point tensor over a group, in place, by 8-bit integers.

    Each member gathers the codes of all, and adds them in float32 in the same order, so all get the
    same sum. A member receives 1.016 (n - 1) bytes a value, a ring allreduce of float32 8 (n - 1) /
    n: a quarter of that in a group of two, half in one of four.
    """
    codes, scales = quantize(tensor)
    mine = torch.cat([codes.view(-1).view(torch.uint8), scales.view(-1).view(torch.uint8)])
    gathered = [torch.zeros_like(mine) for _ in range(group.size())]

    def finish(end: Callable[[], Any]) -> list[torch.Tensor]:
        end()
        total = torch.zeros(tensor.shape, device=tensor.device)
        for part in gathered:
            theirs, scaled = part[: codes.numel()], part[codes.numel() :]
            total += dequantize(
                theirs.view(torch.int8).view_as(codes),
                scaled.view(torch.float32).view_as(scales),
                tensor.shape,
            )
        tensor.copy_(total)
        return [tensor]

    return AlteredWork(group.allgather([gathered], [mine]), finish)


class FakeProcessGroupWrapper(ProcessGroupWrapper):
    """A group with planted errors, for tests of code that uses a group."""

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg=pg)
        self._future_error: Exception | None = None

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Clear the planted error, and configure the wrapped group."""
        self._future_error = None
        super().configure(*args, **kwargs)

    def report_future_error(self, e: Exception) -> None:
        """Let the next operation fail with this error, in its `wait` and its future."""
        self._future_error = e

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Work:
        work = super()._call(name, *args, **kwargs)
        planted, self._future_error = self._future_error, None
        if planted is None:
            return work

        def fail(call: Callable[[], Any]) -> Any:
            call()
            raise planted

        return AlteredWork(work, fail)


class AllreduceManager(Protocol):
    """The part of `hpc_elastic.ft.Manager` that `ManagedProcessGroup` uses."""

    _pg: ProcessGroup

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: ReduceOp | ReduceOp.RedOpType) -> Work:
        """Reduce a tensor over the participating replica groups."""

    def num_participants(self) -> int:
        """Return the number of participating replica groups."""


class ManagedProcessGroup(ProcessGroupWrapper):
    """A group that passes allreduces to a Manager; its size is the number of participants.

    The Manager records errors, and its `should_commit` returns False.
    """

    def __init__(self, manager: AllreduceManager) -> None:
        super().__init__(pg=manager._pg)
        self._manager = manager

    def allreduce(self, tensors: Any, opts: Any = None, **options: Any) -> Work:  # type: ignore[override]
        """Reduce one tensor over the participants.

        Args:
            tensors: One tensor, or a list of one.
            opts: torch's AllreduceOptions, or a ReduceOp; the sum by default.
            options: Of torch's other overloads; only ``op`` counts.

        Raises:
            ValueError: There are several tensors: call it once for each.
        """
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if len(listed) != 1:
            raise ValueError(f"{len(listed)} tensors: a Manager reduces one tensor per call")
        op = opts.reduceOp if isinstance(opts, AllreduceOptions) else options.get("op", opts)
        return self._manager.allreduce(listed[0], reduce_op=ReduceOp.SUM if op is None else op)

    def size(self) -> int:
        """Return the number of participants."""
        return self._manager.num_participants()


# ---- works


class DummyWork(Work):
    """A completed work."""

    def __init__(self, result: object) -> None:
        super().__init__()
        self._future: Future[object] = Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future[object]:
        return self._future


@dataclass(frozen=True)
class MemberPlace:
    """One member's place in a group: the arguments of `ProcessGroup.configure`."""

    store_addr: str
    replica_id: str
    rank: int
    world_size: int
    quorum_id: int | None = None
    group_rank: int | None = None
    group_world_size: int | None = None
    global_ranks: list[int] | None = None

    def __str__(self) -> str:
        quorum = "" if self.quorum_id is None else f" of quorum {self.quorum_id}"
        member = f"rank {self.rank} of {self.world_size}, {self.replica_id}"
        return f"the process group{quorum} ({member}) at {self.store_addr}"


class LiveGroup(ABC):
    """A group of torch's behind a `ProcessGroup`, with what is needed to end it.

    ``is_at_rest``: it has ended, and operations that have not failed are stuck in the backend.
    """

    def __init__(self, place: MemberPlace) -> None:
        self.place = place
        self.end_error: Exception | None = None
        self.is_at_rest = False
        self.pending: set[ManagedWork] = set()

    @property
    @abstractmethod
    def pg(self) -> TorchProcessGroup:
        """torch's group, which does the operations."""

    @abstractmethod
    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of later operations."""

    def watch_work(self, work: Work, operation: str) -> ManagedWork:
        """Return an operation that has just started here, whose errors name it and the group."""
        return ManagedWork(work, operation, self)

    @abstractmethod
    def end_group(self, error: Exception, *, finish_pending: bool) -> None:
        """Fail everything that is pending; what was sent still arrives.

        Nothing is written to any tensor after it has returned. Pending operations raise ``error``,
        unless torch had another one before; with ``finish_pending``, those that have started here
        may complete first, if they can.
        """


_POLL_S = 0.1
_TIMED_OUT = re.compile(r"timed out(?: waiting (\d+)ms)?|timeout", re.IGNORECASE)


class ManagedWork(Work):
    """An operation of a process group: torch's work, whose errors name operation and group.

    An *abortable* work also ends when its group is aborted, though torch may not end it. (A send
    that fails in gloo's own loop is lost: it completes neither by itself nor when its connection
    breaks. That is rare: the connection breaks just as the peer announces that it is ready.) So
    `wait` polls, and the future is one that the group can fail.

    `manage` makes it the work of a Manager: errors are reported instead of raised, and the result
    is divided, exactly once. The first call decides where: `wait` does it on the calling thread,
    `get_future` on the thread that completes the collective, so several can be under way.

    Errors of a work of an unknown group (None) stay as they are. ``outputs`` is the value of the
    future where torch has none.
    """

    def __init__(
        self,
        work: Work,
        operation: str = "",
        group: LiveGroup | None = None,
        *,
        is_abortable: bool = False,
    ) -> None:
        super().__init__()
        self._work = work
        self._operation = operation
        self._group = group
        self._abortable_in = group if is_abortable else None
        self._future: Future[Any] | None = None
        self._is_open = threading.Lock()
        self._result: Any = None
        self._divisor = 1
        self._on_error: Callable[[Exception], None] | None = None
        self._succeeded: bool | None = None
        self.outputs: Any = None

    @classmethod
    def of(cls, work: Work) -> ManagedWork:
        """Return the work itself if it can still be managed, else one around it."""
        is_unused = isinstance(work, cls) and work._on_error is None and work._future is None
        return cast(ManagedWork, work) if is_unused else cls(work)

    def manage(
        self, tensor: torch.Tensor, divisor: int, on_error: Callable[[Exception], None]
    ) -> ManagedWork:
        """Report errors (on any thread) instead of raising; divide the result; return this work."""
        self._result, self._divisor, self._on_error = tensor, divisor, on_error
        return self

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end of the operation; return False if it is managed and has failed.

        None, and 0 as in torch's C++ code (``kNoTimeout``), is the group's time-out. The tensor's
        content is undefined after a failure. A work that is not managed raises
        CollectiveTimeoutError (it may still write into its tensors, until the group is aborted),
        AbortedError, or ProcessGroupError.
        """
        timeout = timeout or None
        if self._on_error is None:
            return self._wait(timeout)
        if self._future is not None:
            with suppress(Exception):  # a work may do its part only here, and the future has errors
                self._wait(timeout)
            self._future.wait()
        elif self._succeeded is None:
            try:
                self._wait(timeout)
            except Exception as e:
                self._finish(e)
            else:
                self._finish(None)
        return bool(self._succeeded)

    def get_future(self) -> Future[Any]:
        """Return a future: of the tensor and without errors if managed, else of torch's value."""

        def end_managed(done: Future[Any]) -> Any:
            self._finish(self._outcome_of(done)[1])
            return self._result

        if self._future is not None:
            return self._future
        if self._succeeded is not None:
            self._future = Future()
            self._future.set_result(self._result)
        elif self._abortable_in is not None:
            value = self.outputs if self._result is None else self._result
            self._future = make_future(*_flat(value))
            self._abortable_in.pending.add(self)
            done = self._torch_future()
            done.add_done_callback(lambda done: self.end_future(*self._outcome_of(done)))
        else:
            self._future = self._torch_future()
            if self._on_error is not None:
                self._future = self._future.then(end_managed)
        return self._future

    def _torch_future(self) -> Future[Any]:
        try:
            return self._work.get_future()
        except RuntimeError:  # as gloo's reduce_scatter
            made: Future[Any] = Future()

            def complete() -> None:
                try:
                    self._wait(None)
                    made.set_result(self.outputs)
                except Exception as e:
                    made.set_exception(e)

            threading.Thread(target=complete, name="hpc-elastic-ft-future").start()
            return made

    def is_completed(self) -> bool:
        return self._succeeded is not None or bool(self._work.is_completed())

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> Any:
        return self._work.result()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def synchronize(self) -> None:
        """Let the current stream wait for it, or this thread if the group works on the CPU."""
        if self._on_error is None:
            self._work.synchronize()
        else:
            self.wait()

    def block_current_stream(self) -> None:
        self.synchronize()

    def _wait(self, timeout: timedelta | None) -> bool:
        group = self._abortable_in
        if group is None:
            return self._wait_for_torch(timeout)
        limit_s = math.inf if timeout is None else timeout.total_seconds()
        until = time.monotonic() + limit_s
        while True:
            if group.is_at_rest and group.end_error and not self._work.is_completed():
                raise group.end_error
            rest_s = min(_POLL_S, until - time.monotonic())
            try:
                return self._work.wait(timedelta(seconds=max(0.001, rest_s)))
            except RuntimeError:
                if self._work.is_completed():
                    return self._wait_for_torch(None)
            if time.monotonic() >= until:
                text = f"{self._operation} timed out after {limit_s:g} s in {group.place}"
                raise CollectiveTimeoutError(text)

    def _wait_for_torch(self, timeout: timedelta | None) -> bool:
        try:
            return self._work.wait() if timeout is None else self._work.wait(timeout)
        except RuntimeError as e:
            if self._group is None:
                raise
            raise translate_error(e, self._operation, self._group)  # noqa: B904 - it has its cause

    def _outcome_of(self, done: Future[Any]) -> tuple[Any, Exception | None]:
        try:
            return done.value(), None
        except Exception as e:
            if self._group is not None and isinstance(e, RuntimeError):
                return None, translate_error(e, self._operation, self._group)
            return None, e

    def end_future(self, value: Any, error: Exception | None) -> None:
        """End the future of an abortable work, unless it has ended (any thread)."""
        assert self._abortable_in is not None and self._future is not None
        self._abortable_in.pending.discard(self)
        if not self._is_open.acquire(blocking=False):
            return  # it has ended already
        if error is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._work.synchronize()  # gloo's copies to a GPU have streams of their own
        if self._on_error is not None:
            self._finish(error)
            self._future.set_result(self._result)
        elif error is None:
            self._future.set_result(value)
        else:
            self._future.set_exception(error)

    def _finish(self, error: Exception | None) -> None:
        assert self._on_error is not None
        if error is None and self._divisor != 1:
            try:
                with torch.no_grad():
                    self._result.div_(self._divisor)
            except Exception as e:
                error = e
        self._succeeded = error is None
        if error is not None:
            self._on_error(error)


def translate_error(error: RuntimeError, operation: str, group: LiveGroup) -> Exception:
    """Return an error of gloo's or NCCL's as one of this module's, which names the group.

    It has the error as its cause, unless it is the same: that would keep the frames of both.
    """
    if isinstance(error, ProcessGroupError):
        return error
    found = group.end_error or _named(error, operation, group)
    found.__cause__ = error
    return found


def _named(error: RuntimeError, operation: str, group: LiveGroup) -> Exception:
    match = _TIMED_OUT.search(str(error))
    if match is None:
        return ProcessGroupError(f"{operation} failed in {group.place}: {error}")
    seconds = f" after {int(match[1]) / 1000:g} s" if match[1] else ""
    return CollectiveTimeoutError(f"{operation} timed out{seconds} in {group.place}: {error}")
