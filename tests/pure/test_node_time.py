"""Where the node-seconds of a run went, from its events and its progress."""

from itertools import pairwise

import pytest

from hpc_elastic.report import KINDS
from hpc_elastic.report.attempts import EventIndex
from hpc_elastic.report.node_time import Account
from hpc_elastic.report.node_time import account as account_of
from hpc_elastic.report.progress_log import Point
from hpc_elastic.run.events import LossReason

A, B = "7_0", "7_1"


def task(time: float, name: str = A, attempt: int = 0, boot_s: float = 2.0) -> dict:
    """A node that has begun ``boot_s`` before it says so."""
    return {
        "time": time + boot_s, "kind": "task", "task": name, "attempt": attempt,
        "host": f"node{name[-1]}", "started": time,
    }  # fmt: skip


def told(time: float, kind: str, name: str = A, **fields) -> dict:
    """Any other event."""
    return {"time": time, "kind": kind, "task": name, **fields}


def closed(time: float, number: int, *members: tuple[str, int]) -> dict:
    """A round, as its leader notes it."""
    named = [{"task": t, "attempt": n, "nproc": 1} for t, n in members]
    return told(time, "round", number=number, members=named, nodes=len(members))


def trains(time: float, round_: int, step: int, name: str = A, attempt: int = 0, **more) -> dict:
    """The first step of a node's workers."""
    known = {"restored": step - 1 or None, "restore_s": 0.0, "start_s": 1.0, "counted": False}
    return told(
        time, "first_step", name, attempt=attempt, round=round_, step=step, **{**known, **more}
    )


def point(time: float, round_: int, step: int | None, blocked_s: float = 0.0, **more) -> Point:
    """A line of the progress."""
    return Point(time, round=round_, nodes=1, step=step, blocked_s=blocked_s, **more)


def account(events: list[dict], points: list[Point], *, ft: bool = False, **more) -> Account:
    """The account of these events; with ``ft`` each node is a replica."""
    placed = {"placed": []} if ft else {}
    return account_of(
        EventIndex([e | placed if e["kind"] == "round" else e for e in events]), points, **more
    )


def spent(found: Account) -> dict[str, float]:
    """Node-seconds by kind, without those that are nothing."""
    return {kind: round(s, 3) for kind, s in found.seconds.items() if round(s, 3)}


def check(found: Account) -> None:
    """Every moment of every node is accounted for, once."""
    for node in found.nodes:
        edges = [(i.begin, i.end) for i in node.intervals]
        assert edges[0][0] == node.begin and edges[-1][1] == pytest.approx(node.end)
        assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(edges))
        assert {i.kind for i in node.intervals} <= set(KINDS)


ALONE = [
    task(0), told(4, "leader", term=1), told(5, "joined"), closed(6, 1, (A, 0)),
    trains(10, 1, 1, restored=None, restore_s=1.0),
]  # fmt: skip


def test_a_node_that_trains_alone():
    """From its process on: imports, the group, the workers, the restore, then it trains."""
    found = account(ALONE, [point(20, 1, 11)], now=110, running={A})
    check(found)
    assert spent(found) == {
        "start": 5, "rendezvous": 1, "import": 3, "restore": 1, "useful": 100,
    }  # fmt: skip
    assert found.node_s == 110 and found.goodput == pytest.approx(100 / 110)
    assert found.nodes[0].ended_by is None


def test_a_run_that_has_not_begun_has_no_goodput():
    """Nor has one whose script makes no step that could be seen."""
    assert account([], [], now=5).goodput is None
    found = account(ALONE[:-1], [], now=20, running={A})
    assert spent(found) == {"start": 5, "rendezvous": 1, "import": 14} and found.goodput is None


