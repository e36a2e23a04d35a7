"""What a leader decides waits for its entry, and comes true once."""

from dataclasses import replace

import pytest
from leaders import HERE, closing, join, leading, meanwhile, of, rejoin, say, told, training

from groups import A, B, C, failure, running
from hpc_elastic.rendezvous.effects import (
    Announce,
    Append,
    ClearHolds,
    Note,
    Postpone,
    PublishResult,
    QueryQueue,
    QueryTasks,
    RemoveEntries,
    Send,
    StepDown,
    places,
)
from hpc_elastic.rendezvous.leader_state import NO_DEADLINE_S, LeaderState
from hpc_elastic.rendezvous.log_entry import (
    Agent,
    Failure,
    FailureCounters,
    LogEntry,
    RunEnding,
    claim,
)
from hpc_elastic.rendezvous.messages import (
    CheckpointAnnounced,
    Close,
    End,
    Failed,
    Finished,
    Heartbeat,
    Join,
    NoticeRequest,
    Requeue,
    Stop,
)
from hpc_elastic.rendezvous.round_state import RoundPhase
from hpc_elastic.run.events import LossReason
from hpc_elastic.site import NodeReturn, QueueAdvice, QueueQuestion
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.transport.messages import pack
from simulation.month import count_items

# ---- old entries ------------------------------------------------------------------------


def test_what_late_listings_may_still_lack_is_not_removed():
    """64 later entries must have been there for as long as a listing may be late."""
    leader = training(A)
    leader.heartbeat = replace(leader.heartbeat, stale_s=30.0)
    leader.at = replace(leader.at, index=100, term=70)
    effects = {now: of(leader.tick(float(now)), RemoveEntries) for now in range(2, 200)}
    (at,) = [now for now, found in effects.items() if found]
    assert effects[at] == [RemoveEntries(36, 6)] and at > 30
    leader.at = replace(leader.at, index=101)
    assert not any(of(leader.tick(float(now)), RemoveEntries) for now in range(200, 230))
    assert [*of(leader.tick(300.0), RemoveEntries), *of(leader.tick(400.0), RemoveEntries)] == [
        RemoveEntries(37, 6)
    ]


def test_a_leader_that_is_fenced_removes_nothing():
    """Its successor does."""
    leader = training(A)
    leader.at = replace(leader.at, index=100)
    leader.refused()
    assert not any(leader.tick(float(now)) for now in range(2, 50))


# ---- its own failures -------------------------------------------------------------------


ERROR = Failure("7_9", "node9", 0, 0, 1000.0, "no socket", "TypeError", phase="lead")


def test_a_leader_that_fails_records_that_and_steps_down():
    """The entry changes nothing else; what waited is not done, and nothing else is decided."""
    leader = training(A, B)
    at = leader.at
    note, append = leader.failed(ERROR, drops_append=False)
    assert note.kind == "leader_failed" and note.fields["host"] == "node9"
    counters = replace(at.counters, failed_terms=(ERROR,))
    assert append == Append(replace(at, index=3, counters=counters, gave_up=True))
    assert not claim(4, append.entry, HERE, 1001.0).gave_up
    assert leader.failed(ERROR, drops_append=False) == [], "once"
    assert of(say(leader, A, Close(), 2.0), Append) == []
    assert leader.appended()[0] == StepDown(), "what follows is dropped with the term"


def test_a_leader_that_can_make_no_store_closes_no_round():
    """Its failure takes the index of the round."""
    leader, entry = closing(A, B)
    _, append = leader.failed(ERROR, drops_append=True)
    assert append.entry.index == entry.index and append.entry.round == 0
    assert append.entry.members == () and not append.needs_store
    assert leader.appended() == [StepDown()]


def test_a_failure_follows_the_entry_that_is_being_appended():
    """The round may exist, but no agent is sent its place in it."""
    leader, entry = closing(A, B)
    assert of(leader.failed(ERROR, drops_append=False), Append) == []
    (append,) = leader.appended()
    assert (append.entry.index, append.entry.round) == (3, entry.round)
    assert append.entry.counters.failed_terms == (ERROR,)
    assert leader.appended() == [StepDown()]


def test_the_last_failure_ends_the_run_for_all_agents():
    """Its leader publishes the result, and disconnects when they have left."""
    before = replace(
        claim(1, None, HERE, 1000.0), counters=FailureCounters(failed_terms=[ERROR] * 3)
    )
    leader = leading(before)
    join(leader, A, 1.0)
    _, append = leader.failed(ERROR, drops_append=False)
    assert append.entry.ending.status == "failed"
    publish, send = leader.appended()
    assert publish == PublishResult(append.entry) and isinstance(send.message, End)
    assert say(leader, A, Join(request=2), 3.0)[0].message == send.message


