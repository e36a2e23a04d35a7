"""A run whose nodes are replicas: who belongs to it, and when it is over, one behaviour a test."""

import random
from dataclasses import replace

from groups import (
    FIRST,
    A,
    B,
    C,
    D,
    SentBack,
    closed,
    decisions,
    departed,
    ended,
    failure,
    kind,
    notes,
    running,
)
from hpc_elastic.ft.messages import NO_QUORUM, ReplicaStatus
from hpc_elastic.rendezvous.effects import ClearHolds
from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, LogEntry, RoundRules
from hpc_elastic.rendezvous.messages import Reattach
from hpc_elastic.rendezvous.replica_state import SAVE_WITHIN_S, ReplicaState
from hpc_elastic.rendezvous.round_state import RoundPhase
from hpc_elastic.run.events import LossReason

B2 = Agent(B.task, 1, B.slot, "node9", 1)


def rules(**changes) -> RoundRules:
    """One to four nodes, two restarts."""
    defaults = {
        "min_nodes": 1, "max_nodes": 4, "max_restarts": 2,
        "straggler_timeout_s": 60.0, "last_call_s": 5.0, "below_min_timeout_s": None, "ft": True,
    }  # fmt: skip
    return RoundRules(**{**defaults, **changes})


def training(*agents: Agent, **changes) -> ReplicaState:
    """A machine whose first round has closed with these agents, which are in a quorum."""
    settings = rules(**changes)
    m = ReplicaState(FIRST, settings, 0.0, random.Random(1))
    for agent in agents:
        m.join(agent, 0.0)
    m.slurm_answered(running(*agents), 0.0, 0.0)
    assert m.run.phase is RoundPhase.RUNNING and m.run.ranks.members == agents
    for agent in agents:
        m.joined_quorum(agent)
    return m


def resumed(*members: Agent, lost: dict[str, int] | None = None, **changes) -> ReplicaState:
    """The machine of a leader that takes over a run with these members."""
    entry = LogEntry(
        9, 3, Endpoint("10.0.0.1", 4000, A.task, 0), round=4, members=members, lost=lost or {}
    )
    return ReplicaState(entry, rules(**changes), 0.0, random.Random(1))


# ---- who comes and goes -------------------------------------------------------------------


def test_all_of_the_first_round_are_placed():
    """It closes as any other."""
    settings = rules(max_nodes=2)
    m = ReplicaState(FIRST, settings, 0.0, random.Random(1))
    m.join(A, 0.0)
    assert decisions(m.join(B, 0.0)) == [closed(1, (A, B), 0, (A, B))]


def test_a_newcomer_is_admitted_at_once_and_placed_alone():
    """Nobody is told to stop."""
    m = training(A, B)
    assert decisions(m.join(C, 1.0)) == [closed(2, (A, B, C), 0, (C,))]
    assert m.run.phase is RoundPhase.RUNNING


def test_without_room_a_newcomer_waits_until_somebody_goes():
    """Max nodes holds."""
    m = training(A, B, max_nodes=2)
    assert decisions(m.join(C, 1.0)) == []
    assert decisions(m.agent_lost(B, "lost", 2.0)) == [
        departed(B, (A,)),
        closed(2, (A, C), 0, (C,)),
    ]


def test_one_that_is_gone_is_no_member_and_the_others_go_on():
    """Its departure is a decision; its task is brought back."""
    m = training(A, B, C)
    assert decisions(m.agent_lost(B, "lost", 1.0)) == [departed(B, (A, C))]
    assert m.run.phase is RoundPhase.RUNNING and m.run.ranks.members == (A, C)
    assert m.run.wants_slurm
    view = {**running(A, C), **running(B, s1="NODE_FAIL")}
    assert decisions(m.slurm_answered(view, 2.0, 2.0)) == []
    assert ClearHolds((B.task,)) in m.slurm_answered(view, 5.0, 5.0)


def test_another_attempt_takes_the_place_of_the_last():
    """Even if the leader has not noticed yet that the last one is gone."""
    m = training(A, B, C)
    assert decisions(m.join(B2, 1.0)) == [
        departed(B, (A, C)),
        closed(2, (A, C, B2), 0, (B2,)),
    ]


