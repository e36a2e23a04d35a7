"""The manifest: all parts make one checkpoint, or the reason is named; damage is found."""

import contextlib
import itertools
import random
from dataclasses import replace

import pytest

from hpc_elastic.checkpoint.equality import merge
from hpc_elastic.checkpoint.manifest import (  # fmt: skip
    Chunk,
    Described,
    FileEntry,
    Manifest,
    RankPart,
    TensorEntry,
    coverage_problem,
    own_name,
    seal,
)
from hpc_elastic.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError


def chunk(offsets, sizes, file="shard-0.safetensors") -> Chunk:
    """A box."""
    return Chunk(tuple(offsets), tuple(sizes), file, "w")


def part(rank: int, *boxes, shape=(4, 3), dtype="float32") -> RankPart:
    """A rank's part with one tensor."""
    file = f"shard-{rank}.safetensors"
    chunks = tuple(chunk(o, s, file) for o, s in boxes)
    tensors = {"net/w": TensorEntry(shape, dtype, chunks)} if boxes else {}
    values = {"user": {"rank": rank}}
    return RankPart(rank, (FileEntry(file, 100, "xxh3_64:0f"),), tensors, values, {"rng": [rank]})


UPPER, LOWER = ((0, 0), (2, 3)), ((2, 0), (2, 3))


def merged(*parts: RankPart, world_size: int = 2) -> Manifest:
    """Merge parts of step 7."""
    return merge(parts, step=7, world_size=world_size, created=1.5)


def test_the_parts_of_all_ranks_make_one_checkpoint():
    """In whatever order they come; values are rank 0's, other things each rank's own."""
    manifest = merged(part(1, LOWER), part(0, UPPER))
    assert [c.offsets for c in manifest.tensors["net/w"].chunks] == [(0, 0), (2, 0)]
    assert [f.name for f in manifest.files] == ["shard-0.safetensors", "shard-1.safetensors"]
    assert manifest.values == {"user": {"rank": 0}}
    assert manifest.rank_values == {0: {"rng": [0]}, 1: {"rng": [1]}}


def test_what_ranks_have_for_themselves_is_kept_where_they_differ():
    """Positions in data always: equal numbers of two ranks are two places."""
    own = [
        {"rng": [rank], "positions": {"loader": {"i": 5}}, "values": {"same": 1, "own": rank}}
        for rank in range(2)
    ]
    parts = [
        replace(part(0, UPPER), rank_values=own[0]),
        replace(part(1, LOWER), rank_values=own[1]),
    ]
    assert merged(*parts).rank_values == {
        rank: {"rng": [rank], "positions": {"loader": {"i": 5}}, "values": {"own": rank}}
        for rank in range(2)
    }


def own_part(rank: int, checksum: str, value: int = 1) -> RankPart:
    """A rank's part with a tensor of an object that each rank has for itself."""
    made = part(rank, UPPER if rank == 0 else LOWER)
    box = Chunk((0, 0), (4, 3), f"shard-{rank}.safetensors", "ema/w")
    mine = {own_name("ema/w", rank): TensorEntry((4, 3), "float32", (box,))}
    tree = {"w": {"!": "tensor", "of": "ema/w"}, "n": value}
    described = Described({"net": "1"}, ("net/w float32[4,3]",), "", (0,))
    return replace(
        made, tensors={**made.tensors, **mine}, own={"ema/w": checksum}, described=described,
        values={"ema": tree, **made.values} if rank == 0 else {},
        rank_values={"values": {"ema": tree}},
    )  # fmt: skip


