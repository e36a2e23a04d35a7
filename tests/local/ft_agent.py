"""An agent of a node, as far as fault tolerance goes: its server, and the notices it is given."""

import asyncio
from pathlib import Path
from typing import Any

from hpc_elastic.ft.manager_server import ManagerServer
from hpc_elastic.ft.messages import PURPOSE, SESSION_EPOCH, Message, frame, parse_address, unpack
from hpc_elastic.transport.auth import user_secret
from hpc_elastic.transport.connection import ClientConnection, connect

_LOOK_S = 0.01
_RETRY_S = 0.02
_BEAT_S = 1.0


def agent(driver: Any, library: str, *, lighthouse: str, replica_id: str, path: str) -> None:
    """Serve a replica group of one worker until this process is ended.

    The driver says when the node is to be left ("notice"), and when it starts its worker again
    ("expect"); it is told when the group has left.
    """
    asyncio.run(_serve(driver, lighthouse, replica_id, path))


async def _serve(driver: Any, lighthouse: str, replica_id: str, path: str) -> None:
    line = _Line()
    server = ManagerServer(Path(path), replica_id, line)
    server.expect(1)
    await server.start()
    tasks = [
        asyncio.create_task(line.keep(server, lighthouse, replica_id)),
        asyncio.create_task(_tell_when_left(driver, server)),
    ]
    driver.send({"serves": True})
    while (order := await asyncio.to_thread(driver.receive)) is not None:
        if "notice" in order:
            server.notice(order["notice"])
        else:
            server.expect(1)
    for task in tasks:
        task.cancel()


async def _tell_when_left(driver: Any, server: ManagerServer) -> None:
    while not server.has_left:
        await asyncio.sleep(_LOOK_S)
    driver.send({"left": True})


class _Line:
    """The connection to the coordinator, again and again."""

    def __init__(self) -> None:
        self._stream: ClientConnection | None = None

    def send(self, message: Message) -> None:
        """Send what is for the keeper."""
        assert self._stream is not None
        self._stream.send(frame(message))

    async def keep(self, server: ManagerServer, lighthouse: str, replica_id: str) -> None:
        """Talk to it until cancelled."""
        address, secret = parse_address(lighthouse), user_secret(PURPOSE)
        while True:
            try:
                hello = {"replica": replica_id}
                self._stream = await connect(*address, secret, SESSION_EPOCH, hello)
                await self._talk(self._stream, server)
            except OSError:
                server.down()
            await asyncio.sleep(_RETRY_S)

    async def _talk(self, stream: ClientConnection, server: ManagerServer) -> None:
        beating = asyncio.create_task(self._beat(stream))
        try:
            server.up()
            while True:
                raw = await stream.receive()
                if raw["type"] == "ft":
                    server.heard(unpack(raw["message"]))
        finally:
            beating.cancel()
            stream.abort()

    async def _beat(self, stream: ClientConnection) -> None:
        while True:
            stream.send({"type": "beat"})
            await asyncio.sleep(_BEAT_S)
