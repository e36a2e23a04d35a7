"""Requests for a state and their answers: HTTP, signed on both sides (pure).

    GET /<token>/layout?step=5&client=..&nonce=..&wait_s=60 HTTP/1.1    the layout (`_layout`)
    GET /<token>/data?...&digest=..&begin=0&end=8388608 HTTP/1.1        a range of its bytes

    GET /<token>/done?step=5&client=..&nonce=.. HTTP/1.1                others gave all of it

The path is signed with the key that the replicas share; the token is the server's, drawn when it
began, and a nonce counts once. An answer's head is signed with the nonce it answers, so it can
neither be made nor kept by a stranger. A range is followed by a checksum of each block of it
(XXH3) and a signature of all of them (HMAC, RFC 2104): the sums find damage, the signature finds a
range of another request; who can change packets on their way and forge XXH3 is not kept out.
Nothing on the wire is secret.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from typing import Literal, TypeVar
from urllib.parse import parse_qsl, urlencode

from hpc_elastic.transport.auth import AuthenticationError, is_signed, sign

BLOCK_BYTES = 1 << 20
"""One checksum each. So many fit into a core's cache, where the sum costs little."""
SUM_BYTES = 8
MAC_BYTES = 32
MAX_HEAD_BYTES = 4096
MAX_LAYOUT_BYTES = 1 << 30
END = b"\r\n\r\n"
OK, FORBIDDEN, CONFLICT = 200, 403, 409
_REASONS = {OK: "OK", FORBIDDEN: "Forbidden", CONFLICT: "Conflict"}

Verb = Literal["layout", "data", "done"]


@dataclass(frozen=True)
class HealRequest:
    """What a replica asks of a peer.

    Attributes:
        token: The server's.
        verb: The layout, a range of the bytes, or nothing any more.
        step: Of the state that is wanted.
        client: Names the replica's whole fetch, over all its connections.
        nonce: Never used before.
        wait_s: How long to wait for a state that is not offered yet.
        digest: Of the layout that the range belongs to.
        begin, end: The range.
    """

    token: str
    verb: Verb
    step: int
    client: str
    nonce: str
    wait_s: float = 0.0
    digest: str = ""
    begin: int = 0
    end: int = 0

    @property
    def num_body_bytes(self) -> int:
        """Of the answer to a request for a range."""
        return self.end - self.begin + SUM_BYTES * len(self.blocks()) + MAC_BYTES

    def blocks(self) -> list[tuple[int, int]]:
        """Return the range in pieces that have a checksum each."""
        starts = range(self.begin, self.end, BLOCK_BYTES)
        return [(begin, min(begin + BLOCK_BYTES, self.end)) for begin in starts]

    def seal(self, key: bytes) -> bytes:
        """Return it as it is sent."""
        query = {k: v for k, v in asdict(self).items() if k not in ("token", "verb")}
        target = f"/{self.token}/{self.verb}?{urlencode(query)}"
        mac = sign(key, f"request|{target}")
        return f"GET {target} HTTP/1.1\r\nHost: peer\r\nX-Mac: {mac}\r\n\r\n".encode()


def new_token() -> str:
    """Return a fresh random word: a token, a nonce, a client's name."""
    return secrets.token_hex(16)


def open_request(raw: bytes, key: bytes) -> HealRequest:
    """Return the request in a head.

    Raises:
        AuthenticationError: it is none, or not signed with our key.
    """
    try:
        first, headers = _open_head(raw)
        _, target, _ = first.split(" ")
        if not is_signed(key, f"request|{target}", headers["x-mac"]):
            raise AuthenticationError("signed with another key")
        path, _, query = target.partition("?")
        _, token, verb = path.split("/")
        given = dict(parse_qsl(query, keep_blank_values=True))
        types = {"int": int, "float": float, "str": str}
        known = {f.name: types[str(f.type)](given[f.name]) for f in fields(HealRequest)[2:]}
        return HealRequest(token, verb, **known)  # type: ignore[arg-type]
    except (ValueError, KeyError, TypeError) as e:
        raise AuthenticationError(f"no request of ours: {raw[:80]!r}") from e


def answer_head(key: bytes, nonce: str, status: int, num_bytes: int, body: bytes = b"") -> bytes:
    """Return the head of an answer; ``body`` is what it signs, all of it but for a range."""
    mac = sign(key, _answer(nonce, status, num_bytes, body))
    lines = (
        f"HTTP/1.1 {status} {_REASONS[status]}",
        f"Content-Length: {num_bytes}",
        f"X-Mac: {mac}",
    )
    return "\r\n".join(lines).encode() + END


@dataclass(frozen=True)
class AnswerHead:
    """The head of an answer, not yet checked: `check` is for when its body is there."""

    status: int
    num_bytes: int
    mac: str

    @classmethod
    def parse(cls, raw: bytes) -> AnswerHead:
        """Return it.

        Raises:
            AuthenticationError: it is none.
        """
        try:
            first, headers = _open_head(raw)
            length = int(headers["content-length"])
            if not 0 <= length <= MAX_LAYOUT_BYTES:
                raise ValueError(f"a length of {length}")
            return cls(int(first.split(" ")[1]), length, headers["x-mac"])
        except (ValueError, KeyError, IndexError) as e:
            raise AuthenticationError(f"no answer of ours: {raw[:80]!r}") from e

    def check(self, key: bytes, nonce: str, body: bytes = b"") -> None:
        """Return if the answer is the peer's, to this very request.

        Raises:
            AuthenticationError: it is not, or the peer takes us for a stranger.
        """
        if self.status == FORBIDDEN:
            raise AuthenticationError(
                "it does not know our key, or is another process: outside of a run all nodes need "
                "the same ~/.config/hpc_elastic/key"
            )
        if not is_signed(key, _answer(nonce, self.status, self.num_bytes, body), self.mac):
            raise AuthenticationError("the answer is not signed with our key")