@pytest.mark.parametrize("is_appended", [True, False])
def test_a_run_that_has_ended_does_not_fail_any_more(is_appended):
    """The agents find the end in the log."""
    leader = training(A)
    say(leader, A, Finished(index=2), 2.0)
    if is_appended:
        leader.appended()
        assert leader.failed(ERROR, drops_append=False) == [StepDown()]
    else:
        assert leader.failed(ERROR, drops_append=False) == []
        assert leader.appended() == [StepDown()]


# ---- decisions ----------------------------------------------------------------------------


def test_a_round_is_announced_once_its_entry_exists():
    """Before, nobody could know whether it is this leader's to decide."""
    leader, entry = closing(A, B)
    assert (entry.index, entry.term, entry.round) == (2, 1, 1)
    assert entry.members == (A, B) and entry.leader == HERE and entry.started == 1000.0
    assert of(leader.tick(1.5), Append, Announce) == []
    assert leader.appended()[0] == Announce(entry, {A: Join(1), B: Join(1)})
    assert leader.at == entry


def test_what_follows_a_decision_waits_in_order():
    """A member that is lost meanwhile is a loss after the round, not before it."""
    leader, _ = closing(A, B)
    assert leader.disconnected(B, LossReason.CONNECTION_CLOSED, 1.5) == []
    announce, closed, gone, stopped, tell = leader.appended()
    assert isinstance(announce, Announce)
    kinds = (closed.kind, gone.kind, stopped.kind)
    assert kinds == ("round", "node_lost", "round_stopped")
    assert tell.agents == (A,) and isinstance(tell.message, Stop)


def test_a_decision_that_follows_a_decision_needs_its_own_entry():
    """One number after the other."""
    leader, entry = closing(A, B)
    say(leader, A, Close(), 1.5)
    announce, _, append = leader.appended()
    assert isinstance(announce, Announce)
    assert append == Append(replace(entry, index=3, ending=RunEnding("closed")))
    assert told(leader.appended(), End) == [A, B]


def test_a_round_answers_the_requests_that_it_was_closed_with():
    """An agent that has come back meanwhile has asked again, for another round."""
    leader, _ = closing(A, B)
    leader.disconnected(B, LossReason.CONNECTION_CLOSED, 1.2)
    join(leader, B, 1.4, request=2)
    (announce,) = of(leader.appended(), Announce)
    assert announce.requests[B].request == 1


def test_an_entry_knows_what_was_lost_and_spent():
    """The next leader goes on from there."""
    leader = training(A, B, C, max_restarts=3)
    say(leader, A, Failed([failure(A)], index=2), 2.0)
    rejoin(leader, A, 2.1)
    leader.disconnected(C, LossReason.CONNECTION_CLOSED, 2.2)
    rejoin(leader, B, 2.3)
    (append,) = of(leader.slurm_answered(running(A, B), 2.5), Append)
    assert append.entry.lost == {C.task: 0} and append.entry.members == (A, B)
    assert append.entry.round == 2


def test_whose_number_is_taken_steps_down_for_ever():
    """Whatever it hears after that, it decides nothing, and says nothing."""
    leader, entry = closing(A, B)
    assert leader.refused() == [StepDown()]
    assert leader.fenced and leader.at.index == 1
    answers = [
        leader.appended(), leader.refused(), leader.log_advanced(99), leader.tick(9.0),
        leader.connected(C, 2.0), say(leader, A, Join(request=2), 2.0),
        leader.disconnected(A, LossReason.CONNECTION_CLOSED, 2.0), leader.slurm_answered({}, 2.0),
    ]  # fmt: skip
    assert not any(answers) and entry.index == 2


def test_who_sees_a_later_entry_steps_down():
    """Another agent leads, or has led."""
    leader = training(A, B)
    assert leader.log_advanced(2) == []
    assert leader.log_advanced(3) == [StepDown()] and leader.tick(2.0) == []


def test_the_entry_that_one_has_asked_for_fences_nobody():
    """It may be seen before its own creation was reported."""
    leader, entry = closing(A)
    assert leader.log_advanced(entry.index) == []
    assert of(leader.appended(), Announce)


def test_an_entry_beyond_the_one_that_one_has_asked_for_does():
    """Whoever created it has seen that one."""
    leader, entry = closing(A)
    assert leader.log_advanced(entry.index + 1) == [StepDown()]


