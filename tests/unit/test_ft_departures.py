"""How a replica group leaves the quorum as announced."""

import pytest
from ft_asks import Groups, broken, last, of, placements

from hpc_elastic.ft.messages import (
    EPOCH_SHIFT,
    CheckpointBeforeLeave,
    ConfirmSwitch,
    LeaveGranted,
    LeaveNotice,
    ProposeSwitch,
)


def notice(groups, *names, left_s=60.0):
    """Put these under notice."""
    for name in names:
        told = groups.say(name, LeaveNotice(left_s))
    return told


def test_who_is_under_notice_leaves_at_a_switch():
    """No step fails; it is told before that it will, and the others go on without it."""
    groups = Groups()
    first = groups.form("a", "b", "c")
    notice(groups, "b")
    call, confirms = groups.agree("a", "b", "c")
    assert [c.leaves for c in confirms.values()] == [False, True, False]
    groups.ask("b", quorum_id=first, call=call)
    assert last(groups.heard["b"], ConfirmSwitch) == groups.heard["b"][-1], "it is told to wait"
    groups.ask("a", quorum_id=first, call=call)
    told = groups.ask("c", quorum_id=first, call=call)
    assert told["b"] == [LeaveGranted()]
    assert list(placements(told)) == ["a", "c"]
    assert broken(groups.leave("b")) == {}


def test_the_last_members_are_told_that_the_state_leaves_with_them():
    """So that they save it before."""
    groups = Groups()
    first = groups.form("a", "b")
    notice(groups, "a", "b")
    call, confirms = groups.agree("a", "b")
    assert {(c.leaves, c.last) for c in confirms.values()} == {(True, True)}
    groups.ask("a", quorum_id=first, call=call)
    told = groups.ask("b", quorum_id=first, call=call)
    assert told == {"a": [LeaveGranted()], "b": [LeaveGranted()]}


def test_a_single_member_leaves_by_itself():
    """There is nobody to agree with but itself."""
    groups = Groups()
    first = groups.form("a")
    notice(groups, "a")
    call, _ = groups.agree("a")
    assert groups.ask("a", quorum_id=first, call=call) == {"a": [LeaveGranted()]}


@pytest.mark.parametrize(("left_s", "leaves"), [(60.0, False), (1.0, True)])
def test_a_newcomer_is_let_in_first_if_nobody_else_would_have_the_state(left_s, leaves):
    """If there is time for it; the member leaves at the switch after that."""
    groups = Groups()
    first = groups.form("a")
    notice(groups, "a", left_s=left_s)
    groups.arrive("b")
    groups.ask("b")
    call, confirms = groups.agree("a")
    assert confirms["a"].leaves == leaves
    told = groups.ask("a", quorum_id=first, call=call, step=4, is_saved=leaves)
    assert (told["a"] == [LeaveGranted()]) == leaves
    if not leaves:
        assert list(placements(told)) == ["a", "b"]
        assert of(groups.wait(0.1)["b"], ProposeSwitch).call == 0


def test_a_notice_after_the_confirmation_waits_for_the_next_switch():
    """Who was not told that it leaves may not have saved what is to be saved."""
    groups = Groups()
    first = groups.form("a", "b")
    groups.arrive("c")
    groups.ask("c")
    call, _ = groups.agree("a", "b")
    notice(groups, "b")
    groups.ask("a", quorum_id=first, call=call)
    told = groups.ask("b", quorum_id=first, call=call)
    assert list(placements(told)) == ["a", "b", "c"]


def test_who_is_left_alone_with_the_state_and_too_few_for_a_quorum_saves_it_first():
    """Its notice came when it was settled already that the other one leaves."""
    groups = Groups(min_replicas=2)
    first = groups.form("a", "b")
    notice(groups, "a")
    call, confirms = groups.agree("a", "b")
    assert not any(c.last for c in confirms.values())
    notice(groups, "b")
    groups.ask("a", quorum_id=first, call=call, step=4)
    assert groups.ask("b", quorum_id=first, call=call, step=4) == {"a": [LeaveGranted()]}
    assert groups.wait(0.1) == {"b": [CheckpointBeforeLeave()]}
    assert groups.ask("b", quorum_id=first, call=call + 1, step=4, is_saved=True) == {
        "b": [LeaveGranted()]
    }


def test_one_of_those_that_have_the_newest_state_saves_it():
    """They would write to the same place."""
    groups = Groups()
    first = groups.form("a", "b", "c")
    notice(groups, "a", "b")
    groups.leave("c")
    groups.ask("a", quorum_id=first, step=4)
    assert groups.ask("b", quorum_id=first, step=4) == {
        "a": [CheckpointBeforeLeave()],
        "b": [LeaveGranted()],
    }


