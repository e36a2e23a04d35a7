"""Checkpoint boundaries: where the members of a round stand, and when a group may be stopped."""

from groups import A, B, C, D, decisions, pause, poll_none, request, stop, training
from hpc_elastic.rendezvous.group_change import STRAGGLE_S, CheckpointBarrier
from hpc_elastic.run.events import LossReason
from hpc_elastic.step_agreement import VOTE_WITHIN_S, StepVote


def announced(*announcements) -> CheckpointBarrier:
    """Boundaries after these announcements: (agent, step, held, time)."""
    boundaries = CheckpointBarrier()
    for agent, step, held, now in announcements:
        boundaries.announce(agent, step, held, now)
    return boundaries


def test_nothing_is_reached_before_somebody_holds():
    """Members that pass a boundary go on to later steps."""
    b = announced((A, 10, False, 1.0), (B, 10, False, 1.0))
    assert b.seen and b.reached((A, B), 1.0) is None


def test_reached_once_all_members_have_announced_the_step_that_is_held():
    """The last one closes it, in whichever order they come."""
    b = announced((B, 10, True, 1.0))
    assert b.reached((A, B), 1.0) is None
    b.announce(A, 10, True, 1.5)
    assert b.reached((A, B), 1.5) == 10


def test_who_has_passed_the_boundary_has_arrived():
    """It stands in the collective of a step that the others do not make."""
    b = announced((A, 10, False, 1.0), (B, 10, True, 1.1))
    assert b.reached((A, B), 1.1) == 10


def test_who_announced_an_earlier_step_has_not_arrived():
    """Its checkpoint of this step is not complete."""
    b = announced((A, 5, False, 0.5), (B, 10, True, 1.0))
    assert b.reached((A, B), 1.0) is None
    b.announce(A, 10, False, 1.2)
    assert b.reached((A, B), 1.2) == 10


def test_a_later_boundary_that_is_held_replaces_an_earlier_one():
    """Somebody passed the first one before it was asked to hold."""
    b = announced((A, 10, True, 1.0), (B, 20, True, 2.0))
    assert b.reached((A, B), 2.0) is None
    b.announce(A, 20, True, 2.5)
    assert b.reached((A, B), 2.5) == 20


def test_stragglers_behind_the_first_rank_are_waited_for_a_while():
    """A script may announce its boundaries on the rank that writes the checkpoints alone."""
    b = announced((A, 10, True, 5.0))
    assert b.reached((A, B), 5.0 + STRAGGLE_S - 0.1) is None
    assert b.reached((A, B), 5.0 + STRAGGLE_S) == 10


def test_without_the_first_rank_there_is_no_such_end():
    """The checkpoint's writer has not announced it."""
    b = announced((B, 10, True, 5.0))
    assert b.reached((A, B), 1e6) is None


def test_a_new_round_begins_anew():
    """But for that the script is known to announce boundaries."""
    b = announced((A, 10, True, 1.0))
    b.new_round()
    assert b.seen and b.reached((A,), 99.0) is None
    b.announce(A, 5, True, 100.0)
    assert b.reached((A,), 100.0) == 5


def test_a_hold_that_is_lifted_is_forgotten():
    """Where the members are counts at their next boundary."""
    b = announced((A, 10, True, 1.0), (B, 10, True, 1.0))
    b.release()
    assert b.reached((A, B), 99.0) is None
    b.announce(B, 20, True, 100.0)
    assert b.reached((A, B), 100.0) is None


def test_a_group_without_members_has_reached_nothing():
    """There is nobody to stop."""
    assert announced((A, 10, True, 1.0)).reached((), 1.0) is None


# ---- the machine, with scale_up=checkpoint ------------------------------------------------------


def test_a_parked_node_is_admitted_once_all_members_stay():
    """No member makes a step that the restart would undo."""
    m = training(A, B, scale_up="checkpoint")
    assert m.join(C, 1.0)[-1] == request((A, B), 1, 0)
    assert poll_none(m, (A, B), 1, 1.1) == [pause((A, B), 1)]
    assert decisions(m.checkpointed(A, 10, 1, 2.0)) == []
    stopped = decisions(m.checkpointed(B, 10, 1, 2.1))
    assert stopped == [stop((A, B), "node3 joins, at the checkpoint of step 10")]


def test_boundaries_announced_with_nobody_waiting_stop_nothing():
    """Training goes on, and the machine remembers that the script announces them."""
    m = training(A, B, scale_up="checkpoint")
    for agent in (A, B):
        assert m.checkpointed(agent, 10, 0, 2.0) == []
    assert m.change.barrier.seen


