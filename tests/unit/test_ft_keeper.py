"""What a keeper tells the replica groups, and what it makes of what they say."""

from dataclasses import replace

from ft_asks import Groups, ask, broken, of, placements, quorum_of

from hpc_elastic.ft.lighthouse_state import LighthouseState, ReplicaMessage
from hpc_elastic.ft.messages import (
    ConfirmSwitch,
    Hello,
    ProposeSwitch,
    QuorumAborted,
    QuorumResults,
    Shutdown,
    SwitchVote,
    WorkersLost,
)

# ---- a quorum breaks --------------------------------------------------------------------------


def test_all_members_are_told_at_once_that_one_is_lost():
    """Not only its neighbours notice; the reason names it."""
    groups = Groups()
    groups.form("a", "b", "c")
    assert broken(groups.leave("b", "killed")) == {"a": "b: killed", "c": "b: killed"}


def test_members_are_told_once():
    """However many reasons there are."""
    groups = Groups()
    groups.form("a", "b", "c")
    groups.leave("b")
    assert groups.leave("c") == {}


def test_a_stopped_member_breaks_the_quorum_and_is_told_so():
    """When it goes on it finds out before it waits for the others."""
    groups = Groups()
    groups.form("a", "b")
    assert broken(groups.say("b", WorkersLost("stopped"))) == {"a": "b: stopped", "b": "b: stopped"}


def test_what_one_member_reports_is_told_the_others():
    """They would wait for it in their collectives."""
    groups = Groups()
    first = groups.form("a", "b", "c")
    told = groups.say("a", QuorumAborted(first, "reset by peer"))
    assert broken(told) == {"b": "a: reset by peer", "c": "a: reset by peer"}


def test_a_report_about_an_older_quorum_is_ignored():
    """It crossed the news of the new one."""
    groups = Groups()
    first = groups.form("a", "b")
    groups.say("a", QuorumAborted(first, "x"))
    groups.ask("a", "b", quorum_id=first)
    assert groups.say("b", QuorumAborted(first, "x")) == {}


def test_a_newcomer_that_goes_away_breaks_nothing():
    """It was no member."""
    groups = Groups()
    groups.form("a", "b")
    groups.arrive("c")
    groups.ask("c")
    assert broken(groups.leave("c")) == {}


def test_messages_of_strangers_are_ignored():
    """And those that no group sends to a keeper."""
    groups = Groups("a")
    assert groups.say("stranger", ask()) == {}
    assert groups.say("a", Hello(0, 1, 1)) == {}


def test_an_ask_that_is_repeated_is_answered_again():
    """The connection was replaced before the answer came; a new quorum would cost a step."""
    groups = Groups()
    first = groups.form("a", "b", number=7)
    told = groups.ask("a", number=7)
    assert quorum_of(told) == first
    assert list(told) == ["a"]
    assert of(told["a"], QuorumResults).number == 7


def test_a_later_ask_is_not_taken_for_one_that_is_repeated():
    """The group had given up the earlier one, and does not take its answer any more."""
    groups = Groups()
    first = groups.form("a", "b", number=7)
    assert "b" in broken(groups.ask("a", number=8))
    groups.ask("b", quorum_id=first, number=3)
    assert [groups.heard[n][-1].number for n in "ab"] == [8, 3]


def test_another_process_under_the_same_name_is_not_taken_for_the_member():
    """Its ask differs, so the quorum is over."""
    groups = Groups()
    groups.form("a", "b")
    told = groups.say("a", ask(store="other:1"))
    assert "b" in broken(told)


# ---- somebody joins ---------------------------------------------------------------------------


