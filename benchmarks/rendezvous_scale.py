#!/usr/bin/env python3
"""How long until all agents have their rank, ours beside torch's c10d rendezvous?

    python benchmarks/rendezvous_scale.py --repeats 3

Real sockets on this machine, 127.0.0.1. For both, min nodes = max nodes = N, and the time runs from
"all agents go", before they connect, until the last of them has its rank.

- hpc_elastic: our leader in one process, N light agents in another (`rendezvous_scale/agents.py`);
  heartbeats, events, status and records as in a run, but no store for the workers is started.
  *again*: from the loss of one node, which comes back at once as a new attempt, until all, who were
  told to stop, have joined again and have their new ranks.
- c10d: N threads of DynamicRendezvousHandler in ``--peer-processes`` processes, and one TCPStore
  (libuv) in one of its own. A run that takes longer than ``--peer-limit-s`` is given up (``> X``).

Messages and bytes are both ways, per agent, until the last agent has its rank: of ours the lines
and the TCP payload; of c10d the requests to the store with their answers, and the state in them.
The exponent is the slope of log time over log N, by least squares over the medians.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rendezvous_scale import agents, leading, peer
from rendezvous_scale.process import NoAnswerError, answer, side
from rich.console import Console
from rich.table import Table

SIZES = (16, 64, 256, 512, 1024, 4096, 10_000)
PATIENCE_S = 120.0
TARGET_256_S, TARGET_RATIO, TARGET_EXPONENT, TARGET_10000_S = 0.3, 50.0, 1.1, 5.0


@dataclass(frozen=True)
class Ours:
    """One group of ours, formed and formed again."""

    first: agents.Reached
    again: agents.Reached
    leader_cpu_s: float
    """Processor seconds of the leader for the first round."""


def measure(size: int) -> Ours:
    """Form a group of our agents, and form it again after a loss."""
    with (
        tempfile.TemporaryDirectory(prefix="rendezvous-scale-") as name,
        side(leading.lead, size, Path(name)) as leader,
        side(agents.follow, size, answer(leader, PATIENCE_S), Path(name)) as group,
    ):
        answer(group, PATIENCE_S)
        before = _cpu_s(leader)
        first = _reach(group)
        cpu_s = _cpu_s(leader) - before
        return Ours(first, _reach(group), cpu_s)


def _cpu_s(leader) -> float:
    leader.send("processor time")
    return answer(leader, PATIENCE_S)


def _reach(group) -> agents.Reached:
    group.send("go")
    return answer(group, PATIENCE_S)


def measure_all(options: argparse.Namespace) -> tuple[dict, dict]:
    """Return all of ours and of c10d's measurements, by size; None for one that was given up."""
    ours: dict[int, list[Ours]] = {n: [] for n in options.sizes}
    peers: dict[int, list[peer.PeerReached | None]] = {n: [] for n in options.sizes}
    progress = Console(stderr=True, highlight=False)
    for _ in range(options.repeats):
        for n in options.sizes:
            try:
                ours[n].append(measure(n))
                progress.print(f"{n}: {ours[n][-1].first.wall_s:.3f} s")
            except NoAnswerError as e:
                progress.print(f"{n}: given up: {e}")
    for n in (n for n in options.sizes if n <= options.peer_max_n and not options.skip_peer):
        while len(peers[n]) < options.repeats and None not in peers[n]:
            peers[n].append(peer.measure(n, options.peer_processes, options.peer_limit_s))
            found = peers[n][-1]
            progress.print(f"c10d, {n}: {f'{found.wall_s:.1f} s' if found else 'given up'}")
    return ours, peers


