"""launcher=local: the queue of this machine, and its processes."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from group import eventually

import hpc_elastic
from ended import is_gone
from hpc_elastic import _util
from hpc_elastic.config.schema import AgentSettings, LocalSettings, NodeRange, RunSettings
from hpc_elastic.errors import ConfigError, SubmissionError
from hpc_elastic.launcher import control, follow, local
from hpc_elastic.launcher.plan import RunRequest, make_plan
from hpc_elastic.launcher.run_handle import RunHandle
from hpc_elastic.launcher.submit import submit
from hpc_elastic.launcher.wait import wait
from hpc_elastic.report.run_view import RunEnd, read_view
from hpc_elastic.run.directory import Entry, RunDir, Submission
from hpc_elastic.slurm.scheduler import take_snapshot

FAKE_TASK = Path(__file__).parent / "fake_task.py"
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def fake_agent(monkeypatch):
    """Start the stand-in in place of the agent."""
    monkeypatch.setattr(
        local, "task_command", lambda array_file: [sys.executable, str(FAKE_TASK), str(array_file)]
    )


def settings(nodes: int, **launcher) -> RunSettings:
    """Return settings of a run that polls and ends quickly."""
    quick = AgentSettings(stop_timeout_s=1)
    return RunSettings(
        NodeRange(1, nodes), 1, LocalSettings(agent=quick, poll_interval_s=0.05, **launcher)
    )


def requests(sweep: Path, *runs: RunSettings) -> list[RunRequest]:
    """Return runs to submit."""
    entry = Entry("function", "main", module="x")
    return [RunRequest(sweep / str(number), run, entry) for number, run in enumerate(runs)]


def submitted(sweep: Path, *runs: RunSettings) -> list[RunHandle]:
    """Submit runs, and return them."""
    return submit(requests(sweep, *runs), sweep=sweep, name="train")


def ends_of(runs: list[RunHandle]) -> list[RunEnd]:
    """Wait for runs, and return how they ended."""
    return wait(runs, poll_interval_s=0.05)


def listed(sweep: Path) -> dict:
    """Return what the agents would read in place of squeue."""
    return json.loads(Submission(sweep / ".hpc_elastic").local_tasks.read_text())


def test_runs_go_through_and_return_values(tmp_path):
    """Every run ends by itself; output, task states and job id lie where the agents look."""
    runs = submitted(tmp_path, settings(1), settings(1))
    ends = ends_of(runs)
    assert [end.values for end in ends] == [{0: 0.5, 1: 1.5}] * 2
    (job_id,) = runs[0].jobs.job_ids
    assert (tmp_path / ".hpc_elastic" / "array-0.jobid").read_text() == f"{job_id}\n"
    assert set(listed(tmp_path)) == {f"{job_id}_0", f"{job_id}_1"}
    assert {task["state"] for task in listed(tmp_path).values()} == {"ENDED"}
    assert "plays succeed" in (tmp_path / ".hpc_elastic/logs" / f"{job_id}_1.log").read_text()


def test_tasks_of_a_run_that_has_ended_are_not_started(tmp_path):
    """With one place, the second node's turn comes when there is nothing left to do."""
    (run,) = submitted(tmp_path, settings(3, max_agents=1))
    ends_of([run])
    states = sorted(task.state for task in run.jobs.list_tasks().values())
    assert states == ["CANCELLED", "CANCELLED", "COMPLETED"]


def test_a_task_that_dies_alone_makes_the_run_lost(tmp_path, monkeypatch):
    """No result and no task left: the states and the log are in the error."""
    monkeypatch.setattr(follow, "GONE_S", 0.0)
    (end,) = ends_of(submitted(tmp_path, settings(1, env={"PLOT": "die"})))
    assert end.status == "lost"
    assert "FAILED (exit code 1)" in str(end.error)
    assert "the interpreter is broken" in str(end.error)


