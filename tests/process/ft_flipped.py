"""A worker of a replica group whose memory flips a bit when the driver orders it, for a nursery."""

import hashlib
import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpc_elastic.ft import Manager, ProcessGroupGloo

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=20)


def preload(library: str) -> None:
    """Import nothing more."""
    torch.set_num_threads(1)


class Reports(logging.Handler):
    """Sends what the Manager logs about states that differ."""

    def __init__(self, driver: Any) -> None:
        super().__init__(logging.ERROR)
        self._driver = driver

    def emit(self, record: logging.LogRecord) -> None:
        """Send it."""
        self._driver.send({"mismatch": record.getMessage()})


def train(
    driver: Any, library: str, *, lighthouse: str, slot: int, rank: int, ranks: int, port: int,
    check_every: int, heals: bool,
) -> None:  # fmt: skip
    """Make steps until this process is ended, and report each."""
    logging.getLogger("hpc_elastic.ft.manager").addHandler(Reports(driver))
    torch.manual_seed(slot)
    state = {
        "matrix": torch.randn(130, 127),
        "halves": torch.randn(33).bfloat16(),
        "one": torch.randn(1, dtype=torch.float64),
    }

    def load(peer: dict) -> None:
        for key, tensor in state.items():
            tensor.copy_(peer[key])

    store = dist.TCPStore(HOST, port, is_master=rank == 0, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(TIMEOUT), load, lambda: state, 1, timeout=TIMEOUT, quorum_timeout=TIMEOUT,
        rank=rank, world_size=ranks, store_addr=HOST, store_port=store.port,
        lighthouse_addr=lighthouse, replica_id=f"slot{slot}", check_every=check_every,
        heal_corrupted=heals,
    )  # fmt: skip
    orders = _listen(driver)
    while True:
        while orders:
            order = orders.pop(0)
            raw = state[order["tensor"]].view(torch.uint8).flatten()
            raw[order["byte"] % len(raw)] ^= 1 << order["bit"]
            driver.send({"flipped": manager.current_step()})
        manager.start_quorum()
        gradient = torch.full((127,), float(slot))
        manager.allreduce(gradient).wait()
        if manager.should_commit():
            state["matrix"].sub_(gradient, alpha=0.001)
            raw = b"".join(t.view(torch.uint8).numpy().tobytes() for t in state.values())
            digest = hashlib.blake2b(raw, digest_size=8).hexdigest()
            driver.send({"commit": [manager.current_step(), digest, manager.num_participants()]})


def _listen(driver: Any) -> list[dict]:
    import threading

    orders: list[dict] = []

    def read() -> None:
        while (order := driver.receive()) is not None:
            orders.append(order)

    threading.Thread(target=read, daemon=True).start()
    return orders


TASKS = {"train": train}
