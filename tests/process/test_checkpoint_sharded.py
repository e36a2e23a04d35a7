"""Sharded checkpoints: every byte is written once, and read under any other mesh."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hpc_elastic.checkpoint import Checkpointer, CheckpointOptions
from hpc_elastic.checkpoint.equality import merge
from hpc_elastic.checkpoint.manifest import Chunk, FileEntry, RankPart, TensorEntry
from hpc_elastic.checkpoint.resharding import read
from hpc_elastic.checkpoint.sharding import Planner, view
from hpc_elastic.errors import CheckpointError

SHAPES = {"a": (10, 6), "b": (3, 5), "c": (1, 7, 4), "d": (64, 1024), "e": (), "f": (0, 4)}


def whole(name: str) -> torch.Tensor:
    """Return the whole tensor of a name, the same everywhere."""
    shape = SHAPES[name]
    count = max(1, torch.Size(shape).numel())
    return torch.arange(count, dtype=torch.float32)[: torch.Size(shape).numel()].reshape(shape)


def write(folder: Path, rank: int, world_size: int, tensors: dict[str, torch.Tensor]) -> RankPart:
    """Write this rank's part of a state with the safetensors library."""
    pieces = Planner(rank, world_size).plan(tensors).pieces
    name = f"shard-{rank}.safetensors"
    boxes = {f"{p.fqn}{p.offsets}": view(p, tensors[p.fqn]).contiguous() for p in pieces}
    save_file(boxes, folder / name)
    entries = {}
    for p in pieces:
        assert p.num_bytes == boxes[f"{p.fqn}{p.offsets}"].nbytes
        chunk = Chunk(p.offsets, p.sizes, name, f"{p.fqn}{p.offsets}")
        assert p.fqn not in entries
        entries[p.fqn] = TensorEntry(p.shape, p.dtype, (chunk,))
    files = (FileEntry(name, (folder / name).stat().st_size, "xxh3_64:0"),)
    return RankPart(rank, files, entries, {}, {})


def collect(folder: Path, rank: int, world_size: int, tensors: dict[str, torch.Tensor]):
    """Write all ranks' parts; return the manifest, on every rank."""
    folder.mkdir(parents=True, exist_ok=True)
    part = write(folder, rank, world_size, tensors)
    (folder / f"part-{rank}.json").write_text(part.to_json())
    dist.barrier()
    parts = [RankPart.from_json((folder / f"part-{r}.json").read_text()) for r in range(world_size)]
    return merge(parts, step=1, world_size=world_size, created=0.0)


