"""The tasks of the probe meet: really connect, compare clocks, and see each other's files.

Each task answers a few requests over authenticated connections; their secret is the probe's token.
It asks the others the same:

- ``time``: what time it is there; the answer of the quickest of several tries counts;
- ``prepare`` and ``change``: make and change what the asker watches, in the shared folder;
- ``link``: race with the asker for a name; ``winners``: who has each (`shared_folder`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_elastic.doctor.probe_folder import ProbeFolder
from hpc_elastic.doctor.shared_folder import NUM_ROUNDS, Race, Trial, Visibility, result_of
from hpc_elastic.transport.signed_socket import SignedSocket

_CONNECT_S = 5.0
_OTHER_CONNECT_S = 1.0
_TRIES = 8
_ANSWER_S = 60.0
"""For so long another node may take to change files: a file system may be slow."""
_SIGHT_S = 20.0
"""So soon a change is to be seen, and later by what the mount allows itself."""
_CONTEXT = "probe"
_OBSERVER, _DOER = "observer", "doer"


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
class ProbeMeeting:
    """What one task found of the others.

    Attributes:
        sights: One for each other task that takes part.
        absent: Those whose file did not appear here.
        seen: How soon this node has seen what another one did; None if that was not tried.
        race: How the two have raced for names; None if they have not.
        problem: What kept them from it, though they reach each other.
    """

    sights: list[Sight] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)
    seen: Visibility | None = None
    race: Race | None = None
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> ProbeMeeting:
        """Return it from `to_json`."""
        sights = [Sight(**sight) for sight in raw["sights"]]
        seen = None if raw["seen"] is None else Visibility(**raw["seen"])
        race = None if raw["race"] is None else Race(**raw["race"])
        return cls(**{**raw, "sights": sights, "seen": seen, "race": race})


class ProbeServer:
    """Serves the others, in threads of its own, as long as the process lives."""

    def __init__(self, place: ProbeFolder, token: str, *, v6: bool = False) -> None:
        handler = _handler(place.path, token)

        class _Listener(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if v6 else socket.AF_INET
            daemon_threads = True

        self._server = _Listener(("::" if v6 else "0.0.0.0", 0), handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()


def _handler(folder: Path, token: str) -> type[socketserver.BaseRequestHandler]:
    class _Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                connection = SignedSocket.accept(
                    self.request, token.encode(), _CONTEXT, timeout_s=_CONNECT_S
                )
                while True:
                    request = connection.receive()
                    try:
                        answer = serve(folder, request)
                    except OSError as e:
                        answer = {"error": str(e)}
                    connection.send(answer)

    return _Handler


def serve(folder: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Do what another task asks, and return the answer.

    Raises:
        OSError: the folder does not let it.
    """
    trial = Trial(folder / f"trial-{int(request['asker'])}")
    match request["do"]:
        case "prepare":
            trial.prepare()
            trial.stage(_DOER)
        case "change":
            trial.change()
        case "link":
            return {"won": trial.link(int(request["round"]), _DOER)}
        case "winners":
            return {"winners": trial.winners()}
    return {"time": time.time()}


def meet(
    place: ProbeFolder,
    index: int,
    token: str,
    peers: Mapping[int, Mapping[str, Any]],
    absent: list[int],
) -> ProbeMeeting:
    """Meet the others (every task that takes part).

    Args:
        place: The probe's folder.
        index: This task.
        token: The probe's.
        peers: What all that take part have published, by index, this task's own included.
        absent: Those who have not.
    """
    own = peers[index]["host"]
    others = {number: peer for number, peer in sorted(peers.items()) if number != index}
    sights = [_look_at(number, peer, index, token) for number, peer in others.items()]
    elsewhere = [s for s in sights if not s.problem and s.host != own]
    if not elsewhere:
        return ProbeMeeting(sights, absent)
    neighbour = next((s for s in elsewhere if s.index > index), elsewhere[0])
    try:
        race, seen = _try_folder(place, index, token, peers[neighbour.index])
    except (OSError, ValueError, KeyError) as e:
        return ProbeMeeting(sights, absent, problem=f"with {neighbour.host}: {e}")
    return ProbeMeeting(sights, absent, seen, race)


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
        with _connect(peer, token, _CONNECT_S) as connection:
            best = min(_ask_time(connection, asker) for _ in range(_TRIES))
    except (OSError, ValueError) as e:
        return Sight(number, host, address, str(e) or type(e).__name__, others=others)
    return Sight(number, host, address, "", best[0], best[1], others)


def _reaches(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), _OTHER_CONNECT_S).close()
    except OSError:
        return False
    return True


def _ask_time(connection: SignedSocket, asker: int) -> tuple[float, float]:
    """Return the round trip, and how far the other's clock is ahead."""
    sent, before = time.time(), time.monotonic()
    told = float(request(connection, "time", asker)["time"])
    took = time.monotonic() - before
    return took, told - (sent + took / 2)


def request(connection: SignedSocket, what: str, asker: int, **details: int) -> dict[str, Any]:
    """Send a request to another task, and return its answer.

    Raises:
        OSError: it does not answer, or cannot do it.
    """
    connection.send({"do": what, "asker": asker, **details})
    return _answer(connection)


def _answer(connection: SignedSocket) -> dict[str, Any]:
    answer = connection.receive()
    if "error" in answer:
        raise OSError(answer["error"])
    return answer


def _try_folder(
    place: ProbeFolder, index: int, token: str, peer: Mapping[str, Any]
) -> tuple[Race, Visibility]:
    """Race with another node, and watch what it does to the folder."""
    trial = Trial(place.path / f"trial-{index}")
    patience_s = _SIGHT_S + place.late_s
    with _connect(peer, token) as connection:
        request(connection, "prepare", index)
        race = _race(trial, connection, index)

    def change() -> None:
        with _connect(peer, token) as connection:
            request(connection, "change", index)

    return race, trial.watch(change, patience_s)


def _connect(
    peer: Mapping[str, Any], token: str, timeout_s: float = _ANSWER_S
) -> contextlib.closing[SignedSocket]:
    address = peer["address"], peer["port"]
    connection = SignedSocket.connect(address, token.encode(), _CONTEXT, timeout_s=timeout_s)
    return contextlib.closing(connection)


def _race(trial: Trial, connection: SignedSocket, index: int) -> Race:
    trial.stage(_OBSERVER)
    won = []
    trip_s, _ = _ask_time(connection, index)
    for number in range(NUM_ROUNDS):
        connection.send({"do": "link", "asker": index, "round": number})
        time.sleep(number % 4 * trip_s / 2)  # who is first differs
        mine = trial.link(number, _OBSERVER)
        won.append((mine, bool(_answer(connection)["won"])))
    theirs = request(connection, "winners", index)["winners"]
    return result_of(won, [trial.winners(), theirs])


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def publish(place: ProbeFolder, index: int, port: int, facts: Any) -> dict[str, Any]:
    """Tell the others how this task can be reached; return what they are told."""
    content = {
        "host": facts.name, "address": facts.address, "interface": facts.interface,
        "port": port, "addresses": facts.addresses, "store_port": free_port(), "pid": os.getpid(),
    }  # fmt: skip
    place.write(place.peer(index), content)
    return content
