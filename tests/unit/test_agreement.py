"""The step at which all ranks save: proposed, answered, confirmed."""

import pytest
from groups import A, B, C

from hpc_elastic.rendezvous.effects import ConfirmStep, ProposeStep
from hpc_elastic.rendezvous.step_agreement import (
    ANSWER_WITHIN_S,
    ASK_AGAIN_S,
    NOT_HELD_S,
    AgreementState,
    StepAgreement,
    StepVote,
)

NOW = 100.0


def asked(*members) -> StepAgreement:
    """An agreement whose query, proposal 1, was sent to these members."""
    agreement = StepAgreement(members)
    assert agreement.advance(True, NOW) == [ProposeStep(members, 1, 0)]
    return agreement


def answer(a: StepAgreement, agent, number: int, *, ok: bool, passed=None, rate=0.0, now=NOW):
    """Let a member answer."""
    return a.answered(agent, StepVote(number, ok, passed, rate), now)


def confirmed(needed=True) -> StepAgreement:
    """An agreement of A and B on step 11, proposal 2."""
    a = asked(A, B)
    if not needed:
        a.want()
        a.advance(False, NOW)
    answer(a, A, 1, ok=False, passed=10)
    assert answer(a, B, 1, ok=False, passed=9) == [ProposeStep((A, B), 2, 11)]
    assert answer(a, A, 2, ok=True, passed=10) == []
    assert answer(a, B, 2, ok=True, passed=9) == [ConfirmStep((A, B), 2)]
    return a


def test_the_step_is_ahead_of_the_furthest_by_half_a_second():
    """Whoever is the furthest and whoever is the fastest."""
    a = asked(A, B)
    assert answer(a, A, 1, ok=False, passed=10, rate=2.0) == []
    assert answer(a, B, 1, ok=False, passed=7, rate=20.0) == [ProposeStep((A, B), 2, 21)]


def test_nothing_is_confirmed_before_everybody_has_said_ok():
    """One that has not answered may be past the step."""
    a = confirmed()
    assert a.state is AgreementState.CONFIRMED and a.ahead == 11 and a.held_step == 11


def test_who_holds_at_the_confirmed_step_is_asked_to_go_on_to_a_later_one():
    """Others were past it when they were asked to hold, and hold further on: for each other."""
    a = confirmed(needed=False)
    a.announced(A, 11, NOW)
    a.announced(B, 9, NOW)
    assert a.state is AgreementState.CONFIRMED
    a.announced(B, 12, NOW)
    assert a.advance(True, NOW) == [ProposeStep((A, B), 3, 0)]


def test_one_that_is_past_the_step_moves_it_further_and_further():
    """Every proposal is twice as far ahead, so that the ranks are overtaken whatever the rates."""
    a = asked(A, B)
    answer(a, A, 1, ok=False, passed=10)
    answer(a, B, 1, ok=False, passed=10)
    steps = []
    for number in range(2, 8):
        (proposal,) = answer(a, B, number, ok=False, passed=a.step + 3)
        steps.append(proposal.step - a.furthest)
    assert steps == [2, 4, 8, 16, 32, 64]


def test_an_answer_to_an_earlier_proposal_counts_for_nothing():
    """It was said before the last one was seen."""
    a = asked(A, B)
    answer(a, A, 1, ok=False, passed=10)
    answer(a, B, 1, ok=False, passed=10)
    assert answer(a, A, 1, ok=True, passed=10) == [] and a.state is AgreementState.ASKING
    answer(a, A, 2, ok=True, passed=10)
    assert answer(a, A, 2, ok=True, passed=10) == [], "nor does a second one"
    assert a.state is AgreementState.ASKING


def test_one_who_is_no_member_has_no_say():
    """It may be a late message of somebody else."""
    a = asked(A)
    assert answer(a, C, 1, ok=False, passed=99) == [] and a.furthest is None