def layouts(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return the state under each layout on four ranks."""
    flat = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    kinds = {
        "replicated": (flat, [Replicate()]), "hybrid": (grid, [Replicate(), Shard(0)]),
        "rows": (flat, [Shard(0)]), "both": (grid, [Shard(0), Shard(1)]),
        "columns": (flat, [Shard(1)]), "twice": (grid, [Shard(0), Shard(0)]),
    }  # fmt: skip
    made: dict[str, dict[str, torch.Tensor]] = {"plain": {n: whole(n) for n in SHAPES}}
    for kind, (mesh, placements) in kinds.items():
        dims = [p.dim for p in placements if p.is_shard()]
        made[kind] = {
            n: distribute_tensor(whole(n), mesh, placements)
            for n, shape in SHAPES.items()
            if not dims or len(shape) > max(dims)
        }
    return made


def stored_elements(manifest) -> dict[str, int]:
    """Return how many elements of each tensor are in the files."""
    return {
        name: sum(torch.Size(chunk.sizes).numel() for chunk in entry.chunks)
        for name, entry in manifest.tensors.items()
    }


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same layout without its values."""
    return torch.full_like(tensor, -1.0)


def every_layout_into_every_other(rank: int, folder: str) -> dict[str, list[int]]:
    made = layouts(rank)
    shares = {}
    for source, tensors in made.items():
        manifest = collect(Path(folder, source), rank, 4, tensors)
        assert stored_elements(manifest) == {n: whole(n).numel() for n in tensors}
        shares[source] = [file.num_bytes for file in manifest.files]
        for wanted in made.values():
            into = {n: blank(t) for n, t in wanted.items() if n in tensors}
            read(manifest, Path(folder, source), into)
            for name, tensor in into.items():
                expected = wanted[name]
                if isinstance(tensor, DTensor):
                    tensor, expected = tensor.to_local(), expected.to_local()
                assert torch.equal(tensor, expected), (source, name)
    return shares


def test_every_mesh_reads_what_every_other_wrote(tmp_path):
    """Each element is stored once, and comes back in place under every layout of four ranks."""
    shares = run_ranks(every_layout_into_every_other, 4, str(tmp_path))[0]
    for layout in ("plain", "replicated", "rows", "hybrid"):
        assert max(shares[layout]) < 1.2 * min(shares[layout]), (layout, shares[layout])


class Net(torch.nn.Module):
    """Two layers that can be tensor parallel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up = torch.nn.Linear(12, 20)
        self.down = torch.nn.Linear(20, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs."""
        return self.down(torch.relu(self.up(x)))


def sharded(tp: int = 1) -> tuple[Net, torch.optim.Optimizer]:
    """Return a model under FSDP2, and tensor parallelism below it, with its optimizer."""
    net, size = Net(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(net, mesh["tp"], plan)
    for layer in (net.up, net.down):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train on the same batch on every rank, so that the world size does not matter."""
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        net(torch.randn(16, 12)).square().mean().backward()
        optimizer.step()


def flat(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the tensors of the state, named as the checkpointer names them."""
    state = optimizer.state_dict()["state"]
    moments = {f"optimizer/state/{i}/{k}": t for i, s in state.items() for k, t in s.items()}
    return {f"net/{n}": t for n, t in net.state_dict().items()} | moments


def full(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gather whole tensors."""
    return {n: t.full_tensor() if isinstance(t, DTensor) else t.clone() for n, t in tensors.items()}


def checkpointer(folder: str, net: Net, optimizer: torch.optim.Optimizer) -> Checkpointer:
    """Return what saves and restores them."""
    state = {"net": net, "optimizer": optimizer}
    return Checkpointer(state, Path(folder, "checkpoints"), options=CheckpointOptions(rng=False))


def save_trained(rank: int, folder: str, tp: int) -> None:
    net, optimizer = sharded(tp)
    train(net, optimizer, range(3))
    with checkpointer(folder, net, optimizer) as ckpt:
        ckpt.save(3)
    train(net, optimizer, range(3, 5))
    after = full(flat(net, optimizer))
    if rank == 0:
        torch.save(after, Path(folder, "after.pt"))


def go_on(rank: int, folder: str, tp: int) -> None:
    net, optimizer = sharded(tp) if dist.is_initialized() else plain()
    with checkpointer(folder, net, optimizer) as ckpt:
        assert ckpt.load_latest() == 3
    train(net, optimizer, range(3, 5))
    expected = torch.load(Path(folder, "after.pt"), weights_only=True)
    found = full(flat(net, optimizer))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def plain() -> tuple[Net, torch.optim.Optimizer]:
    """Return the model on one process."""
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_sharded_training_goes_on_under_other_world_sizes(tmp_path, tp):
    """Four ranks of FSDP2 (over tensor parallelism) go on as two, as three and as one process."""
    run_ranks(save_trained, 4, str(tmp_path), tp)
    run_ranks(go_on, 2, str(tmp_path), 3 - tp)
    if tp == 1:
        run_ranks(go_on, 3, str(tmp_path), 1)
    go_on(0, str(tmp_path), 1)


def refuse_what_can_not_be_stored(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    sums = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(CheckpointError, match="w is a DTensor of partial sums"):
        Planner(rank, 2).plan({"w": sums})
    if rank == 0:
        mine = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        (piece,) = Planner(0, 2).plan({"w": mine}).pieces
        assert piece.sizes == (4,)


def test_partial_sums_are_refused(tmp_path):
    """A DTensor that no rank has the values of cannot be saved; the error says what to do."""
    run_ranks(refuse_what_can_not_be_stored, 2)
