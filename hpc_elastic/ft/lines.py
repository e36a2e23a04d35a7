"""JSON lines between a worker and the server of its group, which are on one node (pure).

Nothing is signed: the socket lies in a folder that only its owner may enter, and the server asks
the kernel whose process has connected.
"""

from __future__ import annotations

import json

from hpc_elastic.ft.protocol import Message, pack, unpack

MAX_LINE_BYTES = 1 << 20
_to_json = json.JSONEncoder(separators=(",", ":")).encode


def to_line(message: Message) -> bytes:
    """Return a message as one line."""
    return _to_json(pack(message)).encode() + b"\n"


class Lines:
    """Puts messages together from what is read of a socket."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are complete with these bytes.

        Raises:
            ValueError: a line is no message, or longer than `MAX_LINE_BYTES`.
        """
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > MAX_LINE_BYTES:
            raise ValueError(f"a line longer than {MAX_LINE_BYTES} bytes")
        return [_message(line) for line in lines]


def _message(line: bytes) -> Message:
    raw = json.loads(line)
    if not isinstance(raw, dict):
        raise ValueError("not an object")
    return unpack(raw)
