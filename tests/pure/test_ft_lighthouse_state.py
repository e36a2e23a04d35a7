"""LighthouseState: aborts, switches, leaving, and the quorum of an earlier lighthouse."""

import pytest
from ft_groups import Groups, aborted, formed, last, of, quorum_of, request, results, with_newcomer

from hpc_elastic.ft.lighthouse_state import LighthouseState, ReplicaMessage
from hpc_elastic.ft.messages import (
    NO_QUORUM,
    TERM_SHIFT,
    CheckpointBeforeLeave,
    ConfirmSwitch,
    Hello,
    LeaveGranted,
    LeaveNotice,
    ProposeSwitch,
    QuorumAborted,
    QuorumResults,
    ReplicaStatus,
    Shutdown,
    SwitchRequest,
    SwitchVote,
    WorkersLost,
)

# ---- aborts ------------------------------------------------------------------------------------


def test_loss_of_a_member_is_sent_to_all_others():
    """Not only to its ring neighbours; the reason names it."""
    groups, _ = formed("a", "b", "c")
    assert aborted(groups.disconnect("b", "killed")) == {"a": "b: killed", "c": "b: killed"}


def test_abort_is_sent_once():
    """The second loss in one quorum sends nothing."""
    groups, _ = formed("a", "b", "c")
    groups.disconnect("b")
    assert groups.disconnect("c") == {}


def test_abort_is_sent_to_a_stopped_member_too():
    """It learns of the abort before it waits for the others."""
    groups, _ = formed("a", "b")
    assert aborted(groups.send("b", WorkersLost("stopped"))) == {
        "a": "b: stopped",
        "b": "b: stopped",
    }


def test_report_of_a_member_is_sent_to_the_others():
    """They would wait for it in their collectives."""
    groups, first = formed("a", "b", "c")
    sent = groups.send("a", QuorumAborted(first, "reset by peer"))
    assert aborted(sent) == {"b": "a: reset by peer", "c": "a: reset by peer"}


def test_report_of_an_older_quorum_is_ignored():
    """It crossed the results of the new one."""
    groups, first = formed("a", "b")
    groups.send("a", QuorumAborted(first, "x"))
    groups.request("a", "b", quorum_id=first)
    assert groups.send("b", QuorumAborted(first, "x")) == {}


def test_loss_of_a_newcomer_aborts_nothing():
    """It is no member."""
    groups, _ = with_newcomer()
    assert aborted(groups.disconnect("c")) == {}


def test_messages_of_unknown_groups_are_ignored():
    """And those that no group sends to a lighthouse."""
    groups = Groups("a")
    assert groups.send("stranger", request()) == {}
    assert groups.send("a", Hello(0, 1, 1)) == {}


def test_repeated_request_gets_the_same_result():
    """The connection was replaced before the result came; a new quorum would cost a step."""
    groups, first = formed("a", "b", number=7)
    sent = groups.request("a", number=7)
    assert quorum_of(sent) == first
    assert list(sent) == ["a"]
    assert of(sent["a"], QuorumResults).number == 7


def test_later_request_is_no_repeated_one():
    """The group had cancelled the earlier one, and accepts no result of it."""
    groups, first = formed("a", "b", number=7)
    assert "b" in aborted(groups.request("a", number=8))
    groups.request("b", quorum_id=first, number=3)
    assert [groups.received[n][-1].number for n in "ab"] == [8, 3]


def test_another_process_of_the_same_name_is_no_member():
    """Its request differs, so the quorum ends."""
    groups, _ = formed("a", "b")
    sent = groups.send("a", request(store="other:1"))
    assert "b" in aborted(sent)


# ---- switches --------------------------------------------------------------------------------


def test_a_member_that_has_caught_up_gets_its_switch():
    """No step fails for it; a request from an older quorum counts for nothing."""
    groups, first = formed("a", "b")
    assert groups.send("b", SwitchRequest(first - 1)) == {}
    sent = groups.send("b", SwitchRequest(first))
    assert [of(sent[n], ProposeSwitch) for n in "ab"] == [ProposeSwitch(first, 1, 0)] * 2
    step, confirms = groups.agree("a", "b")
    assert set(confirms) == {"a", "b"} and not any(c.leaves for c in confirms.values())
    assert quorum_of(groups.request("a", "b", quorum_id=first, quorum_step=step)) == first + 1
    assert groups.send("b", SwitchRequest(first)) == {}


