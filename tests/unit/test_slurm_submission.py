"""launcher=slurm: queries before a submission, what sbatch gets, and what it refuses."""

import os
import stat
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
from hpc_elastic.launcher.batch_script import explain
from hpc_elastic.launcher.plan import RunRequest, make_plan
from hpc_elastic.run.directory import Entry, RunSpec
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.parsing import Partition, Preemption, Qos, parse_node_kinds

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


def test_a_refused_array_takes_the_earlier_ones_back(tmp_path, sbatch, monkeypatch):
    """The error has the words of sbatch, and the key; nothing else is printed."""
    sbatch(f'[ $(wc -l < {tmp_path}/calls) = 1 ] && echo 7 && exit; echo "Invalid qos" >&2; exit 1')
    cancelled = []
    monkeypatch.setattr(SlurmClient, "cancel", lambda self, ids: cancelled.append(ids))
    launchers = [SlurmSettings(partition="a"), SlurmSettings(partition="b", qos="x")]
    runs = [
        RunRequest(tmp_path / str(n), RunSettings(NodeRange(1, 1), 1, launcher), ENTRY)
        for n, launcher in enumerate(launchers)
    ]
    plan = make_plan(runs, tmp_path / ".hpc_elastic", max_array_size=9)
    prepared = submit.write(plan, "train")
    with pytest.raises(ConfigError, match=r"launcher\.qos='x'.*Invalid qos"):
        slurm.submit(plan, prepared.scripts)
    assert cancelled == [["7"]]


@pytest.mark.parametrize(
    ("stderr", "is_free"),
    [("Invalid qos specification", True), ("Socket timed out on send/recv operation", False)],
)
def test_the_directory_of_a_refused_run_can_be_used_again(tmp_path, sbatch, stderr, is_free):
    """After a typo in a setting; not if the job may be in the queue all the same."""
    launcher, folder = SlurmSettings(partition="a", qos="x"), tmp_path / "run"
    run = RunRequest(folder, RunSettings(NodeRange(1, 1), 1, launcher), ENTRY)
    folder.mkdir()
    (folder / "notes.txt").write_text("the user's own")
    plan = make_plan([run], folder / ".hpc_elastic", max_array_size=9)
    scripts = submit.write(plan, "train").scripts
    sbatch(f'echo "sbatch: error: Batch job submission failed: {stderr}" >&2; exit 1')
    with pytest.raises(HpcElasticError, match=stderr), submit.withdrawn_if_refused(plan):
        slurm.submit(plan, scripts)
    assert (folder / "notes.txt").exists()
    if is_free:
        submit.write(plan, "train")
    else:
        with pytest.raises(RunDirectoryError, match="run_dir of `launch`"):
            submit.write(plan, "train")


def test_without_slurm_the_error_says_where_to_go(script, tmp_path, monkeypatch):
    """On a laptop, launcher=slurm points to launcher=local."""
    monkeypatch.setenv("PATH", str(tmp_path))
    client = SlurmClient()
    with pytest.raises(SlurmCommandError) as failed:
        slurm.submit_script(script, 1, client)
    error = slurm.refusal(failed.value, SlurmSettings(), client)
    assert isinstance(error, SubmissionError) and "launcher=local" in str(error)


class OnePartition:
    """Has one partition, of four nodes and half an hour; records what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    def preemption(self, partition: str | None, qos: str | None = None) -> Preemption:
        """Return it."""
        self.asked.append(partition)
        short = Partition("short", num_nodes=4, max_time_s=1800.0)
        return Preemption(partitions=(short,), grace_s=60, kill_wait_s=30)


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
def test_the_grace_of_a_run_is_frozen(tmp_path, launcher, preemption, grace_s):
    """A given grace takes precedence; a cancelled task has no more time than a preempted one."""
    run = RunRequest(tmp_path, RunSettings(NodeRange(1, 1), 1, launcher), ENTRY)
    plan = make_plan([run], tmp_path, max_array_size=9)
    spec = submit.make_spec(plan, 0, entry=ENTRY, run_id="r", preemptions=[preemption])
    assert (spec.preempt_grace_s, spec.kill_wait_s) == grace_s


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

    terms = [Preemption(kill_wait_s=30), Preemption(grace_s=60, kill_wait_s=30)]
    made = submit.make_spec(plan, 0, entry=ENTRY, run_id="r", preemptions=terms)
    spec = RunSpec.from_json(made.to_json())
    assert spec == made and spec.all_partitions == "gpu,spot"
    assert [spec.of_slot(slot).partition for slot in range(5)] == ["gpu"] * 2 + ["spot"] * 3
    first, last = spec.of_slot(1), spec.of_slot(4)
    assert (first.preempt_grace_s, first.time_s, first.restored_limit_s) == (30, 86_400.0, None)
    assert (last.preempt_grace_s, last.time_s, last.restored_limit_s) == (90, 3600.0, 3600.0)
    assert (first.throughput, last.throughput) == (1.0, 2.5)
    assert last.of_slot(0) == spec, "the leader sees all pools"


def test_secrets_come_from_a_file_and_not_from_the_command_line(tmp_path, capsys):
    """Those that are given on it are named in a note."""
    path = tmp_path / "secrets.env"
    path.write_text("TOKEN=a\nMODE=b\n")
    path.chmod(0o600)
    launcher = LocalSettings(env={"MODE": "c"}, env_file=str(path))
    overrides = ("+launcher.env.API_KEY=x", "launcher.env.OMP_NUM_THREADS=1")
    run = RunRequest(tmp_path / "0", RunSettings(NodeRange(1, 1), 1, launcher), ENTRY, overrides)
    submit.prepare([run], sweep=tmp_path, name="train")
    spec = RunSpec.from_json((tmp_path / "0" / "run.json").read_text())
    assert spec.env == {"TOKEN": "a", "MODE": "c"}
    assert "TOKEN" not in (tmp_path / "0" / "settings.json").read_text()
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
    ],
)
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
