"""The cost of a broken round, and the hosts to blame."""

from dataclasses import replace

import pytest

from groups import (
    FIRST,
    A,
    B,
    C,
    D,
    SentBack,
    closed,
    decisions,
    failure,
    kind,
    notes,
    resumed,
    running,
    training,
)
from hpc_elastic.rendezvous.effects import Exclude
from hpc_elastic.rendezvous.failure_policy import (
    FAILED_TERMS,
    STRIKE_S,
    STRIKES,
    FailurePolicy,
    strikes_of,
)
from hpc_elastic.rendezvous.log_entry import (
    Agent,
    Failure,
    FailureCounters,
    LostNode,
    RoundRules,
    decode_signed,
)
from hpc_elastic.rendezvous.round_state import RoundPhase, RoundState
from hpc_elastic.rendezvous.task_recovery import FailedStart
from hpc_elastic.run.events import LossReason
from hpc_elastic.slurm.job_state import TaskState

UNCORRECTABLE = "CUDA error: uncorrectable ECC error encountered"


def fails(m: RoundState, agent, message: str, now: float) -> list:
    """Let a worker fail, and all members join again; return the effects of that."""
    m.worker_failed([failure(agent, message)], agent, now)
    members = m.run.ranks.members
    actions = [a for member in members for a in m.join(member, now + 1.0)]
    return actions + m.slurm_answered(running(*members), now + 2.0, now + 2.0)


# ---- leaders that fail --------------------------------------------------------------------


def error_of(agent: Agent, time: float) -> Failure:
    """The error of an agent as the leader; the first line of its text is shown."""
    text, lines = "no socket\nframe #0: here", "Traceback: here\nTypeError: no socket"
    return Failure(agent.task, agent.host, 0, 0, time, text, "TypeError", lines, phase="lead")


def test_the_fourth_failed_term_in_a_row_ends_the_run():
    """With the last error, its traceback, and the nodes that have led."""
    policy = FailurePolicy(RoundRules(1, 4, 0, 60.0, 5.0))
    for number, agent in enumerate((A, B, A), 1):
        note, ending = policy.term_failed(error_of(agent, float(number)))
        assert ending is None and note.kind == "leader_failed"
        assert (note.fields["terms"], note.fields["again"]) == (number, True)
    note, ending = policy.term_failed(error_of(B, 4.0))
    assert (note.fields["terms"], note.fields["again"]) == (FAILED_TERMS, False)
    assert note.fields["why"] == "TypeError: no socket" and "here" in note.fields["traceback"]
    assert ending is not None and ending.status == "failed" and ending.failure is not None
    assert ending.failure.message == "no socket (4 terms in a row failed, on node1, node2)"
    assert ending.failure.traceback == note.fields["traceback"]
    assert ending.failure.remedy.startswith("several nodes failed as leaders")
    assert ending.summary == f"the leader, task 7_1 on node2: TypeError: {ending.failure.message}"
    entry = replace(FIRST, ending=ending, counters=policy.counters())
    assert decode_signed(entry.encode_signed(b"key"), b"key") == entry


def test_the_remedy_names_the_only_node_that_has_led():
    """The run may go on elsewhere."""
    policy = FailurePolicy(RoundRules(1, 4, 0, 60.0, 5.0))
    for time in range(FAILED_TERMS):
        _, ending = policy.term_failed(error_of(A, time))
    assert ending.failure.remedy.startswith("no node but node1 was there to lead")


@pytest.mark.parametrize("progress", ["record_step", "record_checkpoint"])
def test_progress_resets_the_count_of_failed_terms(progress):
    """A step or a checkpoint beyond all before; the next leader inherits the count."""
    policy = FailurePolicy(RoundRules(1, 4, 0, 60.0, 5.0))
    for number in range(10):
        getattr(policy, progress)(number)
        assert policy.term_failed(error_of(A, number))[1] is None
        assert policy.term_failed(error_of(A, number))[1] is None
        policy = FailurePolicy.resume(replace(FIRST, counters=policy.counters()), policy.rules)
        getattr(policy, progress)(number)
        assert len(policy.failed_terms) == 2, "that is no progress"


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
    until = m.run.policy.exclusions["node2"]
    assert exclude == Exclude(("node2",), failure(B, UNCORRECTABLE).summary(), until)
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


