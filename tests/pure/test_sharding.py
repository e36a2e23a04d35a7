"""Which part of a replicated state each rank writes; parts of stored boxes in files."""

import json
from itertools import pairwise, product
from math import prod

import pytest
import torch

from hpc_elastic.checkpoint.resharding import rows_of
from hpc_elastic.checkpoint.shard_file import ShardFile
from hpc_elastic.checkpoint.sharding import SPREAD_FROM_BYTES, Planner, share_rows, view
from hpc_elastic.errors import CheckpointCorruptError

BIG = SPREAD_FROM_BYTES // 4


def plans(tensors, world_size, **options):
    """Return what every rank writes, by name."""
    found = [Planner(rank, world_size).plan(tensors, **options) for rank in range(world_size)]
    return [sorted(plan.pieces, key=lambda piece: piece.fqn) for plan in found]


@pytest.mark.parametrize("num_shares", [1, 2, 3, 7, 64])
@pytest.mark.parametrize(
    "items", [[(1, 8)], [(10, 40)], [(3, 300), (1, 50), (1000, 1000)], [(5, 5 << 40), (2, 2)]]
)
def test_shares_hold_every_row_once(items, num_shares):
    """Whatever the sizes, the shares of all ranks are all rows, in order, once."""
    shares = [share_rows(items, index, num_shares) for index in range(num_shares)]
    for i, (rows, _) in enumerate(items):
        cuts = [share[i] for share in shares]
        assert cuts[0][0] == 0 and cuts[-1][1] == rows
        assert all(a[1] == b[0] for a, b in pairwise(cuts))
        assert all(begin <= end for begin, end in cuts)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_replicated_tensors_are_spread_evenly(world_size):
    """Each rank writes about its share of the bytes, and together they write everything once."""
    shapes = [(1000, 300), (4, 200_000), (1, 50_000), (BIG,)]
    tensors = {f"t{i}": torch.zeros(shape) for i, shape in enumerate(shapes)}
    tensors["small"] = torch.zeros(10)
    found = plans(tensors, world_size)
    total = sum(t.nbytes for t in tensors.values())
    assert sum(p.num_bytes for plan in found for p in plan) == total
    shares = [sum(p.num_bytes for p in plan) for plan in found]
    assert max(shares) < total / world_size + 800_000  # half a row of t1 at either end
    for name, tensor in tensors.items():
        count = torch.zeros(tensor.shape)
        for plan in found:
            for piece in plan:
                if piece.fqn == name:
                    view(piece, count).add_(1)
        assert torch.equal(count, torch.ones_like(count))


def test_small_tensors_and_buffers_are_written_by_the_first_rank():
    """What may differ between the ranks, like BatchNorm's statistics, stays of one rank."""
    tensors = {"weight": torch.zeros(BIG), "mean": torch.zeros(BIG), "count": torch.zeros(())}
    first, second = plans(tensors, 2, first={"mean"})
    assert [(p.fqn, p.sizes) for p in first] == [
        ("count", ()), ("mean", (BIG,)), ("weight", (BIG // 2,)),
    ]  # fmt: skip
    assert [(p.fqn, p.offsets) for p in second] == [("weight", (BIG // 2,))]


def test_the_first_rank_writes_all_if_asked():
    """Spreading can be turned off."""
    tensors = {"weight": torch.zeros(BIG)}
    sizes = [[p.sizes for p in Planner(r, 2, "first").plan(tensors).pieces] for r in range(2)]
    assert sizes == [[(BIG,)], []]


def test_a_plan_is_kept_until_the_structure_changes():
    """Planning costs next to nothing at each save; a new tensor or shape is noticed."""
    planner = Planner(0, 2)
    plan = planner.plan({"w": torch.zeros(BIG)})
    assert planner.plan({"w": torch.ones(BIG)}) is plan
    assert planner.plan({"w": torch.zeros(BIG), "v": torch.zeros(1)}) is not plan
    assert planner.plan({"w": torch.zeros(2 * BIG)}).pieces[0].sizes == (BIG,)


@pytest.mark.parametrize("sizes", [(), (5,), (4, 6), (1, 4, 6), (3, 1, 2), (2, 3, 4)])
def test_rows_hold_any_part_of_a_box(sizes):
    """The rows that are read contain the part, and say where it is in them."""
    box = torch.arange(prod(sizes), dtype=torch.int32).reshape(sizes)
    data = box.numpy().tobytes()
    spans = [[(a, n - a - b) for a in (0, 1) for b in (0, 1) if n - a - b > 0] for n in sizes]
    for part in product(*spans):
        starts, lengths = [a for a, _ in part], [n for _, n in part]
        rows = rows_of(sizes, starts, lengths, 4)
        read = data[rows.offset : rows.offset + rows.count * rows.num_bytes]
        inner = sizes[rows.dim + 1 :]
        found = torch.frombuffer(bytearray(read), dtype=torch.int32).reshape(rows.count, *inner)
        expected = box
        for d, (start, length) in enumerate(part):
            expected = expected.narrow(d, start, length)
            if d > rows.dim:
                found = found.narrow(d - rows.dim, start, length)
        assert torch.equal(found.flatten(), expected.flatten())
        assert not rows.exact or found.numel() * 4 == len(read)


def _safetensors(header, data=b"12345678"):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (10**6).to_bytes(8, "little") + b"{}",
        _safetensors(b"not json"),
        _safetensors([1]),
        _safetensors({"w": 3}),
        _safetensors({"w": {"data_offsets": [0, 9]}}),
        _safetensors({"w": {"data_offsets": [-1, 4]}}),
        _safetensors({"w": {"data_offsets": [4, 2]}}),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content):
    """Whatever is wrong with a header, the error says which file, and nothing else is raised."""
    path = tmp_path / "shard-0.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match=r"shard-0\.safetensors"):
        ShardFile(path)


def test_a_file_that_ends_too_early_is_named(tmp_path):
    """A file cut short after its header was read is an error, not a crash."""
    path = tmp_path / "shard-0.safetensors"
    path.write_bytes(_safetensors({"w": {"data_offsets": [0, 8]}}))
    file = ShardFile(path)
    with pytest.raises(CheckpointCorruptError, match="ends before byte"):
        file.read_into(memoryview(bytearray(16)), file.tensors["w"][0])
    file.close()
