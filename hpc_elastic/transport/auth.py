"""Handshake and signatures of every connection, and the secrets behind them.

The server greets with a nonce. The client answers with its own and with its first frame, the
hello; the server answers that with a welcome. Both derive the key of the connection from a secret,
the context of the connection and the two nonces, so each has proved by its first frame that it
holds the secret. A frame is a JSON object in a line, behind a keyed hash of its sender's side, its
number and its text. So a foreign process cannot join, nor replay, reflect or reorder what it has
seen on the wire, in this connection or another. Nothing on the wire is secret.

Keyed hashes: HMAC (RFC 2104) under secrets; under the key of a connection BLAKE2s (RFC 7693),
which takes half the time.

A run has a secret of its own, in its directory. Without a run (torchrun, a lighthouse), the secret
is derived from the user's key: ``~/.config/hpc_elastic/key`` (0600, made on first use). All nodes
see it where they share the home directory; elsewhere the user copies it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hpc_elastic.errors import DamagedFileError, HpcElasticError

MAX_FRAME_BYTES = 1 << 20
MAX_UNPROVED_BYTES = 4096
"""The most that a peer may send before it has proved that it holds the secret."""
HANDSHAKE_TIMEOUT_S = 5.0
"""A client that takes longer to prove that it holds the secret is disconnected."""
NONCE_BYTES = 16
_MAC_BYTES = 16
_MIN_KEY_BYTES = 32
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_from_json = json.JSONDecoder().raw_decode

Side = Literal["client", "server"]


class AuthenticationError(HpcElasticError, ConnectionError):
    """The peer does not hold the secret, or what it sent was changed, repeated or reordered."""


def sign(key: bytes, text: str) -> str:
    """Return the keyed hash of a text, as hexadecimal text."""
    return hmac.digest(key, text.encode(), "sha256").hex()


def is_signed(key: bytes, text: str, mac: str) -> bool:
    """Return whether ``mac`` is the keyed hash of ``text``, in constant time."""
    return hmac.compare_digest(sign(key, text).encode(), mac.encode(errors="replace"))


def new_nonce() -> str:
    """Return a fresh nonce as hexadecimal text."""
    return secrets.token_hex(NONCE_BYTES)


def session_key(secret: bytes, context: object, server_nonce: str, client_nonce: str) -> bytes:
    """Return the 32-byte key of one connection, valid for its purpose, such as a term, alone."""
    return bytes.fromhex(sign(secret, f"session|{context}|{server_nonce}|{client_nonce}"))


def text_of(message: dict[str, Any]) -> bytes:
    """Return the text of a message, which several connections can seal."""
    return _to_json(message).encode()


@dataclass
class FrameSigner:
    """One side of a connection: signs what it sends, checks what it receives, in sequence."""

    key: bytes
    me: Side
    max_bytes: int = MAX_FRAME_BYTES
    sent: int = 0
    received: int = 0

    def __post_init__(self) -> None:
        self._keyed = hashlib.blake2s(key=self.key, digest_size=_MAC_BYTES)
        self._peer: Side = "server" if self.me == "client" else "client"

    def seal(self, message: dict[str, Any] | bytes) -> bytes:
        """Return the message, or its text, as one signed line; ValueError beyond ``max_bytes``."""
        body = message if isinstance(message, bytes) else text_of(message)
        frame = b"%b %b\n" % (self._mac(self.me, self.sent, body), body)
        self.sent += 1
        if len(frame) > self.max_bytes:
            raise ValueError(f"a message of {len(frame)} bytes exceeds {self.max_bytes}")
        return frame

    def open(self, frame: bytes) -> dict[str, Any]:
        """Return the message in a signed line.

        Raises AuthenticationError if it is not signed with the key of this connection, is replayed,
        or is no JSON object.
        """
        mac, _, body = frame.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(mac, self._mac(self._peer, self.received, body)):
            raise AuthenticationError("signature does not match")
        self.received += 1
        message, end = _from_json(text := body.decode())
        if not isinstance(message, dict) or end != len(text):
            raise AuthenticationError("not an object")
        return message

    def _mac(self, side: Side, number: int, body: bytes) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(f"{side}|{number}|".encode())
        keyed.update(body)
        return keyed.hexdigest().encode()


WELCOME = {"type": "welcome"}
"""The server's first message, which proves that it holds the secret, too."""


