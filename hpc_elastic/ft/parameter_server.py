"""ParameterServer: one process that serves many, with a process group of two for each session.

    class Averages(ParameterServer):
        @classmethod
        def new_process_group(cls):
            return ProcessGroupGloo()

        def forward(self, session_id, pg):  # rank 0; the client is rank 1
            ...

    address = Averages(port=0).address()  # on the server
    pg = Averages.new_session(address)    # on a client

A client that fails ends its own session only.
"""

from __future__ import annotations

import http.client
import json
import logging
import secrets
import socket
import socketserver
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft.process_group import ProcessGroup
from hpc_elastic.transport.interface import own_addresses

__all__ = ["ParameterServer"]

_ANSWER_S = 30.0
_log = logging.getLogger(__name__)


class ParameterServer(ABC):
    """A server of sessions, each on a thread of its own.

    The address has a secret in it: only processes that were given it can start a session.
    """

    def __init__(self, port: int, store_port: int = 0) -> None:
        """Serve at all of this host's addresses.

        Args:
            port: For new sessions; 0: any free one.
            store_port: Of the TCPStore where both sides of a session meet; 0: any free one.

        Raises:
            OSError, RuntimeError: A port is taken.
        """
        self._host = next(iter(own_addresses()))
        self.store: TCPStore = TCPStore(
            self._host, store_port, is_master=True, wait_for_workers=False
        )
        self._path = f"/new_session/{secrets.token_hex(16)}"
        serve_session, path = self._serve_session, self._path

        class Handler(BaseHTTPRequestHandler):
            timeout = _ANSWER_S

            def do_GET(self) -> None:
                if not compare_digest(self.path.encode(), path.encode()):
                    self.send_error(404)
                    return
                serve_session(self)

            def log_message(self, format: str, *args: Any) -> None:
                _log.debug(format.replace("%s", "%.20s"), *args)  # without the secret

        self._server = _Server((self._host, port), Handler)
        threading.Thread(
            target=self._server.serve_forever, name="parameter-server", daemon=True
        ).start()

    def address(self) -> str:
        """Return the address for `new_session`: ``http://host:port/new_session/secret``."""
        return f"http://{_in_url(self._host)}:{self._server.server_address[1]}{self._path}"

    def shutdown(self) -> None:
        """Accept no more sessions; those under way go on."""
        self._server.shutdown()
        self._server.server_close()

    @classmethod
    @abstractmethod
    def new_process_group(cls) -> ProcessGroup:
        """Return a process group that is not configured yet, of the same kind on both sides."""

    @classmethod
    def new_session(cls, address: str) -> ProcessGroup:
        """Start a session, and return its process group, in which this process is rank 1.

        Args:
            address: Of the server.

        Raises:
            ConfigError: The address has another form.
            ConnectionError: The server refuses it; most likely it has been started again.
            OSError: It cannot be reached, or does not answer.
            CollectiveTimeoutError: The session's process group was not formed in time.
        """
        parts = urlsplit(address)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise ConfigError("address", address, "give what the server's address() returned")
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_ANSWER_S)
        try:
            connection.request("GET", parts.path)
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                raise ConnectionError(
                    f"the parameter server at {parts.hostname}:{parts.port} refuses the session: "
                    f"{answer.status} {answer.reason}. Is this its present address?"
                )
            session = json.loads(answer.read())
        finally:
            connection.close()
        pg = cls.new_process_group()
        pg.configure(session["store_addr"], session["session_id"], rank=1, world_size=2)
        return pg

    @abstractmethod
    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        """Serve one session; called on a thread of its own.

        A loop in here serves several operations. When it returns or raises, the session is over.

        Args:
            session_id: The session's, unique.
            pg: Of the two; the server is rank 0.
        """

    def _serve_session(self, request: BaseHTTPRequestHandler) -> None:
        session_id = secrets.token_hex(16)
        store_addr = f"{_in_url(self._host)}:{self.store.port}/session/{session_id}"
        text = json.dumps({"session_id": session_id, "store_addr": store_addr}).encode()
        request.send_response(http.HTTPStatus.OK)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        request.wfile.write(text)
        request.close_connection = True
        pg = self.new_process_group()
        try:
            pg.configure(store_addr, session_id, rank=0, world_size=2)
            self.forward(session_id, pg)
        except Exception:
            _log.exception("session %s has failed", session_id)
        finally:
            with suppress(Exception):  # it may be broken
                pg.shutdown()


class _Server(socketserver.ThreadingTCPServer):  # http.server's looks up its own name
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        is_v6 = ":" in address[0]
        self.address_family = socket.AF_INET6 if is_v6 else socket.AF_INET
        super().__init__(address, handler)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
