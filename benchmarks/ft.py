#!/usr/bin/env python3
"""Fault tolerance per step beside torchft: what it costs, and how fast it is when something dies.

    pip install 'hpc_elastic[bench]'
    python benchmarks/ft.py [--parts a b ...] [--quick] [--samples FILE]

`ABOUT` says what each part measures. Workers are forked after their imports. Parts j, which takes
root, and k are measured only if they are asked for. Each cell is a median, with its range and
number of samples.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from evidence.machine import Steal, package_version
from evidence.result import About, Peer, Result
from evidence.show import options, present, rich_table
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

ABOUT = About(
    title="Fault tolerance per step, beside torchft",
    measured="One process a replica, on CPU gloo over loopback; the workers of both libraries run "
    "the same lines and take turns. (a) A step of start_quorum, allreduce and "
    "should_commit, less a plain gloo step of the same process; both take turns. (b) "
    "SIGKILL of a replica to the next commit of the others. (c) The lighthouse is killed, "
    "and comes back or does not: the longest gap between commits, and who crashes. (d) A "
    "replica comes to others that train: from its imports to its first commit, and how long "
    "the others' longest step takes meanwhile. (e) A state of 1 GB is fetched from peers. "
    "(f) A round of the quorum; of groups of eight ranks over sockets, and the decisions "
    "alone, simulated. (g) SIGSTOP of a replica to the others' next commit. (h) Two replica "
    "groups of two ranks, with a collective inside the group in each step; sizes are those "
    "of a rank's shard. (i) The check for silent data corruption: the longer commit of the "
    "steps that have it, of the time of 100 steps. (j) A replica with a large "
    "state comes to others over a network of 200 MB/s: how long they wait, more than a step of "
    "theirs takes. (k) A fresh replica with a sharded model joins one that trains, both of two "
    "ranks: whether all bits are equal after 30 steps, and the other's failed steps. A bound (15 s "
    "for ours, 75 s for torchft) stands where somebody did not go on at all.",
    does_not_show=(
        "NCCL and GPUs: all of this is gloo on CPU.",
        "A network, or nodes: all replicas share the cores and the memory of one machine; "
        "healing is limited by memory copies there.",
        "Overhead of a step with a forward pass: the time of these is the collective's. Rounds "
        "of parts a and h in which the host took more than 5 % of the cores are left out.",
        "Gaps below 1 step: the others' longest gap is one of many steps, so that it is above "
        "the median of them even where nobody is held up.",
        "Groups of eight ranks on nodes of their own: what their ranks and their manager server "
        "say to each other there is not in part f.",
        "Whole jobs: no launcher, no Slurm, no restore from disk; the recovery benchmark has them.",
    ),
)


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
