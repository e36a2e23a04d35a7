"""run.json: read back as it was written, refused if newer or damaged; those of 0.2.0 are read.

``data/runs-of-0.2.0`` holds two runs as 0.2.0 wrote them: one of units with an env_file, and one
with pools.
"""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from hpc_elastic.agent.task import Task, find_task
from hpc_elastic.config.resolve import resolve
from hpc_elastic.config.schema import NotifySettings
from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.launcher.control import change_settings
from hpc_elastic.rendezvous.log_entry import RoundRules
from hpc_elastic.run.directory import VERSION, RunDir, Submission
from hpc_elastic.slurm.environment import SlurmEnvironment

RECORDED = Path(__file__).parent / "data" / "runs-of-0.2.0"
WAS_IN = "/scratch/ada/sweep"
OF_POOL = ("partition", "time_s", "time_min_s", "throughput")
OF_RULES = (
    "min_nodes", "max_nodes", "unit_nodes", "ft", "max_restarts", "scale_up", "max_requeues",
    "scale_up_timeout_s", "min_efficiency", "below_min_timeout_s", "max_failed_rounds",
)  # fmt: skip
ADDED = {"give_way": "off", "adapt": "off", "resume_args": None, "notify": asdict(NotifySettings())}
"""Keys of the launcher that 0.2.0 did not know: such a run goes on as it was."""
AS_BEFORE = ("run_id", "submission", "entry", "provenance", "generation")
TASK = {
    "SLURM_JOB_ID": "71", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "4",
    "SLURMD_NODENAME": "n1", "SLURM_JOB_NODELIST": "n1", "SLURM_CPUS_ON_NODE": "8",
    "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "1",
}  # fmt: skip


@pytest.fixture(params=["0", "1"])
def run(request, tmp_path) -> RunDir:
    """A run directory of 0.2.0."""
    return recorded(request.param, tmp_path)


def recorded(name: str, sweep: Path) -> RunDir:
    """Write a recorded run below a sweep directory."""
    run, submission = RunDir(sweep / name), Submission(sweep / ".hpc_elastic")
    submission.path.mkdir()
    run.path.mkdir()
    for file in (run.spec, run.settings):
        text = (RECORDED / name / file.name).read_text()
        file.write_text(text.replace(WAS_IN, str(sweep)))
        file.chmod(0o600)
    slots = [{"dir": str(run.path), "slot": slot} for slot in range(8)]
    submission.array(0).tasks.write_text(json.dumps({"runs": slots}))
    return run


def requeued(run: RunDir) -> Task:
    """The task of slot 4, in its second attempt."""
    array = Submission(run.path.parent / ".hpc_elastic").array(0)
    return find_task(array.tasks, SlurmEnvironment(TASK))


def test_each_value_of_a_run_of_0_2_0_is_as_it_was(run):
    """A requeued task runs what was submitted, although another version reads it."""
    before, spec = json.loads(run.spec.read_text()), run.load()
    found = json.loads(spec.to_json())
    assert {key: found[key] for key in AS_BEFORE} == {key: before[key] for key in AS_BEFORE}
    was = json.loads(run.settings.read_text())
    was["launcher"] |= ADDED
    for settings in (was["launcher"]["agent"], before["agent"]):
        settings["notice_command"] = None
    assert found["tasks"] == before["tasks"] and found["settings"] == was
    launcher = found["settings"]["launcher"]
    for group in ("rendezvous", "agent"):
        assert launcher[group] == before[group]
    assert {**spec.file_env, **launcher["env"]} == before["env"]
    rules = RoundRules.of(spec.settings)
    assert {key: getattr(rules, key) for key in OF_RULES} == {key: before[key] for key in OF_RULES}
    assert list(rules.node_counts) == before["node_counts"]
    pools = before["pools"] or [{**before, "num_slots": before["max_nodes"]}]
    for pool, was in zip(spec.pools, pools, strict=True):
        assert len(pool.slots) == was["num_slots"]
        assert vars(pool.terms) == {key: was[key] for key in vars(pool.terms)}
        own = {"partition": pool.launcher.partition, "throughput": pool.throughput}
        own |= {"time_s": pool.time_s, "time_min_s": pool.time_min_s}
        assert own == {key: was[key] for key in OF_POOL}


