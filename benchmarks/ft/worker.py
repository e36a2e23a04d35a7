"""What a worker does (in a process that `nursery` has forked): `TASKS`.

Both libraries run the same lines; only where the classes are imported from differs.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ft.clients import clients
from ft.healers import heal
from ft.libraries import part_of
from ft.lines import Lines

TIMEOUT = timedelta(seconds=60)
HOST = "127.0.0.1"


def preload(library: str) -> None:
    """Import what the tasks need."""
    for name in ("manager", "process_group", "checkpointing", "checkpointing.pg_transport"):
        part_of(library, name)
    torch.set_num_threads(1)


class Replica:
    """A replica group of one worker: a state of so many bytes, a gradient of the same size."""

    def __init__(self, library: str, lighthouse: str, num_bytes: int, *, sync: bool = True) -> None:
        self.state = torch.zeros(num_bytes // 4)
        self.gradient = torch.ones(num_bytes // 4)
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self.manager = part_of(library, "manager").Manager(
            pg=part_of(library, "process_group").ProcessGroupGloo(),
            load_state_dict=lambda s: self.state.copy_(s["state"]),
            state_dict=lambda: {"state": self.state},
            min_replica_size=1,
            rank=0,
            world_size=1,
            store_addr=HOST,
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            init_sync=sync,
        )

    def step(self) -> tuple[bool, int]:
        """Make one step; return whether it was committed, and by how many."""
        self.manager.start_quorum()
        self.manager.allreduce(self.gradient).wait()
        if committed := self.manager.should_commit():
            self.state.add_(self.gradient, alpha=1e-3)
        return committed, self.manager.num_participants()


def train(driver: Lines, library: str, *, lighthouse: str, num_bytes: int) -> None:
    """Once the driver says so, make steps until it says so again; tell it of each."""
    driver.send({"imported": True})
    driver.receive()
    replica = Replica(library, lighthouse, num_bytes)
    stop = threading.Event()
    threading.Thread(target=_stop_when_told, args=(driver, stop), daemon=True).start()
    while not stop.is_set():
        begun = time.monotonic()
        committed, participants = replica.step()
        ended = time.monotonic()
        driver.send([begun, ended, committed, participants, replica.manager.current_step()])


def _stop_when_told(driver: Lines, stop: threading.Event) -> None:
    driver.receive()
    stop.set()


def blocks(
    driver: Lines, library: str, *, lighthouse: str, store_port: int, rank: int, world_size: int
) -> None:
    """Make blocks of steps, as the driver orders: by a Manager, or by plain gloo."""
    store = TCPStore(HOST, store_port, is_master=False, wait_for_workers=False)
    plain = dist.ProcessGroupGloo(PrefixStore("plain", store), rank, world_size, TIMEOUT)
    replica = Replica(library, lighthouse, 4, sync=False)
    while (order := driver.receive()) is not None:
        tensor = torch.ones(order["num_bytes"] // 4)
        replica.gradient = tensor
        taken = []
        for _ in range(order["steps"]):
            begun = time.perf_counter()
            if order["managed"]:
                replica.manager.start_quorum()
                replica.manager.allreduce(tensor).wait()
                committed = replica.manager.should_commit()
                if not committed or replica.manager.num_participants() != world_size:
                    committed = False
            else:
                plain.allreduce([tensor]).wait()  # type: ignore[attr-defined]
                tensor /= world_size
                committed = True
            if committed:
                taken.append(time.perf_counter() - begun)
        driver.send({"taken": taken})


TASKS: dict[str, Any] = {"train": train, "blocks": blocks, "heal": heal, "clients": clients}