def test_nobody_catches_up_with_a_member_under_notice():
    """It has to give its state before it leaves, so all wait for those that heal."""
    for is_leaving in (False, True):
        groups = Groups("a", "b")
        if is_leaving:
            groups.send("a", LeaveNotice(60.0))
        groups.request("b", catch_up=True)
        groups.request("a", step=3, state_version="x", catch_up=True)
        found = of(groups.received["b"], QuorumResults).ranks[0]
        assert found.heals
        assert found.catch_up is not is_leaving


def test_newcomer_joins_at_a_switch():
    """All members request at one confirmed step, and no step fails."""
    groups, first = formed("a", "b")
    groups.connect("c")
    sent = groups.request("c")
    assert [of(sent[n], ProposeSwitch) for n in "ab"] == [ProposeSwitch(first, 1, 0)] * 2
    step, confirms = groups.agree("a", "b")
    assert confirms == {n: ConfirmSwitch(first, 2) for n in "ab"}
    groups.request("a", quorum_id=first, quorum_step=step, step=5, state_version="x")
    sent = results(
        groups.request("b", quorum_id=first, quorum_step=step, step=5, state_version="x")
    )
    assert list(sent) == ["a", "b", "c"]
    assert sent["c"].heals
    assert groups.received["a"] == [
        m for m in groups.received["a"] if not isinstance(m, QuorumAborted)
    ]


def test_confirmed_switch_waits_for_long_steps():
    """Steps may be an hour apart; no member is dropped, and nothing is proposed again."""
    groups, first = with_newcomer()
    step, _ = groups.agree("a", "b")
    assert set(groups.wait(4 * 3600.0)) == {"c"}
    groups.request("a", quorum_id=first, quorum_step=step)
    assert set(groups.wait(3600.0)) == {"c", "a"}
    assert list(results(groups.request("b", quorum_id=first, quorum_step=step))) == ["a", "b", "c"]


def test_proposal_is_withdrawn_if_the_newcomer_is_lost():
    """No member waits at it in vain."""
    groups, first = with_newcomer()
    sent = groups.disconnect("c")
    assert [of(sent[n], ProposeSwitch) for n in "ab"] == [ProposeSwitch(first, 0, 0)] * 2


def test_proposal_is_withdrawn_if_a_member_does_not_answer():
    """It may hold the interpreter lock; it stays a member, and is asked again later."""
    groups, first = with_newcomer()
    groups.vote(1, "a")
    sent = groups.wait(5.1)
    assert of(sent["a"], ProposeSwitch) == ProposeSwitch(first, 0, 0)
    assert aborted(sent) == {}
    assert of(groups.wait(0.6)["b"], ProposeSwitch).quorum_step == 0


def test_request_outside_of_the_switch_aborts_the_quorum():
    """Its step failed, and the others would wait for it."""
    groups, first = with_newcomer()
    step, _ = groups.agree("a", "b")
    assert "b" in aborted(
        groups.request("a", quorum_id=first, quorum_step=step - 1, commit_failures=1)
    )


def test_quorum_after_an_abort_includes_newcomers():
    """The switch is void."""
    groups, first = with_newcomer()
    groups.disconnect("a")
    assert list(results(groups.request("b", quorum_id=first, quorum_step=9))) == ["b", "c"]


def test_switch_is_void_when_a_member_is_done():
    """It does not answer any more; all others request after its last step."""
    groups, first = with_newcomer()
    groups.vote(3, "a")
    ended = groups.send("b", Shutdown(first, 3))
    assert of(ended["a"], QuorumAborted).after_step == 3
    assert list(results(groups.request("a", quorum_id=first, quorum_step=4))) == ["a", "c"]


def test_quorum_is_aborted_some_time_after_a_shutdown():
    """The node may be lost with open connections; the last bytes have arrived by then."""
    groups, first = formed("a", "b", "c")
    ended = groups.send("b", Shutdown(first, 5))
    assert {of(ended[r], QuorumAborted).after_step for r in "ac"} == {5}
    assert groups.wait(1.9) == {}
    assert aborted(groups.wait(0.2)) == {"a": "b is done", "c": "b is done"}
    assert groups.wait(9.0) == {}


