#!/usr/bin/env python3
"""Do well-known scripts run elastically as they are, and what does a change of the group cost them?

    python benchmarks/known_scripts.py --sources FOLDER

METHODS.md says what is measured, `known_scripts/scripts.toml` which scripts, and how each is run.
Their repositories are fetched into a folder by the commands that are printed where it lacks them.
"""

import itertools
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evidence import torchrun
from evidence.result import Column, Figure, Result, Table, Target
from evidence.show import about, among, options, present, say
from known_scripts.runs import (
    PATIENCE_S,
    Ours,
    Outputs,
    Peer,
    Script,
    Step,
    Torchrun,
    read_table,
    restart,
)

TARGET_RATIO = 1.2
AHEAD = 8
"""Lines of steps that a worker shows before its group is disturbed."""
ABOUT = about("Known scripts, unmodified")
SOURCES = Path("known-sources")
KINDS = ("notice", "growth", "kill")
OURS, TORCHRUN, ALONE = "ours", "torchrun", "undisturbed"
PEERS: dict[str, Callable[[Script, Path], Peer]] = {
    ALONE: lambda script, work: Torchrun(script, work, alone=True),
    OURS: Ours,
    TORCHRUN: Torchrun,
}


@dataclass
class Outcome:
    """What came of one run of a script."""

    code: int | None = None
    """Exit code; None if it did not end."""
    first_line_s: float | None = None
    last: int = 0
    loss: str = ""
    lost: dict[str, str] = field(default_factory=dict)
    level: str = ""
    sizes: str = ""
    audit: str = ""


def fetching(scripts: Iterable[Script]) -> list[str]:
    """Return the shell lines that fetch what is needed."""
    return [
        f"git init -q {name} && git -C {name} fetch -q --depth 1 https://github.com/{repository} "
        f"{revision} && git -C {name} checkout -q FETCH_HEAD"
        for repository, revision in sorted({(s.repository, s.revision) for s in scripts})
        for name in [repository.rpartition("/")[2]]
    ]


def run(script: Script, sources: Path, name: str, folder: Path) -> Outcome:
    """Run a script in an empty folder, and disturb it unless it is to be alone."""
    work, found = script.lay_out(sources, folder), Outcome()
    begin, make = time.time(), PEERS[name]
    peer = make(script, work)
    outputs = Outputs(script, peer.outputs)
    try:
        if _waits(peer, lambda: bool(outputs.poll())):
            found.first_line_s = outputs.steps[0].time - begin
        if name != ALONE:
            _disturb(peer, outputs, found)
        _waits(peer, lambda: outputs.poll() is None, 2 * PATIENCE_S)
        found.code = peer.code()
    finally:
        peer.end()
    found.last = max((step.position for step in outputs.poll()), default=0)
    found.loss = outputs.loss
    if isinstance(peer, Ours):
        found.level, found.sizes = ", ".join(sorted(outputs.levels)) or "not said", peer.sizes()
        if outputs.levels == {"3"}:
            found.audit = "proven" if peer.ask("audit", str(peer.run)) == 0 else "**no**"
    return found


def _disturb(peer: Peer, outputs: Outputs, found: Outcome) -> None:
    """Take the last node with notice, let it come back, and kill it."""
    acts = {"notice": peer.preempt, "growth": peer.come_back, "kill": peer.kill}
    if outputs.script.workers == 1:
        del acts["growth"]
    group_since = 0.0
    for name, act in acts.items():
        grows = name == "growth"  # a node may have come back before the group has shown much

        def is_ready(since: float = group_since, grows: bool = grows) -> bool:
            steps = outputs.poll()
            return _num_shown(steps, since) >= AHEAD or (
                grows and restart(steps, since) is not None
            )

        if not _waits(peer, is_ready):
            found.lost[name] = "ended before"
            return
        since = group_since if grows else time.time()
        acting = threading.Thread(target=act)
        acting.start()
        _waits(peer, lambda since=since: restart(outputs.poll(), since) is not None)
        acting.join()
        restarted = restart(outputs.steps, since, group_since)
        found.lost[name] = "no restart" if restarted is None else restarted.lost(outputs.script)
        group_since = time.time() if restarted is None else restarted.first.time


