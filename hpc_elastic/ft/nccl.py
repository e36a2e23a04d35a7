"""ProcessGroupNCCL: NCCL in a process that outlives its peers, aborted and reconfigured in place.

NCCL's operations run on the GPU: a peer's death leaves a kernel that spins for ever. Only
``ncclCommAbort`` ends it, from any thread, and it makes the whole communicator unusable; so `abort`
calls it, and the next `configure` makes a new communicator. torch's own watchdog would end the
process after a time-out, so its time-out is put far off: a `WorkWatchdog` checks each operation's
deadline and errors, and aborts the group.

An operation's `wait` only orders streams, as with torch. `errored` returns whether a step has
failed; it waits for the stream.

torch's watchdog must not end the process after an error either, nor its monitor hold up the end of
the group: groups are constructed with ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0`` and the like, whatever
the process has, as torch's agent sets 1 in every worker. ``TORCH_NCCL_NONBLOCKING_TIMEOUT`` (how
long a communicator may take to come up) is set before the first group, unless it is set already.

Private to torch, and named in a test: ``Backend._set_default_timeout``, ``ProcessGroup.
_register_backend`` and ``_set_default_backend``.
"""

# ruff: noqa: D102  (some names say it all)

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed.distributed_c10d import Work

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft import reconfigurable
from hpc_elastic.ft.process_group import DEFAULT_TIMEOUT, LiveGroup, ManagedWork, MemberPlace

_log = logging.getLogger(__name__)

_ABORT_S = 60.0
_NEVER = timedelta(days=7)  # torch's watchdog ends the process; the WorkWatchdog aborts the group
_OLDEST = (2, 26)
_UNENDED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # the group's end waits for four times as long
}


class ProcessGroupNCCL(reconfigurable.ReconfigurableProcessGroup):
    """A reconfigurable group over NCCL, for tensors on the current CUDA device.

    Every member sets its device (`torch.cuda.set_device`) before the first `configure`.
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        """Create the group, without members.

        Raises:
            ConfigError: There is no NCCL, or one that cannot be aborted safely.
        """
        if not dist.is_nccl_available():
            remedy = "this torch has no NCCL; use ProcessGroupGloo"
            raise ConfigError("pg", "ProcessGroupNCCL", remedy)
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        if tuple(version[:2]) < _OLDEST:
            remedy = f"its abort can hang; use NCCL {'.'.join(map(str, _OLDEST))} or later"
            raise ConfigError("NCCL", ".".join(map(str, version)), remedy)
        super().__init__(timeout)
        seconds = str(max(1, round(timeout.total_seconds())))
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", seconds)

    def getBackendName(self) -> str:  # noqa: N802
        """Return its name."""
        return "hpc-elastic-nccl"

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Form the group of a new quorum on this thread's device; see `ProcessGroup.configure`."""
        self._device = torch.device("cuda", torch.cuda.current_device())
        super().configure(*args, **kwargs)

    def errored(self) -> Exception | None:
        """Wait for the current stream, then return why the group was aborted; None if it was not.

        An operation that hangs is aborted at its time-out, and then this returns.
        """
        if self._error is None and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return self._error

    def _build_group(
        self, task: reconfigurable.CancellableTask[LiveGroup], place: MemberPlace
    ) -> LiveGroup:
        from torch.distributed import ProcessGroupNCCL as TorchNCCL

        # Wait until all members have come, since NCCL's own waiting cannot be interrupted.
        store = self._open_store(task, place)
        store.set(f"here/{place.rank}", b"1")
        for rank in range(place.world_size):
            store.get(f"here/{rank}")
        task.waits_for = "NCCL's communicator"
        options: Any = TorchNCCL.Options()
        options.config.blocking = 0  # else abort() waits for what it is to end
        options._timeout = _NEVER
        reconfigurable.name_group(options, place)
        # NCCL keeps its store for later communicators, and so gets one that outlives the task.
        with _ending_no_process():
            backend = TorchNCCL(store.lasting, place.rank, place.world_size, options)
        backend.eager_connect_single_device(self._device)
        watchdog = WorkWatchdog(lambda why: self.abort(why=why), lambda: _error_of(backend))
        group = NCCLGroup(place, backend, watchdog)
        group.set_timeout(self._timeout)
        return group


