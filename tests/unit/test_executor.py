"""Submission through submitit: the private parts it rests on, what is sent, what is refused."""

import os
import stat
from pathlib import Path

import pytest
import submitit

from hpc_elastic.config.schema import SlurmSettings
from hpc_elastic.errors import ConfigError, SubmissionError
from hpc_elastic.launcher import slurm
from hpc_elastic.launcher.batch_script import explain
from hpc_elastic.slurm.parsing import parse_node_kinds


@pytest.fixture
def script(tmp_path):
    """Return a rendered script in a folder with a blank in its name."""
    path = tmp_path / "my sweep" / "array-0.sbatch"
    path.parent.mkdir()
    path.write_text("#!/bin/bash\n")
    return path


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """Put an sbatch into PATH that does what its text says; srun only has to be there."""

    def install(sbatch: str) -> None:
        for name, text in {"sbatch": sbatch, "srun": "exit 1"}.items():
            path = tmp_path / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    return install


@pytest.mark.parametrize("name", [*slurm.OVERRIDDEN, *slurm.USED])
def test_submitit_still_has_the_private_parts(name):
    """If this fails, submitit has changed: compare hpc_elastic/launcher/slurm.py with it."""
    assert hasattr(submitit.SlurmExecutor, name), f"submitit.SlurmExecutor.{name} is gone"


def test_the_array_is_submitted_once_without_pickles(script, fake_slurm):
    """Slurm gets our script as it is; submitit's jobs have the ids of the array's tasks."""
    fake_slurm(f'echo "$@" >> {script.parent.parent}/calls; echo Submitted batch job 4242')
    jobs = slurm.submit_script(script, 800)
    assert (script.parent.parent / "calls").read_text() == f"{script}\n"
    assert [job.job_id for job in jobs] == [f"4242_{i}" for i in range(800)]
    assert all(isinstance(job, submitit.SlurmJob) for job in jobs)
    assert script.with_suffix(".jobid").read_text() == "4242\n"
    assert not list(script.parent.rglob("*.pkl"))


def test_an_array_can_be_made_to_wait_for_a_gang(script, fake_slurm):
    """It may start once the gang has, or once that was cancelled."""
    fake_slurm(f'echo "$@" >> {script.parent.parent}/calls; echo Submitted batch job 4242')
    slurm.submit_script(script, 1, after="4241")
    assert (script.parent.parent / "calls").read_text() == f"--dependency=after:4241 {script}\n"


def test_submission_does_not_pay_for_submitits_pauses(script, fake_slurm, monkeypatch):
    """It sleeps between submissions to spare sacct, which we do not ask."""
    fake_slurm("echo Submitted batch job 1")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("slept"))
    slurm.submit_script(script, 2)
    slurm.submit_script(script, 2)


def test_refusals_carry_sbatchs_own_words(script, fake_slurm):
    """What sbatch wrote is kept as it is, for the table of remedies."""
    fake_slurm("echo 'sbatch: error: no such thing' >&2; exit 1")
    with pytest.raises(slurm.SbatchRefusedError) as refused:
        slurm.submit_script(script, 1)
    assert refused.value.stderr == "sbatch: error: no such thing"
    assert not script.with_suffix(".jobid").exists()


def test_without_slurm_the_error_says_where_to_go(script, tmp_path, monkeypatch):
    """On a laptop, launcher=slurm points to launcher=local."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SubmissionError, match="launcher=local"):
        slurm.submit_script(script, 1)


def test_a_job_around_the_launcher_is_hidden_from_sbatch():
    """SLURM_MEM_PER_CPU of an salloc would contradict --mem of the script."""
    inside = {"SLURM_JOB_ID": "1", "SLURM_MEM_PER_CPU": "9", "SLURM_CONF": "/etc/x", "HOME": "/"}
    prefix = ["env", "--unset=SLURM_JOB_ID", "--unset=SLURM_MEM_PER_CPU"]
    assert slurm.without_outer_job(inside) == prefix
    assert slurm.without_outer_job({"SLURM_CONF": "/etc/x"}) == []


def test_the_payload_is_a_path_and_nothing_else():
    """It could never run a task by itself; it says so instead of doing something else."""
    with pytest.raises(SubmissionError, match="batch script"):
        slurm.ArrayTask("/sweep/array-0.json", 3)()


@pytest.mark.parametrize(
    ("stderr", "settings", "key"),
    [
        ("Invalid account or account/partition combination specified", {"account": "x"}, "account"),
        ("Invalid qos specification", {"qos": "x"}, "qos"),
        ("Requested time limit is invalid (missing or exceeds some limit)", {"time": "9"}, "time"),
        ("Invalid feature specification", {"constraint": "x"}, "constraint"),
        ("Invalid generic resource (gres) specification", {"gpus_per_node": 9}, "gpus_per_node"),
        ("Memory specification can not be satisfied", {"mem": "9T"}, "mem"),
        ("Invalid node name specified", {"exclude": "x"}, "exclude"),
    ],
)
def test_a_refused_setting_is_named(stderr, settings, key):
    """Slurm does not say which flag it was; the error has the key and its value."""
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


def test_sbatchs_own_words_are_in_the_error_only(script, fake_slurm, capfd):
    """submitit prints them as well, before the error that says what to do."""
    fake_slurm("echo 'sbatch: error: no such thing' >&2; exit 1")
    with pytest.raises(slurm.SbatchRefusedError, match="no such thing"):
        slurm.submit_script(script, 1)
    assert capfd.readouterr().err == ""


def test_an_unknown_partition_is_told_with_those_that_exist():
    """The near miss and the partitions of the cluster are in the message."""
    stderr = "sbatch: error: invalid partition specified: gpuu\nsbatch: error: Batch job failed"
    error = explain(stderr, SlurmSettings(partition="gpuu"), ["gpu", "cpu"])
    assert str(error).startswith(
        "launcher.partition='gpuu': no such partition (did you mean 'gpu'?); there are cpu, gpu"
    )


def test_a_refused_flag_is_named_by_its_key():
    """A reservation is one of launcher.sbatch's flags."""
    error = explain("Requested reservation is invalid", SlurmSettings(sbatch={"reservation": "x"}))
    assert isinstance(error, ConfigError)
    assert (error.key, error.value) == ("launcher.sbatch.reservation", "x")


@pytest.mark.parametrize(
    ("stderr", "remedy"),
    [
        ("Invalid job array specification", "MaxArraySize"),
        ("Job violates accounting/QOS policy (job submit limit, ...)", "limits"),
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


def test_scripts_are_read_when_they_are_submitted(script, fake_slurm):
    """The copy of submitit of the submission file is the same text."""
    fake_slurm("echo Submitted batch job 7")
    slurm.submit_script(script, 1)
    copies = list((script.parent / "submitit").glob("*_submission.sh"))
    assert [Path(copy).read_text() for copy in copies] == ["#!/bin/bash\n"]
