"""The content of status.json."""

import random
from dataclasses import replace
from types import SimpleNamespace

from groups import A, B, failure
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig, LeaderState
from hpc_elastic.rendezvous.log_entry import Endpoint, Failure, LogEntry, RoundRules
from hpc_elastic.rendezvous.messages import Failed, Finished, Heartbeat, Join, Reattach
from hpc_elastic.rendezvous.run_status import status_of
from hpc_elastic.rendezvous.term import Term


def leading(**rules) -> LeaderState:
    """A leader that takes over after two rounds and one restart."""
    claim = LogEntry(4, 3, Endpoint("10.0.0.1", 4000, "7_0", 0), round=2, restarts=1)
    settings = RoundRules(rules.pop("min_nodes", 1), 2, 3, 60.0, 5.0, **rules)
    return LeaderState(claim, settings, HeartbeatConfig(0.5, 3.0), 0.0, random.Random(1))


def training() -> LeaderState:
    """A leader of two nodes that train."""
    leader = leading()
    for agent in (A, B):
        leader.connected(agent, 0.0)
        leader.received(agent, Join(request=1), 0.0)
    leader.appended()
    return leader


def test_a_group_that_forms():
    """It counts the nodes that have joined; there are no members yet."""
    leader = leading()
    leader.connected(A, 0.0)
    leader.received(A, Join(request=1), 0.0)
    assert status_of(leader) == {
        "phase": "waiting", "term": 3, "round": 2, "nodes": 0, "world_size": 0, "members": [],
        "joined": 1, "restarts": 1, "max_restarts": 3,
        "step": None, "total_steps": None, "loss": None, "samples": None, "blocked_s": 0.0,
        "checkpoint": None, "stragglers": [], "warnings": [], "metrics": {}, "gpu_use": None,
        "gpu_memory": None, "step_times": {},
    }  # fmt: skip


def test_a_round_that_is_not_decided_yet_is_not_shown():
    """Its leader may fail before the entry exists, and then there is no such round."""
    leader, shown = leading(), []
    executor = SimpleNamespace(carry_out=shown.append)
    term = Term(leader, executor)
    for agent in (A, B):
        leader.connected(agent, 0.0)
        leader.received(agent, Join(request=1), 0.0)
    term.show(1.0)
    assert shown == []
    leader.appended()
    term.show(2.0)
    assert [(show.status["round"], show.status["nodes"]) for show in shown] == [(3, 2)]


def test_what_is_wrong_with_a_training_that_goes_on_is_a_warning():
    """Of all nodes together: the ranks without a group, and the first loss that is no number."""
    leader = training()
    leader.progress = {
        A: {"step": 5, "apart": [[0, 0]], "bad_loss": [0, 4, "nan"]},
        B: {"step": 5, "apart": [[1, 0]], "bad_loss": [1, 4, "inf"]},
    }
    together, loss = status_of(leader)["warnings"]
    assert "ranks 0, 1 with no process group" in together
    assert loss == "the loss is nan at step 4 (rank 0)"


def test_failed_terms_are_a_warning_until_there_is_progress():
    """The next leader shows why its predecessors have failed."""
    leader = leading()
    error = Failure("7_0", "node1", 0, 0, 0.0, "no socket", "TypeError", phase="lead")
    leader.run.policy.term_failed(error)
    leader.run.policy.term_failed(error)
    (warning,) = status_of(leader)["warnings"]
    assert warning.startswith("2 terms in a row failed") and "TypeError: no socket" in warning
    leader.run.policy.record_step(1)
    assert status_of(leader)["warnings"] == []


def test_metrics_are_the_first_ranks_and_gpus_those_of_all():
    """The mean of their use, and the fullest memory."""
    leader = training()
    one = {"step": 5, "metrics": {"lr": 0.1}, "gpu_use": 0.9, "gpu_memory": 0.2}
    leader.progress = {A: one, B: {**one, "metrics": {"lr": 9}, "gpu_use": 0.3, "gpu_memory": 0.8}}
    status = status_of(leader)
    assert (status["metrics"], status["gpu_use"], status["gpu_memory"]) == ({"lr": 0.1}, 0.6, 0.8)


