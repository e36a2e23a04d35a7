"""Whose turn it is among the runs of a sweep: pure rules, and the queue they are asked about."""

import json
import shutil
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.launcher import control
from hpc_elastic.run.directory import Entry, RunDir, Submission
from hpc_elastic.site import QueueAdvice, QueuePolicy, QueueQuestion
from hpc_elastic.site.nodes import NodeState
from hpc_elastic.site.siblings import (
    KEPT_AWAY_S,
    NodeSupply,
    QueuedRun,
    SweepQueue,
    deferred_runs,
    divide_next_nodes,
    keep_away,
    let_start,
    why_blocked,
)
from hpc_elastic.site.value import NodeDemand
from hpc_elastic.slurm.job_state import TaskState
from specs import spec_of, started_run

AWAY = 60.0


def queued(name: str, low: int, *tasks: str, **fields) -> QueuedRun:
    """Return a run by the words of its tasks: a node, ``waits``, ``away``, a reason, ``over``."""
    states = {}
    for slot, word in enumerate(tasks):
        task = f"{name}_{slot}"
        known = {
            "waits": TaskState(task, "PENDING", "Resources"),
            "away": TaskState(task, "PENDING", "BeginTime", starts_in_s=AWAY),
            "soon": TaskState(task, "PENDING", "BeginTime", starts_in_s=9.0),
            "limit": TaskState(task, "PENDING", "QOSMaxNodePerUserLimit"),
            "held": TaskState(task, "PENDING", "JobHeldUser"),
            "kept": TaskState(task, "PENDING", "job_requeued_in_held_state"),
            "over": TaskState(task, "COMPLETED"),
            "leaves": TaskState(task, "COMPLETING", node="n9"),
        }
        waits = TaskState(task, "PENDING", word) if word[:1].isupper() else None
        states[task] = known.get(word) or waits or TaskState(task, "RUNNING", node=word)
    return QueuedRun(name, low, states, **fields)


def four(*, whole: bool = True, **states: str) -> NodeSupply:
    """Return a cluster of four nodes, all allocated but as told."""
    return NodeSupply({**dict.fromkeys(("n1", "n2", "n3", "n4"), "allocated"), **states}, whole)


@pytest.mark.parametrize("reason", ["QOSMaxGRESPerUser", "AssocGrpGRES", "MaxJobsPerAccount"])
def test_a_limit_of_the_user_is_named_and_idle_nodes_do_not_count(reason):
    """GPUs a user: the nodes that are idle are for others; they are given back at once."""
    run = queued("b", 3, "n4", reason, reason)
    why = why_blocked([run], 0, four(n1="idle", n2="idle"))
    assert why is not None and reason in why and "other runs" not in why


def test_a_run_that_lacks_what_others_train_with_waits_in_vain():
    """Three of four nodes are another run's: the fourth serves nobody."""
    runs = [queued("a", 3, "n1", "n2", "n3"), queued("b", 3, "n4", "waits", "waits")]
    assert why_blocked(runs, 0, four()) is None, "it trains"
    assert "other runs of the user" in str(why_blocked(runs, 1, four()))


@pytest.mark.parametrize(
    "states", [{"n5": "allocated", "n6": "mixed"}, {"n5": "idle", "n6": "planned"}]
)
def test_a_run_waits_for_what_others_than_the_sweep_have(states):
    """Jobs of other users end, and idle nodes are given soon: `below_min_timeout_s` counts."""
    runs = [queued("a", 3, "n1", "n2", "n3"), queued("b", 3, "n4", "waits", "waits")]
    assert why_blocked(runs, 1, four(**states)) is None


@pytest.mark.parametrize(
    ("state", "is_idle"),
    [("idle~", True), ("idle#", True), ("idle*", False), ("idle@", False), ("idle-", False),
     ("planned", False), ("mixed", False)],
)  # fmt: skip
def test_a_node_that_saves_power_is_idle(state, is_idle):
    """Slurm starts it for a task; on a cloud all idle nodes are such."""
    run = queued("a", 1, "waits")
    assert four(n4=state).num_idle(run) == is_idle
    assert NodeState.parse(state).is_idle == (is_idle or state in ("planned", "idle-"))


