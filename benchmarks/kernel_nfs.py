#!/usr/bin/env python3
"""What does the kernel's own NFS client see, and does a run hold on it?

    as root: python benchmarks/kernel_nfs.py
    as root: python benchmarks/kernel_nfs.py --mounts vers=3 vers=4.2,nocto --only runs

Slurm is real: slurmctld of a sandbox, and slurmd in each machine, whose network is namespaces of
the sandbox's. The server's folder is on ext4.

First, on two machines: how long until one of them sees what the other did, by each way of asking;
whether link(2) is exclusive; two changes of a folder within one tick of the server's clock; and how
long the delegations of NFS 4 of a dead client hold up the others. Then a run on each kind of mount:
two nodes train and save, a third joins, a follower's machine is killed and comes back, the leader's
machine is killed, the run is told to finish, and the login node, an NFS client as well, waits for
its end. The exit code is 1 if a run does not hold what it has to.

Debian packages: user-mode-linux kmod nfs-common nfs-kernel-server rpcbind e2fsprogs, and those of
the Slurm sandbox. It takes about ten minutes for each kind of mount.
"""

import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from evidence.needs import KERNELS, SANDBOX
from evidence.result import Cell, Column, Figure, Result, Table
from evidence.show import about, options, present
from kernel_nfs import runs, visibility
from kernel_nfs.cluster import FOLDER, Cluster, cluster

MOUNTS = ("vers=3", "vers=4.2", "vers=3,nocto", "vers=4.2,nocto")
ABOUT = about("The kernel's own NFS client")
_LIMIT_S = 45.0
"""Longer than a folder's attributes live at first (acdirmin, 30 s)."""
_OWNER, _OTHER = "node1", "node2"


def main() -> int:
    parser = options(__doc__)
    parser.add_argument(
        "--mounts", nargs="+", default=MOUNTS, metavar="OPTIONS", help="as in nfs(5)"
    )
    parser.add_argument("--name", default="kernel_nfs", help="of the sandbox")
    parser.add_argument("--only", choices=("primitives", "runs"))
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="copy the runs' files there")
    given = parser.parse_args()
    unmet = [need for need in (*SANDBOX, KERNELS) if not need.is_met()]
    if unmet:
        sys.exit("\n".join(f"it needs {need.name}: {need.remedy}" for need in unmet))
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", file=sys.stderr, flush=True)

    tables, reports, notes = [], [], []
    with cluster(given.name) as machines_up:
        if given.only != "runs":
            tables += list(seen(machines_up, given.mounts, say, notes))
        if given.only != "primitives":
            for number, mount in enumerate(given.mounts):
                say(f"a run on {mount}")
                reports.append(runs.play(machines_up, f"run{number}", mount, say))
                for problem in reports[-1].problems:
                    say(f"{mount}: {problem}")
        if given.keep:
            folder = machines_up.layout.directory
            shutil.copytree(folder / "log", given.keep / "log", dirs_exist_ok=True)
            if (folder / "kept").exists():
                shutil.copytree(folder / "kept", given.keep, symlinks=True, dirs_exist_ok=True)
        notes.append(f"kernel of the machines: {machines_up.server.run('uname -r').strip()}")
    notes += [f"{report.options}: {note}" for report in reports for note in report.notes]
    if reports:
        tables.append(run_table(reports))
    present(Result(ABOUT, tuple(tables), notes=tuple(notes)), given)
    return 1 if any(report.problems for report in reports) else 0


def seen(up: Cluster, mounts: list[str], say, notes: list[str]) -> Iterator[Table]:
    """Yield a table for each change: ways of asking, and for how long each mount hid it."""
    ticks: list[tuple[str, dict[str, list[int]]]] = []
    found: dict[str, dict[str, list[Cell]]] = {change.name: {} for change in visibility.CHANGES}
    for number, mount in enumerate(mounts):
        up.remount(mount)
        writer, reader = up.boot(_OWNER), up.boot(_OTHER)
        say(f"what is seen on {up.seen_options}")
        for place, change in enumerate(visibility.CHANGES):
            folder = f"{FOLDER}/seen-{number}-{place}"
            for way, seconds in visibility.measure(change, writer, reader, folder, _LIMIT_S):
                cell = f"> {_LIMIT_S:g}" if seconds is None else Figure(seconds)
                found[change.name].setdefault(way, []).append(cell)
        links = visibility.compete(writer, reader, f"{FOLDER}/link-{number}")
        notes += [f"{mount}, link(2) of two clients: {n} times {what}" for what, n in links.items()]
        ticks.append((mount, visibility.two_in_a_tick(writer, reader, f"{FOLDER}/two-{number}")))
        if mount.startswith("vers=4"):
            held = partial(up.facts, "delegations", writer.address)
            for line in visibility.delegated(writer, reader, f"{FOLDER}/held-{number}", held):
                notes.append(f"{mount}, delegations: {line}")
    columns = (Column("way of asking"), *(Column(mount, ".1f") for mount in mounts))
    for name, ways in found.items():
        rows = tuple((way, *cells) for way, cells in ways.items())
        yield Table(f"{name}: not seen for, seconds", columns, rows)
    yield tick_table(ticks)


def tick_table(ticks: list[tuple[str, dict[str, list[int]]]]) -> Table:
    """Return of how many second files of one tick each way of asking told."""
    first = (
        "unlisted at first, and a minute later",
        *(" ".join(map(str, t[""])) for _, t in ticks),
    )
    ways = dict.fromkeys(way for _, told in ticks for way in told if way)
    rows = [
        (way, *("{} of {}".format(*told[way]) if way in told else "" for _, told in ticks))
        for way in ways
    ]
    caption = "Two files made at once: what tells of the second one where the listing does not"
    columns = (Column("way of asking"), *(Column(mount) for mount, _ in ticks))
    return Table(caption, columns, (first, *rows))


def run_table(reports: list[runs.Report]) -> Table:
    names = list(dict.fromkeys(name for report in reports for name in report.figures))
    rows: list[tuple[Cell, ...]] = [
        (name, *(Figure(r.figures[name]) if name in r.figures else "" for r in reports))
        for name in names
    ]
    rows.append(("what did not hold", *("; ".join(r.problems) or "nothing" for r in reports)))
    columns = (Column("seconds"), *(Column(report.options, ".1f") for report in reports))
    return Table("A run on each mount", columns, tuple(rows))


if __name__ == "__main__":
    sys.exit(main())
