"""One request to a peer's server: its address, and an answer that is proved to be the peer's."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from hpc_elastic.ft.checkpointing import messages, sockets
from hpc_elastic.ft.checkpointing.messages import AnswerHead, Request, StrangerError
from hpc_elastic.ft.checkpointing.transport import HealError

CONNECT_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """Where a server listens, and the token that it wants."""

    family: int
    where: Any
    token: str

    @classmethod
    def of(cls, url: str) -> Address:
        """Return one of `Server.urls`, taken apart.

        Raises:
            OSError: its host is unknown.
        """
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 0
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return cls(family, where, parts.path.strip("/"))


def ask(connection: socket.socket, key: bytes, request: Request) -> bytes:
    """Return the body of a peer's answer.

    Raises:
        HealError: the peer refuses, and says why.
        StrangerError: it is none of ours.
        OSError: the connection has ended, or nothing came in time.
    """
    sockets.send(connection, [request.seal(key)])
    head = AnswerHead.parse(sockets.receive_head(connection))
    body = sockets.receive(connection, head.num_bytes)
    head.check(key, request.nonce, body)
    if head.status != messages.OK:
        raise HealError(body.decode(errors="replace"))
    return body


def tell(urls: str, key: bytes, note: Request) -> None:
    """Send a request to the first address of a peer that answers; its answer is of no interest.

    Args:
        urls: `Server.urls`.
        key: What all replicas know.
        note: The request, but for its token and nonce.
    """
    for url in urls.split(","):
        try:
            place = Address.of(url)
            with socket.socket(place.family, socket.SOCK_STREAM) as connection:
                connection.settimeout(CONNECT_TIMEOUT_S)
                connection.connect(place.where)
                sockets.prepare(connection, CONNECT_TIMEOUT_S)
                ask(connection, key, replace(note, token=place.token, nonce=messages.new_token()))
                return
        except (OSError, StrangerError, HealError) as e:
            _log.debug("%s was not told that it need not wait: %s", url, e)
