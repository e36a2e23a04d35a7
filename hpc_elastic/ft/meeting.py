"""Where the members of a process group find each other: a prefix of one member's TCPStore.

torch's constructors wait in the store for all members, for minutes and deaf to anything else. The
`Meeting` stands between: it waits as long as its `Attempt` lasts, and knows who has not come.

One client per store is kept for the life of the process: to connect costs a reverse lookup of the
address, on both sides, and several seconds where no name server answers.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store, TCPStore  # what torch.distributed exports

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft.attempt import Attempt

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


def connect(where: StoreAddress, attempt: Attempt[Any]) -> TCPStore:
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
        attempt = Attempt[TCPStore](
            lambda attempt: connect(where, attempt),
            discard=lambda _: None, timeout_s=_CONNECT_S, name="a connection made beforehand",
        )  # fmt: skip
        attempt.start()


class Meeting(Store):
    """The store of one group, for torch's constructors.

    Attributes:
        said: What the members wrote, by key, as far as this one has seen it.
    """

    def __init__(self, store: TCPStore, prefix: str, num_ranks: int, attempt: Attempt[Any]) -> None:
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


def _new_client(where: StoreAddress, attempt: Attempt[Any]) -> TCPStore:
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
