"""The timeline of a run: events in, sentences out."""

import json
import time
from pathlib import Path

import pytest

from hpc_elastic.report.attempts import EventIndex
from hpc_elastic.report.sentences import lines, sentence
from hpc_elastic.run.events import LossReason, problems
from made_events import (
    begun,
    event,
    gone,
    group,
    left,
    node,
    notice,
    stop,
    stopped,
    timeline,
    trains,
)

RECORDED = Path(__file__).parent / "data" / "timeline"
"""Events of real runs on Slurm, and what is to be told of them."""


@pytest.fixture(autouse=True)
def _utc(monkeypatch):
    """Local time is that of Greenwich."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def recorded(name: str) -> list[dict]:
    """The events of a run."""
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


NAMES = sorted(path.stem for path in RECORDED.glob("*.jsonl"))


@pytest.mark.parametrize("name", NAMES)
def test_a_real_run_is_told(name):
    """Growth, preemption, dead nodes and leaders, failed workers: every line as it is printed."""
    found = timeline(recorded(name))
    assert [json.loads(json.dumps(e.to_json()))["kind"] for e in found] == [e.kind for e in found]
    told = "\n".join(lines(found)) + "\n"
    assert told == (RECORDED / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_real_events_are_as_documented(name):
    """What was recorded is of this version."""
    assert [problem for e in recorded(name) for problem in problems(e)] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_story_that_is_cut_short_is_told_as_far_as_it_goes(name):
    """Whoever looks at a run that goes on sees any beginning of it."""
    events = recorded(name)
    for end in range(len(events)):
        assert all(sentence(e) for e in timeline(events[:end]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "without", ["first_step", "workers_stopped", "task", "leader", "round_stopped", "task_exited"]
)
def test_a_kind_that_is_missing_costs_detail_only(name, without):
    """A node's file may be lost; an older version did not write all kinds."""
    found = timeline(e for e in recorded(name) if e["kind"] != without)
    assert found[-1].kind == "ended" and all(sentence(e) for e in found)


def test_what_a_newer_version_writes_is_passed_over():
    """Kinds and fields that nobody knows here."""
    events = recorded("mixed")
    known = [sentence(e) for e in timeline(events)]
    later = [{**e, "v": 2, "new": 1} for e in events]
    news = event(events[3]["time"], "news", text="good")
    assert [sentence(e) for e in timeline([*later, news])] == known


TWO = [*begun(0, 1), group(2.0, 1, 0, 1), trains(3.0, 0, 1, 0)]
PREEMPTED = "node1 was preempted (SIGTERM, 5 s grace)"


