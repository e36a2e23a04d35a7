"""Process groups that can be aborted and configured again without leaving the process.

The names are torchft's. `ProcessGroupGloo` and `ProcessGroupNCCL` do the work; the others wrap or
imitate one. What a group has to do is said in `process_group`, how it is made and aborted in
`reconfigurable`. There are no groups in a subprocess (torchft's Baby*): both kinds here can be
aborted in their own process.
"""

from __future__ import annotations

import heapq
import importlib
import itertools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed.distributed_c10d import AllreduceOptions, BroadcastOptions, ReduceOp, Work
from torch.futures import Future

from hpc_elastic.errors import HpcElasticError

__all__ = [
    "AbortedError",
    "CollectiveTimeoutError",
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "ManagedProcessGroup",
    "NotConfiguredError",
    "ProcessGroup",
    "ProcessGroupDummy",
    "ProcessGroupError",
    "ProcessGroupGloo",  # noqa: F822 - by __getattr__
    "ProcessGroupNCCL",  # noqa: F822 - by __getattr__
    "ProcessGroupWrapper",
]

_BACKENDS = {"ProcessGroupGloo": "hpc_elastic.ft.gloo", "ProcessGroupNCCL": "hpc_elastic.ft.nccl"}


def __getattr__(name: str) -> Any:
    """Import a backend at its first use: torchft has them here, and they are built on this."""
    if name not in _BACKENDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_BACKENDS[name]), name)


# ---- The process group of fault tolerance: torch's, which can be configured again in place
# It keeps its identity while its members change: a script, DDP or a `DeviceMesh` holds one object
# for the whole training, and the Manager calls `configure` whenever there is a new quorum. Ranks
# and size change then, so nothing may be kept of them.


class ProcessGroup(TorchProcessGroup):
    """Base of all groups here; the collectives are torch's, by torch's names.

    Every one of them takes the arguments of `torch.distributed.ProcessGroup`'s method of its name
    (lists of tensors, and an options object), and returns a Work.
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
        """Meet the members of a new quorum (every member at once; what was before is given up).

        Args:
            store_addr: ``host:port/prefix`` of a TCPStore; the prefix must never have been used.
            replica_id: Name of this member, for messages.
            rank: Of this member, from 0.
            world_size: Members, at least 1.
            quorum_id: For messages.
            group_rank: This worker's rank inside its replica group.
            group_world_size: Workers in a replica group.
            global_ranks: The members' ranks in the whole job, for torch's flight recorder.

        Raises:
            CollectiveTimeoutError: not all came in time; it names who is absent. Ask for another
                quorum.
            AbortedError: `abort` was called meanwhile.
        """
        raise NotImplementedError(f"{type(self).__name__} can not be configured")

    def abort(self) -> None:
        """Give up everything that is pending (any thread); the next `configure` begins anew."""

    def shutdown(self) -> None:
        """Leave the group in peace; what has been sent still arrives."""

    def errored(self) -> Exception | None:
        """Return why the group has to be configured again; None if it has not."""
        return None

    def set_timeout(self, timeout: timedelta) -> None:
        """Let each operation from now on, and each `configure`, take at most so long."""
        raise NotImplementedError(f"{type(self).__name__} has no time-out")

    def size(self) -> int:
        """Return the number of members."""
        raise NotImplementedError(f"{type(self).__name__} has no size")

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return the name under which `register` makes it known."""
        raise NotImplementedError(f"{type(self).__name__} has no name")

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> Work:
        """Broadcast one tensor from the rank ``root``."""
        opts = BroadcastOptions()
        opts.rootRank = root
        return self.broadcast([tensor], opts)

    def register(self, name: str) -> ProcessGroup:
        """Make the group known to torch, for DeviceMesh and functional collectives (once).

        torch's default group must be initialized. For torch it is a group of this rank alone,
        since a size that changes has no place in a mesh.

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
        """torch's name for it, once it is registered."""
        if self._group_name is None:
            raise ValueError("the process group has no name: call register() first")
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


# ---- A process group that hands everything on to another one


DEFAULT_TIMEOUT = timedelta(seconds=60)


