"""The same scenarios at each described site: nothing is submitted twice, lost or left behind.

Below, what is different at each: those tests fail where the site's commands are the fake's own.
"""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from hpc_elastic.errors import SubmissionError
from hpc_elastic.launcher import control, submit
from hpc_elastic.launcher.follow import EndDecision
from hpc_elastic.report.run_view import read_view
from hpc_elastic.run.registry import mark_cancelled
from hpc_elastic.site.forecast import expected_start
from hpc_elastic.site.siblings import NodeSupply, QueuedRun, why_blocked
from hpc_elastic.slurm import quarantine, requeue, run_tasks
from hpc_elastic.slurm.exit_action import ExitAction
from hpc_elastic.slurm.job_state import Phase, TaskState, Wait, remedy, wait_of
from hpc_elastic.slurm.parsing import RESERVED
from hpc_elastic.slurm.scheduler import Scheduler
from sites import MOVED, SCRIPT, SITES, TIMED_OUT, Started

LONG = pytest.mark.long


def everywhere(*by_default):
    """Run a test at each site: at those that are not named in the long run only."""
    sites = [name if name in by_default else pytest.param(name, marks=LONG) for name in SITES]
    return pytest.mark.parametrize("site", sites, indirect=True)


@everywhere("lost answers", "GPUs a user", "job_submit talks", "MinNodes")
def test_submit(site, tmp_path):
    """A submission is one job, which its record names."""
    started = Started(tmp_path / "s", 1)
    assert site.tasks() == [f"{started.jobs.job_ids[0]}_0"]
    assert run_tasks.current_names(started.runs[0].load()) == site.tasks()


@everywhere("lost answers", "reservations")
def test_sweep(site, tmp_path):
    """Each run has its task, under the name that its record has."""
    started = Started(tmp_path / "s", 2)
    names = [name for run in started.runs for name in run_tasks.current_names(run.load())]
    assert sorted(site.tasks()) == sorted(names) and len(names) == 2


def running(site, started) -> str:
    """Wait until a run's task runs; return its name."""
    (task,) = run_tasks.current_names(started.runs[0].load())
    site.wait_until(lambda: site.tasks("RUNNING") == [task], "it runs")
    return task


def host_of(site, task) -> str:
    """Return the node of a task."""
    return site.run(["squeue", "-h", "-r", "-j", task, "-o", "%N"]).stdout.strip()


@everywhere("cached squeue", "requeue denied")
def test_preempt(site, tmp_path, monkeypatch):
    """A job takes the node of a task; that task, or one in its place, runs again: a record has it.

    The delay after which a task may start again is a second, not ten.
    """
    monkeypatch.setattr(requeue, "RETURN_DELAY_S", 1.0)
    started = Started(tmp_path / "s", 1)
    run = started.runs[0]
    task = running(site, started)
    host = host_of(site, task)
    other = site.preempt(host, for_s=1.0)
    show = ["squeue", "-h", "-r", "-t", "all", "-j", task, "-O", "PreemptTime:0"]
    site.wait_until(lambda: site.run(show).stdout.strip() not in ("", "N/A"), "it is preempted")
    leave = partial(requeue.requeue_or_exit, task, started.client, attempt=0, run=run)
    with ThreadPoolExecutor(1) as pool:  # in the main thread it would ignore SIGTERM for good
        how = pool.submit(leave).result()
    assert how in (ExitAction.REQUEUE, ExitAction.REQUEUED, ExitAction.REPLACE)
    if how is ExitAction.REPLACE:  # what called it ends, and with it the task
        site.run(["scancel", task])
    shown = ["scontrol", "-o", "show", "job", other]
    site.wait_until(
        lambda: "JobState=COMPLETED" in site.run(shown).stdout, "the other job has had the node"
    )
    (now,) = run_tasks.current_names(run.load())
    site.wait_until(lambda: site.tasks("RUNNING") == [now], "it runs again")
    again = site.run(["squeue", "-h", "-r", "-j", now, "-O", "RestartCnt:0"]).stdout.strip()
    assert (now, again) != (task, "0")