TOLD = {
    "preempted": (
        [notice(10.0, 1), stop(11.0, 1, "regroup", 20), stopped(11.2, 0, 1, 20), left(11.5, 1),
         group(11.9, 2, 0), trains(13.3, 0, 2, 20)],
        f"{PREEMPTED}; all ranks saved step 20; group 2 -> 1 node; lost 0 steps, "
        "trained again after 2.1 s"),
    "preempted, and not saved in time": (
        [notice(10.0, 1), notice(10.1, 1, host="node1"), left(14.0, 1),
         stop(14.1, 1, "node_lost"), stopped(14.2, 0, 1, 27), group(14.9, 2, 0),
         trains(16.2, 0, 2, 20)],
        f"{PREEMPTED}; group 2 -> 1 node; lost 7 steps (from 27 back to 20), "
        "trained again after 2 s"),
    "time_limit": (
        [notice(10.0, 1, "time_limit", given_s=4.36543), left(11.0, 1, reason="time_limit"),
         stop(10.9, 1, "regroup", 20), group(12.0, 2, 0)],
        "node1 left because of its time limit, 4.4 s before it; all ranks saved step 20; "
        "group 2 -> 1 node; lost 0 steps, formed again after 1.1 s"),
    "asked": (
        [notice(10.0, 1, "asked"), stop(10.9, 1, "regroup", 20), left(11.0, 1, reason="asked"),
         group(12.0, 2, 0)],
        "node1 was asked to leave (a notice file, or the script); all ranks saved step 20; "
        "group 2 -> 1 node; lost 0 steps, formed again after 1.1 s"),
    "given back": (
        [event(9.9, "nodes_given_back", job="8", user="ada", needs=1, tasks=["7_1"],
               hosts=["node1"]),
         notice(10.0, 1, "asked"), stop(10.9, 1, "regroup", 20), left(11.0, 1, reason="asked"),
         group(12.0, 2, 0)],
        "node1 was given back for job 8 of ada; all ranks saved step 20; "
        "group 2 -> 1 node; lost 0 steps, formed again after 1.1 s"),
    "preempted by a command": (
        [event(9.9, "preempt", user="ada", host="node1", node_task="7_1", grace_s=30.0),
         notice(10.0, 1, "asked"), stop(10.9, 1, "regroup", 20), left(11.0, 1, reason="asked"),
         group(12.0, 2, 0)],
        "node1 was preempted by ada (hpc-elastic node preempt); all ranks saved step 20; "
        "group 2 -> 1 node; lost 0 steps, formed again after 1.1 s"),
    "cancelled": (
        [notice(10.0, 1), stop(10.9, 1, "regroup", 20),
         left(11.0, 1, "exit", means="cancelled"), group(12.0, 2, 0)],
        "the task of node1 was cancelled (SIGTERM); all ranks saved step 20; "
        "group 2 -> 1 node; lost 0 steps, formed again after 1.1 s"),
    "preempted, and may not be requeued again": (
        [notice(10.0, 1), stop(10.9, 1, "regroup", 20), left(11.0, 1, "exit"),
         group(12.0, 2, 0)],
        f"{PREEMPTED}, and does not come back; all ranks saved step 20; "
        "group 2 -> 1 node; lost 0 steps, formed again after 1.1 s"),
    "requeued by scontrol": (
        [notice(10.0, 1), stop(10.9, 1, "regroup", 20),
         left(11.0, 1, "requeued", means="requeued"), group(12.0, 2, 0)],
        "the task of node1 was requeued (SIGTERM); all ranks saved step 20; "
        "group 2 -> 1 node; lost 0 steps, formed again after 1.1 s"),
    "requeued, for its node is drained": (
        [notice(10.0, 1), stop(10.9, 1, "regroup", 20),
         left(11.0, 1, "requeued", means="requeued", node="IDLE+DRAIN: broken [root@now]"),
         group(12.0, 2, 0)],
        "the task of node1 was requeued (SIGTERM), while Slurm had the node as IDLE+DRAIN: "
        "broken [root@now]; all ranks saved step 20; group 2 -> 1 node; lost 0 steps, "
        "formed again after 1.1 s"),
    "SIGTERM, and nobody knows why": (
        [notice(10.0, 1), stop(10.9, 1, "regroup", 20), left(11.0, 1, node=""),
         group(12.0, 2, 0)],
        "the task of node1 was terminated (SIGTERM); all ranks saved step 20; "
        "group 2 -> 1 node; lost 0 steps, formed again after 1.1 s"),
    "silent": (
        [gone(10.0, 1, LossReason.SILENT), stop(10.0, 1, "node_lost"), group(12.0, 2, 0)],
        "node1 was lost (it sent no heartbeat any more); group 2 -> 1 node; "
        "formed again after 2 s"),
    "silent, and told to end when it could be reached again": (
        [gone(10.0, 1, LossReason.SILENT), stop(10.0, 1, "node_lost"), group(12.0, 2, 0),
         notice(20.0, 1), gone(20.1, 1, "its node is to be left: signal"), left(21.0, 1)],
        "node1 was lost (it sent no heartbeat any more); group 2 -> 1 node; "
        "formed again after 2 s"),
    "lost, after it was silent for a while": (
        [gone(10.0, 1, LossReason.SILENT), stop(10.0, 1, "node_lost"), group(12.0, 2, 0, 1),
         gone(30.0, 1, LossReason.CONNECTION_CLOSED), stop(30.0, 2, "node_lost"),
          group(31.0, 3, 0)],
        "node1 was lost (its agent or its node died); group 2 -> 1 node; "
        "formed again after 1 s"),
    "preempted, after it was unreachable for a while": (
        [gone(4.0, 1, LossReason.CONNECTION_CLOSED), group(5.0, 2, 0, 1), notice(10.0, 1),
         left(14.0, 1), stop(14.1, 2, "node_lost"), group(15.0, 3, 0)],
        "node1 was preempted (SIGTERM, 5 s grace); group 2 -> 1 node; formed again after 0.9 s"),
    "the leader died": (
        [stopped(10.0, 1, 1, 27), event(10.5, "leader", 1, term=2),
         group(11.0, 2, 1, term=2), trains(12.5, 1, 2, 20)],
        "node0, the leader, was lost (it did not answer any more), node1 leads now; "
        "group 2 -> 1 node; lost 7 steps (from 27 back to 20), trained again after 2.5 s"),
    "the leader was cut off, and told to end when it could be reached again": (
        [stopped(10.0, 1, 1, 27), event(10.5, "leader", 1, term=2),
         group(11.0, 2, 1, term=2), trains(12.5, 1, 2, 20), notice(20.0, 0), left(21.0, 0)],
        "node0, the leader, was lost (it did not answer any more), node1 leads now; "
        "group 2 -> 1 node; lost 7 steps (from 27 back to 20), trained again after 2.5 s"),
    "the leader was out of reach": (
        [stopped(10.0, 1, 1, 27), event(10.5, "leader", 1, term=2),
         group(11.0, 2, 1, 0, term=2), trains(12.5, 1, 2, 20)],
        "node0, the leader, was unreachable for a while, node1 leads now; "
        "group still 2 nodes; lost 7 steps (from 27 back to 20), trained again after 2.5 s"),
    "the leader was cut off, and took the others for lost": (
        [gone(10.0, 1, LossReason.SILENT), stop(10.0, 1, "node_lost"), stopped(10.2, 1, 1, 27),
         event(10.5, "leader", 1, term=2), group(11.0, 2, 1, term=2),
         notice(20.0, 0), gone(20.1, 0, "its node is to be left: signal"), left(21.0, 0)],
        "node0, the leader, was lost (it did not answer any more), node1 leads now; "
        "group 2 -> 1 node; formed again after 0.8 s"),
    "a worker failed": (
        [stop(10.0, 1, "failed"), stopped(10.0, 0, 1, 27),
         event(10.2, "restart", restarts=1, host="node1", failure="rank 1 on node1: boom"),
         group(11.0, 2, 0, 1), trains(12.5, 1, 2, 20)],
        "a worker failed: rank 1 on node1: boom; group still 2 nodes; "
        "lost 7 steps (from 27 back to 20), trained again after 2.5 s"),
    "an agent joined anew": (
        [stop(10.0, 1, "agent_restarted"), group(11.0, 2, 0, 1)],
        "because of agent_restarted; group still 2 nodes; formed again after 1 s"),
    "growth": (
        [node(8.0, 2), stop(10.0, 1, "regroup", 30), group(11.0, 2, 0, 1, 2)],
        "node2 joined; all ranks saved step 30; group 2 -> 3 nodes; lost 0 steps, "
        "formed again after 1 s"),
    "one left and came back before the next round": (
        [notice(10.0, 1), left(10.5, 1), node(20.5, 1, 1), stop(21.0, 1, "regroup", 30),
         group(22.0, 2, 0, 11)],
        f"{PREEMPTED}, node1 came back after 10 s away; all ranks saved step 30; "
        "group still 2 nodes; lost 0 steps, formed again after 1 s"),
    "gave up": (
        [event(10.0, "agent_failed", 1, why="no route to the leader"),
         gone(10.1, 1, "its agent"), stop(10.1, 1, "node_lost"), group(11.0, 2, 0)],
        "the agent of node1 failed (no route to the leader); group 2 -> 1 node; "
        "formed again after 0.9 s"),
    "ended by hand": (
        [event(10.0, "agent_killed", 1, signal="SIGINT"), stop(10.1, 1, "node_lost"),
         group(11.0, 2, 0)],
        "the agent of node1 was ended by SIGINT; group 2 -> 1 node; formed again after 0.9 s"),
    "under way": (
        [notice(10.0, 1)],
        "the task of node1 was terminated (SIGTERM); group of 2 nodes changes; "
        "it is not over yet"),
    "all are preempted": (
        [notice(10.0, 0), notice(10.1, 1), stop(11.0, 1, "regroup", 20), left(11.0, 0),
         left(11.0, 1)],
        "node0 and node1 were preempted (SIGTERM, 5 s grace); all ranks saved step 20; "
        "no node is left of 2; the run waits in the queue until a node is free"),
    "parked": (
        [event(10.0, "scale_up_decision", waiting=["7_2"], admit="not now", why="max nodes"), ],
        "7_2 waits, and does not join now: max nodes"),
    "no further growth": (
        [event(10.0, "growth_decision", nodes=4, grows=False, why="beyond 4 nodes")],
        "the run has 4 nodes and grows no further: beyond 4 nodes"),
    "growth again": (
        [event(10.0, "growth_decision", nodes=1, grows=True, why="beyond 4 nodes")],
        "the run has 1 node and may grow again: beyond 4 nodes"),
    "other runs": (
        [event(10.0, "sweep_decision", runs=["2", "10"], why="may start: nodes are idle")],
        "runs 2 and 10 may start: nodes are idle"),
    "disbanded": (
        [event(10.0, "nodes_requeued", nodes=1, hosts=["node0"], all=True, delay_s=300.0)],
        "too few nodes for too long: all go back to the queue for 5 min, so that "
        "other runs can start (node0)"),
    "sent away": (
        [event(10.0, "nodes_requeued", nodes=1, hosts=["node2"], all=False, delay_s=30.0)],
        "node2 cannot be used now: back to the queue for 30 s"),
    "a strike": (
        [event(10.0, "host_failure", host="node1", strikes=1, why="CUDA error")],
        "a failure was counted against node1 (1 of 2): CUDA error"),
    "excluded": (
        [event(10.0, "host_failure", host="node1", strikes=2, why="CUDA error"),
         event(10.0, "excluded", host="node1", why="CUDA error", hosts_left=3)],
        "node1 is not used for up to an hour: CUDA error; 3 other hosts left"),
    "a leader that fails": (
        [event(10.0, "leader_failed", host="node1", why="TypeError: no socket", terms=1,
               again=True, traceback="Traceback")],
        "the leader on node1 failed: TypeError: no socket; 1 term in a row so far, another "
        "election follows"),
    "the last leader that fails": (
        [event(10.0, "leader_failed", host="node1", why="TypeError: no socket", terms=4,
               again=False, traceback="Traceback")],
        "the leader on node1 failed: TypeError: no socket; 4 terms in a row so far, no further "
        "try"),
    "crash loop": (
        [event(10.0, "crash_loop", attempts=3, checkpoint=None)],
        "the workers failed 3 times in a row without any checkpoint: no further try"),
    "brought back": (
        [event(10.0, "tasks_restarted", tasks=["7_1"])],
        "task 7_1, last on node1, may start again as soon as a node is free "
        "(requested by the leader)"),
    "brought back, its end unseen": (
        [event(10.0, "tasks_restarted", tasks=["7_1"], avoids=["node1"])],
        "task 7_1, last on node1, may start again as soon as a node is free, but on node1 only "
        "when nothing of it runs there (requested by the leader)"),
    "a hang": (
        [event(10.0, "hang", stalled_s=60.0, others="wait in all_reduce", shared=False,
               ranks=[{"rank": 1, "host": "node1", "task": "7_1", "at": "train.py:7"}])],
        "no step for 60 s: blocked by rank 1 on node1 (train.py:7); "
        "the others: wait in all_reduce"),
    "a straggler": (
        [event(10.0, "straggler", rank=1, host="node1", ratio=1.52, slow=True)],
        "rank 1 on node1 is slow: it needs 1.52 times as long for a step as the others"),
    "no straggler any more": (
        [event(10.0, "straggler", rank=1, host="node1", ratio=1.0, slow=False)],
        "rank 1 on node1 keeps up with the others again"),
    "a node that is not fit": (
        [event(10.0, "preflight", 1, host="node1", check="space", reason="no space left",
               fit=False, excluded=True)],
        "node1 failed its health check: no space left; it is not used any more"),
    "a GPU that may be about to fail": (
        [event(10.0, "gpus_not_measured", 1, host="node1", why="GPU is lost")],
        "the GPUs of node1 cannot be measured: GPU is lost"),
    "a spare": (
        [event(10.0, "warm_worker_died", 1, host="node1", why="SIGKILL")],
        "the warm worker of node1 ended by itself (SIGKILL): the next restart takes longer "
        "there"),
    "a checkpoint that cannot be written": (
        [event(10.0, "checkpoint_failed", step=20,
               why="step 20 was not written: the disk is full")],
        "step 20 was not written: the disk is full; the training goes on"),
    "checkpoints again": (
        [event(10.0, "checkpoint_recovered", step=40)],
        "checkpoints are written again, from step 40 on"),
    "a state that differs from the others'": (
        [event(10.0, "state_mismatch", 1, step=300, worker="r1 (host node1, rank 0)",
               tensors="default.w", heals=True)],
        "step 300: the state of r1 (host node1, rank 0) differs from that of its peers in "
        "default.w; it heals. Check this node's hardware"),
    "a replica that cannot heal": (
        [event(10.0, "heal_failed", 1, worker="r1 (host node1, rank 0)",
               reason="HealError: out of memory")],
        "r1 (host node1, rank 0) cannot take over the state, and is kept out for a time: "
        "HealError: out of memory"),
    "a node that came and went": (
        [node(9.0, 2), notice(9.5, 2), left(10.0, 2)],
        "node2 was preempted (SIGTERM, 5 s grace); it was not in the group"),
    "failed": (
        [event(10.0, "end", status="failed", rounds=1, restarts=0, failure="rank 0: boom")],
        "the run failed: rank 0: boom; it took 9 s, 1 group and 0 restarts after failures"),
}  # fmt: skip
"""What happens to the two nodes -> what is told of it last."""


