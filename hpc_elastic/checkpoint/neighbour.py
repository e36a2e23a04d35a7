"""Copies of a rank's files to a worker on another node, over TCP, beside the training.

The process group is not used: its operations belong to the training's thread. Each worker has a
`Receiver`; `push` connects to one, and both prove that they know the group's key (HMAC, RFC 2104)
over nonces of both, before anything else is read. After that every message is signed with its
direction and number. Messages are JSON, of bounded size; names of files are checked, and the
contents of files are compared with the checksums in the signed message. What was received is taken
for complete once the part file is there, which is written last.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from hpc_elastic.checkpoint.manifest import FileEntry, Part
from hpc_elastic.checkpoint.memory import Memory, Save, free_bytes
from hpc_elastic.errors import CheckpointCorruptError, CheckpointError

TIMEOUT_S = 30.0
"""Nothing heard for so long ends a connection."""
_CONNECT_TIMEOUT_S = 5.0
_PROOF_TIMEOUT_S = 5.0
"""A client that has not proved in time that it knows the key gives up its place."""
_MAX_MESSAGE_BYTES = 256 << 20
_MAX_CONNECTIONS = 8
_BLOCK_BYTES = 4 << 20
_NONCE_BYTES = 16
_MAC_BYTES = 32
_GREETING = b"hpc_elastic copies 1\n"
_FILE = re.compile(r"shard-\d+[A-Za-z0-9_.-]*")

_log = logging.getLogger(__name__)


def derive_key(secret: bytes, words: Sequence[int]) -> bytes:
    """Return the key of a group.

    Args:
        secret: The run's; nothing outside of a run.
        words: Random numbers of 60 bits that the group has agreed on.
    """
    drawn = b"".join(word.to_bytes(8, "big") for word in words)
    return hmac.digest(secret, b"checkpoint copies|" + drawn, "sha256")


class StrangerError(CheckpointError):
    """The other side does not know the group's key, or a message was changed on its way."""


def push(address: tuple[str, int], key: bytes, save: Save, folder: Path, rank: int) -> None:
    """Copy a rank's files of a save to a worker on another node.

    Args:
        address: Of its `Receiver`.
        key: The group's.
        save: Which save.
        folder: Where the files are.
        rank: Whose files.

    Raises:
        OSError: there is no connection, or it broke.
        CheckpointError: the other side refused; it says why.
    """
    text = (folder / f"part-{rank}.json").read_text()
    with socket.create_connection(address, _CONNECT_TIMEOUT_S) as sock:
        channel = _Channel.as_client(sock, key)
        channel.send({"save": [save.step, save.token, save.world_size], "part": text})
        for file in Part.from_json(text).files:
            with (folder / file.name).open("rb") as f:
                if sock.sendfile(f, count=file.num_bytes) != file.num_bytes:
                    raise CheckpointCorruptError(f"{folder / file.name} was cut short")
        answer = channel.receive()
    if answer.get("problem") is not None:
        raise CheckpointError(f"the neighbour did not take the copy: {answer['problem']}")