def test_giving_all_nodes_back_is_a_decision():
    """Everybody is told, and what is queued waits as well, once it is recorded."""
    leader = leading(min_nodes=3, below_min_timeout_s=2.0)
    for agent in (A, B):
        join(leader, agent, 1.0)
    (append,) = of(meanwhile(leader, 5.5, A, B), Append)
    assert append.entry.times_requeued == 1 and append.entry.round == 0
    effects = leader.appended()
    (postpone,) = of(effects, Postpone)
    assert told(effects, Requeue) == [A, B] and postpone.delay_s > 0
    assert told(join(leader, C, 7.0), Requeue) == [C]


def test_sending_one_node_back_needs_no_entry():
    """The group is what it was."""
    leader = training(A, B, below_min_timeout_s=1.0, scale_up="on_restart")
    join(leader, C, 1.5)
    effects = meanwhile(leader, 4.0, A, B, C, since=2.0)
    assert told(effects, Requeue) == [C]
    assert not of(effects, Append, Postpone)


# ---- the end ------------------------------------------------------------------------------


def ending(*agents: Agent) -> tuple[LeaderState, LogEntry]:
    """A leader whose run has succeeded, which waits for its entry."""
    leader = training(*agents)
    for agent in agents:
        effects = say(leader, agent, Finished(index=2), 5.0)
    (append,) = of(effects, Append)
    return leader, append.entry


def test_the_end_is_published_once_it_is_recorded():
    """Then everybody who listens is told."""
    leader, entry = ending(A, B)
    assert entry.ending == RunEnding("succeeded")
    publish, tell = leader.appended()
    assert publish == PublishResult(entry) and told([tell], End) == [A, B]
    assert tell.message == End("succeeded", None)


def test_the_end_carries_the_failure():
    """The first cause and its victims stand in the entry; agents are told in one line."""
    leader = training(A, B, max_restarts=0)
    cause, victim = failure(A, exit_code=1), failure(B, "Broken pipe", 2.0)
    say(leader, A, Failed([cause], index=2), 2.0)
    rejoin(leader, A, 2.1)
    say(leader, B, Failed([victim], index=2), 2.2)
    (append,) = of(rejoin(leader, B, 2.3), Append)
    assert append.entry.ending == RunEnding("failed", cause, (victim,))
    tells = of(leader.appended(), Send)
    assert {t.message.failure for t in tells} == {cause.summary()}


def test_who_comes_after_the_end_is_told_alone():
    """Once; nothing is published again."""
    leader, _ = ending(A)
    leader.appended()
    assert [type(e) for e in join(leader, B, 6.0)] == [Send]


def test_who_comes_while_the_end_is_recorded_is_told_with_the_others():
    """The run has one result."""
    leader, _ = ending(A)
    assert join(leader, B, 5.2) == []
    effects = leader.appended()
    assert told(effects, End) == [A, B] and len(of(effects, PublishResult)) == 1


@pytest.mark.parametrize(
    "report",
    [Finished(index=1), Failed([failure(A)], index=1), CheckpointAnnounced(5, 1, index=1)],
)
def test_what_is_said_of_another_round_is_ignored(report):
    """A message may be older than the round that its sender is in now."""
    leader = training(A)
    assert say(leader, A, report, 2.0) == []
    assert leader.rounds.run.phase is RoundPhase.RUNNING and not leader.rounds.change.barrier.seen


# ---- places -------------------------------------------------------------------------------


def test_every_member_is_told_its_place():
    """Its workers' ranks follow those of the nodes before it."""
    big, small = Agent("7_0", 0, 0, "n1", 8), Agent("7_1", 2, 1, "n2", 4)
    entry = LogEntry(17, 2, HERE, round=3, restarts=1, members=(big, small))
    announce = Announce(entry, {big: Join(5), small: Join(6)})
    (first, a), (second, b) = places(announce, ("10.0.0.1", 99))
    assert (first, second) == (big, small)
    assert pack(a, 0.0) == {
        "type": "round", "request": 5, "index": 17, "number": 3, "restarts": 1, "group_rank": 0,
        "replica": 0, "group_size": 2, "first_rank": 0, "world_size": 12, "store": ("10.0.0.1", 99),
        "throughputs": "", "hosts": "n[1-2]", "workers": "8,4",
    }  # fmt: skip
    assert b == replace(a, request=6, group_rank=1, first_rank=8)
    fast = replace(small, throughput=2500)
    announce = Announce(replace(entry, members=(big, fast)), {big: Join(5), fast: Join(6)})
    assert {place.throughputs for _, place in places(announce)} == {"8*1000,4*2500"}


