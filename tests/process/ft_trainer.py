"""A worker of a replica group that trains a small model with DDP and momentum, for a nursery.

The groups differ in what they draw, and in their parameters until they have met. In a group of
several workers each holds a model of its own, and all meet in a collective of the group at each
step, as the ranks of a sharded model do.
"""

import hashlib
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpc_elastic.ft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=20)


def preload(library: str) -> None:
    """Import what torch imports only when the first optimizer is made."""
    torch.set_num_threads(1)
    torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)


class Trainer:
    """The training, which goes on until its process is ended, or to the step ``leave_at``."""

    def __init__(
        self, driver: Any, lighthouse: str, slot: int, rank: int, ranks: int, port: int,
        leave_at: int = 0, forward_s: float = 0.0,
    ):  # fmt: skip
        self._driver = driver
        self._leave_at = leave_at
        self._forward_s = forward_s
        self._ranks = ranks
        self._draws = torch.Generator().manual_seed(1000 * slot + rank)
        torch.manual_seed(slot)
        store = dist.TCPStore(HOST, port, is_master=rank == 0, wait_for_workers=False)
        self._inner = dist.ProcessGroupGloo(dist.PrefixStore("in", store), rank, ranks, TIMEOUT)
        self._store = store
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.manager = Manager(
            pg=ProcessGroupGloo(TIMEOUT),
            load_state_dict=self._load,
            state_dict=self._save,
            min_replica_size=1,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            rank=rank,
            world_size=ranks,
            store_addr=HOST,
            store_port=store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"slot{slot}",
        )

    def train(self) -> None:
        """Make steps, and tell of each."""
        model = DistributedDataParallel(self.manager, self.model, bucket_cap_mb=0.0005)
        optimizer = Optimizer(self.manager, self.optimizer)
        while not self._leave_at or self.manager.current_step() < self._leave_at:
            before = self.manager.current_step()
            optimizer.zero_grad()
            x = torch.randn(4, 8, generator=self._draws)
            self._meet_the_group()
            time.sleep(self._forward_s)
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            self._tell(before)
        self.manager.shutdown()

    def _meet_the_group(self) -> None:
        if self._ranks > 1:
            self._inner.allreduce([torch.ones(1)]).wait()

    def _tell(self, before: int) -> None:
        error = self.manager.errored()
        step = self.manager.current_step()
        if error is None and step > before:
            self._driver.send({"commit": [step, self._hash(), self.manager.num_participants()]})
        else:
            self._driver.send({"failed": [before, str(error)[:300]]})

    def _hash(self) -> str:
        flat = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()

    def _save(self) -> dict:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _load(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def train(driver: Any, library: str, **arguments: Any) -> None:
    """Train until this process is ended, or the training is over."""
    Trainer(driver, **arguments).train()


TASKS = {"train": train}
