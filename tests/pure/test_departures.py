"""Preempted members: when their round breaks, and that the next round does not wait for them."""

from groups import (
    A,
    B,
    C,
    closed,
    decisions,
    failure,
    kind,
    notes,
    pause,
    released,
    request,
    running,
    stop,
    training,
)
from hpc_elastic.rendezvous.group_change import GATHER_S, NOT_PAUSED_S
from hpc_elastic.rendezvous.log_entry import Agent
from hpc_elastic.rendezvous.round_state import RoundState
from hpc_elastic.run.events import LossReason
from hpc_elastic.step_agreement import StepVote


def noticed(*agents, left_s=5.0, **changes) -> RoundState:
    """Two nodes that train; these are preempted at time 10."""
    m = training(A, B, **{"scale_up": "checkpoint", **changes})
    for agent in agents:
        m.noticed(agent, "signal", left_s, 10.0)
    return m


def agreed(m: RoundState, step: int, now: float) -> None:
    """Let A and B agree on a step: proposal 1 asks, proposal 2 is confirmed."""
    for number, ok in ((1, False), (2, True)):
        for agent in (A, B):
            actions = m.voted(agent, StepVote(number, ok, step - 1, 0.0), now)
    (sent,) = decisions(actions)
    assert (sent.message.request.number, sent.message.request.confirmed) == (2, True)


def test_a_notice_starts_an_agreement_on_a_step():
    """The members stay at the agreed step."""
    m = training(A, B, scale_up="checkpoint")
    actions = m.noticed(A, "signal", 5.0, 10.0)
    assert request((A, B), 1, 0) in actions
    (note,) = notes(actions, "preemption_notice")
    assert note.fields == {"task": A.task, "host": "node1", "reason": "signal", "left_s": 5.0}
    for agent in (A, B):
        proposed = m.voted(agent, StepVote(1, False, 19, 0.0), 10.1)
    assert proposed == [request((A, B), 2, 20)]
    for agent in (A, B):
        confirmed = m.voted(agent, StepVote(2, True, 19, 0.0), 10.2)
    assert confirmed == [pause((A, B), 2, 20)]


def test_the_round_breaks_at_the_agreed_step():
    """The preempted member is released and the other joins again; both stop."""
    m = noticed(A)
    agreed(m, 20, 10.5)
    assert decisions(m.checkpointed(A, 20, 2, 11.0)) == []
    assert decisions(m.checkpointed(B, 20, 2, 11.1)) == [
        released((A,)),
        stop((A, B), "node1 leaves (signal), at the checkpoint of step 20"),
    ]
    assert m.run.participants.missing(m.run.rules.min_nodes) == [B.task]


def test_a_checkpoint_before_the_proposed_step_does_not_count():
    """Ranks do not stay there."""
    m = noticed(A)
    agreed(m, 20, 10.5)
    for agent in (A, B):
        assert decisions(m.checkpointed(agent, 15, 0, 11.0)) == []


def test_a_round_does_not_wait_for_released_members():
    """Slurm's answers and the later end of the connection change nothing."""
    m = noticed(A)
    m.agent_lost(A, "its node is to be left", 11.0)
    m.join(B, 11.1)
    assert decisions(m.slurm_answered(running(A, B), 11.2, 11.2)) == [closed(2, (B,), 0)]


def test_any_break_releases_the_preempted_members():
    """They do not join again, and failures of the round are consequences."""
    m = noticed(A, max_restarts=0)
    broken = m.worker_failed([failure(B)], B, 11.0)
    assert decisions(broken)[0] == released((A,))
    m.join(B, 11.1)
    assert decisions(m.slurm_answered(running(B), 11.2, 11.2)) == [closed(2, (B,), 0)]


def test_a_released_task_comes_back_as_a_newcomer():
    """It joins with its next attempt."""
    m = noticed(A)
    m.agent_lost(A, "its node is to be left", 11.0)
    m.join(B, 11.1)
    m.slurm_answered(running(B), 11.2, 11.2)
    again = Agent(A.task, 1, A.slot, "node7", 1)
    assert request((B,), 1, 0) in m.join(again, 20.0)


def test_with_time_left_the_leader_waits_for_further_notices():
    """A time limit comes to all nodes, but not in the same second."""
    m = training(A, B, scale_up="checkpoint")
    assert decisions(m.noticed(A, "time_limit", 100.0, 10.0)) == []
    assert decisions(m.tick(10.0 + GATHER_S - 0.1)) == []
    assert m.tick(10.0 + GATHER_S) == [request((A, B), 1, 0)]