@contextmanager
def _ending_no_process() -> Iterator[None]:
    """Keep torch's threads for the groups made inside from ending the process after an error."""
    before = {name: os.environ.get(name) for name in _UNENDED}
    os.environ |= _UNENDED
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _error_of(backend: Any) -> str | None:
    """Return what NCCL reports, None if nothing, or if torch does not know."""
    get_error = getattr(backend, "get_error", None)
    found = "SUCCESS" if get_error is None else get_error().name
    return None if found == "SUCCESS" else f"NCCL reports {found}"


class ProcessGroupBabyNCCL(ProcessGroupNCCL):
    """`ProcessGroupNCCL`, under the name of torchft's group in a subprocess.

    torchft recommends the subprocess because aborting NCCL could hang; see `_OLDEST`.
    """

    def __init__(self, timeout: float | timedelta = DEFAULT_TIMEOUT) -> None:
        """Create the group, without members; the time-out may be in seconds, as torchft's."""
        super().__init__(timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout))


class NCCLGroup(LiveGroup):
    """One group of torch's, and the watchdog of its operations."""

    def __init__(self, place: MemberPlace, backend: Any, watchdog: WorkWatchdog) -> None:
        super().__init__(place)
        self.watchdog = watchdog
        self.timeout_s = 0.0
        self._backend = backend
        self._pg = TorchProcessGroup(place.rank, place.world_size)  # type: ignore[call-arg]
        nccl = TorchProcessGroup.BackendType.NCCL
        self._pg._set_default_backend(nccl)
        self._pg._register_backend(torch.device("cuda"), nccl, backend)

    @property
    def pg(self) -> TorchProcessGroup:
        return self._pg

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout_s = timeout.total_seconds()

    def watch_work(self, work: Work, operation: str) -> ManagedWork:
        self.watchdog.add_work(work, operation, self.timeout_s)
        return ManagedWork(work, operation, self)

    def end_group(self, error: Exception, *, finish_pending: bool) -> None:
        """End all kernels by an abort: torch's shutdown waits for peers that may be lost."""
        if finish_pending:
            torch.cuda.current_stream().synchronize()
        self.end_error = error
        self.watchdog.stop()
        abort = getattr(self._backend, "abort", None) or self._backend._abort
        # On a GPU that has gone, torch waits for the time-out of the group, which is far off.
        aborting = threading.Thread(target=abort, name="hpc-elastic-ft-abort", daemon=True)
        aborting.start()
        aborting.join(_ABORT_S)
        if aborting.is_alive():
            text = "NCCL's abort has not ended in %g s; only the end of this process frees its GPU"
            _log.critical(f"%s: {text}", self.place, _ABORT_S)
            os._exit(1)


# ---- the watchdog: operations on a GPU end by themselves, and no thread waits for them on the CPU


_CHECK_EVERY_S = 0.5


class _Operation(NamedTuple):
    work: Work
    name: str
    timeout_s: float
    until: float


class WorkWatchdog:
    """A thread that checks the deadlines of one group's operations, in their order, and errors."""

    def __init__(
        self, on_failure: Callable[[str], None], error: Callable[[], str | None] = lambda: None
    ) -> None:
        """Create it, without operations.

        ``on_failure`` is called once, on the watchdog's thread, with the communicator's error
        (``error``), or the name and the seconds of the first operation that missed its deadline.
        """
        self._on_failure = on_failure
        self._error = error
        self._operations: deque[_Operation] = deque()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def add_work(self, work: Work, name: str, timeout_s: float) -> None:
        self._remove_completed()
        self._operations.append(_Operation(work, name, timeout_s, time.monotonic() + timeout_s))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="hpc-elastic-ft-watch", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._operations.clear()

    def _run(self) -> None:
        while not self._stopped.wait(_CHECK_EVERY_S):
            self._remove_completed()
            why = self._error() or self._first_late()
            if why is not None and not self._stopped.is_set():
                self._stopped.set()
                self._on_failure(why)

    def _first_late(self) -> str | None:
        now = time.monotonic()
        for operation in list(self._operations):
            if operation.until < now and not operation.work.is_completed():
                return f"{operation.name} timed out after {operation.timeout_s:g} s"
        return None

    def _remove_completed(self) -> None:
        with suppress(IndexError):  # none is left, or the other thread was faster
            while self._operations[0].work.is_completed():  # with an error, too
                self._operations.popleft()
