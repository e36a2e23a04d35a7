"""How the members of a quorum agree on the call at which they ask for the next one."""

import pytest

from hpc_elastic.ft.lighthouse_state import (
    ANSWER_WITHIN_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    QuorumSwitch,
    SwitchState,
)
from hpc_elastic.ft.messages import ConfirmSwitch, ProposeSwitch, SwitchVote

Q = 5
MEMBERS = ("a", "b")


def answer(switch, *replicas, ok=True, call=7, rate=0.0):
    """Let members answer the last proposal; what follows the last answer."""
    for replica in replicas:
        step = switch.answered(replica, SwitchVote(Q, switch.number, ok, call, rate), now=1.0)
    return step


@pytest.fixture
def switch():
    switch = QuorumSwitch(Q)
    assert switch.begin(MEMBERS, now=0.0) == ProposeSwitch(Q, 1, 0)
    return switch


def test_it_begins_with_asking_how_far_all_are(switch):
    """And proposes nothing before the last one has said so."""
    assert answer(switch, "a") is None
    assert answer(switch, "b", call=9) == ProposeSwitch(Q, 2, 10)


@pytest.mark.parametrize(
    ("rate", "call"), [(0.0, 8), (5.0, 8), (500.0, 17), (float("nan"), 8), (-1.0, 8), (1e300, 8)]
)
def test_the_proposal_is_ahead_by_a_fiftieth_of_a_second(switch, rate, call):
    """Of the fastest's calls, and at least by one; a rate that is no number does not count."""
    answer(switch, "a", rate=rate)
    assert answer(switch, "b").call == call


def test_it_is_confirmed_once_all_have_agreed(switch):
    """To the same proposal, and in time."""
    answer(switch, "a", "b")
    assert answer(switch, "a") is None
    assert answer(switch, "b") == ConfirmSwitch(Q, 2)
    assert (switch.state, switch.call) == (SwitchState.CONFIRMED, 8)


def test_who_has_passed_the_call_has_it_moved_further_each_time(switch):
    """By twice as much as before; all have to agree anew."""
    answer(switch, "a", "b")
    answer(switch, "a")
    assert answer(switch, "b", ok=False, call=8) == ProposeSwitch(Q, 3, 10)
    assert answer(switch, "b", ok=False, call=12) == ProposeSwitch(Q, 4, 16)
    assert switch.awaited == {"a", "b"}


def test_an_answer_to_an_older_proposal_counts_for_nothing(switch):
    """It may have been overtaken by the one that followed."""
    answer(switch, "a", "b")
    assert switch.answered("a", SwitchVote(Q, 1, True, 9, 0.0), 1.0) is None
    assert switch.awaited == {"a", "b"}


def test_who_does_not_answer_in_time_has_the_proposal_taken_back(switch):
    """So that the others do not wait at it; it is asked again, each time after a longer pause."""
    assert not switch.is_late(ANSWER_WITHIN_S)
    assert switch.is_late(ANSWER_WITHIN_S + 0.1)
    pauses, now = [], 10.0
    for _ in range(6):
        assert switch.take_back(now) == ProposeSwitch(Q, 0, 0)
        began = now
        while switch.begin(MEMBERS, now) is None:
            now += 0.25
        pauses.append(now - began)
    assert pauses == [FIRST_PAUSE_S, 1.0, 2.0, 4.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_a_new_reason_ends_the_pause(switch):
    """A node that is to be left can not wait."""
    switch.take_back(1.0)
    assert switch.begin(MEMBERS, 1.1) is None
    switch.hurry()
    assert switch.begin(MEMBERS, 1.1) == ProposeSwitch(Q, 2, 0)


def test_what_is_confirmed_is_not_taken_back(switch):
    """Some may ask there already; and calls may be an hour apart."""
    answer(switch, "a", "b")
    answer(switch, "a", "b")
    assert switch.take_back(1e6) is None
    assert not switch.is_late(1e6)


def test_a_member_that_has_left_in_peace_is_not_waited_for(switch):
    """Nor asked again."""
    answer(switch, "a")
    assert switch.forget("b", 1.0) == ProposeSwitch(Q, 2, 8)
    assert switch.awaited == {"a"}
    assert answer(switch, "a", ok=False, call=9).call == 11
    assert switch.awaited == {"a"}


def test_a_call_at_which_some_ask_is_not_moved():
    """The others agree to it, or it can not be."""
    switch = QuorumSwitch(Q, 40)
    assert switch.begin_at(6, ["b", "c"], 0.0) == ProposeSwitch(Q, 41, 6)
    assert answer(switch, "b") is None
    assert switch.forget_all_but(["b"], 1.0) == ConfirmSwitch(Q, 41)


def test_a_call_at_which_all_ask_needs_no_answer():
    """It is confirmed at once."""
    assert QuorumSwitch(Q).begin_at(6, [], 0.0) == ConfirmSwitch(Q, 1)