class ProcessGroupWrapper(ProcessGroup):
    """Hand every operation on to another group; a subclass changes what it wants to.

    All operations go through `_call`, so that one method decides about all of them.
    """

    def __init__(
        self, timeout: timedelta = DEFAULT_TIMEOUT, pg: ProcessGroup | None = None
    ) -> None:
        """Wrap ``pg``.

        Args:
            timeout: Of each operation and of `configure`, where the subclass has a group of its
                own.
            pg: The group to wrap; None where the subclass brings its own.
        """
        super().__init__(0, 1)
        self._pg = pg
        self._timeout = timeout

    @property
    def parent(self) -> TorchProcessGroup:
        """The group that does the work.

        Raises:
            NotConfiguredError: there is none yet.
        """
        if self._pg is None:
            raise NotConfiguredError(
                f"{type(self).__name__} has no members: call configure() first"
            )
        return self._pg

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Configure the wrapped group."""
        self._wrapped().configure(*args, **kwargs)

    def abort(self) -> None:
        """Abort the wrapped group."""
        self._wrapped().abort()

    def shutdown(self) -> None:
        """Shut down the wrapped group."""
        self._wrapped().shutdown()

    def errored(self) -> Exception | None:
        """Return what the wrapped group says."""
        return self._wrapped().errored()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the wrapped group's."""
        self._timeout = timeout
        self._wrapped().set_timeout(timeout)

    def size(self) -> int:
        """Return the number of members."""
        return self.parent.size()

    def rank(self) -> int:
        """Return this member's rank; 0 as long as there are no members."""
        try:
            return self.parent.rank()
        except RuntimeError:
            return 0

    def getBackendName(self) -> str:  # noqa: N802
        """Return the wrapped group's."""
        return self._wrapped().getBackendName()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pg={self._pg})"

    def _wrapped(self) -> ProcessGroup:
        if self._pg is None:
            raise NotConfiguredError(f"{type(self).__name__} wraps no group")
        return self._pg

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Work:
        """Do one operation: ``name`` is the method's of torch's ProcessGroup."""
        work: Work = getattr(self.parent, name)(*args, **kwargs)
        return work

    # torch's surface, all its overloads. The C++ side calls these by name (its trampolines), and
    # so does torch.distributed.

    def allreduce(self, *args: Any, **kwargs: Any) -> Work:
        """Reduce tensors over all members, in place."""
        return self._call("allreduce", *args, **kwargs)

    def allreduce_coalesced(self, *args: Any, **kwargs: Any) -> Work:
        """Reduce several tensors as one."""
        return self._call("allreduce_coalesced", *args, **kwargs)

    def allgather(self, *args: Any, **kwargs: Any) -> Work:
        """Gather a tensor of each member on all."""
        return self._call("allgather", *args, **kwargs)

    def allgather_coalesced(self, *args: Any, **kwargs: Any) -> Work:
        """Gather several tensors of each member."""
        return self._call("allgather_coalesced", *args, **kwargs)

    def allgather_into_tensor_coalesced(self, *args: Any, **kwargs: Any) -> Work:
        """Gather into one tensor each."""
        return self._call("allgather_into_tensor_coalesced", *args, **kwargs)

    def _allgather_base(self, *args: Any, **kwargs: Any) -> Work:
        return self._call("_allgather_base", *args, **kwargs)

    def alltoall(self, *args: Any, **kwargs: Any) -> Work:
        """Send one tensor to each member, and receive one."""
        return self._call("alltoall", *args, **kwargs)

    def alltoall_base(self, *args: Any, **kwargs: Any) -> Work:
        """Send a part of one tensor to each member."""
        return self._call("alltoall_base", *args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> Work:
        """Wait for all members."""
        return self._call("barrier", *args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Work:
        """Copy one member's tensors to all."""
        return self._call("broadcast", *args, **kwargs)

    def gather(self, *args: Any, **kwargs: Any) -> Work:
        """Gather on one member."""
        return self._call("gather", *args, **kwargs)

    def scatter(self, *args: Any, **kwargs: Any) -> Work:
        """Scatter from one member."""
        return self._call("scatter", *args, **kwargs)

    def reduce(self, *args: Any, **kwargs: Any) -> Work:
        """Reduce on one member."""
        return self._call("reduce", *args, **kwargs)

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> Work:
        """Reduce, and give a part to each member."""
        return self._call("reduce_scatter", *args, **kwargs)

    def reduce_scatter_tensor_coalesced(self, *args: Any, **kwargs: Any) -> Work:
        """Reduce several tensors, and give a part of each to each member."""
        return self._call("reduce_scatter_tensor_coalesced", *args, **kwargs)

    def _reduce_scatter_base(self, *args: Any, **kwargs: Any) -> Work:
        return self._call("_reduce_scatter_base", *args, **kwargs)

    def send(self, *args: Any, **kwargs: Any) -> Work:
        """Send tensors to one member."""
        return self._call("send", *args, **kwargs)

    def recv(self, *args: Any, **kwargs: Any) -> Work:
        """Receive tensors from one member."""
        return self._call("recv", *args, **kwargs)

    def recv_anysource(self, *args: Any, **kwargs: Any) -> Work:
        """Receive tensors from whoever sends first."""
        return self._call("recv_anysource", *args, **kwargs)


# ---- A group of one member, which moves nothing and always succeeds


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


# ---- Groups that wrap another one: errors swallowed, errors planted, or all handed to a Manager


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


class ReducingManager(Protocol):
    """What `ManagedProcessGroup` needs of a `hpc_elastic.ft.Manager`."""

    _pg: ProcessGroup

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: ReduceOp | ReduceOp.RedOpType) -> Work:
        """Reduce a tensor over the replica groups that contribute."""

    def num_participants(self) -> int:
        """Return how many replica groups contribute."""


class ManagedProcessGroup(ProcessGroupWrapper):
    """Hand allreduces to a Manager: a group whose size is the number of contributors.

    Errors go to the Manager, and are told by its `should_commit`.
    """

    def __init__(self, manager: ReducingManager) -> None:
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


# ---- Collectives that never raise: what went wrong is told to the Manager, and the step is skipped


T = TypeVar("T")


class DummyWork(Work):
    """Work that is done: where there is nothing to do any more."""

    def __init__(self, result: object) -> None:
        super().__init__()
        self._future: Future[object] = Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> Future[object]:
        """Return a future that holds the result."""
        return self._future


class ManagedWork(Work):
    """One collective on one tensor, whose result is finished (divided) exactly once.

    What is called first decides where: `wait` finishes it on the calling thread, `get_future` on
    the thread that completes the collective, so that several may be under way.

    Args:
        work: The collective.
        tensor: Its tensor.
        divisor: What the sum is divided by; 1: it stays as it is.
        failed: Called with the error, if there is one.
    """

    def __init__(
        self,
        work: Work,
        tensor: torch.Tensor,
        divisor: int,
        failed: Callable[[Exception], None],
    ) -> None:
        super().__init__()
        self._work = work
        self._tensor = tensor
        self._divisor = divisor
        self._failed = failed
        self._done: bool | None = None
        self._future: Future[torch.Tensor] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result.

        Args:
            timeout: None: the process group's.

        Returns:
            False: it failed, and the tensor holds nothing of use.
        """
        if self._future is not None:
            self._future.wait()
        elif self._done is None:
            try:
                self._work.wait(*(() if timeout is None else (timeout,)))
                self._finish()
            except Exception as e:
                self._fail(e)
        return bool(self._done)

    def get_future(self) -> Future[torch.Tensor]:
        """Return a future of the tensor; it holds no error, whatever happens."""
        if self._future is None:
            if self._done is None:
                self._future = self._work.get_future().then(self._completed)
            else:
                self._future = Future()
                self._future.set_result(self._tensor)
        return self._future

    def is_completed(self) -> bool:
        """Tell whether it has ended, well or not."""
        return self._done is not None or bool(self._work.is_completed())

    def synchronize(self) -> None:
        """Wait; a device's stream waits instead of this thread where the group works so."""
        self.wait()

    def block_current_stream(self) -> None:
        """Let the current stream wait for the result."""
        self.wait()

    def _completed(self, future: Future[Any]) -> torch.Tensor:
        try:
            future.value()
            self._finish()
        except Exception as e:
            self._fail(e)
        return self._tensor

    def _finish(self) -> None:
        if self._divisor != 1:
            with torch.no_grad():
                self._tensor.div_(self._divisor)
        self._done = True

    def _fail(self, error: Exception) -> None:
        self._done = False
        self._failed(error)


class _Timers:
    """Calls functions later, on one thread that is made with the first of them."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call it after so many seconds; it must not block."""
        with self._changed:
            heapq.heappush(self._heap, (time.monotonic() + delay_s, next(self._count), call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ft_timers", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            self._next()()

    def _next(self) -> Callable[[], None]:
        with self._changed:
            while True:
                left_s = self._heap[0][0] - time.monotonic() if self._heap else None
                if left_s is not None and left_s <= 0:
                    return heapq.heappop(self._heap)[2]
                self._changed.wait(left_s)


_timers = _Timers()


class _Swallowing:
    """Completes a future with another one's value, or with a default after an error or a while."""

    def __init__(self, default: Any, failed: Callable[[Exception], None]) -> None:
        self.future: Future[Any] = Future()
        self._default = default
        self._failed = failed
        self._is_open = True
        self._lock = threading.Lock()

    def ended(self, future: Future[Any]) -> None:
        """Take over the other future's end."""
        try:
            self._complete(None, future.value())
        except Exception as e:
            self._complete(e, self._default)

    def late(self, timeout_s: float) -> None:
        """Do not wait any longer."""
        e = TimeoutError(f"a future was not completed within {timeout_s:g} s")
        self._complete(e, self._default)

    def _complete(self, error: Exception | None, value: Any) -> None:
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open:
            if error is not None:
                self._failed(error)
            self.future.set_result(value)


def swallow_errors(
    future: Future[T], default: T, timeout_s: float, failed: Callable[[Exception], None]
) -> Future[T]:
    """Return a future that completes within the time-out, and never with an error.

    Args:
        future: The one to follow.
        default: Its value where that fails or takes too long.
        timeout_s: Seconds, above 0.
        failed: Called with the error then, on any thread.
    """
    swallowing = _Swallowing(default, failed)
    _timers.after(timeout_s, lambda: swallowing.late(timeout_s))
    future.add_done_callback(swallowing.ended)
    return swallowing.future


# ---- A torch Work whose errors say what failed, in which group, and after how many seconds


_TIMED_OUT = re.compile(r"timed out(?: waiting (\d+)ms)?|timeout", re.IGNORECASE)


class NamedGroup(Protocol):
    """The group of an operation.

    Attributes:
        place: For messages.
        over: Why it has ended; None as long as it has not.
    """

    place: Any
    over: Exception | None


class NamedWork(Work):
    """Hand everything on to a Work; translate what its `wait` raises.

    The future is torch's own: an error in it has torch's text.
    """

    def __init__(self, work: Work, operation: str, group: NamedGroup) -> None:
        super().__init__()
        self._work = work
        self._operation = operation
        self._group = group

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end of the operation.

        Raises:
            CollectiveTimeoutError: it took too long. It may still write into its tensors, until
                the group is aborted.
            AbortedError: the group was aborted.
            ProcessGroupError: a peer's connection broke, or something else that torch tells.
        """
        try:
            return self._work.wait() if timeout is None else self._work.wait(timeout)
        except RuntimeError as e:
            raise named(e, self._operation, self._group) from e

    def get_future(self) -> Any:
        """Return torch's own future."""
        return self._work.get_future()

    def is_completed(self) -> bool:
        """Tell whether it has ended, well or not."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Tell whether it has ended well."""
        return self._work.is_success()

    def exception(self) -> Any:
        """Return why it failed; None if it did not."""
        return self._work.exception()

    def result(self) -> Any:
        """Return its tensors."""
        return self._work.result()

    def source_rank(self) -> int:
        """Return whom a recv_anysource received from."""
        return self._work.source_rank()

    def synchronize(self) -> None:
        """Let the current stream wait for it."""
        self._work.synchronize()


def named(error: RuntimeError, operation: str, group: NamedGroup) -> Exception:
    """Return torch's error as one of ours, which names the operation and the group."""
    if isinstance(error, ProcessGroupError):
        return error
    if group.over is not None:
        return group.over
    text, match = str(error), _TIMED_OUT.search(str(error))
    if match is None:
        return ProcessGroupError(f"{operation} failed in {group.place}: {text}")
    seconds = f" after {int(match[1]) / 1000:g} s" if match[1] else ""
    return CollectiveTimeoutError(f"{operation} timed out{seconds} in {group.place}: {text}")


# ---- What a process group raises, so that a caller need not read gloo's or NCCL's own texts
#     ProcessGroupError (RuntimeError)
#     |- NotConfiguredError               used before `configure`, or after `shutdown`
#     |- AbortedError                     somebody called `abort`; configure it again
#     `- CollectiveTimeoutError (TimeoutError)   an operation, or `configure`, took too long
#
# They are RuntimeErrors, as torch's own are, so a script that expects those needs no change.


class ProcessGroupError(HpcElasticError, RuntimeError):
    """A process group can not do what it was asked for."""


class NotConfiguredError(ProcessGroupError):
    """The group has no members yet: call `configure` first."""


class AbortedError(ProcessGroupError):
    """The group was given up: what was pending has failed, and `configure` makes a new one."""


class CollectiveTimeoutError(ProcessGroupError, TimeoutError):
    """An operation took longer than allowed; its message names it, its group and the seconds."""
