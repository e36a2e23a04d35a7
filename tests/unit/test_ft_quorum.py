"""When a quorum can be formed, and of whom."""

import sys

import pytest
from ft_asks import Groups, ask, broken, placements, quorum_of

from hpc_elastic.ft.messages import (
    EPOCH_SHIFT,
    CancelRequest,
    QuorumAborted,
    QuorumWaiting,
    Shutdown,
    WorkersLost,
)


def members(told):
    return list(placements(told))


# ---- the first quorum -------------------------------------------------------------------------


def test_it_is_formed_at_once_when_all_that_are_connected_ask():
    """Nobody else could come, as far as the keeper knows."""
    groups = Groups("a", "b")
    assert groups.ask("a") == {}
    assert members(groups.ask("b")) == ["a", "b"]


def test_groups_that_are_connected_are_waited_for_until_the_join_timeout():
    """A majority goes on without those that are late."""
    groups = Groups("a", "b", "c", join_timeout_s=0.1)
    assert members(groups.ask("a", "b")) == []
    assert members(groups.wait(0.05)) == []
    assert members(groups.wait(0.06)) == ["a", "b"]


def test_half_of_those_that_are_connected_are_no_majority():
    """The join time-out does not help them; but nobody waits for ever for who never asks."""
    groups = Groups("a", "b", wait_for_live_s=60.0)
    groups.ask("a")
    assert members(groups.wait(10.0)) == []
    assert members(groups.wait(51.0)) == ["a"]


def test_a_new_keeper_waits_for_members_that_may_come_back():
    """A newcomer would replace their quorum otherwise."""
    groups = Groups("a", greet_s=0.5)
    assert members(groups.ask("a")) == []
    assert members(groups.wait(0.6)) == ["a"]


@pytest.mark.parametrize(
    ("keepers", "askers", "formed"), [(2, 1, False), (1, 2, False), (1, 1, True)]
)
def test_the_most_demanding_of_keeper_and_askers_says_how_many_it_takes(keepers, askers, formed):
    """One group is not enough where the keeper or the group itself wants two."""
    groups = Groups("a", min_replicas=keepers)
    groups.ask("a", min_replicas=askers)
    assert bool(members(groups.wait(100.0)) or placements(groups.heard)) == formed


def test_who_asks_is_told_whom_it_waits_for():
    """For the error of a time-out; at most one message a second."""
    groups = Groups("a", "b")
    groups.ask("a")
    (waiting,) = groups.wait(0.3)["a"]
    assert waiting == QuorumWaiting("groups that have not asked: b")
    assert groups.wait(0.5) == {}


def test_a_group_of_another_size_is_left_out_and_told_why():
    """A process group over groups of one worker and of two can not be formed."""
    groups = Groups()
    groups.form("a")
    groups.arrive("b")
    assert groups.say("b", ask(metadata=("x", "y"))) == {}
    (waiting,) = groups.wait(1.5)["b"]
    assert waiting.text == "groups of 1 workers, as the members have; this one has 2"


# ---- the next ones ----------------------------------------------------------------------------


def test_ids_rise_and_begin_with_the_epoch():
    """They are never used twice, whoever keeps the quorum."""
    groups = Groups(epoch=7)
    first = groups.form("a")
    groups.say("a", QuorumAborted(first, "x"))
    second = quorum_of(groups.ask("a", quorum_id=first))
    assert (first >> EPOCH_SHIFT, second - first) == (7, 1)


def test_ids_rise_above_any_that_a_group_has_heard_of():
    """A keeper whose clock, and so whose epoch, was set back."""
    groups = Groups("a", epoch=1)
    assert quorum_of(groups.ask("a", quorum_id=9 << EPOCH_SHIFT)) == (9 << EPOCH_SHIFT) + 1


def test_it_is_formed_at_once_when_all_live_previous_members_ask():
    """Who is dead is not waited for, and no time-out is."""
    groups = Groups()
    groups.form("a", "b", "c")
    groups.leave("c")
    assert members(groups.ask("a")) == []
    assert members(groups.ask("b")) == ["a", "b"]


def test_newcomers_that_ask_by_then_are_members_too():
    """They come behind the previous members, in the order of their ids."""
    groups = Groups()
    groups.form("m", "n")
    groups.arrive("z")
    groups.arrive("b")
    groups.ask("z", "b")
    groups.ask("n", commit_failures=1)
    assert members(groups.ask("m")) == ["m", "n", "b", "z"]


def test_newcomers_that_do_not_ask_are_not_waited_for():
    """They import for a while, and the others train."""
    groups = Groups()
    groups.form("a", "b")
    groups.arrive("c")
    groups.leave("b")
    assert members(groups.ask("a")) == ["a"]


def test_live_previous_members_are_waited_for_far_beyond_the_join_timeout():
    """No quorums of one that alternate."""
    groups = Groups(join_timeout_s=0.1, wait_for_live_s=60.0)
    groups.form("a", "b", "c")
    groups.ask("a", commit_failures=1)
    groups.ask("b")
    assert members(groups.wait(59.0)) == []
    told = groups.wait(2.0)
    assert members(told) == ["a", "b"]


