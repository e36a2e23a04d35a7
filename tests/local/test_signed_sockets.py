"""Blocking authenticated connections over real sockets, and strangers at both ends."""

import io
import os
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import pytest
from fuzz import GREETINGS, Tap

from hpc_elastic.transport import signed_socket
from hpc_elastic.transport.auth import AuthenticationError, answer_greeting, new_nonce
from hpc_elastic.transport.signed_socket import SignedSocket

SECRET = b"s"
PATIENCE_S = 20.0


@pytest.fixture
def listener():
    """Return a listening socket."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def accepted(listener):
    """Begin to accept one client with the secret; return what comes of it."""
    with ThreadPoolExecutor(1) as threads:

        def accept() -> SignedSocket:
            sock, _ = listener.accept()
            try:
                return SignedSocket.accept(sock, SECRET, "tests", timeout_s=PATIENCE_S)
            except BaseException:
                sock.close()
                raise

        yield lambda: threads.submit(accept)


def connect(
    listener: socket.socket, secret: bytes = SECRET, context: str = "tests"
) -> SignedSocket:
    """Connect to a listener."""
    where = listener.getsockname()
    return closing(SignedSocket.connect(where, secret, context, timeout_s=PATIENCE_S))


def test_messages_and_files_pass(listener, accepted):
    """Bytes of a file may stand between two messages, and come in pieces."""
    there: Future[SignedSocket] = accepted()
    data = os.urandom(300_000)
    with connect(listener) as client, closing(there.result()) as server:
        client.send({"bytes": len(data)})
        sending = threading.Thread(target=lambda: client.send_file(io.BytesIO(data), len(data)))
        sending.start()
        assert server.receive() == {"bytes": len(data)}
        found, block = bytearray(), memoryview(bytearray(4096))
        while len(found) < len(data):
            got = server.receive_into(block[: len(data) - len(found)])
            found += block[:got]
        sending.join()
        assert found == data
        server.send({"good": True})
        assert client.receive() == {"good": True}
        client.close()
        with pytest.raises(ConnectionError):
            server.receive()


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
def test_a_client_without_proof_is_refused(listener, accepted, words):
    """Whatever it sends; and nothing of it is kept."""
    there = accepted()
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(words)
        with pytest.raises(AuthenticationError):
            there.result()


@pytest.mark.parametrize("of_client", [(b"t", "tests"), (SECRET, "others")])
def test_another_secret_or_context_is_refused_on_both_sides(listener, accepted, of_client):
    """The client learns of it by the end of the connection."""
    there = accepted()
    with pytest.raises(ConnectionError):
        connect(listener, *of_client)
    with pytest.raises(AuthenticationError):
        there.result()


def test_a_client_that_drips_is_refused_in_time(listener, accepted, monkeypatch):
    """The time for its proof is not begun anew with each byte."""
    monkeypatch.setattr(signed_socket, "HANDSHAKE_TIMEOUT_S", 0.3)
    there, over = accepted(), threading.Event()
    with socket.create_connection(listener.getsockname()) as stranger:

        def drip() -> None:
            while not over.wait(0.02):
                stranger.sendall(b"0")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            with pytest.raises(TimeoutError, match="time"):  # and not the test's own
                there.result(PATIENCE_S)
        finally:
            over.set()
            dripping.join()


def test_what_was_heard_is_of_no_use(listener, accepted):
    """A client's words, repeated in another connection, are nobody's."""
    tap, there = Tap(listener.getsockname()), accepted()
    client = SignedSocket.connect(tap.address, SECRET, "tests", timeout_s=PATIENCE_S)
    with closing(client), closing(there.result()) as server:
        client.send({"do": "it"})
        assert server.receive() == {"do": "it"}
    tap.close()
    words, there = bytes(tap.passed["there"]), accepted()
    assert b'"do":"it"' in words
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(words)
        with pytest.raises(AuthenticationError):
            there.result()


@pytest.mark.parametrize("greeting", GREETINGS.values(), ids=GREETINGS)
def test_a_server_without_proof_gets_nothing(listener, greeting):
    """No message is sent to it but the hello."""

    def impersonate() -> None:
        guest, _ = listener.accept()
        with guest:
            guest.sendall(greeting)

    with ThreadPoolExecutor(1) as threads:
        impostor = threads.submit(impersonate)
        with pytest.raises(ConnectionError):
            connect(listener)
        assert isinstance(impostor.exception(), ConnectionError | None)


def test_a_message_may_not_be_longer_than_agreed(listener, accepted, monkeypatch):
    """The sender sees it first, and the receiver does not keep more."""
    monkeypatch.setattr(signed_socket, "MAX_MESSAGE_BYTES", 1000)
    there = accepted()
    with connect(listener) as client, closing(there.result()) as server:
        with pytest.raises(ValueError, match="exceeds"):
            client.send({"x": "y" * 1000})
        client.send_file(io.BytesIO(b"x" * 2000), 2000)
        with pytest.raises(AuthenticationError, match="longer"):
            server.receive()
