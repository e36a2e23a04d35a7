"""The HTTP server of the live pages: what a connection may cost that has not shown the token.

Every user of the machine can connect. uvicorn waits for a request for ever, and refuses all
requests while there are too many connections, so a few hundred silent ones would keep the owner
out. Here a connection that asks nothing is closed after a while, and the longest-silent one as soon
as there are too many of them. A request without the token is answered at once, and its connection
closed (`live_pages`), so only requests with the token last.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 10.0
"""The head of a request has to arrive within this time, after the connection or the last answer."""
_MOST_SILENT, _MOST_CONNECTIONS = 64, 200
"""Connections without a request, and all of them; the rest is the owner's."""
_BACKLOG = 128
_STOP_S = 2


class _Connection(H11Protocol):  # type: ignore[misc]
    """A connection that is closed unless it asks for something in time."""

    _deadline: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Make room for it if need be."""
        silent = [c for c in self.connections if c.is_silent]
        if len(silent) >= _MOST_SILENT:
            min(silent, key=lambda c: c.silent_until).hang_up()
        super().connection_made(transport)
        self._deadline = self.loop.call_later(REQUEST_S, self.hang_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._deadline.cancel()
        self._deadline = self.loop.call_later(REQUEST_S, self.hang_up)
        super().on_response_complete()

    @property
    def is_silent(self) -> bool:
        """Whether no request of it is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    @property
    def silent_until(self) -> float:
        """When its deadline is, in the time of the event loop."""
        return self._deadline.when()

    def hang_up(self) -> None:
        if self.is_silent:
            self.connections.discard(self)
            self.transport.abort()


def serve(app: ASGIApp, listener: socket.socket, end_streams: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM; ``end_streams`` then ends the answers that have no end."""
    options: dict[str, Any] = dict(
        # a stranger's invalid requests are no lines in the owner's terminal
        log_config=None, log_level="error", access_log=False,
        lifespan="off", server_header=False, proxy_headers=False, ws="none", http=_Connection,
        backlog=_BACKLOG, limit_concurrency=_MOST_CONNECTIONS, timeout_graceful_shutdown=_STOP_S,
    )  # fmt: skip
    asyncio.run(_serve(uvicorn.Server(uvicorn.Config(app, **options)), listener, end_streams))


async def _serve(
    server: uvicorn.Server, listener: socket.socket, end_streams: Callable[[], None]
) -> None:
    server.capture_signals = contextlib.nullcontext

    def stop() -> None:
        end_streams()
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    await server.serve(sockets=[listener])
