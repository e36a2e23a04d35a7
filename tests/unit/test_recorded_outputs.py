"""What three releases of Slurm printed means the same to us (scripts/record_slurm_outputs.py)."""

import json
from pathlib import Path

import pytest

from hpc_elastic.config import SlurmSettings
from hpc_elastic.errors import ConfigError, SlurmCommandError
from hpc_elastic.slurm import client, outputs
from hpc_elastic.slurm.states import Phase
from hpc_elastic.submit.refusals import explain

DATA = Path(__file__).parent / "data" / "slurm"
RELEASES = sorted(path.name for path in DATA.iterdir())


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


def failure(release, name) -> SlurmCommandError:
    """Return the error that a recorded failure is."""
    told = json.loads((DATA / release / f"{name}.json").read_text())
    text = told["stderr"].strip() or (DATA / release / f"{name}.out").read_text()
    assert told["exit_code"] != 0
    return SlurmCommandError(told["argv"], told["exit_code"], text)


def test_three_releases_were_recorded():
    """Those that the tests on Slurm run on."""
    assert RELEASES == ["22.05", "24.11", "26.05"]


def test_every_task_has_its_state(recorded, jobs):
    """Of arrays that wait, of gangs, and of jobs that have ended."""
    tasks = outputs.parse_squeue(recorded("squeue"), now=0.0)
    array, gang = jobs["array"], jobs["gang"]
    steps = {f"{jobs['steps']}_{i}" for i in (0, 4, 8, 12, 16)}  # and 20, see below
    alone = set(jobs.values()) - {array, jobs["steps"]}
    assert set(tasks) == {*(f"{array}_{i}" for i in (0, 3, 6, 9)), *steps, *alone}
    assert {
        name: task.phase for name, task in tasks.items() if task.phase is not Phase.PENDING
    } == {
        f"{array}_0": Phase.RUNNING,
        gang: Phase.RUNNING,
        jobs["taken"]: Phase.RUNNING,
        jobs["over"]: Phase.ENDED,
    }
    assert (tasks[gang].node, tasks[f"{array}_9"].reason) == ("node[3-4]", "JobArrayTaskLimit")
    assert tasks[f"{array}_9"].time_left_s == 86400 > tasks[f"{array}_0"].time_left_s > 86000
    assert tasks[jobs["held"]].reason == "JobHeldUser" and not tasks[jobs["held"]].is_held
    assert tasks[jobs["later"]].is_held


def test_a_preemption_is_seen_and_so_is_the_requeue_after_it(recorded, jobs):
    """In the grace the task still runs; then it waits its two minutes."""
    (during,) = outputs.parse_squeue(recorded("squeue-preempted"), now=0.0).values()
    assert (during.phase, during.preempted, during.restarts) == (Phase.RUNNING, True, 0)
    (after,) = outputs.parse_squeue(recorded("squeue-requeued"), now=0.0).values()
    assert (after.phase, after.preempted, after.restarts) == (Phase.PENDING, False, 1)
    assert after.is_held and after.task == jobs["taken"]


def test_an_element_that_is_held_after_a_requeue_is_told_from_those_that_wait(recorded, jobs):
    """Without -r it is one line with them, and has neither its own restarts nor its own reason."""
    element = f"{jobs['array']}_0"
    task = outputs.parse_squeue(recorded("squeue-elements"), now=0.0)[element]
    assert (task.phase, task.restarts, task.is_held) == (Phase.PENDING, 1, True)
    task = outputs.parse_squeue(recorded("squeue-sets"), now=0.0)[element]
    assert task.phase is Phase.PENDING and (task.restarts, task.reason) != (1, "BeginTime")


def test_what_may_lack_an_element_is_known(recorded, jobs):
    """Squeue -r loses the last of a set of steps, here 20."""
    last = f"{jobs['steps']}_20"
    assert last not in outputs.parse_squeue(recorded("squeue"))
    assert not outputs.lists_all(recorded("squeue"))
    assert last in outputs.parse_squeue(recorded("squeue-sets"))
    assert outputs.lists_all(recorded("squeue-requeued"))


def test_records_of_scontrol_name_tasks_and_what_they_avoid(recorded, jobs):
    """The name of a job has a blank and an equals sign in it, and hides nothing."""
    records = outputs.parse_records(recorded("scontrol-jobs"))
    found = {name: record for record in records for name in record.tasks}
    waiting = found[f"{jobs['array']}_6"]
    assert set(waiting.tasks) == {f"{jobs['array']}_{i}" for i in (3, 6, 9)}
    assert (waiting.excluded, waiting.may_wait) == (("node3", "node4"), True)
    assert not found[f"{jobs['array']}_0"].may_wait
    assert (found[jobs["held"]].state, found[jobs["held"]].excluded) == ("PENDING", ())


def test_the_configuration_tells_of_arrays_and_preemption(recorded):
    """As the sandbox was set up."""
    config = recorded("scontrol-config")
    assert outputs.parse_config(config)["MaxArraySize"] == "1001"
    partitions = recorded("scontrol-partitions")
    for name, mode in ((None, "requeue"), ("cancel", "cancel"), ("low,cancel", "requeue")):
        expected = outputs.Preemption(5, 5, mode)
        assert outputs.parse_preemption(config, partitions, name) == expected
    assert outputs.parse_preemption(config, partitions, "high") == outputs.Preemption(0, 5, "off")
    assert set(outputs.parse_partitions(recorded("sinfo"))) == {"low", "cancel", "short", "high"}


def test_a_node_has_its_address(recorded):
    """And one that is not there has none."""
    assert outputs.parse_node_address(recorded("scontrol-node")).endswith(".0.12")
    assert outputs.parse_node_address(recorded("scontrol-no-node")) is None


@pytest.mark.parametrize("release", RELEASES)
def test_what_slurm_has_forgotten_is_told_from_other_errors(release):
    """squeue, scontrol show and scontrol requeue say so in the same words."""
    names = ("squeue", "scontrol", "requeue")
    for name in names:
        told = failure(release, f"{name}-forgotten")
        assert client.FORGOTTEN in told.stderr
    assert "not found" in failure(release, "scontrol-no-node").stderr


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("partition", "launcher.partition"),
        ("feature", "launcher.constraint"),
        ("memory", "launcher.mem"),
        ("node", "launcher.exclude"),
        ("reservation", "launcher.sbatch.reservation"),
    ],
)
def test_a_refusal_names_the_key(release, name, key):
    """Whatever release refuses it."""
    error = explain(failure(release, f"sbatch-{name}").stderr, SlurmSettings())
    assert isinstance(error, ConfigError) and key in str(error)


@pytest.mark.parametrize("release", RELEASES)
def test_a_refusal_that_has_no_key_has_a_remedy(release):
    """Array indices, and more nodes than there are."""
    array = explain(failure(release, "sbatch-array").stderr, SlurmSettings())
    assert "MaxArraySize" in str(array)
