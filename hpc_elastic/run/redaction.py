"""What of a run is hidden where others read it: its secrets.

A report is passed on; the files that it is made of are private, because they may hold tokens.
Hidden are all values below a key ``env``, values whose key looks like that of a secret, and
passwords in URLs. A secret under another name is not recognised.
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"
"""Replacement of a secret."""

_SECRET = re.compile(
    r"token$|secret|webhook|passw|passphrase|credential|(api|access|private|auth|signing)[_-]?key"
    r"|^env$",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(\w://[^/\s:@]*:)[^/\s@]+@")
_OVERRIDE = re.compile(r"([+~]*[\w./@-]+)=(.*)", re.DOTALL)


def redact(value: Any, *, hide: bool = False) -> Any:
    """Return JSON values without secrets, by their keys; ``hide`` hides all values, and no keys."""
    if isinstance(value, dict):
        return {k: redact(v, hide=hide or is_secret(str(k))) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, hide=hide) for item in value]
    if hide:
        return value if value is None or value == "" else HIDDEN
    return _IN_URL.sub(rf"\1{HIDDEN}@", value) if isinstance(value, str) else value


def redact_argument(text: str) -> str:
    """Return an argument of the command line, without the value of a secret override."""
    override = _OVERRIDE.fullmatch(text)
    if override is None:
        return str(redact(text))
    key, value = override.groups()
    hide = any(is_secret(part) for part in re.split(r"[./@]", key.lstrip("+~")))
    return f"{key}={redact(value, hide=hide)}"


def is_secret(key: str) -> bool:
    """Return whether a key looks like that of a secret."""
    return _SECRET.search(key) is not None