def test_a_minority_waits_for_ever_for_live_members():
    """One of three that live: the other two may go on somewhere else."""
    groups = Groups(wait_for_live_s=60.0)
    groups.form("a", "b", "c")
    groups.ask("a", commit_failures=1)
    assert members(groups.wait(1000.0)) == []
    assert "a majority" in groups.wait(1.1)["a"][0].text


def test_members_whose_calls_are_far_apart_are_waited_for_longer():
    """LocalSGD: for two of their calls, however long those are."""
    groups = Groups(wait_for_live_s=60.0)
    groups.form("a", "b", "c")
    groups.now += 7200.0
    groups.ask("a", call=2, commit_failures=1)
    groups.ask("b", call=2)
    assert members(groups.wait(7000.0)) == []
    assert members(groups.wait(300.0)) == ["a", "b"]


def test_a_stopped_member_is_not_waited_for_until_it_asks_anew():
    """It comes back as a newcomer."""
    groups = Groups()
    first = groups.form("a", "b")
    groups.say("a", WorkersLost("stopped"))
    assert members(groups.ask("b", quorum_id=first, commit_failures=1)) == ["b"]
    groups.say("b", QuorumAborted(first + 1, "x"))
    groups.ask("a", quorum_id=first)
    assert members(groups.ask("b", quorum_id=first + 1)) == ["b", "a"]


def test_what_a_stopped_group_asked_for_is_forgotten():
    """It would be placed in a quorum that it does not enter."""
    groups = Groups("a", "b", "c")
    groups.ask("a", "b")
    groups.say("b", WorkersLost("stopped"))
    assert members(groups.ask("c")) == ["a", "c"]


def test_a_group_that_withdraws_is_not_placed():
    """Its start_quorum has timed out."""
    groups = Groups("a", "b")
    groups.ask("a")
    groups.say("a", CancelRequest())
    assert members(groups.ask("b")) == []
    assert members(groups.ask("a")) == ["a", "b"]


def test_a_member_that_is_done_is_not_waited_for():
    """And nobody is told: others may still be receiving its last bytes."""
    groups = Groups()
    groups.form("a", "b")
    assert groups.say("b", Shutdown()) == {}
    assert groups.leave("b") == {}
    assert members(groups.ask("a", commit_failures=1)) == ["a"]


def test_after_all_have_gone_the_next_quorum_begins_anew():
    """With the join time-out, as there is nobody to be waited for."""
    groups = Groups(join_timeout_s=0.1)
    groups.form("a", "b")
    groups.say("a", Shutdown())
    groups.say("b", Shutdown())
    for name in "cde":
        groups.arrive(name)
    assert members(groups.ask("c", "d")) == []
    assert members(groups.wait(0.2)) == ["c", "d"]


def test_shrink_only_lets_nobody_join():
    """If one member says so; the newcomer goes on waiting."""
    groups = Groups()
    first = groups.form("a", "b")
    groups.arrive("c")
    groups.ask("c")
    groups.ask("a", quorum_id=first, commit_failures=1, shrink_only=True)
    assert members(groups.ask("b", quorum_id=first)) == ["a", "b"]
    groups.leave("a")
    assert members(groups.ask("b", quorum_id=first + 1)) == ["b", "c"]


def test_a_newcomer_can_not_keep_others_out():
    """It would, with its `shrink_only`, for as long as it waits itself."""
    groups = Groups()
    first = groups.form("a")
    groups.arrive("b")
    groups.arrive("c")
    groups.ask("b", shrink_only=True)
    groups.ask("c")
    assert members(groups.ask("a", quorum_id=first, commit_failures=1)) == ["a", "b", "c"]


def test_commit_failures_force_a_new_quorum():
    """With another id, so that the process group is formed anew; the others are told to come."""
    groups = Groups()
    first = groups.form("a", "b")
    told = groups.ask("a", quorum_id=first, call=3, commit_failures=1)
    assert list(broken(told)) == ["a", "b"]
    assert quorum_of(groups.ask("b", quorum_id=first, call=4)) == first + 1


def test_members_are_placed_in_rank_order():
    """Each is told its own place, and the number of all."""
    groups = Groups("a", "b", "c")
    told = placements(groups.ask("a", "b", "c"))
    assert [(p.replica_rank, p.replica_world_size) for p in told.values()] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]


def test_a_round_of_many_members_looks_at_each_a_few_times_only():
    """The cost grows with their number; the square of it would be 65,536 here."""
    groups = Groups()
    names = [f"r{i:03}" for i in range(256)]
    first = groups.form(*names)
    groups.say(names[0], QuorumAborted(first, "x"))
    looks = _count_looks(groups, names, first)
    assert looks < 40 * len(names)


def _count_looks(groups, names, quorum_id):
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call" and "/hpc_elastic/ft/" in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        groups.ask(*names, quorum_id=quorum_id)
    finally:
        sys.setprofile(None)
    return calls
