"""The benchmark's worker with a sharded model, with more models, transports, and faults."""

import socket
import time
from typing import Any

import torch
from ft.libraries import part_of
from ft.nursery import Lines
from ft.sharded_worker import FORWARD_S, MODELS, TIMEOUT, Trainer, make_blocks, preload, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

__all__ = ["TASKS", "preload"]


def make_hybrid() -> nn.Module:
    """Shards that are repeated."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copy", "shard"))
    return shard(make_blocks(), mesh=mesh)


def make_mixed() -> nn.Module:
    """Mixed precision: bfloat16 in the forward pass."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return shard(make_blocks(), mp_policy=policy)


def make_parts() -> nn.Module:
    """A frozen part, and a parameter that two modules share."""
    model = make_blocks()
    model[1].rise.weight = model[0].rise.weight
    model[0].fall.requires_grad_(False)
    return fully_shard(model)


def make_compiled() -> nn.Module:
    """Compiled blocks."""
    model = shard(make_blocks())
    for block in model:
        block.rise.compile(backend="eager")
    return model


MODELS |= {
    "hsdp": make_hybrid,
    "mixed precision": make_mixed,
    "shared and frozen": make_parts,
    "compiled": make_compiled,
}


class FaultyTrainer(Trainer):
    """A training of which what it saves or loads may be wrong."""

    fault = ""

    def _save(self) -> dict:
        extra = {"extra": object()} if self.fault == "type" else {}
        return {**super()._save(), **extra}

    def _load(self, state: dict) -> None:
        if self.fault == "key":
            state["nothing"]
        super()._load(state)


def make_network_slow(library: str) -> None:
    """Let most tensors be large, and the answers to requests for them take long (ours alone)."""
    for name in ("checkpointing._layout", "catch_up", "manager"):
        part_of(library, name).SMALL_BYTES = 256
    http = part_of(library, "checkpointing._wire")
    receive = http.receive_into

    def receive_slowly(*arguments: Any) -> None:
        time.sleep(FORWARD_S / 2)
        receive(*arguments)

    http.receive_into = receive_slowly


def train(
    driver: Lines, library: str, *, rank: int, transport: str = "", fault: str = "",
    catches_up: bool = False, hosts: str = "", **arguments: Any,
) -> None:  # fmt: skip
    """Train until this process is ended; ``hosts`` has the name of each rank's host."""
    if hosts:
        socket.gethostname = lambda: hosts.split()[rank]  # type: ignore[assignment]
    if catches_up:
        make_network_slow(library)
        arguments["catch_up_bytes"] = 1
    http = part_of(library, "checkpointing").HTTPTransport
    through_group = part_of(library, "checkpointing.pg_transport").PGTransport
    transports = {
        "": lambda group: None,
        "http": lambda group: http(TIMEOUT, 0),
        "pg": lambda group: through_group(group, TIMEOUT, torch.device("cpu")),
    }
    FaultyTrainer.fault = fault
    make_transport = transports[transport]
    FaultyTrainer(driver, library, rank=rank, make_transport=make_transport, **arguments).train()


TASKS = {"train": train}
