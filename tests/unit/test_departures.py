"""Members whose nodes are to be left: when their round breaks, and that nobody waits for them."""

from groups import (
    A,
    B,
    C,
    closed,
    confirm,
    decisions,
    failure,
    hold,
    kind,
    notes,
    propose,
    released,
    running,
    stop,
    training,
)

from hpc_elastic.rendezvous.group_change import GATHER_S, NOT_HELD_S
from hpc_elastic.rendezvous.log_entry import Agent
from hpc_elastic.rendezvous.round_state import RoundState
from hpc_elastic.step_agreement import StepVote


def noticed(*agents, left_s=5.0, **changes) -> RoundState:
    """Two nodes that train, of which these were put under notice at time 10."""
    m = training(A, B, **{"scale_up": "checkpoint", **changes})
    for agent in agents:
        m.noticed(agent, "signal", left_s, 10.0)
    return m


def agreed(m: RoundState, step: int, now: float) -> None:
    """Let A and B agree on a step: proposal 1 asks, proposal 2 is confirmed."""
    for number, ok in ((1, False), (2, True)):
        for agent in (A, B):
            actions = m.voted(agent, StepVote(number, ok, step - 1, 0.0), now)
    assert confirm((A, B), 2) in actions


def test_members_are_asked_to_hold_before_a_step_is_proposed():
    """Whoever is to save there must be held already."""
    m = training(A, B, scale_up="checkpoint")
    actions = m.noticed(A, "signal", 5.0, 10.0)
    asked = [a for a in actions if kind(a) in ("hold", "propose")]
    assert asked == [hold((A, B), 1), propose((A, B), 1, 0)]
    (note,) = notes(actions, "preemption_notice")
    assert note.fields == {"task": A.task, "host": "node1", "reason": "signal", "left_s": 5.0}


def test_the_round_breaks_at_the_agreed_step():
    """The one that leaves is released, the other is to join again; both are told to stop."""
    m = noticed(A)
    agreed(m, 20, 10.5)
    assert decisions(m.boundary(A, 20, 1, 11.0)) == []
    assert decisions(m.boundary(B, 20, 1, 11.1)) == [
        released((A,)),
        stop((A, B), "node1 leaves (signal), at the checkpoint of step 20"),
    ]
    assert m.run.participants.missing(m.run.rules.min_nodes) == [B.task]


def test_a_checkpoint_before_the_proposed_step_does_not_count():
    """Ranks that held there have gone on."""
    m = noticed(A)
    agreed(m, 20, 10.5)
    for agent in (A, B):
        assert decisions(m.boundary(agent, 15, 1, 11.0)) == []


def test_who_may_have_gone_on_for_a_step_that_is_taken_back_is_asked_anew():
    """They had held at step 20, and a later one was proposed: step 20 may not be the last."""
    m = noticed(A)
    for agent in (A, B):
        (*_, proposed) = m.voted(agent, StepVote(1, False, 19, 10.0), 10.1) or [None]
    assert proposed.message["step"] > 20
    for agent in (A, B):
        assert decisions(m.boundary(agent, 20, 1, 10.5)) == []
    actions = [*m.finished(B, 10.6), *m.tick(10.6)]
    assert propose((A, B), 0, 0) in actions and decisions(actions) == [hold((A, B), 2)]
    assert decisions(m.boundary(A, 20, 1, 10.7)) == [], "an answer to the request before"
    assert decisions(m.boundary(A, 20, 2, 10.8)) == [
        released((A,)),
        stop((A, B), "node1 leaves (signal), at the checkpoint of step 20"),
    ]


def test_an_announcement_of_the_agreed_step_needs_no_word_of_the_hold():
    """Whoever was confirmed was asked to hold before."""
    m = noticed(A)
    agreed(m, 20, 10.5)
    m.boundary(A, 20, 0, 11.0)
    assert kind(decisions(m.boundary(B, 20, 0, 11.1))[-1]) == "stop"


def test_who_was_released_is_not_waited_for():
    """Whatever Slurm says; and its leave, which comes later, changes nothing."""
    m = noticed(A)
    m.gone(A, "its node is to be left", 11.0)
    m.join(B, 11.1)
    assert decisions(m.slurm_says(running(A, B), 11.2, 11.2)) == [closed(2, (B,), 0)]


def test_any_break_releases_the_members_under_notice():
    """They do not join again, however the round ended; and its failures are consequences."""
    m = noticed(A, max_restarts=0)
    broken = m.worker_failed([failure(B)], B, 11.0)
    assert decisions(broken)[0] == released((A,))
    m.join(B, 11.1)
    assert decisions(m.slurm_says(running(B), 11.2, 11.2)) == [closed(2, (B,), 0)]


def test_a_released_task_comes_back_as_a_newcomer():
    """In its next attempt."""
    m = noticed(A)
    m.gone(A, "its node is to be left", 11.0)
    m.join(B, 11.1)
    m.slurm_says(running(B), 11.2, 11.2)
    again = Agent(A.task, 1, A.slot, "node7", 1)
    assert decisions(m.join(again, 20.0)) == [hold((B,), 2)]