def seal_sums(key: bytes, nonce: str, sums: Sequence[bytes]) -> bytes:
    """Return what follows a range: its blocks' checksums, and their signature."""
    joined = b"".join(sums)
    return joined + _mac(key, nonce, joined)


def check_sums(key: bytes, nonce: str, sums: Sequence[bytes], sealed: bytes) -> None:
    """Return if a range is as it was sent.

    Raises:
        AuthenticationError: bytes were damaged on their way, or are not the peer's.
    """
    joined, mac = sealed[:-MAC_BYTES], sealed[-MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(key, nonce, joined)):
        raise AuthenticationError("the checksums are not signed with our key")
    if joined != b"".join(sums):
        raise AuthenticationError("bytes were damaged on their way")


def _mac(key: bytes, nonce: str, sums: bytes) -> bytes:
    return hmac.digest(key, f"sums|{nonce}|".encode() + sums, "sha256")


def _answer(nonce: str, status: int, num_bytes: int, body: bytes) -> str:
    return f"answer|{nonce}|{status}|{num_bytes}|{blake2b(body).hexdigest()}"


def _open_head(raw: bytes) -> tuple[str, dict[str, str]]:
    first, *rest = raw.decode("ascii").removesuffix("\r\n\r\n").split("\r\n")
    pairs = (line.partition(":") for line in rest)
    return first, {name.lower(): value.strip() for name, _, value in pairs}


# ---- Blocking sockets that move many bytes: with time-outs, without the interpreter in the way


R = TypeVar("R")

_BUFFER_BYTES = 1 << 20
_MAX_VIEWS = 512
"""In one call; the system takes 1024."""


Part = tuple[int, int, Callable[[int, int], memoryview]]
"""Place in a stream of bytes, length, and how to get a range of it."""


class Pieces:
    """Buffers as one stream of bytes."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """Join parts that follow each other."""
        self._parts = parts
        self._begins = [begin for begin, _, _ in parts]

    def cut(self, begin: int, end: int) -> Iterator[memoryview]:
        """Give the buffers of a range, in order."""
        at = bisect_right(self._begins, begin) - 1
        while begin < end:
            start, length, of = self._parts[at]
            stop = min(end, start + length)
            yield of(begin - start, stop - start)
            begin, at = stop, at + 1


def prepare(sock: socket.socket, timeout_s: float) -> None:
    """Make a connection block, in the kernel, for so long at most without any progress."""
    sock.settimeout(None)
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6) or 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def close(sock: socket.socket) -> None:
    """End a connection for both sides, even if a forked process has it too; any thread."""
    cut(sock)
    sock.close()


def cut(sock: socket.socket) -> None:
    """End a connection, and wake the thread that waits in it; that one closes it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def is_gone(sock: socket.socket) -> bool:
    """Tell whether the other side, which is waiting for us, has ended the connection."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def receive_head(sock: socket.socket) -> bytes:
    """Return all up to an empty line, at which the other side waits or a body begins.

    Raises:
        ConnectionError: the connection has ended.
        TimeoutError: nothing came.
        AuthenticationError: it is too long.
    """
    head = b""
    while not head.endswith(END):
        seen = _patiently(lambda: sock.recv(MAX_HEAD_BYTES, socket.MSG_PEEK))
        if not seen or len(head) + len(seen) > MAX_HEAD_BYTES:
            raise (
                ConnectionResetError("ended")
                if not seen
                else AuthenticationError("a head too long")
            )
        at = (head[-3:] + seen).find(END)
        take = len(seen) if at < 0 else at + len(END) - len(head[-3:])
        head += sock.recv(take)
    return head


def receive(sock: socket.socket, num_bytes: int) -> bytes:
    """Return exactly so many bytes; raises as `receive_into`."""
    raw = bytearray(num_bytes)
    receive_into(sock, [memoryview(raw)])
    return bytes(raw)


def receive_into(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill buffers.

    Raises:
        ConnectionError: the connection has ended.
        TimeoutError: nothing came for the connection's time.
    """
    left = [view for view in views if len(view)]
    while left:
        some = left[:_MAX_VIEWS]
        count = _patiently(lambda: sock.recvmsg_into(some, 0, socket.MSG_WAITALL)[0])  # noqa: B023
        if not count:
            raise ConnectionResetError("the connection has ended")
        left = _after(left, count)


def send(sock: socket.socket, views: Sequence[memoryview | bytes]) -> None:
    """Send buffers; raises as `receive_into`."""
    left = [memoryview(view) for view in views if len(view)]
    while left:
        some = left[:_MAX_VIEWS]
        left = _after(left, _patiently(lambda: sock.sendmsg(some)))  # noqa: B023


def _patiently(call: Callable[[], R]) -> R:
    try:
        return call()
    except BlockingIOError as e:  # SO_RCVTIMEO, SO_SNDTIMEO
        raise TimeoutError("no progress") from e


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of buffers after so many bytes."""
    done = 0
    while done < len(views) and count >= len(views[done]):
        count -= len(views[done])
        done += 1
    left = views[done:]
    if count:
        left[0] = left[0][count:]
    return left
