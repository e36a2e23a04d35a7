"""What a worker does (in a process that `nursery` has forked): `TASKS`.

Both libraries run the same lines; only where the classes are imported from differs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
LONG_TIMEOUT = timedelta(seconds=150)
HOST = "127.0.0.1"
COMPUTE_S = 0.5
"""Of a step with a large state: what an accelerator would take for forward and backward."""
_LAYER_BYTES, _SMALL_BYTES = 16 << 20, 1 << 20


def preload(library: str) -> None:
    """Import what the tasks need."""
    names = "manager", "optim", "process_group", "checkpointing", "checkpointing.pg_transport"
    for name in names:
        part_of(library, name)
    torch.set_num_threads(1)
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # imports more of torch


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


class LargeReplica:
    """A replica of one worker with a large state: parameters, and Adam's two tensors for each.

    All gradients are one small tensor, repeated; so the network is there for the state.
    """

    def __init__(self, library: str, lighthouse: str, num_bytes: int) -> None:
        num = max(1, num_bytes // 3 // _LAYER_BYTES)
        self.parameters = [torch.nn.Parameter(torch.rand(_LAYER_BYTES // 4)) for _ in range(num)]
        self.adam = torch.optim.Adam(self.parameters)
        self.gradient = torch.ones(_SMALL_BYTES // 4)
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self.manager = part_of(library, "manager").Manager(
            pg=part_of(library, "process_group").ProcessGroupGloo(),
            load_state_dict=self._load,
            state_dict=lambda: {
                "parameters": [p.detach() for p in self.parameters],
                "adam": self.adam.state_dict(),
            },
            min_replica_size=1,
            rank=0,
            world_size=1,
            store_addr=HOST,
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            timeout=LONG_TIMEOUT,
            quorum_timeout=LONG_TIMEOUT,
        )
        self.optimizer = part_of(library, "optim").OptimizerWrapper(self.manager, self.adam)

    def _load(self, state: dict[str, Any]) -> None:
        for own, given in zip(self.parameters, state["parameters"], strict=True):
            own.data.copy_(given)
        self.adam.load_state_dict(state["adam"])

    def step(self) -> tuple[bool, int]:
        """Make one step; return whether it was committed, and by how many."""
        before = self.manager.current_step()
        self.optimizer.zero_grad()
        gradient = self.gradient.clone()
        time.sleep(COMPUTE_S)
        self.manager.allreduce(gradient).wait()
        for p in self.parameters:
            p.grad = gradient.repeat(p.numel() // gradient.numel())
        self.optimizer.step()
        return self.manager.current_step() > before, self.manager.num_participants()


def train(driver: Lines, library: str, *, lighthouse: str, num_bytes: int) -> None:
    """Once the driver says so, make steps until it says so again; tell it of each."""
    _train(driver, lambda: Replica(library, lighthouse, num_bytes))


def train_large(driver: Lines, library: str, *, lighthouse: str, num_bytes: int) -> None:
    """Do the same with a large state."""
    _train(driver, lambda: LargeReplica(library, lighthouse, num_bytes))


def _train(driver: Lines, make: Callable[[], Replica | LargeReplica]) -> None:
    driver.send({"imported": True})
    driver.receive()
    replica = make()
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


TASKS: dict[str, Any] = {
    "train": train,
    "large": train_large,
    "blocks": blocks,
    "heal": heal,
    "clients": clients,
}
