"""launcher=slurm: queries before a submission, what sbatch gets, and what it refuses."""

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import submitit

from hpc_elastic.config.schema import (
    LocalSettings,
    NodeRange,
    PoolSettings,
    RunSettings,
    SlurmSettings,
)
from hpc_elastic.errors import (
    ConfigError,
    HpcElasticError,
    RunDirectoryError,
    SlurmCommandError,
    SubmissionError,
)
from hpc_elastic.launcher import slurm, submit
from hpc_elastic.launcher.batch_script import Script, directives, explain, render_result_job
from hpc_elastic.launcher.plan import RunRequest, make_plan
from hpc_elastic.run.directory import ArrayFiles, Entry, RunDir
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.parsing import (
    Partition,
    Preemption,
    Qos,
    has_submitted_nothing,
    parse_node_kinds,
)

ENTRY = Entry("function", "f", "f.py")


@pytest.fixture
def script(tmp_path):
    """Return a rendered script in a folder with a blank in its name."""
    path = tmp_path / "my sweep" / "array-0.sbatch"
    path.parent.mkdir()
    path.write_text("#!/bin/bash\n")
    return path


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """Put an sbatch into PATH that records its arguments, and then does what its text says."""

    def install(text: str = "echo 4242") -> Path:
        path = tmp_path / "bin" / "sbatch"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nenv >> {tmp_path}/env\n{text}\n'
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        return tmp_path / "calls"

    return install


def test_submitit_still_has_the_hook_of_executors():
    """If this fails, submitit has changed: compare `slurm.ArrayExecutor` with it."""
    base = slurm.ArrayExecutor.__mro__[1]
    assert base.__abstractmethods__ == {"_internal_process_submissions"}


def test_an_array_is_submitted_once_through_submitit(script, sbatch, monkeypatch):
    """Slurm gets the script as it is; jobs have the ids of its tasks; no pickle, no pause."""
    calls = sbatch("echo 4242")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("slept"))
    jobs = slurm.ArrayExecutor(script, SlurmClient()).submit_array([print] * 800)
    assert [job.job_id for job in jobs] == [f"4242_{i}" for i in range(800)]
    assert all(isinstance(job, submitit.SlurmJob) for job in jobs)
    assert calls.read_text() == f"--parsable {script}\n"
    assert [path.name for path in script.parent.iterdir()] == [script.name]


def test_the_job_id_is_written_beside_the_script(script, sbatch):
    """Flags of one submission go before the script; a cluster's name after the id is cut off."""
    calls = sbatch("echo '4242;cluster'")
    assert slurm.submit_script(script, 1, SlurmClient(), ["--dependency=after:7"]) == "4242"
    assert calls.read_text() == f"--parsable --dependency=after:7 {script}\n"
    assert script.with_suffix(".jobid").read_text() == "4242\n"


def test_a_job_around_the_launcher_is_hidden_from_sbatch(script, sbatch, tmp_path, monkeypatch):
    """SLURM_MEM_PER_CPU of an salloc would contradict --mem; what the script has set is kept."""
    sbatch()
    for name in ("SLURM_JOB_ID", "SLURM_MEM_PER_CPU", "SLURM_CONF", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "1")
    slurm.submit_script(script, 1, SlurmClient())
    names = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert not names & {"SLURM_JOB_ID", "SLURM_MEM_PER_CPU"}
    assert names >= {"SLURM_CONF", "CUDA_VISIBLE_DEVICES"}


def test_settings_win_over_the_shells_options_of_sbatch():
    """What names an account or a place and is not typed comes from the shell, into the settings."""
    shell = {"SBATCH_PARTITION": "x", "SBATCH_ACCOUNT": "a", "SBATCH_WCKEY": "w", "PATH": "/bin"}
    found = slurm.with_shell_defaults(
        SlurmSettings(partition="gpu", sbatch={"mail-type": "x"}), shell
    )
    assert (found.partition, found.account, found.qos) == ("gpu", "a", None)
    assert found.sbatch == {"wckey": "w", "mail-type": "x"}
    kept = slurm.with_shell_defaults(SlurmSettings(sbatch={"wckey": None}), shell)
    assert kept.sbatch == {"wckey": None}


def test_options_of_the_shell_without_a_setting_are_named_once(capsys):
    """SBATCH_OUTPUT would move the logs: it has no effect, and one line says so."""
    request = RunRequest(
        Path("/r"), RunSettings(NodeRange(1, 1), 1, SlurmSettings(time="5")), ENTRY
    )
    shell = {"SBATCH_OUTPUT": "/x", "SBATCH_NO_REQUEUE": "1", "SBATCH_TIMELIMIT": "1", "A": "b"}
    (found,) = slurm.adopt_shell([request], shell)
    assert found.settings.launcher == SlurmSettings(time="5")
    (line,) = capsys.readouterr().err.splitlines()
    assert "SBATCH_NO_REQUEUE, SBATCH_OUTPUT" in line and "TIMELIMIT" not in line
    assert slurm.adopt_shell([request], {"SLURM_CONF": "/c"}) == [request]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "printed",
    [
        "*** Maintenance on 24.12. ***\n4242",
        "4242\nYour project has 17 hours left",
        "4242;cluster\n",
        "Welcome\r\nSubmitted batch job 4242\r\nBye",
    ],
)
def test_the_job_id_is_found_in_what_a_wrapper_prints(script, sbatch, tmp_path, printed):
    """Sites wrap sbatch: banners come before or after the id."""
    (tmp_path / "printed").write_text(printed)
    sbatch(f"cat {tmp_path}/printed")
    assert SlurmClient().sbatch(script) == "4242"


