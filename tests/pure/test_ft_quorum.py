"""Quorum rules: when a quorum is formed, of which groups, and which of them heal from which."""

import sys
from collections import Counter
from dataclasses import replace

import pytest
from ft_groups import Groups, aborted, formed, of, quorum_of, request, results, with_newcomer

from hpc_elastic.ft.messages import (
    TERM_SHIFT,
    CancelRequest,
    HealSource,
    LineReader,
    ProposeSwitch,
    QuorumAborted,
    QuorumResult,
    QuorumResults,
    QuorumWaiting,
    Shutdown,
    WorkersLost,
    to_line,
)
from hpc_elastic.ft.quorum import (
    LIVE_TIMEOUT_SHARE,
    MAX_SOURCES,
    CommittedProgress,
    assign_results,
    find_cohort,
    keep_out_s,
)


def members(sent):
    return list(results(sent))


# ---- the first quorum -------------------------------------------------------------------------


def test_first_quorum_is_formed_at_once_if_all_connected_groups_request():
    """The lighthouse knows of no other group."""
    groups = Groups("a", "b")
    assert groups.request("a") == {}
    assert members(groups.request("b")) == ["a", "b"]


def test_first_quorum_waits_for_connected_groups_until_the_join_timeout():
    """A majority goes on without the late ones."""
    groups = Groups("a", "b", "c", join_timeout_s=0.1)
    assert members(groups.request("a", "b")) == []
    assert members(groups.wait(0.05)) == []
    assert members(groups.wait(0.06)) == ["a", "b"]


def test_half_of_the_connected_groups_are_no_majority():
    """The join time-out does not help; a group that never requests delays them for a minute."""
    groups = Groups("a", "b", live_timeout_s=60.0)
    groups.request("a")
    assert members(groups.wait(10.0)) == []
    assert members(groups.wait(51.0)) == ["a"]


def test_new_lighthouse_waits_for_members_that_may_reconnect():
    """A newcomer would replace their quorum."""
    groups = Groups("a", startup_wait_s=0.5)
    assert members(groups.request("a")) == []
    assert members(groups.wait(0.6)) == ["a"]


@pytest.mark.parametrize(
    ("lighthouse", "group", "formed"), [(2, 1, False), (1, 2, False), (1, 1, True)]
)
def test_largest_minimum_of_lighthouse_and_groups_counts(lighthouse, group, formed):
    """One group is not enough if the lighthouse or the group itself requires two."""
    groups = Groups("a", min_replicas=lighthouse)
    groups.request("a", min_replicas=group)
    assert bool(members(groups.wait(100.0)) or results(groups.received)) == formed


def test_waiting_group_learns_what_it_waits_for():
    """For the error of a time-out; at most one message a second."""
    groups = Groups("a", "b")
    groups.request("a")
    (waiting,) = groups.wait(0.3)["a"]
    assert waiting == QuorumWaiting("groups that have not requested: b")
    assert groups.wait(0.5) == {}


def test_group_of_another_size_is_excluded():
    """It learns why: there is no process group over groups of one worker and of two."""
    groups, _ = formed("a")
    groups.connect("b")
    assert groups.send("b", request(metadata=("x", "y"))) == {}
    (waiting,) = groups.wait(1.5)["b"]
    assert waiting.text == "groups of 1 workers, as the members have; this one has 2"


# ---- the next ones ----------------------------------------------------------------------------


def test_ids_rise_and_start_with_the_term():
    """No id is used twice, by any lighthouse."""
    groups = Groups(term=7)
    first = groups.form("a")
    groups.send("a", QuorumAborted(first, "x"))
    second = quorum_of(groups.request("a", quorum_id=first))
    assert (first >> TERM_SHIFT, second - first) == (7, 1)


def test_ids_rise_above_those_of_earlier_lighthouses():
    """The lighthouse's clock, and so its term, may have been set back."""
    groups = Groups("a", term=1)
    assert quorum_of(groups.request("a", quorum_id=9 << TERM_SHIFT)) == (9 << TERM_SHIFT) + 1