@pytest.mark.parametrize("state", ["down", "down*", "drained", "allocated*", "draining"])
def test_nodes_that_are_lost_come_to_nobody(state):
    """A node died, and the run that has one left of two gives that back."""
    runs = [queued("a", 2, "n1", "n2"), queued("b", 2, "n3", "waits")]
    assert why_blocked(runs, 1, four(n4=state))


def test_a_node_that_was_lost_is_none_of_the_run_though_slurm_learns_of_it_late():
    """The next attempt of the task counts again."""
    runs = [queued("a", 2, "n1", "n2"), queued("b", 2, "n3", "n4", lost={"b_1": 0})]
    assert why_blocked(runs, 1, four(n4="allocated*"))
    assert why_blocked(runs, 1, four()) is None, "its task may only be leaving"
    again = {**runs[1].tasks, "b_1": TaskState("b_1", "RUNNING", node="n4", restarts=1)}
    back = replace(runs[1], tasks=again)
    assert why_blocked([runs[0], back], 1, four(n4="allocated*")) is None


def test_nodes_that_the_run_avoids_come_not_to_it():
    """The only other node was excluded because of failures."""
    runs = [queued("a", 2, "n1", "n2"), queued("b", 2, "n3", "waits", avoids=frozenset({"n4"}))]
    assert why_blocked(runs, 1, four(n4="idle"))


def test_where_tasks_share_nodes_nothing_is_known():
    """A node that a task has may have room for another."""
    runs = [queued("a", 3, "n1", "n2", "n3"), queued("b", 3, "n4", "waits", "waits")]
    assert why_blocked(runs, 1, four(whole=False)) is None


def test_a_limit_of_the_user_leaves_idle_nodes_out_of_reach():
    """The sweep's own runs use the limit up."""
    runs = [queued("a", 2, "n1", "n2"), queued("b", 2, "n3", "limit")]
    assert why_blocked(runs, 1, four(n4="idle"))


def test_the_last_of_the_runs_that_hold_too_few_give_way_to_the_first():
    """Four runs with a node each of two: two of them begin, and at once."""
    runs = [queued(name, 2, f"n{i}", "waits") for i, name in enumerate("abcd", 1)]
    assert [why_blocked(runs, at, four()) for at in (0, 1)] == [None, None]
    assert "run b " in str(why_blocked(runs, 2, four()))
    assert "run a " in str(why_blocked(runs, 3, four()))


def test_nobody_gives_way_for_what_is_idle_or_does_not_suffice():
    """The first run takes the idle node; with a minimum of four it could not begin all the same."""
    enough = [queued("a", 2, "n1", "waits"), queued("b", 2, "n2", "waits")]
    assert why_blocked(enough, 1, four(n3="idle", n4="idle")) is None
    too_large = [queued("a", 4, "n1", *["waits"] * 3), queued("b", 2, "n2", "waits")]
    busy = {"n5": "allocated", "n6": "allocated"}
    assert why_blocked(too_large, 1, four(**busy)) is None


def test_a_coallocated_job_counts_with_all_its_nodes():
    """It is one job, and its nodes are a list."""
    job = QueuedRun("g", 3, {"8": TaskState("8", "RUNNING", node="n[1-3]")}, num_coallocated=3)
    assert job.nodes == ["n1", "n2", "n3"] and job.lacks == 0
    away = TaskState("8", "PENDING", "BeginTime", starts_in_s=AWAY)
    waiting = QueuedRun("g", 3, {"8": away}, num_coallocated=3)
    me = queued("a", 1, "n4")
    assert let_start([me, waiting], 0, four(n1="idle", n2="idle", n3="idle")) == ["8"]
    assert let_start([me, waiting], 0, four(n1="idle", n2="idle")) == []
    more = TaskState("9_0", "PENDING", "Dependency")
    further = QueuedRun(
        "g", 3, {"8": away, **{f"9_{n}": more for n in range(3)}}, num_coallocated=3
    )
    assert let_start([me, further], 0, four(n1="idle", n2="idle", n3="idle")) == ["8"]


def test_runs_that_stay_away_start_as_far_as_there_are_idle_nodes():
    """Each with its minimum, in their order, and none with less."""
    me = queued("a", 1, "n1")
    away = [queued(name, 2, "away", "away", "away") for name in "bc"]
    assert let_start([me, *away], 0, four(n2="idle")) == []
    assert let_start([me, *away], 0, four(n2="idle", n3="idle")) == ["b_0", "b_1"]
    idle = {f"n{n}": "idle" for n in range(2, 6)}
    assert let_start([me, *away], 0, four(**idle)) == ["b_0", "b_1", "c_0", "c_1"]


