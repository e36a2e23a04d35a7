"""What gloo's and NCCL's groups have in common: to be configured, aborted and configured again.

Theory of operation
-------------------
A reconfigurable group has at most one *live* group of torch's, and at most one `CancellableTask`
to make the next. `configure` takes leave of the live one, begins an attempt and adopts its result.
`abort` may come from any thread at any time: it takes away both under a lock, then gives up the
attempt and breaks the live group's connections, and remembers why until the next `configure`. An
attempt whose result comes later discards it itself.

Who uses the group meanwhile finds no live group, and is told why.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch._C._distributed_c10d import Store, TCPStore  # what torch.distributed exports
from torch.distributed import ProcessGroup as TorchProcessGroup

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft.process_group import (
    DEFAULT_TIMEOUT,
    AbortedError,
    CollectiveTimeoutError,
    NotConfiguredError,
    ProcessGroupWrapper,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemberPlace:
    """One member's place in a group, as `ProcessGroup.configure` is told."""

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
        who = f"rank {self.rank} of {self.world_size}, {self.replica_id}"
        return f"the process group{quorum} ({who}) at {self.store_addr}"


class LiveGroup(Protocol):
    """A group of torch's, with what it takes to end it."""

    place: MemberPlace

    @property
    def pg(self) -> TorchProcessGroup:
        """What does the operations."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of later operations."""

    def end(self, error: Exception, *, peacefully: bool) -> None:
        """Let everything pending fail now with an error; what was sent still arrives.

        Nothing is written to any tensor after it has returned.

        Args:
            error: What pending operations raise, unless torch had another one before.
            peacefully: Operations that have begun here may complete first, if they can.
        """


class ReconfigurableProcessGroup(ProcessGroupWrapper):
    """A group of its own, made anew by each `configure`."""

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        """Have no members yet.

        Args:
            timeout: Of each operation, and of `configure`; over 0.
        """
        super().__init__(timeout)
        self._lock = threading.Lock()
        self._live: LiveGroup | None = None
        self._attempt: CancellableTask[LiveGroup] | None = None
        self._error: Exception | None = None

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Meet the members of a new quorum; see `ProcessGroup.configure`."""
        place = MemberPlace(*args, **kwargs)
        attempt = CancellableTask[LiveGroup](
            lambda a: self._build(a, place),
            discard=lambda live: live.end(AbortedError(f"{place} came too late"), peacefully=False),
            timeout_s=self._timeout.total_seconds(),
            name=str(place),
        )
        self._begin(attempt)
        try:
            live = attempt.result()
        except BaseException as e:
            self._failed(attempt, e)
            raise
        if not self._adopt(attempt, live):
            error = self._error or AbortedError(f"{place} was aborted")
            live.end(error, peacefully=False)
            raise error

    def abort(self, errored: bool = True, *, why: str = "it was aborted") -> None:
        """Give up everything that is pending, `configure` too (any thread, at any time).

        Pending operations raise on this process within milliseconds. When this has returned, no
        byte is written into a tensor any more.

        Args:
            errored: Whether it is an error, which `errored` tells until the next `configure`.
            why: What the error says.
        """
        with self._lock:
            live, attempt = self._live, self._attempt
            self._live = self._attempt = None
            place = str(live.place) if live else "the process group"
            error = AbortedError(f"{place} can not go on: {why}")
            if errored and self._error is None:
                self._error = error
        if attempt is not None:
            attempt.give_up(error)
        if live is not None:
            _log.info("%s", error)
            live.end(error, peacefully=False)

    def shutdown(self) -> None:
        """Leave the group in peace; `configure` may still be called."""
        with self._lock:
            live, self._live = self._live, None
        if live is not None:
            live.end(NotConfiguredError(f"{live.place} was shut down"), peacefully=True)

    def errored(self) -> Exception | None:
        """Return why it was aborted, or could not be configured; None once it is configured."""
        return self._error

    def set_timeout(self, timeout: timedelta) -> None:
        """Let each later operation, and each `configure`, take at most so long."""
        self._timeout = timeout
        live = self._live
        if live is not None:
            live.set_timeout(timeout)

    @property
    def parent(self) -> TorchProcessGroup:
        """torch's group of the present members.

        Raises:
            NotConfiguredError: it was never configured, or has been shut down.
            Exception: why it was aborted.
        """
        live = self._live
        if live is not None:
            return live.pg
        if self._error is not None:
            raise self._error
        raise NotConfiguredError(f"{type(self).__name__} has no members: call configure() first")

    def __repr__(self) -> str:
        live = self._live
        return f"{type(self).__name__}({live.place if live else 'no members'})"

    def _build(self, attempt: CancellableTask[LiveGroup], place: MemberPlace) -> LiveGroup:
        """Make a group, on the attempt's thread."""
        raise NotImplementedError

    def _begin(self, attempt: CancellableTask[LiveGroup]) -> None:
        with self._lock:
            old, self._live = self._live, None
            earlier, self._attempt = self._attempt, attempt
            self._error = None
        if earlier is not None:
            earlier.give_up(AbortedError("configure() was called again"))
        attempt.start()
        if old is not None:
            old.end(AbortedError(f"{old.place} has been followed by another"), peacefully=True)

    def _failed(self, attempt: CancellableTask[LiveGroup], error: BaseException) -> None:
        if not attempt.give_up(AbortedError("interrupted")):
            _log.debug("%s", error)
        with self._lock:
            if self._attempt is attempt:
                self._attempt = None
                self._error = error if isinstance(error, Exception) else None

    def _adopt(self, attempt: CancellableTask[LiveGroup], live: LiveGroup) -> bool:
        with self._lock:
            if self._attempt is not attempt:  # aborted in this very moment
                return False
            self._attempt, self._live = None, live
            return True