def test_quorum_is_formed_at_once_if_all_live_members_request():
    """A dead member is not waited for, and no time-out is."""
    groups, _ = formed("a", "b", "c")
    groups.disconnect("c")
    assert members(groups.request("a")) == []
    assert members(groups.request("b")) == ["a", "b"]


def test_newcomers_that_request_become_members():
    """They follow the previous members, in the order of their ids."""
    groups, _ = formed("m", "n")
    groups.connect("z")
    groups.connect("b")
    groups.request("z", "b")
    groups.request("n", commit_failures=1)
    assert members(groups.request("m")) == ["m", "n", "b", "z"]


def test_newcomers_that_do_not_request_are_not_waited_for():
    """They import for some time, and the others train."""
    groups, _ = formed("a", "b")
    groups.connect("c")
    groups.disconnect("b")
    assert members(groups.request("a")) == ["a"]


def test_live_members_are_waited_for_beyond_the_join_timeout():
    """So quorums of one cannot alternate."""
    groups = Groups(join_timeout_s=0.1, live_timeout_s=60.0)
    groups.form("a", "b", "c")
    groups.request("a", commit_failures=1)
    groups.request("b")
    assert members(groups.wait(59.0)) == []
    sent = groups.wait(2.0)
    assert members(sent) == ["a", "b"]


def test_minority_waits_for_ever_for_live_members():
    """One of three that live: the other two may go on elsewhere."""
    groups = Groups(live_timeout_s=60.0)
    groups.form("a", "b", "c")
    groups.request("a", commit_failures=1)
    assert members(groups.wait(1000.0)) == []
    assert "half of the members" in groups.wait(1.1)["a"][0].text


@pytest.mark.parametrize("step_s", [0.1, 100.0], ids=["short steps", "long steps"])
def test_slow_member_costs_no_other_its_time_out(step_s):
    """With every default the sound ones have a quorum before their own 60 s are over."""
    groups = Groups("a", "b", "c")
    groups.form("a", "b", "c")
    groups.now += step_s
    groups.request("a", quorum_step=1, commit_failures=1, timeout_s=60.0)
    groups.request("b", quorum_step=1, timeout_s=60.0)
    assert members(groups.wait(40.0)) == []
    assert members(groups.wait(15.0)) == ["a", "b"]
    groups.request("c", quorum_step=1, timeout_s=60.0)
    assert members(groups.request("a", "b", commit_failures=1)) == ["a", "b", "c"]


def test_group_that_cannot_heal_is_kept_out_for_longer_and_longer():
    """The others go on at once, and switch for it after its pause; it learns why it waits."""
    groups = Groups("a", "b")
    quorum_id = groups.form("a", "b", step=7)
    pauses = []
    for failures in (3, 4, 5, 12, 99):
        groups.request("b", quorum_id=quorum_id, commit_failures=1, heal_failures=failures)
        sent = groups.request("a", quorum_id=quorum_id, step=7)
        assert members(sent) == ["a"]
        began, alone = groups.now, quorum_of(sent)
        while not (proposed := groups.wait(0.5).get("a")):
            assert groups.now - began < 400
        assert isinstance(proposed[0], ProposeSwitch)
        pauses.append(groups.now - began)
        groups.agree("a")
        sent = groups.request("a", quorum_id=alone, step=7, quorum_step=4)
        assert members(sent) == ["a", "b"]
        quorum_id = quorum_of(sent)
    assert pauses == [1.0, 2.0, 4.0, 300.0, 300.0]
    assert {m.text for m in groups.received["b"] if isinstance(m, QuorumWaiting)} == {
        "the end of its pause, as its healing keeps failing"
    }


