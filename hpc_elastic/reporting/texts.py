"""The lists and tables of a report's page (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

Values = Mapping[str, Any]


def by_cause(changes: Iterable[Values]) -> list[dict[str, Any]]:
    """Return what the faults have cost, added up by their cause, the costliest first.

    What is unknown of some of them counts as nothing in the sum.
    """
    found: dict[str, dict[str, Any]] = {}
    for change in changes:
        if not change["fault"]:
            continue
        row = found.setdefault(
            change["cause"],
            {"cause": change["cause"], "count": 0, "lost_steps": 0, "pause_s": 0.0, "node_s": 0.0},
        )
        row["count"] += 1
        for name in ("lost_steps", "pause_s", "node_s"):
            row[name] += change[name] or 0
    return sorted(found.values(), key=lambda row: -row["node_s"])


def costliest(changes: Iterable[Values], most: int) -> list[Values]:
    """Return the faults that have cost most node time, in order of time."""
    faults = [change for change in changes if change["fault"]]
    chosen = sorted(faults, key=lambda change: -change["node_s"])[:most]
    return sorted(chosen, key=lambda change: change["time"])


def departures(nodes: Iterable[Values]) -> list[tuple[str, int]]:
    """Return how attempts have ended, and how many, the most frequent first."""
    return Counter(str(n["ended_by"]) for n in nodes if n["ended_by"]).most_common()


def as_yaml(value: Any) -> str:
    """Return values of a configuration as text."""
    if value is None:
        return "unknown"
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100)
    return text.removesuffix("...\n")