def test_checkpoints_stand_out_of_the_training():
    """What the workers were held up for between two points was just before the second."""
    points = [point(20, 1, 11), point(25, 1, 16, 2.0), point(30, 1, 20, 2.5)]
    found = account(ALONE, points, now=30, running={A})
    check(found)
    assert spent(found)["checkpoint"] == 2.5 and spent(found)["useful"] == 17.5
    blocked = [(i.begin, i.end) for i in found.nodes[0].intervals if i.kind == "checkpoint"]
    assert blocked == [(23, 25), (29.5, 30)]


def test_a_round_counts_its_checkpoints_from_nothing():
    """What is left of the round before in a leader's first look is no checkpoint."""
    points = [point(20, 1, 11, 3.0), point(32, 2, None, 3.0), point(42, 2, 12, 0.5)]
    events = [
        *ALONE, told(30, "round_stopped"), told(31, "joined"), closed(31, 2, (A, 0)),
        trains(35, 2, 12),
    ]  # fmt: skip
    assert "checkpoint" not in spent(account(events, points, now=50, running={A}))


TWO = [
    task(0), task(0, B), told(4, "leader", term=1), told(5, "joined"), told(5, "joined", B),
    closed(6, 1, (A, 0), (B, 0)), trains(10, 1, 1), trains(10, 1, 1, B),
]  # fmt: skip


def test_steps_that_died_with_a_node_are_replayed_by_those_who_stay():
    """B dies at step 91; A goes on from the checkpoint of step 50, at a step a second."""
    points = [point(99, 1, 90), point(100, 1, 91), point(120, 2, 61), point(160, 2, 101)]
    events = [
        *TWO, told(100, "node_lost", B, why=LossReason.CONNECTION_CLOSED),
        told(100, "round_stopped"),
        told(101, "joined"), closed(102, 2, (A, 0)),
        trains(110, 2, 51, restored=50, restore_s=2.0), told(200, "end", status="succeeded"),
    ]  # fmt: skip
    found = account(events, points, now=200)
    check(found)
    a, b = found.nodes
    assert (b.end, b.ended_by) == (100, "node_lost")
    kinds = [(i.kind, i.begin, i.end) for i in a.intervals if i.begin >= 100]
    assert kinds == [
        ("rendezvous", 100, 102), ("import", 102, 108), ("restore", 108, 110),
        ("replayed", 110, 150), ("useful", 150, 200),
    ]  # fmt: skip
    assert found.goodput == pytest.approx((90 + 50 + 90) / 300)
    assert [(size.time, size.nodes) for size in found.sizes] == [
        (6, 2), (100, 0), (102, 1), (200, 0),
    ]  # fmt: skip


def test_a_replay_that_has_not_caught_up_yet():
    """All that was trained since is a replay."""
    points = [point(100, 1, 91), point(130, 2, 71)]
    events = [*ALONE, told(100, "round_stopped"), closed(102, 2, (A, 0)), trains(110, 2, 51)]
    assert spent(account(events, points, now=130, running={A}))["replayed"] == 20


def test_steps_that_only_count_from_a_workers_start_are_no_replay():
    """A script that reports no steps and restores in its own way: nobody knows what it does."""
    points = [point(100, 1, 91), point(130, 2, 20)]
    counted = {"restored": None, "counted": True}
    events = [
        *ALONE[:-1], trains(10, 1, 1, **counted), told(100, "round_stopped"),
        closed(102, 2, (A, 0)), trains(110, 2, 1, **counted),
    ]  # fmt: skip
    assert "replayed" not in spent(account(events, points, now=130, running={A}))


def test_a_new_leader_ends_the_round_before():
    """A led and dies; B claims the next term, and goes on alone."""
    points = [point(100, 1, 91), point(120, 2, 97)]
    events = [
        *TWO, told(104, "leader", B, term=2), told(105, "joined", B), told(106, "node_lost", A),
        closed(106, 2, (B, 0)), trains(112, 2, 92, B),
    ]  # fmt: skip
    found = account(events, points, now=120, running={B})
    check(found)
    a, b = found.nodes
    assert (a.end, a.ended_by, b.ended_by) == (106, "node_lost", None)
    assert [(i.kind, i.length_s) for i in b.intervals][-3:] == [
        ("rendezvous", 2), ("import", 6), ("useful", 8),
    ]  # fmt: skip


