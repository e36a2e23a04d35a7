"""What three releases of Slurm printed means the same to us (scripts/record_slurm_outputs.py)."""

import json
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from hpc_elastic.config.schema import SlurmSettings
from hpc_elastic.errors import ConfigError, SlurmCommandError, SubmissionError
from hpc_elastic.launcher.batch_script import explain
from hpc_elastic.site.forecast import TaskTerms, outlook, shapes
from hpc_elastic.slurm import client as slurm_client
from hpc_elastic.slurm import parsing
from hpc_elastic.slurm.job_state import Phase

DATA = Path(__file__).parent / "data" / "slurm"
RELEASES = sorted(path.name for path in DATA.iterdir())
FORGOTTEN = {"squeue-forgotten", "scontrol-forgotten", "requeue-forgotten"}


@pytest.fixture(params=RELEASES)
def recorded(request):
    """Return what a release printed, by the name of the file."""
    folder = DATA / request.param
    return lambda name: (folder / f"{name}.out").read_text()


@pytest.fixture
def jobs(recorded, request):
    """Return the ids of the jobs that were recorded, by what they are."""
    folder = DATA / request.node.callspec.params["recorded"]
    return json.loads((folder / "jobs.json").read_text())


def answer(release, name) -> tuple[int, str, str]:
    """Return the exit code of a recorded command, its output, and its standard error."""
    told = json.loads((DATA / release / f"{name}.json").read_text())
    return told["exit_code"], (DATA / release / f"{name}.out").read_text(), told["stderr"]


def failure(release, name) -> SlurmCommandError:
    """Return the error that a recorded failure is."""
    exit_code, output, errors = answer(release, name)
    assert exit_code != 0
    return SlurmCommandError([name], exit_code, errors.strip() or output)


def failures(release) -> dict[str, SlurmCommandError]:
    """Return all that were recorded, by the name of the file."""
    names = {path.stem for path in (DATA / release).glob("*.out")}
    return {name: failure(release, name) for name in names if answer(release, name)[0] != 0}


@pytest.fixture
def client(monkeypatch):
    """Return a function that makes a client whose commands print something."""

    def make(output, errors=""):
        done = CompletedProcess([], 0, output, errors)
        monkeypatch.setattr(slurm_client, "_call", lambda *args: done)
        return slurm_client.SlurmClient()

    return make


def test_three_releases_were_recorded():
    """Those that the tests on Slurm run on."""
    assert RELEASES == ["22.05", "24.11", "26.05"]


def test_every_task_has_its_state(recorded, jobs):
    """Of arrays that wait, of co-allocated jobs, and of jobs that have ended."""
    tasks = parsing.parse_squeue(recorded("squeue"), now=0.0)
    array, job = jobs["array"], jobs["coallocated"]
    steps = {f"{jobs['steps']}_{i}" for i in (0, 4, 8, 12, 16)}  # and 20, see below
    alone = set(jobs.values()) - {array, jobs["steps"]}
    assert set(tasks) == {*(f"{array}_{i}" for i in (0, 3, 6, 9)), *steps, *alone}
    assert {
        name: task.phase for name, task in tasks.items() if task.phase is not Phase.PENDING
    } == {
        f"{array}_0": Phase.RUNNING,
        job: Phase.RUNNING,
        jobs["taken"]: Phase.RUNNING,
        jobs["over"]: Phase.ENDED,
    }
    assert (tasks[job].node, tasks[f"{array}_9"].reason) == ("node[3-4]", "JobArrayTaskLimit")
    assert tasks[f"{array}_9"].time_left_s == 86400 > tasks[f"{array}_0"].time_left_s > 86000
    assert tasks[jobs["held"]].reason == "JobHeldUser" and not tasks[jobs["held"]].is_held
    assert tasks[jobs["later"]].is_held