def test_who_saved_is_let_in_if_somebody_has_come_meanwhile():
    """The newcomer takes the state from it, and it leaves at the next switch."""
    groups = Groups(min_replicas=2)
    first = groups.form("a", "b")
    groups.leave("b")
    groups.ask("a", quorum_id=first, step=4)
    assert notice(groups, "a") == {"a": [CheckpointBeforeLeave()]}
    groups.arrive("c")
    groups.ask("c")
    told = placements(groups.ask("a", quorum_id=first, step=4, is_saved=True))
    assert told["c"].heals
    assert not told["a"].heals


def test_who_saves_is_waited_for():
    """Nobody trains anew beside it, and loses what it has, because it asks a moment later."""
    groups = Groups()
    first = groups.form("a", "b")
    notice(groups, "a")
    groups.leave("b")
    assert groups.ask("a", quorum_id=first, step=4) == {"a": [CheckpointBeforeLeave()]}
    groups.arrive("c")
    assert placements(groups.ask("c")) == {}
    told = placements(groups.ask("a", quorum_id=first, step=4, is_saved=True))
    assert told["c"].heals
    assert not told["a"].heals


def test_a_group_under_notice_in_no_quorum_is_let_go_when_it_asks():
    """It does not join for a moment."""
    groups = Groups()
    groups.form("a")
    groups.arrive("b")
    notice(groups, "b")
    assert groups.ask("b") == {"b": [LeaveGranted()]}
    assert groups.ask("b") == {"b": [LeaveGranted()]}, "again, if the answer was lost"


def test_a_newcomer_that_gets_notice_while_it_waits_is_let_go():
    """The switch that was begun for it is taken back."""
    groups = Groups()
    first = groups.form("a")
    groups.arrive("b")
    groups.ask("b")
    told = notice(groups, "b")
    assert told == {"b": [LeaveGranted()], "a": [ProposeSwitch(first, 0, 0)]}


def test_members_under_notice_leave_a_broken_quorum_when_all_have_asked():
    """If another member has the state that they have."""
    groups = Groups()
    first = groups.form("a", "b", "c")
    notice(groups, "b")
    groups.leave("c")
    assert groups.ask("b", quorum_id=first, step=3, lineage="x") == {}
    told = groups.ask("a", quorum_id=first, step=3, lineage="x")
    assert told["b"] == [LeaveGranted()]
    assert list(placements(told)) == ["a"]


def test_a_member_under_notice_that_alone_has_the_newest_state_gives_it_first():
    """It is placed once more, and leaves at the next switch."""
    groups = Groups()
    first = groups.form("a", "b", "c")
    notice(groups, "b")
    groups.leave("c")
    groups.ask("b", quorum_id=first, step=4, lineage="y")
    told = placements(groups.ask("a", quorum_id=first, step=3, lineage="x"))
    assert told["a"].heals
    assert told["b"].first_of == (0,)


def test_if_all_that_live_are_under_notice_the_newest_of_them_are_the_last():
    """They save; the others have nothing to save."""
    groups = Groups()
    first = groups.form("a", "b", "c")
    notice(groups, "a", "b")
    groups.leave("c")
    groups.ask("a", quorum_id=first, step=3, lineage="x")
    told = groups.ask("b", quorum_id=first, step=4, lineage="y")
    assert told == {"a": [LeaveGranted()], "b": [CheckpointBeforeLeave()]}


def test_who_has_no_time_left_is_not_kept_waiting():
    """For members that live and do not ask."""
    groups = Groups()
    first = groups.form("a", "b", "c")
    notice(groups, "b", left_s=8.0)
    groups.leave("c")
    groups.ask("b", quorum_id=first, step=4)
    assert groups.wait(2.0).get("b", [])[-1:] != [LeaveGranted()]
    assert groups.wait(2.0)["b"] == [LeaveGranted()]


def test_who_has_no_time_left_saves_what_a_member_that_has_not_come_may_have_too():
    """The keeper before may have been that member's node, and taken with it."""
    groups = Groups(epoch=2)
    groups.come_back(7, "b", size=2, broken=True)
    notice(groups, "b", left_s=3.0)
    groups.ask("b", quorum_id=7, call=4, step=4)
    assert last(groups.heard["b"], (CheckpointBeforeLeave, LeaveGranted)) == CheckpointBeforeLeave()


def test_who_came_to_the_switch_of_the_keeper_before_saves_all_the_same():
    """It was to stay for a newcomer's sake, which is under notice by now as well."""
    old = (3 << EPOCH_SHIFT) + 1
    groups = Groups(epoch=4)
    groups.come_back(old, "a")
    notice(groups, "a")
    groups.ask("a", quorum_id=old, call=4, step=5)
    assert groups.wait(0.05) == {"a": [CheckpointBeforeLeave()]}
    assert groups.ask("a", quorum_id=old, call=0, step=6, is_saved=True) == {"a": [LeaveGranted()]}
