"""What a keeper makes of a quorum that one before it has formed."""

from ft_asks import Groups, broken, of, placements

from hpc_elastic.ft.lighthouse_state import LighthouseState
from hpc_elastic.ft.messages import (
    EPOCH_SHIFT,
    NO_QUORUM,
    ConfirmSwitch,
    ProposeSwitch,
    ReplicaStatus,
)

OLD = (3 << EPOCH_SHIFT) + 1
"""A quorum of a keeper before."""


def test_members_of_an_older_keepers_quorum_go_on():
    """They are asked how far they are, and told to forget what may have been proposed."""
    groups = Groups(epoch=4)
    assert groups.come_back(OLD, "a", "b") == {}
    number = (4 << EPOCH_SHIFT) + 1
    assert groups.wait(0.05) == {n: [ProposeSwitch(OLD, number, 0)] for n in "ab"}
    assert groups.answer(5, "a") == {}
    assert {n: told[-1] for n, told in groups.answer(5, "b").items()} == {
        n: ProposeSwitch(OLD, 0, 0) for n in "ab"
    }
    assert groups.wait(3600.0) == {}


def test_nobody_is_let_go_on_while_one_may_have_a_confirmation():
    """It does not answer, but asks at the confirmed call; the others may wait there."""
    groups = Groups(epoch=4)
    groups.come_back(OLD, "a", "b", "c")
    groups.wait(0.05)
    groups.answer(5, "a", "b")
    assert groups.wait(1.0) == {}
    told = groups.ask("c", quorum_id=OLD, call=6)
    assert [of(told[n], ProposeSwitch).call for n in "ab"] == [6, 6]


def test_who_does_not_answer_a_new_keeper_holds_nobody_up_for_long():
    """It may hold the interpreter's lock."""
    groups = Groups(epoch=4)
    groups.come_back(OLD, "a", "b")
    groups.wait(0.05)
    groups.answer(5, "a")
    assert groups.wait(5.1) == {n: [ProposeSwitch(OLD, 0, 0)] for n in "ab"}


def test_nothing_is_taken_back_before_all_are_there():
    """One of them may have been told of a confirmation that the others were not."""
    groups = Groups(epoch=4)
    groups.come_back(OLD, "a", size=2)
    assert groups.wait(0.05) == {}


def test_a_half_confirmed_switch_is_carried_out():
    """One member asks, having failed nothing: so do the others, at the same call."""
    groups = Groups(epoch=4)
    groups.come_back(OLD, "a", "b")
    assert groups.ask("a", quorum_id=OLD, call=7, step=7) == {}
    told = groups.wait(0.05)
    number = (4 << EPOCH_SHIFT) + 1
    assert told == {"b": [ProposeSwitch(OLD, number, 7)]}
    assert groups.answer(6, "b") == {"b": [ConfirmSwitch(OLD, number)]}
    told = groups.ask("b", quorum_id=OLD, call=7, step=7)
    assert list(placements(told)) == ["a", "b"]


def test_a_proposal_that_reaches_a_member_after_it_asked_does_no_harm():
    """It asks at that call itself, and says that it has begun it."""
    groups = Groups(epoch=4)
    groups.come_back(OLD, "a", "b", "c")
    groups.wait(0.05)
    groups.ask("a", "b", quorum_id=OLD, call=7)
    assert broken(groups.answer(7, "b", ok=False)) == {}
    assert "c" in groups.answer(6, "c")


def test_if_a_member_is_past_that_call_the_quorum_is_broken():
    """It waits in a collective for the one that asks."""
    groups = Groups(epoch=4)
    groups.come_back(OLD, "a", "b")
    groups.wait(0.05)
    groups.ask("a", quorum_id=OLD, call=7)
    assert "b" in broken(groups.answer(7, "b", ok=False))


def test_a_member_that_does_not_come_back_is_lost():
    """After a while; the others are told."""
    groups = Groups(epoch=4, come_back_s=5.0)
    groups.come_back(OLD, "a", "b", size=3)
    assert groups.wait(4.9) == {}
    told = groups.wait(0.2)
    assert broken(told).keys() == {"a", "b"}
    groups.ask("a", quorum_id=OLD)
    assert list(placements(groups.ask("b", quorum_id=OLD))) == ["a", "b"]