@pytest.mark.parametrize("printed", ["thank you", "12\n13"])
def test_an_output_without_one_job_id_is_an_error(script, sbatch, tmp_path, printed):
    """A wrong id would make a lost run of a running job; the job may be in the queue."""
    (tmp_path / "printed").write_text(printed)
    sbatch(f"cat {tmp_path}/printed")
    with pytest.raises(SlurmCommandError, match="job id") as caught:
        SlurmClient().sbatch(script)
    assert not has_submitted_nothing(caught.value)


def test_the_banner_of_a_wrapper_names_no_setting():
    """`gres` is in `progress`; only sbatch's own lines are read, if it has any."""
    stderr = "Upgrade in progress, mind the time limit\nsbatch: error: Invalid qos specification"
    error = explain(stderr, SlurmSettings(qos="x", gpus_per_node=1))
    assert isinstance(error, ConfigError) and error.key == "launcher.qos"


def test_a_refused_array_takes_the_earlier_ones_back(tmp_path, sbatch, monkeypatch):
    """The error has the words of sbatch, and the key; nothing else is printed."""
    refused = LOST.format("Invalid qos specification")
    sbatch(f"[ $(wc -l < {tmp_path}/calls) = 1 ] && echo 7 && exit; {refused}")
    cancelled = []
    monkeypatch.setattr(SlurmClient, "cancel", lambda self, ids: cancelled.append(ids))
    launchers = [SlurmSettings(partition="a"), SlurmSettings(partition="b", qos="x")]
    runs = [
        RunRequest(tmp_path / str(n), RunSettings(NodeRange(1, 1), 1, launcher), ENTRY)
        for n, launcher in enumerate(launchers)
    ]
    plan = make_plan(runs, tmp_path / ".hpc_elastic", max_array_size=9)
    submit.write(plan, "train")
    with pytest.raises(ConfigError, match=r"launcher\.qos='x'.*Invalid qos"):
        slurm.submit(plan)
    assert cancelled == [["7"]]


LOST = 'echo "sbatch: error: Batch job submission failed: {}" >&2; exit 1'
"""What sbatch does when it has no answer, and when it is refused."""


@pytest.fixture
def one_run(tmp_path, monkeypatch):
    """A plan of one run, whose lost job is looked for at once: a test need not wait 20 s."""
    monkeypatch.setattr(slurm, "_LOOKS_S", (0.0, 0.0))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("the user's own")
    launcher = SlurmSettings(partition="a", qos="x")
    run = RunRequest(folder, RunSettings(NodeRange(1, 1), 1, launcher), ENTRY)
    plan = make_plan([run], folder / ".hpc_elastic", max_array_size=9)
    submit.write(plan, "train")
    return plan


def squeue(tmp_path, text):
    """Put a squeue beside the test's sbatch, and a controller whose jobs run."""
    shown = "echo JobId=77 ArrayJobId=77 ArrayTaskId=0 JobState=RUNNING"
    for name, lines in ("squeue", text), ("scontrol", shown):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("stderr", "is_free"),
    [
        ("Invalid qos specification", True),
        ("Unable to contact slurm controller (connect failure)", True),
        ("Socket timed out on send/recv operation", False),
        ("Unable to contact slurm controller (receive failure)", False),
        ("Communication shutdown failure", False),
        ("Message receive failure", False),
        ("Insane message length", False),
        ("Zero Bytes were transmitted or received", False),
    ],
)
def test_the_directory_of_a_refused_run_can_be_used_again(
    tmp_path, sbatch, one_run, stderr, is_free
):
    """After a typo in a setting; not if the job may be in the queue all the same."""
    plan = one_run
    sbatch(LOST.format(stderr))
    squeue(tmp_path, "exit 0")
    with pytest.raises(HpcElasticError) as failed, submit.withdrawn_if_refused(plan):
        slurm.submit(plan)
    assert stderr in str(failed.value) and (tmp_path / "run" / "notes.txt").exists()
    if is_free:
        submit.write(plan, "train")
    else:
        assert "marked as cancelled" in str(failed.value)
        assert RunDir(tmp_path / "run").cancelled.exists()
        with pytest.raises(RunDirectoryError, match="run_dir of `launch`"):
            submit.write(plan, "train")


