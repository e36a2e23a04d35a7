"""Replicas that join, leave, die and heal train as one process does, and as torch's DDP."""

import pytest
from ft_histories import find_problems


@pytest.mark.parametrize("seed", [2, 5], ids=["ddp", "diloco"])
def test_a_random_history_is_that_of_one_process_and_of_ddp(seed):
    """Each committed step is; the replicas have the same bits."""
    assert find_problems(range(seed, seed + 1)) == []


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 120, 12))
def test_many_random_histories(first):
    """The same with other seeds."""
    assert find_problems(range(first, first + 12)) == []
