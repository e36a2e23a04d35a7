"""One finding of the doctor, and how findings are ordered. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from hpc_elastic.slurm.nodelist import compress


class Verdict(Enum):
    """What a check came to."""

    FAIL = "fail"
    WARN = "warn"
    UNKNOWN = "unknown"
    OK = "ok"


GROUPS: dict[str, str] = {
    "host": "Login node",
    "slurm": "Slurm",
    "directory": "Shared directory",
    "nodes": "Nodes",
    "network": "Network",
    "signals": "Signals",
}
"""The groups by the first part of a check's name, in the order of the table."""


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: Its stable name, ``<group>.<what>``.
        verdict: FAIL: a run will not work, or not come back; WARN: it works, with a loss that can
            be avoided; UNKNOWN: it could not be found out; OK.
        found: What was found, with its numbers.
        why: Why it matters to a run.
        remedy: What to do, and who can do it; empty if there is nothing to do.
    """

    check: str
    verdict: Verdict
    found: str
    why: str = ""
    remedy: str = ""

    @property
    def group(self) -> str:
        """The key of its group in `GROUPS`."""
        return self.check.partition(".")[0]

    def to_json(self) -> dict[str, str]:
        """Return it with the keys of ``--json``."""
        return {
            "check": self.check,
            "verdict": self.verdict.value,
            "found": self.found,
            "why": self.why,
            "remedy": self.remedy,
        }


_ORDER = list(Verdict)


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict; OK if there are no findings."""
    return min((f.verdict for f in findings), key=_ORDER.index, default=Verdict.OK)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return those that are not OK, the worst first, in their order otherwise."""
    bad = [f for f in findings if f.verdict is not Verdict.OK]
    return sorted(bad, key=lambda f: _ORDER.index(f.verdict))


def ok(check: str, found: str, why: str = "") -> Finding:
    """Return a finding that all is well."""
    return Finding(check, Verdict.OK, found, why)


def warn(check: str, found: str, why: str, remedy: str) -> Finding:
    """Return a finding of an avoidable loss."""
    return Finding(check, Verdict.WARN, found, why, remedy)


def fail(check: str, found: str, why: str, remedy: str) -> Finding:
    """Return a finding that a run will not work."""
    return Finding(check, Verdict.FAIL, found, why, remedy)


def unknown(check: str, found: str, why: str = "", remedy: str = "") -> Finding:
    """Return a finding that something could not be found out."""
    return Finding(check, Verdict.UNKNOWN, found, why, remedy)


def by_value(values: Mapping[str, str]) -> str:
    """Return values with the nodes that have them: ``64 CPUs on n[1-4]; 1 CPU on n5``.

    Args:
        values: By node.
    """
    nodes: dict[str, list[str]] = {}
    for node, value in values.items():
        nodes.setdefault(value, []).append(node)
    return "; ".join(f"{value} on {compress(sorted(names))}" for value, names in nodes.items())
