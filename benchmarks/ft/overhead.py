"""Part a: what a step costs beyond a plain gloo loop over the same tensors."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Iterator

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ft.crew import Crew, Member, crew
from ft.libraries import PEER, lighthouse
from ft.report import MOST_STOLEN, Row, Steal
from ft.settings import Settings
from ft.worker import HOST

SIZES = {"1 KB": 1 << 10, "10 MB": 10 << 20, "100 MB": 100 << 20}
STEPS = {"1 KB": 200, "10 MB": 30, "100 MB": 6}
"""Steps in a block."""


def measure(settings: Settings) -> Iterator[Row]:
    """Let blocks of plain and managed steps take turns, ours and the peer's."""
    for world_size in settings.worlds:
        with contextlib.ExitStack() as stack:
            people = stack.enter_context(crew())
            groups = {
                library: _group(people, stack, library, world_size)
                for library in settings.libraries
            }
            for size in SIZES if not settings.quick else ("1 KB",):
                yield _row(people, groups, world_size, size, settings.repeats)


def _group(
    people: Crew, stack: contextlib.ExitStack, library: str, world_size: int
) -> list[Member]:
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    stack.callback(lambda: store)  # lives as long as the group
    address = stack.enter_context(lighthouse(library)).address
    group = [
        people.start(
            library, "blocks", lighthouse=address, store_port=store.port, rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    people.need(lambda: all(m.lines is not None for m in group), f"{library}: workers start")
    return group


def _row(
    people: Crew, groups: dict[str, list[Member]], world_size: int, size: str, repeats: int
) -> Row:
    found: dict[str, list[float]] = {library: [] for library in groups}
    bases, left_out, failed, steal = [], 0, Counter[str](), Steal()
    for repeat in range(repeats + 1):
        turns = list(groups) if repeat % 2 else list(reversed(groups))
        costs = {}
        for library in turns:
            plain = _block(people, groups[library], size, managed=False)
            managed = _block(people, groups[library], size, managed=True)
            if plain is None or managed is None:
                failed[library] += 1
            else:
                costs[library] = (plain, managed - plain)
        if steal.share() > MOST_STOLEN:
            left_out += 1
        elif repeat > 0:  # the first warms up
            for library, (plain, cost) in costs.items():
                found[library].append(1000 * cost)
                bases.append(1000 * plain)
    note = f"plain {statistics.median(bases):.2f} ms" if bases else ""
    note += f", {left_out} rounds disturbed" if left_out else ""
    for library, times in failed.items():
        note += f", {library}: {times} rounds without a step of all"
    return Row(
        "a overhead", f"{size}, n = {world_size}", "ms a step",
        found.get("ours", []), found.get(PEER, []), of_peer=0.5, note=note,
    )  # fmt: skip


def _block(people: Crew, group: list[Member], size: str, *, managed: bool) -> float | None:
    """Return the median step of all, in seconds, of the first rank; None: there was none."""
    for member in group:
        member.events.clear()
        member.tell({"managed": managed, "num_bytes": SIZES[size], "steps": STEPS[size]})
    people.need(lambda: all(m.events or m.gone for m in group), f"a block of {size}")
    taken = group[0].first("taken")
    return statistics.median(taken) if taken else None
