"""The findings of the doctor: their verdicts and order, and their table and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hpc_elastic._util import counted
from hpc_elastic.slurm.nodelist import compress


class Verdict(Enum):
    """The result of a check."""

    FAIL = "fail"
    WARN = "warn"
    UNKNOWN = "unknown"
    OK = "ok"


GROUPS: dict[str, str] = {
    "script": "Script",
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
    """The finding of one check; ``found`` has its numbers, ``why`` is why it matters to a run.

    Attributes:
        check: Its stable name, ``<group>.<what>``.
        verdict: FAIL: a run fails, or does not come back; WARN: it works, with an avoidable loss;
            UNKNOWN: the check was not possible; OK.
        remedy: What to do (``Admin:`` if only an admin can); empty if there is nothing to do.
    """

    check: str
    found: str
    why: str = ""
    remedy: str = ""
    verdict: Verdict = Verdict.OK

    @property
    def group(self) -> str:
        """The key of its group in `GROUPS`."""
        return self.check.partition(".")[0]

    def to_json(self) -> dict[str, str]:
        """Return it with the keys of ``--json``."""
        head = {"check": self.check, "verdict": self.verdict.value}
        return {**head, "found": self.found, "why": self.why, "remedy": self.remedy}


_ORDER = list(Verdict)


def worst_verdict(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict; OK if there are no findings."""
    return min((f.verdict for f in findings), key=_ORDER.index, default=Verdict.OK)


ok, warn, fail, unknown = (
    partial(Finding, verdict=verdict)
    for verdict in (Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN)
)
"""Return a finding with this verdict, of its check, what was found, why it matters, the remedy."""

Row = tuple[object, Callable[[str, str, str, str], Finding], str, str]
"""Whether it applies; `warn`, `fail` or `unknown`; what was found; the remedy."""


def judge(check: str, why: str, *rows: Row, well: str) -> Finding:
    """Return the finding of the first row that applies; without one, all is well."""
    for applies, verdict, found, remedy in rows:
        if applies:
            return verdict(check, found, why, remedy)
    return ok(check, well, why)


def by_value(values: Mapping[str, str]) -> str:
    """Return values, given by node, with their nodes: ``64 CPUs on n[1-4]; 1 CPU on n5``."""
    nodes: dict[str, list[str]] = {}
    for node, value in values.items():
        nodes.setdefault(value, []).append(node)
    return "; ".join(f"{value} on {compress(sorted(names))}" for value, names in nodes.items())


_MARKS = {
    Verdict.OK: ("✓", "green"),
    Verdict.WARN: ("!", "yellow"),
    Verdict.FAIL: ("✗", "bold red"),
    Verdict.UNKNOWN: ("?", "cyan"),
}
_WIDEST = 120


def print_findings(findings: Sequence[Finding], console: Console, *, probed: bool) -> None:
    """Print all findings by group, then what is wrong and what to do."""
    width = min(console.width, _WIDEST)
    for key, title in GROUPS.items():
        rows = [finding for finding in findings if finding.group == key]
        if rows:
            console.print(Text(title, style="bold"))
            console.print(Padding(_table(rows), (0, 0, 1, 1)), width=width)
    console.print(_summary(findings), width=width)
    if not probed:
        hint = "--probe tests signals, requeueing, nodes and network by a job of about a minute"
        console.print(Text(hint, style="dim"), width=width)


def _table(rows: Sequence[Finding]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(no_wrap=True, style="dim", min_width=13)
    table.add_column(ratio=1, overflow="fold")
    for finding in rows:
        mark, style = _MARKS[finding.verdict]
        name = finding.check.partition(".")[2].replace("_", " ")
        found = Text(finding.found, style="" if finding.verdict is Verdict.OK else style)
        table.add_row(Text(mark, style=style), name, found)
    return table


def _summary(findings: Sequence[Finding]) -> RenderableType:
    bad = [f for f in findings if f.verdict is not Verdict.OK]
    numbers = Counter(f.verdict for f in findings)
    if not bad:
        return Text(f"All is well: {counted(len(findings), 'check')}.", style="bold green")
    parts = [f"{numbers[Verdict.OK]} passed"]
    words = {Verdict.FAIL: "failed", Verdict.WARN: "warnings", Verdict.UNKNOWN: "unknown"}
    for verdict, many in words.items():
        if num := numbers[verdict]:
            parts.append(counted(num, many.removesuffix("s"), many))
    head = Text(", ".join(parts), style="bold")
    return Group(head, *map(_advice, sorted(bad, key=lambda f: _ORDER.index(f.verdict))))


def _advice(finding: Finding) -> RenderableType:
    """Return what was found, why it matters and what to do, one below the other."""
    mark, style = _MARKS[finding.verdict]
    head, body = (Table.grid(padding=(0, 1)) for _ in range(2))
    head.add_column(width=1)
    head.add_column(ratio=1, overflow="fold")
    head.add_row(Text(mark, style=style), Text(f"{finding.check}: {finding.found}", style=style))
    body.add_column(width=5, style="dim", no_wrap=True, justify="right")
    body.add_column(ratio=1, overflow="fold")
    for label, text in (("why", finding.why), ("do", finding.remedy)):
        if text:
            body.add_row(label, Text(text))
    return Padding(Group(head, body), (1, 0, 0, 0))
