"""The tasks of the probe meet: really connect, compare clocks, and see each other's files.

Each task serves a few requests, one JSON line and one answer a connection; strangers, who do not
know the token, get none. It asks the others the same:

- ``time``: what time it is there; the answer of the quickest of several tries counts;
- ``create`` and ``replace``: make a file, or another one in its place, and say so. How long it
  takes until the asker sees it is what caches of the file system cost.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_elastic.doctor.place import Place
from hpc_elastic.files import is_there, write_atomic

_CONNECT_S = 5.0
_OTHER_CONNECT_S = 1.0
_TRIES = 8
_SIGHT_S = 20.0
_MAX_LINE = 4096


@dataclass(frozen=True)
class Sight:
    """What one task found of another.

    Attributes:
        index: The other task.
        host: The other node.
        address: The address at which it was tried.
        problem: Why it can not be reached; empty if it can.
        round_trip_s: The quickest answer; None if there was none.
        clock_ahead_s: How far its clock is ahead of this one's, within half of that.
        others: Whether its further addresses can be reached.
    """

    index: int
    host: str
    address: str
    problem: str = ""
    round_trip_s: float | None = None
    clock_ahead_s: float | None = None
    others: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Meeting:
    """What one task found of the others.

    Attributes:
        sights: One for each other task that takes part.
        absent: Those whose file did not appear here.
        created_s: How long another node's new file took to appear; None if that was not tried.
        replaced_s: The same for new content of a file that had been read here.
        won: Whether this task's hard link was the first one.
    """

    sights: list[Sight] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)
    created_s: float | None = None
    replaced_s: float | None = None
    won: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Meeting:
        """Return it from `to_json`."""
        return cls(**{**raw, "sights": [Sight(**sight) for sight in raw["sights"]]})


class Server:
    """Serves the others, in threads of its own, as long as the process lives."""

    def __init__(self, place: Place, token: str, *, v6: bool = False) -> None:
        handler = _handler(place.path, token)

        class _Listener(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if v6 else socket.AF_INET
            daemon_threads = True

        self._server = _Listener(("::" if v6 else "0.0.0.0", 0), handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()


def _handler(folder: Path, token: str) -> type[socketserver.StreamRequestHandler]:
    class _Handler(socketserver.StreamRequestHandler):
        timeout = _CONNECT_S

        def handle(self) -> None:
            try:
                while line := self.rfile.readline(_MAX_LINE):
                    request = json.loads(line)
                    if not hmac.compare_digest(str(request["token"]), token):
                        return
                    answer = serve(folder, request)
                    self.wfile.write(json.dumps(answer).encode() + b"\n")
            except (OSError, ValueError, KeyError, TypeError):
                return

    return _Handler


def serve(folder: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Do what another task asks, and return the answer."""
    what, asker = request["do"], int(request["asker"])
    if what == "create":
        (folder / f"seen-{asker}").touch(exist_ok=False)
    elif what == "replace":
        write_atomic(folder / f"seen-{asker}", "replaced")
    return {"time": time.time()}


def meet(
    place: Place,
    index: int,
    token: str,
    peers: Mapping[int, Mapping[str, Any]],
    absent: list[int],
) -> Meeting:
    """Meet the others (every task that takes part).

    Args:
        place: The probe's folder.
        index: This task.
        token: The probe's.
        peers: What the others have published, by index.
        absent: Those who have not.
    """
    sights = [_look_at(number, peer, index, token) for number, peer in sorted(peers.items())]
    won = _link(place, index)
    reached = [sight for sight in sights if not sight.problem]
    if not reached:
        return Meeting(sights, absent, won=won)
    neighbour = next((s for s in reached if s.index > index), reached[0])
    try:
        created, replaced = _see(place, index, token, peers[neighbour.index])
    except (OSError, ValueError):
        created = replaced = None
    return Meeting(sights, absent, created, replaced, won)


def _look_at(number: int, peer: Mapping[str, Any], asker: int, token: str) -> Sight:
    address, port, host = peer["address"], peer["port"], peer["host"]
    others = {
        other: _reaches(other, port)
        for found in peer["addresses"].values()
        for other in found
        if other != address and (":" in other) == (":" in address)
    }
    if not address:
        return Sight(number, host, "", "it has no address that others could reach", others=others)
    try:
        with socket.create_connection((address, port), _CONNECT_S) as connection:
            best = min(_ask_time(connection, asker, token) for _ in range(_TRIES))
    except (OSError, ValueError) as e:
        return Sight(number, host, address, str(e) or type(e).__name__, others=others)
    return Sight(number, host, address, "", best[0], best[1], others)


def _reaches(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), _OTHER_CONNECT_S).close()
    except OSError:
        return False
    return True


def _ask_time(connection: socket.socket, asker: int, token: str) -> tuple[float, float]:
    """Return the round trip, and how far the other's clock is ahead."""
    sent, before = time.time(), time.monotonic()
    told = float(request(connection, "time", asker, token)["time"])
    took = time.monotonic() - before
    return took, told - (sent + took / 2)


def request(connection: socket.socket, what: str, asker: int, token: str) -> dict[str, Any]:
    """Ask another task, and return its answer.

    Raises:
        OSError: it does not answer.
        ValueError: it answers nonsense.
    """
    line = json.dumps({"token": token, "do": what, "asker": asker}) + "\n"
    connection.sendall(line.encode())
    answer = connection.makefile().readline(_MAX_LINE)
    if not answer:
        raise ConnectionError("the connection was closed")
    parsed: dict[str, Any] = json.loads(answer)
    return parsed


def _link(place: Place, index: int) -> bool:
    """Try to be the one whose hard link is made; exactly one of all nodes may succeed."""
    own = place.path / f"link-{index}"
    try:
        own.touch()
        (place.path / "first").hardlink_to(own)
    except OSError:
        return False
    return True


def _see(
    place: Place, index: int, token: str, peer: Mapping[str, Any]
) -> tuple[float | None, float | None]:
    """Return how long a file made elsewhere takes to appear here, and how long new content."""
    file = place.path / f"seen-{index}"
    file.exists()  # that it is not there is remembered by the file system from here on
    with socket.create_connection((peer["address"], peer["port"]), _SIGHT_S) as connection:
        request(connection, "create", index, token)
        created = _until(lambda: is_there(file))
        is_there(file) and file.read_text()
        request(connection, "replace", index, token)
        return created, _until(lambda: is_there(file) and file.read_text() == "replaced")


def _until(seen: Callable[[], bool]) -> float | None:
    """Return how long it takes until something is seen; None if that is too long."""
    start = time.monotonic()
    while not seen():
        if time.monotonic() - start > _SIGHT_S:
            return None
        time.sleep(0.002)
    return time.monotonic() - start


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def publish(place: Place, index: int, port: int, facts: Any) -> None:
    """Tell the others how this task can be reached."""
    content = {
        "host": facts.name, "address": facts.address, "interface": facts.interface,
        "port": port, "addresses": facts.addresses, "store_port": free_port(), "pid": os.getpid(),
    }  # fmt: skip
    place.write(place.peer(index), content)