@pytest.mark.parametrize("loss", ["report", "disconnect"])
def test_a_failure_after_a_shutdown_aborts_the_others_at_once(loss):
    """They may wait for that member in the step that they complete."""
    groups, first = formed("a", "b", "c")
    groups.send("b", Shutdown(first, 5))
    if loss == "report":
        sends = groups.send("a", QuorumAborted(first, "an error"))
    else:
        sends = groups.disconnect("a")
    assert of(sends["c"], QuorumAborted).after_step == -1


def test_a_shutdown_in_the_middle_of_another_quorum_aborts_it():
    """The member has completed no step of this one."""
    groups, first = formed("a", "b")
    ended = groups.send("b", Shutdown(first - 1, 5))
    assert of(ended["a"], QuorumAborted).after_step == -1


def test_result_is_formed_on_a_tick():
    """Of a group that is alone; votes on an unknown quorum are ignored."""
    state = LighthouseState(0)
    state.on_connect("a", 0.0)
    state.on_message("a", request(), 0.0)
    (send,) = state.on_tick(1.0)
    assert isinstance(send.message, QuorumResults)
    assert send == ReplicaMessage("a", send.message)
    assert state.on_message("a", SwitchVote(99, 1, True, 0, 0.0), 1.0) == []


# ---- the quorum of an earlier lighthouse -------------------------------------------------------


OLD = (3 << TERM_SHIFT) + 1
"""A quorum of an earlier lighthouse."""


def adopted(*names, waited_s=0.0, **given):
    """Let members of that quorum connect to a new lighthouse."""
    groups = Groups(term=4)
    groups.reconnect(OLD, *names, **given)
    if waited_s:
        groups.wait(waited_s)
    return groups


def test_quorum_of_an_earlier_lighthouse_continues():
    """Its members are asked for their steps, and earlier proposals are withdrawn."""
    groups = Groups(term=4)
    assert groups.reconnect(OLD, "a", "b") == {}
    number = (4 << TERM_SHIFT) + 1
    assert groups.wait(0.05) == {n: [ProposeSwitch(OLD, number, 0)] for n in "ab"}
    assert groups.vote(5, "a") == {}
    assert {n: sent[-1] for n, sent in groups.vote(5, "b").items()} == {
        n: ProposeSwitch(OLD, 0, 0) for n in "ab"
    }
    assert groups.wait(3600.0) == {}


def test_proposal_is_not_withdrawn_while_one_member_may_have_a_confirmation():
    """That member does not answer, but requests at the confirmed step; the others follow."""
    groups = adopted("a", "b", "c", waited_s=0.05)
    groups.vote(5, "a", "b")
    assert groups.wait(1.0) == {}
    sent = groups.request("c", quorum_id=OLD, quorum_step=6)
    assert [of(sent[n], ProposeSwitch).quorum_step for n in "ab"] == [6, 6]


def test_a_step_that_only_some_members_have_confirmed_is_the_one_of_all():
    """However long it takes to come there; no proposal is withdrawn, and no step fails."""
    groups = adopted("a", "b", "c", waited_s=0.05)
    question = last(groups.received["c"], ProposeSwitch)
    sent = groups.send("c", SwitchVote(OLD, question.number, False, 5, 0.0, confirmed_step=9))
    number = question.number + 1
    assert sent == {n: [ProposeSwitch(OLD, number, 9)] for n in "abc"}
    assert groups.wait(5.1) == {n: [ProposeSwitch(OLD, number + 1, 9)] for n in "abc"}
    assert groups.vote(8, "a", "b", "c") == {n: [ConfirmSwitch(OLD, number + 1)] for n in "abc"}
    sent = groups.request("a", "b", "c", quorum_id=OLD, quorum_step=9)
    assert list(results(sent)) == ["a", "b", "c"]


def test_member_that_reconnects_is_asked_again():
    """A proposal that another member may have confirmed is not withdrawn."""
    groups = adopted("a", "b", waited_s=0.05)
    question = last(groups.received["a"], ProposeSwitch)
    assert groups.reconnect(OLD, "a", size=2) == {"a": [question]}


