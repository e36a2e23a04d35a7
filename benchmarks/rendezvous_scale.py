#!/usr/bin/env python3
"""How long until all agents have their rank, ours beside torch's c10d rendezvous?

    python benchmarks/rendezvous_scale.py --repeats 3

METHODS.md says what is measured. For both, min nodes = max nodes = N. Of ours there are heartbeats,
events, status and entries as in a run, but no store for the workers is started; in *again* all are
told to stop and join again. A run of c10d that takes longer than ``--peer-limit-s`` is given up
(``> X``). Of ours the lines and the TCP payload are counted; of c10d the requests to the store with
their answers, and the state in them. The exponent is by least squares over the medians.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from evidence.machine import package_version
from evidence.result import (
    Cell,
    Column,
    Figure,
    Peer,
    Result,
    Table,
    Target,
    exponent,
    figure,
)
from evidence.show import about, numbers, options, present, say
from rendezvous_scale import agents, leading, peer
from rendezvous_scale.process import NoAnswerError, answer, side

SIZES = (16, 64, 256, 512, 1024, 4096, 10_000)
PATIENCE_S = 120.0
Peers = dict[int, list[peer.PeerReached | None]]
"""By size; None: it was given up."""
OURS = "hpc_elastic"
TARGET_256_S, TARGET_RATIO, TARGET_EXPONENT, TARGET_10000_S = 0.3, 50.0, 1.1, 5.0

ABOUT = about("Rendezvous of N agents")


@dataclass(frozen=True)
class Ours:
    first: agents.Reached
    again: agents.Reached
    leader_cpu_s: float
    """Processor seconds of the leader for the first round."""
    quiet_ratio: float
    """Share of a core that it takes while agents only send heartbeats."""


def measure(size: int) -> Ours:
    with (
        tempfile.TemporaryDirectory(prefix="rendezvous-scale-") as name,
        side(leading.lead, size, Path(name)) as leader,
        side(agents.follow, size, answer(leader, PATIENCE_S), Path(name)) as group,
    ):
        answer(group, PATIENCE_S)
        before = _cpu_s(leader)
        first = _reach(group)
        cpu_s = _cpu_s(leader) - before
        time.sleep(2.0)  # the entry is appended, and all workers would have started
        before, since = _cpu_s(leader), time.monotonic()
        time.sleep(5.0)
        quiet_ratio = (_cpu_s(leader) - before) / (time.monotonic() - since)
        return Ours(first, _reach(group), cpu_s, quiet_ratio)


def _cpu_s(leader: Connection) -> float:
    leader.send("processor time")
    return float(answer(leader, PATIENCE_S))


def _reach(group: Connection) -> agents.Reached:
    group.send("go")
    reached: agents.Reached = answer(group, PATIENCE_S)
    return reached


def measure_all(given: argparse.Namespace) -> tuple[dict[int, list[Ours]], Peers]:
    """Return all of ours and of c10d's measurements, by size; None for one that was given up."""
    ours: dict[int, list[Ours]] = {n: [] for n in given.sizes}
    peers: Peers = {n: [] for n in given.sizes}
    for _ in range(given.repeats):
        for n in given.sizes:
            try:
                ours[n].append(measure(n))
                say(f"{n}: {ours[n][-1].first.wall_s:.3f} s")
            except NoAnswerError as e:
                say(f"{n}: given up: {e}")
    for n in (n for n in given.sizes if n <= given.peer_max_n and not given.skip_peer):
        while len(peers[n]) < given.repeats and None not in peers[n]:
            peers[n].append(peer.measure(n, given.peer_processes, given.peer_limit_s))
            found = peers[n][-1]
            say(f"c10d, {n}: {f'{found.wall_s:.1f} s' if found else 'given up'}")
    return ours, peers