def test_a_job_whose_answer_was_lost_is_adopted(tmp_path, sbatch, one_run, capsys):
    """Else it would train unknown to everybody, beside the one that the user submits again."""
    plan = one_run
    (script,) = plan.scripts
    calls = sbatch(LOST.format("Socket timed out on send/recv operation"))
    squeue(tmp_path, f"[ -e {tmp_path}/up ] && echo '77|0|{script}' && exit; touch {tmp_path}/up")
    assert slurm.submit(plan).job_ids == ["77"]
    assert script.with_suffix(".jobid").read_text() == "77\n"
    assert "answer of sbatch was lost" in capsys.readouterr().err
    assert len(calls.read_text().splitlines()) == 1


def test_one_job_stands_for_the_result_of_the_runs(tmp_path, sbatch, one_run, capsys):
    """It starts when their tasks are over, on one CPU, and exits as `hpc-elastic wait` does."""
    plan = one_run
    (script,) = plan.scripts
    (array,) = plan.arrays
    array = replace(array, launcher=replace(array.launcher, result_job=True))
    calls = sbatch("echo 77")
    jobs = slurm.submit(replace(plan, arrays=(array,)))
    assert jobs.job_ids == ["77"] and jobs.result_job == "77"
    assert "--dependency=afterok:77" in capsys.readouterr().err
    first, second = calls.read_text().splitlines()
    assert str(script) in first and "--dependency=afterany:77" in second
    text = (script.parent / "result-0.sbatch").read_text()
    assert "#SBATCH --cpus-per-task=1" in text and "#SBATCH --qos=x" in text
    assert f"-m hpc_elastic wait {tmp_path / 'run'} &\n" in text


def test_mail_is_about_the_result_job_and_not_about_the_tasks(tmp_path, sbatch, one_run):
    """Slurm's mail of an array says nothing about the result of its runs."""
    (script,) = one_run.scripts
    mail = {"mail-type": "END,FAIL", "mail-user": "me"}
    for has_job in (False, True):
        launcher = replace(one_run.arrays[0].launcher, result_job=has_job, sbatch=mail)
        made = Script(launcher, "train", 2, script.parent, 0, "python", tmp_path)
        flags = [flag for flag in directives(made) if flag.startswith("--mail")]
        assert len(flags) == (0 if has_job else 2)
    lines = render_result_job(made).splitlines()
    assert [line for line in lines if line.startswith("#SBATCH --mail")] == [
        "#SBATCH --mail-type=END,FAIL", "#SBATCH --mail-user=me",
    ]  # fmt: skip


def test_the_result_job_outlives_its_time_limit(tmp_path, sbatch, one_run):
    """It requeues itself before: what depends on it waits on; its exit code is the command's."""
    plan = one_run
    (script,) = plan.scripts
    launcher = replace(plan.arrays[0].launcher, result_job=True, time="7")
    arrays = (replace(plan.arrays[0], launcher=launcher),)
    sbatch("echo 77")
    slurm.submit(replace(plan, arrays=arrays))
    text = (script.parent / "result-0.sbatch").read_text()
    assert "#SBATCH --time=7\n" in text and "#SBATCH --signal=B:USR1@120\n" in text
    waits = tmp_path / "waits"
    over = f"while [ ! -e {tmp_path}/over ]; do sleep 0.05; done"
    waits.write_text(f"touch {tmp_path}/up; {over}; exit 3")
    requeue = tmp_path / "bin" / "scontrol"
    requeue.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/told; touch {tmp_path}/over\n')
    requeue.chmod(0o755)
    job = script.parent / "job"
    job.write_text(text.replace(sys.executable, f"/bin/sh {waits}"))
    with subprocess.Popen(["bash", str(job)], env={**os.environ, "SLURM_JOB_ID": "55"}) as bash:
        while not (tmp_path / "up").exists():
            time.sleep(0.02)
        bash.send_signal(signal.SIGUSR1)
    assert bash.returncode == 3 and (tmp_path / "told").read_text() == "requeue 55\n"


def test_without_its_result_job_nothing_is_submitted(tmp_path, sbatch, one_run):
    """Whoever depends on it would wait for ever."""
    plan = one_run
    (array,) = plan.arrays
    array = replace(array, launcher=replace(array.launcher, result_job=True))
    refusal = "sbatch: error: Batch job submission failed: Invalid qos specification"
    sbatch(f'case "$*" in *afterany*) echo "{refusal}" >&2; exit 1;; esac; echo 77')
    cancels = tmp_path / "bin" / "scancel"
    cancels.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/cancelled\n')
    cancels.chmod(0o755)
    with pytest.raises(ConfigError, match=r"launcher\.qos"):
        slurm.submit(replace(plan, arrays=(array,)))
    assert "77" in (tmp_path / "cancelled").read_text()


