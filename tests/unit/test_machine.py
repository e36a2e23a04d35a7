"""The rules of the rendezvous, one behaviour a test."""

import itertools
import random

from hpc_elastic.rendezvous.failures import Failure
from hpc_elastic.rendezvous.machine import (
    Action,
    Agent,
    EndRun,
    Machine,
    Note,
    Phase,
    Rules,
    StartRound,
    StopRound,
)

A, B, C, D = (Agent(f"7_{slot}", 0, slot, f"node{slot + 1}", 1) for slot in range(4))
BOTH = frozenset({A.task, B.task})


def machine(**changes) -> Machine:
    """A machine for one to four nodes with two restarts."""
    defaults = {
        "min_nodes": 1, "max_nodes": 4, "max_restarts": 2,
        "start_timeout_s": 60.0, "last_call_s": 5.0,
    }  # fmt: skip
    return Machine(Rules(**{**defaults, **changes}))


def training(*agents: Agent, **changes) -> Machine:
    """A machine whose first round has closed with these agents."""
    m = machine(**changes)
    for agent in agents:
        m.join(agent, 0.0)
    m.slurm_says(frozenset(a.task for a in agents), 0.0)
    assert m.phase is Phase.RUNNING and m.members == agents
    return m


def decisions(actions: list[Action]) -> list[Action]:
    """What is left of the actions without the notes for the log."""
    return [a for a in actions if not isinstance(a, Note)]


def failure(agent: Agent, message="ValueError: boom", time=1.0, **fields) -> Failure:
    """One failed worker of an agent."""
    return Failure(agent.task, agent.host, agent.slot, 0, time, message, **fields)


def test_closes_when_all_running_tasks_have_joined():
    """A round does not wait for tasks that are not RUNNING."""
    m = machine()
    assert decisions(m.join(A, 0.0)) == []
    assert decisions(m.slurm_says(BOTH, 0.1)) == []
    assert decisions(m.join(B, 1.0)) == [StartRound(1, (A, B), 0)]


def test_closes_at_max_nodes_without_asking():
    """With max nodes joined there is nobody to wait for."""
    m = machine(max_nodes=2)
    m.join(B, 0.0)
    assert decisions(m.join(A, 0.0)) == [StartRound(1, (A, B), 0)]


def test_waits_for_min_nodes_however_long():
    """Below min nodes neither Slurm's answer nor time closes a round."""
    m = machine(min_nodes=2)
    m.join(A, 0.0)
    assert decisions(m.slurm_says(frozenset({A.task}), 0.0)) == []
    assert decisions(m.tick(1e6)) == []


def test_last_call_where_slurm_is_silent():
    """Without Slurm's word a round closes once nobody has joined for a while."""
    m = machine()
    m.join(A, 0.0)
    m.slurm_says(None, 0.0)
    m.join(B, 4.0)
    assert decisions(m.tick(8.9)) == []
    assert decisions(m.tick(9.0)) == [StartRound(1, (A, B), 0)]


def test_a_running_task_that_never_joins_delays_only_so_long():
    """A broken node that Slurm calls RUNNING does not hold the others up for ever."""
    m = machine()
    m.join(A, 0.0)
    m.slurm_says(BOTH, 0.0)
    assert m.missing() == [B.task]
    assert decisions(m.tick(59.9)) == []
    assert decisions(m.tick(60.0)) == [StartRound(1, (A,), 0)]


def test_a_late_node_is_taken_in():
    """A newcomer breaks the round, and the next one has it as its last rank."""
    m = training(A, B)
    assert decisions(m.join(C, 10.0)) == [StopRound((A, B), "node3 joins")]
    m.join(B, 10.1)
    m.join(A, 10.2)
    asked = m.slurm_says(BOTH | {C.task}, 10.3)
    assert decisions(asked) == [StartRound(2, (A, B, C), 0)]


def test_a_full_group_lets_a_newcomer_wait_until_a_place_is_free():
    """Beyond max nodes a node parks; it takes the place of the next that is lost."""
    m = training(A, B, max_nodes=2)
    assert decisions(m.join(C, 1.0)) == []
    m.gone(A, "its connection closed", 2.0)
    assert decisions(m.join(B, 2.1)) == [StartRound(2, (B, C), 0)]