@pytest.mark.parametrize(("events", "told"), TOLD.values(), ids=TOLD)
def test_what_happens_to_two_nodes(events, told):
    """The last thing that is told of a run of two nodes."""
    assert sentence(timeline([*TWO, *events])[-1]) == told
    assert [problem for e in events for problem in problems(e)] == []


def test_a_run_that_was_gone_comes_back():
    """What it has cost is told when it trains again; while nobody trains, nothing is."""
    away = [notice(10.0, 0), notice(10.1, 1), stop(11.0, 1, "regroup", 20), left(11.0, 0),
            left(11.0, 1), stopped(11.0, 0, 1, 20)]  # fmt: skip
    back = [node(30.0, 0, 1), node(31.0, 1, 1), event(31.1, "leader", term=2),
            group(31.5, 2, 10, 11, term=2), trains(33.0, 0, 2, 20, attempt=1)]  # fmt: skip
    stood, again = timeline([*TWO, *away, *back])[-2:]
    assert (stood.kind, stood.nodes_after, stood.cost.pause_s) == ("stopped", 0, None)
    assert sentence(again) == (
        "node0 and node1 came back after up to 20 s away; again a group of 2 nodes; lost 0 steps, "
        "trained again after 22 s"
    )


def test_a_leader_that_stood_still_takes_nobody_for_lost():
    """When it goes on it hears nobody for a moment, and says so; it was away itself."""
    lost = [stopped(10.0, 1, 1, 27), event(10.5, "leader", 1, term=2), group(11.0, 2, 1, term=2)]
    wakes = [gone(20.0, 1, LossReason.SILENT), event(20.5, "joined", 0, host="node0")]
    again = [stop(21.0, 2, "regroup", 30), group(22.0, 3, 1, 0, term=2)]
    *_, left, came = timeline([*TWO, *lost, *wakes, *again])
    assert sentence(left).startswith("node0, the leader, was lost (it did not answer any more)")
    assert sentence(came).startswith("node0 came back after 12 s away; all ranks saved step 30")