def test_with_time_left_others_are_waited_for():
    """A time limit comes to all nodes, though not in the same second."""
    m = training(A, B, scale_up="checkpoint")
    assert decisions(m.noticed(A, "time_limit", 100.0, 10.0)) == []
    assert decisions(m.tick(10.0 + GATHER_S - 0.1)) == []
    assert decisions(m.tick(10.0 + GATHER_S)) == [hold((A, B), 1)]


def test_once_everybody_is_to_leave_nobody_else_is_waited_for():
    """One checkpoint does for all."""
    m = training(A, B, scale_up="checkpoint")
    m.noticed(A, "time_limit", 100.0, 10.0)
    assert decisions(m.noticed(B, "time_limit", 100.0, 10.1)) == [hold((A, B), 1)]


def test_a_departure_makes_room_for_a_newcomer():
    """It takes the place in the same break."""
    m = noticed(A, max_nodes=2)
    m.join(C, 10.2)
    agreed(m, 20, 10.5)
    m.boundary(A, 20, 1, 11.0)
    stopped = decisions(m.boundary(B, 20, 1, 11.1))[-1]
    assert (
        stopped.message["reason"]
        == "node3 joins, node1 leaves (signal), at the checkpoint of step 20"
    )


def test_a_newcomer_does_not_break_the_round_while_a_checkpoint_is_agreed_on():
    """Though the script has not announced any yet."""
    m = training(A, B, scale_up="checkpoint", scale_up_timeout_s=3.0)
    m.join(C, 10.0)
    agreed(m, 20, 12.5)
    assert decisions(m.tick(15.0)) == []
    assert kind(decisions(m.tick(15.5))[-1]) == "stop", "it announces none at all"


def test_nothing_is_agreed_on_once_a_member_is_done():
    """Its agent has no worker left to ask."""
    m = training(A, B, scale_up="checkpoint")
    m.finished(A, 9.0)
    assert not [a for a in m.noticed(B, "signal", 5.0, 10.0) if kind(a) == "propose"]


def test_a_notice_of_somebody_who_is_no_member_changes_nothing():
    """An agent in no round just leaves."""
    m = training(A, B, scale_up="checkpoint", max_nodes=2)
    m.join(C, 10.0)
    assert m.noticed(C, "signal", 5.0, 11.0) == []


def test_a_worker_may_ask_for_a_checkpoint():
    """No member holds for it."""
    m = training(A, B, scale_up="checkpoint")
    assert m.wants_checkpoint(A, 10.0) == [propose((A, B), 1, 0)]
    agreed(m, 20, 10.5)
    for agent in (A, B):
        assert decisions(m.boundary(agent, 20, 0, 11.0)) == []


# ---- when an agreement is begun, dropped, and begun again ---------------------------------


def asks(effects: list) -> list[int]:
    """The numbers of the proposals that are made, 0 for one that is withdrawn."""
    return [e.message["number"] for e in effects if kind(e) == "propose"]


def test_a_wish_of_a_script_that_does_not_pass_steps_is_dropped():
    """Nobody would ever save."""
    m = training(A)
    assert asks(m.wants_checkpoint(A, 10.0)) == [1]
    assert asks(m.voted(A, StepVote(1, True, None, 0.0), 10.1)) == [0]
    assert m.tick(1e6) == []


def test_a_wish_outlives_a_proposal_that_nobody_has_voted_on():
    """The worker does not ask twice."""
    m = training(A)
    m.wants_checkpoint(A, 10.0)
    assert asks(m.tick(16.0)) == [0]
    assert asks(m.tick(17.0)) == [2]


def test_a_proposal_is_withdrawn_when_the_newcomer_has_left_again():
    """Nobody waits for anything."""
    m = training(A, scale_up="checkpoint")
    m.join(B, 10.0)
    assert asks(m.gone(B, "its connection closed", 10.1)) == [0]


def test_ranks_that_do_not_stay_where_they_should_are_not_asked_at_once_again():
    """A script that saves and goes on would save at every other step; unless for a new reason."""
    m = noticed(A, left_s=1e6)
    m.tick(10.0 + GATHER_S)
    agreed(m, 20, 13.0)
    for agent in (A, B):
        m.voted(agent, StepVote(2, True, 21, 0.0), 14.0)
    assert asks(m.tick(14.0 + NOT_HELD_S - 1.0)) == []
    assert asks(m.noticed(B, "signal", 1e6, 15.0)) == [3]


def test_a_member_that_is_past_a_confirmed_step_goes_on_to_a_later_one():
    """Others were past it when they were asked to hold, and hold further on: for each other."""
    m = training(A, B, scale_up="checkpoint")
    m.wants_checkpoint(A, 10.0)
    agreed(m, 20, 10.5)
    m.boundary(A, 20, 0, 11.0)
    m.boundary(B, 19, 0, 11.0)
    assert asks(m.join(C, 11.0)) == []
    assert asks(m.boundary(B, 21, 0, 11.1)) == [3]