def result(ours: Mapping[int, Sequence[Ours]], peers: Peers, given: argparse.Namespace) -> Result:
    columns = (
        Column("N"), Column("ours, s", ".3f"), Column("leader's CPU, s", ".3f"),
        Column("quiet", ".3f"),
        Column("messages/agent", ".2f"), Column("bytes/agent", ".0f"),
        Column("tries/agent", ".2f"), Column("again, s", ".3f"), Column("c10d, s", ".3f"),
        Column("messages/agent", ".0f"), Column("bytes/agent", ".0f"), Column("c10d / ours", ".0f"),
    )  # fmt: skip
    rows = tuple(
        (str(n), *_our_cells(n, measured), *_peer_cells(n, measured, peers[n], given.peer_limit_s))
        for n, measured in ours.items()
    )
    return Result(
        about=ABOUT,
        tables=(Table("until all agents have their rank", columns, rows),),
        targets=tuple(targets(ours, peers, given.peer_limit_s)),
        peers=(Peer("c10d (torch)", package_version("torch")),),
        repeats=given.repeats,
    )


def _our_cells(n: int, measured: Sequence[Ours]) -> list[Cell]:
    if not measured:
        return [f"> {PATIENCE_S:g}", *[""] * 6]
    first = [m.first for m in measured]
    return [
        figure([r.wall_s for r in first]),
        _middle([m.leader_cpu_s for m in measured]),
        _middle([m.quiet_ratio for m in measured]),
        _middle([r.messages / n for r in first]),
        _middle([(r.sent_bytes + r.received_bytes) / n for r in first]),
        _middle([r.tries / n for r in first]),
        figure([m.again.wall_s for m in measured]),
    ]


def _peer_cells(
    n: int, ours: Sequence[Ours], measured: Sequence[peer.PeerReached | None], limit_s: float
) -> list[Cell]:  # fmt: skip
    found = [m for m in measured if m is not None]
    if not measured:
        return []
    if len(found) < len(measured):
        return [f"> {limit_s:g}", "", "", f"> {limit_s / first_s(ours):.0f}"]
    return [
        figure([m.wall_s for m in found]),
        _middle([m.messages / n for m in found]),
        _middle([m.bytes / n for m in found]),
        Figure(statistics.median(m.wall_s for m in found) / first_s(ours)),
    ]


def _middle(samples: Sequence[float]) -> Figure:
    return Figure(statistics.median(samples))


def first_s(measured: Sequence[Ours]) -> float:
    """Return the median time of the first round; infinite where every one was given up."""
    return statistics.median([m.first.wall_s for m in measured] or [math.inf])


def targets(ours: Mapping[int, Sequence[Ours]], peers: Peers, limit_s: float) -> Iterator[Target]:
    """Hold ours against the targets, as far as they were measured."""
    taken = {n: first_s(measured) for n, measured in ours.items()}
    if sum(t < math.inf for t in taken.values()) > 1:
        yield Target("exponent of N", TARGET_EXPONENT, exponent(taken))
    for n, bound_s in ((256, TARGET_256_S), (10_000, TARGET_10000_S)):
        if n in taken and taken[n] < math.inf:
            yield Target(f"{n} agents", bound_s, taken[n], "s")
        elif n in taken:
            why = f"not within {PATIENCE_S:g} s"
            yield Target(f"{n} agents", bound_s, None, "s", why=why, failed=True)
    if peers.get(256) and taken[256] < math.inf:
        found = [m.wall_s if m else limit_s for m in peers[256]]
        ratio = statistics.median(found) / taken[256]
        given_up = ", at least: c10d was given up" if None in peers[256] else ""
        yield Target(f"256 agents: c10d / ours{given_up}", TARGET_RATIO, ratio, "", True)


def main() -> None:
    parser = options(__doc__, repeats=3)
    parser.add_argument("--sizes", type=numbers, default=SIZES, metavar="N,N")
    parser.add_argument("--skip-peer", action="store_true", help="measure ours only")
    parser.add_argument("--peer-max-n", type=int, default=512, metavar="N")
    parser.add_argument("--peer-limit-s", type=float, default=300.0, metavar="S")
    parser.add_argument("--peer-processes", type=int, default=4, metavar="N")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="write all details there")
    given = parser.parse_args()
    ours, peers = measure_all(given)
    if given.samples:
        raw = {
            OURS: {n: [asdict(m) for m in of] for n, of in ours.items()},
            "c10d": {n: [asdict(m) if m else None for m in of] for n, of in peers.items()},
        }
        given.samples.write_text(json.dumps(raw, indent=1) + "\n")
    present(result(ours, peers, given), given)


if __name__ == "__main__":
    main()