def test_tasks_are_brought_back_whatever_is_being_recorded():
    """Later, the run may have sent them away."""
    before = LogEntry(4, 2, HERE, round=3, lost={C.task: 0})
    leader = leading(replace(before, term=3))
    states = running(A, B) | {C.task: TaskState(C.task, "NODE_FAIL", restarts=0)}
    for agent in (A, B):
        join(leader, agent, 1.0)
    assert of(leader.slurm_answered(states, 1.5), Append)
    meanwhile(leader, 7.0, A, B, since=1.5)
    assert of(leader.slurm_answered(states, 7.1), ClearHolds, Note) == [ClearHolds((C.task,))]


def test_a_run_of_a_sweep_asks_whether_it_waits_in_vain():
    """As long as it is below min nodes; one question at a time, and some seconds between two."""
    leader = leading(min_nodes=2, below_min_timeout_s=300.0, in_sweep=True)
    effects = [*join(leader, A, 1.0), *leader.tick(1.0)]
    asked = [QueryQueue(QueueQuestion(is_short=True))]
    assert of(effects, QueryQueue) == asked and not of(leader.tick(2.0), QueryQueue)
    advice = QueueAdvice("others hold it")
    assert leader.advised(advice, 3.0) == []
    assert not of(leader.tick(4.0), QueryQueue) and of(leader.tick(8.0), QueryQueue) == asked
    (append,) = of(leader.advised(advice, 8.5), Append)
    assert append.entry.times_requeued == 1