def test_a_preemption_is_seen_and_so_is_the_requeue_after_it(recorded, jobs):
    """In the grace the task still runs; then it waits its two minutes."""
    (during,) = parsing.parse_squeue(recorded("squeue-preempted"), now=0.0).values()
    assert (during.phase, during.preempted, during.restarts) == (Phase.RUNNING, True, 0)
    (after,) = parsing.parse_squeue(recorded("squeue-requeued"), now=0.0).values()
    assert (after.phase, after.preempted, after.restarts) == (Phase.PENDING, False, 1)
    assert after.is_held and after.task == jobs["taken"]


def test_an_element_that_is_held_after_a_requeue_is_told_from_those_that_wait(recorded, jobs):
    """Without -r it is one line with them, and has neither its own restarts nor its own reason."""
    element = f"{jobs['array']}_0"
    task = parsing.parse_squeue(recorded("squeue-elements"), now=0.0)[element]
    assert (task.phase, task.restarts, task.is_held) == (Phase.PENDING, 1, True)
    task = parsing.parse_squeue(recorded("squeue-sets"), now=0.0)[element]
    assert task.phase is Phase.PENDING and (task.restarts, task.reason) != (1, "BeginTime")


def test_what_may_lack_an_element_is_known(recorded, jobs):
    """Squeue -r loses the last of a set of steps, here 20."""
    last = f"{jobs['steps']}_20"
    assert last not in parsing.parse_squeue(recorded("squeue"))
    assert not parsing.lists_all(recorded("squeue"))
    assert last in parsing.parse_squeue(recorded("squeue-sets"))
    assert parsing.lists_all(recorded("squeue-requeued"))


def test_records_of_scontrol_name_tasks_and_what_they_avoid(recorded, jobs):
    """The name of a job has a blank and an equals sign in it, and hides nothing."""
    records = parsing.parse_records(recorded("scontrol-jobs"))
    found = {name: record for record in records for name in record.tasks}
    waiting = found[f"{jobs['array']}_6"]
    assert set(waiting.tasks) == {f"{jobs['array']}_{i}" for i in (3, 6, 9)}
    assert (waiting.excluded, waiting.may_wait) == (("node3", "node4"), True)
    assert not found[f"{jobs['array']}_0"].may_wait
    assert (found[jobs["held"]].state, found[jobs["held"]].excluded) == ("PENDING", ())


def test_the_configuration_tells_of_arrays_and_preemption(recorded):
    """As the sandbox was set up."""
    config = recorded("scontrol-config")
    assert parsing.parse_config(config)["MaxArraySize"] == "1001"
    partitions = recorded("scontrol-partitions")
    for name, grace_s in {None: 5, "low": 5, "cancel": 5, "low,cancel": 5, "high": 0}.items():
        told = parsing.parse_preemption(config, partitions, name)
        assert (told.grace_s, told.kill_wait_s) == (grace_s, 5)
        assert [p.name for p in told.partitions] == (name or "low").split(",")


def test_partitions_are_as_the_sandbox_has_made_them(recorded, client):
    """Both commands name all; only scontrol tells more."""
    low, cancel, short, high = parsing.parse_partitions(recorded("scontrol-partitions"))
    assert low == parsing.Partition("low", "UP", True, None, 5, "REQUEUE", 4, None)
    assert (cancel.preempt_mode, short.max_time_s, high.preempt_mode) == ("CANCEL", 1800.0, "OFF")
    assert (cancel.is_default, high.grace_s) == (False, 0)
    names = client(recorded("sinfo")).partitions()
    assert set(names) == {"low", "cancel", "short", "high"} and len(names) == 4


def test_controllers_are_named(recorded, client):
    """In the words of scontrol."""
    assert client(recorded("ping")).ping() == "Slurmctld(primary) at ctl is UP"


@pytest.mark.parametrize("release", RELEASES)
def test_commands_tell_their_release(release, client):
    """Debian's name of the package is before it."""
    _, output, _ = answer(release, "version")
    assert client(output).version("sinfo").startswith(f"{release}.")


