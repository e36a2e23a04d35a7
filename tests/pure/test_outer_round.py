"""Outer rounds: which contributions count, who closes when, and which files may go."""

from dataclasses import replace

import pytest

from hpc_elastic.errors import ConfigError
from hpc_elastic.islands.outer_round import (
    ContributionHead,
    OuterRound,
    RoundPolicy,
    RoundTimer,
    check_island,
    contribution_name,
    next_round,
    open_contributions,
    removable,
    round_name,
    staged_name,
    state_name,
)

LAST = OuterRound(5, state_name(5, "a"), "x", settled={"x": 3, "y": 1}, last_rounds={"x": 5})


def head(tokens=1.0, base=5):
    """Return the head of a contribution."""
    return ContributionHead("n", base, tokens, 10)


def closed(heads, **policy):
    """Return the next round and its factors."""
    return next_round(LAST, 6, heads, "x", "b", RoundPolicy(**policy))


def test_islands_are_weighted_by_their_tokens():
    """An island with three times the tokens moves three times as much."""
    found, factors = closed({("x", 4): head(300), ("y", 2): head(100)})
    assert factors == {("x", 4): 0.75, ("y", 2): 0.25}
    assert (found.tokens, found.settled) == (400, {"x": 4, "y": 2})
    assert found.last_rounds == {"x": 6, "y": 6}


def test_two_contributions_of_an_island_are_one_longer_movement():
    """They are added, and their tokens too."""
    _, factors = closed({("x", 4): head(100), ("x", 5): head(100), ("y", 2): head(200)})
    assert factors == {("x", 4): 0.5, ("x", 5): 0.5, ("y", 2): 0.5}


def test_a_late_contribution_has_less_weight_and_a_very_late_one_none():
    """Late is counted in rounds; what is discarded is settled, too."""
    found, factors = closed({("x", 4): head(base=3), ("y", 2): head()}, late_decay=0.5)
    assert factors == {("x", 4): 0.2, ("y", 2): 0.8}
    found, factors = closed({("x", 4): head(base=3), ("y", 2): head()}, max_late=1)
    assert factors == {("y", 2): 1.0}
    assert (found.discarded, found.settled["x"], found.tokens) == ({"x": [4]}, 4, 1)


def test_a_contribution_that_cannot_be_read_is_settled_without_being_counted():
    """Otherwise it would be tried for ever."""
    found, factors = closed({("x", 4): None})
    assert (factors, found.contributions, found.settled["x"]) == ({}, {}, 4)
    assert found.last_rounds == {"x": 5}


def test_open_contributions_are_all_above_the_settled_number():
    """One that a listing lacks, below another, is opened too."""
    names = [contribution_name("x", 3), contribution_name("x", 6), contribution_name("z", 1)]
    assert open_contributions(names, LAST) == {"x": [4, 5, 6], "z": [1]}


def test_a_round_is_closed_at_once_when_all_that_are_awaited_have_contributed():
    """Those that took part lately; an island that has been away longer is not waited for."""
    last = replace(LAST, last_rounds={"x": 5, "y": 5, "z": 1})
    timer = RoundTimer("x", RoundPolicy(grace_s=30, turn_s=0, absent_rounds=3))
    assert not timer.is_due(last, ["x"], 0)
    assert timer.is_due(last, ["x", "y"], 1)


def test_a_round_is_closed_after_the_grace_time_without_the_others():
    """It begins with the quorum, and anew with each round."""
    last = replace(LAST, last_rounds={"x": 5, "y": 5, "z": 5})
    timer = RoundTimer("x", RoundPolicy(quorum=2, grace_s=30, turn_s=0))
    assert not timer.is_due(last, ["x"], 0)
    assert not timer.is_due(last, ["x"], 100)
    assert not timer.is_due(last, ["x", "y"], 110)
    assert timer.is_due(last, ["x", "y"], 140)
    assert not timer.is_due(replace(last, index=6), ["x", "y"], 141)


def test_islands_take_turns():
    """In each round another one closes first, and the next one later if it does not."""
    policy = RoundPolicy(grace_s=0, turn_s=10)
    for index in range(1, 7):
        last = OuterRound(index, state_name(index, "a"), "x")
        timers = {name: RoundTimer(name, policy) for name in "xyz"}
        order = [
            [name for name in "xyz" if timers[name].is_due(last, ["x", "y", "z"], now)]
            for now in (0.0, 10.0, 20.0)
        ]
        assert [len(names) for names in order] == [1, 2, 3]
        assert order[0] == ["xyz"[index % 3]]
        assert not RoundTimer("w", policy).is_due(last, ["x", "y", "z"], 0.0)


def test_files_that_no_island_needs_are_removed():
    """The last two states stay, the newest rounds, open contributions, and the last ten names."""
    kept = [
        round_name(200), round_name(101), state_name(200, "a"), state_name(199, "a"),
        state_name(201, "c"), state_name(200, "d"), contribution_name("x", 51),
        contribution_name("x", 41), staged_name(150, "a"), "notes.txt",
    ]  # fmt: skip
    old = [
        round_name(100), state_name(199, "b"), state_name(198, "a"), contribution_name("x", 40),
        staged_name(99, "a"),
    ]  # fmt: skip
    last = OuterRound(200, state_name(200, "a"), "x", settled={"x": 50})
    policy = RoundPolicy(kept_rounds=100)
    assert removable([*kept, *old], last, state_name(199, "a"), policy) == sorted(old)


def test_a_round_is_read_as_it_was_written_and_refused_if_it_is_damaged():
    """None for anything else."""
    found, _ = closed({("x", 4): head(300)})
    assert OuterRound.decode(found.encode()) == found
    bad = [found.encode()[:-5], "[]", "null", "{}", "[" * 5000]
    bad.append(replace(found, state="../../secret").encode())
    bad.append(replace(found, settled={"x": "4"}).encode())
    assert [OuterRound.decode(text) for text in bad] == [None] * len(bad)


@pytest.mark.parametrize(
    ("name", "value"),
    [("quorum", 0), ("grace_s", -1), ("late_decay", 0), ("late_decay", 1.5), ("max_open", 0)],
)
def test_a_policy_out_of_range_is_refused(name, value):
    """The message names key and value."""
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        RoundPolicy(**{name: value})


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "x" * 65, "a b"])
def test_an_island_has_a_name_that_fits_into_a_file_name(name):
    """Anything else is refused."""
    with pytest.raises(ConfigError, match="island"):
        check_island(name)
