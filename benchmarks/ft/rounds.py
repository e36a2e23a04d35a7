"""Part f: how long a round of the quorum takes, by the number of members on one coordinator.

With groups of eight ranks, a member asks for all of its group, as its manager server does, and is
told the place of each rank; their own connections to that server are on a node of their own.
"""

import asyncio
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from evidence.result import exponent

from ft.crew import crew
from ft.libraries import OURS, PEER, lighthouse, part_of
from ft.nursery import Lines
from ft.report import Row, Settings

MEMBERS = (16, 64, 256)
GROUPS, RANKS = (64, 256), 8
ROUNDS = 30
MAX_EXPONENT = 1.2
TIMEOUT = timedelta(seconds=60)


def measure(settings: Settings) -> Iterator[Row]:
    counts = MEMBERS if not settings.quick else MEMBERS[:2]
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(settings.repeats):
        for count in counts:
            for library in settings.libraries:
                taken = [1000 * s for s in _rounds(library, count)]
                found.setdefault((library, count), []).append(statistics.median(taken))
    for count in counts:
        ours, peer = found.get((OURS, count), []), found.get((PEER, count), [])
        of_peer = 1.0 if count == MEMBERS[0] else None
        yield Row("f quorum round", f"{count} members", "ms", ours, peer, of_peer=of_peer)
    exponents = {
        library: [exponent({c: statistics.median(found[library, c]) for c in counts})]
        for library in settings.libraries
    }
    ours, peer = exponents.get(OURS, []), exponents.get(PEER, [])
    yield Row("f quorum round", "growth exponent", "", ours, peer, limit=MAX_EXPONENT)
    for count in GROUPS if not settings.quick else GROUPS[:1]:
        yield from _of_groups(settings, count)


def _of_groups(settings: Settings, count: int) -> Iterator[Row]:
    found: dict[str, list[float]] = {OURS: [], PEER: []}
    for _ in range(settings.repeats):
        for library in settings.libraries:
            taken = [1000 * s for s in _rounds(library, count, RANKS)]
            found[library].append(statistics.median(taken))
    what, part = f"{count} groups of {RANKS} ranks", "f quorum round"
    yield Row(part, f"{what}, over sockets", "ms", found[OURS], found[PEER], of_peer=1.0)


def _rounds(library: str, count: int, ranks: int = 1) -> list[float]:
    """Return the seconds from the first ask of a round to its last answer."""
    with crew() as people, lighthouse(library) as light:
        names = [f"member{i}" for i in range(count)]
        member = people.start(library, "clients", address=light.address, names=names, ranks=ranks)
        people.need(lambda: bool(member.events) or member.gone, f"{count} clients connect")
        taken = []
        for _ in range(ROUNDS):
            member.events.clear()
            member.tell({"ask": True})
            people.need(lambda: bool(member.events) or member.gone, f"a round of {count}")
            if member.first("members") == count:
                begun, ended = member.first("round") or (0.0, 0.0)
                taken.append(ended - begun)
        if not taken:
            raise RuntimeError(f"no round of all {count}\n{people.last_words()}")
        return taken


# ---- in a worker: members of one quorum, as clients of its lighthouse


def clients(driver: Lines, library: str, *, address: str, names: list[str], ranks: int = 1) -> None:
    """Ask for a quorum with all clients at once, each time when the driver says so.

    Ours are the authenticated connections that their manager servers would have, in one process on
    one event loop. torchft's are its own clients, each in a thread.
    """
    if library == OURS:
        asyncio.run(_our_rounds(driver, address, names, ranks))
    else:
        _peers_rounds(driver, address, names, ranks)


def _peers_rounds(driver: Lines, address: str, names: list[str], ranks: int) -> None:
    with ThreadPoolExecutor(len(names)) as pool:
        made = list(pool.map(lambda name: _peer(address, name, ranks), names))
        driver.send({"ready": True})
        while driver.receive() is not None:
            begun = time.monotonic()
            sizes = list(pool.map(lambda ask: ask(), made))
            driver.send({"round": [begun, time.monotonic()], "members": min(sizes)})


def _peer(address: str, name: str, ranks: int) -> Any:
    client = part_of(PEER, "coordination").LighthouseClient(address, TIMEOUT)
    step = 0

    def ask() -> int:
        nonlocal step
        step += 1
        quorum = client.quorum(
            replica_id=name, timeout=TIMEOUT, address="a", store_address="b", step=step,
            world_size=ranks,
        )  # fmt: skip
        return len(quorum.participants)

    return ask


async def _our_rounds(driver: Lines, address: str, names: list[str], ranks: int) -> None:
    members = [_Member(name, ranks) for name in names]
    for member in members:
        await member.connect(address)
    driver.send({"ready": True})
    while await asyncio.to_thread(driver.receive) is not None:
        begun = time.monotonic()
        for member in members:
            member.ask()
        sizes = [await member.answered for member in members]
        driver.send({"round": [begun, time.monotonic()], "members": min(sizes)})
    for member in members:
        member.reading.cancel()


class _Member:
    """One authenticated connection; it says what a group's server would."""

    def __init__(self, name: str, ranks: int) -> None:
        self._name = name
        self._ranks = ranks
        self._quorum_id = -1
        self._step = 0

    async def connect(self, address: str) -> None:
        self._messages = messages = part_of(OURS, "messages")
        from hpc_elastic.transport.auth import user_secret
        from hpc_elastic.transport.connection import connect

        host, port = messages.parse_address(address)
        secret, hello = user_secret(messages.LIGHTHOUSE_PURPOSE), {"replica": self._name}
        self._stream = await connect(host, port, secret, messages.LIGHTHOUSE_SESSION, hello)
        self._send(messages.ReplicaStatus(-1, 0, 0, 0, is_aborted=False))
        self.reading = asyncio.create_task(self._read())

    def ask(self) -> None:
        """Ask for the next quorum, as after a step that failed: all of them do."""
        self.answered: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._send(
            self._messages.QuorumRequest(
                1, self._step, "version", self._quorum_id, self._quorum_id >= 0, 1, False,
                "127.0.0.1:29500", ("http://127.0.0.1:29501/state",) * self._ranks,
            )
        )  # fmt: skip

    def _send(self, message: Any) -> None:
        self._stream.send(self._messages.to_frame(message))

    async def _read(self) -> None:
        while True:
            raw = await self._stream.receive()
            if raw["type"] != "ft":
                continue
            message = self._messages.unpack(raw["message"])
            if isinstance(message, self._messages.QuorumResults):
                result = message.ranks[0]
                self._quorum_id, self._step = result.quorum_id, result.max_step
                self.answered.set_result(result.replica_world_size)