def test_member_that_does_not_answer_delays_the_others_briefly():
    """It may hold the interpreter lock."""
    groups = adopted("a", "b", waited_s=0.05)
    groups.vote(5, "a")
    assert groups.wait(5.1) == {n: [ProposeSwitch(OLD, 0, 0)] for n in "ab"}


def test_proposal_is_not_withdrawn_before_all_have_reconnected():
    """One of them may have a confirmation."""
    groups = adopted("a", size=2)
    assert groups.wait(0.05) == {}


def test_half_confirmed_switch_is_carried_out():
    """One member requests without a failure: so do the others, at the same step."""
    groups = adopted("a", "b")
    assert groups.request("a", quorum_id=OLD, quorum_step=7, step=7) == {}
    sent = groups.wait(0.05)
    number = (4 << TERM_SHIFT) + 1
    assert sent == {"b": [ProposeSwitch(OLD, number, 7)]}
    assert groups.vote(6, "b") == {"b": [ConfirmSwitch(OLD, number)]}
    sent = groups.request("b", quorum_id=OLD, quorum_step=7, step=7)
    assert list(results(sent)) == ["a", "b"]


def test_no_vote_of_a_member_that_has_requested_aborts():
    """It requests at that step itself, and votes that it has started it."""
    groups = adopted("a", "b", "c", waited_s=0.05)
    groups.request("a", "b", quorum_id=OLD, quorum_step=7)
    assert aborted(groups.vote(7, "b", ok=False)) == {}
    assert "c" in groups.vote(6, "c")


def test_member_past_the_step_of_a_request_aborts_the_quorum():
    """It waits in a collective for the one that requests."""
    groups = adopted("a", "b", waited_s=0.05)
    groups.request("a", quorum_id=OLD, quorum_step=7)
    assert "b" in aborted(groups.vote(7, "b", ok=False))


def test_member_that_does_not_reconnect_is_lost():
    """After the time-out, the others are notified."""
    groups = Groups(term=4, reconnect_timeout_s=5.0)
    groups.reconnect(OLD, "a", "b", size=3)
    assert groups.wait(4.9) == {}
    sent = groups.wait(0.2)
    assert aborted(sent).keys() == {"a", "b"}
    groups.request("a", quorum_id=OLD)
    assert list(results(groups.request("b", quorum_id=OLD))) == ["a", "b"]


def test_missing_member_of_an_aborted_quorum_delays_the_next_briefly():
    """Most likely it caused the abort, and was lost with the lighthouse."""
    groups = Groups(term=4, reconnect_timeout_s=5.0, short_reconnect_timeout_s=1.0)
    groups.reconnect(OLD, "a", "b", size=3, is_aborted=True)
    groups.request("a", "b", quorum_id=OLD, commit_failures=1)
    assert results(groups.wait(0.9)) == {}
    assert list(results(groups.wait(0.2))) == ["a", "b"]


def test_member_that_left_with_the_lighthouse_delays_the_others_briefly():
    """The others request as agreed, which the new lighthouse does not know."""
    groups = Groups(term=4, reconnect_timeout_s=5.0, short_reconnect_timeout_s=1.0)
    groups.reconnect(OLD, "a", size=2)
    groups.request("a", quorum_id=OLD, quorum_step=7)
    assert results(groups.wait(0.9)) == {}
    assert list(results(groups.wait(0.2))) == ["a"]


def test_lost_leader_is_not_waited_for():
    """All members have reconnected but as many as are known to be dead."""
    state = LighthouseState(4, lost_members=["c"])
    groups = Groups(state=state)
    groups.reconnect(OLD, "a", "b", size=3)
    assert "c" in aborted(groups.wait(0.4))["a"]
    groups.request("a", quorum_id=OLD)
    assert list(results(groups.request("b", quorum_id=OLD))) == ["a", "b"]


def test_dead_leader_that_had_left_before_aborts_nothing():
    """All members of the quorum have reconnected."""
    groups = Groups(state=LighthouseState(4, lost_members=["c"]))
    groups.reconnect(OLD, "a", "b", size=2)
    assert aborted(groups.wait(10.0)) == {}


