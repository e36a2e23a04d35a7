"""What the event log says of a leader's actions, and an agent of its workers."""

import random
from dataclasses import replace

from leaders import LIVENESS

from groups import A, B, C, departed, notes, training
from hpc_elastic.rendezvous.effects import Note
from hpc_elastic.rendezvous.leader_state import LeaderState
from hpc_elastic.rendezvous.log_entry import Endpoint, LogEntry, RoundRules, claim
from hpc_elastic.rendezvous.round_state import stop
from hpc_elastic.rendezvous.task_recovery import RequeueBackoff
from hpc_elastic.run.events import problems
from hpc_elastic.worker.shared_page import WorkerStatus

NOTHING = WorkerStatus(None, None, None, None, None, None, 0)


def is_as_described(note: Note) -> bool:
    """Whether the line that it becomes is one of its kind."""
    line = {"v": 1, "time": 1.0, "kind": note.kind, "task": "7_0", **note.fields}
    return problems(line) == []


def test_a_stop_says_of_what_and_whether_all_have_saved():
    """The step only if all ranks have its checkpoint."""
    saved, _ = stop((A, B), "node3 joins", "regroup", 4, 20)
    assert saved.fields == {
        "reason": "node3 joins", "cause": "regroup", "round": 4, "step": 20, "nodes": 2,
        "hosts": [A.host, B.host],
    }  # fmt: skip
    lost, _ = stop((A,), "node2 is gone: silent", "node_lost", 4)
    assert "step" not in lost.fields
    assert is_as_described(saved) and is_as_described(lost)


def test_a_line_names_twenty_nodes_at_most():
    """A run may have thousands, and the number is said."""
    many = tuple(replace(A, host=f"n{i}") for i in range(1000))
    back = RequeueBackoff(RoundRules(1, 4, 0, 60.0, 1.0), random.Random(0))
    for note, *_ in (stop(many, "", "regroup", 1), back.requeue_all(many), back.requeue(many)):
        assert note.fields["nodes"] == 1000 and len(note.fields["hosts"]) == 20
        assert is_as_described(note)


def test_a_round_says_which_replicas_it_places():
    """Nothing of the kind where all start together."""
    run = training(A, B).run
    (together,) = notes(run.announce((A, B)), "round")
    assert "placed" not in together.fields and together.fields["world_size"] == A.nproc + B.nproc
    (placed,) = notes(run.announce((B,), {1: (B,)}), "round")
    assert placed.fields["placed"] == [B.task]
    assert is_as_described(together) and is_as_described(placed)


def test_the_next_leader_notes_that_the_one_before_is_no_replica_any_more():
    """Nobody else could: it died."""
    leader = Endpoint("10.0.0.1", 4000, A.task, A.attempt)
    before = LogEntry(3, 1, leader, round=1, members=(A, B, C))
    after = claim(4, before, replace(leader, task=B.task, attempt=B.attempt), 0.0)
    rules = RoundRules(1, 4, 0, 60.0, 1.0, ft=True)
    leads, left = LeaderState(after, rules, LIVENESS, 0.0, random.Random(0)).start_leading()
    assert leads.kind == "leader" and left == departed(A, (B, C))
    assert is_as_described(leads) and is_as_described(left)


def test_workers_that_are_stopped_say_how_far_they_have_come():
    """What a script says of its steps goes before their count."""
    from hpc_elastic.agent.elastic_agent import last_step_fields

    counted = replace(NOTHING, step=3, step_time=10.00049)
    asks = replace(counted, step=4, step_time=11.0, passed=104)
    assert last_step_fields([NOTHING]) == {}
    assert last_step_fields([NOTHING, counted]) == {"step": 3, "step_time": 10.0}
    assert last_step_fields([counted, asks]) == {"step": 104, "step_time": 11.0}