def test_ctrl_c_ends_every_process(tmp_path, capsys, monkeypatch):
    """The launcher takes its agents along, the pending ones included."""
    runs = submitted(tmp_path, settings(2, max_agents=1, env={"PLOT": "hang"}))
    eventually(lambda: "RUNNING" in str(listed(tmp_path)), DEADLINE_S)
    (pid,) = [task["pid"] for task in listed(tmp_path).values() if task["pid"]]

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("hpc_elastic.launcher.wait.Waiter.poll_runs", interrupt)
    with pytest.raises(SystemExit) as ended:
        ends_of(runs)
    assert ended.value.code == 130
    assert not psutil.pid_exists(pid)
    told = capsys.readouterr().out
    assert "the runs were ended" in told and "hpc-elastic resume /" in told
    assert {task["state"] for task in listed(tmp_path).values()} == {"ENDED"}
    assert {task.state for task in runs[0].jobs.list_tasks().values()} == {"CANCELLED"}
    assert read_view(runs[0].dir, take_snapshot).phase == "cancelled"


def test_a_run_that_has_ended_is_not_cancelled_by_ctrl_c(tmp_path):
    """Its launcher ends the others."""
    (run,) = submitted(tmp_path, settings(1))
    eventually(run.paths.result.exists, DEADLINE_S)
    run.jobs.release()
    assert not run.paths.cancelled.exists()


@pytest.mark.parametrize("ignored", [False, True])
def test_a_launcher_whose_terminal_is_lost_ends_its_processes(ignored):
    """SIGHUP is as Ctrl-C, unless the launcher was started by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    ends = contextlib.nullcontext() if ignored else pytest.raises(KeyboardInterrupt)
    try:
        with ends, _util.sigterm_as_interrupt():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_no_two_launches_have_the_same_job_ids(tmp_path, monkeypatch):
    """Processes are ended by them; two launches may begin in one millisecond."""
    monkeypatch.setattr(time, "time_ns", lambda: 1_800_000_000 * 10**9)
    plans = [
        make_plan(requests(tmp_path / f"{n}", *[settings(3)] * 4), tmp_path / f"{n}" / "s",
                  max_array_size=4, first_array=0)
        for n in range(2)
    ]  # fmt: skip
    tasks = [task for plan in plans for task in local.queue_of(plan)]
    assert len({task.job_id for task in tasks}) == sum(len(plan.arrays) for plan in plans) > 2
    assert len({task.environment({})["SLURM_JOB_ID"] for task in tasks}) == len(tasks)


def test_a_process_that_ignores_sigterm_is_killed_with_its_children(tmp_path):
    """The wait is bounded; workers of a stuck agent do not stay behind."""
    stubborn = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],\n"
        "                         start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid) + '.')\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
    eventually(
        lambda: (tmp_path / "pid").exists() and "." in (tmp_path / "pid").read_text(), DEADLINE_S
    )
    local.end_processes([process], stop_after_s=0.1)
    child = int((tmp_path / "pid").read_text().rstrip("."))
    assert process.returncode == -9
    eventually(lambda: is_gone(child), DEADLINE_S)


@pytest.fixture
def processes(monkeypatch):
    """The agents that were started: the second is so at the second try only, as when fork fails."""
    spawn, made, tries = local.LocalJobs._spawn, [], []

    def sometimes(self, task):
        tries.append(task)
        if len(tries) == 2:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        made.append(spawn(self, task))
        return made[-1]

    monkeypatch.setattr(local.LocalJobs, "_spawn", sometimes)
    yield made
    for process in made:
        process.kill()
        process.wait()


def test_a_task_that_can_not_be_started_now_is_started_later(tmp_path, processes, caplog):
    """The queue outlives a failure, and tells of it once."""
    runs = submitted(tmp_path, *[settings(1, max_agents=1)] * 3)
    eventually(lambda: all(run.paths.result.exists() for run in runs), DEADLINE_S)
    runs[0].jobs.close()
    assert len(processes) == 3
    (told,) = [r.message for r in caplog.records if "Resource temporarily" in r.message]
    assert "tried again" in told


def test_a_start_that_fails_leaves_no_process(tmp_path, processes):
    """Those that had been started would train without a launcher."""
    with pytest.raises(SubmissionError, match="Resource temporarily unavailable"):
        submitted(tmp_path, settings(2, env={"PLOT": "hang"}))
    assert [process.poll() for process in processes] == [-15]
    assert {task["state"] for task in listed(tmp_path).values()} == {"ENDED"}


def train() -> None:
    """Stand for a function to be launched; the agents' stand-in never calls it."""