def test_a_requeue_is_two_attempts_and_a_wait():
    """The time in the queue is nobody's; the second attempt begins from its own process on."""
    events = [
        *ALONE, told(60, "preemption_notice"), told(61, "round_stopped"),
        told(62, "task_exited", reason="signal", how="requeued", means="preempted"),
        task(90, attempt=1), told(93, "joined"), closed(94, 2, (A, 1)),
        trains(96, 2, 52, attempt=1),
    ]  # fmt: skip
    points = [point(61, 1, 51), point(100, 2, 56)]
    found = account(events, points, now=100, running={A}, waiting={B}, submitted=-10)
    check(found)
    assert [(n.attempt, n.begin, n.end, n.ended_by) for n in found.nodes] == [
        (0, 0, 62, "preempted"), (1, 90, 100, None),
    ]  # fmt: skip
    assert "replayed" not in spent(found)
    waits = {t: [(i.begin, i.end) for i in waited] for t, waited in found.queued.items()}
    assert waits == {A: [(-10, 0), (62, 90)], B: [(-10, 100)]}
    assert found.queue_s == 38 + 110 and found.node_s == 72
    assert [(size.time, size.nodes) for size in found.sizes] == [(6, 1), (61, 0), (94, 1)]


def test_what_went_back_for_jobs_of_others_and_until_the_tasks_had_nodes_again():
    """Two nodes for one job; one of them is not back yet."""
    left = {"reason": "asked", "how": "requeued"}
    events = [
        *ALONE, task(0, B),
        told(60, "nodes_given_back", job="8", user="ada", needs=2, tasks=[A, B]),
        told(62, "task_exited", **left), told(64, "task_exited", B, **left), task(90, attempt=1),
    ]  # fmt: skip
    found = account(events, [], now=100, running={A}, waiting={B}).given_back
    assert (found.jobs, found.nodes, found.node_s) == (1, 2, 28 + 36)
    assert account([*ALONE, told(62, "task_exited", **left)], [], now=100).given_back.nodes == 0


def test_a_node_that_waits_beside_a_group_that_trains_is_idle():
    """Late nodes are taken in at the next checkpoint; until the group has formed anew they wait."""
    events = [
        *ALONE, task(20, B), told(25, "joined", B), told(40, "round_stopped"), told(41, "joined"),
        closed(42, 2, (A, 0), (B, 0)), trains(45, 2, 41), trains(46, 2, 41, B),
    ]  # fmt: skip
    found = account(events, [point(40, 1, 40), point(50, 2, 45)], now=50, running={A, B})
    check(found)
    b = found.nodes[1]
    assert [(i.kind, i.length_s) for i in b.intervals] == [
        ("start", 5), ("idle", 15), ("rendezvous", 2), ("import", 4), ("useful", 4),
    ]  # fmt: skip


def test_an_attempt_that_was_cut_off_without_a_word_ends_when_the_run_was_last_heard_of():
    """All nodes lost power; the task came back an hour later."""
    points = [point(100, 1, 91)]
    events = [*ALONE, task(3700, attempt=1), told(3705, "joined")]
    found = account(events, points, now=3710, running={A})
    assert [(n.begin, n.end) for n in found.nodes] == [(0, 100), (3700, 3710)]
    assert [(size.time, size.nodes) for size in found.sizes] == [(6, 1), (100, 0)]
    lost = account(ALONE, points, now=9999, running=set())
    assert (lost.nodes[0].end, lost.nodes[0].ended_by) == (100, "silence")
    unknown = account(ALONE, points, now=9999, running=None)
    assert unknown.nodes[0].ended_by is None, "nobody says that it has"


