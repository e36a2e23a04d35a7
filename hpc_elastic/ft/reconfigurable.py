"""What gloo's and NCCL's groups share: they can be configured, aborted and configured again.

Theory of operation
-------------------
A reconfigurable group has at most one *live* group of torch's, and at most one `CancellableTask`
that forms the next. `configure` ends the live group, starts a task and adopts its result. `abort`
may come from any thread at any time: it takes both under a lock, cancels the task, breaks the live
group's connections, and keeps the error until the next `configure`. A task whose result comes later
discards it itself. Operations meanwhile find no live group, and raise that error.

A task is needed because forming a group needs every member, any of them may be dead or stopped, and
torch's constructors cannot be interrupted. They wait in a store for all members, for minutes; the
`AbortableStore` waits there only as long as its task lasts, and knows which members are missing.
"""

# ruff: noqa: D102  (the methods override documented ones)

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed's
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed import Work

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft.process_group import (
    DEFAULT_TIMEOUT,
    AbortedError,
    CollectiveTimeoutError,
    LiveGroup,
    MemberPlace,
    NotConfiguredError,
    ProcessGroupWrapper,
    translate_error,
)

_log = logging.getLogger(__name__)


class ReconfigurableProcessGroup(ProcessGroupWrapper):
    """A process group whose members change with each `configure`."""

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        """Create the group, without members; the time-out is of operations and `configure`."""
        super().__init__(timeout)
        self._lock = threading.Lock()
        self._live: LiveGroup | None = None
        self._task: CancellableTask[LiveGroup] | None = None
        self._error: Exception | None = None
        self._stores: list[AbortableStore] = []
        """Those of groups whose keys have not been removed."""

    def configure(self, *args: Any, **kwargs: Any) -> None:
        place = MemberPlace(*args, **kwargs)
        late = AbortedError(f"{place} was ready too late")
        task = CancellableTask[LiveGroup](
            lambda task: self._build_group(task, place),
            discard=lambda live: live.end_group(late, finish_pending=False),
            timeout_s=self._timeout.total_seconds(),
            name=str(place),
        )
        with self._lock:
            old, self._live = self._live, None
            earlier, self._task = self._task, task
            self._error = None
        if earlier is not None:
            earlier.cancel(AbortedError("configure() was called again"))
        task.start()
        if old is not None:
            error = AbortedError(f"{old.place} was replaced by a later one")
            old.end_group(error, finish_pending=True)
        try:
            live = task.result()
        except BaseException as e:
            task.cancel(AbortedError("interrupted"))
            with self._lock:
                if self._task is task:
                    self._task = None
                    self._error = e if isinstance(e, Exception) else None
            raise
        with self._lock:
            if self._task is task:
                self._task, self._live = None, live
                return
        reason = self._error or AbortedError(f"{place} was aborted")  # just now
        live.end_group(reason, finish_pending=False)
        raise reason

    def abort(self, errored: bool = True, *, why: str = "it was aborted") -> None:
        """Fail everything that is pending, `configure` too (any thread, at any time).

        Pending operations raise in this process within milliseconds. Once this has returned, no
        byte is written into a tensor any more. `errored` returns it, if it is an error, until the
        next `configure`.
        """
        with self._lock:
            live, task = self._live, self._task
            self._live = self._task = None
            place = str(live.place) if live else "the process group"
            error = AbortedError(f"{place} cannot go on: {why}")
            if errored and self._error is None:
                self._error = error
        if task is not None:
            task.cancel(error)
        if live is not None:
            _log.info("%s", error)
            live.end_group(error, finish_pending=False)

    def shutdown(self) -> None:
        with self._lock:
            live, self._live = self._live, None
        if live is not None:
            error = NotConfiguredError(f"{live.place} was shut down")
            live.end_group(error, finish_pending=True)

    def errored(self) -> Exception | None:
        return self._error

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        live = self._live
        if live is not None:
            live.set_timeout(timeout)

    @property
    def parent(self) -> TorchProcessGroup:
        live = self._live
        if live is not None:
            return live.pg
        if self._error is not None:
            raise self._error
        raise NotConfiguredError(f"{type(self).__name__} has no members: call configure() first")

    def __repr__(self) -> str:
        live = self._live
        return f"{type(self).__name__}({live.place if live else 'no members'})"

    def _build_group(self, task: CancellableTask[LiveGroup], place: MemberPlace) -> LiveGroup:
        raise NotImplementedError

    def _open_store(self, task: CancellableTask[LiveGroup], place: MemberPlace) -> AbortableStore:
        """Return the store of a new group, and remove there what earlier ones have left."""
        store = AbortableStore(place, task)
        earlier, self._stores = self._stores, [store]
        for old in earlier[-_KEPT_CLIENTS:]:
            if old.address[:2] != store.address[:2]:
                self._stores.append(old)
                continue
            with suppress(RuntimeError):  # its process has ended
                old.remove_keys(all_members=old.rank == 0)
        return store

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Work:
        live, parent = self._live, self.parent
        assert live is not None
        try:
            work = live.watch_work(getattr(parent, name)(*args, **kwargs), name)
        except RuntimeError as e:
            raise translate_error(e, name, live)  # noqa: B904 - it has its cause
        work.outputs = args[0] if args else None
        return work


