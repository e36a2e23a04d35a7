"""The tasks of the probe connect to each other, compare clocks, and watch each other's files.

Each task answers a few requests over authenticated connections; their secret is the probe's token:

- ``time``: the time there; the fastest of several answers counts;
- ``prepare`` and ``change``: create and change the files that the asker watches;
- ``link``: race with the asker for a name by link(2); ``winners``: the holder of each name.

With a neighbour on another node each task tries how soon it sees what the other changes in a
folder, and whether link(2) is exclusive there (`FolderTrial`). As the *observer*, the task has
looked at the folder before, so that its client has cached it. The neighbour, the *doer*, changes
the folder, and the observer polls until it sees the changes, as a run looks. Each change is in a
folder of its own, because a look for one must not refresh another. Both also link their files to
the same names at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_elastic.doctor.probe_files import ProbeFolder, read
from hpc_elastic.shared_files import names_in
from hpc_elastic.transport.auth import FrameSigner
from hpc_elastic.transport.connection import SignedSocket, SocketServer

_CONNECT_S = 5.0
_OTHER_CONNECT_S = 1.0
_TRIES = 8
_ANSWER_S = 60.0
"""How long another node may take to change files."""
_SIGHT_S = 20.0
"""How soon a change has to be seen, apart from the staleness of the mount."""
_CONTEXT = "probe"

OBSERVER, DOER = "observer", "doer"
NUM_ROUNDS = 400
"""Names that two nodes link at once."""
TOGETHER = 20
"""Of these, after each message: both nodes begin at the same time again."""
CHANGES = {
    "created": "a new file",
    "renamed": "a renamed folder",
    "removed": "a removal",
    "replaced": "a replaced file",
    "appended": "appended text",
}
"""The changes of the doer, with their names for people."""
PATH = "path"
"""A new file that is polled by its path alone: shows how long a client answers from its cache."""
_PATH_S = 3.0
"""How long it is polled after all else was seen."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.25
_OLD, _MORE = "old", "and more"
_NEW = "new" * 100_000
"""Many pages long, so that a partial read shows."""


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
class Visibility:
    """How soon an observer has seen the changes.

    ``times_s`` has the names of `CHANGES`, and `PATH`; None if not within `waited_s`. ``torn``: the
    replaced file had content that was neither the old nor the new one.
    """

    times_s: Mapping[str, float | None] = field(default_factory=dict)
    waited_s: float = 0.0
    torn: bool = False


@dataclass(frozen=True)
class LinkRace:
    """Result of a race of two nodes for names by link(2).

    Rounds in which both found that they had won, or neither did; in which they read another winner.
    """

    rounds: int = 0
    both: int = 0
    neither: int = 0
    differ: int = 0


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


def serve_peers(place: ProbeFolder, token: str, *, v6: bool = False) -> int:
    """Serve the other tasks, in threads, as long as the process lives; return the port."""

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
    return SocketServer(addresses, token.encode(), _CONTEXT, serve, name="probe").address[1]


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
    address, port = peer["address"], peer["port"]
    others = {}
    for other in (a for found in peer["addresses"].values() for a in found):
        if other != address and (":" in other) == (":" in address):
            try:
                socket.create_connection((other, port), _OTHER_CONNECT_S).close()
                others[other] = True
            except OSError:
                others[other] = False
    result = PeerResult(number, peer["host"], address, others=others)
    if not address:
        return replace(result, problem="it has no address that others could reach")
    try:
        with connect_to_peer(peer, token, _CONNECT_S) as connection:
            took_s, ahead_s = min(_query_time(connection, asker) for _ in range(_TRIES))
    except (OSError, ValueError) as e:
        return replace(result, problem=str(e) or type(e).__name__)
    return replace(result, round_trip_s=took_s, clock_ahead_s=ahead_s)


def _query_time(connection: SignedSocket, asker: int) -> tuple[float, float]:
    """Return the round trip, and how far the other's clock is ahead."""
    sent, before = time.time(), time.monotonic()
    answer = float(send_request(connection, "time", asker)["time"])
    took_s = time.monotonic() - before
    return took_s, answer - (sent + took_s / 2)


def send_request(connection: SignedSocket, what: str, asker: int) -> dict[str, Any]:
    """Send another task a request, and return its answer; raise OSError if it fails."""
    connection.send({"do": what, "asker": asker})
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