def test_a_submission_tells_its_job_and_nothing_else(recorded, client):
    """There is one cluster."""
    assert client(recorded("sbatch-parsable")).sbatch(Path("run.sbatch")).isdecimal()


@pytest.mark.parametrize("release", RELEASES)
def test_a_test_of_a_submission_tells_when_it_would_start(release, client):
    """On standard error, without the number of a job that there is not; or it names the key."""
    exit_code, output, errors = answer(release, "test-only")
    words = client(output, errors).test_only("run.sbatch")
    assert (exit_code, output) == (0, "")
    assert words.startswith("to start at 2") and words.endswith("on nodes node1 in partition low")
    error = explain(failure(release, "test-only-partition").stderr, SlurmSettings())
    assert isinstance(error, ConfigError) and error.key == "launcher.partition"


def test_a_node_has_its_address(recorded):
    """And one that is not there has none."""
    assert parsing.parse_node(recorded("scontrol-node")).address.endswith(".0.12")
    assert parsing.parse_node(recorded("scontrol-no-node")).address is None


def test_a_node_is_up_or_not(recorded):
    """One that takes no more jobs is; one that does not answer is not."""
    is_up = {
        name: parsing.parse_node(recorded(f"scontrol-node{name}")).is_up
        for name in ("", "-drained", "-down")
    }
    assert is_up == {"": True, "-drained": True, "-down": False}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("judge", "names"),
    [
        (parsing.is_forgotten, FORGOTTEN),
        (partial(parsing.has_only_lines_with, parsing.ENDED), FORGOTTEN),
        (parsing.is_unknown_node, {"scontrol-no-node"}),
        (
            partial(parsing.has_only_lines_with, parsing.NOT_WAITING),
            {*FORGOTTEN, "update-ended", "update-running", "update-elements"},
        ),
        (partial(parsing.has_only_lines_with, parsing.REQUEUED), {"requeue-requeued"}),
        (parsing.is_refused, {"requeue-refused", "update-ended"}),
    ],
)
def test_what_is_no_failure_to_us_is_told_from_what_is(release, judge, names):
    """Of all failures that were recorded, by their words."""
    assert {name for name, error in failures(release).items() if judge(error)} == names


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", ["scancel-forgotten", "scancel-ended"])
def test_nothing_to_cancel_is_no_failure(release, name):
    """scancel, unlike the others, succeeds without a word."""
    assert answer(release, name) == (0, "", "")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("partition", "launcher.partition"),
        ("no-partition", "launcher.partition"),
        ("time", "launcher.time"),
        ("feature", "launcher.constraint"),
        ("memory", "launcher.mem"),
        ("resource", "launcher.gpus_per_node"),
        ("node", "launcher.exclude"),
        ("reservation", "launcher.sbatch.reservation"),
    ],
)
def test_a_refusal_names_the_key(release, name, key):
    """Whatever release refuses it."""
    error = explain(failure(release, f"sbatch-{name}").stderr, SlurmSettings())
    assert isinstance(error, ConfigError) and error.key == key


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("name", "remedy"), [("array", "MaxArraySize"), ("gres", "together")])
def test_a_refusal_that_has_no_key_has_a_remedy(release, name, remedy):
    """Array indices, and more GPUs than a node has: no word says that it is those."""
    error = explain(failure(release, f"sbatch-{name}").stderr, SlurmSettings())
    assert isinstance(error, SubmissionError) and remedy in str(error)


@pytest.mark.parametrize("release", ["22.05", "26.05"])
def test_more_nodes_or_cpus_than_there_are_wait_for_ever(release):
    """These take such a job, and squeue says why it waits."""
    _, output, _ = answer(release, "sbatch-nodes")
    job = output.split()[-1]
    queue = parsing.parse_squeue((DATA / release / "squeue-elements.out").read_text())
    assert (queue[job].phase, queue[job].reason) == (Phase.PENDING, "PartitionConfig")
    assert answer(release, "sbatch-cpus")[0] == 0