def test_pause_of_a_group_ends_before_its_own_time_out():
    """And a worker that is started again is let in at once."""
    assert keep_out_s(request(heal_failures=50, timeout_s=60.0)) == LIVE_TIMEOUT_SHARE * 60.0
    groups = Groups("a", "b")
    groups.request("b", heal_failures=9)
    groups.send("b", WorkersLost("dead"))
    groups.request("a")
    groups.send("a", QuorumAborted(quorum_of(groups.received), "x"))
    groups.request("b")
    assert members(groups.request("a")) == ["a", "b"]


def test_one_of_two_goes_on_without_a_slow_one():
    """Half of the members are enough, and so is half of the connected groups."""
    groups = Groups("a", "b")
    groups.form("a", "b")
    groups.request("a", commit_failures=1, timeout_s=60.0)
    assert members(groups.wait(59.0)) == ["a"]
    groups = Groups("a", "b")
    groups.request("a", timeout_s=60.0)
    assert members(groups.wait(59.0)) == ["a"]


def test_members_with_long_steps_are_waited_for_longer():
    """LocalSGD: for two of their steps, however long those are."""
    groups = Groups(live_timeout_s=60.0)
    groups.form("a", "b", "c")
    groups.now += 7200.0
    groups.request("a", quorum_step=2, commit_failures=1)
    groups.request("b", quorum_step=2)
    assert members(groups.wait(7000.0)) == []
    assert members(groups.wait(300.0)) == ["a", "b"]


def test_stopped_member_is_not_waited_for_until_it_requests_again():
    """It joins again as a newcomer."""
    groups, first = formed("a", "b")
    groups.send("a", WorkersLost("stopped"))
    assert members(groups.request("b", quorum_id=first, commit_failures=1)) == ["b"]
    groups.send("b", QuorumAborted(first + 1, "x"))
    groups.request("a", quorum_id=first)
    assert members(groups.request("b", quorum_id=first + 1)) == ["b", "a"]


def test_request_of_a_stopped_group_is_void():
    """It would not enter the quorum."""
    groups = Groups("a", "b", "c")
    groups.request("a", "b")
    groups.send("b", WorkersLost("stopped"))
    assert members(groups.request("c")) == ["a", "c"]


def test_cancelled_request_is_void():
    """Its start_quorum has timed out."""
    groups = Groups("a", "b")
    groups.request("a")
    groups.send("a", CancelRequest())
    assert members(groups.request("b")) == []
    assert members(groups.request("a")) == ["a", "b"]


def test_member_that_is_done_is_not_waited_for():
    """Others may still be receiving its last bytes: they complete its last step."""
    groups, first = formed("a", "b")
    ended = groups.send("b", Shutdown(first, 7))
    assert of(ended["a"], QuorumAborted) == QuorumAborted(first, "b is done", after_step=7)
    assert groups.disconnect("b") == {}
    assert members(groups.request("a", commit_failures=1)) == ["a"]


def test_quorum_after_all_members_are_done_is_a_first_one():
    """With the join time-out, as no previous member is left."""
    groups = Groups(join_timeout_s=0.1)
    groups.form("a", "b")
    groups.send("a", Shutdown())
    groups.send("b", Shutdown())
    for name in "cde":
        groups.connect(name)
    assert members(groups.request("c", "d")) == []
    assert members(groups.wait(0.2)) == ["c", "d"]


def test_shrink_only_excludes_newcomers():
    """If one member sets it; the newcomer waits on."""
    groups, first = with_newcomer()
    groups.request("a", quorum_id=first, commit_failures=1, shrink_only=True)
    assert members(groups.request("b", quorum_id=first)) == ["a", "b"]
    groups.disconnect("a")
    assert members(groups.request("b", quorum_id=first + 1)) == ["b", "c"]


def test_shrink_only_of_a_newcomer_does_not_count():
    """It would exclude others for as long as it waits."""
    groups, first = formed("a")
    groups.connect("b")
    groups.connect("c")
    groups.request("b", shrink_only=True)
    groups.request("c")
    assert members(groups.request("a", quorum_id=first, commit_failures=1)) == ["a", "b", "c"]