def test_how_long_a_node_was_away_counts_from_its_group():
    """Attempts of its task that came to nothing in between, or ended late, do not matter."""
    lost = [gone(10.0, 1, LossReason.SILENT), stop(10.0, 1, "node_lost"), group(11.0, 2, 0)]
    late = [notice(60.0, 1), left(61.0, 1), node(70.0, 1, 1), notice(100.0, 1), left(101.0, 1)]
    again = [node(181.0, 1, 2), stop(182.0, 2, "regroup", 30), group(183.0, 3, 0, 21)]
    told = [sentence(e) for e in timeline([*TWO, *lost, *late, *again])]
    assert told[-1].startswith("node1 came back after 2 min 51 s away; all ranks saved step 30")


@pytest.mark.parametrize(
    ("task", "attempt", "host", "told"),
    [
        (1, 1, "node1", "node1 came back after 10 s away"),
        (2, 0, "node1", "node1 came back after 10 s away"),
        (1, 1, "node5", "node5 joined"),
    ],
)
def test_a_node_comes_back_and_not_a_task(task, attempt, host, told):
    """Whichever task it has now; a task that goes on elsewhere brings another node."""
    away = [notice(10.0, 1), left(10.5, 1), stop(10.6, 1, "regroup", 20), group(11.0, 2, 0)]
    started = event(20.5, "task", task, attempt=attempt, host=host, pid=1)
    both = group(22.0, 3, 0, task + 10 * attempt)
    both["members"][1]["host"] = host
    again = [started, stop(21.0, 2, "regroup", 30), both]
    said = sentence(timeline([*TWO, *away, *again])[-1])
    assert said.startswith(f"{told}; all ranks saved step 30; group 1 -> 2 nodes"), said


