"""Part f: how long a round of the quorum takes, by the number of members on one coordinator."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from ft.crew import crew
from ft.libraries import OURS, PEER, lighthouse
from ft.report import Row
from ft.settings import Settings

MEMBERS = (16, 64, 256)
ROUNDS = 30
MAX_EXPONENT = 1.2


def measure(settings: Settings) -> Iterator[Row]:
    """Have all members ask at once, round after round."""
    counts = MEMBERS if not settings.quick else MEMBERS[:2]
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(settings.repeats):
        for count in counts:
            for library in settings.libraries:
                taken = [1000 * s for s in _rounds(library, count)]
                found.setdefault((library, count), []).append(statistics.median(taken))
    for count in counts:
        ours, peer = found.get((OURS, count), []), found.get((PEER, count), [])
        of_peer = 1.0 if count == MEMBERS[0] else None
        yield Row("f quorum round", f"{count} members", "ms", ours, peer, of_peer=of_peer)
    exponents = {
        library: [exponent([(c, statistics.median(found[library, c])) for c in counts])]
        for library in settings.libraries
    }
    ours, peer = exponents.get(OURS, []), exponents.get(PEER, [])
    yield Row("f quorum round", "growth exponent", "", ours, peer, limit=MAX_EXPONENT)


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of a line through the points' logarithms, by least squares."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    slope: float = statistics.linear_regression(xs, ys).slope
    return slope


def _rounds(library: str, count: int) -> list[float]:
    """Return the seconds from the first ask of a round to its last answer."""
    with crew() as people, lighthouse(library) as light:
        names = [f"member{i}" for i in range(count)]
        member = people.start(library, "clients", address=light.address, names=names)
        people.need(lambda: bool(member.events) or member.gone, f"{count} clients connect")
        taken = []
        for _ in range(ROUNDS):
            member.events.clear()
            member.tell({"ask": True})
            people.need(lambda: bool(member.events) or member.gone, f"a round of {count}")
            if member.first("members") == count:
                begun, ended = member.first("round") or (0.0, 0.0)
                taken.append(ended - begun)
        if not taken:
            raise RuntimeError(f"no round of all {count}\n{people.last_words()}")
        return taken
