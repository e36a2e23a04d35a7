"""The step at which all members act: proposed, voted on, confirmed."""

import pytest

from hpc_elastic.step_agreement import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    VOTE_WITHIN_S,
    AgreementState,
    Confirmation,
    Proposal,
    StepAgreement,
    StepVote,
)

NOW = 100.0
WITHDRAWN = Proposal(0, 0)


def asked(*members: str, ahead_s: float = 0.5) -> StepAgreement[str]:
    """An agreement whose question, proposal 1, was sent to these members."""
    agreement = StepAgreement[str](ahead_s)
    assert agreement.begin_agreement(members, NOW) == Proposal(1, 0)
    return agreement


def vote(a: StepAgreement[str], *members: str, ok=True, passed=7, rate=0.0, number=None):
    """Let members vote on the last proposal, or another; what follows the last vote."""
    for member in members:
        step = a.vote(member, StepVote(number or a.number, ok, passed, rate), NOW)
    return step


def confirmed() -> StepAgreement[str]:
    """An agreement of a and b on step 8, proposal 2."""
    a = asked("a", "b")
    assert vote(a, "a", "b") == Proposal(2, 8)
    assert vote(a, "a") is None
    assert vote(a, "b") == Confirmation(2)
    return a


def test_it_begins_with_asking_how_far_all_are():
    """And proposes nothing before the last one has said so."""
    a = asked("a", "b")
    assert vote(a, "a", passed=3) is None
    assert vote(a, "b", passed=9) == Proposal(2, 10)


@pytest.mark.parametrize(
    ("ahead_s", "rate", "step"),
    [
        (0.5, 0.0, 8), (0.5, 20.0, 18), (0.02, 20.0, 8), (0.02, 500.0, 18),
        (0.5, float("nan"), 8), (0.5, float("inf"), 8), (0.5, -5.0, 8), (0.5, 1e300, 8),
    ],
)  # fmt: skip
def test_the_step_is_ahead_of_the_furthest_by_some_time_of_the_fastest(ahead_s, rate, step):
    """And at least by one; a rate that is no number is ignored."""
    a = asked("a", "b", ahead_s=ahead_s)
    vote(a, "a", rate=rate, passed=3)
    assert vote(a, "b").step == step


def test_it_is_confirmed_once_all_have_voted_ok_on_the_same_proposal():
    """One that has not voted may be past the step."""
    a = confirmed()
    assert (a.state, a.step, a.awaited) == (AgreementState.CONFIRMED, 8, {"a", "b"})


def test_one_that_is_past_the_step_moves_it_further_and_further():
    """Every proposal is twice as far ahead: the members are overtaken whatever the rates are."""
    a = asked("a", "b")
    vote(a, "a", "b")
    steps = [vote(a, "b", ok=False, passed=a.step + 3).step - a.furthest for _ in range(6)]
    assert steps == [2, 4, 8, 16, 32, 64]
    assert a.awaited == {"a", "b"}


def test_a_vote_on_an_earlier_proposal_and_a_second_one_count_for_nothing():
    """It was given before the last one was seen."""
    a = asked("a", "b")
    vote(a, "a", "b")
    assert vote(a, "a", number=1) is None and a.awaited == {"a", "b"}
    assert vote(a, "a", "a") is None and a.awaited == {"b"}


def test_one_that_is_no_member_has_no_vote():
    """It may be a late message of somebody else."""
    a = asked("a")
    assert vote(a, "c", ok=False, passed=99) is None and a.furthest is None


def test_where_no_worker_has_passed_a_step_the_question_is_put_again():
    """The script may only not have come to its first step yet."""
    a = asked("a")
    assert vote(a, "a", passed=None) == WITHDRAWN
    assert a.begin_agreement(["a"], NOW + FIRST_PAUSE_S - 0.1) is None
    assert a.begin_agreement(["a"], NOW + FIRST_PAUSE_S) == Proposal(2, 0)


def test_a_member_that_does_not_vote_is_late():
    """Then the others must not wait at the step; the next question waits longer each time."""
    a = asked("a", "b")
    assert not a.is_late(NOW + VOTE_WITHIN_S) and a.is_late(NOW + VOTE_WITHIN_S + 0.1)
    pauses, now = [], NOW
    for _ in range(15):
        assert a.withdraw(now) == WITHDRAWN and a.withdraw(now) is None
        began = now
        while a.begin_agreement(["a", "b"], now) is None:
            now += 0.125
        pauses.append(now - began)
    assert pauses[0] == FIRST_PAUSE_S and pauses[-1] == LONGEST_PAUSE_S
    assert pauses == sorted(pauses)


def test_many_members_are_asked_less_often():
    """A question costs a message to each, and one back."""
    members = [str(n) for n in range(3000)]
    a = asked(*members)
    a.withdraw(NOW)
    assert a.begin_agreement(members, NOW + 2.9) is None and a.begin_agreement(members, NOW + 3.0)


def test_a_new_reason_ends_the_pause():
    """A node that is to be left cannot wait."""
    a = asked("a")
    a.withdraw(NOW)
    a.hurry()
    assert a.begin_agreement(["a"], NOW) == Proposal(2, 0)


def test_what_is_confirmed_is_not_withdrawn():
    """Some may act there already."""
    a = confirmed()
    assert (
        a.withdraw(1e6) is None
        and not a.is_late(1e6)
        and a.begin_agreement(["a", "b"], 1e6) is None
    )


def test_nothing_is_proposed_before_all_have_passed_a_confirmed_step():
    """It would be overwritten where a worker has not come to it."""
    a = confirmed()
    a.pass_step("a")
    assert a.begin_agreement(["a", "b"], 1e6) is None
    a.pass_step("b")
    assert a.begin_agreement(["a", "b"], 1e6) == Proposal(3, 0)


def test_a_member_that_has_left_is_not_waited_for():
    """Nor asked again."""
    a = asked("a", "b")
    vote(a, "a")
    assert a.retain(["a"], NOW) == Proposal(2, 8)
    assert vote(a, "a", ok=False, passed=8).step == 10
    assert a.awaited == {"a"}


def test_a_step_at_which_some_act_is_not_moved():
    """The others agree to it, or it cannot be."""
    a = StepAgreement[str](0.5, 40)
    assert a.begin_at(6, ["b", "c"], 0.0) == Proposal(41, 6)
    assert vote(a, "b") is None
    assert a.retain(["b"], NOW) == Confirmation(41)


def test_a_step_at_which_all_act_needs_no_vote():
    """It is confirmed at once."""
    assert StepAgreement[str](0.5).begin_at(6, [], 0.0) == Confirmation(1)
