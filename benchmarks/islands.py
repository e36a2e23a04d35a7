#!/usr/bin/env python3
"""How much of what islands train is counted under faults, beside the synchronous DiLoCo?

python benchmarks/islands.py --repeats 3
"""

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evidence.result import Column, Result, Table, Target, figure
from evidence.show import about, options, present, say
from islands.crew import NAMES, Crew
from islands.worker import STEP_S

from hpc_elastic.ft.coordination import LighthouseServer
from hpc_elastic.islands.outer_round import OuterRound, last_index, round_name

CASES = (("synchronous", False), ("islands", False), ("islands", True))
ABOUT = about("DiLoCo between islands")


@dataclass(frozen=True)
class Outcome:
    """What came of one run.

    ``goodput``: counted steps per second, of all four together. ``held_up``: share of the time for
    which files held up the steps, None if synchronous; ``beside``: for which the thread beside was
    busy.
    """

    goodput: float
    faults: int
    held_up: float | None = None
    beside: float | None = None


def measure(mode: str, faulty: bool, seconds: float, every_s: float, seed: int) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="islands-") as name:
        folder = Path(name)
        lighthouse = None
        env = {}
        if mode == "synchronous":
            lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
            env["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
        crew = Crew(mode, folder, env)
        try:
            crew.wait_until_started()
            time.sleep(5)
            begun, first = time.time(), counted(folder)
            until = begun + seconds
            faults = crew.inject_faults(until, every_s, seed) if faulty else 0
            time.sleep(max(0.0, until - time.time()))
            last, ended = counted(folder), time.time()
            lines = crew.lines()
        finally:
            crew.close()
            if lighthouse is not None:
                lighthouse.shutdown()
    if mode == "synchronous":
        within = [line for _, found in lines for line in found if begun < line["at"] <= ended]
        steps = sum(line.get("committed", 0.0) for line in within)
        return Outcome(steps / (ended - begun), faults)
    ends = [found[-1] for _, found in lines if "seconds" in (found or [{}])[-1]]
    total = sum(line["seconds"] for line in ends)
    return Outcome(
        (last - first) / (ended - begun),
        faults,
        sum(line["held_up_s"] for line in ends) / total,
        sum(line["file_s"] for line in ends) / total,
    )


def counted(folder: Path) -> float:
    """Return the steps that the islands' rounds have counted so far, of the mean fragment."""
    tokens = []
    for path in (folder / "0", folder / "1"):
        names = os.listdir(path) if path.is_dir() else []  # noqa: PTH208 - names alone
        if last_index(names):
            text = (path / round_name(last_index(names))).read_text()
            found = OuterRound.decode(text)
            assert found is not None
            tokens.append(found.tokens)
    return statistics.mean(tokens) if tokens else 0.0


def result(measured: Sequence[tuple[str, bool, Outcome]], repeats: int) -> Result:
    ideal = len(NAMES) / STEP_S
    columns = (
        Column(""), Column("faults", ".0f"), Column("counted steps per s", ".1f"),
        Column("of the ideal, %", ".1f"), Column("steps held up by files, %", ".2f"),
        Column("files and outer steps beside, %", ".1f"),
    )  # fmt: skip
    rows, medians = [], {}
    for mode, faulty in CASES:
        found = [o for m, f, o in measured if (m, f) == (mode, faulty)]
        if not found:
            continue
        goodputs = [o.goodput for o in found]
        medians[mode, faulty] = statistics.median(goodputs)
        shares = [[getattr(o, name) for o in found] for name in ("held_up", "beside")]
        cells = (
            figure([o.faults for o in found]) if faulty else "",
            figure(goodputs),
            figure([100 * g / ideal for g in goodputs]),
            *(figure([100 * s for s in each if s is not None]) for each in shares),
        )
        rows.append((f"{mode}, {'with' if faulty else 'no'} faults", *cells))
    targets = []
    base = medians.get(("synchronous", False))
    if base and ("islands", True) in medians:
        share = 100 * medians["islands", True] / base
        what = "islands with faults, of the synchronous goodput without faults"
        targets.append(Target(what, 90.0, share, "%", more_is_better=True))
    held = [100 * o.held_up for _, f, o in measured if f and o.held_up is not None]
    if held:
        what = "time for which files hold up steps"
        targets.append(Target(what, 10.0, statistics.median(held), "%"))
    return Result(
        about=ABOUT,
        tables=(Table("four islands or replicas", columns, tuple(rows)),),
        targets=tuple(targets),
        repeats=repeats,
    )


def main() -> None:
    parser = options(__doc__, repeats=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--every-s", type=float, default=20.0, help="from fault to fault")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    given = parser.parse_args()
    measured = []
    for repeat in range(given.repeats):
        for mode, faulty in CASES:
            outcome = measure(mode, faulty, given.seconds, given.every_s, given.seed + repeat)
            measured.append((mode, faulty, outcome))
            say(f"{mode}, faults: {faulty}: {outcome}")
    present(result(measured, given.repeats), given)


if __name__ == "__main__":
    main()