def silences(m: RoundState, *attempts: int, every_s: float = 10.0) -> list:
    """Let B fall silent again and again, and come back as these attempts; return the effects."""
    b, effects = B, []
    for i, attempt in enumerate(attempts):
        now = every_s * (i + 1)
        m.run.note_silence(b)
        m.agent_lost(b, LossReason.SILENT, now)
        effects += [a for agent in (A, C, D) for a in m.join(agent, now + 1)]
        effects += m.slurm_answered(running(A, C, D), now + 1, now + 2)
        b = replace(B, attempt=attempt)
        for agent in (b, A, C, D):
            effects += m.join(agent, now + 3)
        effects += m.slurm_answered(running(A, b, C, D), now + 5, now + 5)
    return effects


def hosts_of_exclusions(effects: list) -> list:
    """The hosts that are excluded."""
    return [a.hosts for a in effects if isinstance(a, Exclude)]


def test_an_agent_that_times_out_twice_and_never_comes_back_is_to_blame():
    """Its task starts anew. A closed connection or a departure is no strike."""
    m = training(A, B, C, D)
    assert hosts_of_exclusions(silences(m, 1)) == []
    m = training(A, B, C, D)
    assert ("node2",) in hosts_of_exclusions(silences(m, 1, 2))


def test_a_silence_that_ends_by_itself_is_no_strike():
    """Slurm has suspended the node, or the network paused: the same attempt joins again."""
    m = training(A, B, C, D)
    effects = silences(m, *[0] * 10)
    assert m.run.policy.strikes == {} and m.run.policy.losses == 0
    assert hosts_of_exclusions(effects) == []


def test_strikes_fade():
    """Two within six hours exclude; one a day is what any node has."""
    m = training(A, B, C, D)
    assert hosts_of_exclusions(silences(m, *range(1, 20), every_s=STRIKE_S + 60.0)) == []


def test_an_exclusion_ends_within_the_hour_and_grows_for_a_node_that_fails_again():
    """The node is tried again, for as long as the run lasts; the next leader knows the end."""
    policy = FailurePolicy(RoundRules(1, 8, 3, 60.0, 5.0))
    hosts, lasted = [f"node{i}" for i in range(1, 9)], []
    for i in range(5):
        start = 3000.0 * i
        policy.advance(start)
        policy.failures = [failure(B, UNCORRECTABLE)]
        effects, _ = policy.judge(i, hosts)
        (exclude,) = [effect for effect in effects if isinstance(effect, Exclude)]
        assert policy.excluded == ("node2",)
        entry = replace(FIRST, counters=policy.counters())
        policy = FailurePolicy.resume(entry, policy.rules)
        policy.advance(exclude.until - 1.0)
        assert policy.excluded == ("node2",)
        policy.advance(exclude.until)
        assert policy.excluded == () and policy.exclusions == {}
        lasted.append(exclude.until - start)
    assert lasted == [720, 2880, 2880, 2880, 2880]


def test_a_new_leader_knows_the_time_before_its_first_tick():
    """What it strikes at once does not fade at the first tick, and an exclusion has an end."""
    policy = FailurePolicy.resume(replace(FIRST, claimed=1e9), RoundRules(1, 8, 3, 60.0, 5.0))
    policy.failures = [failure(B, UNCORRECTABLE)]
    policy.judge(1, ["node1", "node2"])
    policy.advance(1e9 + 1.0)
    assert policy.excluded == ("node2",) and policy.exclusions == {"node2": 1e9 + 720.0}


def test_what_befalls_many_nodes_at_once_is_no_nodes_fault():
    """In an outage of the file system tasks fail to start everywhere."""
    policy = FailurePolicy(RoundRules(4, 64, 3, 60.0, 5.0))
    for outage in range(4):
        for i in range(64):
            policy.advance(outage * 6 * 3600.0 + i)
            state = TaskState(f"7_{i}", "FAILED", "NonZeroExitCode", f"node{i}", restarts=outage)
            policy.start_failed(FailedStart(state, (f"node{i}",), False), 0)
    assert policy.excluded == ()


# ---- lost nodes ---------------------------------------------------------------------------


def lose_and_start_anew(m: RoundState, rounds: int, *, word: str = "", announced: bool = False):
    """Let B's node be lost once a round, and its task start anew; return the last effects."""
    b, effects = B, []
    for i in range(rounds):
        now = 100.0 * (i + 1)
        m.agent_lost(b, LossReason.CONNECTION_CLOSED, now, announced=announced)
        effects = list(m.join(A, now + 1))
        if word:
            state = TaskState(B.task, word, restarts=b.attempt)
            m.slurm_answered(running(A) | {B.task: state}, now + 2, now + 2)
        b = replace(B, attempt=b.attempt + 1)
        effects += m.join(b, now + 3)
        if m.run.phase is RoundPhase.ENDED:
            return i + 1, effects
        effects += [*m.join(A, now + 4), *m.slurm_answered(running(A, b), now + 5, now + 5)]
    return rounds, effects


