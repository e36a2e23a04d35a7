"""A global batch, divided among any number of ranks."""

import pytest

from hpc_elastic.data.batch import BatchDivision, check
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