def test_a_group_that_trains():
    """It lists the members in rank order."""
    status = status_of(training())
    assert (status["phase"], status["round"], status["nodes"]) == ("training", 3, 2)
    assert status["world_size"] == 2 and status["joined"] == 0
    assert status["members"] == [
        {"task": "7_0", "host": "node1", "group_rank": 0, "nproc": 1},
        {"task": "7_1", "host": "node2", "group_rank": 1, "nproc": 1},
    ]


def test_progress_is_the_furthest_step_and_the_first_ranks_loss():
    """Members report at different times, and not every field."""
    leader = training()
    for agent, progress in (
        (A, {"step": 7, "total": 100, "loss": None, "samples": 56, "blocked_s": 0.5}),
        (B, {"step": 8, "total": 100, "loss": 0.25, "blocked_s": 0.75}),
    ):
        leader.received(agent, Heartbeat(progress=progress), 1.0)
    status = status_of(leader)
    assert (status["step"], status["total_steps"], status["loss"]) == (8, 100, 0.25)
    assert (status["samples"], status["blocked_s"]) == (56, 0.75)
    leader.received(A, Heartbeat(progress={"step": 9, "loss": 0.5}), 2.0)
    assert status_of(leader)["loss"] == 0.5


def test_a_run_that_has_ended_shows_how():
    """It shows the last group as well."""
    leader = training()
    for agent in (A, B):
        leader.received(agent, Finished(index=5), 1.0)
    status = status_of(leader)
    assert status["phase"] == "succeeded" and status["nodes"] == 2


def test_a_run_that_has_ended_keeps_its_last_step():
    """Members that reported it are gone; a leader that took over knows the checkpoint only."""
    leader = training()
    leader.received(A, Heartbeat(progress={"step": 7}), 1.0)
    for agent in (A, B):
        leader.received(agent, Finished(index=5), 1.0)
    for agent in (A, B):
        leader.disconnected(agent, "ended", 2.0)
    assert status_of(leader)["step"] == 7
    leader = training()
    leader.rounds.run.policy.record_checkpoint(4)
    for agent in (A, B):
        leader.received(agent, Finished(index=5), 1.0)
    assert status_of(leader)["step"] == 4


def test_a_run_that_has_failed_shows_its_restarts():
    """It shows all restarts."""
    leader = training()
    leader.rounds.run.policy.restarts = 3
    failed = Failed([failure(A)], index=5)
    leader.received(A, failed, 1.0)
    for agent in (A, B):
        leader.received(agent, Join(request=2), 2.0)
    status = status_of(leader)
    assert (status["phase"], status["restarts"], status["max_restarts"]) == ("failed", 3, 3)


def test_a_run_whose_nodes_were_requeued():
    """The run is in the queue again."""
    leader = leading(min_nodes=2, below_min_timeout_s=1.0)
    leader.connected(A, 0.0)
    leader.received(A, Join(request=1), 0.0)
    for now in (0.5, 1.0, 1.5, 2.0, 2.5):
        leader.tick(now)
    assert status_of(leader)["phase"] == "requeued"


def test_nodes_with_different_versions_are_a_warning():
    """It names the nodes of each; one that reports none, as an older version, is not judged."""
    leader = training()
    assert status_of(leader)["warnings"] == []
    join = Reattach(4, 3, 0, versions="Python 3.11.7, torch 2.13.0")
    leader.received(A, join, 0.1)
    leader.received(B, join, 0.1)
    assert status_of(leader)["warnings"] == []
    leader.received(B, replace(join, versions="Python 3.12.1, torch 2.13.0"), 0.2)
    (warning,) = status_of(leader)["warnings"]
    assert "Python 3.11.7, torch 2.13.0 on node1" in warning
    assert "Python 3.12.1, torch 2.13.0 on node2" in warning
