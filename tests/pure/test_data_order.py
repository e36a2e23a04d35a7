"""The order of an epoch: a permutation that is computed."""

import itertools
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from hpc_elastic.data.epoch_plan import Order


@pytest.mark.parametrize("num_samples", [1, 2, 3, 10, 97, 100, 101, 1024, 10007])
def test_every_sample_is_there_once(num_samples):
    """For lengths of any form."""
    samples = Order(num_samples, seed=1, epoch=2)(np.arange(num_samples))
    assert sorted(samples.tolist()) == list(range(num_samples))


def test_the_order_is_the_same_for_ever():
    """A checkpoint of today is read by the versions of tomorrow: the numbers are written here."""
    assert Order(10, seed=7, epoch=0)(np.arange(10)).tolist() == GOLDEN
    assert Order(10**9, seed=-1, epoch=3)(np.arange(3)).tolist() == GOLDEN_LARGE


GOLDEN = [1, 0, 2, 8, 3, 5, 9, 6, 4, 7]
GOLDEN_LARGE = [272153203, 274970794, 343641710]


def test_seed_and_epoch_make_the_order():
    """Each of them changes it."""
    orders = {
        tuple(Order(50, seed, epoch)(np.arange(50)).tolist())
        for seed, epoch in itertools.product(range(5), range(5))
    }
    assert len(orders) == 25


def test_without_shuffling_it_is_the_datasets():
    """And positions behind the end begin again."""
    order = Order(5, seed=1, epoch=2, shuffle=False)
    assert order(np.arange(8)).tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


def test_padding_begins_again_at_the_first():
    """In the shuffled order, too."""
    samples = Order(5, seed=1, epoch=2)(np.arange(8)).tolist()
    assert samples[5:] == samples[:3]


def test_a_huge_dataset_takes_no_memory():
    """A part of the order of 10^12 samples is computed from nothing."""
    tracemalloc.start()
    samples = Order(10**12, seed=1, epoch=0)(np.arange(10**12 - 100, 10**12))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(samples.tolist())) == 100
    assert peak_bytes < 1e6


@pytest.mark.parametrize(("num_samples", "num_seeds"), [(3, 600), (4, 2400)])
def test_all_permutations_are_equally_likely(num_samples, num_seeds):
    """Over many seeds, where all can be counted (chi-squared, five standard deviations)."""
    kinds = math.factorial(num_samples)
    seen = Counter(
        tuple(Order(num_samples, seed, epoch=0)(np.arange(num_samples)).tolist())
        for seed in range(num_seeds)
    )
    expected = num_seeds / kinds
    chi2 = sum((seen[p] - expected) ** 2 for p in itertools.permutations(range(num_samples)))
    freedom = kinds - 1
    assert chi2 / expected < freedom + 5 * math.sqrt(2 * freedom)


def test_a_large_order_looks_random():
    """Neighbours, and position and sample, are not correlated; few samples stay in their place."""
    num_samples = 100_000
    positions = np.arange(num_samples)
    for epoch in range(5):
        samples = Order(num_samples, seed=3, epoch=epoch)(positions)
        assert abs(np.corrcoef(samples[:-1], samples[1:])[0, 1]) < 5 / math.sqrt(num_samples)
        assert abs(np.corrcoef(positions, samples)[0, 1]) < 5 / math.sqrt(num_samples)
        assert (samples == positions).sum() < 12


def test_a_batch_is_a_fair_draw():
    """The classes in each thousandth of a sorted dataset vary as in draws without replacement."""
    num_samples, size = 100_000, 100
    samples = Order(num_samples, seed=5, epoch=0)(np.arange(num_samples))
    counts = (samples.reshape(-1, size) < num_samples // 2).sum(axis=1)
    assert abs(counts.var() / (size / 4) - 1) < 5 * math.sqrt(2 / len(counts))
