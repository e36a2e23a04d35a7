"""NCCL in a process that outlives its peers: aborted without a crash, configured again in place.

NCCL's operations run on the GPU: a peer's death leaves a kernel that spins for ever. Only
``ncclCommAbort`` ends it, from any thread, and it makes the whole communicator useless; so `abort`
does that, and the next `configure` makes a new one. torch's own watchdog would end the process
after a time-out, and so its time-out is put far off: a `WorkWatch` of ours looks at each
operation's deadline, and aborts the group.

An operation's `wait` only orders streams, as with torch. Whoever wants to know whether a step has
succeeded calls `errored`, which waits for the stream.

Environment, set here unless it is set already, before the first group is made:
``TORCH_NCCL_ASYNC_ERROR_HANDLING=0`` (torch's watchdog must not end the process) and
``TORCH_NCCL_NONBLOCKING_TIMEOUT`` (how long a communicator may take to come up).

Private to torch, and named in a test: ``Backend._set_default_timeout``, ``ProcessGroup.
_register_backend`` and ``_set_default_backend``.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, Work

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft import reconfigurable
from hpc_elastic.ft.process_group import DEFAULT_TIMEOUT, NamedWork, named
from hpc_elastic.ft.reconfigurable import (
    CancellableTask,
    LiveGroup,
    MemberPlace,
    ReconfigurableProcessGroup,
)

_NEVER = timedelta(days=7)  # torch's watchdog ends the process; the Watch aborts the group instead
_OLDEST = (2, 26)


class ProcessGroupNCCL(ReconfigurableProcessGroup):
    """A reconfigurable group over NCCL, for tensors on the current CUDA device.

    Every member sets its device (`torch.cuda.set_device`) before the first `configure`.
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        """Have no members yet.

        Raises:
            ConfigError: there is no NCCL here, or one that can not be aborted safely.
        """
        _require_nccl()
        super().__init__(timeout)
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        seconds = str(max(1, round(timeout.total_seconds())))
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", seconds)

    def getBackendName(self) -> str:  # noqa: N802
        """Return its name."""
        return "hpc-elastic-nccl"

    def errored(self) -> Exception | None:
        """Wait for the current stream, then return why the group was aborted; None if it was not.

        An operation that hangs is aborted at its time-out, and so is this.
        """
        if self._error is None and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return self._error

    def _build(self, attempt: CancellableTask[LiveGroup], place: MemberPlace) -> LiveGroup:
        where = reconfigurable.parse(place.store_addr)
        store = reconfigurable.connect(where, attempt)
        met = reconfigurable.AbortableStore(store, where.prefix, place.world_size, attempt)
        _muster(met, place)
        attempt.waits_for = "NCCL's communicator"
        # NCCL keeps its store for later communicators, and so gets one that outlives the attempt.
        backend = _backend(PrefixStore(where.prefix, store), place)
        group = NCCLGroup(place, backend, WorkWatch(self._late))
        group.set_timeout(self._timeout)
        return group

    def _late(self, why: str) -> None:
        self.abort(why=why)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Work:
        live, parent = self._live, self.parent
        assert isinstance(live, NCCLGroup)
        try:
            work = getattr(parent, name)(*args, **kwargs)
        except RuntimeError as e:
            raise named(e, name, live) from e
        live.watch.add(work, name, live.timeout_s)
        return NamedWork(work, name, live)


class NCCLGroup:
    """One group of torch's, and the watch over its operations."""

    def __init__(self, place: MemberPlace, backend: Any, watch: WorkWatch) -> None:
        self.place = place
        self.watch = watch
        self.over: Exception | None = None
        self.timeout_s = 0.0
        self._backend = backend
        self._pg = TorchProcessGroup(place.rank, place.world_size)  # type: ignore[call-arg]
        self._pg._set_default_backend(TorchProcessGroup.BackendType.NCCL)
        nccl = TorchProcessGroup.BackendType.NCCL
        self._pg._register_backend(torch.device("cuda"), nccl, backend)

    @property
    def pg(self) -> TorchProcessGroup:
        """What does the operations."""
        return self._pg

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of later operations."""
        self.timeout_s = timeout.total_seconds()

    def end(self, error: Exception, *, peacefully: bool) -> None:
        """End the kernels on the GPU, and all that waits for them.

        In peace too it is the abort: torch's shutdown waits for peers, which may be gone.
        """
        if peacefully:
            torch.cuda.current_stream().synchronize()
        self.over = error
        self.watch.stop()
        abort = getattr(self._backend, "abort", None) or self._backend._abort  # its name in 2.6
        abort()


def _require_nccl() -> None:
    if not dist.is_nccl_available():
        raise ConfigError("pg", "ProcessGroupNCCL", "this torch has no NCCL; use ProcessGroupGloo")
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if tuple(version[:2]) < _OLDEST:
        remedy = f"its abort can hang; use NCCL {'.'.join(map(str, _OLDEST))} or later"
        raise ConfigError("NCCL", ".".join(map(str, version)), remedy)


def _muster(met: reconfigurable.AbortableStore, place: MemberPlace) -> None:
    """Wait until all members are there, since NCCL's own waiting can not be interrupted."""
    met.set(f"here/{place.rank}", b"1")
    for rank in range(place.world_size):
        met.get(f"here/{rank}")


def _backend(store: Any, place: MemberPlace) -> Any:
    from torch.distributed import ProcessGroupNCCL as TorchNCCL

    options: Any = TorchNCCL.Options()
    options.config.blocking = 0  # or else abort() waits for what it is to end
    options._timeout = _NEVER
    if place.global_ranks:
        options.global_ranks_in_group = place.global_ranks
    if place.quorum_id is not None:
        options.group_name = f"ft_quorum_{place.quorum_id}_rank_{place.group_rank or 0}"
    backend = TorchNCCL(store, place.rank, place.world_size, options)
    backend.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return backend


# ---- A thread that looks at the deadlines of operations, and tells when one is missed
# Operations on a GPU end on their own; nobody waits for them on the CPU, and so nobody would
# notice one that does not end.


_LOOK_S = 0.5


class Pending(Protocol):
    """What can be asked whether it has ended, as torch's Work."""

    def is_completed(self) -> bool:
        """Tell whether it has ended."""


class _Operation(NamedTuple):
    work: Pending
    name: str
    timeout_s: float
    until: float


class WorkWatch:
    """Watch over the operations of one group, in the order in which they were begun."""

    def __init__(self, late: Callable[[str], None]) -> None:
        """Watch nothing yet.

        Args:
            late: Called once, on the watch's thread, with the name and the seconds of the first
                operation that missed its deadline.
        """
        self._late = late
        self._operations: deque[_Operation] = deque()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, work: Pending, name: str, timeout_s: float) -> None:
        """Watch over an operation that has just begun."""
        self._forget_completed()
        self._operations.append(_Operation(work, name, timeout_s, time.monotonic() + timeout_s))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="hpc-elastic-ft-watch", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Forget all operations; the thread ends."""
        self._stopped.set()
        self._operations.clear()

    def _run(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            self._forget_completed()
            missed = self._missed(time.monotonic())
            if missed is not None and not self._stopped.is_set():
                self._stopped.set()
                self._late(f"{missed.name} timed out after {missed.timeout_s:g} s")

    def _missed(self, now: float) -> _Operation | None:
        late = (o for o in list(self._operations) if o.until < now and not o.work.is_completed())
        return next(late, None)

    def _forget_completed(self) -> None:
        try:
            while self._operations[0].work.is_completed():
                self._operations.popleft()
        except IndexError:  # all have, or the other thread was faster
            pass
