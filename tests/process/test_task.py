"""The start of a task: which node of which run it is, and what is said when that is not clear."""

import json
import subprocess
import sys

import pytest

from hpc_elastic.agent import task_main as start_module
from hpc_elastic.agent.task import find_task
from hpc_elastic.errors import HpcElasticError, RunDirectoryError, SlurmEnvironmentError
from hpc_elastic.run.directory import ArrayFiles, Entry, RunDir
from hpc_elastic.shared_files import make_folder
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.environment import REPLACEMENT, SlurmEnvironment
from hpc_elastic.slurm.job_state import TaskState
from specs import spec_of, started_run

ARRAY_TASK = {
    "SLURM_JOB_ID": "72",
    "SLURM_ARRAY_JOB_ID": "70",
    "SLURM_ARRAY_TASK_ID": "1",
    "SLURMD_NODENAME": "n1",
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_CPUS_ON_NODE": "8",
    "SLURM_STEP_ID": "0",
}
JOB_NODE = {
    "SLURM_JOB_ID": "70",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "n2",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_CPUS_ON_NODE": "8",
    "SLURM_STEP_ID": "0",
}


@pytest.fixture
def array(tmp_path):
    """Return a function that writes the array file of a run of two slots."""
    submission = tmp_path / ".hpc_elastic"
    submission.mkdir()
    entry = Entry("function", "f", "f.py")
    tasks = [(0, 0), (0, 1)]
    run = RunDir(tmp_path / "0")
    started_run(run, spec_of("r", 1, 2, 1, 0, entry, str(submission), tasks))

    def write(**content):
        file = submission / "array-0.json"
        slots = [{"dir": str(run.path), "slot": slot} for slot in range(2)]
        file.write_text(json.dumps({"runs": slots, **content}))
        return file

    return write


def test_an_array_task_finds_its_run_by_its_index(array):
    """And writes the job id down, for a script that was submitted by hand."""
    file = array()
    task = find_task(file, SlurmEnvironment(ARRAY_TASK))
    assert (task.name, task.slot, task.attempt, task.is_coallocated) == ("70_1", 1, 0, False)
    assert task.logs == task.run.path / "tasks" / "70_1" / "attempt-0"
    assert file.with_suffix(".jobid").read_text() == "70\n"
    assert not file.with_suffix(".nodes").exists()


def test_a_node_of_a_coallocated_job_finds_its_run_by_its_id(array):
    """And the first of them write down which nodes there are."""
    file = array(coallocated=True)
    task = find_task(file, SlurmEnvironment({**JOB_NODE, "SLURM_RESTART_COUNT": "2"}))
    assert (task.name, task.slot, task.attempt, task.is_coallocated) == ("70.1", 1, 2, True)
    assert file.with_suffix(".jobid").read_text() == "70\n"
    nodes = json.loads(file.with_suffix(".nodes").read_text())
    assert nodes == {"attempt": 2, "hosts": ["n1", "n2", "n3"]}


def test_a_job_id_that_is_there_is_left_alone(array):
    """The submission wrote it."""
    file = array()
    file.with_suffix(".jobid").write_text("70\n")
    before = file.with_suffix(".jobid").stat().st_mtime_ns
    find_task(file, SlurmEnvironment(ARRAY_TASK))
    assert file.with_suffix(".jobid").stat().st_mtime_ns == before


@pytest.fixture
def queue(monkeypatch):
    """The tasks of job 60 that Slurm lists."""
    states: dict[str, TaskState] = {}
    monkeypatch.setattr(SlurmClient, "tasks", lambda self, jobs: states if jobs == ["60"] else {})
    return states


@pytest.mark.parametrize("state", ["RUNNING", "PENDING"])
def test_a_second_job_of_the_same_script_is_refused(array, queue, monkeypatch, capsys, state):
    """Its tasks would have the slots of the first one; the line names both jobs."""
    file = array()
    file.with_suffix(".jobid").write_text("60\n")
    queue["60_0"] = TaskState("60_0", state)
    for name, value in ARRAY_TASK.items():
        monkeypatch.setenv(name, value)
    assert start_module.start([str(file)], None) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "job 70" in line and "job 60" in line and f"60_0 is {state}" in line
    assert "scancel 70" in line and "hpc-elastic resume" in line


def test_of_two_jobs_that_start_at_once_one_is_recorded(array, queue, monkeypatch):
    """Its script was submitted twice by hand; neither task has found a job recorded."""
    file = array()
    queue["60_0"] = TaskState("60_0", "RUNNING")
    look, looks = ArrayFiles.job_id.fget, iter([None])

    def job_id(files):
        seen = next(looks, look(files))
        file.with_suffix(".jobid").write_text("60\n")  # after the look
        return seen

    monkeypatch.setattr(ArrayFiles, "job_id", property(job_id))
    with pytest.raises(RunDirectoryError, match="60_0 is RUNNING"):
        find_task(file, SlurmEnvironment(ARRAY_TASK))


def test_a_script_may_be_submitted_again_once_its_first_job_has_ended(array, queue):
    """Its tasks were cancelled, for one."""
    file = array()
    file.with_suffix(".jobid").write_text("60\n")
    queue["60_0"] = TaskState("60_0", "CANCELLED")
    assert find_task(file, SlurmEnvironment(ARRAY_TASK)).name == "70_1"


