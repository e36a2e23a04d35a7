"""Which checkpoints may go (pure)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hpc_elastic.errors import ConfigError


@dataclass(frozen=True)
class Retention:
    """What is kept.

    Attributes:
        keep_last: How many of the newest checkpoints, at least 1.
        keep_every: Checkpoints of steps that are a multiple of this stay for ever; None: none do.
    """

    keep_last: int = 2
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for key in ("keep_last", "keep_every"):
            value = getattr(self, key)
            if key == "keep_every" and value is None:
                continue
            if type(value) is not int or value < 1:
                raise ConfigError(key, value, "give a whole number of at least 1")


def removable(
    steps: Collection[int], *, committed: int, rule: Retention, damaged: Collection[int] = ()
) -> list[int]:
    """Return the steps to remove, oldest first.

    Args:
        steps: Of all checkpoints there are.
        committed: The one that was written just now, and so is good. It stays in any case.
        rule: What is kept.
        damaged: Steps that did not verify. They do not count among the last, and go once there
            is a newer good one.
    """
    good = sorted(set(steps) - set(damaged) | {committed})
    kept = {committed, *good[-rule.keep_last :]}
    if rule.keep_every is not None:
        kept |= {step for step in good if step % rule.keep_every == 0}
    return sorted(step for step in steps if step not in kept and (step in good or step < committed))