def test_a_script_that_takes_its_node_with_it_ends_the_run_with_slurms_reason():
    """Three such rounds are free, each further one costs a restart; the end names the step."""
    m = training(A, B, max_restarts=3)
    m.run.progressed(B, {"step": 17}, 1.0)
    tried, effects = lose_and_start_anew(m, 400, word="OUT_OF_MEMORY")
    (end,) = decisions(effects)
    assert tried == 7 and kind(end) == "end" and end[1].status == "failed"
    assert m.run.policy.restarts == 3
    message = end[1].failure.summary()
    assert "Slurm: OUT_OF_MEMORY" in message and "step 17" in message and "node2" in message


@pytest.mark.parametrize("progress", ["step", "checkpoint"])
def test_losses_with_progress_in_between_cost_nothing(progress):
    """Nodes die, over weeks; a further step or a new checkpoint shows that it is not the script."""
    m = training(A, B, max_restarts=0)
    b = B
    for i in range(50):
        now = 100.0 * (i + 1)
        if progress == "step":
            m.run.progressed(A, {"step": i}, now)
        else:
            m.checkpointed(A, i, 0, now)
        m.agent_lost(b, LossReason.CONNECTION_CLOSED, now)
        b = replace(B, attempt=i + 1)
        for agent in (A, b):
            m.join(agent, now + 1)
        m.slurm_answered(running(A, b), now + 2, now + 2)
    assert m.run.phase is RoundPhase.RUNNING and m.run.policy.restarts == 0


@pytest.mark.parametrize("by", ["agent", "PREEMPTED", "TIMEOUT"])
def test_losses_that_were_announced_cost_nothing(by):
    """The agent leaves by itself, or Slurm says that it has taken the node."""
    m = training(A, B, max_restarts=0)
    lose_and_start_anew(m, 50, word="" if by == "agent" else by, announced=by == "agent")
    assert m.run.phase is RoundPhase.RUNNING and m.run.policy.restarts == 0


@pytest.mark.parametrize(
    ("lost", "word", "losses"),
    [("bcd", "", 0), ("bcd", "OUT_OF_MEMORY", 1), ("abcd", "", 1), ("a", "", 1)],
)
def test_many_nodes_that_one_round_loses_are_not_the_scripts_fault(lost, word, losses):
    """A rack without power, or a suspension; but a script may end all, or have no memory left."""
    m = training(A, B, C, D, max_restarts=0)
    gone = [{"a": A, "b": B, "c": C, "d": D}[name] for name in lost]
    for agent in gone:
        m.agent_lost(agent, LossReason.CONNECTION_CLOSED, 10.0)
    if word:
        m.slurm_answered({a.task: TaskState(a.task, word, restarts=0) for a in gone}, 11.0, 11.0)
    for agent in gone:
        m.join(replace(agent, attempt=1), 12.0)
    assert m.run.policy.losses == losses


def test_nodes_that_the_run_itself_has_requeued_are_no_losses():
    """The next leader finds them in the queue."""
    m = resumed(round=4, members=(A, B), requeued={A.task: 0, B.task: 0})
    m.slurm_answered(running(s0="PENDING", s1="PENDING"), 101.0, 101.0)
    assert m.run.participants.is_lost(A) and m.run.policy.gone == {}


def test_many_agents_that_time_out_at_once_are_not_to_blame():
    """The network between them is."""
    m = training(A, B, C, D)
    m.run.note_silence(B)
    m.agent_lost(B, LossReason.SILENT, 10.0)
    m.run.note_silence(C)
    m.agent_lost(C, LossReason.SILENT, 10.0)
    m.join(A, 10.1)
    m.join(D, 10.1)
    assert m.run.policy.strikes == {}


def test_the_only_other_agent_that_times_out_is_not_to_blame():
    """With two nodes it is unknown which one is cut off."""
    m = training(A, B)
    m.run.note_silence(B)
    m.agent_lost(B, LossReason.SILENT, 10.0)
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
    m.run.progressed(A, {"step": 44}, 25.0)
    m.agent_lost(B, LossReason.CONNECTION_CLOSED, 30.0)
    first = failure(B, "CUDA error: unknown error")
    lost = LostNode("node2", LossReason.CONNECTION_CLOSED, 3, is_first=True)
    kept = m.run.policy.counters()
    at = m.run.policy.strikes["node2"]
    assert kept == FailureCounters(40, 1, first, 0, 44, {B.task: lost}, {"node2": at}, {})
    entry = replace(FIRST, counters=kept)
    assert decode_signed(entry.encode_signed(b"key"), b"key") == entry
    assert FailurePolicy.resume(entry, m.run.rules).counters() == kept