def test_a_silent_slurm_leaves_runs_that_end_at_their_start(tmp_path, sbatch, one_run):
    """Nothing is known, and nothing can be cancelled: the error says both."""
    plan = one_run
    sbatch(LOST.format("Message receive failure"))
    squeue(tmp_path, "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SubmissionError, match=r"could not be cancelled.*marked as cancelled"):
        slurm.submit(plan)
    assert RunDir(tmp_path / "run").cancelled.exists()


def test_a_job_whose_id_cannot_be_written_is_cancelled(tmp_path, sbatch, one_run, monkeypatch):
    """At a full quota; no process would know of it."""
    plan = one_run
    (script,) = plan.scripts
    sbatch("echo 77")
    squeue(tmp_path, f"echo '77|0|{script}'")
    cancelled = []
    monkeypatch.setattr(SlurmClient, "cancel", lambda self, ids: cancelled.extend(ids))

    def fail(self, job_id):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(ArrayFiles, "submitted_as", fail)
    with pytest.raises(SubmissionError, match="quota exceeded: its job was cancelled"):
        slurm.submit(plan)
    assert cancelled == ["77"]


def test_an_array_that_cannot_be_taken_back_ends_at_its_start(tmp_path, sbatch, monkeypatch):
    """The controller goes away between two arrays; the error of scancel does not hide sbatch's."""
    down = "sbatch: error: Unable to contact slurm controller (connect failure)"
    sbatch(f"[ $(wc -l < {tmp_path}/calls) = 1 ] && echo 7 && exit; echo '{down}' >&2; exit 1")

    def fail(self, ids):
        raise SlurmCommandError(["scancel", *ids], 1, "scancel: Unable to contact")

    monkeypatch.setattr(SlurmClient, "cancel", fail)
    runs = [
        RunRequest(
            tmp_path / name, RunSettings(NodeRange(1, 1), 1, SlurmSettings(partition=name)), ENTRY
        )
        for name in "ab"
    ]
    plan = make_plan(runs, tmp_path / ".hpc_elastic", max_array_size=9)
    submit.write(plan, "train")
    with pytest.raises(SubmissionError, match=r"connect failure.*7 could not be cancelled"):
        slurm.submit(plan)
    assert all(RunDir(run.dir).cancelled.exists() for run in plan.runs)


def test_without_slurm_the_error_says_where_to_go(script, tmp_path, monkeypatch):
    """On a laptop, launcher=slurm points to launcher=local."""
    monkeypatch.setenv("PATH", str(tmp_path))
    client = SlurmClient()
    with pytest.raises(SlurmCommandError) as failed:
        slurm.submit_script(script, 1, client)
    error = slurm.refusal(failed.value, SlurmSettings(), client)
    assert isinstance(error, SubmissionError) and "launcher=local" in str(error)


def test_a_controller_that_does_not_answer_is_not_taken_for_a_missing_slurm():
    """The remedy is another one."""

    class Silent(SlurmClient):
        def max_array_size(self) -> int:
            raise SlurmCommandError(["scontrol"], None, "no answer within 65 s")

    with pytest.raises(SubmissionError, match="scontrol ping"):
        slurm.max_array_size(dry_run=False, client=Silent())


def test_a_site_without_arrays_is_told_so():
    """MaxArraySize=0 is no number of tasks."""

    class NoArrays(SlurmClient):
        def max_array_size(self) -> int:
            return 0

    with pytest.raises(SubmissionError, match="no job arrays"):
        slurm.max_array_size(dry_run=False, client=NoArrays())


@pytest.mark.parametrize(
    ("optimize", "warnings", "environ", "lost"),
    [
        (0, [], {}, ""),
        (1, [], {}, "-O (PYTHONOPTIMIZE=1)"),
        (2, ["error"], {}, "-W error (PYTHONWARNINGS=error), -OO (PYTHONOPTIMIZE=2)"),
        (1, ["error"], {"PYTHONOPTIMIZE": "1", "PYTHONWARNINGS": "ignore,error"}, ""),
    ],
)
def test_flags_of_python_that_workers_lack_are_named(optimize, warnings, environ, lost):
    """`python -O train.py`: assertions would hold in the workers, without a word."""
    assert submit.lost_flags(optimize, warnings, environ) == lost


@pytest.mark.parametrize(
    ("environ", "refused"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "2"}, None),  # exported by a shell; no launcher's without a rank
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE='2'"),
        ({"RANK": "1", "WORLD_SIZE": "2", "HPC_ELASTIC_FENCE": "{}"}, None),  # a worker of a run
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, None),  # may be srun --pty bash
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS='4'"),
    ],
)
def test_one_process_of_several_submits_nothing(environ, refused):
    """Each process of torchrun or srun would start a run, and all would succeed."""
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        submit.require_one_process(environ)