def test_commit_failures_need_a_new_quorum():
    """With another id, so the process group is formed again; all members are notified."""
    groups, first = formed("a", "b")
    sent = groups.request("a", quorum_id=first, quorum_step=3, commit_failures=1)
    assert list(aborted(sent)) == ["a", "b"]
    assert quorum_of(groups.request("b", quorum_id=first, quorum_step=4)) == first + 1


def test_cost_of_a_round_is_linear():
    """In its number of members; the square of it would be 65,536 here."""
    groups = Groups()
    names = [f"r{i:03}" for i in range(256)]
    first = groups.form(*names)
    groups.send(names[0], QuorumAborted(first, "x"))
    num_calls = _count_calls(groups, names, first)
    assert num_calls < 40 * len(names)


def _count_calls(groups, names, quorum_id):
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call" and "/hpc_elastic/ft/" in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        groups.request(*names, quorum_id=quorum_id)
    finally:
        sys.setprofile(None)
    return calls


# ---- healing ----------------------------------------------------------------------------------


def results_of(states, workers=1):
    """The results of members with these (step, state version), by group rank."""
    requests = {
        f"r{i}": request(
            step=step,
            state_version=version,
            store=f"s{i}:1",
            metadata=tuple(f"m{i}.{w}" for w in range(workers)),
        )
        for i, (step, version) in enumerate(states)
    }
    by_member = assign_results(9, list(requests), requests)
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
        "all alike", "newest step", "most members with one version", "of equals the lowest rank's",
        "step before number", "random states at step 0", "equal states at step 0", "two halves",
    ],
)  # fmt: skip
def test_cohort_has_the_newest_step_and_one_version(states, ranks):
    """All others heal, also those at the same step with another version."""
    cohort = find_cohort([request(step=s, state_version=t) for s, t in states])
    assert cohort.ranks == ranks
    assert sorted(cohort.ranks + cohort.healing) == [*range(len(states))]


def test_results_have_the_newest_state_and_the_own_rank():
    """A member that heals has no rank in the cohort."""
    (places,) = results_of([(2, "x"), (3, "y"), (3, "y")])
    assert {(p.quorum_id, p.replica_world_size, p.max_step, p.state_version) for p in places} == {
        (9, 3, 3, "y")
    }
    assert [(p.replica_rank, p.cohort_rank, p.cohort_size) for p in places] == [
        (0, None, 2),
        (1, 0, 2),
        (2, 1, 2),
    ]
    assert [p.heals for p in places] == [True, False, False]


@pytest.mark.parametrize(
    ("states", "changes", "expected"),
    [
        ([(3, "x"), (0, "n")], {}, True),
        ([(3, "x"), (3, "x"), (0, "n")], {1: {"min_replicas": 2}}, True),
        ([(3, "x"), (3, "x")], {}, False),
        ([(0, "x"), (0, "n")], {}, False),
        ([(3, "x"), (0, "n")], {0: {"catch_up": False}}, False),
        ([(3, "x"), (0, "n")], {1: {"catch_up": False}}, False),
        ([(3, "x"), (0, "n")], {0: {"min_replicas": 2}}, False),
    ],
    ids=[
        "all can", "the cohort is large enough", "nobody heals", "no step yet",
        "the source cannot", "the newcomer cannot", "the cohort is too small",
    ],
)  # fmt: skip
def test_members_catch_up_if_all_can_and_the_cohort_commits_alone(states, changes, expected):
    """Otherwise all wait for those that heal."""
    requests = {
        f"r{i}": request(step=s, state_version=v, **{"catch_up": True, **changes.get(i, {})})
        for i, (s, v) in enumerate(states)
    }
    results = assign_results(9, list(requests), requests).values()
    assert {r.ranks[0].catch_up for r in results} == {expected}


def test_workers_of_a_group_use_stores_of_different_members():
    """The r-th that of the r-th of the cohort; all members of one rank the same."""
    places = results_of([(1, "x"), (3, "y"), (3, "y")], workers=3)
    assert [{p.store for p in rank} for rank in places] == [{"s1:1"}, {"s2:1"}, {"s1:1"}]