def test_a_tensor_that_all_ranks_have_alike_is_stored_once():
    """Else each has its own, under a name that no key of a state can have."""
    manifest = merged(own_part(0, "a"), own_part(1, "a"))
    assert set(manifest.tensors) == {"net/w", "ema/w"} and manifest.rank_values == {0: {}, 1: {}}
    for other in (own_part(1, "b"), own_part(1, "a", 2)):
        manifest = merged(own_part(0, "a"), other)
        assert set(manifest.tensors) == {"net/w", "ema~rank0/w", "ema~rank1/w"}
        assert set(manifest.rank_values[1]["values"]) == {"ema"}
        assert manifest.own_names(1) == {"ema/w": "ema~rank1/w"}
        assert set(manifest.of_rank(1).tensors) == {"net/w", "ema/w"}
        assert manifest.of_rank(1).tensors["ema/w"].chunks[0].file == "shard-1.safetensors"
        assert Manifest.from_json(manifest.to_json()) == manifest


def test_what_is_named_but_not_stored_is_refused():
    """No restore could find it."""
    lost = replace(part(0, UPPER), values={"net": {"v": [{"!": "parameter", "of": "net/v"}]}})
    with pytest.raises(CheckpointMismatchError, match="net/v: rank 0 has it, but no rank stored"):
        merged(lost, part(1, LOWER))


def test_ranks_that_are_described_otherwise_are_refused():
    """By key, with the tensor that only one of them has."""
    first, second = own_part(0, "a"), own_part(1, "a")
    assert second.described is not None
    other = replace(second.described, structure={"net": "2"}, names=("net/v int8[1]",))
    with pytest.raises(CheckpointMismatchError, match=r"net: rank 1 and rank 0 .*net/v int8\[1\]"):
        merged(first, replace(second, described=other))


def test_text_gives_back_the_same():
    """Parts and manifests."""
    assert RankPart.from_json(own_part(1, "a").to_json()) == own_part(1, "a")
    manifest = merged(part(0, UPPER), part(1, LOWER))
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert RankPart.from_json(part(1, LOWER).to_json()) == part(1, LOWER)


def test_an_object_whose_state_differs_is_remarked_with_both_values():
    """The first rank that differs, and what to do; an object that is the same, and a position not.

    What the objects have in tensors counts as well.
    """
    told: dict[str, str] = {}
    states = [{"best": 0.5 + (rank == 2), "lr": 0.1} for rank in range(4)]
    parts = [
        replace(
            part(rank, *([((0, 0), (4, 3))] if rank == 0 else [])),
            rank_values={
                "values": {"plateau": states[rank], "meter": {"n": 1}, "same": 1},
                "positions": {"loader": rank},
            },
            own={"meter/sum": f"{rank}"},
        )
        for rank in range(4)
    ]
    tensor = TensorEntry((), "float32", ())
    parts = [
        replace(p, tensors={**p.tensors, own_name("meter/sum", p.rank): tensor}) for p in parts
    ]
    with contextlib.suppress(CheckpointError):  # the tensors have no boxes
        merge(parts, step=7, world_size=4, created=1.5, remark=told.__setitem__)
    assert set(told) == {"state of plateau", "state of meter"}
    assert told["state of plateau"].startswith(
        "plateau: its state differs between rank 0 and rank 2: plateau/best is 0.5 on rank 0 and "
        "1.5 on rank 2. "
    )
    assert "accept_inexact=('plateau',)" in told["state of plateau"]
    assert (
        "rank 0 and rank 1, 2, 3: the tensor meter/sum is another one on rank 1. "
        in told["state of meter"]
    )


@pytest.mark.parametrize(
    ("parts", "world_size", "what"),
    [
        ([part(1, LOWER)], 3, "step 7: no part from rank 0, 2"),
        ([part(0, UPPER), part(1)], 2, r"net/w\[4, 3\] has a hole"),
        ([part(0, UPPER), part(1, ((1, 0), (3, 3)))], 2, "stored twice"),
        ([part(0, UPPER), part(1, LOWER, shape=(5, 3))], 2, "on rank 1"),
        ([part(0, UPPER), part(1, LOWER, dtype="float64")], 2, "on rank 1"),
    ],
)
def test_parts_that_make_no_checkpoint_are_refused(parts, world_size, what):
    """A missing rank, a hole, an overlap, and another shape or type are named."""
    with pytest.raises(CheckpointError, match=what):
        merged(*parts, world_size=world_size)