def test_idle_nodes_are_first_for_the_runs_that_wait_for_them():
    """Slurm gives those their nodes in a moment."""
    runs = [queued("a", 1, "n1"), queued("b", 2, "waits", "waits"), queued("c", 2, "away", "away")]
    assert let_start(runs, 0, four(n2="idle", n3="idle")) == []
    soon = [runs[0], queued("b", 2, "soon", "leaves"), runs[2]]
    assert let_start(soon, 0, four(n2="idle", n3="idle")) == []


def test_no_idle_node_is_kept_for_a_run_that_a_user_holds():
    """`scontrol hold` may last for days."""
    runs = [queued("a", 1, "n1"), queued("b", 2, "held", "kept"), queued("c", 2, "away", "away")]
    assert let_start(runs, 0, four(n2="idle", n3="idle")) == ["c_0", "c_1"]


def test_a_run_that_ends_leaves_its_nodes_to_the_next():
    """They are not idle yet."""
    runs = [queued("a", 3, "n1", "n2", "n3"), queued("b", 3, "away", "away", "away")]
    assert let_start(runs, 0, four(n4="idle"), ends=True) == ["b_0", "b_1", "b_2"]
    assert let_start(runs, 0, four(n4="idle")) == []


def test_further_nodes_of_the_run_itself_come_back_last():
    """What is lost comes back by other rules."""
    me = queued("a", 1, "n1", "away", "away", "away")
    other = queued("b", 2, "away", "away")
    idle = {"n2": "idle", "n3": "idle", "n4": "idle"}
    assert let_start([me, other], 0, four(**idle)) == ["b_0", "b_1", "a_1"]
    assert let_start([me], 0, four(**idle), withheld={"a_1"}) == ["a_2", "a_3"]


def test_a_run_that_would_start_for_nothing_stays_away_for_longer():
    """All tasks of all such runs at once, as soon as one is about to start."""
    trains = queued("a", 3, "n1", "n2", "n3")
    soon = {f"b_{n}": TaskState(f"b_{n}", "PENDING", "BeginTime", starts_in_s=30.0) for n in (0, 1)}
    runs = [trains, QueuedRun("b", 2, soon), queued("c", 2, "away", "away")]
    assert keep_away(runs, four(n4="idle")) == ["b_0", "b_1", "c_0", "c_1"]
    assert keep_away([trains, runs[2]], four(n4="idle")) == [], "it stays away for a minute yet"
    assert keep_away(runs, four(n4="idle", n5="allocated")) == [], "another user's job may end"
    short = [queued("a", 3, "n1", "n2", "waits"), runs[1]]
    assert keep_away(short, four(n3="idle", n4="idle")) == [], "it may give its nodes back"


def grows(run: QueuedRun, left: int) -> QueuedRun:
    """Return a run of at most four nodes that has measured its step times."""
    times = {1: 1.0, 2: 0.52, 3: 0.36}
    return replace(run, demand=NodeDemand(0, run.min_nodes, 4, 1, times, left))


def test_the_next_nodes_go_to_the_run_that_ends_first():
    """A run that is over gets none, and one that would end last does not start."""
    runs = [
        grows(queued("a", 1, "n1", "waits", "waits", "waits"), 900),
        grows(queued("b", 1, "n2", "waits", "waits", "waits"), 100),
        grows(queued("c", 1, "over"), 0),
        grows(queued("d", 1, "waits", "waits"), 5000),
    ]
    shares = divide_next_nodes(runs)
    assert shares == [0, 2, 0, 0] and deferred_runs(runs, shares) == {3}
    assert keep_away(runs, four(n4="idle"), {3}) == ["d_0", "d_1"]
    away = [*runs[:3], grows(queued("d", 1, "away", "away"), 5000)]
    assert keep_away(away, four(n4="idle"), {3}) == []
    assert let_start(away, 1, four(n4="idle")) == ["d_0"]
    assert let_start(away, 1, four(n4="idle"), deferred={3}) == []


def test_a_run_that_holds_its_tasks_does_not_start_them_itself():
    """It grows no further, though nodes are idle."""
    runs = [queued("a", 1, "n1", "away"), queued("b", 1, "n2")]
    assert let_start(runs, 0, four(n3="idle")) == ["a_1"]
    assert let_start(runs, 0, four(n3="idle"), withheld={"a_1"}) == []