def test_a_lost_member_costs_no_restart():
    """The others' collectives break because of the loss: nothing is spent."""
    m = training(A, B, C)
    m.worker_failed([failure(A, "Connection closed by peer")], A, 5.0)
    m.gone(B, "silent", 5.1)
    m.join(A, 5.2)
    m.join(C, 5.3)
    started = m.slurm_says(frozenset({A.task, B.task, C.task}), 5.4)
    assert decisions(started) == [StartRound(2, (A, C), 0)]


def test_a_loss_noticed_before_the_failures_costs_no_restart_either():
    """The order in which the leader hears of a loss and of its victims does not matter."""
    m = training(A, B, C)
    m.gone(B, "silent", 5.0)
    m.worker_failed([failure(A, "Connection closed by peer")], A, 5.1)
    m.join(A, 5.2)
    m.join(C, 5.3)
    assert decisions(m.slurm_says(frozenset({A.task, C.task}), 5.4)) == [StartRound(2, (A, C), 0)]


def test_a_task_that_was_lost_is_not_waited_for():
    """Slurm calls a dead node's task RUNNING for minutes."""
    m = training(A, B)
    m.gone(B, "its connection closed", 5.0)
    m.join(A, 5.1)
    assert decisions(m.slurm_says(BOTH, 5.2)) == [StartRound(2, (A,), 0)]


def test_a_requeued_task_comes_back_as_a_newcomer():
    """The same task in its next attempt is another agent."""
    m = training(A, B)
    m.gone(B, "preempted", 5.0)
    m.join(A, 5.1)
    m.slurm_says(frozenset({A.task}), 5.2)
    again = Agent(B.task, 1, B.slot, "node4", 1)
    assert decisions(m.join(again, 60.0)) == [StopRound((A,), "node4 joins")]
    m.join(A, 60.1)
    assert decisions(m.slurm_says(BOTH, 60.2)) == [StartRound(3, (A, again), 0)]


def test_a_workers_own_failure_spends_one_restart_of_the_run():
    """However many workers die of it, one failure is one restart."""
    m = training(A, B)
    stopped = m.worker_failed([failure(B, "Connection closed by peer", 1.0)], B, 1.0)
    assert decisions(stopped) == [StopRound((A, B), "a worker failed on node2")]
    m.worker_failed([failure(A, "ValueError: boom", 2.0)], A, 2.0)
    m.join(B, 2.1)
    m.join(A, 2.2)
    assert decisions(m.slurm_says(BOTH, 2.3)) == [StartRound(2, (A, B), 1)]


def test_fails_with_the_first_cause_when_restarts_have_run_out():
    """The report shows the worker that raised, though a victim was heard of first."""
    m = training(A, B, max_restarts=0)
    victim, cause = failure(B, "Connection closed by peer", 1.0), failure(A, time=2.0)
    m.worker_failed([victim], B, 1.0)
    m.worker_failed([cause], A, 2.0)
    m.join(B, 2.1)
    assert decisions(m.join(A, 2.2)) == [EndRun("failed", cause, (victim,))]


def test_an_import_error_in_the_first_round_ends_the_run_at_once():
    """A script that can not be imported is not tried again."""
    m = training(A, B)
    broken = failure(A, "ModuleNotFoundError: No module named 'nosuch'", phase="import")
    m.worker_failed([broken], A, 1.0)
    m.join(A, 1.1)
    assert decisions(m.join(B, 1.2)) == [EndRun("failed", broken, ())]


def test_an_import_error_after_training_has_begun_is_an_ordinary_failure():
    """One bad node must not end a run that has trained elsewhere."""
    m = training(A)
    m.join(B, 1.0)
    m.join(A, 1.0)
    m.slurm_says(BOTH, 1.0)
    m.worker_failed([failure(B, "ImportError: bad disk", phase="import")], B, 2.0)
    m.join(A, 2.1)
    m.join(B, 2.2)
    assert decisions(m.slurm_says(BOTH, 2.3)) == [StartRound(3, (A, B), 1)]


def test_succeeds_when_every_member_is_done():
    """The run ends once, with the last member."""
    m = training(A, B)
    assert m.finished(A, 9.0) == []
    assert m.finished(B, 9.1) == [EndRun("succeeded")]


def test_a_member_lost_before_all_are_done_means_another_round():
    """A member that was done works again: its peers can not finish without it."""
    m = training(A, B)
    m.finished(A, 9.0)
    assert decisions(m.gone(B, "silent", 9.1)) == [StopRound((A,), "node2 is gone: silent")]
    m.join(A, 9.2)
    assert decisions(m.slurm_says(frozenset({A.task}), 9.3)) == [StartRound(2, (A,), 0)]


