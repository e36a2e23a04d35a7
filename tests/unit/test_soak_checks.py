"""What the ranks of a soak have returned is looked at."""

from soak.checks import rank_checks

GOOD = {"epochs": 3, "times_seen": [3], "digest": "a", "world_size": 2}


def problems(*ranks: dict) -> list[list[str]]:
    """What the two checks find."""
    return [list(check.problems) for check in rank_checks(ranks)]


def test_good_ranks_have_no_problem():
    """Each sample as often as there were epochs, and one digest."""
    assert problems(GOOD, GOOD) == [[], []]


def test_a_sample_that_was_seen_twice_or_never_is_found():
    """On any rank."""
    (counted, _) = problems(GOOD, GOOD | {"times_seen": [3, 4]})
    assert counted == ["rank 1: samples were seen [3, 4] times in 3 epochs"]
    assert problems(*[GOOD | {"times_seen": [2]}] * 2)[0] != []


def test_ranks_that_differ_or_are_missing_are_found():
    """All have to be there, with the same parameters."""
    assert problems(GOOD, GOOD | {"digest": "b"})[1] == ["there are 2 different ones"]
    assert problems(GOOD)[1] == ["1 ranks have returned something"]
    assert problems()[1] == ["0 ranks have returned something"]