def test_slurm_is_asked_seldom_while_a_run_waits():
    """A dozen times in the first minute however many agents join, and four a minute for a sweep."""

    def commands(agents: int, minutes: int, **rules: object) -> list[int]:
        leader = leading(
            min_nodes=agents + 1, max_nodes=agents + 1, below_min_timeout_s=9999.0, **rules
        )
        asked = [0] * minutes
        for tick in range(minutes * 60 * 4):
            now = tick / 4
            came = [Agent(f"7_{n}", 0, n, f"n{n}", 1) for n in range(min(tick + 1, agents))]
            effects = join(leader, came[-1], now) if tick < agents else []
            for agent in came:
                effects += say(leader, agent, Heartbeat(progress={}), now)
            effects += leader.tick(now)
            asked[tick // 240] += len(of(effects, QueryTasks)) + 2 * len(of(effects, QueryQueue))
            if of(effects, QueryTasks):
                leader.slurm_answered({}, now)
            if of(effects, QueryQueue):
                leader.advised(QueueAdvice(), now)
        return asked

    few = commands(4, 3)
    assert few[0] <= 12 and max(few[1:]) <= 2
    assert commands(200, 1)[0] <= 20
    assert max(commands(4, 4, in_sweep=True)[1:]) <= 10


def test_a_run_of_a_sweep_that_trains_lets_others_start():
    """Now and then; a run alone has nobody to look at."""
    leader = training(A, B, in_sweep=True)
    assert of(leader.tick(20.0), QueryQueue) == [QueryQueue(QueueQuestion(trains=True))]
    assert leader.advised(QueueAdvice(max_nodes=2), 21.0) == []
    assert leader.run.growth.share == 2
    assert not of(leader.tick(25.0), QueryQueue) and of(leader.tick(26.0), QueryQueue)
    assert leader.advised(QueueAdvice(), 26.0) == [] and leader.run.growth.share == 2
    assert not of(training(A, B).tick(20.0), QueryQueue)


def test_a_leader_fits_the_time_limits_of_waiting_tasks():
    """From the first moment on, and now and then; not for a run with fixed limits."""
    leader = training(A, B, fits_time_limits=True)
    assert of(leader.tick(20.0), QueryQueue) == [QueryQueue(QueueQuestion())]
    assert not of(leader.tick(21.0), QueryQueue), "before it is answered"
    assert leader.advised(QueueAdvice(), 21.0) == [] and of(leader.tick(26.0), QueryQueue)


# ---- drained nodes --------------------------------------------------------------------------


def test_a_drained_node_is_left_without_a_deadline():
    """Once: its agent has a notice, and the group changes at its next checkpoint."""
    leader = training(A, B, C)
    effects = leader.drained({B.host: "draining", "elsewhere": "drained"})
    assert told(effects, NoticeRequest) == [B]
    (send,) = [e for e in of(effects, Send) if isinstance(e.message, NoticeRequest)]
    assert send.message.left_s == NO_DEADLINE_S
    (note,) = of(effects, Note)
    assert (note.kind, note.fields["host"], note.fields["state"]) == (
        "node_drained", B.host, "draining",
    )  # fmt: skip
    assert leader.drained({B.host: "draining"}) == []


def test_the_record_of_drained_nodes_does_not_grow():
    """Of each slot the newest attempt is known, however many there have been."""
    leader = training(A, B, C)
    for attempt in range(1, 50):
        agent = replace(B, attempt=attempt)
        leader.connected(agent, float(attempt))
        assert told(leader.drained({B.host: "draining"}), NoticeRequest)[-1] == agent
    assert count_items(leader._left_soon) < 5


def test_tasks_beyond_the_minimum_may_leave_for_others_the_last_ranks_first():
    """The minimum and the tasks of its slots stay, unless the run gives way with all."""

    def offered(**rules):
        leader = training(A, B, C, in_sweep=True, **rules)
        (query,) = of(leader.tick(20.0), QueryQueue)
        return leader, [host for _, host in query.question.returnable]

    assert offered()[1] == []
    assert offered(give_way="on")[1] == [C.host, B.host]
    assert offered(give_way="on", min_nodes=2)[1] == [C.host]
    leader, hosts = offered(give_way="all")
    assert hosts == [C.host, B.host, A.host]

    effects = leader.advised(
        QueueAdvice(returns=[NodeReturn("8", "ada", 2, (C.task, B.task))]), 21.0
    )
    assert told(effects, NoticeRequest) == [C, B]
    (note,) = of(effects, Note)
    assert (note.kind, note.fields["job"], note.fields["hosts"]) == (
        "nodes_given_back", "8", [C.host, B.host],
    )  # fmt: skip
    (query,) = of(leader.tick(40.0), QueryQueue)
    assert [host for _, host in query.question.returnable] == [A.host], "they leave already"


def test_a_run_below_its_minimum_returns_what_it_cannot_use():
    """All but the tasks of the minimum's slots: it may wait for its minimum for minutes."""
    leader = leading(min_nodes=3, below_min_timeout_s=300.0, in_sweep=True, give_way="on")
    late = Agent("7_3", 0, 3, "node4", 1)
    for agent in (A, late):
        join(leader, agent, 1.0)
    offered = []
    for now in range(2, 60, 10):
        effects = meanwhile(leader, now + 9.0, A, late, since=float(now))
        offered += [query.question.returnable for query in of(effects, QueryQueue)]
        leader.advised(QueueAdvice(), now + 9.0)
    assert offered and offered[-1] == ((late.task, late.host),)


def test_min_nodes_stay_on_drained_nodes():
    """They may be used to the end of their jobs; the run would stop without them."""
    leader = training(A, B, C, min_nodes=2)
    states = dict.fromkeys((A.host, B.host, C.host), "draining")
    assert len(told(leader.drained(states), NoticeRequest)) == 1
    assert leader.drained(states) == []


def test_all_leave_before_a_maintenance():
    """It ends their jobs, so no minimum stays; they save together."""
    leader = training(A, B, C, min_nodes=2)
    states = dict.fromkeys((A.host, B.host, C.host), "reserved from 14:00")
    assert {*told(leader.drained(states, keeps_min=False), NoticeRequest)} == {A, B, C}
    assert leader.drained(states, keeps_min=False) == []


# ---- attempts of one task -------------------------------------------------------------------


def test_an_older_attempt_cannot_take_the_place_of_a_newer_one():
    """It is told to end, whatever it sends; the newer one keeps its place."""
    newer = replace(B, attempt=1)
    leader = training(A, newer)
    effects = join(leader, B, 2.0)
    assert told(effects, End) == [B]
    assert not told(effects, Stop) and leader.run.ranks.members == (A, newer)
    assert leader.disconnected(B, "it ended", 3.0) == []
    assert leader.run.is_member(newer)


def test_an_attempt_ends_once_a_newer_one_connects():
    """Its loss counts for nothing: its node may have been lost unobserved."""
    leader, newer = training(A, B), replace(B, attempt=1)
    effects = join(leader, newer, 2.0)
    assert told(effects, End) == [B]
    assert newer in leader.run.participants.joined
    assert not leader.run.policy.gone


def test_a_new_leader_knows_the_attempts_of_the_log():
    """An attempt that was lost may come back; one before it may not."""
    leader = leading(replace(claim(5, None, HERE, 0.0), lost={B.task: 1}, members=(A,)))
    assert told(join(leader, B, 1.0), End) == [B]
    assert not told(join(leader, replace(B, attempt=1), 2.0), End)


def test_a_leader_that_is_an_older_attempt_stops_leading():
    """Its own agent is told to end as each other's."""
    mine = replace(A, task=HERE.task)
    leader = training(mine, B)
    assert told(join(leader, replace(mine, attempt=1), 2.0), End) == [mine]