def test_member_that_never_connected_may_be_known_to_be_dead():
    """The run reports that its node is lost."""
    groups = adopted("a", size=2)
    groups.disconnect("b", "its node is down")
    assert "a" in aborted(groups.wait(0.4))
    assert list(results(groups.request("a", quorum_id=OLD))) == ["a"]


def test_abort_of_an_adopted_quorum_is_sent_on():
    """To the members that do not know of it."""
    groups = adopted("a", size=2)
    groups.connect("b")
    sent = groups.send("b", ReplicaStatus(OLD, 1, 2, 3, is_aborted=True))
    assert list(aborted(sent)) == ["a"]


def test_member_of_an_older_quorum_is_notified():
    """The newest quorum counts, in any order of reports."""
    groups = adopted("a", size=2)
    sent = groups.reconnect(OLD + 1, "b", "c")
    assert list(aborted(sent)) == ["a"]
    groups.connect("d")
    assert list(aborted(groups.send("d", ReplicaStatus(OLD, 1, 2, 3, is_aborted=False)))) == ["d"]


def test_newcomer_waits_until_all_members_have_reconnected():
    """Then there is a switch, as always."""
    groups = adopted("a", size=2)
    groups.connect("n")
    assert groups.send("n", ReplicaStatus(NO_QUORUM, 0, 0, 0, is_aborted=False)) == {}
    assert groups.request("n") == {}
    groups.connect("b")
    groups.send("b", ReplicaStatus(OLD, 1, 2, 3, is_aborted=False))
    sent = groups.wait(0.05)
    assert {p.quorum_step for n in "ab" for p in sent[n] if isinstance(p, ProposeSwitch)} == {0}


@pytest.mark.parametrize("others", [(), ("b",)])
def test_another_process_of_the_same_name_ends_an_adopted_quorum(others):
    """Its request is of no quorum, so the process that was a member is gone; the next one forms."""
    groups = adopted("a", *others, waited_s=0.05)
    groups.connect("a")
    groups.send("a", ReplicaStatus(NO_QUORUM, 0, 0, 0, is_aborted=False))
    sent = groups.send("a", request(store="other:1"))
    assert aborted(sent).keys() >= set(others)
    sent = groups.request(*others, quorum_id=OLD) if others else sent
    assert quorum_of(sent or groups.wait(0.1)) > OLD


def test_reconnected_member_gets_the_confirmation_again():
    """Its connection was replaced; it stays a member."""
    groups, first = with_newcomer()
    groups.agree("a", "b")
    groups.connect("a")
    sent = groups.send("a", ReplicaStatus(first, 0, 2, 3, is_aborted=False))
    assert sent == {"a": [ConfirmSwitch(first, 2)]}


def test_proposal_is_withdrawn_if_a_member_reconnects():
    """It may have missed it, and all agree again."""
    groups, first = with_newcomer()
    groups.vote(3, "a", "b")
    groups.connect("a")
    sent = groups.send("a", ReplicaStatus(first, 0, 2, 3, is_aborted=False))
    assert [m for n in "ab" for m in sent[n]] == [ProposeSwitch(first, 0, 0)] * 2


# ---- groups under notice leave --------------------------------------------------------------


def notice(groups, *names, left_s=60.0):
    """Put these under notice."""
    for name in names:
        sent = groups.send(name, LeaveNotice(left_s))
    return sent


def test_member_under_notice_leaves_at_a_switch():
    """No step fails; the confirmation announces it, and the others go on."""
    groups, first = formed("a", "b", "c")
    notice(groups, "b")
    step, confirms = groups.agree("a", "b", "c")
    assert [c.leaves for c in confirms.values()] == [False, True, False]
    groups.request("b", quorum_id=first, quorum_step=step)
    assert last(groups.received["b"], ConfirmSwitch) == groups.received["b"][-1], "it waits"
    groups.request("a", quorum_id=first, quorum_step=step)
    sent = groups.request("c", quorum_id=first, quorum_step=step)
    assert sent["b"] == [LeaveGranted()]
    assert list(results(sent)) == ["a", "c"]
    assert aborted(groups.disconnect("b")) == {}