def test_a_begin_of_the_users_own_is_kept():
    """A run that never ran was not sent away."""
    runs = [queued("a", 1, "n1"), queued("b", 1, "away", has_started=False)]
    assert let_start(runs, 0, four(n2="idle")) == []


def test_runs_that_are_over_want_nothing():
    """Nor are nodes kept for them."""
    runs = [queued("a", 1, "n1"), queued("b", 2, "over", "over"), queued("c", 1, "away")]
    assert let_start(runs, 0, four(n2="idle")) == ["c_0"]


class FakeClient:
    """Slurm, with two runs of two tasks in one array: the second run stays away."""

    def __init__(self) -> None:
        self.states = {"n1": "allocated", "n2": "allocated", "n3": "idle", "n4": "idle"}
        self.started: list[str] = []
        self.delays: list[float] = []
        self.scripts: list[Path] = []
        self.num_asked = 0
        self.waits_in: str | None = None
        self.second = TaskState("7_2", "PENDING", "BeginTime", starts_in_s=AWAY)
        self.third = TaskState("7_3", "PENDING", "Resources")

    def tasks(self, job_ids, *, once=False):
        """The queue."""
        self.num_asked += 1
        first = {f"7_{i}": TaskState(f"7_{i}", "RUNNING", node=f"n{i + 1}") for i in (0, 1)}
        return {**first, "7_2": self.second, "7_3": self.third}

    def batch_scripts(self):
        """The scripts of the user's jobs."""
        return self.scripts

    def pending_partitions(self, job_ids):
        """Where the submissions' tasks wait."""
        return self.waits_in

    def each_node(self, partition, hosts=None):
        """The nodes."""
        assert partition == (None if hosts else self.waits_in or "low")
        return {n: state for n, state in self.states.items() if hosts is None or n in hosts}

    def postpone(self, tasks, delay_s, *, time_limit_s=None):
        """Note them."""
        self.started += tasks
        self.delays.append(delay_s)


@pytest.fixture
def two_runs(tmp_path) -> list[RunDir]:
    """Two runs that were submitted together as job 7."""
    submission = Submission(tmp_path / ".hpc_elastic")
    submission.path.mkdir()
    runs = [RunDir(tmp_path / str(n)) for n in range(2)]
    tasks = [{"dir": str(run.path), "slot": slot} for run in runs for slot in range(2)]
    submission.array(0).tasks.write_text(json.dumps({"runs": tasks}))
    submission.array(0).submitted_as("7")
    for n, run in enumerate(runs):
        slots = [(0, 2 * n), (0, 2 * n + 1)]
        entry = Entry("function", "main", script="/x.py")
        where = {"partition": "low", "whole_nodes": True}
        started_run(run, spec_of("r", 2, 2, 1, 0, entry, str(submission.path), slots, **where))
        (run.rdzv / "entry.1.json").touch()
    return runs


def queue_of(run: RunDir, client: FakeClient) -> SweepQueue:
    """Return the queue as this run's leader sees it."""
    return SweepQueue(run, run.load(), None, client, lambda kind, **fields: None)


def test_a_run_that_has_not_started_has_no_log(two_runs):
    """Its first task makes the folder; it needs its minimum all the same."""
    shutil.rmtree(two_runs[1].rdzv)
    queue, waits = queue_of(two_runs[0], FakeClient()), TaskState("7_2", "PENDING")
    found = queue._queued(two_runs[1], ["7_2", "7_3"], {"7_2": waits})
    assert (found.has_started, found.min_nodes) == (False, 2)


def test_tasks_that_were_moved_start_on_nodes_of_the_partition_where_they_wait(two_runs):
    """What squeue lists counts, not the submission, nor the environment of this task."""
    client = FakeClient()
    client.waits_in = "new"
    queue_of(two_runs[0], client).let_others_start()
    assert client.started == ["7_2"]


def test_the_queue_of_a_sweep_is_read_from_its_submission(two_runs):
    """Runs and their tasks by the array's file; what is away starts again, and is asked seldom."""
    client = FakeClient()
    queue = queue_of(two_runs[0], client)
    assert queue.why_blocked({}) is None
    queue.let_others_start()
    assert client.started == ["7_2"]
    asked = client.num_asked
    queue.let_others_start()
    assert client.num_asked == asked, "ten seconds later"
    queue.let_others_start(ends=True)
    assert client.num_asked > asked, "the end waits for nothing"


