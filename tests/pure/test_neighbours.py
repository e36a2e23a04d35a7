"""Which nodes a run gives back, and for which jobs of others."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hpc_elastic.config.schema import SlurmSettings
from hpc_elastic.site.harvest import give_way_terms
from hpc_elastic.site.neighbours import NICE, GiveWay, has_features
from hpc_elastic.slurm import parsing
from hpc_elastic.slurm.job_state import BEHIND_OTHER_PARTITION
from hpc_elastic.slurm.parsing import NodeKind, NodeNeeds, QueuedJob

OWN = "7"
PATIENCE_S = 80.0
NAMES = [f"n{number}" for number in range(1, 7)]
RECORDED = Path(__file__).parent / "data" / "slurm"
KIND = NodeKind({"a100": 4}, 16, 64_000, frozenset({"ib", "big"}), {"gpu": 5, "all": 1})
NODES = dict.fromkeys(NAMES, KIND)


def running(job: str, *nodes: str, state: str = "RUNNING") -> QueuedJob:
    return QueuedJob(state, nodes, job=job)


def waiting(job: str, num_nodes: int = 1, **fields) -> QueuedJob:
    usual = {
        "reason": "Resources", "priority": 100, "partitions": ("gpu",), "limit_s": 600.0,
        "user": "ada", **fields,
    }  # fmt: skip
    needs = {name: usual.pop(name) for name in list(usual) if hasattr(NodeNeeds(), name)}
    return QueuedJob("PENDING", num_nodes=num_nodes, job=job, needs=NodeNeeds(**needs), **usual)


def given(*jobs: QueuedJob, own=NAMES, leave=NAMES[2:], rule=None, now=0.0, nodes=NODES):
    """Return what is given back, job -> nodes; the run has all six nodes, and two stay."""
    rule = rule or GiveWay(PATIENCE_S)
    mine = [running(OWN, node) for node in own]
    found = rule.choose([*mine, *jobs], {OWN}, nodes, [(f"t-{n}", n) for n in leave], now)
    return {each.job: [task.removeprefix("t-") for task in each.tasks] for each in found}


def test_a_job_gets_what_it_lacks_or_nothing():
    """In the order in which the tasks are to leave; the minimum is not among them."""
    assert given(waiting("8", 3)) == {"8": ["n3", "n4", "n5"]}
    assert given(waiting("8", 4)) == {"8": ["n3", "n4", "n5", "n6"]}
    assert given(waiting("8", 5)) == {}
    assert given(waiting("8", 5), own=NAMES[:5], leave=NAMES[1:5]) == {"8": NAMES[1:5]}


def test_a_job_that_idle_nodes_suffice_for_gets_none():
    """Nor one for which a node of another job is about to be free."""
    assert given(waiting("8"), own=NAMES[:5], leave=["n4"]) == {}
    coming = running("9", "n6", state="COMPLETING")
    assert given(coming, waiting("8"), own=NAMES[:5], leave=["n4"]) == {}
    busy = running("9", "n6")
    assert given(busy, waiting("8"), own=NAMES[:5], leave=["n4"]) == {"8": ["n4"]}


@pytest.mark.parametrize(
    "job",
    [
        waiting("8", reason="JobHeldUser"),
        waiting("8", reason="Dependency"),
        waiting("8", reason="BeginTime"),
        waiting("8", reason="QOSMaxJobsPerUserLimit"),
        waiting("8", reason="AssocGrpCpuLimit"),
        waiting("8", reason="Licenses"),
        waiting("8", reason=""),
        waiting("8", priority=0),
        waiting("8", nice=NICE),
        waiting("8", partitions=("cpu",)),
        waiting("8", features="a&ib"),
        waiting("8", features="[ib*2&big*1]"),
        waiting("8", gpus={"a100": 5}),
        waiting("8", gpus={"h100": 1}),
        waiting("8", cpus=17),
        waiting("8", memory_mb=64_001),
        waiting("8", required=frozenset({"n1"})),
        waiting("8", ntasks=17, most_nodes=1),
        waiting("8", 4, all_gpus={"": 17}, most_nodes=4),
        waiting("8", 4, all_gpus={"a100": 17}),
        waiting("8", ntasks=65),
        waiting("8", per_task=NodeKind(cpus=17)),
        waiting("8", per_task=NodeKind(cpus=1, memory_mb=64_001)),
        waiting("8", per_task=NodeKind({"h100": 1}, 1)),
        waiting("8", others=(waiting("9", reason="JobHeldUser"),)),
        waiting("8", others=(waiting("9", is_reserved=True),)),
        waiting("8", 2, others=(waiting("9", 3),)),
        waiting("8", throttle=0),
        waiting("8", excluded=frozenset(NAMES)),
        waiting("8", is_reserved=True),
    ],
    ids=lambda job: job.reason + str(job.needs)[:60],
)
def test_a_job_that_could_not_start_gets_nothing(job):
    """It waits for something else, may not use these nodes, or gives way itself."""
    assert given(job) == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"reason": "Priority"},
        {"reason": BEHIND_OTHER_PARTITION},
        {"partitions": ("cpu", "all")},
        {"features": "ib&big"},
        {"features": "h100|ib"},
        {"gpus": {"": 4}, "cpus": 16, "memory_mb": 64_000},
        {"is_exclusive": True},
        {"limit_s": None},
    ],
)
def test_a_job_that_could_start_gets_a_node(fields):
    """By what is known of the nodes."""
    assert given(waiting("8", **fields)) == {"8": ["n3"]}


@pytest.mark.parametrize(
    ("job", "number"),
    [
        (waiting("8", ntasks=17), 2),
        (waiting("8", 2, ntasks=17, most_nodes=2), 2),
        (waiting("8", ntasks=9, ntasks_per_node=3), 3),
        (waiting("8", ntasks=4, per_task=NodeKind(cpus=5)), 2),
        (waiting("8", ntasks=4, per_task=NodeKind(cpus=1, memory_mb=30_000)), 2),
        (waiting("8", ntasks=4, per_task=NodeKind({"": 2}, 1)), 2),
        (waiting("8", all_gpus={"a100": 5}), 2),
        (waiting("8", all_gpus={"": 5}, most_nodes=2), 2),
        (waiting("8", 2, most_nodes=3), 2),
        (waiting("8", others=(waiting("9", 2),)), 3),
        (waiting("8", num_tasks=4, throttle=3), 1),
    ],
)
def test_a_job_gets_as_many_nodes_as_it_needs(job, number):
    """For its tasks, its GPUs, and all parts of a heterogeneous one."""
    found = GiveWay(PATIENCE_S).choose(
        [running(OWN, *NAMES), job], {OWN}, NODES, [(n, n) for n in NAMES[2:]], 0.0
    )
    assert {len(each.tasks) for each in found} == {number}
    assert {each.num_nodes for each in found} == {number}
    assert len(found) == min(job.num_tasks, job.throttle or 1)


def test_idle_nodes_that_do_not_suffice_for_a_job_of_one_node_are_left_out():
    """It gets a larger one."""
    nodes = {**NODES, "n6": replace(KIND, cpus=8)}
    whole = waiting("8", ntasks=16, most_nodes=1)
    assert given(whole, own=NAMES[:5], leave=["n4"], nodes=nodes) == {"8": ["n4"]}
    some = waiting("8", ntasks=24)
    assert given(some, own=NAMES[:5], leave=["n4", "n5"], nodes=nodes) == {"8": ["n4"]}


def test_of_an_array_with_a_limit_some_run_at_the_same_time():
    """Those that run count."""
    array, one = waiting("8", num_tasks=5, throttle=2), running("8", "n6")
    assert given(array, one, own=NAMES[:5], leave=NAMES[2:5]) == {"8": ["n3"]}
    assert given(array, one, running("8", "n5"), own=NAMES[:4], leave=NAMES[2:4]) == {}


def test_required_and_excluded_nodes():
    """A node that the job may not have is not given for it; of several, required ones are some."""
    assert given(waiting("8", 2, required=frozenset({"n5"}))) == {"8": ["n3", "n5"]}
    assert given(waiting("8", required=frozenset({"n5"}))) == {"8": ["n5"]}
    assert given(waiting("8", excluded=frozenset({"n3", "n4"}))) == {"8": ["n5"]}


def test_a_job_that_slurm_tries_after_the_tasks_that_wait_gets_nothing():
    """Those of a partition with a higher PriorityTier come first, whatever their nice value."""
    low = waiting("8", partitions=("all",))
    task = waiting(OWN, nice=NICE)
    assert given(low, task) == {}
    assert given(low, replace(task, reason="BeginTime")) == {"8": ["n3"]}
    assert given(low, replace(task, partitions=("all",))) == {"8": ["n3"]}
    assert given(replace(low, partitions=("all", "gpu")), task) == {"8": ["n3"]}


def test_jobs_get_nodes_in_the_order_of_the_scheduler():
    """A node counts for one of them."""
    jobs = waiting("8", 3, priority=5), waiting("9", 2, priority=9)
    assert given(*jobs) == {"9": ["n3", "n4"]}
    jobs = waiting("8", 3, priority=5), waiting("9", 2, priority=9, partitions=("all",))
    assert given(*jobs) == {"8": ["n3", "n4", "n5"]}, "a partition of a higher tier"
    jobs = waiting("8", 2, priority=5), waiting("9", 2, priority=9)
    assert given(*jobs) == {"9": ["n3", "n4"], "8": ["n5", "n6"]}


def test_a_job_may_not_delay_one_of_a_higher_priority():
    """That has a plan for some of the nodes; a job that is over before may have them."""
    big = waiting("8", 6, priority=900, starts_at=1000.0, nodes=tuple(NAMES))
    assert given(big, waiting("9", limit_s=900.0)) == {"9": ["n3"]}
    assert given(big, waiting("9", limit_s=1200.0)) == {}
    assert given(replace(big, priority=1), waiting("9", limit_s=1200.0)) == {"9": ["n3"]}


def test_a_job_gets_no_node_that_is_reserved_before_it_ends():
    """Idle nodes do not suffice for it either; one that is over before may have them."""
    ahead = QueuedJob(parsing.RESERVED, ("n3", "n4"), 1000.0, limit_s=3600.0)
    assert given(ahead, waiting("8", limit_s=900.0)) == {"8": ["n3"]}
    assert given(ahead, waiting("8", limit_s=1200.0)) == {"8": ["n5"]}
    assert given(ahead, waiting("8", limit_s=None), leave=["n3", "n4"]) == {}
    assert given(replace(ahead, starts_at=-60.0), waiting("8"), leave=["n3", "n4"]) == {}
    idle = replace(ahead, nodes=("n6",))
    assert given(idle, waiting("8"), own=NAMES[:5], leave=["n4"]) == {}
    assert given(idle, waiting("8", limit_s=1200.0), own=NAMES[:5], leave=["n4"]) == {"8": ["n4"]}


def test_elements_of_an_array_get_a_node_each_as_far_as_there_are_some():
    """Each starts alone."""
    rule = GiveWay(PATIENCE_S)
    found = rule.choose(
        [running(OWN, *NAMES), waiting("8", num_tasks=9)], {OWN}, NODES, [("a", "n3"), ("b", "n4")],
        0.0,
    )  # fmt: skip
    assert [each.tasks for each in found] == [("a",), ("b",)]


def test_nodes_are_given_once():
    """While they are left, and until the job has started with them."""
    rule, job = GiveWay(PATIENCE_S), waiting("8", 2)
    assert given(job, rule=rule) == {"8": ["n3", "n4"]}
    assert given(job, rule=rule, now=20.0, leave=NAMES[4:]) == {}
    rest = [n for n in NAMES if n not in ("n3", "n4")]
    assert given(job, rule=rule, own=rest, now=40.0, leave=NAMES[4:]) == {}
    started = running("8", "n3", "n4")
    assert given(started, rule=rule, own=rest, now=60.0, leave=NAMES[4:]) == {}
    again = running("8", "n3", "n4"), waiting("9", 2)
    assert given(*again, rule=rule, own=rest, now=80.0, leave=NAMES[4:]) == {"9": ["n5", "n6"]}


def test_a_job_that_does_not_start_with_free_nodes_gets_others_later_and_later():
    """One whose nodes are still being left is waited for."""
    rule, job = GiveWay(PATIENCE_S), waiting("8", 2)
    rest = [n for n in NAMES if n not in ("n3", "n4")]
    assert given(job, rule=rule)
    for now in (20.0, 200.0, 400.0):
        assert given(job, rule=rule, now=now, leave=NAMES[4:]) == {}
    for now in (420.0, 420.0 + PATIENCE_S - 1):  # they are free
        assert given(job, rule=rule, own=rest, now=now, leave=NAMES[4:]) == {}
    assert given(job, rule=rule, own=rest, now=420.0 + PATIENCE_S, leave=NAMES[4:]) == {}
    times = [now for now in range(500, 8000, 20) if given(job, rule=rule, now=float(now))]
    pauses = [b - a for a, b in pairwise([500, *times])]
    assert pauses == sorted(pauses) and 2 * PATIENCE_S <= pauses[0] <= pauses[1] / 1.5
    assert len(times) < 7, "the tasks are back each time, and it still waits"
    assert given(job, waiting("9", 2, user="eve"), rule=rule, now=8000.0) == {"9": ["n3", "n4"]}


def test_a_user_of_jobs_that_did_not_start_gets_nodes_for_one_after_the_other():
    """Until one of them starts: the same rule may hold all of them."""
    rule = GiveWay(PATIENCE_S)
    jobs = [waiting(str(job)) for job in range(11, 14)]
    assert len(given(*jobs, rule=rule)) == 3
    assert given(*jobs, rule=rule, now=100.0) == {}, "the tasks are back: none has started"
    (job,) = given(*jobs, waiting("14"), rule=rule, now=300.0)
    left = [each for each in jobs if each.job != job]
    assert set(given(*left, rule=rule, now=320.0)) == {each.job for each in left}


def test_a_node_that_another_job_takes_says_nothing_about_the_job():
    """It gets another one at the next check."""
    rule, job, rest = GiveWay(PATIENCE_S), waiting("8"), [n for n in NAMES if n != "n3"]
    assert given(job, rule=rule) == {"8": ["n3"]}
    faster = running("9", "n3")
    assert given(job, faster, rule=rule, own=rest, leave=NAMES[3:], now=20.0) == {"8": ["n4"]}


def test_a_job_that_idle_nodes_do_not_help_keeps_them_from_no_other():
    """It waits for something that is not known."""
    rule = GiveWay(PATIENCE_S)
    jobs = waiting("8", priority=900), waiting("9", 2)
    assert given(*jobs, rule=rule, own=NAMES[:5], leave=["n4"]) == {}
    later = {"now": PATIENCE_S, "own": NAMES[:5], "leave": ["n4"]}
    assert given(*jobs, rule=rule, **later) == {"9": ["n4"]}


def test_the_next_leader_knows_what_was_given_and_for_nothing():
    """From a file of the run; a damaged one is an error."""
    rule, job, other = GiveWay(PATIENCE_S), waiting("8", 2), waiting("9", user="eve")
    given(job, rule=rule)
    given(job, rule=rule, now=100.0)
    assert given(job, other, rule=rule, now=120.0) == {"9": ["n3"]}
    following = GiveWay(PATIENCE_S)
    following.restore(json.loads(json.dumps(rule.memory())))
    assert given(job, other, rule=following, now=140.0, leave=NAMES[3:]) == {}
    for damaged in ({}, {"given": {"8": 1}, "doubts": {}}, {"given": {}, "doubts": {"8": None}}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            GiveWay(PATIENCE_S).restore(damaged)


def test_an_array_may_have_several_lines():
    """That of its elements that were requeued, and that of the others."""
    rule = GiveWay(PATIENCE_S)
    lines = waiting("8", num_tasks=2), waiting("8", reason="Priority")
    assert given(*lines, rule=rule, leave=["n3"]) == {"8": ["n3"]}
    assert given(*lines, rule=rule, leave=["n4"], now=20.0) == {"8": ["n4"]}, "for another one"
    rest = [n for n in NAMES if n not in ("n3", "n4")]
    assert given(*lines, rule=rule, own=rest, leave=["n5"], now=40.0) == {"8": ["n5"]}
    rest.remove("n5")
    assert given(*lines, rule=rule, own=rest, leave=["n6"], now=60.0) == {}, "all have one"


def test_of_an_array_some_of_which_have_started_the_rest_gets_nodes_too():
    """It was judged rightly."""
    rule = GiveWay(PATIENCE_S)
    assert given(waiting("8", num_tasks=9), rule=rule) == {"8": ["n6"]}  # the last of four
    rest = [n for n in NAMES if n not in NAMES[2:]]
    started = [running("8", node) for node in NAMES[2:]]
    left = waiting("8", num_tasks=5)
    assert given(*started, left, rule=rule, own=rest, leave=[], now=60.0) == {}
    assert given(*started[:3], left, rule=rule, own=[*rest, "n6"], leave=["n6"], now=90.0)


def test_a_share_of_a_node_is_given_for_what_fits_in_it():
    """And for no job that wants a whole node."""
    rule = GiveWay(PATIENCE_S, NodeKind({"": 1}, 4, 8000))
    assert given(waiting("8", gpus={"": 1}, cpus=4), rule=rule) == {"8": ["n3"]}
    assert given(waiting("9", gpus={"": 2}), rule=rule) == {}
    assert given(waiting("9", is_exclusive=True), rule=rule) == {}


def test_nodes_out_of_service_are_not_counted():
    """Neither as idle nor as given."""
    some = {name: kind for name, kind in NODES.items() if name != "n6"}
    assert given(waiting("8"), own=NAMES[:5], leave=["n4"], nodes=some) == {"8": ["n4"]}


def test_features_are_understood_as_far_as_they_are_names():
    """What is not understood is on no node."""
    assert has_features("", ())
    assert has_features("a|b&c", ("a",))
    assert has_features("a|b&c", ("b", "c"))
    assert not has_features("a|b&c", ("b",))
    assert not has_features("(a|b)&c", ("a", "c"))


@pytest.mark.parametrize("given_way", ["on", "all"])
def test_where_jobs_are_hidden_the_tasks_only_stand_behind_others(given_way):
    """It says so once, at submission."""
    settings = SlurmSettings(give_way=given_way)
    chosen, said = give_way_terms(settings, {"PrivateData": "jobs,usage"})
    assert chosen == given_way and "hides the jobs of other users" in said
    assert "no node goes back before its time limit" in said
    assert give_way_terms(settings, {}) == (given_way, None)


def test_auto_is_what_the_site_allows():
    """It says so."""
    chosen, said = give_way_terms(SlurmSettings(give_way="auto"), {"PrivateData": "jobs"})
    assert chosen == "off" and "no effect" in said
    chosen, said = give_way_terms(SlurmSettings(give_way="auto"), {})
    assert chosen == "on" and "beyond the minimum" in said


def of_tasks(ntasks: int, **of_each) -> dict[str, object]:
    return {"ntasks": ntasks, "per_task": NodeKind(**{"cpus": 1, **of_each})}


KINDS = {
    "nodes": (2, {"excluded": frozenset({"node3", "node4"})}),
    "some": (2, {}),
    "tasks": (1, of_tasks(20)),
    "cpus": (2, {"cpus": 2, **of_tasks(6, cpus=2, memory_mb=2000)}),
    "memory": (2, {"memory_mb": 3072}),
    "gpus": (1, {"all_gpus": {"": 3}}),
    "gpus-of-nodes": (2, {"gpus": {"": 2}, "memory_mb": 4096}),
    "gpus-of-tasks": (1, of_tasks(2, memory_mb=2048, gpus={"": 1})),
    "required": (2, {"required": frozenset({"node1"})}),
    "exclusive": (1, {"is_exclusive": True}),
    "beside-own": (1, {"is_exclusive": True}),
    "shared": (1, {}),
    "array": (1, {}),
    "parts": (1, {"memory_mb": 1024}),
    "a": (1, {}),
}
"""Jobs of `scripts/record_slurm_outputs.py`, by their names: least nodes, and what they need."""


@pytest.mark.parametrize("release", ["22.05", "24.11", "26.05"])
def test_what_scontrol_prints_of_the_jobs_and_their_needs(release):
    """Of those that have not ended; what users write into names, comments and commands is none."""
    printed = (RECORDED / release / "queue-needs.out").read_text()
    names = dict(re.findall(r"^JobId=(\d+).* JobName=(\S+)", printed, re.MULTILINE))
    jobs = {names[job.job]: job for job in parsing.parse_needs(printed)}
    assert jobs.pop("runs").nodes == ("node1", "node2", "node3", "node4")
    spread = jobs.pop("spread").needs
    assert (spread.ntasks, spread.ntasks_per_node, spread.cpus) == (9, 3, 3)
    assert jobs.keys() == KINDS.keys()
    for name, job in jobs.items():
        num_nodes, fields = KINDS[name]
        usual = {"cpus": 1, "ntasks": num_nodes}
        needs = replace(job.needs, most_nodes=None)
        assert (job.num_nodes, needs) == (num_nodes, NodeNeeds(**{**usual, **fields})), name
        assert (job.user, job.reason, job.state) == ("root", "Resources", "PENDING"), name
    assert jobs["some"].needs.most_nodes == 3 and jobs["nodes"].needs.most_nodes == 2
    assert jobs["gpus"].needs.most_nodes is None
    assert (jobs["nodes"].nice, jobs["nodes"].limit_s) == (7, 600.0)
    assert (jobs["array"].num_tasks, jobs["array"].throttle) == (5, 2)
    two, one = jobs["parts"].others
    assert (two.num_nodes, one.needs.all_gpus) == (2, {"": 1})


def test_what_sinfo_prints_of_the_nodes():
    """A node has a line for each of its partitions."""
    has = "ib,big|mixed|gpu:a100:4(S:0-1)|16|64000"
    printed = f"n1|gpu*|5|{has}\nn1|all|1|{has}\n"
    assert parsing.parse_nodes(printed) == {"n1": replace(KIND, state="mixed")}