class ServerHandshake:
    """The server's part of a handshake: send `greeting`, `read` two lines, send `WELCOME`."""

    def __init__(self, secret: bytes, context: object) -> None:
        self.signer: FrameSigner  # set once `read` has returned the hello
        self._key_of = partial(session_key, secret, context, nonce := new_nonce())
        self._unproved: FrameSigner | None = None
        self.greeting = text_of({"nonce": nonce}) + b"\n"

    def read(self, line: bytes) -> dict[str, Any] | None:
        """Return the client's hello, which proves that it holds the secret; None for its nonce."""
        if self._unproved is None:
            self._unproved = FrameSigner(self._key_of(_checked_nonce(line)), "server")
            return None
        hello, self.signer = self._unproved.open(line), self._unproved
        return hello


def answer_greeting(
    greeting: bytes, secret: bytes, context: object, hello: dict[str, Any]
) -> tuple[bytes, FrameSigner]:
    """Return what the client sends, and the signer that is to open the server's welcome."""
    try:
        theirs = _checked_nonce(str(json.loads(greeting)["nonce"]).encode())
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise AuthenticationError("no greeting") from e
    mine = new_nonce()
    signer = FrameSigner(session_key(secret, context, theirs, mine), "client")
    return mine.encode() + b"\n" + signer.seal(hello), signer


def _checked_nonce(line: bytes) -> str:
    if not re.fullmatch(rb"[0-9a-f]{%d}" % (2 * NONCE_BYTES), line):
        raise AuthenticationError("no nonce")
    return line.decode()


def user_folder() -> Path:
    """Return the folder of the user's key; make it if needed (0700)."""
    from hpc_elastic.shared_files import make_folder  # not in each process of a run

    folder = Path.home() / ".config" / "hpc_elastic"
    make_folder(folder, parents=True, mode=0o700)
    return folder


def user_key(folder: Path) -> bytes:
    """Return the key in a folder; make it if missing. Several processes may do so at once.

    Raises PermissionError, which names the remedy, if other users may read it or have made it, or
    it is no regular file; DamagedFileError if it is too short for a secret.
    """
    path = folder / "key"
    try:
        found = path.lstat()
    except FileNotFoundError:
        from hpc_elastic.shared_files import create_atomic  # the first time only

        create_atomic(path, secrets.token_hex(32), mode=0o600)
        found = path.lstat()
    anew = f"remove it on all nodes (rm {path}), and another one is made"
    if not stat.S_ISREG(found.st_mode):
        raise PermissionError(f"{path} must be a regular file, and no link: {anew}")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {found.st_uid}, who knows it: {anew}")
    if found.st_mode & 0o077:
        raise PermissionError(f"{path} must be readable by its owner only: chmod 600 {path}")
    key = path.read_bytes()
    if len(key) < _MIN_KEY_BYTES:
        raise DamagedFileError(f"{path} has {len(key)} of at least {_MIN_KEY_BYTES} bytes: {anew}")
    return key


def user_secret(purpose: str) -> bytes:
    """Return the secret of this user's processes for one purpose; errors as of `user_key`."""
    return sign(user_key(user_folder()), purpose).encode()


def peers_secret() -> bytes:
    """Return the secret that a worker shares with the workers of its other replica groups.

    It is derived from the run's secret, and outside of a run from the user's. Raises OSError.
    """
    from hpc_elastic.run.fencing import own_run_dir  # not in a manager server process

    run = own_run_dir()
    if run is None:
        return user_secret("peers")
    from hpc_elastic.run.directory import RunDir
    from hpc_elastic.shared_files import read_bytes

    return sign(read_bytes(RunDir(run).secret), "peers").encode()


def of_generation(secret: bytes, generation: int) -> bytes:
    """Return the secret of a run's agents after its n-th resume, which excludes earlier ones."""
    return secret if generation == 0 else sign(secret, f"generation|{generation}").encode()
