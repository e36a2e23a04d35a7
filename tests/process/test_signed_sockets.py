"""Blocking authenticated connections over real sockets, and strangers at both ends."""

import io
import os
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from fuzz import GREETINGS, Tap

from hpc_elastic.transport import connection
from hpc_elastic.transport.auth import AuthenticationError, answer_greeting, new_nonce
from hpc_elastic.transport.connection import SignedSocket, SocketServer

SECRET = b"s"
PATIENCE_S = 20.0


class Served(SocketServer):
    """A server that hands its connections to the test."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self._accepted: queue.Queue[SignedSocket] = queue.Queue()
        super().__init__(["127.0.0.1"], SECRET, "tests", self._hand_over, name="served")

    def _hand_over(self, sock: socket.socket, signer: object) -> None:
        self._accepted.put(SignedSocket(sock, signer, PATIENCE_S))
        self.over.wait(2 * PATIENCE_S)

    def accepted(self) -> SignedSocket:
        """Return the next one."""
        return self._accepted.get(timeout=PATIENCE_S)

    @property
    def is_idle(self) -> bool:
        """Whether no connection was authenticated."""
        return self._accepted.empty()


@pytest.fixture
def server():
    """Return a server; it ends with the test."""
    made = Served()
    yield made
    made.over.set()
    made.close(cut=True, wait=True)


def connect(
    to: SocketServer, secret: bytes = SECRET, context: str = "tests"
) -> closing[SignedSocket]:
    """Connect to a server."""
    return closing(SignedSocket.connect(to.address, secret, context, timeout_s=PATIENCE_S))


def is_refused(guest: socket.socket) -> bool:
    """Return whether the server ends a connection after its greeting."""
    guest.settimeout(PATIENCE_S)
    heard = b""
    try:
        while received := guest.recv(4096):
            heard += received
    except ConnectionResetError:
        pass
    return heard.count(b"\n") <= 1


def test_messages_and_files_pass(server):
    """Bytes of a file may stand between two messages, and come in pieces."""
    data = os.urandom(300_000)
    with connect(server) as client, closing(server.accepted()) as there:
        client.send({"bytes": len(data)})
        sending = threading.Thread(target=lambda: client.send_file(io.BytesIO(data), len(data)))
        sending.start()
        assert there.receive() == {"bytes": len(data)}
        found, block = bytearray(), memoryview(bytearray(4096))
        while len(found) < len(data):
            got = there.receive_into(block[: len(data) - len(found)])
            found += block[:got]
        sending.join()
        assert found == data
        there.send({"good": True})
        assert client.receive() == {"good": True}
        client.close()
        with pytest.raises(ConnectionError):
            there.receive()


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 100_000,
        b"\xff" * 40 + b"\n",
        new_nonce().encode() + b"\n" + b"0" * 32 + b" {}\n",
        new_nonce().encode() + b"\n" + b"[" * 3000 + b"\n",
        answer_greeting(b'{"nonce": "%s"}' % (b"0" * 32), SECRET, "tests", {})[0],
    ],
    ids=["http", "long", "no-nonce", "forged", "brackets", "of-another-connection"],
)
def test_a_client_without_proof_is_refused(server, words):
    """Whatever it sends; and nothing of it is kept."""
    with socket.create_connection(server.address) as stranger:
        stranger.sendall(words)
        assert is_refused(stranger)
    assert server.is_idle


@pytest.mark.parametrize("of_client", [(b"t", "tests"), (SECRET, "others")])
def test_another_secret_or_context_is_refused_on_both_sides(server, of_client):
    """The client learns of it by the end of the connection."""
    with pytest.raises(AuthenticationError, match="does not accept our key"):
        connect(server, *of_client)
    assert server.is_idle


def test_a_client_that_drips_is_refused_in_time(server, monkeypatch):
    """The time for its proof is not begun anew with each byte."""
    monkeypatch.setattr(connection, "HANDSHAKE_TIMEOUT_S", 0.3)
    over = threading.Event()
    with socket.create_connection(server.address) as stranger:

        def drip() -> None:
            try:
                while not over.wait(0.02):
                    stranger.sendall(b"0")
            except ConnectionError:
                pass

        dripping = threading.Thread(target=drip)
        dripping.start()
        assert is_refused(stranger)
        over.set()
        dripping.join()


def test_what_was_heard_is_of_no_use(server):
    """A client's words, repeated in another connection, are nobody's."""
    tap = Tap(server.address)
    client = SignedSocket.connect(tap.address, SECRET, "tests", timeout_s=PATIENCE_S)
    with closing(client), closing(server.accepted()) as there:
        client.send({"do": "it"})
        assert there.receive() == {"do": "it"}
    tap.close()
    words = bytes(tap.passed["there"])
    assert b'"do":"it"' in words
    with socket.create_connection(server.address) as stranger:
        stranger.sendall(words)
        assert is_refused(stranger)
    assert server.is_idle


@pytest.mark.parametrize("greeting", GREETINGS.values(), ids=GREETINGS)
def test_a_server_without_proof_gets_nothing(greeting):
    """No message is sent to it but the hello."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

        def impersonate() -> None:
            while True:
                guest, _ = listener.accept()
                with guest:
                    guest.sendall(greeting)

        impostor = threads.submit(impersonate)
        with pytest.raises(ConnectionError):
            SignedSocket.connect(listener.getsockname(), SECRET, "tests", timeout_s=PATIENCE_S)
        listener.shutdown(socket.SHUT_RDWR)
        assert isinstance(impostor.exception(), OSError)


def test_a_message_may_not_be_longer_than_agreed(server, monkeypatch):
    """The sender sees it first, and the receiver does not keep more."""
    monkeypatch.setattr(connection, "MAX_MESSAGE_BYTES", 1000)
    with connect(server) as client, closing(server.accepted()) as there:
        with pytest.raises(ValueError, match="exceeds"):
            client.send({"x": "y" * 1000})
        client.send_file(io.BytesIO(b"x" * 2000), 2000)
        with pytest.raises(AuthenticationError, match="longer"):
            there.receive()