def test_when_all_are_gone_the_next_round_forms_as_the_first():
    """From min nodes on."""
    m = training(A, B, min_nodes=2)
    m.agent_lost(A, "lost", 1.0)
    assert decisions(m.agent_lost(B, "lost", 1.0)) == [departed(B, ())]
    assert m.run.phase is RoundPhase.FORMING
    assert decisions(m.join(C, 2.0)) == []
    m.join(D, 2.0)
    assert decisions(m.slurm_answered(running(C, D), 3.0, 3.0)) == [closed(2, (C, D), 0, (C, D))]


def test_a_notice_stops_nobody():
    """The node's agent and the keeper of the quorum see to it."""
    m = training(A, B)
    assert decisions(m.noticed(B, "signal", 30.0, 1.0)) == []
    assert decisions(m.tick(100.0)) == []


def test_too_few_for_too_long_go_back_to_the_queue():
    """All that are left, since no quorum can be made of them."""
    m = training(A, B, min_nodes=2, below_min_timeout_s=10.0)
    m.agent_lost(B, "lost", 1.0)
    assert decisions(m.tick(10.0)) == []
    assert decisions(m.tick(100.0)) == [] and m.save_by is not None, "it saves first"
    m.let_leave(A)
    (times_requeued,) = decisions(m.tick(100.1))
    assert (
        isinstance(times_requeued, SentBack)
        and times_requeued.all
        and times_requeued.agents == (A,)
    )
    assert m.run.ranks.members == ()


def test_too_few_whose_tasks_may_not_be_requeued_are_kept():
    """Given back, they would end."""
    m = training(A, B, min_nodes=2, below_min_timeout_s=10.0, max_requeues=0)
    m.agent_lost(B, "lost", 1.0)
    assert decisions(m.tick(100.0)) == [] and not m.run.is_short
    assert (
        m.sweep_answered("others hold it", 101.0) == m.sweep_answered("others hold it", 109.0) == []
    )


def test_too_few_whose_tasks_are_over_for_good_end_the_run():
    """There is nobody to wait for."""
    m = training(A, B, min_nodes=2, max_nodes=2)
    m.agent_lost(B, "lost", 1.0)
    assert decisions(m.slurm_answered(running(A, s1="CANCELLED"), 2.0, 2.0)) == []
    m.let_leave(A)
    (end,) = decisions(m.tick(2.1))
    assert kind(end) == "end" and end[1].status == "failed"


def test_no_run_waits_for_ever_for_a_state_that_is_not_saved():
    """Who is missing is told."""
    m = training(A, B, min_nodes=2, max_nodes=2)
    m.agent_lost(B, "lost", 1.0)
    m.slurm_answered(running(A, s1="CANCELLED"), 2.0, 2.0)
    assert decisions(m.tick(1.9 + SAVE_WITHIN_S)) == []
    effects = m.tick(2.0 + SAVE_WITHIN_S)
    assert kind(decisions(effects)[0]) == "end"
    (unsaved,) = notes(effects, "state_unsaved")
    assert unsaved.fields == {"hosts": [A.host]}


def test_a_replica_that_an_earlier_leader_has_placed_is_asked_before_the_run_fails():
    """The next leader may learn that the run is over before the replica has reported to it."""
    m = resumed(A, B, min_nodes=2, max_nodes=2)
    m.reattached(A, Reattach(9, 4, 0), 1.0)
    m.agent_lost(B, "lost", 1.0)
    assert decisions(m.slurm_answered(running(A, s1="CANCELLED"), 2.0, 2.0)) == []
    m.reported(A, ReplicaStatus(7, 0, 1, 0, is_aborted=False))
    assert decisions(m.tick(3.0)) == []
    m.let_leave(A)
    (end,) = decisions(m.tick(4.0))
    assert kind(end) == "end" and end[1].status == "failed"


