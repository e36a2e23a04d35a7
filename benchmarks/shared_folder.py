#!/usr/bin/env python3
"""What does a folder that nodes share as by NFS cost a run, beside a local disk?

    as root: python benchmarks/shared_folder.py --repeats 3

METHODS.md says what is measured. Parts, and about how long each takes (``--parts A,B`` chooses):

- saves: four ranks save a state of 96 MiB; and the run ends (3 repeats: 4 min);
- ends: a run that ends, with a small state (3 repeats: 4 min);
- deaths: until the next step where a follower's node, the leader's agent or the leader's node is
  killed; the pause where a node joins (3 repeats: 30 min);
- faults: two deaths, a preemption of all nodes, a leader that is cut off for a minute, a file
  server that stops for a minute; then all that the runs have left is looked at (once: 18 min);
- operations: what runs of 4, 16 and 64 agents ask the file server for, and how many files a run of
  16 leaves (once: 22 min); no local disk beside it, whose operations nobody counts;
- goodput: the trace of `benchmarks/goodput.py` (once: 25 min).

The launcher runs on the login node (`SlurmSandbox.on_login`), as do `hpc-elastic` commands.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from evidence.result import Column, Figure, Result, Table, Target
from evidence.show import about, among, numbers, options, present, say
from shared_folder import deaths, ends, faults, operations
from shared_folder.place import LOCAL, NFS, Place, place_of, scratch

PARTS = ("saves", "ends", "deaths", "faults", "operations", "goodput")
GOODPUT = 90.0
"""Per cent."""
ABOUT = about("A folder shared as by NFS")


@dataclass
class Measured:
    saves: dict[str, list[ends.Course]] = field(default_factory=dict)
    ends: dict[str, list[ends.Course]] = field(default_factory=dict)
    deaths: list[deaths.Measurement] = field(default_factory=list)
    faults: list[faults.Measurement] = field(default_factory=list)
    operations: operations.Found = field(default_factory=operations.Found)
    goodput: dict[str, float] = field(default_factory=dict)
    """Per cent of the undisturbed rate, by place."""


def measure(given: argparse.Namespace, measured: Measured) -> None:
    pair = [part for part in given.parts if part not in ("operations", "goodput")]
    with scratch() as folder:
        if pair:
            with (
                place_of(LOCAL, f"{given.sandbox}_local", folder / "local") as local,
                place_of(NFS, f"{given.sandbox}_nfs", folder / "nfs") as nfs,
            ):
                for part in pair:
                    measure_part(part, [local, nfs], given, measured)
        if "operations" in given.parts:
            for agents in given.agents:
                name, inside = f"{given.sandbox}_n{agents}", folder / f"operations-{agents}"
                say(f"operations: {agents} agents")
                operations.measure(agents, name, inside, measured.operations)
    if "goodput" in given.parts:
        for place in (LOCAL, NFS):
            measured.goodput[place] = goodput(place, given)
            say(f"goodput, {place}: {measured.goodput[place]:.1f} %")


def measure_part(
    part: str, both: Sequence[Place], given: argparse.Namespace, measured: Measured
) -> None:
    """Measure a part on both sandboxes, in turns."""
    if part in ("saves", "ends"):
        num_saves = ends.SAVES if part == "saves" else 0
        for _, place in itertools.product(range(given.repeats), both):
            course = ends.measure(place, num_saves=num_saves)
            getattr(measured, part).setdefault(place.name, []).append(course)
            told = " ".join((f"the end after {course.end_s:.1f} s", *course.problems))
            say(f"{part}, {place.name}: {told}")
    elif part == "deaths":
        for _, case, place in itertools.product(range(given.repeats), deaths.CASES, both):
            death = deaths.measure(case, place, given.train_s)
            measured.deaths.append(death)
            say(f"{case}, {place.name}: {death.outcome} after {death.step_s:.2f} s")
    else:
        for _, case, place in itertools.product(range(given.fault_repeats), faults.CASES, both):
            if faults.applies(case, place):
                fault = faults.measure(case, place, given.train_s)
                measured.faults.append(fault)
                what = "; ".join(fault.problems) or "held"
                say(f"{case}, {place.name}: {what}")


def goodput(place: str, given: argparse.Namespace) -> float:
    """Return the goodput of our run in the trace, in per cent."""
    with scratch() as folder:
        file = folder / "result.json"
        script = Path(__file__).with_name("goodput.py")
        argv = [sys.executable, str(script), "--peers", "ours", "--json", str(file)]
        argv += ["--minutes", str(given.goodput_minutes), "--sandbox", f"{given.sandbox}_goodput"]
        subprocess.run([*argv, *(["--nfs"] if place == NFS else [])], check=True, stdout=sys.stderr)
        (target,) = Result.from_json(json.loads(file.read_text())).targets
    assert target.value is not None
    return target.value


def result(measured: Measured, parts: Sequence[str], repeats: int) -> Result:
    """Return all tables, and hold what was measured against the aims."""
    tables: list[Table] = []
    targets: list[Target] = []
    notes: list[str] = []
    courses = {
        place: measured.saves.get(place, []) + measured.ends.get(place, [])
        for place in (LOCAL, NFS)
    }
    if all(courses.values()):
        tables.append(ends.table(courses))
        targets += ends.targets(courses)
        notes += [f"{place}: {p}" for place in courses for c in courses[place] for p in c.problems]
    if measured.deaths:
        tables.append(deaths.table(measured.deaths))
        targets += deaths.targets(measured.deaths)
    if measured.faults:
        tables.append(faults.table(measured.faults))
        targets += faults.targets(measured.faults)
        notes += [f"{m.place}, {m.case}: {p}" for m in measured.faults for p in m.problems]
    if measured.goodput:
        row = ("goodput, of the undisturbed rate", *map(Figure, measured.goodput.values()))
        columns = (Column(""), *(Column(place, ".1f") for place in measured.goodput))
        tables.append(Table("the trace of *Goodput under preemption*, per cent", columns, (row,)))
        share = measured.goodput.get(NFS)
        targets.append(Target("goodput, of the undisturbed rate", GOODPUT, share, "%", True))
    if measured.operations.sizes:
        tables += operations.tables(measured.operations)
        targets += operations.targets(measured.operations)
        notes += operations.BOUNDS
    notes += measured.operations.skipped
    about = replace(ABOUT, title=f"{ABOUT.title}: {', '.join(parts)}")
    return Result(about, tuple(tables), tuple(targets), notes=tuple(notes), repeats=repeats)


def main() -> None:
    parser = options(__doc__, repeats=3)
    parser.add_argument("--parts", type=among(PARTS), default=list(PARTS), metavar="A,B")
    parser.add_argument(
        "--agents", type=numbers, default=[4, 16, 64],
        metavar="N,M", help="of the runs whose operations are counted",
    )  # fmt: skip
    parser.add_argument("--train-s", type=float, default=30.0, help="from first step to fault")
    parser.add_argument("--fault-repeats", type=int, default=1, help="of the faults of a minute")
    parser.add_argument("--goodput-minutes", type=float, default=10.0, help="of each trace")
    parser.add_argument(
        "--sandbox", default="folder", help="how their names begin; they are taken down at the end"
    )
    given = parser.parse_args()
    measured = Measured()
    try:
        measure(given, measured)
    finally:
        present(result(measured, given.parts, given.repeats), given)


if __name__ == "__main__":
    main()
