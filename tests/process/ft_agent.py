"""An agent of a node, as far as fault tolerance needs one: its server, and its leave notices."""

import asyncio
from pathlib import Path
from typing import Any

from hpc_elastic.ft.manager_server import LighthouseLink, ManagerServer

_POLL_S = 0.01


def agent(driver: Any, library: str, *, lighthouse: str, replica_id: str, path: str) -> None:
    """Serve a replica group of one worker until this process is ended.

    The driver says when the node is to be left ("notice"), and when it starts its worker again
    ("expect"); it learns when the group has left.
    """
    asyncio.run(_serve(driver, lighthouse, replica_id, path))


async def _serve(driver: Any, lighthouse: str, replica_id: str, path: str) -> None:
    link = LighthouseLink(lighthouse, replica_id)
    server = ManagerServer(Path(path), replica_id, link.send)
    server.expect_workers(1)
    await server.start()
    tasks = [
        asyncio.create_task(link.run(server)),
        asyncio.create_task(_report_when_left(driver, server)),
    ]
    driver.send({"serves": True})
    while (order := await asyncio.to_thread(driver.receive)) is not None:
        if "notice" in order:
            server.announce_leave(order["notice"])
        else:
            server.expect_workers(1)
    for task in tasks:
        task.cancel()


async def _report_when_left(driver: Any, server: ManagerServer) -> None:
    while not server.has_left:
        await asyncio.sleep(_POLL_S)
    driver.send({"left": True})
