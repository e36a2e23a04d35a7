"""Ranks on several nodes, each with a memory of its own, and a state that tells its step."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hpc_elastic.checkpoint import Checkpointer, CheckpointOptions, MemoryTier


def nodes(folder: Path, *sizes: int) -> dict[int, dict[str, str]]:
    """Return the environment of ranks on several nodes, each with a memory of its own."""
    places = [(node, local) for node, size in enumerate(sizes) for local in range(size)]
    return {
        rank: {
            "GROUP_RANK": str(node),
            "LOCAL_RANK": str(local),
            "HPC_ELASTIC_TEST_MEMORY": str(folder / f"memory-{node}"),
        }
        for rank, (node, local) in enumerate(places)
    }


def parts_of(
    rank: int, folder: str, size: int = 100_000, options: CheckpointOptions | None = None, **tiers
):
    """Return a checkpointer and its state: one replicated tensor, one sharded, and a value."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        "plain": torch.zeros(size),
        "sharded": distribute_tensor(torch.zeros(size // 10, 6), mesh, [Shard(0)]),
        "user": {"name": "fresh"},
    }
    memory = Path(os.environ["HPC_ELASTIC_TEST_MEMORY"])
    ckpt = Checkpointer(
        state, Path(folder, "checkpoints"),
        memory_tier=MemoryTier(memory, **{"shared_every": 3, **tiers}),
        options=options or CheckpointOptions(rng=False),
    )  # fmt: skip
    return ckpt, state


def fill(state: dict, step: int) -> None:
    """Give all of the state values of its own for each step."""
    state["plain"].copy_(torch.arange(len(state["plain"])) + step)
    local = state["sharded"].to_local()
    local.copy_(torch.full(local.shape, float(step)) + torch.arange(6))
    state["user"]["name"] = f"step {step}"


def is_of(state: dict, step: int) -> bool:
    """Tell whether a state is that of a step."""
    like = {
        "plain": torch.empty_like(state["plain"]),
        "sharded": torch.empty_like(state["sharded"]),
        "user": {},
    }
    fill(like, step)
    return (
        torch.equal(state["plain"], like["plain"])
        and torch.equal(local(state["sharded"]), local(like["sharded"]))
        and state["user"] == like["user"]
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