# ---- Where the members of a process group find each other: a prefix of one member's TCPStore
# torch's constructors wait in the store for all members, for minutes and deaf to anything else.
# The `AbortableStore` stands between: it waits as long as its `CancellableTask` lasts, and knows
# who has not come.
#
# One client per store is kept for the life of the process: to connect costs a reverse lookup of
# the address, on both sides, and several seconds where no name server answers.


_OPERATION_S = 10.0
_CONNECT_S = 10.0
_SHORTEST_S = 0.0002
_LONGEST_S = 0.02
_KEPT_CLIENTS = 16
_POLLS_A_LOOK = 50

_clients: dict[tuple[str, int], TCPStore] = {}
_lock = threading.Lock()
os.register_at_fork(after_in_child=_clients.clear)


class StoreAddress(NamedTuple):
    """``host:port/prefix``, taken apart."""

    host: str
    port: int
    prefix: str


def parse(store_addr: str) -> StoreAddress:
    """Take apart the address of a store and a prefix in it.

    Args:
        store_addr: ``host:port/some/prefix``; an IPv6 address may stand in brackets.

    Raises:
        ConfigError: it is not of this form.
    """
    address, _, prefix = store_addr.partition("/")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError("store_addr", store_addr, "should be host:port/prefix")
    return StoreAddress(host.strip("[]"), int(port), prefix)


def connect(where: StoreAddress, attempt: CancellableTask[Any]) -> TCPStore:
    """Return this process's client of a store; connect as long as the attempt lasts."""
    key = where.host, where.port
    with _lock:
        client = _clients.pop(key, None)
    if client is None or not _answers(client):
        client = _new_client(where, attempt)
    with _lock:
        _clients[key] = client  # now the youngest
        while len(_clients) > _KEPT_CLIENTS:
            del _clients[next(iter(_clients))]
    return client


def connect_ahead(store: str) -> None:
    """Begin to connect to a store that may be needed soon; returns at once, and raises nothing.

    Args:
        store: ``host:port``.
    """
    where = parse(store)
    if (where.host, where.port) not in _clients:
        attempt = CancellableTask[TCPStore](
            lambda attempt: connect(where, attempt),
            discard=lambda _: None, timeout_s=_CONNECT_S, name="a connection made beforehand",
        )  # fmt: skip
        attempt.start()