def test_a_sweep_of_which_no_run_stays_away_is_looked_at_seldom(two_runs, monkeypatch):
    """Twice a minute; six times once there is something to be started."""
    now = [0.0]
    monkeypatch.setattr("hpc_elastic.site.siblings.time", SimpleNamespace(monotonic=lambda: now[0]))
    client = FakeClient()
    queue, away = queue_of(two_runs[0], client), client.second

    def looks(second: TaskState) -> int:
        client.second, before = second, client.num_asked
        for _ in range(60):
            now[0] += 1.0
            queue.let_others_start()
        return client.num_asked - before

    looks(TaskState("7_2", "RUNNING", node="n3"))
    assert looks(TaskState("7_2", "RUNNING", node="n3")) == 2
    looks(away)
    assert looks(away) == 6


def test_a_run_that_is_short_of_nodes_is_told_by_the_queue(two_runs):
    """The other run has two nodes, and the rest of the cluster is down."""
    client = FakeClient()
    client.second = TaskState("7_2", "RUNNING", node="n3")
    client.states |= {"n3": "allocated", "n4": "down"}
    assert "other runs of the user" in str(queue_of(two_runs[1], client).why_blocked({}))


def test_a_run_that_is_kept_away_and_one_that_starts_are_events(two_runs):
    """Each decision is one sentence; a run that is about to start for nothing stays away."""
    client, noted = FakeClient(), []
    run = two_runs[0]
    note = lambda kind, **fields: noted.append((kind, fields))  # noqa: E731
    queue = SweepQueue(run, run.load(), None, client, note)
    client.second = replace(client.second, starts_in_s=30.0)
    client.states = {"n1": "allocated", "n2": "allocated", "n3": "idle"}
    client.third = replace(client.second, task="7_3")
    queue.let_others_start()
    assert client.started == ["7_2", "7_3"] and client.delays == [KEPT_AWAY_S]
    ((kind, fields),) = noted
    assert (
        kind == "sweep_decision" and fields["runs"] == ["1"] and "must stay away" in fields["why"]
    )


def test_the_next_nodes_are_divided_by_what_the_runs_report(two_runs, monkeypatch):
    """The run that ends first grows; the other one has as many nodes as it will get."""
    now = [0.0]
    monkeypatch.setattr("hpc_elastic.site.siblings.time", SimpleNamespace(monotonic=lambda: now[0]))
    client = FakeClient()
    client.second = TaskState("7_2", "RUNNING", node="n3")
    for run, step in zip(two_runs, (900, 100), strict=True):
        raw = json.loads(run.spec.read_text())
        raw["settings"]["nodes"] = "1:4"
        raw["settings"]["launcher"]["sweep_growth"] = "soonest"
        run.spec.write_text(json.dumps(raw))
        times = {"1": 1.0, "2": 0.55, "3": 0.4}
        status = {"step": step, "total_steps": 1000, "step_times": times}
        run.status.write_text(json.dumps(status))
    first, second = (queue_of(run, client) for run in two_runs)
    assert first.let_others_start() == 4 and second.let_others_start() == 1
    now[0] = 1.0
    assert first.let_others_start() is None, "not so soon again"
    now[0] = 31.0
    assert second.let_others_start() == 1, "as often as the first run"
    now[0] = 100.0
    two_runs[0].status.write_text("{")
    assert first.let_others_start() == 2, "nothing is known of it"
    odd = ('{"step_times": [1]}', '{"step_times": {"a": 1}}', '{"step_times": {"2": null}}',
           '{"total_steps": "many"}', '{"total_steps": 1e999}', '{"total_steps": 9, "step": {}}',
           '{"step_times": {"1": NaN, "2": -1}, "total_steps": 9}')  # fmt: skip
    for text in odd:
        now[0] += 100.0
        two_runs[0].status.write_text(text)
        assert first.let_others_start() is not None, "a sibling's file ends no leader"


def test_without_the_setting_every_run_grows(two_runs):
    """As it always was."""
    assert queue_of(two_runs[0], FakeClient()).let_others_start() == inf


