"""Part e: how fast a replica's state of 1 GB comes from its peers' memory over loopback.

The transports are driven as a Manager drives them, without one. The time runs from the call until
the state stands in the model's tensors: a copy is made where the transport does not fill them.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ft.crew import Crew, Member, crew
from ft.libraries import OURS, PEER
from ft.report import Row
from ft.settings import Settings
from ft.worker import HOST

GB = 1_000_000_000
LEAST_GB_S = 4.0
Ways = dict[str, tuple[str, str, int]]
"""By name: library, transport, number of sources."""
WAYS: Ways = {
    "http, one source": (OURS, "http", 1),
    "http, two sources": (OURS, "http", 2),
    "http in place, one source": (OURS, "in place", 1),
    "http in place, two sources": (OURS, "in place", 2),
    "process group": (OURS, "pg", 1),
    "torchft http": (PEER, "http", 1),
    "torchft pg": (PEER, "pg", 1),
}
"""A Manager's default is HTTP, from all the sources that there are. torchft's process group fills
tensors in place, too."""


def measure(settings: Settings) -> Iterator[Row]:
    num_bytes = GB if not settings.quick else GB // 20
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    with crew() as people:
        for repeat in range(settings.repeats + 1):
            for name, (library, transport, num_sources) in WAYS.items():
                if library in settings.libraries:
                    seconds = _heal(people, library, transport, num_sources, num_bytes)
                    if repeat > 0:  # the first warms up
                        rates[name].append(num_bytes / seconds / GB)
    size = f"{num_bytes / GB:g} GB"
    for name, (library, transport, _) in WAYS.items():
        if library == OURS:
            limit = None if transport == "pg" else LEAST_GB_S
            peer = rates["torchft http" if transport == "http" else "torchft pg"]
            yield _row(f"{size}, {name}", rates[name], peer, limit=limit)
    for name in ("http", "http in place"):
        one, two = (rates[f"{name}, {sources}"] for sources in ("one source", "two sources"))
        gains = [both / single for both, single in zip(two, one, strict=True)]
        what = f"{size}, {name}: two sources by one"
        yield Row("e heal", what, "", gains, limit=1.0, more_is_better=True)


def _row(what: str, ours: list[float], peer: list[float], limit: float | None = None) -> Row:
    return Row("e heal", what, "GB/s", ours, peer, limit=limit, more_is_better=True)


def _heal(people: Crew, library: str, transport: str, num_sources: int, num_bytes: int) -> float:
    """Return the seconds of one transfer, from fresh processes."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    group = [
        people.start(
            library, "heal", transport=transport, store_port=store.port, rank=rank,
            world_size=num_sources + 1, num_bytes=num_bytes,
        )
        for rank in range(num_sources + 1)
    ]  # fmt: skip
    fresh, *sources = group

    def told(key: str, members: list[Member]) -> bool:
        return all(m.first(key) is not None or m.gone for m in members)

    people.need(lambda: told("ready", group), "transports are ready")
    metadata = [m.first("ready") for m in sources]
    for source in sources:
        source.tell({"serve": True})
    if transport != "pg":  # a send of the process group's ends with the transfer
        people.need(lambda: told("serves", sources), "the state is served")
    fresh.tell({"fetch": metadata})
    people.need(lambda: told("seconds", [fresh]), "the state has come")
    if not fresh.first("right"):
        raise RuntimeError(f"{library} {transport}: no state came\n{people.last_words()}")
    people.end(*group)
    return float(fresh.first("seconds") or 0.0)