def test_two_that_fall_silent_together_are_told_together():
    """Of a group of three, the leader is left."""
    three = [*begun(0, 1, 2), group(2.0, 1, 0, 1, 2)]
    lost = [
        gone(10.0, 1, LossReason.SILENT),
        gone(10.0, 2, LossReason.SILENT),
        stop(10.0, 1, "node_lost"),
    ]
    assert sentence(timeline([*three, *lost, group(12.0, 2, 0)])[-1]) == (
        "node1 and node2 were lost (they sent no heartbeat any more); group 3 -> 1 node; "
        "formed again after 2 s"
    )


def test_one_that_is_excluded_for_its_silence_was_lost():
    """It is given back when it can be reached again; that is not why it left."""
    lost = [gone(10.0, 1, LossReason.SILENT), stop(10.0, 1, "node_lost"),
            event(11.9, "excluded", host="node1", why="fell silent", hosts_left=1),
            group(12.0, 2, 0), event(20.0, "nodes_requeued", 1, delay_s=400.0)]  # fmt: skip
    assert [sentence(entry) for entry in timeline([*TWO, *lost])[-2:]] == [
        "node1 was lost (it sent no heartbeat any more); group 2 -> 1 node; formed again after 2 s",
        "node1 is not used for up to an hour: fell silent; 1 other host left",
    ]