def test_a_script_that_never_asks_has_the_proposal_taken_back_and_is_asked_again():
    """It may only not have come to its first step yet."""
    a = asked(A)
    assert answer(a, A, 1, ok=True) == [ProposeStep((A,), 0, 0)]
    assert a.advance(True, NOW + ASK_AGAIN_S - 0.1) == []
    assert a.advance(True, NOW + ASK_AGAIN_S) == [ProposeStep((A,), 2, 0)]


def test_a_wish_of_a_script_that_does_not_pass_steps_is_dropped():
    """Nobody would ever save."""
    a = StepAgreement((A,))
    a.want()
    a.advance(False, NOW)
    assert answer(a, A, 1, ok=True) == [ProposeStep((A,), 0, 0)]
    assert a.advance(False, NOW + 1e6) == []


def test_a_wish_alone_is_agreed_on_without_a_hold():
    """Training goes on after a periodic checkpoint."""
    a = StepAgreement((A,))
    a.want()
    assert a.advance(False, NOW) == [ProposeStep((A,), 1, 0)]
    answer(a, A, 1, ok=False, passed=3)
    assert answer(a, A, 2, ok=True, passed=3) == [ConfirmStep((A,), 2)]
    assert a.held_step is None and not a.wanted


def test_a_proposal_is_taken_back_when_the_reason_is_gone():
    """The newcomer has left again: nobody waits for anything."""
    a = asked(A, B)
    assert a.advance(False, NOW + 1.0) == [ProposeStep((A, B), 0, 0)]
    assert answer(a, A, 1, ok=False, passed=10) == []


def test_a_confirmed_step_is_never_taken_back():
    """Some may have saved there."""
    a = confirmed()
    assert a.advance(False, NOW + 1.0) == [] and a.take_back(NOW + 1.0) == []


def test_nobody_waits_for_ever_for_a_member_that_does_not_answer():
    """Ranks at the proposed step go on; it is asked again a little later."""
    a = asked(A, B)
    answer(a, A, 1, ok=False, passed=10)
    answer(a, B, 1, ok=False, passed=10)
    answer(a, A, 2, ok=True, passed=11)
    assert a.advance(True, NOW + ANSWER_WITHIN_S) == []
    late = NOW + ANSWER_WITHIN_S + 0.1
    assert a.advance(True, late) == [ProposeStep((A, B), 0, 0)]
    assert answer(a, B, 2, ok=True, passed=10, now=late) == [], "too late"
    assert a.advance(True, late + ASK_AGAIN_S) == [ProposeStep((A, B), 3, 0)]


def test_a_wish_outlives_a_proposal_that_was_not_answered():
    """The worker does not ask twice."""
    a = StepAgreement((A,))
    a.want()
    a.advance(False, NOW)
    a.advance(False, NOW + 6.0)
    assert a.advance(False, NOW + 7.0) == [ProposeStep((A,), 2, 0)]


def test_nothing_new_is_proposed_before_all_have_passed_a_confirmed_step():
    """It would be overwritten on the page of a worker that has not come to it."""
    a = confirmed(needed=False)
    a.want()
    assert a.advance(False, NOW + 60.0) == []
    answer(a, A, 2, ok=True, passed=12)
    answer(a, B, 2, ok=True, passed=11)
    assert a.advance(False, NOW + 60.0) == [], "B has come to it, and may not have looked yet"
    answer(a, B, 2, ok=True, passed=12)
    assert a.advance(False, NOW + 60.0) == [ProposeStep((A, B), 3, 0)]


def test_ranks_that_do_not_stay_where_they_should_are_not_asked_at_once_again():
    """A script that saves and goes on would save at every other step."""
    a = confirmed()
    for agent in (A, B):
        answer(a, agent, 2, ok=True, passed=12)
    assert a.advance(True, NOW + NOT_HELD_S - 1.0) == []
    a.hurry()
    assert a.advance(True, NOW + 5.0) == [ProposeStep((A, B), 3, 0)], "there is a new reason"


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -5.0, 1e30])
def test_a_rate_that_is_no_number_counts_for_nothing(rate):
    """Whatever a worker has published."""
    a = asked(A)
    assert answer(a, A, 1, ok=False, passed=10, rate=rate) == [ProposeStep((A,), 2, 11)]