def test_members_are_asked_to_stay_once():
    """However often time passes, and however many wait."""
    m = training(A, scale_up="checkpoint")
    m.checkpointed(A, 5, 0, 0.5)
    m.join(B, 1.0)
    assert poll_none(m, (A,), 1, 1.0) == [pause((A,), 1)]
    assert decisions(m.join(C, 1.1)) == [] and decisions(m.tick(50.0)) == []


def test_a_node_that_does_not_answer_does_not_delay_the_others():
    """They stay at their next checkpoint; if it polls steps, it votes against that later."""
    m = training(A, B, scale_up="checkpoint")
    m.checkpointed(A, 5, 0, 0.5)
    m.join(C, 1.0)
    m.voted(A, StepVote(1, True, None, 0.0), 1.1)
    assert decisions(m.tick(1.0 + VOTE_WITHIN_S)) == []
    assert decisions(m.tick(1.1 + VOTE_WITHIN_S)) == [pause((A, B), 1)]


def test_members_that_poll_steps_after_all_agree_on_one():
    """The training had not begun when they were asked."""
    m = training(A, B, scale_up="checkpoint")
    m.join(C, 1.0)
    poll_none(m, (A, B), 1, 1.1)
    m.checkpointed(A, 10, 1, 2.0)
    assert request((A, B), 2, 0) in m.voted(B, StepVote(1, False, 9, 1.0), 2.1)
    assert decisions(m.checkpointed(B, 10, 1, 2.2)) == [], "A has continued"


def test_members_are_released_when_the_newcomer_leaves():
    """There is nothing to wait for any more."""
    m = training(A, B, scale_up="checkpoint")
    m.join(C, 1.0)
    poll_none(m, (A, B), 1, 1.1)
    m.checkpointed(A, 10, 1, 2.0)
    assert decisions(m.agent_lost(C, LossReason.SILENT, 2.5)) == [pause((A, B), 1, released=True)]
    assert decisions(m.checkpointed(B, 10, 1, 2.6)) == []


def test_a_pause_that_was_released_does_not_count_for_the_next_one():
    """Members have trained on since: what they would lose begins at their next checkpoint."""
    m = training(A, B, scale_up="checkpoint")
    m.join(C, 1.0)
    poll_none(m, (A, B), 1, 1.1)
    m.checkpointed(A, 10, 1, 2.0)
    m.agent_lost(C, LossReason.SILENT, 2.5)
    m.join(D, 3.0)
    assert poll_none(m, (A, B), 2, 3.0) == [pause((A, B), 2)]
    assert decisions(m.checkpointed(B, 10, 1, 3.1)) == [], "at the first request, and continues"
    assert decisions(m.checkpointed(A, 20, 2, 4.0)) == []
    (told,) = decisions(m.checkpointed(B, 20, 2, 4.1))
    assert told.message.reason == "node4 joins, at the checkpoint of step 20"


def test_a_pause_ends_with_its_round():
    """The next round's members stay only if a node waits then."""
    m = training(A, B, scale_up="checkpoint", max_nodes=2)
    m.join(C, 1.0)
    m.agent_lost(B, LossReason.SILENT, 2.0)
    m.join(A, 2.1)
    assert m.run.ranks.members == (A, C)
    assert decisions(m.tick(3.0)) == []


def test_a_script_that_announces_nothing_is_broken_after_grow_after_s():
    """There is no good moment to wait for."""
    m = training(A, B, scale_up="checkpoint", scale_up_timeout_s=20.0)
    m.join(C, 1.0)
    poll_none(m, (A, B), 1, 1.1)
    assert decisions(m.tick(20.9)) == []
    (told,) = decisions(m.tick(21.0))
    assert told.message.reason == "node3 joins; the script announces no checkpoints"


def test_a_script_that_has_ever_announced_one_is_waited_for():
    """Its next checkpoint may be an hour away; a join costs no step."""
    m = training(A, B, scale_up="checkpoint", scale_up_timeout_s=20.0)
    m.checkpointed(A, 5, 0, 0.5)
    m.join(C, 1.0)
    poll_none(m, (A, B), 1, 1.1)
    assert decisions(m.tick(3600.0)) == []


def test_the_first_one_to_come_decides_how_long_a_silent_script_is_waited_for():
    """Newcomers that come one by one do not put each other off."""
    m = training(A, scale_up="checkpoint", scale_up_timeout_s=20.0)
    m.join(B, 1.0)
    m.join(C, 19.0)
    (told,) = decisions(m.tick(21.0))
    assert told.agents == (A,) and "node2, node3 joins" in told.message.reason