def test_whoever_comes_after_the_end_is_told_so():
    """A task that starts late hears the verdict, and nothing else happens."""
    m = training(A)
    m.finished(A, 9.0)
    assert m.join(B, 10.0) == [EndRun("succeeded")]
    assert m.gone(A, "its connection closed", 10.0) == []


def test_ranks_are_stable():
    """Members keep their order whatever the order of joining; a lost one's place closes up."""
    m = training(A, B, C, D)
    m.gone(B, "silent", 1.0)
    for agent in (D, C, A):
        m.join(agent, 1.1)
    assert decisions(m.slurm_says(frozenset({A.task, C.task, D.task}), 1.2)) == [
        StartRound(2, (A, C, D), 0)
    ]


def test_a_member_that_does_not_come_back_is_given_up():
    """A stopped member that neither joins nor disconnects can not block the others for ever."""
    m = training(A, B)
    m.join(C, 1.0)
    m.join(A, 2.0)
    m.slurm_says(BOTH | {C.task}, 2.0)
    assert decisions(m.tick(60.9)) == []
    assert decisions(m.tick(61.0)) == [StartRound(2, (A, C), 0)]


def random_schedule(seed: int) -> None:
    """Drive one machine with random events and check the invariants after each."""
    rng = random.Random(seed)
    rules = {"min_nodes": rng.randint(1, 3), "max_nodes": rng.randint(3, 5)}
    m = machine(**rules)
    now, attempts = 0.0, itertools.count(1)
    alive = {Agent(f"7_{s}", 0, s, f"n{s}", 1) for s in range(5)}
    ready: set[Agent] = set(alive)  # whose workers are stopped and who has not joined
    in_round: set[Agent] = set()
    last_number = 0
    for _ in range(60):
        now += rng.random() * 3
        agent = rng.choice(sorted(alive, key=lambda a: a.slot))
        kind = rng.choice(["join", "join", "join", "gone", "fail", "done", "slurm", "tick"])
        if kind == "join" and agent in ready:
            ready.discard(agent)
            actions = m.join(agent, now)
        elif kind == "gone":
            fresh = Agent(agent.task, next(attempts), agent.slot, agent.host, 1)
            alive = (alive - {agent}) | {fresh}
            ready = (ready - {agent}) | {fresh}
            in_round.discard(agent)
            actions = m.gone(agent, "lost", now)
        elif kind == "fail" and agent in in_round:
            actions = m.worker_failed([failure(agent)], agent, now)
        elif kind == "done" and agent in in_round:
            actions = m.finished(agent, now)
        elif kind == "slurm":
            running = frozenset(a.task for a in alive if rng.random() < 0.8)
            actions = m.slurm_says(running if rng.random() < 0.8 else None, now)
        else:
            actions = m.tick(now)
        for action in actions:
            match action:
                case StopRound(agents, _):
                    assert set(agents) <= in_round, "only members are stopped"
                    ready |= set(agents)
                    in_round -= set(agents)
                case StartRound(number, members, restarts):
                    assert number == last_number + 1, "rounds are numbered without a gap"
                    last_number = number
                    assert len(set(members)) == len(members), "nobody has two ranks"
                    assert rules["min_nodes"] <= len(members) <= rules["max_nodes"]
                    assert set(members) <= alive, "the dead have no ranks"
                    assert not in_round, "nobody is in two rounds"
                    assert restarts <= 2
                    in_round = set(members)
                case EndRun():
                    return
    # With everybody back and Slurm's word, a round must close.
    for agent in sorted(ready & alive, key=lambda a: a.slot):
        ready.discard(agent)
        for action in m.join(agent, now):
            if isinstance(action, StopRound):
                ready |= set(action.agents)
    for agent in sorted(ready, key=lambda a: a.slot):
        m.join(agent, now)
    m.slurm_says(frozenset(a.task for a in alive), now)
    m.tick(now + 61)
    assert m.phase is not Phase.FORMING, "a round closes in bounded time"


def test_invariants_hold_over_random_schedules():
    """3000 random histories of joins, losses, failures and answers keep every invariant."""
    for seed in range(3000):
        try:
            random_schedule(seed)
        except AssertionError as e:
            raise AssertionError(f"seed {seed}: {e}") from e