def name_group(options: Any, place: MemberPlace) -> None:
    """Set the ranks and the name of a group in its backend's options, for torch's debugging."""
    if place.global_ranks:
        options.global_ranks_in_group = place.global_ranks
    if place.quorum_id is not None:
        options.group_name = f"ft_quorum_{place.quorum_id}_rank_{place.group_rank or 0}"


# ---- one cancellable attempt to build something together with others


T = TypeVar("T")


class CancellableTask(Generic[T]):
    """One attempt to build something on a thread of its own; its `result` is read once.

    The reader is released at once by `cancel`, or when the time is over. A result that comes later
    is discarded by the thread. That is no daemon, since one that returns from C++ while Python ends
    would crash the process; whatever is built must therefore end by itself within seconds.
    """

    def __init__(
        self,
        build: Callable[[CancellableTask[T]], T],
        *,
        discard: Callable[[T], None],
        timeout_s: float,
        name: str,
    ) -> None:
        """Create the task; `start` starts it.

        ``build`` makes the result on the thread: it calls `check` or `pause` while it waits, and
        sets ``waits_for``, for a time-out's error. ``discard`` releases a result that is not needed
        any more. The time runs from now.
        """
        self.waits_for = "its store"
        self._build = build
        self._discard = discard
        self._timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s
        self._name = name
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="hpc-elastic-ft-build").start()

    def result(self) -> T:
        """Wait for the result; raise what ``build`` or `cancel` did, or CollectiveTimeoutError."""
        if not self._over.wait(max(self.remaining_s, 0.0)):
            self.cancel(self._timeout_error())
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def cancel(self, error: Exception) -> bool:
        """Let `result` raise this at once (any thread); return False if it is over already."""
        return self._finish(None, error)

    def check(self) -> None:
        """Raise if the result is not needed any more (the building thread)."""
        if self._over.is_set():
            raise self._error or RuntimeError("cancelled")
        if self.remaining_s <= 0:
            raise self._timeout_error()

    def pause(self, seconds: float) -> None:
        """Wait, or until it is cancelled; then `check`."""
        self._over.wait(min(seconds, max(self.remaining_s, 0.0)))
        self.check()

    @property
    def remaining_s(self) -> float:
        """Seconds left; negative when it is late."""
        return self._until - time.monotonic()

    def _run(self) -> None:
        try:
            built = self._build(self)
        except BaseException as e:
            self._finish(None, e)
            return
        if not self._finish(built, None):
            self._discard(built)

    def _finish(self, result: T | None, error: BaseException | None) -> bool:
        with self._lock:
            if self._over.is_set():
                return False
            self._result, self._error = result, error
            self._over.set()
            return True

    def _timeout_error(self) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"{self._name} was not ready within {self._timeout_s:g} s: "
            f"it waits for {self.waits_for}"
        )


# ---- stores, where the members of a process group find each other
# One client per store is kept for the life of the process: connecting costs a reverse lookup of the
# address on both sides, and several seconds where no name server answers.


_OPERATION_S = 10.0
_CONNECT_S = 10.0
_SHORTEST_S = 0.0002
_LONGEST_S = 0.02
_KEPT_CLIENTS = 16
_POLLS_PER_REPORT = 50

_clients: dict[tuple[str, int], TCPStore] = {}
_lock = threading.Lock()
os.register_at_fork(after_in_child=_clients.clear)


class StoreAddress(NamedTuple):
    """``host:port/prefix``, parsed."""

    host: str
    port: int
    prefix: str


def parse_store_addr(store_addr: str) -> StoreAddress:
    """Parse ``host:port/some/prefix`` (IPv6 in brackets); raise ConfigError for another form."""
    address, _, prefix = store_addr.partition("/")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError("store_addr", store_addr, "should be host:port/prefix")
    return StoreAddress(host.strip("[]"), int(port), prefix)