def test_a_task_that_replaces_another_is_no_second_job(array, queue):
    """It is the same script, submitted by the run itself."""
    file = array()
    file.with_suffix(".jobid").write_text("60\n")
    queue["60_0"] = TaskState("60_0", "RUNNING")
    variables = {**ARRAY_TASK, REPLACEMENT: "1"}
    assert find_task(file, SlurmEnvironment(variables)).superseded, "not recorded yet"
    make_folder(file.with_suffix(".replaced"))
    (file.with_suffix(".replaced") / "1.1").write_text("70")
    assert not find_task(file, SlurmEnvironment(variables)).superseded
    assert not find_task(file, SlurmEnvironment(ARRAY_TASK)).superseded


@pytest.mark.parametrize(
    ("coallocated", "variables", "why"),
    [
        (False, JOB_NODE, "--array line"),
        (True, ARRAY_TASK, "without --array"),
        (False, {**ARRAY_TASK, "SLURM_ARRAY_TASK_ID": "2"}, "has 2 tasks, not 2"),
        (True, {**JOB_NODE, "SLURM_NODEID": "7"}, "has 2 tasks, not 7"),
    ],
)
def test_a_process_that_is_no_task_of_the_array_is_told_why(array, coallocated, variables, why):
    """A script that was changed by hand, or submitted otherwise."""
    with pytest.raises(HpcElasticError, match=why):
        find_task(array(coallocated=coallocated), SlurmEnvironment(variables))


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_an_array_file_that_can_not_be_read_is_named(array, text):
    """With the node, for its mounts may be the reason."""
    file = array()
    file.write_text(text)
    with pytest.raises(RunDirectoryError, match=r"array-0\.json: not readable on n1"):
        find_task(file, SlurmEnvironment(ARRAY_TASK))


MALFORMED = [
    ("SLURM_JOB_ID", "", "a number"),
    ("SLURM_ARRAY_JOB_ID", "7O", "a number"),
    ("SLURM_ARRAY_TASK_ID", "-1", "a number"),
    ("SLURM_RESTART_COUNT", "once", "a number"),
    ("SLURMD_NODENAME", "", "a name"),
    ("SLURM_CPUS_ON_NODE", "8(x2)", "a number"),
    ("SLURM_JOB_END_TIME", "soon", "a number"),
    ("SLURM_STEP_ID", "batch", "a number"),
    ("SLURM_JOB_NODELIST", "n[1-", "a host list"),
]


@pytest.mark.parametrize(("name", "value", "expected"), MALFORMED)
def test_a_malformed_variable_ends_the_task_with_a_clear_line(
    array, monkeypatch, capsys, name, value, expected
):
    """Variable, value and expectation; exit code 1 and no traceback, before torch is imported."""
    file = array()
    for variable in {*ARRAY_TASK, name}:
        monkeypatch.setenv(variable, {**ARRAY_TASK, name: value}[variable])
    assert start_module.start([str(file)], None) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hpc_elastic: {name} is {value!r}, expected {expected}")


@pytest.mark.parametrize("name", ["SLURM_NODEID", "SLURM_STEP_NODELIST"])
def test_a_coallocated_job_needs_its_node_ids(array, name):
    """Missing or malformed alike."""
    with pytest.raises(SlurmEnvironmentError, match=name):
        find_task(array(coallocated=True), SlurmEnvironment({**JOB_NODE, name: "n[1-"}))


def test_outside_of_slurm_the_task_says_so(array, monkeypatch, capsys):
    """Somebody tried the command by hand."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert start_module.start([str(array())], None) == 1
    assert "SLURM_JOB_ID is not set" in capsys.readouterr().err


def test_a_coallocated_job_sees_to_its_end_once_its_run_has_ended(array, monkeypatch):
    """The first node tells that it has ended; the next ones wait for that, and no others do."""
    asked = []
    monkeypatch.setattr(start_module.signal, "signal", lambda *args: None)
    monkeypatch.setattr(
        start_module.scheduler, "cancel_if_orphaned", lambda *args: asked.append(args[:2])
    )
    tasks = [
        find_task(array(coallocated=True), SlurmEnvironment({**JOB_NODE, "SLURM_NODEID": str(n)}))
        for n in range(2)
    ]
    for task in tasks:
        task.logs.mkdir(parents=True)
        start_module._leave_coallocated_job(task)
    assert (tasks[0].logs / "ended").exists() and not asked, "the run goes on"
    tasks[0].run.result.write_text("{}")
    for task in tasks:
        start_module._leave_coallocated_job(task)
    assert asked == [("70.1", tasks[0].logs)]


def test_a_limit_of_cpu_time_of_the_submitting_shell_is_raised():
    """Slurm hands a login node's `ulimit -t` to the task; SIGXCPU would end its workers."""
    text = (
        "import resource as r; from hpc_elastic.agent.task_main import _raise_limits\n"
        "r.setrlimit(r.RLIMIT_CPU, (60, 6000)); _raise_limits()\n"
        "assert r.getrlimit(r.RLIMIT_CPU) == (6000, 6000)\n"
        "files = r.getrlimit(r.RLIMIT_NOFILE); assert files[0] >= min(files[1], 4096)\n"
    )
    subprocess.run([sys.executable, "-c", text], check=True)