class OnePartition:
    """Has one partition, of four nodes and half an hour; records what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    def preemption(self, partition: str | None, qos: str | None = None) -> Preemption:
        """Return it."""
        self.asked.append(partition)
        short = Partition("short", num_nodes=4, max_time_s=1800.0)
        return Preemption(partitions=(short,), grace_s=60, kill_wait_s=30)


class GpusIn:
    """A cluster whose partition `gpu` alone has GPUs, or whose GPUs Slurm does not know."""

    def __init__(self, kinds: str = "gpu:a100:4|64|1000\n(null)|32|1000") -> None:
        self.kinds = kinds

    def preemption(self, partition: str | None, qos: str | None = None) -> Preemption:
        """Return nothing of interest."""
        return Preemption()

    def node_kinds(self, partition: str | None):
        """Return the kinds of nodes."""
        rows = self.kinds.splitlines()
        wanted = {"gpu": rows[:1], "cpu": rows[-1:], None: rows}[partition]
        return parse_node_kinds("\n".join(wanted))


def test_a_worker_for_each_gpu_needs_nodes_with_gpus(capsys):
    """Else each node would be tried in turn. Where Slurm knows of no GPU at all it is a note."""

    def run(partition: str, nproc: str = "gpu", **share) -> list[RunRequest]:
        launcher = SlurmSettings(partition=partition, **share)
        return [RunRequest(Path("run"), RunSettings(NodeRange(1, 1), nproc, launcher), ENTRY)]

    with pytest.raises(ConfigError, match=r"nproc_per_node='gpu'.*partition cpu.*no GPU"):
        slurm.query_partitions(run("cpu"), GpusIn())
    slurm.query_partitions(run("gpu"), GpusIn())
    slurm.query_partitions(run("cpu", "auto"), GpusIn())
    assert capsys.readouterr().err == ""
    slurm.query_partitions(run("cpu"), GpusIn("(null)|32|1000"))
    assert "Slurm lists no GPU" in capsys.readouterr().err
    slurm.query_partitions(run("gpu", "auto", cpus_per_node=4), GpusIn())
    assert "requests none: set launcher.gpus_per_node" in capsys.readouterr().err
    slurm.query_partitions(run("gpu", "auto", gpus_per_node=1), GpusIn())
    slurm.query_partitions(run("cpu", "auto", cpus_per_node=4), GpusIn())
    assert capsys.readouterr().err == ""


def with_minimum(least: int, **settings) -> list[RunRequest]:
    """A run of at least this many nodes."""
    checked = RunSettings(NodeRange(least, 8), 1, SlurmSettings(**settings))
    return [RunRequest(Path("run"), checked, ENTRY)]


def test_each_partition_is_queried_once():
    """Of a sweep of many runs."""
    client = OnePartition()
    runs = [*with_minimum(1, partition="gpu"), *with_minimum(1), *with_minimum(2, partition="gpu")]
    assert len(slurm.query_partitions(runs, client)) == 3
    assert client.asked == ["gpu", None]


@pytest.mark.parametrize(
    ("launcher", "preemption", "grace_s"),
    [
        (SlurmSettings(), Preemption(grace_s=60, kill_wait_s=30), (90, 30)),
        (SlurmSettings(), Preemption(grace_s=0, kill_wait_s=30), (30, 30)),
        (SlurmSettings(preempt_grace_s=20.0), Preemption(kill_wait_s=30), (20, 20)),
        (LocalSettings(), None, (30, 30)),
        (LocalSettings(preempt_grace_s=45.0), None, (45, 30)),
    ],
)
def test_the_grace_of_a_run_is_frozen(launcher, preemption, grace_s):
    """A given grace takes precedence; a cancelled task has no more time than a preempted one."""
    settings = RunSettings(NodeRange(1, 1), 1, launcher)
    (terms,) = submit.terms_of(settings, [preemption] if preemption else None)
    assert (terms.preempt_grace_s, terms.kill_wait_s) == grace_s


def test_each_pool_has_terms_of_its_own(tmp_path):
    """An array for each; a task sees its partition, its time limit and its grace."""
    pools = [
        PoolSettings(2, partition="gpu"),
        PoolSettings(3, partition="spot", time="60", time_min="5", qos="standby", throughput=2.5),
    ]
    launcher = SlurmSettings(time="24:00:00", account="lab", pools=pools)
    run = RunRequest(tmp_path, RunSettings(NodeRange(1, 5), 1, launcher), ENTRY)
    plan = make_plan([run], tmp_path, max_array_size=9)
    assert [[task.slot for task in array.tasks] for array in plan.arrays] == [[0, 1], [2, 3, 4]]
    texts = submit.render_scripts(plan, "train")
    assert "--partition=gpu" in texts[0] and "--qos" not in texts[0]
    assert "--partition=spot" in texts[1] and "--qos=standby" in texts[1]
    assert "--time=60" in texts[1] and "--time=24:00:00" in texts[0]
    assert all("--account=lab" in text for text in texts.values())

    known = [Preemption(kill_wait_s=30), Preemption(grace_s=60, kill_wait_s=30)]
    (made,) = submit.write(plan, "train", terms=[submit.terms_of(run.settings, known)])
    spec = RunDir(tmp_path).load()
    assert spec == made and spec.all_partitions == "gpu,spot"
    found = [spec.pool_of(slot).launcher.partition for slot in range(5)]
    assert found == ["gpu"] * 2 + ["spot"] * 3
    first, last = spec.pool_of(1), spec.pool_of(4)
    assert (first.time_s, first.restored_limit_s) == (86_400.0, None)
    assert (last.time_s, last.restored_limit_s) == (3600.0, 3600.0)
    assert (first.terms.preempt_grace_s, last.terms.preempt_grace_s) == (30, 90)
    assert (first.throughput, last.throughput) == (1.0, 2.5)


def test_secrets_come_from_a_file_and_not_from_the_command_line(tmp_path, capsys):
    """Those that are given on it are named in a note."""
    path = tmp_path / "secrets.env"
    path.write_text("TOKEN=a\nMODE=b\n")
    path.chmod(0o600)
    launcher = LocalSettings(env={"MODE": "c"}, env_file=str(path))
    overrides = ("+launcher.env.API_KEY=x", "launcher.env.OMP_NUM_THREADS=1")
    run = RunRequest(tmp_path / "0", RunSettings(NodeRange(1, 1), 1, launcher), ENTRY, overrides)
    submit.prepare([run], sweep=tmp_path, name="train")
    spec = RunDir(tmp_path / "0").load()
    assert spec.file_env == {"TOKEN": "a", "MODE": "b"}
    assert spec.settings.launcher.env == {"MODE": "c"}, "launcher.env overrides launcher.env_file"
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith("launcher.env.API_KEY can be read by all users") and "env_file" in note


def test_a_minimum_that_the_partition_does_not_have_is_refused():
    """It would hold all its nodes in silence. Tasks that share nodes may be more than nodes."""
    slurm.query_partitions(with_minimum(4), OnePartition())
    with pytest.raises(ConfigError, match=r"nodes=5: .* partition short has 4 nodes") as refused:
        slurm.query_partitions(with_minimum(5), OnePartition())
    assert "minimum of 4 or less" in str(refused.value)
    slurm.query_partitions(with_minimum(5, gpus_per_node=1), OnePartition())
    with pytest.raises(ConfigError, match="nodes=5"):
        slurm.query_partitions(with_minimum(5, gpus_per_node=1, exclusive=True), OnePartition())


def test_a_time_limit_above_the_partitions_is_noted_once(capsys):
    """Slurm accepts the tasks, and they would wait for ever; a QOS may permit them."""
    slurm.query_partitions(with_minimum(1, time="30"), OnePartition())
    slurm.query_partitions(with_minimum(1), OnePartition())
    assert capsys.readouterr().err == ""
    runs = [*with_minimum(1, time="120"), *with_minimum(2, time="120")]
    slurm.query_partitions(runs, OnePartition())
    note = capsys.readouterr().err
    assert note.count("launcher.time=120: partition short allows 30 min at most") == 1
    assert "launcher.time=30 or less" in note


STANDBY = Qos("standby", frozenset({"NoReserve"}))
NORMAL = Qos("normal", preempts=frozenset({"standby", "kept"}))
BY_QOS = {
    "PreemptType": "preempt/qos", "PreemptMode": "REQUEUE",
    "AccountingStorageEnforce": "associations,limits,qos", "SchedulerType": "sched/backfill",
}  # fmt: skip
GPU = Partition("gpu", is_default=True)


class Offers:
    """What a site offers; a command of `silent` does not answer. Counts the queries."""

    def __init__(self, config=BY_QOS, qos=(STANDBY, NORMAL), partitions=(GPU,), silent=()) -> None:
        self.given = {"config": config, "all_qos": qos, "all_partitions": partitions}
        self.offered, self.silent, self.num_queries = frozenset({"standby", "normal"}), silent, 0

    def __getattr__(self, name: str):
        if name in self.silent:
            raise SlurmCommandError([name], 1, "no")
        self.num_queries += 1
        return lambda *args: self.given.get(name, self.offered)


def harvested(offers: Offers, **settings) -> SlurmSettings:
    """The settings of a run with launcher.harvest=auto after the choice."""
    terms = {"time": "60", "harvest": "auto", **settings}
    request = RunRequest(
        Path("/sweep/0"), RunSettings(NodeRange(1, 4), 1, SlurmSettings(**terms)), ENTRY
    )
    (chosen,) = slurm.choose_harvest([request], offers)
    return chosen.settings.launcher


def shares(launcher: SlurmSettings) -> list[SlurmSettings]:
    """The settings of each pool."""
    return [own for _, own in RunSettings(NodeRange(1, 4), 1, launcher).shares]


def test_harvest_takes_the_standby_qos_of_the_site(capsys):
    """Its tasks start in any gap with their whole limit; the choice is printed."""
    found = harvested(Offers())
    assert (found.qos, found.time_min, found.harvest) == ("standby", None, "off")
    assert "launcher.harvest=auto: tasks start in gaps of any" in capsys.readouterr().err
    assert harvested(Offers(), qos="standby", time_min="9").time_min is None


@pytest.mark.parametrize("pools", [None, [PoolSettings(nodes=4, harvest="auto")]])
def test_tasks_of_a_standby_qos_are_not_longer_than_it_permits(pools, capsys):
    """Slurm would accept them and never start them (QOSMaxWallDurationPerJobLimit)."""
    offers = Offers(qos=(replace(STANDBY, max_time_s=1800.0), NORMAL))
    (share,) = shares(harvested(offers, pools=pools))
    assert (share.qos, share.time) == ("standby", "30")
    assert "for 30 min at most (its MaxWall)" in capsys.readouterr().err
    (share,) = shares(harvested(offers, pools=pools, time="20"))
    assert (share.qos, share.time) == ("standby", "20")


@pytest.mark.parametrize(
    ("offers", "settings"),
    [
        ({}, {"qos": "normal"}),
        ({"qos": (NORMAL, Qos("standby"))}, {}),
        ({"qos": (STANDBY,)}, {}),
        ({"qos": (Qos("kept", frozenset({"NoReserve"})), NORMAL)}, {}),
        ({"qos": (Qos("standby", frozenset({"NoReserve"}), "cancel"), NORMAL)}, {}),
        ({"config": {**BY_QOS, "PreemptType": "preempt/partition_prio"}}, {}),
        ({"partitions": (replace(GPU, allowed_qos=("normal",)),)}, {}),
        ({"partitions": (Partition("a", denied_qos=("standby",)),)}, {"partition": "a"}),
        ({"silent": ("all_qos",)}, {}),
        ({"silent": ("config",)}, {}),
    ],
)  # fmt: skip
def test_without_a_standby_qos_harvest_fits_limits_to_gaps(offers, settings):
    """One that is not preemptible, not requeued, not offered or not allowed counts as none."""
    found = harvested(Offers(**offers), **settings)
    assert (found.qos, found.time_min, found.harvest) == (settings.get("qos"), "5", "off")
    found = harvested(Offers(**offers), **settings, time_min="9")
    assert found.time_min == "9"


def test_where_plans_are_hidden_harvest_is_a_ladder(capsys):
    """And without backfill nothing fills a gap."""
    hidden = Offers({"SchedulerType": "sched/backfill", "PrivateData": "accounts,jobs"}, ())
    assert (harvested(hidden).time_min, harvested(hidden).harvest) == ("5", "ladder")
    assert "PrivateData" in capsys.readouterr().err
    builtin = harvested(Offers({"SchedulerType": "sched/builtin"}, ()))
    assert (builtin.time_min, builtin.harvest) == (None, "off")
    assert "sched/builtin starts no task in a gap" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("terms", "named"),
    [
        ({"sbatch": {"contiguous": True}}, "launcher.sbatch.contiguous"),
        ({"sbatch": {"switches": "1@10"}}, "launcher.sbatch.switches"),
        ({"constraint": "[rack1|rack2]"}, "launcher.constraint"),
        ({"sbatch": {"constraint": "[a|b]"}}, "launcher.sbatch.constraint"),
        ({"sbatch": {"contiguous": True, "switches": 1}, "coallocate_min": True}, None),
        ({"constraint": "[a|b]", "coallocate_min": True}, None),
        ({"sbatch": {"contiguous": False}, "constraint": "a|b"}, None),
        ({"pools": [PoolSettings(nodes=4, constraint="[a|b]")]}, "launcher.constraint"),
    ],
)
def test_what_only_a_job_of_several_nodes_can_have_is_said_to_have_no_effect(terms, named, capsys):
    """Each node is a job of its own: once, for all runs of a sweep, with the key that helps."""
    for most in 4, 1:  # of one node nothing is to be said
        settings = RunSettings(NodeRange(1, most), 1, SlurmSettings(time="9", **terms))
        requests = [RunRequest(Path(f"/sweep/{n}"), settings, ENTRY) for n in range(2)]
        slurm.query_partitions(requests, OnePartition())
        said = capsys.readouterr().err
        assert said.count("has no effect") == (named is not None and most == 4)
        assert not said or (named in said and "launcher.coallocate_min=true" in said)


def test_the_qos_of_another_account_is_not_harvested():
    """Nor that of another cluster with the same accounting: sbatch would refuse the run."""
    offers = Offers({**BY_QOS, "ClusterName": "here"})
    offered = {("here", "p"): {"standby"}, ("here", "q"): set()}
    offers.offered_qos = lambda user, *where: frozenset(offered[where])
    assert harvested(offers, account="p").qos == "standby"
    assert harvested(offers, account="q").qos is None


def test_the_site_is_queried_only_for_auto():
    """A ladder needs nothing of it; a task shorter than the least slot has its own length."""
    offers = Offers()
    assert harvested(offers, harvest="off") == SlurmSettings(time="60")
    ladder = harvested(offers, harvest="ladder", time="3")
    assert (ladder.time_min, ladder.harvest, offers.num_queries) == ("3", "ladder", 0)


def test_each_pool_is_harvested_as_it_says():
    """Two nodes that stay, and two more in gaps."""
    pools = [PoolSettings(nodes=2, partition="gpu"), PoolSettings(nodes=2, harvest="auto")]
    found = harvested(Offers(), harvest="off", pools=pools)
    assert [(pool.qos, pool.harvest) for pool in found.pools] == [(None, "off"), ("standby", "off")]
    found = harvested(Offers(), pools=pools, time_min="9")
    assert [pool.qos for pool in found.pools] == ["standby", "standby"]
    assert [share.time_min for share in shares(found)] == [None, None]
    found = harvested(Offers(), harvest="off", pools=pools, time_min="9")
    assert [share.time_min for share in shares(found)] == ["9", None]


@pytest.mark.parametrize(
    ("stderr", "settings", "key"),
    [
        ("Invalid account or account/partition combination specified", {"account": "x"}, "account"),
        ("Invalid qos specification", {"qos": "x"}, "qos"),
        ("Requested time limit is invalid (missing or exceeds some limit)", {"time": "9"}, "time"),
        ("Invalid generic resource (gres) specification", {"gpus_per_node": 9}, "gpus_per_node"),
        ("User's group not permitted to use this partition", {"partition": "x"}, "partition"),
        ("Memory required by task is not available", {"mem": "9T"}, "mem"),
        ("CPU count specification invalid", {"cpus_per_node": 999}, "cpus_per_node"),
        ("Invalid time-min specification (exceeds job's time or other limits)",
         {"time": "9", "time_min": "8"}, "time_min"),
    ],
)  # fmt: skip
def test_a_refused_setting_is_named(stderr, settings, key):
    """Slurm does not name the flag; the error has the key, its value and Slurm's words."""
    error = explain(f"sbatch: error: {stderr}", SlurmSettings(**settings))
    assert isinstance(error, ConfigError)
    assert (error.key, error.value) == (f"launcher.{key}", settings[key])
    assert stderr in str(error)


