"""A worker's calls in its quorum: when it goes on, when it waits, when it asks."""

from __future__ import annotations

import pytest

from hpc_elastic.ft.manager_client import QuorumSteps
from hpc_elastic.ft.manager_server import CommitVotes, combined_ask, combined_at, missing
from hpc_elastic.ft.messages import (
    NO_QUORUM,
    CommitDecision,
    CommitVote,
    ConfirmSwitch,
    ProposeSwitch,
    QuorumAborted,
    QuorumRequest,
    SwitchVote,
)

Q = 7


def in_quorum(*, alone: bool = True, begun: int = 0) -> QuorumSteps:
    steps = QuorumSteps(alone=alone)
    steps.begin(0.0)
    steps.enter(Q)
    for call in range(begun):
        steps.begin(call + 1.0)
    return steps


def ask(**other: object) -> QuorumRequest:
    given = {"call": 3, "step": 5, "lineage": "a", "quorum_id": Q, "commit_failures": 0}
    rest = {"min_replicas": 1, "shrink_only": False, "store": "h:1", "metadata": ("m",)}
    return QuorumRequest(**{**given, **rest, **other})  # type: ignore[arg-type]


def test_first_call_asks():
    """The first step is call 0, and needs a quorum."""
    steps = QuorumSteps(alone=True)
    steps.begin(0.0)
    assert (steps.call, steps.must_ask, steps.quorum_id) == (0, True, NO_QUORUM)


def test_calls_are_counted_from_the_asking_one():
    """In a quorum, steps go on without a question."""
    steps = in_quorum(begun=3)
    assert (steps.call, steps.must_ask, steps.undecided) == (3, False, False)


def test_proposal_ahead_is_agreed_to():
    """A proposed call that has not begun is waited at, until it is confirmed; there all ask."""
    steps = in_quorum(begun=2)
    assert steps.proposed(ProposeSwitch(Q, 1, 4), 2.0) == SwitchVote(Q, 1, True, 2, 1.0)
    steps.begin(3.0)
    assert not steps.undecided
    steps.begin(4.0)
    assert steps.undecided and not steps.must_ask
    steps.confirm(ConfirmSwitch(Q, 1))
    assert steps.must_ask and not steps.undecided


def test_confirmed_before_it_is_reached():
    """A confirmed call asks when it comes, and not before."""
    steps = in_quorum(begun=1)
    steps.proposed(ProposeSwitch(Q, 1, 3), 1.0)
    steps.confirm(ConfirmSwitch(Q, 1))
    steps.begin(2.0)
    assert not steps.must_ask
    steps.begin(3.0)
    assert steps.must_ask


def test_proposal_behind_is_refused():
    """A call that has begun can not be agreed to, and an older agreement is void with it."""
    steps = in_quorum(begun=2)
    steps.proposed(ProposeSwitch(Q, 1, 3), 2.0)
    answer = steps.proposed(ProposeSwitch(Q, 2, 2), 2.0)
    assert answer is not None and not answer.ok and answer.call == 2
    steps.begin(3.0)
    assert not steps.undecided


def test_question_how_far_changes_nothing():
    """Call 0 of a proposal only asks; what was agreed to stands."""
    steps = in_quorum(begun=2)
    steps.proposed(ProposeSwitch(Q, 1, 3), 2.0)
    answer = steps.proposed(ProposeSwitch(Q, 2, 0), 2.0)
    assert answer is not None and answer.call == 2
    steps.begin(3.0)
    assert steps.undecided


def test_taken_back():
    """Number 0 lets those go on that wait; what is confirmed stands."""
    steps = in_quorum()
    steps.proposed(ProposeSwitch(Q, 1, 1), 0.0)
    steps.begin(1.0)
    assert steps.undecided
    assert steps.proposed(ProposeSwitch(Q, 0, 0), 1.0) is None
    assert not steps.undecided and not steps.must_ask
    steps.proposed(ProposeSwitch(Q, 2, 3), 1.0)
    steps.confirm(ConfirmSwitch(Q, 2))
    steps.proposed(ProposeSwitch(Q, 0, 0), 1.0)
    steps.begin(2.0)
    steps.begin(3.0)
    assert steps.must_ask


def test_who_waits_has_not_passed():
    """As long as a worker waits at a call, a new keeper may propose the same call again."""
    steps = in_quorum()
    steps.proposed(ProposeSwitch(Q, 1, 1), 0.0)
    steps.begin(1.0)
    answer = steps.proposed(ProposeSwitch(Q, 9, 1), 1.0)
    assert answer is not None and answer.ok
    steps.confirm(ConfirmSwitch(Q, 9, leaves=True))
    assert steps.must_ask and steps.confirmed is not None and steps.confirmed.leaves


def test_new_keeper_confirms_what_was_confirmed():
    """A worker that was told already agrees to the same call under another number."""
    steps = in_quorum()
    steps.proposed(ProposeSwitch(Q, 1, 2), 0.0)
    steps.confirm(ConfirmSwitch(Q, 1))
    answer = steps.proposed(ProposeSwitch(Q, 9, 2), 0.0)
    assert answer is not None and answer.ok
    steps.confirm(ConfirmSwitch(Q, 9, leaves=True))
    assert steps.confirmed == ConfirmSwitch(Q, 9, leaves=True)


def test_settled_steps_are_not_agreed_to():
    """After a worker has decided about its next step, no change can be put there."""
    steps = in_quorum(begun=1)
    steps.settle(2)
    answer = steps.proposed(ProposeSwitch(Q, 1, 2), 1.0)
    assert answer is not None and not answer.ok and answer.call == 2