def _num_shown(steps: Sequence[Step], since: float) -> int:
    """Return how many steps an output shows that has begun since a moment."""
    began = {step.output: step.time for step in reversed(steps)}
    return max(Counter(s.output for s in steps if began[s.output] >= since).values(), default=0)


def _waits(peer: Peer, holds: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    """Wait until something holds; return False if the run has ended before, or it takes long."""
    deadline = time.monotonic() + patience_s
    while not holds():
        if peer.code() is not None or time.monotonic() > deadline:
            return holds()
        time.sleep(0.1)
    return True


def result(seen: Mapping[str, Mapping[str, Outcome]], notes: Sequence[str]) -> Result:
    """Return the tables of what was seen, by script and peer."""
    none, rows, ratios = Outcome(), [], []
    for script, outcomes in seen.items():
        alone, ours, theirs = (outcomes.get(name, none) for name in (ALONE, OURS, TORCHRUN))
        if ours.first_line_s and alone.first_line_s:
            ratios.append(ours.first_line_s / alone.first_line_s)
        rows.append((
            script, _verdict(ours, alone), ours.level, ours.audit, ours.sizes,
            *(f"{ours.lost.get(k, '')} / {theirs.lost.get(k, '')}".strip(" /") for k in KINDS),
            " / ".join(each.loss for each in (alone, ours, theirs)),
            *(Figure(s) if s else "" for s in (ours.first_line_s, alone.first_line_s)),
            _verdict(theirs, alone).strip("*") if TORCHRUN in outcomes else "",
        ))  # fmt: skip
    columns = (
        Column("script"), Column("runs"), Column("level"), Column("audit"), Column("workers"),
        *(Column(f"steps lost, {kind}") for kind in KINDS), Column("final loss"),
        Column("first line, s", ".1f"), Column("of torchrun, s", ".1f"), Column("torchrun runs"),
    )  # fmt: skip
    num = sum(row[1] == "yes" for row in rows)
    targets = (
        Target("scripts that run with no line of ours", len(rows), num, more_is_better=True),
        Target(
            "first line, of torchrun's", TARGET_RATIO,
            statistics.median(ratios) if ratios else None, why="none was seen",
        ),
    )  # fmt: skip
    caption = "ours / torchrun; the loss also undisturbed, which stands first"
    tables = (Table(caption, columns, tuple(rows)),)
    return Result(ABOUT, tables, targets, (torchrun.peer(),), tuple(notes), 1)


def _verdict(outcome: Outcome, alone: Outcome) -> str:
    """Return whether a run has ended well, at the step at which an undisturbed one ends."""
    if alone.code is None:
        return "not compared"
    return "yes" if outcome.code == 0 and outcome.last == alone.last > 0 else "**no**"


def main() -> None:
    table = read_table()
    parser = options(__doc__)
    parser.add_argument(
        "--sources", type=Path, default=SOURCES, metavar="FOLDER", help=f"default: {SOURCES}"
    )
    parser.add_argument("--only", type=among(table), default=list(table), metavar="A,B")
    parser.add_argument("--peers", type=among(PEERS), default=list(PEERS), metavar="A,B")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs there")
    given = parser.parse_args()
    sources = given.sources.absolute()
    chosen = {name: table[name] for name in given.only}
    lacking = [script for script in chosen.values() if not script.source(sources).is_dir()]
    if lacking:
        commands = [f"mkdir -p {sources} && cd {sources}", *fetching(lacking)]
        parser.error(
            "\n".join(["the sources are not there; these commands fetch them:", *commands])
        )
    missing = {name: found for name in chosen if (found := chosen[name].missing_packages())}
    notes = [f"{name} was not run: it needs {', '.join(found)}" for name, found in missing.items()]
    seen: dict[str, dict[str, Outcome]] = {}
    with tempfile.TemporaryDirectory(prefix="known-scripts-") as scratch:
        for name, peer in itertools.product(chosen, given.peers):
            if name in missing:
                continue
            folder = (given.keep or Path(scratch)).absolute() / name / peer.replace(" ", "-")
            seen.setdefault(name, {})[peer] = found = run(chosen[name], sources, peer, folder)
            say(f"{name}, {peer}: {found}")
    present(result(seen, notes), given)


if __name__ == "__main__":
    main()