def test_sigterm_before_the_wait_leaves_no_process(tmp_path, monkeypatch, capsys):
    """From the start of the first process on, the launcher does not end without them."""

    def nobodys(signum, frame):
        raise AssertionError("the launcher would have ended at once")

    before = signal.signal(signal.SIGTERM, nobodys)
    monkeypatch.setattr(
        "hpc_elastic.run.registry.add", lambda runs: os.kill(os.getpid(), signal.SIGTERM)
    )
    try:
        with pytest.raises(SystemExit, match="130"):
            hpc_elastic.launch(train, run_dir=tmp_path, nodes="1", env={"PLOT": "hang"})
        assert signal.getsignal(signal.SIGTERM) is nobodys
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "the runs were ended" in capsys.readouterr().err
    (task,) = listed(tmp_path).values()
    assert task["state"] == "ENDED"
    assert is_gone(task["pid"])


def test_a_disk_that_is_full_does_not_end_the_wait(tmp_path, monkeypatch):
    """The launcher's output is lost, the runs are not."""
    full = Path("/dev/full").open("w")  # noqa: SIM115 - closing it fails
    monkeypatch.setattr(sys, "stdout", full)
    try:
        ends = ends_of(submitted(tmp_path, settings(1)))
        with pytest.raises(OSError, match="No space left"):
            print("who writes by himself is told", flush=True)
    finally:
        with contextlib.suppress(OSError):
            full.close()
    assert [end.status for end in ends] == ["succeeded"]


def test_a_launcher_without_standard_output_waits_as_well(tmp_path, monkeypatch):
    """It was started by a program that has closed it."""
    monkeypatch.setattr(sys, "stdout", None)
    ends = ends_of(submitted(tmp_path, settings(1)))
    assert [end.status for end in ends] == ["succeeded"]


def test_what_fails_after_the_start_leaves_no_process(tmp_path, monkeypatch, capsys):
    """Nor what fails after that of a run that is resumed."""

    def fail(*args):
        raise RuntimeError("planted")

    monkeypatch.setattr("hpc_elastic.run.registry.add", fail)
    with pytest.raises(RuntimeError, match="planted"):
        submitted(tmp_path, settings(1, env={"PLOT": "hang"}))
    monkeypatch.setattr(control, "_record", fail)
    with pytest.raises(RuntimeError, match="planted"):
        control.resume(tmp_path / "0", [])
    assert capsys.readouterr().err.count("the runs were ended") == 2
    assert [task["state"] for task in listed(tmp_path).values()] == ["ENDED"] * 2
    assert all(is_gone(task["pid"]) for task in listed(tmp_path).values())


class Ending:
    """An agent and its run, which end after the run has been looked at."""

    pid, over, returncode = 1, False, None
    excluded = Path(os.devnull)

    def poll(self):
        """Return its exit code."""
        return 0 if self.over else None

    @property
    def is_over(self):
        """Whether the run was over until now."""
        before, self.over = self.over, True
        return before


def queue_of(folder: Path, *tasks: local.LocalTask, places: int = 1) -> local.LocalJobs:
    """Return a queue that was not started."""
    Submission(folder).logs.mkdir()
    command = local.task_command
    return local.LocalJobs(tasks, folder, max_agents=places, stop_after_s=1, command=command)


def test_no_task_starts_in_a_run_that_ends_at_this_moment(tmp_path, monkeypatch):
    """The place of its last agent is free only once its result is seen."""
    agent = Ending()
    first, second = (
        local.LocalTask(7, i, tmp_path / "array-0.json", agent, cpus=1) for i in range(2)
    )
    first.process = agent
    monkeypatch.setattr(local.LocalJobs, "_spawn", lambda *_: pytest.fail("it was started"))
    queue = queue_of(tmp_path, first, second)
    queue.run_queue_once()
    queue.run_queue_once()
    assert second.skipped


