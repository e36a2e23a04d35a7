#!/usr/bin/env python3
"""Fault tolerance per step beside torchft: what it costs, and how fast it is when something dies.

    pip install 'hpc_elastic[bench]'
    python benchmarks/ft.py [--parts a b ...] [--quick] [--json FILE]

One process a replica, on CPU gloo over loopback; the workers of both libraries run the same lines
(`ft/worker.py`), and are forked after their imports. Ours and torchft's take turns. Parts:

- a: a step of start_quorum, allreduce and should_commit, less a plain gloo step of the same
  process: allreduce, and the division by the number of replicas;
- b: SIGKILL of a replica to the next commit of the others (of a step begun after the signal), with
  the defaults of the Python API, and with those of the lighthouse's command line;
- c: the lighthouse is killed, and comes back or does not: the longest gap between commits, and who
  crashes;
- d: a replica comes to others that train: from its imports to its first commit, and how long the
  others' longest step takes meanwhile;
- e: a state of 1 GB is fetched from peers;
- f: a round of the quorum, of 16 to 256 members on one coordinator;
- g: SIGSTOP of a replica to the next commit of the others.

Each cell is a median, with its range and number of samples. A bound (15 s for ours, 75 s for
torchft) stands where somebody did not go on at all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from ft import faults, healing, overhead, returns, rounds
from ft.libraries import OURS, PEER, is_installed
from ft.report import Row, Steal, table
from ft.settings import Settings
from rich.console import Console

PARTS: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "a": overhead.measure,
    "b": faults.killed,
    "c": faults.coordinator,
    "d": returns.measure,
    "e": healing.measure,
    "f": rounds.measure,
    "g": faults.stopped,
}


def settings_of(args: argparse.Namespace) -> Settings:
    """Return what is to be done.

    Raises:
        SystemExit: torchft is to be measured and is not installed.
    """
    libraries = [library for library in (OURS, PEER) if args.only in (None, library)]
    if PEER in libraries and not is_installed(PEER):
        raise SystemExit(
            "torchft is not installed: pip install 'hpc_elastic[bench]', or --only ours"
        )
    worlds, repeats = args.worlds, args.repeats
    if args.quick:
        worlds, repeats = worlds[:1], 1
    return Settings(tuple(worlds), repeats, args.quick, tuple(libraries))


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 3, 4], help="replicas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=[OURS, PEER], help="one library alone")
    parser.add_argument("--quick", action="store_true", help="see only that the parts work")
    parser.add_argument("--json", type=Path, help="write all samples there")
    args = parser.parse_args()
    settings, console, steal = settings_of(args), Console(), Steal()
    rows: list[Row] = []
    for part in args.parts:
        for row in PARTS[part](settings):
            rows.append(row)
            console.print(table([row]))
            if args.json:
                args.json.write_text(json.dumps([r.as_json() for r in rows], indent=1))
    console.print(table(rows))
    load = psutil.getloadavg()[0]
    console.print(f"the host took {steal.share():.1%} of the cores; load {load:.1f}")


if __name__ == "__main__":
    main()