def report(ours: Mapping[int, Sequence[Ours]], peers: Mapping, limit_s: float) -> Table:
    """Return one line for each size: medians, and the range of our time."""
    table = Table(title="until all agents have their rank")
    for column in (
        "N", "hpc_elastic, s", "leader's CPU, s", "messages/agent", "bytes/agent", "tries/agent",
        "again, s", "c10d, s", "messages/agent", "bytes/agent", "c10d / ours",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for n, measured in ours.items():
        table.add_row(
            str(n), *_our_cells(n, measured), *_peer_cells(n, measured, peers[n], limit_s)
        )
    return table


def _our_cells(n: int, measured: Sequence[Ours]) -> list[str]:
    if not measured:
        return [f"> {PATIENCE_S:g}", *[""] * 5]
    first = [m.first for m in measured]
    return [
        _spread([r.wall_s for r in first]),
        f"{statistics.median(m.leader_cpu_s for m in measured):.3f}",
        f"{statistics.median(r.messages for r in first) / n:.2f}",
        f"{statistics.median(r.sent_bytes + r.received_bytes for r in first) / n:.0f}",
        f"{statistics.median(r.tries for r in first) / n:.2f}",
        _spread([m.again.wall_s for m in measured]),
    ]


def _peer_cells(n: int, ours: Sequence[Ours], measured: Sequence, limit_s: float) -> list[str]:
    found = [m for m in measured if m is not None]
    if not measured:
        return []
    if len(found) < len(measured):
        return [f"> {limit_s:g}", "", "", f"> {limit_s / first_s(ours):.0f}"]
    taken_s = statistics.median(m.wall_s for m in found)
    return [
        _spread([m.wall_s for m in found]),
        f"{statistics.median(m.messages for m in found) / n:.0f}",
        f"{statistics.median(m.bytes for m in found) / n:.0f}",
        f"{taken_s / first_s(ours):.0f}",
    ]


def _spread(seconds: Sequence[float]) -> str:
    median = f"{statistics.median(seconds):.3f}"
    return median if len(seconds) == 1 else f"{median} [{min(seconds):.3f}-{max(seconds):.3f}]"


def first_s(measured: Sequence[Ours]) -> float:
    """Return the median time of the first round; infinite where every one was given up."""
    return statistics.median([m.first.wall_s for m in measured] or [math.inf])


def exponent(seconds: Mapping[int, float]) -> float:
    """Return b of t = a * N**b, by least squares of log t over log N."""
    points = [(math.log(n), math.log(t)) for n, t in seconds.items() if t < math.inf]
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def verdict(ours: Mapping[int, Sequence[Ours]], peers: Mapping, limit_s: float) -> str:
    """Hold ours against the targets, as far as they were measured."""
    taken = {n: first_s(measured) for n, measured in ours.items()}
    lines = []

    def hold(what: str, value: float, met: bool) -> None:
        lines.append(f"  {what}: {value:.3g}: {'pass' if met else 'MISS'}")

    if sum(t < math.inf for t in taken.values()) > 1:
        hold(f"exponent, at most {TARGET_EXPONENT}", b := exponent(taken), b <= TARGET_EXPONENT)
    if 256 in taken:
        hold(f"256 within {TARGET_256_S} s", taken[256], taken[256] <= TARGET_256_S)
    if peers.get(256):
        found = [m.wall_s if m else limit_s for m in peers[256]]
        ratio = statistics.median(found) / taken[256]
        hold(f"256: c10d / ours, at least {TARGET_RATIO:g}", ratio, ratio >= TARGET_RATIO)
    if 10_000 in taken:
        hold(f"10000 within {TARGET_10000_S:g} s", taken[10_000], taken[10_000] <= TARGET_10000_S)
    return "\n".join(["targets:", *lines])


def main() -> None:
    """Measure, then print the table and the verdict."""
    options = parse()
    ours, peers = measure_all(options)
    if options.json:
        raw = {
            "hpc_elastic": {n: [asdict(m) for m in of] for n, of in ours.items()},
            "c10d": {n: [asdict(m) if m else None for m in of] for n, of in peers.items()},
        }
        options.json.write_text(json.dumps(raw, indent=1) + "\n")
    console = Console(highlight=False, width=options.width)
    console.print(report(ours, peers, options.peer_limit_s))
    console.print(verdict(ours, peers, options.peer_limit_s))


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", type=_sizes, default=SIZES, metavar="N,N")
    parser.add_argument("--skip-peer", action="store_true", help="measure ours only")
    parser.add_argument("--peer-max-n", type=int, default=512, metavar="N")
    parser.add_argument("--peer-limit-s", type=float, default=300.0, metavar="S")
    parser.add_argument("--peer-processes", type=int, default=4, metavar="N")
    parser.add_argument("--width", type=int, default=190, help="of the table")
    parser.add_argument("--json", type=Path, help="write every measurement to this file as well")
    return parser.parse_args()


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


if __name__ == "__main__":
    main()
