"""Which checkpoints are removed after a commit."""

import pytest

from hpc_elastic.checkpoint.prune import Retention
from hpc_elastic.errors import ConfigError


@pytest.mark.parametrize(
    ("steps", "committed", "rule", "damaged", "going"),
    [
        ([10], 10, Retention(1), [], []),
        ([10, 20, 30], 30, Retention(1), [], [10, 20]),
        ([10, 20, 30], 30, Retention(2), [], [10]),
        ([10, 20, 30], 30, Retention(5), [], []),
        ([10, 20, 30, 40, 50], 50, Retention(1, keep_every=20), [], [10, 30]),
        ([0, 10, 20], 20, Retention(1, keep_every=7), [], [10]),
        # restored from 20, since 30 is damaged: it does not count, and stays until it is passed
        ([10, 20, 22, 30], 22, Retention(2), [30], [10]),
        ([20, 22, 30, 32], 32, Retention(2), [30], [20, 30]),
        # another writer is ahead: what was committed just now stays all the same
        ([5, 10, 20], 5, Retention(1), [], [10]),
    ],
)
def test_retention(steps, committed, rule, damaged, going):
    """The last ones stay, and those of every so many steps."""
    assert rule.removable(steps, committed=committed, damaged=damaged) == going


@pytest.mark.parametrize("last", [1, 2, 3])
def test_the_one_just_written_always_stays(last):
    """So a good one is there at any time."""
    for committed in range(6):
        assert committed not in Retention(last).removable(range(6), committed=committed)


@pytest.mark.parametrize(
    ("key", "value"),
    [("keep_last", 0), ("keep_last", 1.5), ("keep_last", None), ("keep_last", True),
     ("keep_every", 0), ("keep_every", "10")],
)  # fmt: skip
def test_rules_that_keep_nothing_are_refused(key, value):
    """The message names the key and the value."""
    with pytest.raises(ConfigError, match=f"{key}={value!r}"):
        Retention(**{key: value})