def test_more_nodes_or_cpus_than_there_are_are_refused():
    """By one release, which names the CPUs."""
    nodes, cpus = (
        explain(failure("24.11", f"sbatch-{name}").stderr, SlurmSettings())
        for name in ("nodes", "cpus")
    )
    assert isinstance(nodes, SubmissionError) and "together" in str(nodes)
    assert isinstance(cpus, ConfigError) and cpus.key == "launcher.cpus_per_node"


def test_a_node_is_in_service_or_not(recorded):
    """In every release's words: its state, and the reason that somebody gave."""
    told = {
        name: parsing.parse_node(recorded(f"scontrol-node{name}")).out_of_service
        for name in ("", "-drained", "-down")
    }
    assert told[""] == ""
    assert told["-drained"].startswith("ALLOCATED+DRAIN: test [") and "DOWN" in told["-down"]


def test_a_planned_queue_has_its_ends_plans_and_gaps(recorded):
    """Three nodes have a job of an hour; the fourth is idle until a job of all nodes starts."""
    jobs = parsing.parse_queue(recorded("queue-squeue"))
    (runs,) = (job for job in jobs if job.state == "RUNNING")
    planned = next(job for job in jobs if job.waits and job.num_nodes == 4)
    array = next(job for job in jobs if job.num_tasks == 3)
    held = next(job for job in jobs if job.reason == "JobHeldUser")
    everywhere = {"node1", "node2", "node3", "node4"}
    assert set(planned.nodes) == everywhere and len(runs.nodes) == 3
    assert (planned.limit_s, array.limit_s, held.starts_at) == (7200.0, 14400.0, None)
    assert abs(planned.starts_at - runs.ends_at) < 300 and array.partitions == ("low",)
    states = parsing.parse_each_node(recorded("queue-sinfo"))
    (idle,) = everywhere - set(runs.nodes)
    assert states == {**dict.fromkeys(runs.nodes, "allocated"), idle: "planned"}
    now = runs.ends_at - 3500
    found = outlook(states, jobs, now, partitions=["low"])
    own, shorter = shapes(found, [TaskTerms(14400.0)], range(1, 5), now)
    assert [round((at - now) / 3600) for at in own.starts] == [3, 3, 3, 7]
    assert (shorter.limit_s, shorter.starts[0] - now) == (1800.0, 0)
    assert (found.num_waiting, found.num_unplanned) == (4, 2)


@pytest.mark.parametrize("release", RELEASES)
def test_a_test_of_a_submission_adds_the_mean_wait_of_all_jobs(release, client):
    """Here 3 h: 4 nodes x 2 h and 1 x 4 h on 4 nodes, also for a gap that is free at once."""

    def start(name):
        _, output, errors = answer(release, f"queue-test-{name}")
        return parsing.parse_expected_start(client(output, errors).test_only("run.sbatch"))

    jobs = parsing.parse_queue((DATA / release / "queue-squeue.out").read_text())
    (runs,) = (job for job in jobs if job.state == "RUNNING")
    waits = [start(name) - (runs.ends_at - 3600) for name in ("1-30", "1-240", "4-30")]
    assert waits == pytest.approx([3 * 3600, 3 * 3600, 4 * 3600], abs=10)


@pytest.mark.parametrize("release", RELEASES)
def test_a_standby_qos_is_read(release):
    """Its flags, how and by which it is preempted, its limit, and that the user may name it."""
    found = {qos.name: qos for qos in parsing.parse_qos(answer(release, "sacctmgr-qos")[1])}
    standby = parsing.Qos("standby", frozenset({"NoReserve"}), "requeue", 60.0, max_time_s=1800)
    assert found["standby"] == standby and found["normal"].preempts == {"standby"}
    assert found["normal"].max_time_s is None
    offered = parsing.parse_offered_qos(answer(release, "sacctmgr-assoc")[1])
    assert offered == {"normal", "standby"}
