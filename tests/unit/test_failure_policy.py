"""The cost of a broken round, and the hosts to blame."""

import pytest
from groups import A, B, C, D, SentBack, closed, decisions, failure, kind, notes, running, training

from hpc_elastic.rendezvous.effects import Exclude
from hpc_elastic.rendezvous.failure_policy import STRIKES, strikes_of
from hpc_elastic.rendezvous.log_entry import Agent, FailureCounters
from hpc_elastic.rendezvous.round_state import RoundState

UNCORRECTABLE = "CUDA error: uncorrectable ECC error encountered"


def fails(m: RoundState, agent, message: str, now: float) -> list:
    """Let a worker fail, and all members join again; return the effects of that."""
    m.worker_failed([failure(agent, message)], agent, now)
    members = m.run.ranks.members
    actions = [a for member in members for a in m.join(member, now + 1.0)]
    return actions + m.slurm_answered(running(*members), now + 2.0, now + 2.0)


# ---- crash loops --------------------------------------------------------------------------


def test_a_crash_loop_ends_the_run_with_its_first_error():
    """Restarts that are left do not matter."""
    m = training(A, B, max_restarts=100)
    fails(m, A, "ValueError: first", 10.0)
    fails(m, B, "ValueError: second", 20.0)
    ended = fails(m, A, "ValueError: third", 30.0)
    (end,) = decisions(ended)
    assert kind(end) == "end" and end[1].failure.message == "ValueError: first"
    assert notes(ended, "crash_loop")[0].fields == {"attempts": 3, "checkpoint": None}


def test_the_first_error_of_a_crash_loop_is_not_a_victim_of_its_own():
    """With a limit of one round without progress, the first round is also the last."""
    m = training(A, B, max_restarts=100, max_failed_rounds=1)
    m.worker_failed([failure(A), failure(A, "Connection closed by peer")], A, 10.0)
    m.join(A, 11.0)
    (end,) = decisions(m.join(B, 11.0))
    assert kind(end) == "end" and end[1].failure == failure(A)
    assert [v.message for v in end[1].secondary_failures] == ["Connection closed by peer"]


def test_a_new_checkpoint_resets_the_count():
    """The training makes progress."""
    m = training(A, B, max_restarts=100)
    for i in range(10):
        m.checkpointed(A, i, 0, 10.0 * i)
        assert kind(decisions(fails(m, A, "boom", 10.0 * i + 1))[-1]) == "round"


def test_a_checkpoint_that_was_made_before_is_no_progress():
    """The run repeats the same steps."""
    m = training(A, B, max_restarts=100)
    for i in range(3):
        m.checkpointed(A, 40, 0, 10.0 * i)
        ended = fails(m, A, "boom", 10.0 * i + 1)
    assert kind(decisions(ended)[-1]) == "round", "the first round made it"
    assert kind(decisions(fails(m, A, "boom", 50.0))[-1]) == "end"


def test_losses_neither_count_nor_reset_the_count():
    """A preemption is not the fault of the script."""
    m = training(A, B, max_restarts=100)
    for i in range(5):
        m.agent_lost(B, "preempted", 10.0 * i)
        m.join(A, 10.0 * i + 1)
        m.join(B, 10.0 * i + 1)
        m.slurm_answered(running(A, B), 10.0 * i + 2, 10.0 * i + 2)
    assert m.run.policy.failures_without_progress == 0
    fails(m, A, "boom", 100.0)
    m.agent_lost(B, "preempted", 110.0)
    m.join(A, 111.0)
    m.slurm_answered(running(A), 112.0, 112.0)
    assert m.run.policy.failures_without_progress == 1


def test_a_worker_whose_port_strangers_have_flooded_costs_nothing():
    """gloo aborts it; what its peers then report is a consequence."""
    said = "gloo::EnforceNotMet listener.cc:63] false. accept: Too many open files"
    m = training(A, B, max_restarts=0)
    for i in range(4):
        now = 10.0 * i
        aborted = failure(A, "ended by SIGABRT", now, signal="SIGABRT", traceback=said)
        m.worker_failed([aborted], A, now)
        m.worker_failed([failure(B, "Connection closed by peer", now - 1.0)], B, now)
        actions = [*m.join(A, now + 1.0), *m.join(B, now + 1.0)]
        actions += m.slurm_answered(running(A, B), now + 2.0, now + 2.0)
        assert kind(decisions(actions)[-1]) == "round"
    assert m.run.policy.restarts == m.run.policy.failures_without_progress == 0