def test_a_replica_without_a_state_is_not_awaited():
    """It has been in no quorum, and says so."""
    m = resumed(A, B, min_nodes=2, max_nodes=2)
    m.reattached(A, Reattach(9, 4, 0), 1.0)
    m.reported(A, ReplicaStatus(NO_QUORUM, 0, 0, 0, is_aborted=False))
    m.agent_lost(B, "lost", 1.0)
    (end,) = decisions(m.slurm_answered(running(A, s1="CANCELLED"), 2.0, 2.0))
    assert kind(end) == "end"


def test_a_run_that_stops_takes_no_newcomer_in():
    """It would train from the start, or keep the others from leaving."""
    m = training(A, B, max_restarts=0)
    m.worker_failed([failure(B)], B, 1.0)
    assert decisions(m.join(C, 2.0)) == []


# ---- workers that fail --------------------------------------------------------------------


def test_failed_workers_are_started_again_alone():
    """That is a restart of the run; the node is placed anew when it joins."""
    m = training(A, B)
    (told,) = decisions(m.worker_failed([failure(B)], B, 1.0))
    assert kind(told) == "stop" and told.agents == (B,)
    assert decisions(m.join(B, 2.0)) == [closed(2, (A, B), 1, (B,))]


def test_more_failures_than_restarts_end_the_run_with_the_first_of_them():
    """As everywhere."""
    m = training(A, B, max_restarts=0)
    (told,) = decisions(m.worker_failed([failure(B)], B, 1.0))
    assert kind(told) == "stop" and told.agents == (B,)
    m.let_leave(A)
    (end,) = decisions(m.tick(2.0))
    assert end == ended("failed", failure(B))


def test_failures_while_others_make_steps_are_no_crash_loop():
    """Progress is a step that anybody has made; restarts alone limit them."""
    m = training(A, B, max_restarts=9, max_failed_rounds=2)
    for step in (1, 2, 3):
        m.run.progressed(A, {"step": step}, float(step))
        assert m.worker_failed([failure(B)], B, float(step)) and m.run.phase is RoundPhase.RUNNING
        m.join(B, float(step))
    m.worker_failed([failure(B)], B, 5.0)
    m.join(B, 5.0)
    m.worker_failed([failure(B)], B, 6.0)
    m.let_leave(A)
    m.tick(6.1)
    assert m.run.entry.ending.status == "failed"


def test_a_bad_node_is_sent_away():
    """It is excluded, its replica let go, and the others go on."""
    m = training(A, B, C)
    bad = failure(B, "CUDA error: uncorrectable ECC error encountered")
    actions = decisions(m.worker_failed([bad], B, 1.0))
    assert [kind(a) for a in actions] == ["Exclude", "replica_left", "SentBack"]
    assert m.run.ranks.members == (A, C) and m.run.policy.restarts == 0


def test_a_bad_node_that_joins_again_is_sent_away_when_its_partner_is_lost():
    """A later leader would stop it: it must not be placed meanwhile."""
    m = training(A, B, C, D, unit_nodes=2, min_nodes=2)
    m.worker_failed([failure(B, "CUDA error: uncorrectable ECC error encountered")], B, 1.0)
    m.join(B, 1.5)
    actions = decisions(m.agent_lost(A, LossReason.SILENT, 2.0))
    assert "Exclude" in [kind(a) for a in actions] and kind(actions[-1]) == "SentBack"
    assert m.run.ranks.members == (C, D) and not m.run.participants.joined


# ---- the end ------------------------------------------------------------------------------


def test_the_run_has_succeeded_once_all_are_done():
    """What the first of them has returned is the result."""
    m = training(A, B)
    assert decisions(m.finished(B, 1.0)) == []
    assert decisions(m.finished(A, 2.0)) == [ended("succeeded", results="round-1.replica-1")]


def test_whoever_never_took_part_is_not_waited_for():
    """It would begin from the start, alone."""
    m = training(A, B)
    m.join(C, 1.0)
    m.finished(A, 2.0)
    assert decisions(m.finished(B, 2.0))[-1][1].status == "succeeded"


def test_nobody_is_admitted_once_somebody_is_done():
    """There would soon be nobody left to learn the state from."""
    m = training(A, B)
    m.finished(A, 1.0)
    assert decisions(m.join(C, 2.0)) == []