class Receiver:
    """Takes the copies that other workers push, in threads of its own."""

    def __init__(self, memory: Memory, key: bytes, addresses: Iterable[str]) -> None:
        """Begin to listen.

        Args:
            memory: Where copies are kept.
            key: The group's.
            addresses: Numeric ones; the first that is this machine's is taken.

        Raises:
            OSError: none is.
        """
        self._memory = memory
        self._key = key
        self._places = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._is_closed = False
        self._socket = _listen(addresses)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        threading.Thread(target=self._accept, name="checkpoint-copies", daemon=True).start()

    def close(self) -> None:
        """Take no more copies."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError as e:
                if self._is_closed:
                    return
                _log.warning("no copy can be taken for now: %s", e)
                time.sleep(0.1)  # too many open files
                continue
            if not self._places.acquire(blocking=False):
                sock.close()
                continue
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        """Serve a connection, which has a place, in a thread of its own."""
        thread = threading.Thread(
            target=self._serve, args=(sock,), name="checkpoint-copy", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as e:
            _log.warning("a copy is not taken: %s", e)
            sock.close()
            self._places.release()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                channel = _Channel.as_server(sock, self._key)
                channel.send({"problem": self._take(sock, channel.receive())})
        except (OSError, ValueError, CheckpointError) as e:
            _log.debug("a copy was not received: %s", e)
        finally:
            self._places.release()

    def _take(self, sock: socket.socket, message: dict[str, Any]) -> str | None:
        """Receive the files that a message announces; say what went wrong, if anything."""
        try:
            save = _save_of(message["save"])
            part = Part.from_json(message["part"])
            _check(save, part)
            folder = self._memory.make(save)
            num_bytes = sum(file.num_bytes for file in part.files)
            if num_bytes > free_bytes(folder):
                return f"{folder} has no room for {num_bytes} bytes"
            for file in part.files:
                _receive_file(sock, folder / file.name, file)
            _create(folder / f"part-{part.rank}.json", message["part"].encode())
            self._memory.prune(save.step)
        except (CheckpointCorruptError, KeyError, TypeError, ValueError, OSError) as e:
            return f"{type(e).__name__}: {e}"
        return None


@dataclass
class _Channel:
    """A connection whose both sides have proved that they know the key."""

    sock: socket.socket
    key: bytes
    me: bytes
    peer: bytes
    counts: dict[bytes, int] = field(default_factory=dict)

    @classmethod
    def as_client(cls, sock: socket.socket, key: bytes) -> _Channel:
        """Prove that we know the key, and see that the server does."""
        sock.settimeout(TIMEOUT_S)
        greeting = _receive(sock, len(_GREETING) + _NONCE_BYTES)
        if not greeting.startswith(_GREETING):
            raise StrangerError("this is no receiver of copies")
        nonces = greeting[len(_GREETING) :] + secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(nonces[_NONCE_BYTES:] + _mac(key, b"client", nonces))
        _compare(_receive(sock, _MAC_BYTES), _mac(key, b"server", nonces))
        return cls(sock, _mac(key, b"session", nonces), b"client", b"server")

    @classmethod
    def as_server(cls, sock: socket.socket, key: bytes) -> _Channel:
        """See that the client knows the key, and prove that we do."""
        sock.settimeout(TIMEOUT_S)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(_GREETING + nonce)
        answer = _receive(sock, _NONCE_BYTES + _MAC_BYTES, within_s=_PROOF_TIMEOUT_S)
        nonces = nonce + answer[:_NONCE_BYTES]
        _compare(answer[_NONCE_BYTES:], _mac(key, b"client", nonces))
        sock.sendall(_mac(key, b"server", nonces))
        return cls(sock, _mac(key, b"session", nonces), b"server", b"client")

    def send(self, message: dict[str, Any]) -> None:
        """Send one signed message."""
        body = json.dumps(message).encode()
        if len(body) > _MAX_MESSAGE_BYTES:
            raise CheckpointError(f"a message of {len(body)} bytes is too long")
        self.sock.sendall(len(body).to_bytes(8, "big") + self._sign(self.me, body) + body)

    def receive(self) -> dict[str, Any]:
        """Receive one signed message."""
        head = _receive(self.sock, 8 + _MAC_BYTES)
        length = int.from_bytes(head[:8], "big")
        if length > _MAX_MESSAGE_BYTES:
            raise StrangerError(f"a message of {length} bytes is too long")
        body = _receive(self.sock, length)
        _compare(head[8:], self._sign(self.peer, body))
        message = json.loads(body)
        if not isinstance(message, dict):
            raise StrangerError("a message is no object")
        return message

    def _sign(self, side: bytes, body: bytes) -> bytes:
        number = self.counts[side] = self.counts.get(side, 0) + 1
        return _mac(self.key, side, number.to_bytes(8, "big") + body)


def _listen(addresses: Iterable[str]) -> socket.socket:
    error = OSError("no address was given")
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, 0), family=family, backlog=64)
        except OSError as e:
            error = e
    raise error


def _mac(key: bytes, purpose: bytes, data: bytes) -> bytes:
    return hmac.digest(key, purpose + b"|" + data, "sha256")


def _compare(found: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(found, expected):
        raise StrangerError("a signature does not match")


def _receive(sock: socket.socket, num_bytes: int, within_s: float | None = None) -> bytes:
    """Receive so many bytes; with ``within_s`` all of them within that time."""
    data, until = bytearray(), time.monotonic() + (within_s or 0.0)
    while len(data) < num_bytes:
        if within_s is not None:
            sock.settimeout(max(until - time.monotonic(), 0.001))
        got = sock.recv(min(num_bytes - len(data), _BLOCK_BYTES))
        if not got:
            raise ConnectionError("the other side hung up")
        data += got
    sock.settimeout(TIMEOUT_S)
    return bytes(data)


def _receive_file(sock: socket.socket, path: Path, file: FileEntry) -> None:
    """Receive one file; it has its name once it is complete and as it should be."""
    staged = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    checksum, left, block = xxhash.xxh3_64(), file.num_bytes, memoryview(bytearray(_BLOCK_BYTES))
    try:
        with staged.open("xb") as f:
            while left:
                got = sock.recv_into(block[: min(left, _BLOCK_BYTES)])
                if not got:
                    raise ConnectionError("the other side hung up")
                checksum.update(block[:got])
                f.write(block[:got])
                left -= got
        if f"xxh3_64:{checksum.hexdigest()}" != file.checksum:
            raise CheckpointCorruptError(f"{path.name} was changed on its way")
        staged.rename(path)
    finally:
        staged.unlink(missing_ok=True)


def _create(path: Path, data: bytes) -> None:
    staged = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    staged.write_bytes(data)
    staged.rename(path)


def _save_of(numbers: Any) -> Save:
    if len(numbers) != 3 or any(type(n) is not int or not 0 <= n < 1 << 63 for n in numbers):
        raise ValueError(f"{numbers!r:.80} is no save")
    return Save(*numbers)


def _check(save: Save, part: Part) -> None:
    """Refuse a part whose files would have other names than a checkpoint's."""
    if not 0 <= part.rank < save.world_size:
        raise ValueError(f"rank {part.rank} of {save.world_size}")
    for file in part.files:
        if not _FILE.fullmatch(file.name) or not 0 <= file.num_bytes < 1 << 63:
            raise ValueError(f"{file.name!r:.80} is no name of a shard")
