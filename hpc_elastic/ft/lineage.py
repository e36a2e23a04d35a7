"""Tokens that tell histories of parameters apart (pure); `protocol` says what they are for."""

from __future__ import annotations

import secrets
from hashlib import blake2b

_BYTES = 16


def fresh() -> str:
    """Return the token of a state that nobody else has: one that was initialised at random."""
    return secrets.token_hex(_BYTES)


def known(step: int, batches_committed: int) -> str:
    """Return the token of a state that all groups are promised to have alike.

    It was loaded from a checkpoint of that step, or initialised from the same seed (step 0).
    """
    return _hash(f"known|{step}|{batches_committed}")


def after_step(token: str, quorum_id: int, num_participants: int) -> str:
    """Return the token after a step that was committed in a quorum by so many contributors."""
    return _hash(f"{token}|{quorum_id}|{num_participants}")


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=_BYTES).hexdigest()