def test_one_that_is_heard_again_before_the_next_round_was_out_of_reach():
    """It joins again in the same attempt, and nobody has left."""
    back = [gone(10.0, 1, LossReason.SILENT), stop(10.0, 1, "node_lost"),
            event(13.0, "joined", 1, host="node1"), group(15.0, 2, 0, 1)]  # fmt: skip
    assert sentence(timeline([*TWO, *back])[-1]) == (
        "node1 was unreachable for a while; group still 2 nodes; formed again after 5 s"
    )


def replicas(*events: dict) -> list[str]:
    """What is told of a run of three replicas, but for its beginning."""
    three = [*begun(0, 1, 2), group(2.0, 1, 0, 1, 2, placed=["7_0", "7_1", "7_2"])]
    found = timeline([*three, *events])
    assert [entry.kind for entry in found[:2]] == ["started", "formed"]
    return [sentence(entry) for entry in found[2:]]


def test_replicas_live_on_when_one_is_preempted():
    """Nobody is stopped, and no step is lost."""
    departed = event(11.0, "replica_left", 1, host="node1", nodes=2)
    assert replicas(notice(10.0, 1), departed, left(11.2, 1)) == [
        f"{PREEMPTED}; 3 -> 2 replicas; the others train on; lost 0 steps"
    ]


