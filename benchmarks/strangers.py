#!/usr/bin/env python3
"""How soon does a peer get through while a stranger floods the port?

    python benchmarks/strangers.py

Peers that know the key are an agent that connects to the leader, a replica to the lighthouse, one
that heals to another, and a worker that sends a copy of its checkpoint.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from evidence.result import Cell, Column, Result, Table, Target, figure
from evidence.show import about, options, present

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hostile"))

import flooded

NUM_STRANGERS, NUM_PEERS = 5000, 200
WITHIN_S = 1.0
ABOUT = about("Strangers at the ports")


def measure(kind: str) -> tuple[float, float, float, float, int, int, int]:
    """Return longest and rate without and with a flood, and what the server had open at most."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOME"] = folder
        argv = [sys.executable, flooded.__file__, kind, folder]
        with subprocess.Popen(argv, **pipes) as server:  # type: ignore[call-overload]
            where = json.loads(server.stdout.readline())
            quiet = connect_all(kind, where, 1)
            address = flooded.port_of(where)
            argv = [sys.executable, "-c", flooded.FLOOD, *map(str, address), str(NUM_STRANGERS)]
            with subprocess.Popen(argv, **pipes) as strangers:  # type: ignore[call-overload]
                while strangers.stdout.readline() != "all\n":
                    pass
                busy = connect_all(kind, where, 1 + NUM_PEERS)
                server.stdin.write("\n")
                opened = json.loads(server.stdout.readline())
                strangers.stdin.write("\n")
            server.stdin.close()
    return (*quiet, *busy, opened["files"], opened["threads"], opened["kib"])


def connect_all(kind: str, where: flooded.Where, first: int) -> tuple[float, float]:
    longest, began = 0.0, time.perf_counter()
    for number in range(first, first + NUM_PEERS):
        since = time.perf_counter()
        flooded.GENUINE[kind](where, number)
        longest = max(longest, time.perf_counter() - since)
    return longest, NUM_PEERS / (time.perf_counter() - began)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    rows, met = list[tuple[Cell, ...]](), list[Target]()
    for kind in flooded.KINDS:
        runs = [measure(kind) for _ in range(given.repeats)]
        rows.append((kind, *(figure(values) for values in zip(*runs, strict=True))))
        longest = max(run[2] for run in runs)
        met.append(Target(f"{kind}: longest connect in a flood", WITHIN_S, longest, "s"))
    columns = (
        Column("port"), Column("longest, s", ".3f"), Column("connects/s", ".0f"),
        Column("longest in a flood, s", ".3f"), Column("connects/s in a flood", ".0f"),
        Column("files open", ".0f"), Column("threads", ".0f"), Column("KiB", ".0f"),
    )  # fmt: skip
    table = Table("200 peers, one after the other", columns, tuple(rows))
    present(Result(ABOUT, (table,), tuple(met), repeats=given.repeats), given)


if __name__ == "__main__":
    main()