@everywhere("power saving", "requeue denied")
def test_node_lost(site, tmp_path):
    """The task waits or runs again on another node."""
    started = Started(tmp_path / "s", 1)
    run = started.runs[0]
    task = running(site, started)
    host = host_of(site, task)
    site.kill_node(host)
    scheduler = Scheduler(run, run.load(), started.client)

    def has_moved() -> bool:
        state = scheduler.list_tasks().get(task)
        return state is not None and (state.phase is Phase.PENDING or host not in state.node)

    site.wait_until(has_moved, "it leaves the node")


def cancel(site, started) -> None:
    """Cancel the only run, and wait until nothing of it is left."""
    mark_cancelled(started.runs[0], print)
    started.jobs.cancel()
    site.wait_until(lambda: not site.tasks(), "nothing is left")


@everywhere("lost answers", "cached squeue")
def test_cancel(site, tmp_path):
    """Nothing is left."""
    cancel(site, Started(tmp_path / "s", 1))


@everywhere("lost answers", "job_submit talks")
def test_resume(site, tmp_path, monkeypatch):
    """The run begins another generation, of one job that its record names."""
    started = Started(tmp_path / "s", 1)
    run = started.runs[0]
    cancel(site, started)

    def has_stopped() -> bool:
        return not Scheduler(run, run.load()).list_live_tasks()

    site.wait_until(has_stopped, "squeue says so")
    script = SCRIPT.format(last=0, where="")
    monkeypatch.setattr(
        submit, "render_scripts",
        lambda plan, name, **_: {array.number: script for array in plan.arrays},
    )  # fmt: skip
    control.resume(run.path, [])
    assert run.load().generation == 1
    site.wait_until(site.tasks, "it is back")
    assert run_tasks.current_names(run.load()) == site.tasks()


# ---- what is different at each site


def at(name):
    """Run a test at one site only."""
    return pytest.mark.parametrize("site", [name], indirect=True)


def waiting(site, tmp_path, runs: int = 1):
    """Submit to a closed queue; return what was started, and how the task of the last run waits."""
    site.hold_queue()
    started = Started(tmp_path / "s", runs)
    run = started.runs[-1]
    (state,) = Scheduler(run, run.load(), started.client).list_tasks().values()
    assert state.phase is Phase.PENDING
    return started, state


@at("lost answers")
def test_a_lost_answer_is_said(site, tmp_path, capsys):
    """The job is adopted, and Slurm's words are shown."""
    started = Started(tmp_path / "s", 1)
    said = capsys.readouterr().err
    assert TIMED_OUT in said and f"its job is {started.jobs.job_ids[0]}" in said


@at("GPUs a user")
def test_siblings_hold_no_nodes_for_a_limit_of_the_user(site, tmp_path):
    """The reason is shown as one that passes; a run that lacks nodes for it gives its own back."""
    _, task = waiting(site, tmp_path)
    assert wait_of(task.reason) is Wait.OWN_LIMIT and remedy(task.reason) is None
    assert "no start (1 task QOSMaxGRESPerUser)" in expected_start([task], 0).why
    has = TaskState("9_0", "RUNNING", node="node1")
    run = QueuedRun("b", 2, {"9_0": has, task.task: task})
    supply = NodeSupply(dict.fromkeys(site.nodes, "idle"), are_whole=True)
    assert "QOSMaxGRESPerUser" in why_blocked([run], 0, supply)


@at("power saving")
def test_a_node_that_boots_is_not_waited_for_by_the_run(site, tmp_path):
    """Its task is CONFIGURING first: it has no node to work on yet."""
    started = Started(tmp_path / "s", 1)
    run = started.runs[0]
    site.wait_until(lambda: site.tasks("RUNNING"), "it has a node")
    (state,) = Scheduler(run, run.load(), started.client).list_tasks().values()
    assert (state.state, state.phase) == ("CONFIGURING", Phase.PENDING)