def test_a_newcomer_costs_no_step():
    """All members ask at one confirmed call, and it is taken in there."""
    groups = Groups()
    first = groups.form("a", "b")
    groups.arrive("c")
    told = groups.ask("c")
    assert [of(told[n], ProposeSwitch) for n in "ab"] == [ProposeSwitch(first, 1, 0)] * 2
    call, confirms = groups.agree("a", "b")
    assert confirms == {n: ConfirmSwitch(first, 2) for n in "ab"}
    groups.ask("a", quorum_id=first, call=call, step=5, lineage="x")
    told = placements(groups.ask("b", quorum_id=first, call=call, step=5, lineage="x"))
    assert list(told) == ["a", "b", "c"]
    assert told["c"].heals
    assert groups.heard["a"] == [m for m in groups.heard["a"] if not isinstance(m, QuorumAborted)]


def test_a_newcomer_waits_as_long_as_a_call_takes():
    """Calls may be an hour apart; nobody is dropped, nothing is proposed again."""
    groups = Groups()
    first = groups.form("a", "b")
    groups.arrive("c")
    groups.ask("c")
    call, _ = groups.agree("a", "b")
    assert set(groups.wait(4 * 3600.0)) == {"c"}
    groups.ask("a", quorum_id=first, call=call)
    assert set(groups.wait(3600.0)) == {"c", "a"}
    assert list(placements(groups.ask("b", quorum_id=first, call=call))) == ["a", "b", "c"]


def test_a_proposal_is_taken_back_when_the_newcomer_is_gone():
    """Nobody waits at it for nothing."""
    groups = Groups()
    first = groups.form("a", "b")
    groups.arrive("c")
    groups.ask("c")
    told = groups.leave("c")
    assert [of(told[n], ProposeSwitch) for n in "ab"] == [ProposeSwitch(first, 0, 0)] * 2


def test_a_proposal_is_taken_back_when_a_member_does_not_answer():
    """It may hold the interpreter's lock; it stays a member, and is asked again later."""
    groups = Groups()
    first = groups.form("a", "b")
    groups.arrive("c")
    groups.ask("c")
    groups.answer(1, "a")
    told = groups.wait(5.1)
    assert of(told["a"], ProposeSwitch) == ProposeSwitch(first, 0, 0)
    assert broken(told) == {}
    assert of(groups.wait(0.6)["b"], ProposeSwitch).call == 0


def test_an_ask_outside_of_the_switch_breaks_the_quorum():
    """A step failed: the others would wait for who asks."""
    groups = Groups()
    first = groups.form("a", "b")
    groups.arrive("c")
    groups.ask("c")
    call, _ = groups.agree("a", "b")
    assert "b" in broken(groups.ask("a", quorum_id=first, call=call - 1, commit_failures=1))


def test_a_quorum_that_breaks_takes_newcomers_in():
    """The switch is void."""
    groups = Groups()
    first = groups.form("a", "b")
    groups.arrive("c")
    groups.ask("c")
    groups.leave("a")
    assert list(placements(groups.ask("b", quorum_id=first, call=9))) == ["b", "c"]


def test_a_member_that_is_done_is_left_out_of_the_switch():
    """It does not answer any more."""
    groups = Groups()
    groups.form("a", "b")
    groups.arrive("c")
    groups.ask("c")
    groups.answer(3, "a")
    assert of(groups.say("b", Shutdown())["a"], ProposeSwitch).call == 4


def test_the_others_are_told_a_while_after_a_member_was_done():
    """Its node may have vanished before its connections were closed; the last bytes are there."""
    groups = Groups()
    groups.form("a", "b", "c")
    groups.say("b", Shutdown())
    assert groups.wait(1.9) == {}
    assert broken(groups.wait(0.2)) == {"a": "b is done", "c": "b is done"}


def test_sends_are_plain_values():
    """So that a driver can compare, queue and print them."""
    keeper = LighthouseState(0)
    keeper.arrived("a", 0.0)
    keeper.said("a", ask(), 0.0)
    (send,) = keeper.tick(1.0)
    assert isinstance(send.message, QuorumResults)
    assert send == replace(send)
    assert send == ReplicaMessage("a", send.message)
    assert keeper.said("a", SwitchVote(99, 1, True, 0, 0.0), 1.0) == []