def test_whose_workers_fail_when_others_are_done_is_let_go():
    """The others have done the training to its end."""
    m = training(A, B)
    m.finished(A, 1.0)
    assert decisions(m.worker_failed([failure(B)], B, 2.0)) == [
        departed(B, (A,)),
        ended("succeeded", results="round-1.replica-0"),
    ]
    assert m.run.policy.restarts == 0


def test_the_last_one_that_is_not_done_may_go():
    """Its node is lost at the very end."""
    m = training(A, B)
    m.finished(A, 1.0)
    assert decisions(m.agent_lost(B, "lost", 2.0))[-1] == ended(
        "succeeded", results="round-1.replica-0"
    )


def test_who_starts_again_at_the_very_end_is_let_go():
    """Its workers were stopped before the first of the others was done."""
    m = training(A, B, C)
    m.worker_failed([failure(B)], B, 1.0)
    assert decisions(m.finished(A, 2.0)) == [departed(B, (A, C))]
    assert decisions(m.join(B, 3.0)) == []
    assert decisions(m.finished(C, 4.0)) == [ended("succeeded", results="round-1.replica-0")]


def test_a_failure_that_is_told_again_is_spent_once():
    """The agent's connection broke before it was told to stop."""
    m = training(A, B)
    m.worker_failed([failure(B)], B, 1.0)
    (told,) = decisions(m.worker_failed([failure(B)], B, 2.0))
    assert kind(told) == "stop" and m.run.policy.restarts == 1


# ---- the next leader ----------------------------------------------------------------------


def test_members_go_on_under_the_next_leader():
    """The leader before is lost; the others only say that they are here."""
    m = resumed(A, B, C, lost={A.task: 0})
    assert m.run.phase is RoundPhase.RUNNING and m.run.ranks.members == (B, C)
    assert m.run.participants.pending_rejoin == {B, C}
    assert decisions(m.reattached(B, Reattach(9, 4, B.slot), 0.5)) == []
    assert decisions(m.reattached(C, Reattach(9, 4, C.slot), 0.6)) == []
    assert not m.run.participants.pending_rejoin


def test_a_member_that_is_not_here_in_time_is_gone():
    """As one that falls silent."""
    m = resumed(A, B, C, lost={A.task: 0})
    m.reattached(B, Reattach(9, 4, B.slot), 0.5)
    m.run.note_silence(C)
    assert decisions(m.agent_lost(C, LossReason.LEADER_NOT_FOUND, 7.0)) == [departed(C, (B,))]


def test_the_leader_before_comes_back_with_its_workers():
    """It was only cut off: it is admitted again, and they are not stopped."""
    m = resumed(A, B, lost={A.task: 0})
    m.reattached(B, Reattach(9, 4, B.slot), 0.5)
    assert decisions(m.reattached(A, Reattach(9, 4, A.slot), 3.0)) == [closed(5, (B, A), 0, ())]
    assert A.task not in m.run.participants.lost


def test_results_are_found_by_the_round_that_placed_a_member():
    """Which is none of this leader's."""
    m = resumed(A, B, lost={A.task: 0})
    m.reattached(B, Reattach(5, 2, B.slot), 0.5)
    assert decisions(m.finished(B, 1.0)) == [ended("succeeded", results="round-2.replica-1")]


def test_who_is_here_without_room_starts_anew():
    """Its place was taken meanwhile."""
    m = training(A, B, max_nodes=2)
    (told,) = decisions(m.reattached(C, Reattach(2, 1, C.slot), 1.0))
    assert kind(told) == "stop" and told.agents == (C,)


def test_silence_of_many_at_once_blames_nobody():
    """Agents that fall silent together are the network's fault; strikes need evidence."""
    m = training(A, B, C)
    m.run.note_silence(B)
    m.agent_lost(B, LossReason.SILENT, 1.0)
    m.run.note_silence(C)
    m.agent_lost(C, LossReason.SILENT, 1.0)
    assert notes(m.tick(1.0), "host_failure") == []
    m = training(A, B, C)
    m.run.note_silence(B)
    m.agent_lost(B, LossReason.SILENT, 1.0)
    m.tick(1.0)
    assert len(notes(m.join(replace(B, attempt=1), 9.0), "host_failure")) == 1
