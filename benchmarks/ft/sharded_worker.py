"""A worker of a replica group that trains a sharded model, for a nursery.

Both libraries run the same lines; only where the classes are imported from differs. A group is a
process group of torch's own, over which the model is sharded. The gradients' shards are averaged
with the counterparts in the other groups. The groups differ in what they draw, and in their
parameters until they have met.
"""

import hashlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ft.libraries import HOST, part_of
from ft.nursery import Lines
from ft.worker import make_manager

TIMEOUT = timedelta(seconds=20)
FORWARD_S = 0.01


def preload(library: str) -> None:
    """Import what the task needs, and what torch imports when the first optimizer is made."""
    for name in ("manager", "optim", "process_group", "checkpointing.pg_transport"):
        part_of(library, name)
    torch.set_num_threads(1)
    torch.optim.AdamW(nn.Linear(1, 1).parameters())


class Block(nn.Module):
    """Two layers, with time between them in which other threads run."""

    def __init__(self) -> None:
        super().__init__()
        self.rise = nn.Linear(16, 32)
        self.fall = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.rise(x).relu()
        time.sleep(FORWARD_S)
        return self.fall(x)


def make_blocks() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


def shard(model: nn.Sequential, **options: Any) -> nn.Module:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def make_two_dimensional() -> nn.Module:
    """Tensor parallel below FSDP."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = make_blocks()
    plan = {"rise": ColwiseParallel(), "fall": RowwiseParallel()}
    parallelize_module(model[0], mesh["tp"], plan)
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "fsdp": lambda: shard(make_blocks()),
    "fsdp x tp": make_two_dimensional,
    "cpu offload": lambda: shard(make_blocks(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
}


class Trainer:
    def __init__(
        self,
        driver: Lines, library: str, lighthouse: str, slot: int, rank: int, port: int,
        model: str = "fsdp", sync: bool = False,
        make_transport: Callable[[Any], Any] = lambda _: None, **options: Any,
    ) -> None:  # fmt: skip
        """Connect; ``options`` are further ones of the Manager."""
        self._driver, self._library = driver, library
        self._draws = torch.Generator().manual_seed(1000 * slot + rank)
        torch.manual_seed(slot)
        store = dist.TCPStore(HOST, port, is_master=rank == 0, wait_for_workers=False)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("in", store), rank=rank, world_size=2, timeout=TIMEOUT
        )
        self.model = MODELS[model]()
        self.average = {n: local(p).clone() for n, p in self.model.named_parameters()}
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.9)
        group = part_of(library, "process_group").ProcessGroupGloo(TIMEOUT)
        self.manager = make_manager(
            library, lighthouse, store, self._load, self._save, pg=group, rank=rank, world_size=2,
            use_async_quorum=not sync, timeout=TIMEOUT, quorum_timeout=TIMEOUT,
            replica_id=f"slot{slot}", checkpoint_transport=make_transport(group),
            **options,
        )  # fmt: skip

    def train(self) -> None:
        wrapper = part_of(self._library, "optim").OptimizerWrapper
        optimizer = wrapper(self.manager, self.optimizer)
        while True:
            before = self.manager.current_step()
            optimizer.zero_grad()
            x = torch.randn(4, 16, generator=self._draws)
            (self.model(x) - x.flip(1)).float().square().mean().backward()
            works = [
                self.manager.allreduce(local(p.grad))
                for p in self.model.parameters()
                if p.grad is not None
            ]
            for work in works:
                work.wait()
            optimizer.step()
            error, step = self.manager.errored(), self.manager.current_step()
            if error is not None or step == before:
                self._driver.send({"failed": [before, str(error)[:300]]})
                continue
            self.schedule.step()
            for name, p in self.model.named_parameters():
                self.average[name].lerp_(local(p), 0.5)
            for state in self.optimizer.state.values():
                state["commits"] = step  # as optimizers that keep numbers
            self._driver.send({"commit": [step, self._hash(), self.manager.num_participants()]})

    def _hash(self) -> str:
        tensors = [*self.model.parameters(), *self.average.values()]
        values = [self.schedule.state_dict()]
        for state in self.optimizer.state.values():
            for value in state.values():
                (tensors if isinstance(value, torch.Tensor) else values).append(value)
        flat = torch.cat([local(t).flatten() for t in tensors])
        raw = flat.numpy().tobytes() + repr(values).encode()
        return hashlib.blake2b(raw, digest_size=8).hexdigest()

    def _save(self) -> dict:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "average": self.average,
        }

    def _load(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        for name, tensor in state["average"].items():
            self.average[name].copy_(tensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard, without history."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(driver: Lines, library: str, **arguments: Any) -> None:
    Trainer(driver, library, **arguments).train()


TASKS = {"train": train}