def test_last_members_learn_that_the_state_leaves_with_them():
    """So that they save it before."""
    groups, first = formed("a", "b")
    notice(groups, "a", "b")
    step, confirms = groups.agree("a", "b")
    assert {(c.leaves, c.last) for c in confirms.values()} == {(True, True)}
    groups.request("a", quorum_id=first, quorum_step=step)
    sent = groups.request("b", quorum_id=first, quorum_step=step)
    assert sent == {"a": [LeaveGranted()], "b": [LeaveGranted()]}


def test_single_member_leaves():
    """At a switch with itself."""
    groups, first = formed("a")
    notice(groups, "a")
    step, _ = groups.agree("a")
    assert groups.request("a", quorum_id=first, quorum_step=step) == {"a": [LeaveGranted()]}


@pytest.mark.parametrize(("left_s", "leaves"), [(60.0, False), (1.0, True)])
def test_newcomer_joins_before_the_last_member_leaves(left_s, leaves):
    """If there is time for it; the member leaves at the switch after that."""
    groups, first = formed("a")
    notice(groups, "a", left_s=left_s)
    groups.connect("b")
    groups.request("b")
    step, confirms = groups.agree("a")
    assert confirms["a"].leaves == leaves
    sent = groups.request("a", quorum_id=first, quorum_step=step, step=4, is_saved=leaves)
    assert (sent["a"] == [LeaveGranted()]) == leaves
    if not leaves:
        assert list(results(sent)) == ["a", "b"]
        assert of(groups.wait(0.1)["b"], ProposeSwitch).quorum_step == 0


def test_notice_after_the_confirmation_waits_for_the_next_switch():
    """A member that does not know that it leaves may not have saved."""
    groups, first = with_newcomer()
    step, _ = groups.agree("a", "b")
    notice(groups, "b")
    groups.request("a", quorum_id=first, quorum_step=step)
    sent = groups.request("b", quorum_id=first, quorum_step=step)
    assert list(results(sent)) == ["a", "b", "c"]


def test_last_member_below_the_minimum_saves_before_it_leaves():
    """Its notice came after the confirmation that the other one leaves."""
    groups = Groups(min_replicas=2)
    first = groups.form("a", "b")
    notice(groups, "a")
    step, confirms = groups.agree("a", "b")
    assert not any(c.last for c in confirms.values())
    notice(groups, "b")
    groups.request("a", quorum_id=first, quorum_step=step, step=4)
    assert groups.request("b", quorum_id=first, quorum_step=step, step=4) == {"a": [LeaveGranted()]}
    assert groups.wait(0.1) == {"b": [CheckpointBeforeLeave()]}
    assert groups.request("b", quorum_id=first, quorum_step=step + 1, step=4, is_saved=True) == {
        "b": [LeaveGranted()]
    }


def test_one_of_the_members_with_the_newest_state_saves():
    """All would write to the same place."""
    groups, first = formed("a", "b", "c")
    notice(groups, "a", "b")
    groups.disconnect("c")
    groups.request("a", quorum_id=first, step=4)
    assert groups.request("b", quorum_id=first, step=4) == {
        "a": [CheckpointBeforeLeave()],
        "b": [LeaveGranted()],
    }


def test_newcomer_joins_the_member_that_has_saved():
    """It heals from that member, which leaves at the next switch."""
    groups = Groups(min_replicas=2)
    first = groups.form("a", "b")
    groups.disconnect("b")
    groups.request("a", quorum_id=first, step=4)
    assert notice(groups, "a") == {"a": [CheckpointBeforeLeave()]}
    groups.connect("c")
    groups.request("c")
    sent = results(groups.request("a", quorum_id=first, step=4, is_saved=True))
    assert sent["c"].heals
    assert not sent["a"].heals


def test_member_that_saves_is_waited_for():
    """No group starts from scratch meanwhile."""
    groups, first = formed("a", "b")
    notice(groups, "a")
    groups.disconnect("b")
    assert groups.request("a", quorum_id=first, step=4) == {"a": [CheckpointBeforeLeave()]}
    groups.connect("c")
    assert results(groups.request("c")) == {}
    sent = results(groups.request("a", quorum_id=first, step=4, is_saved=True))
    assert sent["c"].heals
    assert not sent["a"].heals