AVAILABLE = "Batch job submission failed: Requested node configuration is not available"
NODES = parse_node_kinds("gpu:a100:4(S:0,1),gpu:2,lustre:1|64|515000+\n(null)|128+|65536\n")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"gpus_per_node": 9}, "the nodes of partition gpu have at most 6 GPUs"),
        ({"gpus_per_node": "a100:5"}, "the nodes of partition gpu have at most 4 a100 GPUs"),
        ({"gpus_per_node": "h100:1"}, "the nodes of partition gpu have no h100 GPUs"),
        ({"cpus_per_node": 200}, "the nodes of partition gpu have at most 128 CPUs"),
        ({"mem": "900G"}, "the nodes of partition gpu have at most 515,000 MiB"),
    ],
)
def test_what_no_node_has_is_named_with_what_there_is(settings, told):
    """Slurm says one and the same of GPUs, CPUs and memory."""
    error = explain(AVAILABLE, SlurmSettings(partition="gpu", **settings), ["gpu"], NODES)
    ((key, value),) = settings.items()
    assert isinstance(error, ConfigError)
    assert (error.key, error.value) == (f"launcher.{key}", value)
    assert f"{told}: ask for less, or name another partition" in str(error)
    assert AVAILABLE in str(error)


def test_what_no_node_has_together_is_named_together():
    """Each alone would do."""
    settings = SlurmSettings(gpus_per_node=6, cpus_per_node=128)
    error = explain(AVAILABLE, settings, ["gpu"], NODES)
    assert isinstance(error, SubmissionError)
    assert "launcher.gpus_per_node=6, launcher.cpus_per_node=128" in str(error)


