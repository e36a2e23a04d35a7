"""A global batch, divided among any number of ranks."""

from collections.abc import Sequence

import pytest

from hpc_elastic.data.batch import (
    THROUGHPUTS_VARIABLE,
    BatchDivision,
    MicroBatch,
    check,
    decode_throughputs,
    encode_throughputs,
)
from hpc_elastic.errors import ConfigError

CASES = [
    (size, micro_batch, world_size)
    for size in (1, 2, 7, 16, 33, 128)
    for micro_batch in (None, 1, 3, 16, 1000)
    for world_size in (1, 2, 3, 5, 16, 40)
]


def all_parts(size, micro_batch, world_size):
    """Return the parts of each rank."""
    ranks = range(world_size)
    return [
        BatchDivision(size, micro_batch, rank, world_size).micro_batches(size) for rank in ranks
    ]


def test_the_ranks_parts_make_the_global_batch():
    """Each sample is in one part of one rank, whatever the numbers are."""
    for size, micro_batch, world_size in CASES:
        parts = [part for rank in all_parts(size, micro_batch, world_size) for part in rank]
        taken = [part.offset + i for part in parts for i in range(part.count)]
        assert taken == list(range(size))
        assert all(0 <= part.offset <= size - part.num_loaded for part in parts)


def test_weights_make_the_mean_over_the_global_batch():
    """The ranks' mean of weighted means counts each sample with 1/n."""
    for size, micro_batch, world_size in CASES:
        for rank in all_parts(size, micro_batch, world_size):
            for part in rank:
                each = part.weight / max(1, part.count) / world_size
                assert each == pytest.approx(1 / size if part.count else 0, rel=1e-15)


def test_all_ranks_do_the_same_number_of_parts():
    """No rank waits in a collective for one that has no more; no part is too large, or needless."""
    for size, micro_batch, world_size in CASES:
        numbers = {len(parts) for parts in all_parts(size, micro_batch, world_size)}
        assert len(numbers) == 1
        counts = [
            part.count for parts in all_parts(size, micro_batch, world_size) for part in parts
        ]
        assert max(counts) <= (micro_batch or size)
        assert max(counts) - min(counts) <= 2


@pytest.fixture
def group(monkeypatch):
    """Be one worker of a group with these throughputs."""

    def be(rank: int, throughputs: Sequence[int], world_size: int | None = None) -> None:
        monkeypatch.setenv(THROUGHPUTS_VARIABLE, encode_throughputs(throughputs))
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size or len(throughputs)))

    return be


@pytest.mark.parametrize("throughputs", [(1000, 1000, 2500), (1, 1000), (7, 7, 7, 7)])
def test_shares_are_in_proportion_to_the_throughput(group, throughputs):
    """Each sample is in one part, the weights make its mean, and all ranks have as many parts."""
    num, total = len(throughputs), sum(throughputs)
    for size, micro_batch, _ in CASES:
        parts: list[list[MicroBatch]] = []
        for rank in range(num):
            group(rank, throughputs)
            parts.append(BatchDivision(size, micro_batch).micro_batches(size))
        taken = [part.offset + i for rank in parts for part in rank for i in range(part.count)]
        assert taken == list(range(size)) and len({len(rank) for rank in parts}) == 1
        for rank, throughput in zip(parts, throughputs, strict=True):
            count = sum(part.count for part in rank)
            assert count == pytest.approx(size * throughput / total, abs=1)
            assert max(part.count for part in rank) <= (micro_batch or size)
            assert sum(part.weight for part in rank) * size / num == pytest.approx(count)


def test_throughputs_count_for_the_workers_of_the_run_only(group):
    """A script may divide the data among some of them, or among virtual ranks."""
    group(0, (1000, 3000))
    assert BatchDivision(12).share(12) == (0, 3)
    for more in ({"rank": 0, "world_size": 2}, {"virtual_ranks": 2}):
        assert BatchDivision(12, **more).share(12) == (0, 6)
    group(0, (1000, 3000), world_size=3)
    assert BatchDivision(12).share(12) == (0, 4)


def test_throughputs_have_one_part_for_each_pool():
    """Equal ones are left out."""
    text = encode_throughputs([1000, 1000, 2500])
    assert text == "2*1000,1*2500" and decode_throughputs(text) == (1000, 1000, 2500)
    assert encode_throughputs([2500] * 8) == encode_throughputs([]) == ""
    assert decode_throughputs("") == ()


def test_a_rank_without_a_sample_is_lent_one():
    """It does the same as the others, and adds nothing."""
    (part,) = BatchDivision(2, None, rank=2, world_size=3).micro_batches(2)
    assert (part.count, part.num_loaded) == (1, 1)
    (part,) = BatchDivision(2, None, rank=0, world_size=3).micro_batches(2)
    assert (part.count, part.num_loaded, part.weight) == (0, 1, 0.0)


def test_the_group_is_torchruns(monkeypatch):
    """Without torch.distributed: as the environment states, or one worker."""
    batch = BatchDivision(8)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert batch.group() == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert batch.group() == (2, 4)
    assert batch.share(8) == (4, 2)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"global_batch_size": 0}, "global_batch_size"),
        ({"global_batch_size": 8, "micro_batch_size": 0}, "micro_batch_size"),
        ({"global_batch_size": 8, "rank": 1}, "rank"),
        ({"global_batch_size": 8, "rank": 2, "world_size": 2}, "rank"),
        ({"global_batch_size": "8"}, "global_batch_size"),
        ({"global_batch_size": None}, "global_batch_size"),
        ({"global_batch_size": True}, "global_batch_size"),
        ({"global_batch_size": 8, "micro_batch_size": 2.0}, "micro_batch_size"),
        ({"global_batch_size": 8, "rank": "0", "world_size": 2}, "rank"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, key):
    """With the argument's name."""
    with pytest.raises(ConfigError, match=f"^{key}="):
        BatchDivision(**arguments)


@pytest.mark.parametrize(
    ("global_batch", "max_nodes", "nproc", "what"),
    [
        (128, 16, 8, None),
        (128, 128, None, None),
        (128, 17, 8, "at most 16 nodes, or a global batch of at least 136"),
        (15, 2, 8, "give at most 1 node, or a global batch of at least 16"),
        (1, 1, 2, "1 node has 2 workers or more, and a global batch of 1 sample cannot"),
        (4, 2, 8, "fewer workers a node"),
        (0, 1, 1, "at least 1"),
    ],
)
def test_node_counts_that_can_not_work_are_told(global_batch, max_nodes, nproc, what):
    """Before anything is submitted: a worker would never have a sample."""
    problem = check(global_batch, max_nodes, nproc)
    assert problem is None if what is None else what in (problem or "")
