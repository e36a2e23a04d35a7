"""The checks at the end of a soak, and the tables of its report."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from hpc_elastic._util import duration
from hpc_elastic.data.audit import audit
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.report.sentences import sentence
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.events import problems, read_events
from hpc_elastic.shared_files import read_json
from slurm_sandbox import SandboxTimeoutError, SlurmSandbox
from slurm_sandbox.processes import wait_until
from soak import training
from soak.expected_events import ExplanationKind, SoakRecord
from soak.inject import leftover_processes
from soak.plan import Fault

_TOLERANCE = 1e-6
"""Sums in another order differ by 1e-16; the difference does not grow beyond this."""
_UNDISTURBED_S = 600.0
"""For the undisturbed training; it bounds hanging."""
_LATE_LINES = 2
"""Lines of one append, at most."""
_END_S = 200.0
"""For the last processes to end; it bounds hanging. Slurm holds a task for two minutes that was
requeued and ended slowly; it starts then, finds that its run has ended, and exits."""


@dataclass(frozen=True)
class SoakCheck:
    """One check; it holds if it has no problems."""

    name: str
    problems: tuple[str, ...] = ()


def run_checks(record: SoakRecord, sandbox: SlurmSandbox, work: Path) -> list[SoakCheck]:
    """Return all checks of a soak.

    Args:
        record: The course of the soak.
        sandbox: The Slurm of the runs.
        work: A folder for the training that the runs are compared with.
    """
    explained = record.explanations()
    num_shared = sum(found.kind is ExplanationKind.SHARED for _, found in explained)
    shared = f", {num_shared} together with one that it overlaps" if num_shared else ""
    missing = [(each.fault, found.problem) for each, found in explained if found.problem]
    found = [
        SoakCheck("faults were injected", () if record.injected else ("none",)),
        SoakCheck(
            f"the timeline explains every fault{shared}",
            tuple(f"fault {fault.number} ({fault.kind_name}): {why}" for fault, why in missing),
        ),
    ]
    for name, path in (("the run", record.run), ("the companion", record.companion)):
        run = RunDir(path)
        ended = [record.problem] if record.problem else []
        result = read_json(run.result)
        if result is None:
            ended.append("it has not ended")
        elif result["status"] != "succeeded":
            ended.append(f"it has {result['status']}: {result.get('failure') or result}")
        found.append(SoakCheck(f"{name} succeeded by itself", tuple(ended)))
        malformed = sorted({p for event in read_events(run.event_logs) for p in problems(event)})
        checks = [
            SoakCheck("the events follow their schema", tuple(malformed)),
            SoakCheck("progress.jsonl is of one leader at a time", _interleaved_leaders(run)),
        ]
        if not ended and result is not None:
            folder = path / result["results"]
            folders = folder.parent.glob("*.replica-*") if ".replica-" in folder.name else [folder]
            files = sorted(file for each in folders for file in each.glob("rank-*.json"))
            ranks = [json.loads(file.read_text()) for file in files]
            loss = tuple(_wrong_loss(ranks, work / path.parent.name))
            checks += [
                SoakCheck("every sample once an epoch, by the ledger", _audit_problems(path)),
                *rank_checks(ranks),
                SoakCheck("the result is that of an undisturbed run", loss),
            ]
        found += [replace(check, name=f"{name}: {check.name}") for check in checks]
    regressions = tuple(record.status_regressions)
    found.append(SoakCheck("status.json never shows an earlier leader again", regressions))
    if not record.problem:
        leftovers = _wait_for_leftovers(record.run.parent, sandbox)
        found.append(SoakCheck("no task and no process is left", leftovers))
    return found


def rank_checks(ranks: Sequence[Mapping[str, Any]]) -> list[SoakCheck]:
    """Return the checks of the values that the ranks returned, see `training.train`."""
    counts = [
        f"rank {number}: samples were seen {rank['times_seen']} times in {rank['epochs']} epochs"
        for number, rank in enumerate(ranks)
        if rank["times_seen"] != [rank["epochs"]]
    ]
    differences = []
    if not ranks or len(ranks) != ranks[0]["world_size"]:
        differences.append(f"{len(ranks)} ranks have returned something")
    if (num_digests := len({rank["digest"] for rank in ranks})) > 1:
        differences.append(f"there are {num_digests} different ones")
    return [
        SoakCheck("every sample once an epoch, by the state", tuple(counts)),
        SoakCheck("the parameters are the same on all ranks", tuple(differences)),
    ]


def _interleaved_leaders(run: RunDir) -> tuple[str, ...]:
    """Return each leader that wrote progress after a later leader had.

    One append may be late, from a process that was stopped right before it.
    """
    last, late = 0, Counter[int]()
    for line in run.progress.read_text().splitlines():
        try:
            term = int(json.loads(line).get("epoch") or 0)
        except ValueError:
            continue  # its writer was killed
        late[term] += term < last
        last = max(term, last)
    return tuple(
        f"{num_lines} lines of epoch {term} were written after a later one's"
        for term, num_lines in late.items()
        if num_lines > _LATE_LINES
    )


def _audit_problems(run: Path) -> tuple[str, ...]:
    try:
        return tuple(problem for proof in audit(run) for problem in proof.problems)
    except HpcElasticError as e:
        return (str(e),)


def _wrong_loss(ranks: Sequence[Mapping[str, Any]], work: Path) -> Iterator[str]:
    if not ranks:
        return
    epochs, loss = int(ranks[0]["epochs"]), float(ranks[0]["loss"])
    argv = [sys.executable, "-m", training.__name__, str(work), str(epochs)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_UNDISTURBED_S)
    except subprocess.TimeoutExpired:
        limit = f"{_UNDISTURBED_S:g} s"
        yield f"the undisturbed training of {epochs} epochs has not ended within {limit}"
        return
    if done.returncode:
        yield f"the undisturbed training failed: {done.stderr.strip().splitlines()[-1:]}"
        return
    undisturbed = float(json.loads(done.stdout.splitlines()[-1])["loss"])
    if not math.isclose(loss, undisturbed, rel_tol=_TOLERANCE):
        yield f"after {epochs} epochs the loss is {loss!r}, undisturbed {undisturbed!r}"


def _wait_for_leftovers(run: Path, sandbox: SlurmSandbox) -> tuple[str, ...]:
    """Wait for the end of all tasks and processes of a run; return those that do not end."""

    def leftovers() -> list[str]:
        queue = sandbox.run(["squeue", "-r", "-h", "-o", "%i %T %N"]).stdout.splitlines()
        return queue + leftover_processes(sandbox, run)

    try:
        wait_until("the end of all", lambda: not leftovers(), _END_S)
    except SandboxTimeoutError:
        return tuple(leftovers())
    return ()


_NO_ENTRY = {
    ExplanationKind.NOT_EXPECTED: "(no entry is expected)",
    ExplanationKind.SHARED: "(together with a fault that it overlaps)",
    ExplanationKind.MISSING: "[bold red]MISSING:[/] ",
}


def plan_table(faults: Sequence[Fault]) -> Table:
    """Return the plan, one line a fault."""
    table = Table(title="planned: more than there is time for")
    for column in ("#", "fault", "after [s]", "lasts [s]", ""):
        table.add_column(column, justify="right" if "[s]" in column else "left")
    for fault in faults:
        lasts = f"{fault.duration_s:g}" if fault.duration_s else ""
        overlap = "overlaps the one before" if fault.overlaps else ""
        table.add_row(str(fault.number), fault.kind_name, f"{fault.after_s:g}", lasts, overlap)
    return table


def fault_table(record: SoakRecord) -> Table:
    """Return the injected faults: what the timeline shows of each, what it cost, and the sums."""
    explained = record.explanations()
    table = Table(title=f"{len(explained)} faults", show_footer=True)
    entries = {id(e): e for _, found in explained for e in found.entries}.values()
    lost = sum(e.cost.lost_steps or 0 for e in entries)
    pause_s = sum(e.cost.pause_s or 0.0 for e in entries)
    table.add_column("#", footer="")
    table.add_column("at", footer="together")
    table.add_column("fault")
    table.add_column("what the timeline shows")
    table.add_column("steps lost", justify="right", footer=str(lost))
    table.add_column("to the next step", justify="right", footer=duration(pause_s))
    for injected, explanation in explained:
        fault = injected.fault
        shown = [_NO_ENTRY.get(explanation.kind, "") + escape(explanation.problem)]
        shown += [escape(sentence(entry)) for entry in explanation.entries]
        has_cost = any(e.cost.pause_s is not None for e in explanation.entries)
        table.add_row(
            str(fault.number),
            time.strftime("%M:%S", time.gmtime(max(0.0, injected.time - record.started))),
            f"[bold]{fault.kind_name}[/]: {escape(fault.describe(injected.hosts))}",
            "\n".join(filter(None, shown)),
            str(explanation.lost_steps) if has_cost else "",
            duration(explanation.pause_s) if has_cost else "",
        )
    return table


def check_table(checks: Sequence[SoakCheck]) -> Table:
    """Return the checks, one line each."""
    table = Table(title="at the end")
    table.add_column("")
    table.add_column("")
    for check in checks:
        mark = "[bold red]FAILED[/]" if check.problems else "[green]ok[/]"
        table.add_row(mark, escape("\n".join([check.name, *check.problems])))
    return table


def unused_faults(record: SoakRecord) -> str:
    """Return the planned faults that were not injected, in a few lines; empty if there are none."""
    lines = [f"not injected: {fault.number} ({why})" for fault, why in record.skipped]
    if record.not_reached:
        lines.append(f"planned, without time for it: {len(record.not_reached)}")
    return "\n".join(lines)
