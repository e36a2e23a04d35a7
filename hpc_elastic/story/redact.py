"""Takes secrets out of what a report shows of a configuration (pure).

A report is made to be handed around; what it was made of lies in files that nobody else may read,
for there are tokens in them. Hidden are all values below a key ``env``, those whose key sounds like
a secret, and passwords in URLs. A secret under a harmless name can not be recognised.
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"
"""What stands for a secret."""

_SECRET = re.compile(
    r"token$|secret|passw|passphrase|credential|(api|access|private|auth|signing)[_-]?key|^env$",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(\w://[^/\s:@]*:)[^/\s@]+@")
_OVERRIDE = re.compile(r"([+~]*[\w./@-]+)=(.*)", re.DOTALL)


def redact(value: Any, *, hide: bool = False) -> Any:
    """Return JSON values without their secrets.

    Args:
        value: Any; keys of objects say what is secret.
        hide: It is one: what has a value loses it, and the keys stay.
    """
    if isinstance(value, dict):
        return {k: redact(v, hide=hide or is_secret(str(k))) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, hide=hide) for item in value]
    if hide:
        return value if value is None or value == "" else HIDDEN
    return _IN_URL.sub(rf"\1{HIDDEN}@", value) if isinstance(value, str) else value


def redact_argument(text: str) -> str:
    """Return an argument of the command line; the value of an override may be a secret."""
    override = _OVERRIDE.fullmatch(text)
    if override is None:
        return str(redact(text))
    key, value = override.groups()
    hide = any(is_secret(part) for part in re.split(r"[./@]", key.lstrip("+~")))
    return f"{key}={redact(value, hide=hide)}"


def is_secret(key: str) -> bool:
    """Tell whether a key sounds like that of a secret."""
    return _SECRET.search(key) is not None