def test_sources_are_spread_over_the_cohort():
    """The i-th that heals starts with the (i + r)-th, so no member serves all first."""
    places = results_of([(3, "y")] * 3 + [(0, "n")] * 2, workers=2)
    firsts = [[p.sources[0].replica_rank for p in rank if p.heals] for rank in places]
    assert firsts == [[0, 1], [1, 2]]
    assert places[1][4].sources == (
        HealSource(2, "m2.1"),
        HealSource(0, "m0.1"),
        HealSource(1, "m1.1"),
    )


def test_results_name_the_members_that_each_serves():
    """As the first source, or as one of several; the lists agree with the sources."""
    (places,) = results_of([(3, "y")] * 6 + [(0, "n")] * 5)
    for p in places:
        first = {
            q.replica_rank
            for q in places
            if q.sources[:1] and q.sources[0].replica_rank == p.replica_rank
        }
        all_ = {
            q.replica_rank for q in places if p.replica_rank in [s.replica_rank for s in q.sources]
        }
        assert (set(p.first_source_of), set(p.source_of)) == (first, all_)
    load = Counter(p.sources[0].replica_rank for p in places if p.heals)
    assert max(load.values()) == 1


def test_results_do_not_grow_with_the_quorum():
    """At most four sources each, and as many to serve on average."""
    (places,) = results_of([(3, "y")] * 128 + [(0, "n")] * 128)
    assert {len(p.sources) for p in places} == {0, MAX_SOURCES}
    assert max(len(p.source_of) for p in places) == MAX_SOURCES


def test_only_member_with_the_state_serves_all():
    """There is no other source."""
    (places,) = results_of([(0, "n"), (3, "y"), (0, "m")])
    assert places[1].first_source_of == places[1].source_of == (0, 2)


@pytest.mark.parametrize(
    ("states", "primary", "following"),
    [
        ([(3, "x"), (3, "x"), (3, "x")], "s0:1", "s1:1"),
        ([(2, "x"), (3, "x"), (3, "x")], "s1:1", "s2:1"),
        ([(2, "x"), (3, "x")], "s1:1", "s0:1"),
        ([(3, "x")], "s0:1", "s0:1"),
    ],
)
def test_results_name_the_store_after_the_primary(states, primary, following):
    """The next of the cohort, or of all if the primary is the whole cohort."""
    (places,) = results_of(states)
    assert {(p.store, p.next_store) for p in places} == {(primary, following)}


def test_state_versions_tell_histories_apart():
    """Equal histories have equal versions; each contributor count and quorum makes another one."""
    start = CommittedProgress.loaded(3, 6)
    assert start == CommittedProgress.loaded(3, 6)
    assert start.after_step(9, 2) == start.after_step(9, 2)
    assert start.after_step(9, 2).step == 4 and start.after_step(9, 2).batches_committed == 8
    versions = [start, start.after_step(9, 2), start.after_step(9, 1), start.after_step(8, 2)]
    versions += [CommittedProgress.initial(init_sync=True) for _ in range(2)]
    assert len({progress.state_version for progress in versions}) == len(versions)


# ---- messages ---------------------------------------------------------------------------------


def test_results_of_a_group_are_sent_as_differences():
    """They come back whole, and each further rank costs a fraction of the first."""
    first = QuorumResult(
        5, 1, 3, "a:1", 7, "v", None, 2, (HealSource(0, "url"),), (), (2,), "b:1"
    )  # fmt: skip
    others = [replace(first, store="b:1"), replace(first, sources=(), cohort_rank=1, source_of=())]
    message = QuorumResults((first, *others, *[first] * 5), 9)
    sent = to_line(message)
    assert LineReader().feed(sent) == [message]
    assert LineReader().feed(to_line(QuorumResults())) == [QuorumResults()]
    assert len(sent) < 3 * len(to_line(QuorumResults((first,))))