def test_partitions_are_listed_where_the_nodes_of_one_are_not(script, sbatch):
    """sinfo may fail for the partition that does not exist."""

    class Client(SlurmClient):
        def partitions(self) -> list[str]:
            return ["gpu", "cpu"]

        def node_kinds(self, partition: str | None):
            raise SlurmCommandError(["sinfo"], 1, "no such partition")

    refused = SlurmCommandError(["sbatch"], 1, "sbatch: error: invalid partition specified: x")
    error = slurm.refusal(refused, SlurmSettings(partition="x"), Client())
    assert "there are cpu, gpu" in str(error)


def test_an_unknown_partition_is_told_with_those_that_exist():
    """The near miss and the partitions of the cluster are in the message."""
    stderr = "sbatch: error: invalid partition specified: gpuu\nsbatch: error: Batch job failed"
    error = explain(stderr, SlurmSettings(partition="gpuu"), ["gpu", "cpu"])
    assert str(error).startswith(
        "launcher.partition='gpuu': no such partition (did you mean 'gpu'?); there are cpu, gpu"
    )


@pytest.mark.parametrize(
    ("stderr", "remedy"),
    [
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "a limit of your account or QOS",
        ),
        ("QOSMaxSubmitJobPerUserLimit", "QOSMaxSubmitJobPerUserLimit"),
        ("Maintenance in progress until 6 pm, mind the time limit of your QOS", "Maintenance"),
        ("Rate limit exceeded, please retry momentarily", "try again"),
        ("System submissions disabled", "try again later"),
        ("Partition in DOWN state", "another launcher.partition"),
        ("MaxJobCount limit reached", "takes no more jobs"),
        ("Unable to contact slurm controller (connect failure)", "SLURM_CONF"),
        ("Invalid time specification (pos=0): x Invalid --begin specification", "--begin"),
        ("something new", "something new"),
    ],
)
def test_other_refusals_are_told_as_they_are(stderr, remedy):
    """Nothing is lost of what sbatch said, known or not."""
    error = explain(stderr, SlurmSettings())
    assert isinstance(error, SubmissionError)
    assert remedy in str(error) and stderr in str(error)