def test_the_replica_that_led_may_die():
    """The next leader notes that, for the dead one can not."""
    events = [event(10.0, "leader", 1, term=2),
              event(10.0, "replica_left", 0, host="node0", nodes=2)]  # fmt: skip
    assert replicas(*events) == [
        "node0, the leader, was lost (it did not answer any more), node1 leads now; "
        "3 -> 2 replicas; the others train on"
    ]


def test_another_replica_may_lead_without_loss():
    """The leader before was slow, and is a replica still."""
    assert replicas(event(10.0, "leader", 1, term=2)) == [
        "node0, the leader, was unreachable for a while, node1 leads now"
    ]


def test_a_replica_that_was_silent_is_not_told_as_ended_by_slurm_afterwards():
    """Its task is ended when its node can be reached again; nor is it told by an earlier loss."""
    told = replicas(
        gone(5.0, 1, LossReason.SILENT),
        event(5.0, "replica_left", 1, host="node1", nodes=2),
        group(6.0, 2, 0, 1, 2, placed=[]),
        gone(6.1, 1, "its own connections were lost"),  # by a leader of before
        group(6.2, 3, 0, 1, 2, placed=[]),
        gone(20.0, 1, LossReason.CONNECTION_CLOSED),
        event(20.0, "replica_left", 1, host="node1", nodes=2),
        notice(80.0, 1),
        left(81.0, 1),
    )
    assert [line.partition(";")[0] for line in told] == [
        "node1 was lost (it sent no heartbeat any more)",
        "2 -> 3 replicas",
        "still 3 replicas",
        "node1 was lost (its agent or its node died)",
    ]


def test_replicas_that_all_went_back_to_the_queue_train_on_in_a_new_group():
    """None of them has trained on meanwhile."""
    told = replicas(
        event(10.0, "nodes_requeued", 0, nodes=3, hosts=["node0", "node1", "node2"], all=True,
              delay_s=50.0),
        *(event(10.2, "nodes_requeued", number, attempt=0, delay_s=50.0) for number in range(3)),
        *(node(70.0, number, 1) for number in range(3)),
        group(71.0, 2, 10, 11, 12, placed=["7_0", "7_1", "7_2"]),
    )  # fmt: skip
    assert "trained on" not in told[-1] and "again 3 replicas" in told[-1]


