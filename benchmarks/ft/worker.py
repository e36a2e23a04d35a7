"""What a worker does (in a process that `nursery` has forked): `TASKS`.

Both libraries run the same lines; only where the classes are imported from differs.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ft.healing import heal
from ft.libraries import HOST, part_of
from ft.nursery import Lines
from ft.rounds import clients

TIMEOUT = timedelta(seconds=60)
LONG_TIMEOUT = timedelta(seconds=150)
COMPUTE_S = 0.5
"""Of a step with a large state: what an accelerator would take for forward and backward."""
_LAYER_BYTES, _SMALL_BYTES = 16 << 20, 1 << 20


def preload(library: str) -> None:
    names = "manager", "optim", "process_group", "checkpointing", "checkpointing.pg_transport"
    for name in names:
        part_of(library, name)
    torch.set_num_threads(1)
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # imports more of torch


def make_manager(
    library: str, lighthouse: str, store: Any, load: Callable[[dict[str, Any]], object],
    save: Callable[[], dict[str, Any]], pg: Any = None, **options: Any,
) -> Any:  # fmt: skip
    return part_of(library, "manager").Manager(
        pg=part_of(library, "process_group").ProcessGroupGloo() if pg is None else pg,
        load_state_dict=load, state_dict=save, min_replica_size=1, store_addr=HOST,
        store_port=store.port, lighthouse_addr=lighthouse, **options,
    )  # fmt: skip


class Replica:
    """A worker of a replica group: a state, and a gradient of the same size.

    In a group of several ranks these are one rank's shards, and a step also has a collective of the
    same size inside the group, as the reduce-scatter of a sharded model is one. ``port`` is that of
    the group's store; 0: its one rank opens it. ``options`` are further ones of the Manager.
    """

    def __init__(
        self,
        library: str, lighthouse: str, num_bytes: int, *, sync: bool = True, rank: int = 0,
        ranks: int = 1, port: int = 0, **options: Any,
    ) -> None:  # fmt: skip
        self.state = torch.zeros(num_bytes // 4)
        self.gradient = torch.ones(num_bytes // 4)
        self._store = TCPStore(HOST, port, is_master=port == 0, wait_for_workers=False)
        self._shards = None
        if ranks > 1:
            inside = PrefixStore("inside", self._store)
            self._shards = dist.ProcessGroupGloo(inside, rank, ranks, TIMEOUT)
        self.manager = make_manager(
            library, lighthouse, self._store, lambda s: self.state.copy_(s["state"]),
            lambda: {"state": self.state}, rank=rank, world_size=ranks, init_sync=sync, **options,
        )  # fmt: skip

    def reduce_inside(self, tensor: torch.Tensor) -> None:
        """Make the collective inside the group, if there are several ranks."""
        if self._shards is not None:
            self._shards.allreduce([tensor]).wait()  # type: ignore[attr-defined]

    def step(self) -> tuple[bool, int]:
        """Make one step; return whether it was committed, and by how many."""
        self.manager.start_quorum()
        self.reduce_inside(self.gradient)
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
        self.manager = make_manager(
            library, lighthouse, self._store, self._load, self._save, rank=0, world_size=1,
            timeout=LONG_TIMEOUT, quorum_timeout=LONG_TIMEOUT,
        )  # fmt: skip
        self.optimizer = part_of(library, "optim").OptimizerWrapper(self.manager, self.adam)

    def _save(self) -> dict[str, Any]:
        parameters = [p.detach() for p in self.parameters]
        return {"parameters": parameters, "adam": self.adam.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        for own, given in zip(self.parameters, state["parameters"], strict=True):
            own.data.copy_(given)
        self.adam.load_state_dict(state["adam"])

    def step(self) -> tuple[bool, int]:
        before = self.manager.current_step()
        self.optimizer.zero_grad()
        gradient = self.gradient.clone()
        time.sleep(COMPUTE_S)
        self.manager.allreduce(gradient).wait()
        for p in self.parameters:
            p.grad = gradient.repeat(p.numel() // gradient.numel())
        self.optimizer.step()
        return self.manager.current_step() > before, self.manager.num_participants()


def train(driver: Lines, library: str, **of: Any) -> None:
    """Once the driver says so, make steps until it says so again; tell it of each."""
    _train(driver, lambda: Replica(library, **of))


def train_large(driver: Lines, library: str, *, lighthouse: str, num_bytes: int, **_: Any) -> None:
    """Do the same with a large state, in one worker."""
    _train(driver, lambda: LargeReplica(library, lighthouse, num_bytes))


def _train(driver: Lines, make: Callable[[], Replica | LargeReplica]) -> None:
    driver.send({"imported": True})
    driver.receive()
    replica = make()
    stop = threading.Event()
    threading.Thread(target=lambda: (driver.receive(), stop.set()), daemon=True).start()
    while not stop.is_set():
        begun = time.monotonic()
        committed, participants = replica.step()
        ended = time.monotonic()
        driver.send([begun, ended, committed, participants, replica.manager.current_step()])


def blocks(
    driver: Lines, library: str, *, lighthouse: str, store_port: int, replica: int, replicas: int,
    rank: int = 0, ranks: int = 1, port: int = 0,
) -> None:  # fmt: skip
    """Make pairs of blocks of steps, as the driver orders: first by plain gloo, then by a Manager.

    All of a block's time counts, so also what is left over from its last step.
    """
    store = TCPStore(HOST, store_port, is_master=False, wait_for_workers=False)
    plain = dist.ProcessGroupGloo(PrefixStore(f"plain{rank}", store), replica, replicas, TIMEOUT)
    worker = Replica(library, lighthouse, 4, sync=False, rank=rank, ranks=ranks, port=port)
    while (order := driver.receive()) is not None:
        tensor = torch.ones(order["num_bytes"] // 4)

        def plain_step(tensor: torch.Tensor = tensor) -> bool:
            worker.reduce_inside(tensor)
            plain.allreduce([tensor]).wait()  # type: ignore[attr-defined]
            tensor /= replicas
            return True

        def managed_step(tensor: torch.Tensor = tensor) -> bool:
            worker.manager.start_quorum()
            worker.reduce_inside(tensor)
            worker.manager.allreduce(tensor).wait()
            committed: bool = worker.manager.should_commit()
            return committed and worker.manager.num_participants() == replicas

        found = []
        for _ in range(order["pairs"]):
            pair, all_committed = [], True
            for step in (plain_step, managed_step):
                begun = time.perf_counter()
                for _ in range(order["steps"]):
                    all_committed &= step()
                pair.append((time.perf_counter() - begun) / order["steps"])
            if all_committed:
                found.append(pair)
        driver.send({"pairs": found})


def checks(
    driver: Lines, library: str, *, lighthouse: str, num_bytes: int, every: int, rounds: int
) -> None:
    """Make steps of two replicas, which compare their states at regular steps.

    Tells of each step whether it had such a check, its seconds, and those of its commit.
    """
    replica = Replica(library, lighthouse, num_bytes, sync=False, check_every=every)
    manager, samples = replica.manager, list[tuple[bool, float, float]]()
    while sum(is_checked for is_checked, _, _ in samples) < rounds:
        is_checked, begun = manager.current_step() % every == 0, time.perf_counter()
        manager.start_quorum()
        manager.allreduce(replica.gradient).wait()
        reduced = time.perf_counter()
        committed = manager.should_commit()
        ended = time.perf_counter()
        replica.state.add_(replica.gradient, alpha=1e-3)
        if committed and manager.num_participants() == 2:
            samples.append((is_checked, time.perf_counter() - begun, ended - reduced))
        else:
            samples.clear()
    driver.send({"samples": samples})


TASKS: dict[str, Any] = {
    "train": train,
    "large": train_large,
    "blocks": blocks,
    "checks": checks,
    "heal": heal,
    "clients": clients,
}
