"""The workers' side of part f: members of one quorum, as clients of its lighthouse.

Ours are the authenticated connections that their manager servers would have, in one process on one
event loop. torchft's are its own clients, each in a thread.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from ft.libraries import OURS, PEER, part_of
from ft.lines import Lines

TIMEOUT = timedelta(seconds=60)


def clients(driver: Lines, library: str, *, address: str, names: list[str], ranks: int = 1) -> None:
    """Ask for a quorum with all clients at once, each time when the driver says so."""
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
        from hpc_elastic.transport.connection import connect
        from hpc_elastic.transport.secret import user_secret

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
