"""Who heals from whom in a new quorum."""

from collections import Counter

import pytest
from ft_asks import ask

from hpc_elastic.ft.messages import HealSource
from hpc_elastic.ft.quorum import MAX_SOURCES, find_cohort, place


def placed(states, workers=1):
    """The places of members with these (step, token), by group rank."""
    asks = {
        f"r{i}": ask(
            step=step,
            lineage=token,
            store=f"s{i}:1",
            metadata=tuple(f"m{i}.{w}" for w in range(workers)),
        )
        for i, (step, token) in enumerate(states)
    }
    by_member = place(9, list(asks), asks)
    return [[p.ranks[w] for p in by_member.values()] for w in range(workers)]


@pytest.mark.parametrize(
    ("states", "ranks"),
    [
        ([(3, "x"), (3, "x")], (0, 1)),
        ([(2, "x"), (3, "y"), (3, "y")], (1, 2)),
        ([(3, "x"), (3, "y"), (3, "y")], (1, 2)),
        ([(3, "x"), (3, "y")], (0,)),
        ([(2, "x"), (2, "x"), (3, "y")], (2,)),
        ([(0, "fresh-b"), (0, "fresh-a"), (0, "fresh-c")], (0,)),
        ([(0, "known"), (0, "known")], (0, 1)),
        ([(3, "x"), (3, "y"), (3, "x"), (3, "y")], (0, 2)),
    ],
    ids=[
        "all alike", "newest step", "most members with one token", "of equals the lowest rank's",
        "step before number", "random states at step 0", "equal states at step 0", "two halves",
    ],
)  # fmt: skip
def test_cohort_is_who_has_the_newest_step_and_one_token(states, ranks):
    """All others heal, also those at the same step with another history."""
    cohort = find_cohort([ask(step=s, lineage=t) for s, t in states])
    assert cohort.ranks == ranks
    assert sorted(cohort.ranks + cohort.healing) == [*range(len(states))]


def test_every_member_is_told_the_newest_state_and_its_own_place():
    """Who heals has no place in the cohort."""
    (places,) = placed([(2, "x"), (3, "y"), (3, "y")])
    assert {(p.quorum_id, p.replica_world_size, p.max_step, p.lineage) for p in places} == {
        (9, 3, 3, "y")
    }
    assert [(p.replica_rank, p.cohort_rank, p.cohort_size) for p in places] == [
        (0, None, 2),
        (1, 0, 2),
        (2, 1, 2),
    ]
    assert [p.heals for p in places] == [True, False, False]


def test_at_step_0_one_member_counts_alone():
    """Where states were initialised at random: the others' gradients are of other parameters."""
    (places,) = placed([(0, "a"), (0, "b"), (0, "c")])
    assert [p.cohort_rank for p in places] == [0, None, None]
    assert {p.cohort_size for p in places} == {1}


def test_workers_of_a_group_meet_at_stores_of_different_members():
    """The r-th at that of the r-th of the cohort, all members of one rank at the same."""
    places = placed([(1, "x"), (3, "y"), (3, "y")], workers=3)
    assert [{p.store for p in rank} for rank in places] == [{"s1:1"}, {"s2:1"}, {"s1:1"}]


def test_sources_are_spread_over_the_cohort():
    """The i-th that heals begins with the (i + r)-th, so that no member serves all first."""
    places = placed([(3, "y")] * 3 + [(0, "n")] * 2, workers=2)
    firsts = [[p.sources[0].replica_rank for p in rank if p.heals] for rank in places]
    assert firsts == [[0, 1], [1, 2]]
    assert places[1][4].sources == (
        HealSource(2, "m2.1"),
        HealSource(0, "m0.1"),
        HealSource(1, "m1.1"),
    )


def test_each_is_told_whom_it_serves():
    """As the first source, or as one of several; the lists agree with the sources."""
    (places,) = placed([(3, "y")] * 6 + [(0, "n")] * 5)
    for p in places:
        first = {
            q.replica_rank
            for q in places
            if q.sources[:1] and q.sources[0].replica_rank == p.replica_rank
        }
        all_ = {
            q.replica_rank for q in places if p.replica_rank in [s.replica_rank for s in q.sources]
        }
        assert (set(p.first_of), set(p.serves)) == (first, all_)
    load = Counter(p.sources[0].replica_rank for p in places if p.heals)
    assert max(load.values()) == 1


def test_a_place_does_not_grow_with_the_quorum():
    """But for whom it serves: at most four sources each, and as many to serve on average."""
    (places,) = placed([(3, "y")] * 128 + [(0, "n")] * 128)
    assert {len(p.sources) for p in places} == {0, MAX_SOURCES}
    assert max(len(p.serves) for p in places) == MAX_SOURCES


def test_who_is_alone_with_the_state_serves_all():
    """There is no other way."""
    (places,) = placed([(0, "n"), (3, "y"), (0, "m")])
    assert places[1].first_of == places[1].serves == (0, 2)


@pytest.mark.parametrize(
    ("states", "primary", "following"),
    [
        ([(3, "x"), (3, "x"), (3, "x")], "s0:1", "s1:1"),
        ([(2, "x"), (3, "x"), (3, "x")], "s1:1", "s2:1"),
        ([(2, "x"), (3, "x")], "s1:1", "s0:1"),
        ([(3, "x")], "s0:1", "s0:1"),
    ],
)
def test_all_know_where_they_would_meet_without_the_primary(states, primary, following):
    """The next of the cohort, or of all where the primary is the whole cohort."""
    (places,) = placed(states)
    assert {(p.store, p.next_store) for p in places} == {(primary, following)}