def test_a_run_that_is_let_go_on_counts_on():
    """In tasks of another name; what was killed before it has no part in what comes after."""
    killed = [e | {"time": e["time"] + 1, "task": B} for e in ALONE if e["kind"] != "round"]
    failed = [*ALONE, *killed, told(60, "end", status="failed")]
    again = [
        task(99, "9_0"), told(100, "resume", "resume"), told(104, "joined", "9_0"),
        closed(105, 2, ("9_0", 0)) | {"task": "9_0"}, trains(110, 2, 12, "9_0"),
    ]  # fmt: skip
    points = [point(50, 1, 11), point(150, 2, 20)]
    found = account([*failed, *again], points, now=160, running={"9_0"})
    check(found)
    ends = {node.task: (node.end, node.ended_by) for node in found.nodes}
    assert ends == {A: (60, "end"), B: (60, "end"), "9_0": (160, None)}
    assert found.sizes[-1].nodes == 1
    waits = account(
        [*failed, *again], points, now=160, running={"9_0"}, waiting={"9_1"}, submitted=-10
    ).queued
    spans = {name: [(i.begin, i.end) for i in waited] for name, waited in waits.items()}
    assert spans == {A: [(-10, 0)], B: [(-10, 0)], "9_0": [], "9_1": [(100, 160)]}
    dead = account([*ALONE, *again], points, now=160, running={"9_0"})
    check(dead)
    assert {node.task: node.ended_by for node in dead.nodes} == {A: "silence", "9_0": None}
    assert next(node.end for node in dead.nodes if node.task == A) == 50


def test_a_node_that_comes_back_after_it_was_given_up_is_the_same_attempt():
    """It was cut off for a while."""
    events = [*TWO, told(50, "node_lost", B), told(50, "round_stopped"), told(55, "joined", B)]
    found = account(events, [], now=60, running={A, B})
    assert [n.end for n in found.nodes] == [60, 60]


def test_replicas_train_on_while_others_come():
    """With ft=true a round that only takes one in disturbs nobody."""
    events = [
        *ALONE, task(20, B), told(25, "joined", B), closed(26, 2, (A, 0), (B, 0)),
        trains(30, 2, 21, B), told(40, "node_lost", B), closed(40, 3, (A, 0)),
    ]  # fmt: skip
    points = [point(20, 1, 11), point(35, 2, 26), point(50, 3, 41)]
    found = account(events, points, now=50, running={A}, ft=True)
    check(found)
    a, b = found.nodes
    assert [(i.kind, i.begin, i.end) for i in a.intervals][-1] == ("useful", 10, 50)
    assert [(i.kind, i.length_s) for i in b.intervals] == [
        ("start", 5), ("idle", 1), ("import", 4), ("useful", 10),
    ]  # fmt: skip
    assert [size.nodes for size in found.sizes] == [1, 2, 1]


def test_a_group_of_replicas_is_smaller_as_soon_as_one_has_left():
    """There is no new round before one comes."""
    both = closed(26, 2, (A, 0), (B, 0)) | {"world_size": 4}
    events = [*ALONE, task(20, B), told(25, "joined", B), both, told(40, "task_exited", B)]
    found = account(events, [point(35, 2, 26)], now=50, running={A}, ft=True)
    assert [(s.time, s.nodes, s.world_size) for s in found.sizes[1:]] == [(26, 2, 4), (40, 1, 2)]
    events += [told(45, "task_exited", A)]
    found = account(events, [point(35, 2, 26)], now=50, running=set(), ft=True)
    assert [(s.time, s.nodes) for s in found.sizes[2:]] == [(40, 1), (45, 0)]


def test_clocks_that_differ_make_no_time():
    """A node whose clock is behind joins before it has begun; nothing is less than nothing."""
    events = [told(1, "leader"), told(2, "joined"), task(3), closed(3, 1, (A, 0)), trains(2, 1, 1)]
    found = account(sorted(events, key=lambda e: e["time"]), [], now=10, running={A})
    check(found)
    assert all(i.length_s > 0 for node in found.nodes for i in node.intervals)
