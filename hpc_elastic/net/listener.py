"""The leader's port: takes connections, from before an epoch is claimed until its leader goes."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

_BACKLOG = 65_535
"""As many as the system allows (net.core.somaxconn): ten thousand agents come at once."""
_ACCEPTS_A_TURN = 64
_PAUSE_S = 0.2

_log = logging.getLogger(__name__)


class Listener:
    """An open port; `asyncio.Server` would lose a connection that comes just before its end."""

    def __init__(self, address: str, port: int = 0) -> None:
        """Open the port (0: any free one); ``::`` takes IPv4 as well.

        Raises:
            OSError: the address is not this node's, or the port is taken.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server(
            (address, port),
            family=family,
            backlog=_BACKLOG,
            dualstack_ipv6=address == "::" and socket.has_dualstack_ipv6(),
        )
        self._socket.setblocking(False)
        self._open = True

    @property
    def port(self) -> int:
        """The port's number."""
        return int(self._socket.getsockname()[1])

    def serve(self, take: Callable[[socket.socket], None]) -> None:
        """Hand every connection to ``take``, from now on, in the running event loop."""
        asyncio.get_running_loop().add_reader(self._socket, self._accept, take)

    def close(self) -> None:
        """Close the port. May be repeated."""
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()

    def _accept(self, take: Callable[[socket.socket], None]) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                connection, _peer = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as e:  # most likely too many open files: the port would stay readable
                _log.warning("no connection can be taken for now: %s", e)
                self._pause(take)
                return
            connection.setblocking(False)
            # asyncio does so only for sockets that name their protocol, which accepted ones do not
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            take(connection)

    def _pause(self, take: Callable[[socket.socket], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        loop.call_later(_PAUSE_S, lambda: self.serve(take) if self._open else None)