def test_what_was_started_is_written_down_though_the_next_can_not_be(tmp_path, processes):
    """Whoever cancels the run at this moment finds it."""
    run = RunDir(tmp_path / "0")
    array = tmp_path / "array-0.json"
    tasks = [local.LocalTask(7, i, array, run, cpus=1) for i in range(2)]
    with pytest.raises(BlockingIOError):
        queue_of(tmp_path, *tasks, places=2).run_queue_once()
    table = json.loads((tmp_path / "local-tasks.json").read_text())
    assert [table[task.name]["pid"] for task in tasks] == [processes[0].pid, None]


def test_a_table_that_could_not_be_written_is_written_later(tmp_path, monkeypatch):
    """Also if nothing has changed since: whoever cancels the run has nothing else."""
    queue = queue_of(tmp_path, local.LocalTask(7, 0, tmp_path, None, cpus=1))
    with monkeypatch.context() as patch:
        patch.setattr(local, "write_atomic", lambda *_: (_ for _ in ()).throw(OSError("full")))
        queue.write_table()
    queue.write_table()
    assert "7_0" in json.loads((tmp_path / "local-tasks.json").read_text())


def test_the_environment_is_that_of_an_array_task(tmp_path):
    """SLURM_* are made up and nothing of a surrounding job shows through; gloo uses loopback."""
    task = local.LocalTask(7, 3, tmp_path / "array-0.json", None, cpus=2)
    environ = {"SLURM_JOB_ID": "99", "SLURM_MEM_PER_CPU": "1", "HOME": "/home/me"}
    made = task.environment(environ)
    assert (made["SLURM_ARRAY_JOB_ID"], made["SLURM_ARRAY_TASK_ID"]) == ("7", "3")
    assert (made["HOME"], made["GLOO_SOCKET_IFNAME"]) == ("/home/me", "lo")
    task.gpus = {"CUDA_VISIBLE_DEVICES": "2,3"}
    seen = task.environment({"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert seen["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "SLURM_MEM_PER_CPU" not in made
    assert task.environment({"GLOO_SOCKET_IFNAME": "eth0"})["GLOO_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize(
    ("runs", "num_cpus", "limit"),
    [
        ([settings(2)], 2, 4),
        ([settings(9), settings(2)], 2, 9),
        ([settings(9, max_agents=3), settings(2)], 2, 3),
    ],
)
def test_the_number_of_places(tmp_path, runs, num_cpus, limit):
    """Twice the CPUs, the largest run at least; or what launcher.max_agents says."""
    planned = requests(tmp_path, *runs)
    assert local.agent_limit(make_plan(planned, tmp_path, max_array_size=99), num_cpus) == limit


def test_each_node_gets_its_share_of_the_gpus(tmp_path, monkeypatch):
    """By its slot in its own run; a run that wants more nodes than GPUs leaves nothing behind."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    plan = make_plan(requests(tmp_path, settings(2), settings(1)), tmp_path, max_array_size=9)
    shares = {(t.run.path.name, t.gpus["CUDA_VISIBLE_DEVICES"]) for t in local.queue_of(plan)}
    assert shares == {("0", "4"), ("0", "5"), ("1", "4,5,6")}
    with pytest.raises(ConfigError, match="nodes='1:4'"):
        submitted(tmp_path / "new", settings(4))
    assert not (tmp_path / "new").exists()


def test_not_waiting_is_refused(tmp_path):
    """Nobody would start what waits in the queue, and nobody end it."""
    with pytest.raises(ConfigError, match=r"launcher\.wait=False.*hpc-elastic run --detach"):
        submitted(tmp_path, settings(1, wait=False))


@pytest.fixture
def nvidia_smi(nvidia_smi):
    """The command, whose answer is kept for this test only."""
    local._num_gpus.cache_clear()
    yield nvidia_smi
    local._num_gpus.cache_clear()


def test_what_is_visible_is_all_there_is(nvidia_smi):
    """The variable decides where it is set, empty too; else the driver is asked."""
    nvidia_smi("GPU 0: H200 (UUID: GPU-1)\n  MIG 1g (UUID: MIG-1)\nGPU 1: H200 (UUID: GPU-2)")
    assert local.machine_gpus({"CUDA_VISIBLE_DEVICES": "3"}) == ["3"]
    assert local.machine_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert local.machine_gpus({}) == ["0", "1"]


def test_a_driver_without_devices_is_no_gpu(nvidia_smi):
    """nvidia-smi is installed on login nodes, too."""
    nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    assert local.machine_gpus({}) == []


def test_gpus_of_amd_are_counted_without_nvidia_smi(tmp_path, monkeypatch):
    """By its driver: a node that has 0 as gpu_id is a CPU, and one may be hidden."""
    for number, gpu_id in enumerate(("0", "51211", "2391")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "gpu_id").write_text(f"{gpu_id}\n")
    (tmp_path / "3" / "gpu_id").mkdir(parents=True)  # reading it fails, as where a cgroup hides it
    monkeypatch.setattr("hpc_elastic.gpus._AMD_NODES", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    local._num_gpus.cache_clear()
    assert local.machine_gpus({}) == ["0", "1"]
    local._num_gpus.cache_clear()


@pytest.mark.parametrize(
    ("num_gpus", "num_nodes", "shares"),
    [
        (4, 2, ["0,1", "2,3"]),
        (8, 3, ["0,1", "2,3", "4,5"]),
        (2, 2, ["0", "1"]),
        (2, 1, ["0,1"]),
    ],
)
def test_every_node_gets_gpus_of_its_own(num_gpus, num_nodes, shares):
    """Equal shares in order, whichever nodes run at the time."""
    devices = [str(n) for n in range(num_gpus)]
    made = [
        local.gpu_variables(devices, "auto", slot=slot, num_nodes=num_nodes)
        for slot in range(num_nodes)
    ]
    assert made == [{"CUDA_VISIBLE_DEVICES": share} for share in shares]


def test_without_gpus_nothing_is_set():
    """A laptop's environment stays as it is."""
    assert local.gpu_variables([], "auto", slot=0, num_nodes=2) == {}


def test_workers_for_cpus_get_no_gpu():
    """Scripts that use CUDA where it is available would meet on GPU 0."""
    made = local.gpu_variables(["0"], "cpu", slot=1, num_nodes=2)
    assert made == {"CUDA_VISIBLE_DEVICES": ""}


def gpu_run(tmp_path, nodes: NodeRange, nproc) -> list[RunRequest]:
    """Return one run as it would be submitted."""
    return [
        RunRequest(tmp_path, RunSettings(nodes, nproc, LocalSettings()), Entry("function", "f"))
    ]


@pytest.mark.parametrize("nproc", ["auto", "gpu", 1])
def test_more_nodes_than_gpus_are_refused(tmp_path, nproc):
    """Two processes of one group can not share a GPU; both numbers and the ways out are told."""
    runs = gpu_run(tmp_path, NodeRange(1, 3), nproc)
    with pytest.raises(
        ConfigError, match=r"^nodes='1:3'.* 3 nodes .* has 2 GPUs.*nproc_per_node=cpu"
    ):
        local.require_gpus(runs, ["0", "1"])
    local.require_gpus(runs, ["0", "1", "2"])
    if nproc != "gpu":
        local.require_gpus(runs, [])
    local.require_gpus(gpu_run(tmp_path, NodeRange(1, 3), "cpu"), ["0"])


def test_a_worker_for_each_gpu_needs_a_gpu(tmp_path):
    """It is refused before a task is started; `auto` and a number do without."""
    with pytest.raises(ConfigError, match=r"nproc_per_node='gpu'.*no GPU.*number or cpu"):
        local.require_gpus(gpu_run(tmp_path, NodeRange(1, 1), "gpu"), [])
    local.require_gpus(gpu_run(tmp_path, NodeRange(1, 1), "auto"), [])