def test_ranks_may_write_the_same_box():
    """The lower rank's counts."""
    manifest = merged(part(0, UPPER), part(1, UPPER, LOWER))
    files = [c.file for c in manifest.tensors["net/w"].chunks]
    assert files == ["shard-0.safetensors", "shard-1.safetensors"]


def grid(shape, cuts):
    """All boxes of a regular grid."""
    edges = [[0, *c, size] for c, size in zip(cuts, shape, strict=True)]
    for starts in itertools.product(*[list(itertools.pairwise(e)) for e in edges]):
        yield chunk([a for a, _ in starts], [b - a for a, b in starts])


def test_a_grid_covers_a_tensor_and_no_box_can_be_left_out():
    """Over random cuts in up to three dimensions."""
    random.seed(0)
    for _ in range(50):
        shape = [random.randint(1, 6) for _ in range(random.randint(0, 3))]
        cuts = [sorted(random.sample(range(1, n), random.randint(0, n - 1))) for n in shape]
        boxes = list(grid(shape, cuts))
        assert coverage_problem(shape, boxes) is None
        left_out = random.choice(boxes)
        assert "hole" in coverage_problem(shape, [b for b in boxes if b is not left_out])


def test_boxes_need_not_be_a_grid_and_empty_ones_need_no_bytes():
    """One half whole, the other one cut; empty tensors and shards, as uneven sharding has them."""
    boxes = [chunk((0, 0), (2, 4)), chunk((2, 0), (2, 1)), chunk((2, 1), (2, 3))]
    assert coverage_problem((4, 4), boxes) is None
    assert coverage_problem((0, 5), []) is None
    assert coverage_problem((2,), [chunk((0,), (2,)), chunk((2,), (0,))]) is None


@pytest.mark.parametrize("box", [((3, 0), (2, 3)), ((-1, 0), (4, 3)), ((0,), (4,))])
def test_a_box_outside_of_its_tensor_is_refused(box):
    """Whatever wrote it."""
    assert "outside" in coverage_problem((4, 3), [chunk(*box)])


def test_any_changed_character_is_found():
    """Whatever is read from a changed text is the same, or nothing."""
    text = merged(part(0, UPPER), part(1, LOWER)).to_json()
    original = Manifest.from_json(text)
    for i in range(len(text)):
        changed = text[:i] + chr(ord(text[i]) ^ 1) + text[i + 1 :]
        with contextlib.suppress(CheckpointCorruptError):
            assert Manifest.from_json(changed) == original


@pytest.mark.parametrize(
    "text",
    [*(merged(part(0, UPPER), part(1, LOWER)).to_json()[:end] for end in (0, 1, 40, -1)),
     "[]", "null", "[" * 100_000, '{"checksum": 1}', seal({}), seal({"version": "1"}),
     seal({"version": 1, "step": 1, "world_size": 1, "created": 0, "files": [[]]})],
)  # fmt: skip
def test_what_is_no_manifest_is_refused(text):
    """As damaged, never as another error: cut short, or of another form."""
    with pytest.raises(CheckpointCorruptError):
        Manifest.from_json(text)


def test_a_later_format_is_not_guessed_at():
    """The message says what to do."""
    text = replace(merged(part(0, UPPER), part(1, LOWER)), version=2).to_json()
    with pytest.raises(CheckpointCorruptError, match="install a later one"):
        Manifest.from_json(text)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", ".hidden", "", "a\0b"])
def test_no_file_outside_of_the_folder_is_named(name):
    """A manifest may come from somebody else."""
    bad = replace(part(0, UPPER), files=(FileEntry(name, 1, "xxh3_64:0"),))
    with pytest.raises(CheckpointCorruptError, match="no file name"):
        RankPart.from_json(bad.to_json())