def test_a_missing_member_of_a_broken_quorum_is_not_waited_for_for_long():
    """It is what broke it, most likely, and died together with the keeper."""
    groups = Groups(epoch=4, come_back_s=5.0, regroup_s=1.0)
    groups.come_back(OLD, "a", "b", size=3, broken=True)
    groups.ask("a", "b", quorum_id=OLD, commit_failures=1)
    assert placements(groups.wait(0.9)) == {}
    assert list(placements(groups.wait(0.2))) == ["a", "b"]


def test_a_member_that_left_together_with_the_keeper_is_not_waited_for_for_long():
    """The others ask as it was agreed, and the new keeper has not heard of that."""
    groups = Groups(epoch=4, come_back_s=5.0, regroup_s=1.0)
    groups.come_back(OLD, "a", size=2)
    groups.ask("a", quorum_id=OLD, call=7)
    assert placements(groups.wait(0.9)) == {}
    assert list(placements(groups.wait(0.2))) == ["a"]


def test_a_leader_that_is_dead_is_not_waited_for():
    """All others are there but for as many as are known to be dead."""
    keeper = LighthouseState(4, lost_members=["c"])
    groups = Groups(keeper=keeper)
    groups.come_back(OLD, "a", "b", size=3)
    assert "c" in broken(groups.wait(0.4))["a"]
    groups.ask("a", quorum_id=OLD)
    assert list(placements(groups.ask("b", quorum_id=OLD))) == ["a", "b"]


def test_a_dead_leader_that_had_left_before_costs_nothing():
    """All members of the quorum are there."""
    groups = Groups(keeper=LighthouseState(4, lost_members=["c"]))
    groups.come_back(OLD, "a", "b", size=2)
    assert broken(groups.wait(10.0)) == {}


def test_a_member_that_never_came_may_be_known_to_be_dead():
    """The run has heard that its node is gone."""
    groups = Groups(epoch=4)
    groups.come_back(OLD, "a", size=2)
    groups.leave("b", "its node is down")
    assert "a" in broken(groups.wait(0.4))
    assert list(placements(groups.ask("a", quorum_id=OLD))) == ["a"]


def test_a_quorum_that_was_broken_stays_so():
    """Whoever has not heard of it is told."""
    groups = Groups(epoch=4)
    groups.come_back(OLD, "a", size=2)
    groups.arrive("b")
    told = groups.say("b", ReplicaStatus(OLD, 1, 2, 3, broken=True))
    assert list(broken(told)) == ["a"]


def test_who_comes_from_an_older_quorum_is_told_that_it_is_over():
    """The newest one counts, whoever comes first."""
    groups = Groups(epoch=4)
    groups.come_back(OLD, "a", size=2)
    told = groups.come_back(OLD + 1, "b", "c")
    assert list(broken(told)) == ["a"]
    groups.arrive("d")
    assert list(broken(groups.say("d", ReplicaStatus(OLD, 1, 2, 3, broken=False)))) == ["d"]


def test_a_newcomer_waits_until_all_members_are_back():
    """Then there is a switch, as always."""
    groups = Groups(epoch=4)
    groups.come_back(OLD, "a", size=2)
    groups.arrive("n")
    assert groups.say("n", ReplicaStatus(NO_QUORUM, 0, 0, 0, broken=False)) == {}
    assert groups.ask("n") == {}
    groups.arrive("b")
    groups.say("b", ReplicaStatus(OLD, 1, 2, 3, broken=False))
    told = groups.wait(0.05)
    assert {p.call for n in "ab" for p in told[n] if isinstance(p, ProposeSwitch)} == {0}


def test_a_member_that_reconnects_to_the_same_keeper_stays_one():
    """Its connection was replaced; a confirmed switch is told again."""
    groups = Groups()
    first = groups.form("a", "b")
    groups.arrive("c")
    groups.ask("c")
    groups.agree("a", "b")
    groups.arrive("a")
    told = groups.say("a", ReplicaStatus(first, 0, 2, 3, broken=False))
    assert told == {"a": [ConfirmSwitch(first, 2)]}


def test_what_is_proposed_is_taken_back_when_a_member_reconnects():
    """It may have missed it, and all agree anew."""
    groups = Groups()
    first = groups.form("a", "b")
    groups.arrive("c")
    groups.ask("c")
    groups.answer(3, "a", "b")
    groups.arrive("a")
    told = groups.say("a", ReplicaStatus(first, 0, 2, 3, broken=False))
    assert [m for n in "ab" for m in told[n]] == [ProposeSwitch(first, 0, 0)] * 2