# ---- bad nodes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "strikes"),
    [
        (UNCORRECTABLE, STRIKES),
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", STRIKES),
        ("RuntimeError: CUDA error: unknown error", 1),
        ("RuntimeError: No CUDA-capable device is detected", 1),
        ("OSError: [Errno 5] Input/output error", 1),
        ("CUDA error: device-side assert triggered", 0),
        ("CUDA error: an illegal memory access was encountered", 0),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", 0),
        ("NCCL error: remote process exited or there was a network error", 0),
        ("ValueError: boom", 0),
    ],
)
def test_strikes_of_a_message(message, strikes):
    """Errors of hardware count; errors that the script makes on any node do not."""
    assert strikes_of(failure(A, message)) == strikes


def test_a_bus_error_is_a_strike():
    """A page of memory or of a file could not be read."""
    assert strikes_of(failure(A, "killed", signal="SIGBUS")) == 1


def test_a_failure_without_doubt_excludes_the_host_and_costs_nothing():
    """Its agent, which is alive, is requeued, and the others go on."""
    m = training(A, B, max_restarts=0)
    actions = fails(m, B, UNCORRECTABLE, 10.0)
    exclude, times_requeued, start = decisions(actions)
    assert exclude == Exclude(("node2",), failure(B, UNCORRECTABLE).summary())
    assert isinstance(times_requeued, SentBack) and times_requeued.agents == (B,)
    assert times_requeued.delay_s > 0.0 and not times_requeued.all
    assert start == closed(2, (A,), 0)
    assert notes(actions, "excluded")[0].fields["host"] == "node2"


def test_two_doubtful_failures_exclude_the_host():
    """The first may be accidental."""
    m = training(A, B, max_restarts=100)
    first = fails(m, B, "CUDA error: unknown error", 10.0)
    assert not [a for a in first if isinstance(a, Exclude)]
    again = fails(m, B, "CUDA error: unknown error", 20.0)
    assert [a.hosts for a in again if isinstance(a, Exclude)] == [("node2",)]


def test_min_nodes_are_never_excluded():
    """The run goes on with what it has, and spends a restart."""
    m = training(A, B, min_nodes=2)
    assert decisions(fails(m, B, UNCORRECTABLE, 10.0)) == [closed(2, (A, B), 1)]


def test_an_agent_that_times_out_twice_is_to_blame():
    """A closed connection or a departure is no strike."""
    m = training(A, B, C, D)
    for now in (10.0, 20.0):
        m.heartbeat_lost(B, "silent", now)
        actions = [a for agent in (A, C, D) for a in m.join(agent, now + 1)]
        actions += m.slurm_answered(running(A, C, D), now + 1, now + 2)
        if now == 10.0:
            assert not [a for a in actions if isinstance(a, Exclude)]
            m.join(B, now + 3)
            for agent in (A, C, D):
                m.join(agent, now + 4)
            m.slurm_answered(running(A, B, C, D), now + 5, now + 5)
    assert [a.hosts for a in actions if isinstance(a, Exclude)] == [("node2",)]


def test_many_agents_that_time_out_at_once_are_not_to_blame():
    """The network between them is."""
    m = training(A, B, C, D)
    m.heartbeat_lost(B, "silent", 10.0)
    m.heartbeat_lost(C, "silent", 10.0)
    m.join(A, 10.1)
    m.join(D, 10.1)
    assert m.run.policy.strikes == {}


def test_the_only_other_agent_that_times_out_is_not_to_blame():
    """With two nodes it is unknown which one is cut off."""
    m = training(A, B)
    m.heartbeat_lost(B, "silent", 10.0)
    m.join(A, 10.1)
    m.slurm_answered(running(A), 10.2, 11.0)
    assert m.run.ranks.members == (A,) and m.run.policy.strikes == {}


def test_an_agent_on_an_excluded_host_is_requeued():
    """Slurm had started it before the exclusion."""
    m = training(A, B)
    fails(m, B, UNCORRECTABLE, 10.0)
    again = Agent(B.task, 1, B.slot, "node2", 1)
    exclude, times_requeued = decisions(m.join(again, 20.0))
    assert exclude.hosts == ("node2",) and times_requeued.agents == (again,)


def test_the_next_leader_inherits_the_counters():
    """The count, the first error and the strikes are in the log entry."""
    m = training(A, B, max_restarts=100)
    m.checkpointed(A, 40, 0, 5.0)
    fails(m, A, "boom", 10.0)
    fails(m, B, "CUDA error: unknown error", 20.0)
    first = failure(B, "CUDA error: unknown error")
    assert m.run.policy.counters() == FailureCounters(40, 1, first, {"node2": 1}, ())