def resubmitted(runs: list[RunDir], folder: Path, flags: str) -> Path:
    """Move the second run into a submission of its own, job 9; return its script."""
    submission = Submission(folder / ".hpc_elastic")
    submission.path.mkdir(parents=True)
    run = RunDir(folder / "0")
    shutil.move(runs[1].path, run.path)
    tasks = [{"dir": str(run.path), "slot": slot} for slot in range(2)]
    submission.array(0).tasks.write_text(json.dumps({"runs": tasks}))
    submission.array(0).submitted_as("9")
    spec = replace(run.load(), submission=str(submission.path), tasks=[(0, 0), (0, 1)])
    run.spec.write_text(spec.to_json())
    submission.array(0).script.write_text(f"#!/bin/sh\n#SBATCH --job-name=b\n{flags}")
    first = Submission(runs[0].path.parent / ".hpc_elastic").array(0)
    mine = [{"dir": str(runs[0].path), "slot": slot} for slot in range(2)]
    first.tasks.write_text(json.dumps({"runs": mine}))
    first.script.write_text("#!/bin/sh\n#SBATCH --job-name=a\n#SBATCH --partition=low\n")
    runs[1] = run
    return submission.array(0).script


@pytest.mark.parametrize(("flags", "are_siblings"), [("low", True), ("high", False)])
def test_the_users_other_runs_on_the_same_nodes_are_siblings(two_runs, flags, are_siblings):
    """They share no folder: Slurm has the paths of their scripts. Others are left alone."""
    client = FakeClient()
    script = resubmitted(two_runs, two_runs[0].path / "other", f"#SBATCH --partition={flags}\n")
    first = Submission(two_runs[0].path.parent / ".hpc_elastic").array(0).script
    client.scripts = [script, Path("/somebody/else.sh"), first]
    client.states = {"n1": "allocated", "n2": "allocated", "n3": "allocated", "n4": "down"}
    second = {f"9_{n}": TaskState(f"9_{n}", "RUNNING", node="n3") for n in (0,)}
    second["9_1"] = TaskState("9_1", "PENDING", "Resources")
    first = {f"7_{i}": TaskState(f"7_{i}", "RUNNING", node=f"n{i + 1}") for i in (0, 1)}
    client.tasks = lambda job_ids, *, once=False: {**first, **second}
    why = queue_of(two_runs[1], client).why_blocked({})
    assert (why is not None and "other runs" in why) == are_siblings


def test_a_run_without_siblings_asks_slurm_once_a_minute(two_runs, monkeypatch):
    """For the user's other jobs only."""
    client = FakeClient()
    resubmitted(two_runs, two_runs[0].path / "other", "")
    queue = queue_of(two_runs[0], client)
    asked = []
    monkeypatch.setattr(client, "batch_scripts", lambda: asked.append(1) or [])
    now = [0.0]
    monkeypatch.setattr("hpc_elastic.site.siblings.time", SimpleNamespace(monotonic=lambda: now[0]))
    for _ in range(180):
        now[0] += 1.0
        queue.let_others_start()
        assert queue.why_blocked({}) is None
    assert len(asked) == 3 and client.num_asked == 0
    queue.let_others_start(ends=True)
    assert len(asked) == 4, "one may have been submitted since"


@pytest.mark.parametrize("had_looked", [False, True])
def test_a_run_whose_directory_was_removed_keeps_no_other_from_its_turn(two_runs, had_looked):
    """It has the nodes that it has, and wants none."""
    client = FakeClient()
    first, second = (queue_of(run, client) for run in two_runs)
    if had_looked:
        first.let_others_start()
        client.started.clear()
    client.second = TaskState("7_2", "RUNNING", node="n3")
    client.states |= {"n3": "allocated", "n4": "down"}
    shutil.rmtree(two_runs[0].path)
    assert "other runs of the user" in str(second.why_blocked({}))
    client.second = TaskState("7_2", "PENDING", "BeginTime", starts_in_s=AWAY)
    shutil.rmtree(two_runs[1].path)
    first.let_others_start(ends=True)
    assert client.started == []


def test_a_slurm_that_does_not_answer_is_said(two_runs):
    """The caller logs it, and goes on."""

    class Silent(FakeClient):
        def tasks(self, job_ids, *, once=False):
            raise SlurmCommandError(["squeue"], 1, "down")

    with pytest.raises(SlurmCommandError):
        queue_of(two_runs[0], Silent()).let_others_start()
    with pytest.raises(SlurmCommandError):
        queue_of(two_runs[0], Silent()).let_others_start(ends=True)