def test_a_requeued_task_finds_its_run_and_its_pool(tmp_path):
    """Under the code that is installed now."""
    task = requeued(recorded("1", tmp_path))
    assert (task.slot, task.attempt, task.superseded) == (4, 1, False)
    assert task.pool.launcher.partition == "low" and task.pool.terms.preempt_grace_s == 45.0
    assert (task.pool.time_min_s, task.pool.throughput) == (600.0, 2.5)


def test_a_run_of_0_2_0_is_resumed_with_its_settings(tmp_path):
    """And written in the present form: settings.json is not read any more."""
    run = recorded("1", tmp_path)
    spec = run.load()
    now = change_settings(spec.settings, ["launcher.signal_delay_s=90"])
    assert (
        now.launcher.signal_delay_s == 90.0 and now.launcher.pools == spec.settings.launcher.pools
    )
    run.spec.write_text(spec.to_json())
    run.settings.write_text("{}")
    assert run.load() == spec


def test_the_settings_are_those_that_resolve_to_them(run):
    """`resolve` would look for files that a task does not need, such as launcher.env_file."""
    config = json.loads(run.settings.read_text())
    config["launcher"]["env_file"] = None
    run.settings.write_text(json.dumps(config))
    config["launcher"] |= {"adapt": "off"}
    assert run.load().settings == resolve(config)


def test_a_setting_that_a_file_does_not_have_has_its_default(tmp_path):
    """A later version has more of them."""
    run = recorded("0", tmp_path)
    raw = json.loads(run.load().to_json())
    del raw["settings"]["launcher"]["agent"]["numa"]
    run.spec.write_text(json.dumps(raw))
    assert run.load().settings.launcher.agent.numa is None


def test_a_newer_version_is_refused_with_what_to_do(tmp_path):
    """It may mean something else by the same names."""
    run = recorded("0", tmp_path)
    raw = json.loads(run.load().to_json())
    run.spec.write_text(json.dumps({**raw, "version": VERSION + 1, "new": 1}))
    with pytest.raises(RunDirectoryError, match="a newer hpc_elastic has written its") as e:
        run.load()
    assert str(run.path) in str(e.value) and "use the one that submitted the run" in str(e.value)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("settings.json", None),
        ("settings.json", "[]"),
        ("settings.json", '{"nodes": "1:8"}'),
        ("run.json", "[]"),
        ("run.json", "3"),
        ("run.json", '{"version": "x"}'),
        ("run.json", '{"version": 2}'),
        ("run.json", '{"run_id": "r"}'),
    ],
)
def test_a_damaged_description_is_named(run, file, text):
    """Never a traceback: the files may be another user's."""
    if text is None:
        (run.path / file).unlink()
    else:
        (run.path / file).write_text(text)
    with pytest.raises(RunDirectoryError, match="is not a run directory: ") as e:
        run.load()
    assert text is not None or "has no settings.json" in str(e.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["tasks"], [[0]]),
        (["terms"], []),
        (["terms", 0, "kill_wait_s"], float("nan")),
        (["generation"], 1 << 70),
        (["settings", "nodes"], "8:1"),
        (["settings", "ft"], 1),
        (["settings", "launcher", "backend"], "other"),
        (["settings", "launcher", "max_restarts"], "3"),
        (["settings", "launcher", "scale_up"], "never"),
        (["settings", "launcher", "agent"], []),
        (["settings", "launcher", "pools"], [{"nodes": 1, "partiton": "x"}]),
    ],
)
def test_a_value_of_a_wrong_type_is_refused(tmp_path, path, value):
    """A task would fail by it later, in the middle of something else."""
    run = recorded("0", tmp_path)
    raw = json.loads(run.load().to_json())
    *groups, last = path
    group = raw
    for key in groups:
        group = group[key]
    group[last] = value
    run.spec.write_text(json.dumps(raw))
    with pytest.raises(RunDirectoryError, match="not a run description"):
        run.load()


def test_a_description_is_read_without_hydra(tmp_path):
    """A task starts before slow imports, and a login node may have no torch."""
    run = recorded("0", tmp_path)
    code = (
        "import sys; from pathlib import Path; from hpc_elastic.run.directory import RunDir; "
        "RunDir(Path(sys.argv[1])).load(); "
        "print(*{'hydra', 'omegaconf', 'torch', 'yaml'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
