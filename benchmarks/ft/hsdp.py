"""Part h: replica groups of several ranks, which shard the model inside the group (HSDP)."""

from __future__ import annotations

from collections.abc import Iterator

from ft import faults, overhead, returns
from ft.report import Row
from ft.settings import Settings

GROUPS, RANKS = 2, 2


def measure(settings: Settings) -> Iterator[Row]:
    """Step, kill to the next commit, and heal; sizes are those of one rank's shard."""
    sizes = ["1 KB", "10 MB"] if not settings.quick else ["1 KB"]
    yield from overhead.overhead(settings, "h HSDP", GROUPS, sizes, RANKS, of_peer=1.0)
    yield from faults.killed_groups(settings)
    sizes = ["10 MB", "100 MB"] if not settings.quick else ["10 MB"]
    yield from returns.restarted(settings, "h HSDP", GROUPS, sizes, RANKS)
