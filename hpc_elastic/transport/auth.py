"""Signed frames between agent and leader: JSON lines under the run's secret (pure).

The leader greets with a nonce; the agent answers with its own; both derive a session key from the
run's secret, the epoch and the two nonces. Every frame after that carries a keyed hash of its
direction, its sequence number and its text, so that a stranger can neither read himself in, nor
replay or reorder what he saw, in this session, epoch or run. Nothing is secret on the wire.
Keyed hashing: HMAC (RFC 2104) under the run's secret; under the key of a connection BLAKE2s (RFC
7693), which takes half the time.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpc_elastic.run.fencing import own_record

MAX_FRAME_BYTES = 1 << 20
NONCE_BYTES = 16
_MAC_BYTES = 16
_to_json = json.JSONEncoder(separators=(",", ":")).encode

Side = Literal["agent", "leader"]


class BadFrameError(Exception):
    """A frame is not from somebody who holds the run's secret, or out of order."""


def new_nonce() -> str:
    """Return a fresh nonce as hexadecimal text."""
    return secrets.token_hex(NONCE_BYTES)


def sign(key: bytes, text: str) -> str:
    """Return the keyed hash of a text, as hexadecimal text."""
    return hmac.digest(key, text.encode(), "sha256").hex()


def is_signed(key: bytes, text: str, mac: str) -> bool:
    """Tell whether ``mac`` is the keyed hash of ``text``, in constant time."""
    return hmac.compare_digest(sign(key, text).encode(), mac.encode(errors="replace"))


def session_key(secret: bytes, epoch: int, leader_nonce: str, agent_nonce: str) -> bytes:
    """Return the key of one connection, 32 bytes."""
    return bytes.fromhex(sign(secret, f"session|{epoch}|{leader_nonce}|{agent_nonce}"))


@dataclass
class FrameSigner:
    """One side of a session: seals what it sends, opens what it receives, in sequence."""

    key: bytes
    me: Side
    sent: int = 0
    received: int = 0

    def seal(self, message: dict[str, Any]) -> bytes:
        """Return the message as one signed line.

        Raises:
            ValueError: the message is larger than a frame may be.
        """
        body = _to_json(message)
        mac = self._mac(self.me, self.sent, body)
        self.sent += 1
        frame = f"{mac} {body}\n".encode()
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"a message of {len(frame)} bytes exceeds {MAX_FRAME_BYTES}")
        return frame

    def open(self, frame: bytes) -> dict[str, Any]:
        """Return the message in a signed line.

        Raises:
            BadFrameError: not signed with this session's key, replayed, or no JSON object.
        """
        peer: Side = "leader" if self.me == "agent" else "agent"
        mac, _, body = frame.decode(errors="replace").rstrip("\n").partition(" ")
        expected = self._mac(peer, self.received, body)
        if not hmac.compare_digest(mac.encode(errors="replace"), expected.encode()):
            raise BadFrameError("signature does not match")
        self.received += 1
        message = json.loads(body)
        if not isinstance(message, dict):
            raise BadFrameError("not an object")
        return message

    def _mac(self, side: Side, number: int, body: str) -> str:
        signed = f"{side}|{number}|{body}".encode()
        return hashlib.blake2s(signed, key=self.key, digest_size=_MAC_BYTES).hexdigest()


# ---- The secrets under which processes of one user, or of one run, sign what they tell each other
# A run has its own, in its directory. Where there is none (torchrun, a lighthouse), it is derived
# from the user's key: ``~/.config/hpc_elastic/key`` (0600, made on first use), which all nodes
# see where they share the home directory, and which is to be copied where they do not.


def user_folder() -> Path:
    """Return the folder of the user's key; make it if need be (0700)."""
    folder = Path.home() / ".config" / "hpc_elastic"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def user_key(folder: Path) -> bytes:
    """Return the key in a folder; make it if there is none. Two may do so at once.

    Raises:
        PermissionError: others than the owner may read it.
    """
    path = folder / "key"
    if not path.exists():
        _create_key(path)
    if path.stat().st_mode & 0o077:
        raise PermissionError(f"{path} must be readable by its owner only: chmod 600 {path}")
    return path.read_bytes()


def user_secret(purpose: str) -> bytes:
    """Return the secret of this user's processes for one purpose.

    Raises:
        PermissionError: others than the owner may read the key.
    """
    return sign(user_key(user_folder()), purpose).encode()


def peers_secret() -> bytes:
    """Return what a worker has in common with the workers of its other replica groups.

    That is the run's secret inside of a run, else one of the user's.

    Raises:
        OSError: it can not be read.
        PermissionError: others than the owner may read the user's key.
    """
    record = own_record()
    if record is None:
        return user_secret("peers")
    from hpc_elastic.run.directory import RunDir  # not in an attendant, which is to start fast

    return sign(RunDir(record.parent.parent).secret.read_bytes(), "peers").encode()


def _create_key(path: Path) -> None:
    from hpc_elastic.shared_files import create_atomic  # the first time only

    create_atomic(path, secrets.token_hex(32), mode=0o600)


def of_generation(secret: bytes, generation: int) -> bytes:
    """Return the secret of a run's agents since it was resumed for the n-th time.

    So that no agent of an earlier generation is let in any more. Generation 0 has the run's own.
    """
    return secret if generation == 0 else sign(secret, f"generation|{generation}").encode()