def test_replicas_that_are_lost_for_different_reasons_are_told_apart():
    """One is preempted while another dies."""
    told = replicas(
        notice(10.0, 1),
        gone(10.2, 2, LossReason.CONNECTION_CLOSED),
        event(10.3, "replica_left", 2, host="node2", nodes=2),
        event(11.0, "replica_left", 1, host="node1", nodes=1),
        left(11.2, 1),
    )
    assert told == [
        f"{PREEMPTED}; 2 -> 1 replica; the others train on; lost 0 steps",
        "node2 was lost (its agent or its node died); 3 -> 2 replicas; the others train on",
    ]


def test_a_replica_comes_back_and_another_starts_again():
    """The one was preempted, the other's worker has failed."""
    told = replicas(
        notice(10.0, 1),
        event(11.0, "replica_left", 1, host="node1", nodes=2),
        left(11.0, 1),
        node(21.0, 1, 1),
        group(22.0, 2, 0, 2, 11, placed=["7_1"]),
        trains(24.5, 1, 2, 40, attempt=1),
        event(30.0, "restart", restarts=1, host="node2", failure="rank 0 on node2: boom"),
        group(30.5, 3, 0, 2, 11, placed=["7_2"]),
    )
    assert told[1:] == [
        "node1 came back after 10 s away; 2 -> 3 replicas; the others trained on, together "
        "after 2.5 s",
        "a worker failed: rank 0 on node2: boom; still 3 replicas; the others trained on",
    ]


def test_the_date_stands_where_the_day_changes():
    """Times are local."""
    day = 86400.0
    found = timeline([node(day + 7200, 0), event(2 * day + 60, "tasks_restarted", tasks=["7_1"]),
                      event(2 * day + 90, "tasks_restarted", tasks=["7_2"])])  # fmt: skip
    told = [line[:11] for line in lines(found)]
    assert told == ["1970-01-02:", "02:00:00 th", "1970-01-03:", "00:01:00 ta", "00:01:30 ta"]


def test_a_run_that_failed_and_was_let_go_on_has_two_ends():
    """In order of time; that its nodes ended with it is no loss of theirs."""

    def failed(time: float) -> dict:
        return event(time, "end", status="failed", rounds=1, restarts=0, failure="it broke")

    let_go_on = {**event(20.0, "resume", user="ada", host="n", generation=1, nodes="1"),
                 "task": "command"}  # fmt: skip
    first = [
        *begun(0, 1),
        group(2.0, 1, 0, 1),
        failed(9.0),
        gone(9.5, 1, LossReason.CONNECTION_CLOSED),
    ]
    again = [node(22.0, 2), event(22.5, "leader", 2, term=2), group(23.0, 2, 2, term=2)]
    told = [sentence(e) for e in timeline([*first, let_go_on, *again, failed(30.0)])]
    assert [i for i, text in enumerate(told) if "the run failed" in text] == [2, len(told) - 1]
    assert "it took 8 s" in told[2] and "ada resumed the run" in told[3]
    assert "it took 10 s" in told[-1] and not any("nobody trains" in text for text in told)
    assert "the run failed" not in sentence(timeline([*first, let_go_on, *again])[-1])


def test_a_member_of_a_later_round_is_not_lost():
    """A leader that was cut off itself reports others as lost; the next round shows them."""
    told = [
        *begun(0, 1),
        group(2.0, 1, 0, 1),
        gone(10.0, 1, LossReason.SILENT),
        group(12.0, 2, 0, 1),
    ]
    assert EventIndex(told).attempt("7_1", 0).lost_at is None
    assert EventIndex(told[:-1]).attempt("7_1", 0).lost_at == 10.0


def test_what_an_unknown_kind_holds_does_not_matter():
    """A newer version may have a field of a known name that holds something else."""
    new = event(9.0, "of_a_newer_version", attempt="first", host=None, tasks=7)
    known = [*begun(0), group(2.0, 1, 0)]
    assert timeline([*known, new]) == timeline(known)
