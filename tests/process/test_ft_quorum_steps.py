"""A worker's steps in its quorum: when it goes on, waits, or requests another; and its group's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hpc_elastic
from hpc_elastic.ft.manager_client import QuorumSteps
from hpc_elastic.ft.manager_state import CommitVotes, combine_requests
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


def in_quorum(*, is_single: bool = True, started: int = 0) -> QuorumSteps:
    steps = QuorumSteps(is_single=is_single)
    steps.start_step(0.0)
    steps.enter_quorum(Q)
    for step in range(started):
        steps.start_step(step + 1.0)
    return steps


def request(**other: object) -> QuorumRequest:
    given = {"quorum_step": 3, "step": 5, "state_version": "a", "quorum_id": Q}
    rest = {"commit_failures": 0, "min_replicas": 1, "shrink_only": False, "store": "h:1"}
    return QuorumRequest(**{**given, **rest, "metadata": ("m",), **other})  # type: ignore[arg-type]


def test_first_step_requests():
    """The first step is quorum step 0, and needs a quorum."""
    steps = QuorumSteps(is_single=True)
    steps.start_step(0.0)
    assert (steps.quorum_step, steps.must_request, steps.quorum_id) == (0, True, NO_QUORUM)


def test_steps_are_counted_from_the_requesting_one():
    """In a quorum, steps go on without a request."""
    steps = in_quorum(started=3)
    assert (steps.quorum_step, steps.must_request, steps.is_undecided) == (3, False, False)


def test_proposal_ahead_is_accepted():
    """A worker waits at the proposed step until it is confirmed, and requests there."""
    steps = in_quorum(started=2)
    assert steps.on_proposal(ProposeSwitch(Q, 1, 4), 2.0) == SwitchVote(Q, 1, True, 2, 1.0)
    steps.start_step(3.0)
    assert not steps.is_undecided
    steps.start_step(4.0)
    assert steps.is_undecided and not steps.must_request
    steps.on_confirmation(ConfirmSwitch(Q, 1))
    assert steps.must_request and not steps.is_undecided


def test_confirmation_before_the_step():
    """A confirmed step requests when it starts, and not before."""
    steps = in_quorum(started=1)
    steps.on_proposal(ProposeSwitch(Q, 1, 3), 1.0)
    steps.on_confirmation(ConfirmSwitch(Q, 1))
    steps.start_step(2.0)
    assert not steps.must_request
    steps.start_step(3.0)
    assert steps.must_request


def test_proposal_behind_is_refused():
    """A step that has started cannot be accepted, and an earlier accepted one is void with it."""
    steps = in_quorum(started=2)
    steps.on_proposal(ProposeSwitch(Q, 1, 3), 2.0)
    answer = steps.on_proposal(ProposeSwitch(Q, 2, 2), 2.0)
    assert answer is not None and not answer.ok and answer.quorum_step == 2
    steps.start_step(3.0)
    assert not steps.is_undecided


def test_question_for_the_step_changes_nothing():
    """Step 0 of a proposal only asks; the accepted proposal remains."""
    steps = in_quorum(started=2)
    steps.on_proposal(ProposeSwitch(Q, 1, 3), 2.0)
    answer = steps.on_proposal(ProposeSwitch(Q, 2, 0), 2.0)
    assert answer is not None and answer.quorum_step == 2
    steps.start_step(3.0)
    assert steps.is_undecided


def test_withdrawal():
    """Number 0 releases a waiting worker; a confirmed proposal remains."""
    steps = in_quorum()
    steps.on_proposal(ProposeSwitch(Q, 1, 1), 0.0)
    steps.start_step(1.0)
    assert steps.is_undecided
    assert steps.on_proposal(ProposeSwitch(Q, 0, 0), 1.0) is None
    assert not steps.is_undecided and not steps.must_request
    steps.on_proposal(ProposeSwitch(Q, 2, 3), 1.0)
    steps.on_confirmation(ConfirmSwitch(Q, 2))
    steps.on_proposal(ProposeSwitch(Q, 0, 0), 1.0)
    steps.start_step(2.0)
    steps.start_step(3.0)
    assert steps.must_request


def test_waiting_worker_accepts_the_same_step_again():
    """As long as it waits at a step, another lighthouse may propose that."""
    steps = in_quorum()
    steps.on_proposal(ProposeSwitch(Q, 1, 1), 0.0)
    steps.start_step(1.0)
    answer = steps.on_proposal(ProposeSwitch(Q, 9, 1), 1.0)
    assert answer is not None and answer.ok
    steps.on_confirmation(ConfirmSwitch(Q, 9, leaves=True))
    assert steps.must_request
    assert steps.confirmation is not None and steps.confirmation.leaves


def test_confirmed_worker_accepts_the_same_step_again():
    """Under the number of another lighthouse, which does not know of the confirmation."""
    steps = in_quorum()
    steps.on_proposal(ProposeSwitch(Q, 1, 2), 0.0)
    steps.on_confirmation(ConfirmSwitch(Q, 1))
    answer = steps.on_proposal(ProposeSwitch(Q, 9, 2), 0.0)
    assert answer is not None and answer.ok
    steps.on_confirmation(ConfirmSwitch(Q, 9, leaves=True))
    assert steps.confirmation == ConfirmSwitch(Q, 9, leaves=True)


def test_confirmed_worker_names_its_step():
    """To a question of another lighthouse; to a proposal of another step it says nothing."""
    steps = in_quorum(started=1)
    steps.on_proposal(ProposeSwitch(Q, 1, 3), 1.0)
    steps.on_confirmation(ConfirmSwitch(Q, 1))
    answer = steps.on_proposal(ProposeSwitch(Q, 9, 0), 1.0)
    assert answer == SwitchVote(Q, 9, False, 1, 1.0, confirmed_step=3)
    assert steps.on_proposal(ProposeSwitch(Q, 10, 4), 1.0) is None


def test_confirmed_step_is_accepted_after_its_start():
    """Other ranks of the group may not have come there yet; all request in it."""
    steps = in_quorum()
    steps.on_proposal(ProposeSwitch(Q, 1, 1), 0.0)
    steps.on_confirmation(ConfirmSwitch(Q, 1))
    steps.start_step(1.0)
    answer = steps.on_proposal(ProposeSwitch(Q, 9, 1), 1.0)
    assert answer is not None and answer.ok


def test_settled_step_is_refused():
    """A worker that has decided about its next step accepts no switch there."""
    steps = in_quorum(started=1)
    steps.settle_step(2)
    answer = steps.on_proposal(ProposeSwitch(Q, 1, 2), 1.0)
    assert answer is not None and not answer.ok and answer.quorum_step == 2


def test_next_step_is_the_switch():
    """A worker knows it before it starts that step."""
    steps = in_quorum(started=1)
    steps.on_proposal(ProposeSwitch(Q, 1, 2), 1.0)
    assert steps.is_next_undecided and not steps.must_save
    steps.on_confirmation(ConfirmSwitch(Q, 1, leaves=True, last=True))
    assert steps.must_save and not steps.is_next_undecided


def test_messages_of_other_quorums_are_ignored():
    """Proposals, confirmations and aborts."""
    steps = in_quorum()
    assert steps.on_proposal(ProposeSwitch(Q - 1, 1, 5), 0.0) is None
    assert not steps.on_abort(QuorumAborted(Q - 1, "old"))
    steps.on_confirmation(ConfirmSwitch(Q - 1, 1))
    assert not steps.mark_aborted(Q - 1, "old")
    steps.start_step(1.0)
    assert not steps.must_request and steps.abort_reason is None


def test_abort_is_news_once():
    """A worker that is alone in its group requests at its next step."""
    steps = in_quorum()
    assert steps.on_abort(QuorumAborted(Q, "b died"))
    assert not steps.on_abort(QuorumAborted(Q, "again"))
    assert not steps.mark_aborted(Q, "again")
    assert steps.abort_reason == "b died" and steps.must_request


def test_the_last_step_with_a_member_that_is_done_is_completed():
    """The next one requests; whatever was started after that step is aborted."""
    done = QuorumAborted(Q, "b is done", after_step=2)
    steps = in_quorum(started=2)
    assert not steps.on_abort(done) and steps.abort_reason is None
    steps.start_step(9.0)
    assert steps.must_request
    assert steps.on_abort(QuorumAborted(Q, "its node was lost"))
    ahead = in_quorum(started=3)
    assert ahead.on_abort(done) and ahead.abort_reason == "b is done"
    assert in_quorum(started=1).on_abort(QuorumAborted(Q, "b is done", after_step=-1))


def test_a_group_completes_the_last_step_with_one_that_is_done_together():
    """What counts is whether its decision came before, not how far this rank is."""
    done = QuorumAborted(Q, "b is done", after_step=2)
    ranks = [in_quorum(is_single=False, started=n) for n in (2, 2)]
    for steps in ranks:
        steps.on_commit_decision(CommitDecision(Q, 1, True))
        assert not steps.on_abort(done) and not steps.must_request
        steps.on_commit_decision(CommitDecision(Q, 2, True))
        assert steps.must_request
    ranks = [in_quorum(is_single=False, started=n) for n in (2, 3)]
    for steps in ranks:
        steps.on_commit_decision(CommitDecision(Q, 2, True))
        assert steps.on_abort(done) and not steps.must_request


def test_group_requests_after_the_same_decision():
    """With several workers, an abort counts for all from the next decision."""
    steps = in_quorum(is_single=False)
    steps.on_commit_decision(CommitDecision(Q, 0, True))
    steps.on_abort(QuorumAborted(Q, "b died"))
    steps.start_step(1.0)
    assert not steps.must_request
    steps.on_commit_decision(CommitDecision(Q, 1, False))
    assert steps.must_request


def test_group_does_not_wait_for_the_switch_of_an_aborted_quorum():
    """No decision about it comes: the step goes on, and fails in all ranks alike."""
    steps = in_quorum(is_single=False, started=1)
    assert steps.on_proposal(ProposeSwitch(Q, 1, 2), 1.0).ok
    steps.start_step(2.0)
    assert steps.is_undecided
    assert steps.on_abort(QuorumAborted(Q, "b died"))
    assert not steps.is_undecided and not steps.must_request
    confirmed = in_quorum(is_single=False, started=1)
    confirmed.on_proposal(ProposeSwitch(Q, 1, 2), 1.0)
    confirmed.on_confirmation(ConfirmSwitch(Q, 1))
    confirmed.on_abort(QuorumAborted(Q, "b died"))
    confirmed.start_step(2.0)
    assert confirmed.must_request  # as in all other ranks, which have the confirmation too


def test_own_abort_does_not_separate_a_group():
    """What one of several workers has found counts once the server has notified all of them."""
    steps = in_quorum(is_single=False)
    steps.mark_aborted(Q, "mine")
    steps.on_commit_decision(CommitDecision(Q, 0, True))
    assert not steps.must_request
    steps.on_abort(QuorumAborted(Q, "mine"))
    steps.on_commit_decision(CommitDecision(Q, 1, False))
    assert steps.must_request


def test_steps_per_second():
    """The rate is of the last steps, and falls while one takes longer."""
    steps = in_quorum(started=5)
    assert steps.steps_per_s(5.0) == 1.0
    assert steps.steps_per_s(15.0) == 0.1


def test_save_is_required_in_the_step_before_the_state_leaves():
    """And the request after that has it."""
    steps = in_quorum()
    steps.on_proposal(ProposeSwitch(Q, 1, 2), 0.0)
    steps.on_confirmation(ConfirmSwitch(Q, 1, leaves=True, last=True))
    assert not steps.must_save
    steps.start_step(1.0)
    assert (steps.must_save, steps.is_saved) == (True, False)
    steps.start_step(2.0)
    assert steps.must_request and steps.is_saved


@pytest.mark.parametrize("confirm", [ConfirmSwitch(Q, 1), ConfirmSwitch(Q, 1, leaves=True)])
def test_no_save_is_required_if_others_keep_the_state(confirm):
    """Whether the group stays or leaves."""
    steps = in_quorum()
    steps.on_proposal(ProposeSwitch(Q, 1, 1), 0.0)
    steps.on_confirmation(confirm)
    assert not steps.must_save
    steps.start_step(1.0)
    assert steps.must_request and not steps.is_saved


def test_save_is_required_in_a_step_without_a_quorum():
    """The worker keeps its place in the last one, and requests again in the next step."""
    steps = in_quorum()
    steps.start_step(1.0)
    steps.require_save()
    assert steps.must_save and steps.must_request and steps.quorum_id == Q
    steps.start_step(2.0)
    assert steps.is_saved
    steps.enter_quorum(Q + 1)
    assert not steps.must_save and not steps.is_saved


# ---- several workers as one group ---------------------------------------------------------------


def test_combined_request():
    """It has the metadata of all ranks, and the strictest conditions of any."""
    group = {
        1: request(metadata=("b",), min_replicas=2),
        0: request(metadata=("a",)),
    }
    assert combine_requests(group) == request(metadata=("a", "b"), min_replicas=2)
    assert combine_requests({0: request(), 1: request(shrink_only=True)}).shrink_only


def test_torn_group_heals():
    """Ranks at different steps, or one that is corrupted, share their state with no other group."""
    torn = combine_requests({0: request(step=5), 1: request(step=6)})
    assert torn.step == 5
    assert torn.state_version != "a"
    torn = combine_requests({0: request(), 1: request(state_version="its own")})
    assert torn.state_version not in (request().state_version, "its own")


def test_commit_decision():
    """One no decides; a yes needs all workers, alive; each step gets one decision."""
    votes = CommitVotes()
    assert votes.decide(2, all_live=True) is None
    votes.add_vote(0, CommitVote(Q, 1, True))
    assert votes.decide(2, all_live=True) is None
    votes.add_vote(1, CommitVote(Q, 1, True))
    assert votes.decide(2, all_live=True) == CommitDecision(Q, 1, True)
    votes.add_vote(1, CommitVote(Q, 2, False))
    assert votes.decide(2, all_live=True) == CommitDecision(Q, 2, False)
    votes.add_vote(0, CommitVote(Q, 2, True))
    votes.add_vote(0, CommitVote(Q, 1, True))
    assert votes.decide(2, all_live=True) is None
    votes.add_vote(0, CommitVote(Q + 1, 0, True))
    assert votes.decide(2, all_live=False) == CommitDecision(Q + 1, 0, False)


def test_server_process_needs_the_standard_library_only():
    """It starts without site-packages, so that it is there before torch is imported."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import hpc_elastic.ft.manager_server\n"
        "known = sys.stdlib_module_names | {'hpc_elastic', '__main__'}\n"
        "print({m.partition('.')[0] for m in sys.modules} - known)"
    )
    root = str(Path(hpc_elastic.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, root], text=True, capture_output=True, check=True
    )
    assert done.stdout.strip() == "set()"