def test_next_step_is_the_switch():
    """A worker can tell before it begins the step at which the members change."""
    steps = in_quorum(begun=1)
    steps.proposed(ProposeSwitch(Q, 1, 2), 1.0)
    assert steps.undecided_next and not steps.switches_next
    steps.confirm(ConfirmSwitch(Q, 1, leaves=True, last=True))
    assert steps.switches_next and not steps.undecided_next


def test_other_quorums_do_not_matter():
    """Proposals, confirmations and breaks of another quorum are ignored."""
    steps = in_quorum()
    assert steps.proposed(ProposeSwitch(Q - 1, 1, 5), 0.0) is None
    assert not steps.told_broken(QuorumAborted(Q - 1, "old"))
    steps.confirm(ConfirmSwitch(Q - 1, 1))
    assert not steps.found_broken(Q - 1, "old")
    steps.begin(1.0)
    assert not steps.must_ask and steps.broken is None


def test_broken_once():
    """A break is news once, and a worker that is alone in its group asks at its next step."""
    steps = in_quorum()
    assert steps.told_broken(QuorumAborted(Q, "b died"))
    assert not steps.told_broken(QuorumAborted(Q, "again"))
    assert not steps.found_broken(Q, "again")
    assert steps.broken == "b died" and steps.must_ask


def test_group_asks_after_the_same_verdict():
    """With several workers, a break counts for all from the verdict that they got after it."""
    steps = in_quorum(alone=False)
    steps.counted(CommitDecision(Q, 0, True))
    steps.told_broken(QuorumAborted(Q, "b died"))
    steps.begin(1.0)
    assert not steps.must_ask
    steps.counted(CommitDecision(Q, 1, False))
    assert steps.must_ask


def test_own_finding_does_not_part_a_group():
    """What one worker of several has found counts when the server has told all of them."""
    steps = in_quorum(alone=False)
    steps.found_broken(Q, "mine")
    steps.counted(CommitDecision(Q, 0, True))
    assert not steps.must_ask
    steps.told_broken(QuorumAborted(Q, "mine"))
    steps.counted(CommitDecision(Q, 1, False))
    assert steps.must_ask


def test_rate():
    """The rate is of the calls lately, and falls while one takes longer."""
    steps = in_quorum(begun=5)
    assert steps.rate(5.0) == 1.0
    assert steps.rate(15.0) == 0.1


def test_combined_ask():
    """A group asks with the metadata of all ranks, and the most careful wishes of any."""
    group = {1: ask(metadata=("b",), min_replicas=2, lineage="other"), 0: ask(metadata=("a",))}
    assert combined_ask(group) == ask(metadata=("a", "b"), min_replicas=2)
    assert combined_ask({0: ask(), 1: ask(shrink_only=True)}).shrink_only


def test_torn_group_heals():
    """Ranks at different steps have nothing in common with any other group."""
    torn = combined_ask({0: ask(step=5), 1: ask(step=6)})
    assert torn.step == 5
    assert torn.lineage != "a"


def test_combined_answer():
    """A group agrees if all its workers do, and is as far as the furthest."""
    ats = {0: SwitchVote(Q, 1, True, 3, 2.0), 1: SwitchVote(Q, 1, False, 4, 1.0)}
    assert combined_at(ats) == SwitchVote(Q, 1, False, 4, 2.0)


def test_verdict():
    """One no decides; a yes takes all, alive; each step gets one verdict."""
    ballot = CommitVotes()
    assert ballot.decide(2, complete=True) is None
    ballot.cast(0, CommitVote(Q, 1, True))
    assert ballot.decide(2, complete=True) is None
    ballot.cast(1, CommitVote(Q, 1, True))
    assert ballot.decide(2, complete=True) == CommitDecision(Q, 1, True)
    ballot.cast(1, CommitVote(Q, 2, False))
    assert ballot.decide(2, complete=True) == CommitDecision(Q, 2, False)
    ballot.cast(0, CommitVote(Q, 2, True))
    ballot.cast(0, CommitVote(Q, 1, True))
    assert ballot.decide(2, complete=True) is None
    ballot.cast(0, CommitVote(Q + 1, 0, True))
    assert ballot.decide(2, complete=False) == CommitDecision(Q + 1, 0, False)


def test_missing_ranks_are_named():
    """Who waits is told for which ranks of its own group."""
    assert "rank 1, 3" in missing({0: 0, 2: 0}, 4)


def test_the_last_moment_to_save_is_the_end_of_the_step_before_the_group_goes():
    """And the question after that says that it was one."""
    steps = in_quorum()
    steps.proposed(ProposeSwitch(Q, 1, 2), 0.0)
    steps.confirm(ConfirmSwitch(Q, 1, leaves=True, last=True))
    assert not steps.is_last
    steps.begin(1.0)
    assert (steps.is_last, steps.is_saved) == (True, False)
    steps.begin(2.0)
    assert steps.must_ask and steps.is_saved


@pytest.mark.parametrize("confirm", [ConfirmSwitch(Q, 1), ConfirmSwitch(Q, 1, leaves=True)])
def test_where_others_keep_the_state_no_moment_is_the_last(confirm):
    """Not for who stays, and not for who leaves."""
    steps = in_quorum()
    steps.proposed(ProposeSwitch(Q, 1, 1), 0.0)
    steps.confirm(confirm)
    assert not steps.is_last
    steps.begin(1.0)
    assert steps.must_ask and not steps.is_saved


def test_who_is_to_save_first_does_so_in_a_step_without_a_quorum():
    """It keeps its place in the last one, and asks in the next step, unless it is placed."""
    steps = in_quorum()
    steps.begin(1.0)
    steps.save_first()
    assert steps.is_last and steps.must_ask and steps.quorum_id == Q
    steps.begin(2.0)
    assert steps.is_saved
    steps.enter(Q + 1)
    assert not steps.is_last and not steps.is_saved
