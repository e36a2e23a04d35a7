"""What must hold when the run has ended."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_elastic.data.audit import audit
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.event_schema import problems
from hpc_elastic.run.events import read_events
from hpc_elastic.shared_files import read_json
from slurm_sandbox import SandboxTimeoutError, SlurmSandbox
from slurm_sandbox.processes import wait_until
from soak import training
from soak.play import Record
from soak.processes import left_over
from soak.told import Finding

_TOLERANCE = 1e-6
"""Sums in another order differ by 1e-16, and these differences do not grow beyond it."""
_ALONE_S = 600.0
"""For the undisturbed training; it bounds hanging."""
_LATE_LINES = 2
"""Lines of one append, at most."""
_LEAVE_S = 200.0
"""For the last processes to end; it bounds hanging. Slurm holds a task for two minutes that went
back to the queue and ended slowly; it starts then, finds that its run has ended, and leaves."""


@dataclass(frozen=True)
class Check:
    """One thing that must hold; no problems: it does."""

    name: str
    problems: tuple[str, ...] = ()


def checks(record: Record, sandbox: SlurmSandbox, work: Path) -> list[Check]:
    """Return all checks of a soak.

    Args:
        record: What was played.
        sandbox: Where.
        work: A folder for the training that the run is compared with.
    """
    found = [Check("faults were thrown", () if record.thrown else ("none",))]
    found.append(_explained(record))
    runs = {"the run": record.run, "the companion": record.companion}
    for name, run in runs.items():
        ended = (*([record.problem] if record.problem else []), *_ended(run))
        found.append(Check(f"{name} went to its end by itself", tuple(ended)))
        found += [replace(check, name=f"{name}: {check.name}") for check in _always(run)]
        if not ended:
            after = _afterwards(run, work / run.parent.name)
            found += [replace(check, name=f"{name}: {check.name}") for check in after]
    found.append(Check("no read of status.json goes back", tuple(record.old_leaders)))
    if not record.problem:
        left = tuple(_left(record.run.parent, sandbox))
        found.append(Check("no task and no process is left", left))
    return found


def _always(run: Path) -> Iterator[Check]:
    yield Check("the events are as their schema says", tuple(_malformed(run)))
    yield Check("progress.jsonl is of one leader at a time", tuple(_interleaved(run)))


def _afterwards(run: Path, work: Path) -> Iterator[Check]:
    ranks = _results(RunDir(run))
    yield Check("every sample once an epoch, by the ledger", tuple(_audited(run)))
    yield from rank_checks(ranks)
    yield Check("the result is that of an undisturbed run", tuple(_right(ranks, work)))


def rank_checks(ranks: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Return the checks of what the ranks have returned, see `training.train`."""
    return [
        Check("every sample once an epoch, by the state", tuple(_counted(ranks))),
        Check("the parameters are the same on all ranks", tuple(_alike(ranks))),
    ]


def _ended(run: Path) -> Iterator[str]:
    result = read_json(RunDir(run).result)
    if result is None:
        yield "it has not ended"
    elif result["status"] != "succeeded":
        yield f"it has {result['status']}: {result.get('failure') or result}"


def _explained(record: Record) -> Check:
    told = [(thrown.fault, record.tell(thrown)) for thrown in record.thrown]
    num_shared = sum(found.finding is Finding.SHARED for _, found in told)
    name = "every fault is explained by the story"
    name += f", {num_shared} with what was thrown at the same time" if num_shared else ""
    missing = ((fault, found.problem) for fault, found in told if found.problem)
    return Check(name, tuple(f"fault {f.number} ({f.kind}): {why}" for f, why in missing))


def _malformed(run: Path) -> Iterator[str]:
    yield from sorted({p for event in read_events(RunDir(run).event_logs) for p in problems(event)})


def _interleaved(run: Path) -> Iterator[str]:
    """Yield each leader that went on to write its progress when a later one did.

    One append may come late, from a process that was stopped right before it.
    """
    last, late = 0, Counter[int]()
    for line in RunDir(run).progress.read_text().splitlines():
        try:
            term = int(json.loads(line).get("epoch") or 0)
        except ValueError:
            continue  # cut short by the end of its writer
        late[term] += term < last
        last = max(term, last)
    for term, num_lines in late.items():
        if num_lines > _LATE_LINES:
            yield f"{num_lines} lines of epoch {term} were written after a later one's"


def _results(run: RunDir) -> list[Mapping[str, Any]]:
    """Return what the ranks returned."""
    folder = run.path / read_json(run.result)["results"]  # type: ignore[index]
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


def _audited(run: Path) -> Iterator[str]:
    try:
        yield from (problem for proof in audit(run) for problem in proof.problems)
    except HpcElasticError as e:
        yield str(e)


def _counted(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for number, rank in enumerate(ranks):
        if rank["times_seen"] != [rank["epochs"]]:
            times, epochs = rank["times_seen"], rank["epochs"]
            yield f"rank {number}: samples were seen {times} times in {epochs} epochs"


def _alike(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not ranks or len(ranks) != ranks[0]["world_size"]:
        yield f"{len(ranks)} ranks have returned something"
    digests = {rank["digest"] for rank in ranks}
    if len(digests) > 1:
        yield f"there are {len(digests)} different ones"


def _right(ranks: list[Mapping[str, Any]], work: Path) -> Iterator[str]:
    if not ranks:
        return
    epochs, loss = int(ranks[0]["epochs"]), float(ranks[0]["loss"])
    argv = [sys.executable, "-m", training.__name__, str(work), str(epochs)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_ALONE_S)
    except subprocess.TimeoutExpired:
        yield f"the undisturbed training of {epochs} epochs has not ended within {_ALONE_S:g} s"
        return
    if done.returncode:
        yield f"the undisturbed training failed: {done.stderr.strip().splitlines()[-1:]}"
        return
    undisturbed = float(json.loads(done.stdout.splitlines()[-1])["loss"])
    if not math.isclose(loss, undisturbed, rel_tol=_TOLERANCE):
        yield f"after {epochs} epochs the loss is {loss!r}, undisturbed {undisturbed!r}"


def _left(run: Path, sandbox: SlurmSandbox) -> Iterator[str]:
    def queue() -> list[str]:
        return sandbox.run(["squeue", "-r", "-h", "-o", "%i %T %N"]).stdout.split("\n")[:-1]

    def left() -> list[str]:
        return queue() + left_over(sandbox, run)

    try:
        wait_until("the end of all", lambda: not left(), _LEAVE_S)
    except SandboxTimeoutError:
        yield from left()