def test_a_run_that_is_cancelled_lets_others_start(two_runs, monkeypatch):
    """Nobody of it is left to do so."""
    client = FakeClient()
    monkeypatch.setattr(control, "SlurmClient", lambda: client)

    class NoTasks:
        def require_own_jobs(self, tasks):
            pass

        def list_live_tasks(self):
            return {}

    target = control.CancelTarget(two_runs[0], two_runs[0].load(), None, {})
    assert control.cancel(target, wait_s=1.0, warn=print, scheduler=NoTasks()) == []
    assert client.started == ["7_2"]


# ---- the policy, as a leader asks it --------------------------------------------------------


def policy_of(run: RunDir, client: FakeClient) -> QueuePolicy:
    """Return the policy of this run's leader."""
    return QueuePolicy(run, run.load(), None, client)


TRAINS, SHORT = QueueQuestion(trains=True), QueueQuestion(is_short=True)


def test_a_leader_is_advised_by_the_queue(two_runs):
    """Siblings start; drained nodes are named when Slurm was queried, and only then."""
    client = FakeClient()
    client.states["n1"] = "draining"
    policy = policy_of(two_runs[0], client)
    expected = QueueAdvice(max_nodes=inf, drained={"n1": "draining"})
    assert policy.tick(TRAINS, ["n1", "n2"]) == expected and client.started == ["7_2"]
    assert policy.tick(TRAINS, ["n1", "n2"]) == QueueAdvice()
    assert policy.tick(QueueQuestion()) == QueueAdvice()
    client.second = TaskState("7_2", "RUNNING", node="n3")
    client.states |= {"n3": "allocated", "n4": "down"}
    assert "other runs" in str(policy_of(two_runs[1], client).tick(SHORT).blocked_why)


@pytest.mark.parametrize(
    "damage",
    [
        "a node list of squeue", "an answer of sinfo", "Slurm", "the file system",
        "a sibling's description", "a sibling's array",
    ],
)  # fmt: skip
def test_whatever_goes_wrong_with_the_queue_is_no_advice(two_runs, monkeypatch, caplog, damage):
    """An optional query ends no term of a leader; it is logged once, until it succeeds again."""
    client = FakeClient()

    def fail(error):
        def raised(*_, **__):
            raise error

        return raised

    monkeypatch.setattr("hpc_elastic.site.siblings.POLL_S", -1.0)
    monkeypatch.setattr("hpc_elastic.site.siblings.POLL_SELDOM_S", -1.0)
    match damage:
        case "a node list of squeue":
            client.second = TaskState("7_2", "RUNNING", node="n[3")
        case "an answer of sinfo":
            client.each_node = lambda *_: None
        case "Slurm":
            client.tasks = fail(SlurmCommandError(["squeue"], 1, "down"))
        case "the file system":
            client.batch_scripts = fail(OSError("stale file handle"))
        case "a sibling's description":
            two_runs[1].spec.write_text('{"run_id": "r", "tasks": 7}')
        case "a sibling's array":
            array = Submission(two_runs[0].path.parent / ".hpc_elastic").array(0)
            run = str(two_runs[0].path)
            array.tasks.write_text(json.dumps({"runs": [{"dir": run, "slot": None}]}))
    policy = policy_of(two_runs[0], client)
    for _ in range(3):
        assert policy.tick(TRAINS, ["n1"]).max_nodes is None
    policy.end_run()
    texts = [record.getMessage().partition(": ")[0] for record in caplog.records]
    late = "other runs of the user may start"
    assert texts == [f"{late} late", f"{late} minutes later"]
    assert policy.tick(SHORT) == QueueAdvice()


def test_a_query_of_the_queue_that_succeeds_again_is_logged_again(two_runs, monkeypatch, caplog):
    """Each time that it fails anew."""
    monkeypatch.setattr("hpc_elastic.site.siblings.POLL_SELDOM_S", -1.0)
    monkeypatch.setattr("hpc_elastic.site.siblings.POLL_S", -1.0)
    client = FakeClient()
    policy, answers = policy_of(two_runs[0], client), client.tasks
    for works in (False, False, True, False):
        client.tasks = answers if works else None
        assert (policy.tick(TRAINS).max_nodes is not None) == works
    assert len(caplog.records) == 2 and all(record.exc_info for record in caplog.records)
