"""The worker's side of part e: a source, or the one that heals."""

from __future__ import annotations

import json
import mmap
import time
from datetime import timedelta
from typing import Any

import torch

from ft.libraries import OURS, part_of
from ft.lines import Lines

TIMEOUT = timedelta(seconds=60)
NUM_TENSORS = 32
STEP = 7


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
