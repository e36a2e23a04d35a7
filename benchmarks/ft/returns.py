"""Part d, and part h for groups of ranks: a replica comes back, and takes others' state."""

import math
from collections.abc import Iterator, Sequence

from ft.crew import crew
from ft.libraries import OURS, PEER, lighthouse
from ft.report import Row, Settings
from ft.training import MB, Training, longest_gap, median_step

SIZES = {"10 MB": 10 * MB, "100 MB": 100 * MB}
MAX_GAP_STEPS = 1.0
"""In median steps of the full group: the longest gap of all is never below that of an undisturbed
step."""


def measure(settings: Settings) -> Iterator[Row]:
    """Time the new replica from its imports to its first commit, and the others' longest gap."""
    sizes = list(SIZES) if not settings.quick else ["10 MB"]
    yield from restarted(settings, "d return", settings.worlds[-1], sizes)


def restarted(
    settings: Settings, part: str, world_size: int, sizes: Sequence[str], ranks: int = 1
) -> Iterator[Row]:
    for size in sizes:
        num_bytes = SIZES[size]
        first: dict[str, list[float]] = {OURS: [], PEER: []}
        gaps: dict[str, list[float]] = {OURS: [], PEER: []}
        for library in settings.libraries * settings.repeats:
            seconds, steps = one_or_nothing(library, world_size, num_bytes, ranks)
            first[library].append(seconds)
            gaps[library].append(steps)
        what = f"restarted, {size}, n = {world_size}"
        what += f" groups of {ranks} ranks" if ranks > 1 else ""
        name = f"{what}: imports to first commit"
        yield Row(part, name, "s", first[OURS], first[PEER], of_peer=1.0)
        name, limit = f"{what}: the others' longest gap", MAX_GAP_STEPS if ranks == 1 else None
        yield Row(part, name, "steps", gaps[OURS], gaps[PEER], limit=limit)


def one_or_nothing(
    library: str, world_size: int, num_bytes: int, ranks: int
) -> tuple[float, float]:
    """Return the same as `one`; not numbers where the replicas never came to train all together."""
    try:
        return one(library, world_size, num_bytes, ranks)
    except RuntimeError as e:
        print(f"{library}: {str(e).splitlines()[0]}", flush=True)
        return math.nan, math.nan


def one(library: str, world_size: int, num_bytes: int, ranks: int) -> tuple[float, float]:
    """Return the seconds to the first commit, and the longest gap in steps of the full group.

    The last replica comes to the others, which have trained for a while without it.
    """
    with crew() as people, lighthouse(library) as light:
        training = Training(people, light, num_bytes, ranks)
        training.start(world_size - 1)
        others = list(training.replicas)
        fresh = training.prepare()
        training.replicas += fresh
        begun = training.let(fresh)
        training.together()
        commit = max(m.commits[0].ended for m in fresh)
        last = min(m.commits[-1].ended for m in fresh)
        gap = max(longest_gap(m, begun, min(last, m.commits[-1].ended)) for m in others)
        return commit - begun, gap / median_step(others, world_size)