class AbortableStore(Store):
    """The store of one group, for torch's constructors.

    Attributes:
        said: What the members wrote, by key, as far as this one has seen it.
    """

    def __init__(
        self, store: TCPStore, prefix: str, num_ranks: int, attempt: CancellableTask[Any]
    ) -> None:
        super().__init__()
        self.said: dict[str, bytes] = {}
        self._store = store
        self._prefix = prefix
        self._num_ranks = num_ranks
        self._attempt = attempt

    def set(self, key: str, value: bytes | str) -> None:
        """Write a value."""
        self._attempt.check()
        self.said[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(self._full(key), value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        self._wait_for([key])
        value = self._store.get(self._full(key))
        self.said[key] = value
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all are there; the attempt's time counts, not this one."""
        self._wait_for(keys)

    def check(self, keys: list[str]) -> bool:
        """Tell whether all are there."""
        return self._store.check([self._full(key) for key in keys])

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        return self._store.add(self._full(key), amount)

    def _wait_for(self, keys: Sequence[str]) -> None:
        # Polled, since a wait in a TCPStore can not be interrupted, and logs each time-out.
        full, delay_s, polls = [self._full(key) for key in keys], _SHORTEST_S, 0
        while True:
            self._attempt.check()
            if self._store.check(full):
                return
            if polls % _POLLS_A_LOOK == 0:
                self._attempt.waits_for = self._absent(keys)
            self._attempt.pause(delay_s)
            delay_s, polls = min(delay_s * 1.3, _LONGEST_S), polls + 1

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _absent(self, keys: Sequence[str]) -> str:
        """Name the ranks that have not come, where keys end in a rank, as gloo's do."""
        head, _, rank = keys[0].rpartition("/")
        if not rank.isdigit():
            return ", ".join(keys)
        ranks = [r for r in range(self._num_ranks) if not self.check([f"{head}/{r}"])]
        return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}"


def _answers(client: TCPStore) -> bool:
    try:
        client.check(["any"])
    except RuntimeError:  # its process has ended
        return False
    return True


def _new_client(where: StoreAddress, attempt: CancellableTask[Any]) -> TCPStore:
    address = _resolve(where)
    attempt.waits_for = f"the store at {where.host}:{where.port}"
    while True:
        patience_s = max(0.1, min(_CONNECT_S, attempt.left_s))
        try:
            client = TCPStore(
                address, where.port, is_master=False, wait_for_workers=False,
                timeout=timedelta(seconds=patience_s),
            )  # fmt: skip
        except RuntimeError:
            attempt.check()
            if attempt.left_s < _SHORTEST_S:
                raise
            attempt.pause(_LONGEST_S)
            continue
        client.set_timeout(timedelta(seconds=_OPERATION_S))
        return client


def _resolve(where: StoreAddress) -> str:
    try:
        found = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
    except OSError as e:
        remedy = f"can not be resolved ({e}); give a numeric address"
        raise ConfigError("store_addr", where.host, remedy) from e
    return str(sorted(found, key=lambda a: a[0] != socket.AF_INET)[0][4][0])


# ---- One try to build something together with others, which can be given up at any time
# To build a process group needs every member; any of them may be dead or stopped, and torch's
# constructors can not be interrupted. So it is built on a thread of its own, and who waits for it
# is released at once by `give_up`, or when its time is over. What is built too late is discarded
# by that thread. It is no daemon, since one that comes back from C++ while Python ends would
# crash the process; whatever is built must therefore end by itself within seconds.


T = TypeVar("T")


class CancellableTask(Generic[T]):
    """One try; its `result` can be waited for once.

    Attributes:
        waits_for: What it waits for at present, for the error of a time-out. Set by ``build``.
    """

    def __init__(
        self,
        build: Callable[[CancellableTask[T]], T],
        *,
        discard: Callable[[T], None],
        timeout_s: float,
        name: str,
    ) -> None:
        """Describe the try; `start` begins it.

        Args:
            build: Makes the result on the thread; calls `check` or `pause` while it waits.
            discard: Gets rid of a result that nobody wants any more.
            timeout_s: From now; over 0.
            name: What is built, for errors.
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
        """Begin to build."""
        threading.Thread(target=self._run, name="hpc-elastic-ft-build").start()

    def result(self) -> T:
        """Wait for what is built.

        Raises:
            CollectiveTimeoutError: the time was over; it names what was waited for.
            Exception: what ``build`` raised, or what it was given up with.
        """
        if not self._over.wait(max(self.left_s, 0.0)):
            self.give_up(self._too_late())
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def give_up(self, error: Exception) -> bool:
        """Let `result` raise this at once (any thread); False if it is over already."""
        return self._end(None, error)

    def check(self) -> None:
        """Raise if nobody waits for the result any more (the building thread)."""
        if self._over.is_set():
            raise self._error or RuntimeError("given up")
        if self.left_s <= 0:
            raise self._too_late()

    def pause(self, seconds: float) -> None:
        """Wait a moment, or until it is given up; then `check`."""
        self._over.wait(min(seconds, max(self.left_s, 0.0)))
        self.check()

    @property
    def left_s(self) -> float:
        """Seconds left; negative when it is late."""
        return self._until - time.monotonic()

    def _run(self) -> None:
        try:
            built = self._build(self)
        except BaseException as e:
            self._end(None, e)
            return
        if not self._end(built, None):
            self._discard(built)

    def _end(self, result: T | None, error: BaseException | None) -> bool:
        with self._lock:
            if self._over.is_set():
                return False
            self._result, self._error = result, error
            self._over.set()
            return True

    def _too_late(self) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"{self._name} was not ready within {self._timeout_s:g} s: "
            f"it waits for {self.waits_for}"
        )


# ---- To end torch's groups on a thread of their own
# The destructor of a gloo group joins its threads, which takes 10 to 30 ms; run by one of those
# threads (in a callback of a future) it would end the process. So the last reference is dropped
# by a thread that does nothing else, and only once nobody else has one.
#
# A thread that comes back from C++ while Python ends could crash the process, so the end waits
# for them; but not for one whose group is stuck until a time-out.


_OTHERS_S = 10.0
_POLL_S = 0.001
_AT_EXIT_S = 0.5
_OWN_REFERENCES = 2  # the list's, and getrefcount's argument

_threads: set[threading.Thread] = set()


def retire(held: list[Any]) -> threading.Event:
    """Take a group out of the list that held it, and destroy it in the background.

    Returns:
        An event that is set when the group's threads have ended.
    """
    quiet = threading.Event()
    groups = held[:]
    held.clear()
    name = "hpc-elastic-ft-retire"
    thread = threading.Thread(target=_drop, args=(groups, quiet), name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return quiet


def _drop(groups: list[Any], quiet: threading.Event) -> None:
    until = time.monotonic() + _OTHERS_S
    while groups:
        if sys.getrefcount(groups[-1]) > _OWN_REFERENCES and time.monotonic() < until:
            time.sleep(_POLL_S)  # somebody is in the middle of an operation
        else:
            groups.pop()
    quiet.set()
    _threads.discard(threading.current_thread())


@atexit.register
def _await_all() -> None:
    until = time.monotonic() + _AT_EXIT_S
    for thread in list(_threads):
        thread.join(max(0.0, until - time.monotonic()))