@at("power saving")
def test_a_node_without_power_is_rid_of_a_lost_task(site, tmp_path):
    """The quarantine lasts while it boots, and ends when it has no power."""
    started, task = waiting(site, tmp_path)
    run, client, power = started.runs[0], started.client, tmp_path / "site/power"
    quarantine.quarantine_node(run, task.task, "node1", client)
    avoided = []
    for state in ("IDLE+CLOUD+POWERING_UP", "IDLE+CLOUD+POWERED_DOWN"):
        power.write_text(state)
        quarantine.lift_quarantine(run, [task.task], client, time.time())
        avoided.append(client.excluded(task.task))
    assert avoided == [("node1",), ()]


@at("job_submit talks")
def test_a_plugin_may_move_a_job_and_say_so(site, tmp_path, capsys):
    """Its words are printed once; the job is the run's in the other partition too."""
    started = Started(tmp_path / "s", 1)
    assert capsys.readouterr().err.count(MOVED) == 1
    assert site.run(["squeue", "-h", "-o", "%P"]).stdout.split() == ["cancel"]
    assert started.client.find_job(started.scripts[0]) == started.jobs.job_ids[0]


@at("MinNodes")
def test_a_partition_for_larger_jobs_is_named(site, tmp_path):
    """The reason, and the refusal where the site enforces limits at once."""
    _, task = waiting(site, tmp_path)
    assert wait_of(task.reason) is Wait.NEVER
    assert re.search("no task can start .*MinNodes.*coallocate_min", expected_start([task], 0).why)
    (tmp_path / "site/enforced").touch()
    with pytest.raises(SubmissionError, match=r"Node count specification invalid.*MinNodes"):
        Started(tmp_path / "t", 1)


@at("cached squeue")
def test_a_job_that_only_the_cache_lists_is_not_found(site, tmp_path):
    """A submission in the same directory would take it for its own."""
    started = Started(tmp_path / "s", 1)
    running(site, started)
    (tmp_path / "site/frozen").touch()
    run, (job,) = started.runs[0], started.jobs.job_ids
    scheduler = Scheduler(run, run.load(), started.client)
    assert scheduler.list_live_tasks() and started.client.find_job(started.scripts[0]) == job
    cancel(site, started)
    assert scheduler.list_live_tasks()
    assert started.client.find_job(started.scripts[0]) is None


@at("requeue denied")
def test_a_task_that_may_not_requeue_is_replaced(site, tmp_path):
    """The refusals are understood: there is nothing to wait for."""
    started = Started(tmp_path / "s", 1)
    task = running(site, started)
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(requeue.requeue_or_exit, task, started.client, run=started.runs[0])
        assert work.result() is ExitAction.REPLACE


@at("reservations")
def test_a_reservation_is_a_part_of_the_queue(site, tmp_path):
    """Its nodes and times are known, and it is named as what a task waits for."""
    started, task = waiting(site, tmp_path)
    assert ("node4",) in [job.nodes for job in started.client.queue() if job.state == RESERVED]
    assert wait_of(task.reason) is Wait.PASSES
    assert "Reserved for maintenance" in expected_start([task], 0).why


@at("reservations")
def test_a_submission_to_the_second_partition_waits_there(site, tmp_path):
    """A closed partition does not hold that of the other."""
    site.run(["scontrol", "update", "partitionname=low", "state=down"])
    started = Started(tmp_path / "s", 1, partition="cancel")
    assert running(site, started)


@at("cached squeue")
def test_a_task_that_the_cache_does_not_list_yet_is_not_gone(site, tmp_path):
    """Its run has not ended, and preempted it comes back: the controller is queried."""
    started = Started(tmp_path / "s", 1)
    task = running(site, started)
    (tmp_path / "site/empty").touch()
    run, decision = started.runs[0], EndDecision()
    for now in (0.0, 60.0):
        decision.judge(read_view(run.path), now)
    assert decision.since is None
    assert not read_view(run.path).has_no_task_left
    with ThreadPoolExecutor(1) as pool:
        leave = partial(requeue.requeue_or_exit, task, started.client, attempt=0, run=run)
        assert pool.submit(leave).result() is ExitAction.REQUEUE