def connect_store(where: StoreAddress, task: CancellableTask[Any]) -> TCPStore:
    """Return this process's client of a store; try to connect as long as the task lasts."""
    key = where.host, where.port
    with _lock:
        client = _clients.get(key)
    if client is not None:
        try:
            client.check(["any"])
        except RuntimeError:  # its process has ended
            client = None
    client = client or _new_client(where, task)
    with _lock:
        _clients.pop(key, None)
        _clients[key] = client  # now the youngest
        while len(_clients) > _KEPT_CLIENTS:
            del _clients[next(iter(_clients))]
    return client


def connect_store_ahead(store: str) -> None:
    """Start to connect to the store at ``host:port``, which may be needed soon; raise nothing."""
    where = parse_store_addr(store)
    if (where.host, where.port) not in _clients:
        CancellableTask[TCPStore](
            lambda task: connect_store(where, task),
            discard=lambda _: None, timeout_s=_CONNECT_S, name="a connection made ahead",
        ).start()  # fmt: skip


class AbortableStore(Store):
    """The store of one group, for torch's constructors: its waits end with a task.

    ``values`` are what the members wrote, by key, as far as this member has read or written it;
    ``lasting`` is the same store without the end of the task.
    """

    def __init__(self, place: MemberPlace, task: CancellableTask[Any]) -> None:
        super().__init__()
        self.address = parse_store_addr(place.store_addr)
        self.values: dict[str, bytes] = {}
        self.lasting = PrefixStore(self.address.prefix, connect_store(self.address, task))
        self.rank = place.rank
        self._num_ranks = place.world_size
        self._task = task
        self._written: set[str] = set()

    def set(self, key: str, value: bytes | str) -> None:
        self._task.check()
        self._written.add(key)
        self.values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self.lasting.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        self.wait([key])
        value = self.lasting.get(key)
        self.values[key] = value
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist; the task's time counts, not this one."""
        # Polled, since a wait in a TCPStore cannot be interrupted, and logs each time-out.
        delay_s, polls = _SHORTEST_S, 0
        while True:
            self._task.check()
            if self.lasting.check(keys):
                return
            if polls % _POLLS_PER_REPORT == 0:
                missing = ", ".join(keys)
                head, _, rank = keys[0].rpartition("/")
                if rank.isdigit():  # name the ranks that have not come, as gloo's keys end in one
                    every = range(self._num_ranks)
                    ranks = [str(r) for r in every if not self.check([f"{head}/{r}"])]
                    missing = f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)}"
                self._task.waits_for = missing
            self._task.pause(delay_s)
            delay_s, polls = min(delay_s * 1.3, _LONGEST_S), polls + 1

    def check(self, keys: list[str]) -> bool:
        return self.lasting.check(keys)

    def add(self, key: str, amount: int) -> int:
        self._written.add(key)
        return self.lasting.add(key, amount)

    def remove_keys(self, *, all_members: bool) -> None:
        """Remove what this member wrote, or what all did, as far as torch (2.9) can list it."""
        found: list[str] = getattr(self.lasting, "list_keys", list)() if all_members else []
        for key in self._written.union(found):
            self.lasting.delete_key(key)


class CheckedWait(CancellableTask[None]):
    """A task for the waits of one thread, without a time-out: ``check`` raises to end them."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__(lambda _: None, discard=lambda _: None, timeout_s=math.inf, name="a wait")
        self._check = check

    def check(self) -> None:
        self._check()


def _new_client(where: StoreAddress, task: CancellableTask[Any]) -> TCPStore:
    try:
        found = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
    except OSError as e:
        remedy = f"cannot be resolved ({e}); give a numeric address"
        raise ConfigError("store_addr", where.host, remedy) from e
    address = str(sorted(found, key=lambda a: a[0] != socket.AF_INET)[0][4][0])
    task.waits_for = f"the store at {where.host}:{where.port}"
    while True:
        timeout_s = max(0.1, min(_CONNECT_S, task.remaining_s))
        try:
            client = TCPStore(
                address, where.port, is_master=False, wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )  # fmt: skip
        except RuntimeError:
            task.check()
            if task.remaining_s < _SHORTEST_S:
                raise
            task.pause(_LONGEST_S)
            continue
        client.set_timeout(timedelta(seconds=_OPERATION_S))
        return client
