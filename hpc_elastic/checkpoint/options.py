"""How a Checkpointer works, as its user wishes (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpc_elastic.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """How a Checkpointer works.

    Attributes:
        asynchronous: Write behind the training's back. Otherwise `Checkpointer.save` returns when
            all is committed.
        when_busy: What a save does while an earlier one is still being written: ``wait`` for it,
            or ``skip`` the new one.
        rng: Save and restore the random number generators of each rank (`rng`).
        strict: Refuse to restore a checkpoint that has other keys than the state.
        replicated: Who writes what all ranks have: ``spread`` over all, or the ``first``.
        accept_inexact: Keys of the state whose objects are restored under another world size as
            rank 0 had them, though each rank had a state of its own: samples are trained twice or
            never, if it is a position in data.
        timeout_s: How long one rank waits for another to finish writing, more than 0.
        boundary: Whether a save is a moment at which the group may change, and the run goes on from
            there. One Checkpointer of a script has that. False for one beside it, as of the best
            model: after a change of the group its newest step may be older than the other's.
    """

    asynchronous: bool = True
    when_busy: Literal["wait", "skip"] = "wait"
    rng: bool = True
    strict: bool = True
    replicated: Literal["spread", "first"] = "spread"
    accept_inexact: tuple[str, ...] = ()
    timeout_s: float = 600.0
    boundary: bool = True

    def __post_init__(self) -> None:
        for key, allowed in (("when_busy", ("wait", "skip")), ("replicated", ("spread", "first"))):
            if getattr(self, key) not in allowed:
                raise ConfigError(key, getattr(self, key), f"give one of {', '.join(allowed)}")
        if isinstance(self.accept_inexact, str):
            remedy = f"give a tuple of keys: ({self.accept_inexact!r},)"
            raise ConfigError("accept_inexact", self.accept_inexact, remedy)
        if not self.timeout_s > 0:
            raise ConfigError("timeout_s", self.timeout_s, "give a number of seconds above 0")
