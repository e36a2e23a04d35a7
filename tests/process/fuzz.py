"""Strangers who connect to a run's ports and write what is none of its protocols."""

import collections
import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hpc_elastic.transport.auth import FrameSigner, new_nonce, session_key

Address = tuple[str, int]
Attack = Callable[[socket.socket, random.Random], None]

STORE_MAGIC = struct.pack("<BI", 0, 0x3C85F7CE)
"""What a client of torch's TCPStore says first: a query 'validate' with a constant."""
_QUERIES = range(18)
_PAUSE_S = 0.01
_TIMEOUT_S = 0.2
_HELD = 100
"""So many silent connections are kept open at a time, to each port."""


def random_bytes(s: socket.socket, rng: random.Random) -> None:
    """Send noise, lines among it."""
    s.sendall(rng.randbytes(rng.randrange(1, 5000)))


def half_a_frame(s: socket.socket, rng: random.Random) -> None:
    """Begin what could be an agent's words, and stay until the leader loses patience."""
    s.sendall(f'{new_nonce()}\n{"0" * 32} {{"type":"jo'.encode())
    s.recv(100)


def a_long_line(s: socket.socket, rng: random.Random) -> None:
    """Send two megabytes without an end."""
    for _ in range(32):
        s.sendall(b"x" * (1 << 16))


def a_long_frame(s: socket.socket, rng: random.Random) -> None:
    """Send a nonce, and a frame that is larger than any may be."""
    s.sendall(new_nonce().encode() + b"\n" + b"0" * 32 + b' {"type":"')
    for _ in range(20):
        s.sendall(b"y" * (1 << 16))
    s.sendall(b'"}\n')


def a_nonce_and_garbage(s: socket.socket, rng: random.Random) -> None:
    """Begin as an agent would, and go on as none would."""
    s.sendall(new_nonce().encode() + b"\n" + rng.randbytes(200) + b"\n" + b"[" * 3000 + b"\n")
    s.recv(1000)


def a_forged_hello(s: socket.socket, rng: random.Random) -> None:
    """Say hello as a third node, under a secret of one's own."""
    greeting = json.loads(s.makefile("rb").readline())
    mine = new_nonce()
    s.sendall(_introduction(b"guessed", 1, greeting["nonce"], mine))
    s.recv(1000)


def come_and_go(s: socket.socket, rng: random.Random) -> None:
    """Connect, and close at once."""


def come_in_a_storm(s: socket.socket, rng: random.Random) -> None:
    """Connect from fifty ports at once, and close them all."""
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(socket.create_connection(s.getpeername(), _TIMEOUT_S))


def come_and_reset(s: socket.socket, rng: random.Random) -> None:
    """Connect, and break the connection at once."""
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def a_store_client_gone_mad(s: socket.socket, rng: random.Random) -> None:
    """Pass the store's check, and send noise that begins like one of its queries."""
    s.sendall(STORE_MAGIC + bytes([rng.choice(_QUERIES)]) + rng.randbytes(rng.randrange(1, 200)))
    s.recv(100)


def a_long_key(s: socket.socket, rng: random.Random) -> None:
    """Announce more bytes to the store than any machine has."""
    query = bytes([rng.choice(_QUERIES)])
    s.sendall(
        STORE_MAGIC + query + struct.pack("<Q", rng.choice([1 << 13, 1 << 40, (1 << 64) - 1]))
    )
    s.recv(100)


def replay(secret: bytes, term: int) -> Attack:
    """Return the attack that repeats an agent's words of an earlier connection."""
    words = _introduction(secret, term, new_nonce(), new_nonce())

    def replayed(s: socket.socket, rng: random.Random) -> None:
        s.sendall(words)
        s.recv(1000)

    return replayed


def _introduction(secret: bytes, term: int, leader_nonce: str, nonce: str) -> bytes:
    """Return all that an agent sends until it waits for a round."""
    cipher = FrameSigner(session_key(secret, term, leader_nonce, nonce), "client")
    agent = {"task": "999_1", "attempt": 0, "slot": 1, "host": "evil", "nproc": 1}
    hello = cipher.seal({"type": "hello", "agent": agent})
    return nonce.encode() + b"\n" + hello + cipher.seal({"type": "join", "request": 1})


ON_ANY_PORT = (
    random_bytes, half_a_frame, a_long_line, a_long_frame, a_nonce_and_garbage, a_forged_hello,
    come_and_go, come_in_a_storm, come_and_reset, a_store_client_gone_mad, a_long_key,
)  # fmt: skip


_NONCE = b'{"nonce": "00112233445566778899aabbccddeeff"}\n'
GREETINGS = {
    "silence": b"",
    "a web server": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "no object": b"[]\n",
    "a number": b'{"nonce": 7}\n',
    "half a character": b'{"nonce": "\\ud800"}\n',
    "no UTF-8": b'{"nonce": "\xff"}\n',
    "brackets": b"[" * 200_000 + b"\n",
    "a long line": b"x" * (2 << 20) + b"\n",
    "no welcome": _NONCE + b"0" * 40 + b"\n",
}
"""What an impostor on a server's port may say."""


@dataclass(frozen=True)
class Report:
    """What was done to a port."""

    connections: dict[str, int]
    held: int
    """Silent connections that were open at the end."""


def fuzz(
    where: Address, for_s: float, attacks: Iterable[Attack] = ON_ANY_PORT, *, seed: int = 0
) -> Report:
    """Attack a port for a while, with one connection at a time beside many silent ones."""
    rng, done = random.Random(seed), collections.Counter[str]()
    chosen, held = list(attacks), collections.deque[socket.socket]()
    until = time.monotonic() + for_s
    try:
        while time.monotonic() < until:
            attack = rng.choice(chosen)
            with contextlib.suppress(OSError, ValueError):
                held.append(socket.create_connection(where, _TIMEOUT_S))
                while len(held) > _HELD:
                    held.popleft().close()
                with socket.create_connection(where, _TIMEOUT_S) as s:
                    done[attack.__name__] += 1
                    attack(s, rng)
            time.sleep(_PAUSE_S)
        return Report(dict(done), len(held))
    finally:
        for silent in held:
            silent.close()


class Tap:
    """A relay in front of a port, for one connection, that keeps what passes."""

    def __init__(self, behind: Address) -> None:
        self.passed: dict[str, bytearray] = {"there": bytearray(), "back": bytearray()}
        self._behind = behind
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._serve)]
        self._sockets = [self._listener]
        self._threads[0].start()

    @property
    def address(self) -> Address:
        """Where to connect instead."""
        name: Address = self._listener.getsockname()
        return name

    def close(self) -> None:
        """End the connection."""
        for s in self._sockets:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for s in self._sockets:
            s.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            self._sockets.append(client)
            try:
                server = socket.create_connection(self._behind)
            except ConnectionRefusedError:
                client.shutdown(socket.SHUT_RDWR)
                return
            self._sockets.append(server)
            back = threading.Thread(target=self._relay, args=(server, client, "back"))
            back.start()
            self._threads.append(back)
            self._relay(client, server, "there")

    def _relay(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.passed[way] += data
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
