"""Part a, and part h for groups of two ranks: what a step costs beyond a plain gloo loop.

Each worker makes blocks of plain and of managed steps in turns, so that what disturbs the machine
disturbs both. A sample is the difference of their lower quartiles over some pairs of blocks: what
else runs on the machine only adds to the time of a step. Part i is the cost of the
check for silent data corruption, which is too little to be seen in such a difference: the longer
commit of the steps that have one, by the time of all steps.
"""

import contextlib
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from evidence.machine import MOST_STOLEN, Steal
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ft.crew import Crew, Member, crew
from ft.libraries import HOST, OURS, lighthouse
from ft.report import Row, Settings

SIZES = {"1 KB": 1 << 10, "10 MB": 10 << 20, "100 MB": 100 << 20}
STEPS = {"1 KB": 50, "10 MB": 5, "100 MB": 2}
"""Steps in a block."""
PAIRS = {"1 KB": 6, "10 MB": 8, "100 MB": 8}
"""Pairs of blocks in a sample."""
CHECK_EVERY = 100
MAX_CHECK_PERCENT = 0.1


def measure(settings: Settings) -> Iterator[Row]:
    sizes = list(SIZES) if not settings.quick else ["1 KB"]
    for world_size in settings.worlds:
        yield from overhead(settings, "a overhead", world_size, sizes, of_peer=1 / 3)


def overhead(
    settings: Settings, part: str, replicas: int, sizes: Sequence[str], ranks: int = 1, *,
    of_peer: float,
) -> Iterator[Row]:  # fmt: skip
    with contextlib.ExitStack() as stack:
        people = stack.enter_context(crew())
        groups = {
            library: _group(people, stack, library, replicas, ranks)
            for library in settings.libraries
        }
        for size in sizes:
            what = f"{size}, n = {replicas}" + (f" groups of {ranks} ranks" if ranks > 1 else "")
            row = Row(part, what, "ms a step", [], of_peer=of_peer)
            yield _row(people, groups, size, settings.repeats, row)


def _group(
    people: Crew, stack: contextlib.ExitStack, library: str, replicas: int, ranks: int
) -> list[Member]:
    kept = [TCPStore(HOST, 0, is_master=True, wait_for_workers=False) for _ in range(replicas + 1)]
    stack.callback(kept.clear)
    address = stack.enter_context(lighthouse(library)).address
    group = []
    for replica in range(replicas):
        port = kept[replica].port if ranks > 1 else 0
        group += [
            people.start(
                library, "blocks", lighthouse=address, store_port=kept[-1].port,
                replica=replica, replicas=replicas, rank=rank, ranks=ranks, port=port,
            )
            for rank in range(ranks)
        ]  # fmt: skip
    people.need(lambda: all(m.lines is not None for m in group), f"{library}: workers start")
    return group


def _row(people: Crew, groups: dict[str, list[Member]], size: str, repeats: int, row: Row) -> Row:
    bases, left_out, failed, steal = list[float](), 0, Counter[str](), Steal()
    for repeat in range(repeats + 1):
        turns = list(groups) if repeat % 2 else list(reversed(groups))
        taken = {library: _pairs(people, groups[library], size) for library in turns}
        failed.update(library for library, pairs in taken.items() if not pairs)
        if steal.share() > MOST_STOLEN:
            left_out += 1
        elif repeat > 0:  # the first warms up
            for library, pairs in taken.items():
                if pairs:
                    plain, managed = (
                        1000 * lower_quartile(times) for times in zip(*pairs, strict=True)
                    )
                    samples = row.ours if library == OURS else row.peer
                    samples.append(managed - plain)
                    bases.append(plain)
    row.note = f"plain {statistics.median(bases):.2f} ms" if bases else ""
    row.note += f", {left_out} rounds disturbed" if left_out else ""
    for library, times in failed.items():
        row.note += f", {library}: {times} rounds without a step of all"
    return row


def lower_quartile(times: Sequence[float]) -> float:
    """Return the time that a quarter of them is below; the least of fewer than four."""
    return sorted(times)[len(times) // 4 if len(times) >= 4 else 0]


def _pairs(people: Crew, group: list[Member], size: str) -> list[tuple[float, float]]:
    """Return the seconds of a plain and of a managed step, pair by pair, on the first rank."""
    for member in group:
        member.events.clear()
        member.tell({"num_bytes": SIZES[size], "steps": STEPS[size], "pairs": PAIRS[size]})
    people.need(lambda: all(m.events or m.gone for m in group), f"blocks of {size}", 180.0)
    return group[0].first("pairs") or []


# ---- the check for silent data corruption


def checks(settings: Settings) -> Iterator[Row]:
    """Have two replicas compare their states every 100 steps; torchft has no such check."""
    for size in ("10 MB", "100 MB") if not settings.quick else ("10 MB",):
        ours = [_check_percent(size, settings.repeats)] if OURS in settings.libraries else []
        what = f"{size}, n = 2, check_every = {CHECK_EVERY}: of a step"
        yield Row("i check", what, "%", ours[0] if ours else [], limit=MAX_CHECK_PERCENT)


def _check_percent(size: str, rounds: int) -> list[float]:
    """Return the time of each check, in per cent of that of the steps between two."""
    with crew() as people, lighthouse(OURS) as light:
        group = [
            people.start(
                OURS, "checks", lighthouse=light.address, num_bytes=SIZES[size],
                every=CHECK_EVERY, rounds=rounds,
            )
            for _ in range(2)
        ]  # fmt: skip
        people.need(lambda: all(m.events or m.gone for m in group), f"checks of {size}", 300.0)
        samples = group[0].first("samples")
        if samples is None:
            raise RuntimeError(f"no checks of {size}\n{people.last_words()}")
    usual = statistics.median(commit for is_checked, _, commit in samples if not is_checked)
    step = statistics.median(taken for is_checked, taken, _ in samples if not is_checked)
    checked = [commit for is_checked, _, commit in samples if is_checked]
    return [100 * (commit - usual) / (CHECK_EVERY * step) for commit in checked]
