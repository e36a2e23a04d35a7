"""What a lighthouse and an attendant tell each other, and how it is addressed (pure).

Both ends sign what they say (`net.wire`) with a secret derived from the user's key (`net.keys`).
Frames: ``terms`` (lighthouse to attendant, first: ``silence_s``, after which each side gives up the
other), ``beat`` (it is answered) and ``ft``, which carries a ``message`` of `protocol`.
"""

from __future__ import annotations

from typing import Any

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft.protocol import Message, pack

PURPOSE = "lighthouse"
"""Of the secret that both ends derive from the user's key."""
SESSION_EPOCH = 0
"""An attendant can not know the lighthouse's epoch before it has connected."""


def frame(message: Message) -> dict[str, Any]:
    """Return what carries a message between a replica and its keeper."""
    return {"type": "ft", "message": pack(message)}


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``http://host:port`` or ``host:port``.

    Raises:
        ConfigError: it is neither.
    """
    from urllib.parse import urlsplit

    remedy = "give it as host:port or http://host:port"
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError as e:
        raise ConfigError("lighthouse_addr", text, f"{remedy} ({e})") from e
    if not host or port is None:
        raise ConfigError("lighthouse_addr", text, remedy)
    return host, port
