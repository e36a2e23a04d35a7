"""The tasks of the probe connect to each other, compare clocks, and watch each other's files.

Each task answers a few requests over authenticated connections; their secret is the probe's token:

- ``time``: the time there; the fastest of several answers counts;
- ``prepare`` and ``change``: create and change the files that the asker watches;
- ``link``: race with the asker for a name by link(2); ``winners``: the holder of each name.

With a neighbour on another node each task is the observer of a `folder_trial`.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_elastic.doctor.folder_trial import (
    DOER,
    NUM_ROUNDS,
    OBSERVER,
    TOGETHER,
    FolderTrial,
    LinkRace,
    Visibility,
    count_race,
)
from hpc_elastic.doctor.probe_folder import ProbeFolder
from hpc_elastic.transport.auth import FrameSigner
from hpc_elastic.transport.signed_socket import SignedSocket, SocketServer

_CONNECT_S = 5.0
_OTHER_CONNECT_S = 1.0
_TRIES = 8
_ANSWER_S = 60.0
"""How long another node may take to change files."""
_SIGHT_S = 20.0
"""How soon a change has to be seen, apart from the staleness of the mount."""
_CONTEXT = "probe"


@dataclass(frozen=True)
class PeerResult:
    """What one task found of another.

    ``problem`` is why it cannot be reached at ``address``. ``round_trip_s`` is the fastest answer;
    ``clock_ahead_s`` is how far its clock is ahead of this one's, within half of that. ``others``:
    whether its other addresses can be reached.
    """

    index: int
    host: str
    address: str
    problem: str = ""
    round_trip_s: float | None = None
    clock_ahead_s: float | None = None
    others: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class MeetingResult:
    """What one task found of the others.

    ``absent`` are tasks whose file did not appear here. ``seen`` and ``race`` are with another
    node, None if not tested; ``problem`` is why not, if the nodes reach each other.
    """

    peers: list[PeerResult] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)
    seen: Visibility | None = None
    race: LinkRace | None = None
    problem: str = ""


class ProbeServer:
    """Serves the other tasks, in threads of its own, as long as the process lives."""

    def __init__(self, place: ProbeFolder, token: str, *, v6: bool = False) -> None:
        def serve(sock: socket.socket, signer: FrameSigner) -> None:
            connection = SignedSocket(sock, signer, _CONNECT_S)
            while True:
                request = connection.receive()
                try:
                    answer = _handle_request(place.path, request)
                except OSError as e:
                    answer = {"error": str(e)}
                except (KeyError, TypeError) as e:
                    raise ValueError(f"no request: {e}") from e
                connection.send(answer)

        addresses = ["::" if v6 else "0.0.0.0"]
        server = SocketServer(addresses, token.encode(), _CONTEXT, serve, name="probe")
        self.port = server.address[1]


def _handle_request(folder: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out the request of another task; raise OSError if the folder does not allow it."""
    trial = FolderTrial(folder / f"trial-{int(request['asker'])}")
    match request["do"]:
        case "prepare":
            trial.make_files()
            trial.stage_link(DOER)
        case "change":
            trial.apply_changes()
        case "link":
            return {"won": trial.race_links(int(request["first"]), DOER)}
        case "winners":
            return {"winners": trial.read_winners()}
    return {"time": time.time()}


def meet_peers(
    place: ProbeFolder,
    index: int,
    token: str,
    published: Mapping[int, Mapping[str, Any]],
    absent: list[int],
) -> MeetingResult:
    """Connect to the other tasks, and watch one change files; ``published`` is of all, by index."""
    own = published[index]["host"]
    others = {number: peer for number, peer in sorted(published.items()) if number != index}
    peers = [_try_peer(number, peer, index, token) for number, peer in others.items()]
    elsewhere = [p for p in peers if not p.problem and p.host != own]
    if not elsewhere:
        return MeetingResult(peers, absent)
    neighbour = next((p for p in elsewhere if p.index > index), elsewhere[0])
    try:
        race, seen = _try_folder(place, index, token, published[neighbour.index])
    except (OSError, ValueError, KeyError) as e:
        return MeetingResult(peers, absent, problem=f"with {neighbour.host}: {e}")
    return MeetingResult(peers, absent, seen, race)


def _try_peer(number: int, peer: Mapping[str, Any], asker: int, token: str) -> PeerResult:
    address, port, host = peer["address"], peer["port"], peer["host"]
    others = {}
    for other in (a for found in peer["addresses"].values() for a in found):
        if other != address and (":" in other) == (":" in address):
            try:
                socket.create_connection((other, port), _OTHER_CONNECT_S).close()
                others[other] = True
            except OSError:
                others[other] = False
    if not address:
        return PeerResult(
            number, host, "", "it has no address that others could reach", others=others
        )
    try:
        with connect_to_peer(peer, token, _CONNECT_S) as connection:
            best = min(_query_time(connection, asker) for _ in range(_TRIES))
    except (OSError, ValueError) as e:
        return PeerResult(number, host, address, str(e) or type(e).__name__, others=others)
    return PeerResult(number, host, address, "", best[0], best[1], others)


def _query_time(connection: SignedSocket, asker: int) -> tuple[float, float]:
    """Return the round trip, and how far the other's clock is ahead."""
    sent, before = time.time(), time.monotonic()
    answer = float(send_request(connection, "time", asker)["time"])
    took_s = time.monotonic() - before
    return took_s, answer - (sent + took_s / 2)


def send_request(connection: SignedSocket, what: str, asker: int, **details: int) -> dict[str, Any]:
    """Send another task a request, and return its answer; raise OSError if it fails."""
    connection.send({"do": what, "asker": asker, **details})
    return _receive_answer(connection)


def _receive_answer(connection: SignedSocket) -> dict[str, Any]:
    answer = connection.receive()
    if "error" in answer:
        raise OSError(answer["error"])
    return answer


def _try_folder(
    place: ProbeFolder, index: int, token: str, peer: Mapping[str, Any]
) -> tuple[LinkRace, Visibility]:
    """Race with another node, and watch it change the folder."""
    trial, won = FolderTrial(place.path / f"trial-{index}"), list[tuple[bool, bool]]()
    with connect_to_peer(peer, token) as connection:
        send_request(connection, "prepare", index)
        trial.stage_link(OBSERVER)
        for first in range(0, NUM_ROUNDS, TOGETHER):
            connection.send({"do": "link", "asker": index, "first": first})
            mine = trial.race_links(first, OBSERVER)
            won += zip(mine, _receive_answer(connection)["won"], strict=True)
        theirs = send_request(connection, "winners", index)["winners"]
    race = count_race(won, [trial.read_winners(), theirs])

    def change() -> None:
        with connect_to_peer(peer, token) as connection:
            send_request(connection, "change", index)

    return race, trial.watch_changes(change, _SIGHT_S + place.staleness_s)


def connect_to_peer(
    peer: Mapping[str, Any], token: str, timeout_s: float = _ANSWER_S
) -> contextlib.closing[SignedSocket]:
    """Connect to another task by its published address; the connection closes with the context."""
    address = peer["address"], peer["port"]
    connection = SignedSocket.connect(address, token.encode(), _CONTEXT, timeout_s=timeout_s)
    return contextlib.closing(connection)


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def publish_address(place: ProbeFolder, index: int, port: int, facts: Any) -> dict[str, Any]:
    """Publish the address of this task for the others; return what was published."""
    content = {
        "host": facts.name, "address": facts.address, "port": port,
        "addresses": facts.addresses, "store_port": free_port(),
    }  # fmt: skip
    place.write_json(place.peer_file(index), content)
    return content
