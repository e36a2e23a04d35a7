"""One replica of the schedules' training, which knows what its gradients should be.

A gradient says who made it and for which step: element ``slot`` is 1, those of the others are 0;
element `SLOTS` is the step; the rest are small integers that follow from both. So the mean tells
who contributed, and must be what is computed from that alone.
"""

import ctypes
import hashlib
import os
import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

import ft_agent
import torch
import torch.distributed as dist
from ft.libraries import part_of

SLOTS = 5
HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=30)


def preload(library: str) -> None:
    """Import what the task needs."""
    for name in ("manager", "process_group"):
        part_of(library, name)
    torch.set_num_threads(1)


def gradient(slot: int, step: int, numbers: int) -> torch.Tensor:
    """Return what a replica adds to a step."""
    rest = (torch.arange(numbers) * (slot + 2) + 5 * step) % 17 - 8
    head = torch.zeros(SLOTS + 1)
    head[slot] = 1
    head[SLOTS] = step
    return torch.cat([head, rest]).double()


def complaint(mean: torch.Tensor, step: int, participants: int) -> str | None:
    """Return what is wrong with a mean; None: it is that of its contributors."""
    who = [slot for slot in range(SLOTS) if mean[slot] != 0]
    if len(who) != participants:
        return f"step {step}: {who} contributed, but the mean is over {participants}"
    numbers = len(mean) - SLOTS - 1
    expected = sum(gradient(slot, step, numbers) for slot in who) / participants
    if not torch.allclose(mean, expected, rtol=1e-12, atol=1e-12):
        return (
            f"step {step}: not the mean of {who}: {mean[: SLOTS + 3]} for {expected[: SLOTS + 3]}"
        )
    return None


class Replica:
    """The training, and the faults that it is told to make."""

    def __init__(self, driver: Any, library: str, lighthouse: str, arguments: dict) -> None:
        self._driver = driver
        self._slot = arguments["slot"]
        self._numbers = arguments["numbers"]
        self._step_s = arguments["step_s"]
        self._orders: deque = deque()
        self._stop_at: int | None = None
        torch.manual_seed(time.monotonic_ns() % 2**31)
        self._state = torch.randn(SLOTS + 1 + self._numbers, dtype=torch.float64)
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self.manager = part_of(library, "manager").Manager(
            pg=part_of(library, "process_group").ProcessGroupGloo(TIMEOUT),
            load_state_dict=self._load,
            state_dict=lambda: {"state": self._state},
            min_replica_size=1,
            use_async_quorum=not arguments["sync"],
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            rank=0,
            world_size=1,
            store_addr=HOST,
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"slot{self._slot}",
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def train(self) -> None:
        """Make steps until the one that the driver names; tell of each, and of the last state."""
        while self._stop_at is None or self.manager.current_step() < self._stop_at:
            self._step()
        final = {"final": _hash(self._state), "step": self.manager.current_step()}
        self._driver.send(final)
        while True:  # the others may still need this one
            time.sleep(1)

    def _step(self) -> None:
        self._misbehave("quorum")
        self.manager.start_quorum()
        time.sleep(self._step_s)
        mean = gradient(self._slot, self.manager.current_step(), self._numbers)
        self._misbehave("allreduce")
        self.manager.allreduce(mean).wait()
        self._misbehave("commit")
        committed = self.manager.should_commit()
        step, participants = self.manager.current_step(), self.manager.num_participants()
        if not committed:
            self._driver.send({"failed": step, "why": str(self.manager.errored())[:300]})
            return
        before = _hash(self._state)
        self._state.mul_(0.75).sub_(mean)
        commit = [step, before, _hash(self._state), participants, time.monotonic()]
        self._driver.send({"commit": commit, "wrong": complaint(mean, step - 1, participants)})

    def _load(self, state: dict) -> None:
        self._state.copy_(state["state"])

    def _listen(self) -> None:
        while (order := self._driver.receive()) is not None:
            if "stop_at" in order:
                self._stop_at = order["stop_at"]
            else:
                self._orders.append(order)

    def _misbehave(self, place: str) -> None:
        for order in [order for order in self._orders if order["place"] == place]:
            self._orders.remove(order)
            if order["kind"] == "hold":  # a call of C that keeps the GIL
                ctypes.PyDLL(None).usleep(int(order["length_s"] * 1e6))
            else:
                time.sleep(order["length_s"])


def _hash(state: torch.Tensor) -> str:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()


def live(driver: Any, library: str, *, lighthouse: str, agent: str, **arguments: Any) -> None:
    """Train until this process is ended; ``agent``: the socket of the group's server, if any."""
    if agent:
        os.environ["HPC_ELASTIC_FT_SOCKET"] = agent
    Replica(driver, library, lighthouse, arguments).train()


TASKS = {"live": live, "agent": ft_agent.agent}