def test_once_all_members_are_preempted_the_leader_waits_no_longer():
    """One checkpoint is enough for all."""
    m = training(A, B, scale_up="checkpoint")
    m.noticed(A, "time_limit", 100.0, 10.0)
    assert m.noticed(B, "time_limit", 100.0, 10.1)[-1] == request((A, B), 1, 0)


def test_a_departure_makes_room_for_a_newcomer():
    """The newcomer joins in the same break."""
    m = noticed(A, max_nodes=2)
    m.join(C, 10.2)
    agreed(m, 20, 10.5)
    m.checkpointed(A, 20, 2, 11.0)
    stopped = decisions(m.checkpointed(B, 20, 2, 11.1))[-1]
    assert (
        stopped.message.reason == "node3 joins, node1 leaves (signal), at the checkpoint of step 20"
    )


def test_a_newcomer_does_not_break_the_round_during_an_agreement():
    """Even if the script has not announced a checkpoint yet."""
    m = training(A, B, scale_up="checkpoint", scale_up_timeout_s=3.0)
    m.join(C, 10.0)
    agreed(m, 20, 12.5)
    assert decisions(m.tick(15.0)) == []
    assert kind(decisions(m.tick(15.5))[-1]) == "stop", "it announces none at all"


def test_there_is_no_agreement_once_a_member_is_done():
    """Its agent has no worker left."""
    m = training(A, B, scale_up="checkpoint")
    m.finished(A, 9.0)
    assert not [a for a in m.noticed(B, "signal", 5.0, 10.0) if kind(a) == "checkpoint_request"]


def test_a_notice_of_an_agent_that_is_no_member_changes_nothing():
    """An agent in no round leaves at once."""
    m = training(A, B, scale_up="checkpoint", max_nodes=2)
    m.join(C, 10.0)
    assert m.noticed(C, "signal", 5.0, 11.0) == []


def test_a_worker_may_request_a_checkpoint():
    """No member stays at it."""
    m = training(A, B, scale_up="checkpoint")
    assert m.wants_checkpoint(A, 10.0) == [request((A, B), 1, 0)]
    agreed(m, 20, 10.5)
    for agent in (A, B):
        assert decisions(m.checkpointed(agent, 20, 0, 11.0)) == []


# ---- when an agreement is begun, dropped, and begun again ---------------------------------


def asks(effects: list) -> list[int]:
    """The numbers of the requests, 0 for a withdrawn one."""
    sent = [e.message.request for e in effects if kind(e) == "checkpoint_request"]
    return [request.number if request else 0 for request in sent]


def test_a_request_of_a_script_that_does_not_poll_steps_is_dropped():
    """No rank would save."""
    m = training(A)
    assert asks(m.wants_checkpoint(A, 10.0)) == [1]
    assert asks(m.voted(A, StepVote(1, True, None, 0.0), 10.1)) == [0]
    assert m.tick(1e6) == []


def test_a_request_outlives_a_proposal_without_votes():
    """The worker requests it only once."""
    m = training(A)
    m.wants_checkpoint(A, 10.0)
    assert asks(m.tick(16.0)) == [0]
    assert asks(m.tick(17.0)) == [2]


def test_a_proposal_is_withdrawn_when_the_newcomer_has_left_again():
    """No node waits any more."""
    m = training(A, scale_up="checkpoint")
    m.join(B, 10.0)
    assert asks(m.agent_lost(B, LossReason.CONNECTION_CLOSED, 10.1)) == [0]


def test_after_ranks_did_not_stay_the_next_request_is_delayed():
    """Otherwise a script that saves and continues would save at every other step."""
    m = noticed(A, left_s=1e6)
    m.tick(10.0 + GATHER_S)
    agreed(m, 20, 13.0)
    for agent in (A, B):
        m.voted(agent, StepVote(2, True, 21, 0.0), 14.0)
    assert asks(m.tick(14.0 + NOT_PAUSED_S - 1.0)) == []
    assert asks(m.noticed(B, "signal", 1e6, 15.0)) == [3]


def test_a_member_that_is_past_a_confirmed_step_goes_on_to_a_later_one():
    """A node has joined since, for which all ranks stay."""
    m = training(A, B, scale_up="checkpoint")
    m.wants_checkpoint(A, 10.0)
    agreed(m, 20, 10.5)
    m.voted(A, StepVote(2, True, 21, 0.0), 11.0)
    assert asks(m.join(C, 11.0)) == []
    assert asks(m.voted(B, StepVote(2, True, 21, 0.0), 11.1)) == [3]
