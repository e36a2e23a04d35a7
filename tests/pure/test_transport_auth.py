"""Frames and handshakes: what a holder of the secret sends is read; everything else is refused."""

import asyncio
import json
from unittest.mock import Mock

import pytest

from hpc_elastic.transport.auth import (
    MAX_UNPROVED_BYTES,
    WELCOME,
    AuthenticationError,
    FrameSigner,
    ServerHandshake,
    answer_greeting,
    is_signed,
    session_key,
    sign,
)
from hpc_elastic.transport.connection import CONNECTION_ERRORS, ServerConnection


def pair(secret: bytes = b"s", other: bytes = b"s") -> tuple[FrameSigner, FrameSigner]:
    """Both ends of a connection; their secrets may differ."""
    return (
        FrameSigner(session_key(secret, 1, "n1", "n2"), "client"),
        FrameSigner(session_key(other, 1, "n1", "n2"), "server"),
    )


def test_messages_arrive_in_order():
    """Either side opens what the other has sealed."""
    client, server = pair()
    for i in range(3):
        assert server.open(client.seal({"i": i})) == {"i": i}
        assert client.open(server.seal({"i": -i})) == {"i": -i}


def test_a_frame_counts_once_in_order_and_on_its_side():
    """A frame that is replayed, comes after one that was left out, or is reflected is refused."""
    client, server = pair()
    frame = client.seal({"type": "join"})
    server.open(frame)
    client.seal({"type": "left out"})
    for end, refused in ((server, frame), (server, client.seal({})), (client, client.seal({}))):
        with pytest.raises(AuthenticationError):
            end.open(refused)


@pytest.mark.parametrize(
    ("context", "nonce", "secret"), [(2, "n2", b"s"), (1, "n3", b"s"), (1, "n2", b"t")]
)
def test_another_connection_context_or_secret_is_refused(context, nonce, secret):
    """A key is good for one connection in one context under one secret."""
    stranger = FrameSigner(session_key(secret, context, "n1", nonce), "client")
    _, server = pair()
    with pytest.raises(AuthenticationError):
        server.open(stranger.seal({"type": "join"}))


@pytest.mark.parametrize("garbage", [b"\n", b"GET / HTTP/1.1\r\n", b"\xff\xfe \x00\n", b"ab {}\n"])
def test_garbage_is_refused(garbage):
    """Bytes that were never a frame raise the same error as a forged one."""
    _, server = pair()
    with pytest.raises(AuthenticationError):
        server.open(garbage)


def test_the_bytes_of_a_frame_stay_as_they_are():
    """Agents of two versions meet after an upgrade in a running job."""
    client, server = pair()
    message = {"type": "heartbeat", "loss": float("inf"), "host": "é"}
    frame = client.seal(message)
    assert frame == (
        b'930a2790d526757682b3c73d2dbb16f8 {"type":"heartbeat","loss":Infinity,"host":"\\u00e9"}\n'
    )
    assert server.open(frame) == message
    assert client.seal(b'{"type":"join"}') == b'6657256e34f1407bbef0cf77b6935529 {"type":"join"}\n'


@pytest.mark.parametrize("body", [b'{"a":1} {}', b'{"a":1}x', b"{", b"", b"\xff", b"NaN"])
def test_a_signed_text_that_is_no_message_ends_the_connection(body):
    """The error is one by which a connection ends."""
    client, server = pair()
    with pytest.raises(CONNECTION_ERRORS):
        server.open(client.seal(body))


def test_what_is_no_object_is_refused():
    """A peer that is ours sends nothing else."""
    client, server = pair()
    with pytest.raises(AuthenticationError, match="object"):
        server.open(client.seal(["join"]))


def test_a_message_that_no_frame_can_hold_is_refused_by_the_sender():
    """The limit shows where the message is made."""
    client, _ = pair()
    with pytest.raises(ValueError, match="exceeds"):
        client.seal({"x": "y" * (1 << 20)})


@pytest.mark.parametrize("mac", ["", "0", "é", "x" * 64])
def test_a_text_is_signed_by_its_key_alone(mac):
    """Whatever stands in the signature's place."""
    assert is_signed(b"s", "text", sign(b"s", "text"))
    assert not is_signed(b"t", "text", sign(b"s", "text"))
    assert not is_signed(b"s", "other", sign(b"s", "text"))
    assert not is_signed(b"s", "text", mac)


def test_a_handshake_proves_both_sides():
    """The server's proof is its welcome, the client's its hello."""
    server = ServerHandshake(b"s", 1)
    words, client = answer_greeting(server.greeting, b"s", 1, {"type": "hello", "x": 1})
    nonce, hello = words.splitlines()
    assert server.read(nonce) is None
    assert server.read(hello) == {"type": "hello", "x": 1}
    assert client.open(server.signer.seal(WELCOME)) == WELCOME


@pytest.mark.parametrize("of_server", [(b"t", 1), (b"s", 2)], ids=["secret", "context"])
def test_a_handshake_of_another_secret_or_context_fails_on_both_sides(of_server):
    """Neither is taken for a peer."""
    server = ServerHandshake(*of_server)
    words, client = answer_greeting(server.greeting, b"s", 1, {})
    nonce, hello = words.splitlines()
    server.read(nonce)
    with pytest.raises(AuthenticationError):
        server.read(hello)
    key = session_key(*of_server, json.loads(server.greeting)["nonce"], nonce.decode())
    with pytest.raises(AuthenticationError):
        client.open(FrameSigner(key, "server").seal(WELCOME))


def test_a_handshake_cannot_be_repeated():
    """The next connection of the same server has another nonce."""
    words, _ = answer_greeting(ServerHandshake(b"s", 1).greeting, b"s", 1, {})
    nonce, hello = words.splitlines()
    server = ServerHandshake(b"s", 1)
    server.read(nonce)
    with pytest.raises(AuthenticationError):
        server.read(hello)


@pytest.mark.parametrize("nonce", [b"", b"0" * 31, b"0" * 33, b"G" * 32, b"\xff" * 32, b"0" * 4000])
def test_what_is_no_nonce_is_refused(nonce):
    """By the server and by the client, with the same error."""
    with pytest.raises(AuthenticationError):
        ServerHandshake(b"s", 1).read(nonce)
    with pytest.raises(AuthenticationError):
        answer_greeting(b'{"nonce": "%s"}' % nonce, b"s", 1, {})


@pytest.mark.parametrize("proved", [False, True])
def test_a_server_keeps_little_of_a_client_without_proof(proved):
    """Of one that has proved that it holds the secret it keeps a whole frame."""

    async def receive(words: bytes) -> asyncio.Transport:
        buffer, transport = memoryview(bytearray(1 << 16)), Mock(asyncio.Transport)
        connection = ServerConnection(b"s", 1, Mock(), buffer)
        connection.connection_made(transport)
        if proved:
            (greeting,) = transport.write.call_args.args
            words = answer_greeting(greeting, b"s", 1, {"agent": {}})[0] + words
        buffer[: len(words)] = words
        connection.buffer_updated(len(words))
        return transport

    transport = asyncio.run(receive(b"x" * (MAX_UNPROVED_BYTES + 1)))
    assert transport.abort.called == (not proved)
