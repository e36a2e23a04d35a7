#!/usr/bin/env python3
"""Fault tolerance per step beside torchft: what it costs, and how fast it is when something dies.

    pip install 'hpc_elastic[bench]'
    python benchmarks/ft.py [--parts a b ...] [--quick] [--samples FILE]

METHODS.md says what each part measures. Workers are forked after their imports. Parts j, which
takes root, and k are measured only if they are asked for. Each cell is a median, with its range and
number of samples.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from evidence.machine import Steal, package_version
from evidence.result import Peer, Result
from evidence.show import about, options, present, rich_table
from ft import faults, healing, joins, overhead, returns, rounds, sharded
from ft.libraries import OURS, PEER, is_installed
from ft.report import Row, Settings, table
from rich.console import Console

GROUPS, RANKS = 2, 2


def measure_groups(settings: Settings) -> Iterator[Row]:
    """Measure replica groups of several ranks; sizes are those of one rank's shard."""
    sizes = ["1 KB", "10 MB"] if not settings.quick else ["1 KB"]
    yield from overhead.overhead(settings, "h HSDP", GROUPS, sizes, RANKS, of_peer=1.0)
    yield from faults.killed_groups(settings)
    sizes = ["10 MB", "100 MB"] if not settings.quick else ["10 MB"]
    yield from returns.restarted(settings, "h HSDP", GROUPS, sizes, RANKS)


PARTS: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "a": overhead.measure,
    "b": faults.killed,
    "c": faults.coordinator,
    "d": returns.measure,
    "e": healing.measure,
    "f": rounds.measure,
    "g": faults.stopped,
    "h": measure_groups,
    "i": overhead.checks,
    "j": joins.measure,
    "k": sharded.measure,
}

USUAL_PARTS = tuple("abcdefghi")

ABOUT = about("Fault tolerance per step, beside torchft")


def main() -> None:
    parser = options(__doc__, repeats=5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(USUAL_PARTS))
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 3, 4], help="replicas")
    parser.add_argument("--only", choices=[OURS, PEER], help="one library alone")
    parser.add_argument("--quick", action="store_true", help="see only that the parts work")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="write all samples there")
    given = parser.parse_args()
    libraries = [library for library in (OURS, PEER) if given.only in (None, library)]
    if PEER in libraries and not is_installed(PEER):
        raise SystemExit(
            "torchft is not installed: pip install 'hpc_elastic[bench]', or --only ours"
        )
    worlds, repeats = given.worlds, given.repeats
    if given.quick:
        worlds, repeats = worlds[:1], 1
    settings = Settings(tuple(worlds), repeats, given.quick, tuple(libraries))
    console, steal = Console(), Steal()
    rows: list[Row] = []
    for part in given.parts:
        for row in PARTS[part](settings):
            rows.append(row)
            console.print(rich_table(table([row])))
            if given.samples:
                given.samples.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    found = result(rows, settings, steal.share())
    if given.parts != list(USUAL_PARTS):
        about = replace(ABOUT, title=f"{ABOUT.title}: parts {', '.join(given.parts)}")
        found = replace(found, about=about)
    present(found, given)


def result(rows: Sequence[Row], settings: Settings, stolen: float) -> Result:
    version = package_version(PEER) if PEER in settings.libraries else None
    return Result(
        about=ABOUT,
        tables=(table(rows),),
        targets=tuple(target for row in rows for target in row.targets),
        peers=(Peer(PEER, version, "" if version else "ours alone was asked for"),),
        notes=(f"The host took {stolen:.1%} of the cores.",),
        repeats=settings.repeats,
    )


if __name__ == "__main__":
    main()
