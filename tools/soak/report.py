"""What a soak has to show: a table of the faults, and one of the checks."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from hpc_elastic._util import duration
from hpc_elastic.report.sentences import sentence
from soak.checks import Check
from soak.plan import Fault
from soak.play import Record
from soak.told import Finding, Thrown, Told

_UNSAID = {
    Finding.NOTHING: "(it need not be told)",
    Finding.SHARED: "(told with what was thrown at the same time)",
    Finding.MISSING: "[bold red]NOT TOLD:[/] ",
}


def planned(faults: Sequence[Fault]) -> Table:
    """Return the plan, one line a fault."""
    table = Table(title="planned: more than there will be time for")
    for column in ("#", "fault", "after [s]", "lasts [s]", ""):
        table.add_column(column, justify="right" if "[s]" in column else "left")
    for fault in faults:
        heels = "on the heels of the one before" if fault.on_heels else ""
        lasts = f"{fault.lasts_s:g}" if fault.lasts_s else ""
        table.add_row(str(fault.number), fault.kind, f"{fault.after_s:g}", lasts, heels)
    return table


def faults(record: Record) -> Table:
    """Return the faults that were thrown, what the story said, what they cost, and the sums."""
    told = [record.tell(thrown) for thrown in record.thrown]
    table = Table(title=f"{len(told)} faults", show_footer=True)
    episodes = {id(e): e for found in told for e in found.episodes}.values()
    lost = sum(e.cost.lost_steps or 0 for e in episodes)
    pause_s = sum(e.cost.pause_s or 0.0 for e in episodes)
    table.add_column("#", footer="")
    table.add_column("at", footer="together")
    table.add_column("fault")
    table.add_column("what the story said")
    table.add_column("steps lost", justify="right", footer=str(lost))
    table.add_column("to the next step", justify="right", footer=duration(pause_s))
    for thrown, found in zip(record.thrown, told, strict=True):
        table.add_row(*_row(thrown, found, record.started))
    return table


def _row(thrown: Thrown, told: Told, started: float) -> list[str]:
    fault = thrown.fault
    at = time.strftime("%M:%S", time.gmtime(max(0.0, thrown.time - started)))
    what = fault.of.what.format(hosts=", ".join(thrown.hosts))
    what += " (on the heels of the one before)" if fault.on_heels else ""
    said = [_UNSAID.get(told.finding, "") + escape(told.problem)]
    said += [escape(sentence(episode)) for episode in told.episodes]
    has_cost = any(e.cost.pause_s is not None for e in told.episodes)
    lost = str(told.lost_steps) if has_cost else ""
    pause = duration(told.pause_s) if has_cost else ""
    return [
        str(fault.number),
        at,
        f"[bold]{fault.kind}[/]: {escape(what)}",
        "\n".join(filter(None, said)),
        lost,
        pause,
    ]


def verdicts(checks: Sequence[Check]) -> Table:
    """Return the checks, one line each."""
    table = Table(title="at the end")
    table.add_column("")
    table.add_column("")
    for check in checks:
        mark = "[bold red]FAILED[/]" if check.problems else "[green]ok[/]"
        table.add_row(mark, escape("\n".join([check.name, *check.problems])))
    return table


def rest(record: Record) -> str:
    """Return what was planned and not done, in a line or none."""
    lines = [f"not thrown: {fault.number} ({why})" for fault, why in record.passed_over]
    if record.not_come_to:
        lines.append(f"planned, without time for it: {len(record.not_come_to)}")
    return "\n".join(lines)