def test_newcomer_under_notice_leaves_when_it_requests():
    """It does not join for a moment."""
    groups, _ = formed("a")
    groups.connect("b")
    notice(groups, "b")
    assert groups.request("b") == {"b": [LeaveGranted()]}
    assert groups.request("b") == {"b": [LeaveGranted()]}, "again, if the answer was lost"


def test_waiting_newcomer_leaves_on_notice():
    """The switch that was started for it is withdrawn."""
    groups, first = formed("a")
    groups.connect("b")
    groups.request("b")
    sent = notice(groups, "b")
    assert sent == {"b": [LeaveGranted()], "a": [ProposeSwitch(first, 0, 0)]}


def test_members_leave_an_aborted_quorum_once_all_have_requested():
    """If another member has their state."""
    groups, first = formed("a", "b", "c")
    notice(groups, "b")
    groups.disconnect("c")
    assert groups.request("b", quorum_id=first, step=3, state_version="x") == {}
    sent = groups.request("a", quorum_id=first, step=3, state_version="x")
    assert sent["b"] == [LeaveGranted()]
    assert list(results(sent)) == ["a"]


def test_only_member_with_the_newest_state_lets_others_heal_first():
    """It is a member once more, and leaves at the next switch."""
    groups, first = formed("a", "b", "c")
    notice(groups, "b")
    groups.disconnect("c")
    groups.request("b", quorum_id=first, step=4, state_version="y")
    sent = results(groups.request("a", quorum_id=first, step=3, state_version="x"))
    assert sent["a"].heals
    assert sent["b"].first_source_of == (0,)


def test_newest_of_the_members_under_notice_saves():
    """The others have nothing to save."""
    groups, first = formed("a", "b", "c")
    notice(groups, "a", "b")
    groups.disconnect("c")
    groups.request("a", quorum_id=first, step=3, state_version="x")
    sent = groups.request("b", quorum_id=first, step=4, state_version="y")
    assert sent == {"a": [LeaveGranted()], "b": [CheckpointBeforeLeave()]}


def test_member_without_time_leaves_at_once():
    """It does not wait for live members that do not request."""
    groups, first = formed("a", "b", "c")
    notice(groups, "b", left_s=8.0)
    groups.disconnect("c")
    groups.request("b", quorum_id=first, step=4)
    assert groups.wait(2.0).get("b", [])[-1:] != [LeaveGranted()]
    assert groups.wait(2.0)["b"] == [LeaveGranted()]


def test_member_without_time_saves_a_state_that_an_absent_member_may_have():
    """The earlier lighthouse may have been on that member's node."""
    groups = Groups(term=2)
    groups.reconnect(7, "b", size=2, is_aborted=True)
    notice(groups, "b", left_s=3.0)
    groups.request("b", quorum_id=7, quorum_step=4, step=4)
    assert (
        last(groups.received["b"], (CheckpointBeforeLeave, LeaveGranted)) == CheckpointBeforeLeave()
    )


def test_last_member_saves_at_the_switch_of_an_earlier_lighthouse():
    """It was to stay for a newcomer that is under notice by now."""
    old = (3 << TERM_SHIFT) + 1
    groups = Groups(term=4)
    groups.reconnect(old, "a")
    notice(groups, "a")
    groups.request("a", quorum_id=old, quorum_step=4, step=5)
    assert groups.wait(0.05) == {"a": [CheckpointBeforeLeave()]}
    assert groups.request("a", quorum_id=old, quorum_step=0, step=6, is_saved=True) == {
        "a": [LeaveGranted()]
    }


def test_member_that_does_not_know_its_quorum_does_not_leave_with_its_state():
    """The other member, known to a new lighthouse first, was to heal from it and has not."""
    groups = Groups(term=2)
    groups.connect("b")
    groups.send("b", ReplicaStatus(8, 1, 2, 0, False))
    groups.connect("a")
    groups.send("a", ReplicaStatus(7, 0, 2, 4, False))
    notice(groups, "a")
    groups.request("a", quorum_id=7, quorum_step=4, step=4)
    assert LeaveGranted() not in groups.received["a"]
    assert "b" in aborted(groups.wait(6.0))
    placed = results(groups.request("b", quorum_id=8, step=0, state_version="other"))
    assert placed["b"].heals and not placed["a"].heals