@dataclass(frozen=True)
class FolderTrial:
    """A folder that a doer creates and changes while an observer watches."""

    path: Path

    def make_files(self) -> None:
        """Create the files that will change (doer)."""
        self.path.mkdir()
        for name in (*CHANGES, PATH, "race"):
            (self.path / name).mkdir()
        (self.path / "renamed" / "old").mkdir()
        for name in ("removed", "replaced", "appended"):
            self._file(name).write_text(_OLD)

    def apply_changes(self) -> None:
        """Make all changes that the observer has to see (doer)."""
        for name in ("created", PATH):
            (self.path / name / "new").touch()
        (self.path / "renamed" / "old").rename(self.path / "renamed" / "new")
        self._file("removed").unlink()
        _append(self.path / "replaced" / "staged", _NEW)
        (self.path / "replaced" / "staged").replace(self._file("replaced"))
        _append(self._file("appended"), _MORE)

    def watch_changes(self, change: Callable[[], object], timeout_s: float) -> Visibility:
        """Have ``change`` called, and wait until the changes are seen (observer)."""
        start = time.monotonic()
        files = [self._file(name) for name in ("removed", "replaced", "appended")]
        while self._names("renamed") != {"old"} or any(read(file) != _OLD for file in files):
            if time.monotonic() - start > timeout_s:
                return Visibility(dict.fromkeys((*CHANGES, PATH)), timeout_s)
            time.sleep(_LONGEST_PAUSE_S)
        unseen: dict[str, Callable[[], object]] = {  # as a run looks, and `PATH` as it never does
            "created": lambda: self._names("created") == {"new"},
            "renamed": lambda: self._names("renamed") == {"new"},
            "removed": lambda: self._names("removed") == set(),
            "replaced": lambda: read(self._file("replaced")).removeprefix(_OLD),
            "appended": lambda: read(self._file("appended")) == _OLD + _MORE,
            PATH: (self.path / PATH / "new").exists,
        }
        for detect in unseen.values():
            detect()
        change()
        start, waited_s, new, times = time.monotonic(), 0.0, "", dict[str, float | None]()
        while unseen and waited_s < timeout_s and (waited_s < _PATH_S or unseen.keys() - {PATH}):
            for name, detect in list(unseen.items()):
                if found := detect():
                    times[name] = time.monotonic() - start
                    new = str(found) if name == "replaced" else new
                    del unseen[name]
            time.sleep(min(_LONGEST_PAUSE_S, max(_PAUSE_S, waited_s / 20)))
            waited_s = time.monotonic() - start
        return Visibility({**times, **dict.fromkeys(unseen)}, waited_s, torn=new not in ("", _NEW))

    def stage_link(self, who: str) -> None:
        """Create the file whose links will race (both)."""
        self._race(who).write_text(who)

    def race_links(self, first: int, who: str) -> list[bool]:
        """Try to link the names of some rounds; return which this node has won (both).

        A node that is behind finds names that exist, faster than it links: it catches up, and from
        there on both try to link the same name at once. Raises OSError if a result is unknown.
        """
        numbers = range(first, first + TOGETHER)
        won = [self._link(number, who) for number in numbers]
        # was the reply to a link of our own lost?
        return [w or read(self._race(n)) == who for n, w in zip(numbers, won, strict=True)]

    def _link(self, number: int, who: str) -> bool:
        try:
            os.link(self._race(who), self._race(number))
        except FileExistsError:
            return False
        return True

    def read_winners(self) -> list[str]:
        """Return the holder of each round's name, as this node reads it; empty if it cannot."""
        return [read(self._race(number)) for number in range(NUM_ROUNDS)]

    def _race(self, name: int | str) -> Path:
        return self.path / "race" / str(name)

    def _file(self, name: str) -> Path:
        return self.path / name / "file"

    def _names(self, name: str) -> set[str] | None:
        """Return the names in one of the folders; None if it cannot be listed."""
        try:
            return {*names_in(self.path / name)}
        except OSError:
            return None


def count_race(won: Sequence[tuple[bool, bool]], winners: Sequence[Sequence[str]]) -> LinkRace:
    """Return the result of a race: who found that it won, and what both nodes read later (pure)."""
    return LinkRace(
        rounds=len(won),
        both=sum(all(pair) for pair in won),
        neither=sum(not any(pair) for pair in won),
        differ=sum("" not in pair and pair[0] != pair[1] for pair in zip(*winners, strict=True)),
    )


def _append(file: Path, text: str) -> None:
    with file.open("a") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
