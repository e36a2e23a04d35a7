"""Part e: how fast a replica's state of 1 GB comes from its peers' memory over loopback.

The transports are driven as a Manager drives them, without one. The time runs from the call until
the state stands in the model's tensors: a copy is made where the transport does not fill them.
"""

import json
import mmap
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ft.crew import Crew, Member, crew
from ft.libraries import HOST, OURS, PEER, part_of
from ft.nursery import Lines
from ft.report import Row, Settings

TIMEOUT = timedelta(seconds=60)
NUM_TENSORS = 32
STEP = 7
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
            what, ours = f"{size}, {name}", rates[name]
            yield Row("e heal", what, "GB/s", ours, peer, limit, more_is_better=True)
    for name in ("http", "http in place"):
        one, two = (rates[f"{name}, {sources}"] for sources in ("one source", "two sources"))
        gains = [both / single for both, single in zip(two, one, strict=True)]
        what = f"{size}, {name}: two sources by one"
        yield Row("e heal", what, "", gains, limit=1.0, more_is_better=True)


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


# ---- in a worker: a source, or the one that heals


def heal(
    driver: Lines, library: str, *, transport: str, store_port: int, rank: int, world_size: int,
    num_bytes: int,
) -> None:  # fmt: skip
    """Serve the state as ranks 1, 2..., fetch it as rank 0.

    Memory is touched and freed before the clock starts (`_touch`).
    """
    elements = num_bytes // 4 // NUM_TENSORS
    value = 1.5 if rank > 0 else 0.0
    tensors = {f"layer{i}": torch.full((elements,), value) for i in range(NUM_TENSORS)}
    state = {"user": {"default": tensors}, "torchft": {"step": STEP, "batches_committed": 1}}
    made = _transport(library, transport, lambda: state, (store_port, rank, world_size))
    driver.send({"ready": made.metadata()})
    order = driver.receive() or {}
    if rank > 0:
        made.send_checkpoint([0], STEP, state, TIMEOUT)
        driver.send({"serves": True})
        driver.receive()
        return
    _touch(num_bytes)
    begun = time.perf_counter()
    came = _fetch(library, made, order["fetch"])
    for name, tensor in came["user"]["default"].items():
        if tensor.data_ptr() != tensors[name].data_ptr():
            tensors[name].copy_(tensor)
    seconds = time.perf_counter() - begun
    right = all(bool((t == 1.5).all()) for t in tensors.values())
    driver.send({"seconds": seconds, "right": right})
    driver.receive()


def _touch(num_bytes: int) -> None:
    """Have the host back the memory that the fetch will use.

    The host of a virtual machine may need seconds to give it a gigabyte that it had taken back, and
    that is neither library's cost. Small pages and huge ones lie in different places: one state's
    worth of each, at once.
    """
    size, flags = num_bytes + (64 << 20), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, size, flags) as small, mmap.mmap(-1, size, flags) as huge:
        huge.madvise(mmap.MADV_HUGEPAGE)
        for memory in (small, huge):
            for at in range(0, size, mmap.PAGESIZE):
                memory[at] = 1


def _fetch(library: str, transport: Any, metadata: list[str]) -> Any:
    many = library == OURS and getattr(transport, "multi_source", False)
    what = json.dumps(metadata) if many else metadata[0]
    return transport.recv_checkpoint(1, what, STEP, TIMEOUT)


def _transport(library: str, name: str, state: Any, place: tuple[int, int, int]) -> Any:
    store_port, rank, world_size = place
    if name == "http":
        return part_of(library, "checkpointing").HTTPTransport(TIMEOUT, 0)
    if name == "in place":
        http = part_of(library, "checkpointing").HTTPTransport
        return http(TIMEOUT, 0, state_dict=state, in_place=True)
    pg = part_of(library, "process_group").ProcessGroupGloo(TIMEOUT)
    pg.configure(f"127.0.0.1:{store_port}/heal", "0", rank, world_size)
    made = part_of(library, "checkpointing.pg_transport").PGTransport
    return made(pg, TIMEOUT, torch.device("cpu"), state)
