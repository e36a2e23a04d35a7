"""The Hydra launcher, from a user's command line to Hydra's results, with a stand-in for agents."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.errors import CompactHydraException
from omegaconf import DictConfig, OmegaConf

from hpc_elastic._util import hydra_release
from hpc_elastic.config.schema import SlurmSettings
from hpc_elastic.errors import ConfigError, HpcElasticError, WorkerGroupError
from hpc_elastic.launcher.sweep import check_overrides, hide_traceback
from hpc_elastic.run.directory import RunDir

ROOT = Path(__file__).parents[2]
FAKE_TASK = str(Path(__file__).parent / "fake_task.py")
SCRIPT = f"""
import sys
from pathlib import Path
import hydra
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hpc_elastic.launcher import local

local.task_command = lambda file: [sys.executable, {FAKE_TASK!r}, str(file)]

class Calls(Callback):
    def on_job_start(self, config, **kwargs):
        print("start", config.hydra.job.num, config.lr)
    def on_job_end(self, config, job_return, **kwargs):
        print("end", config.hydra.job.num, job_return.status.name, job_return._return_value)
        if "PLOT" in config.launcher.env and config.launcher.env.PLOT == "succeed":
            Path(config.hydra.sweep.dir, "go").touch()
    def on_multirun_end(self, config, **kwargs):
        print("all done")

@hydra.main(version_base=None, config_path=".", config_name="config")
def main(cfg):
    raise AssertionError("runs in workers only")

if __name__ == "__main__":
    main()
"""
CONFIG = """
defaults: [_self_]
lr: 0.1
output: ${hydra:runtime.output_dir}
hydra:
  callbacks:
    calls: {_target_: __main__.Calls}
  sweep: {dir: out}
"""
OWN_SWEEPER = """
from hydra.core.utils import run_job
from hydra.plugins.sweeper import Sweeper

class Own(Sweeper):
    def __init__(self, **kwargs): pass
    def setup(self, *, hydra_context, task_function, config):
        self.given = {"hydra_context": hydra_context, "task_function": task_function}
        self.config = config
    def sweep(self, arguments):
        keys = {"job_dir_key": "hydra.sweep.dir", "job_subdir_key": None}
        return run_job(config=self.config, **self.given, **keys)
"""


@pytest.fixture
def app(tmp_path):
    """Return a function that runs the user's script with overrides."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config.yaml").write_text(CONFIG)
    quick = ["nodes=1", "nproc_per_node=1", "launcher.poll_interval_s=0.1"]

    def run(
        *overrides: str, quick: list[str] = quick, multirun: bool = True
    ) -> subprocess.CompletedProcess[str]:
        option = ["-m"] if multirun else []
        argv = [sys.executable, "train.py", *option, "+launcher=local", *quick, *overrides]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        return subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True)

    return run


def test_a_sweep_runs_and_returns_to_hydra(app, tmp_path):
    """Every job has a directory, frozen files, callbacks and a row in the table."""
    done = app("lr=1,2", "nodes=1,2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    called = [line for line in lines if line.startswith(("start", "end", "all"))]
    assert called[:4] == ["start 0 1", "start 1 2", "start 2 1", "start 3 2"]
    assert sorted(called[4:8]) == [f"end {n} COMPLETED 0.5" for n in range(4)]
    assert called[8:] == ["all done"]
    assert "nodes=2 nproc_per_node=1 launcher" not in done.stdout
    assert "nodes=2 nproc_per_node=1 lr=2" in done.stdout
    for number in range(4):
        folder = tmp_path / "out" / str(number)
        hydra = OmegaConf.load(folder / ".hydra" / "hydra.yaml").hydra
        assert hydra.runtime.output_dir == str(folder)
    specs = [json.loads((tmp_path / f"out/{n}/run.json").read_text()) for n in range(4)]
    assert [spec["settings"]["nodes"] for spec in specs] == ["1", "1", "2", "2"]
    assert specs[0]["entry"]["script"] == str(tmp_path / "train.py")


def test_multirun_is_optional_where_the_group_can_choose_it(app, tmp_path):
    """Hydra 1.4 decides before it composes: there, one sentence asks for -m."""
    done = app("launcher.dry_run=true", multirun=False)
    assert (tmp_path / "out").exists() == (hydra_release() < (1, 4))
    if hydra_release() < (1, 4):
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 1 and "add -m" in done.stderr and "Traceback" not in done.stderr


def test_nobody_else_can_read_the_workers_variables(app, tmp_path):
    """launcher.env may hold tokens: every file that one gets into is the owner's only."""
    assert app("+launcher.env.TOKEN=s3cret").returncode == 0
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    holding = [path for path in files if "s3cret" in path.read_text()]
    assert {path.name for path in holding} >= {"run.json", "config.yaml", "multirun.yaml"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in holding} == {0o600}


def test_one_failed_run_does_not_end_the_others(app, tmp_path):
    """All finish; then Hydra raises the failure, without a traceback of the launcher."""
    done = app("+launcher.env.PLOT=fail,succeed")
    assert done.returncode == 1
    assert "end 0 FAILED" in done.stdout and "end 1 COMPLETED 0.5" in done.stdout
    assert "first failure: rank 3 (local rank 1) on n3: exit code 1" in done.stderr
    assert "ValueError: no" in done.stderr
    assert "launch_sweep" not in done.stderr


def test_results_are_reported_as_runs_end(app):
    """The callback of the second run comes while the first still waits; both are one array."""
    done = app("+launcher.env.PLOT=wait,succeed")
    assert done.returncode == 0, done.stderr
    ends = [line for line in done.stdout.splitlines() if line.startswith("end ")]
    assert ends == ["end 1 COMPLETED 0.5", "end 0 COMPLETED 0.5"]


def test_a_wrong_setting_is_told_in_one_line(app, tmp_path):
    """The message names the key; nothing is written, no traceback buries it."""
    done = app("++launcher.max_restart=1")
    assert done.returncode == 1
    assert "launcher.max_restart" in done.stderr and "did you mean" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("run.json"))


def test_a_missing_key_is_told_at_submission(app):
    """The function may set it; if it is a mistake, it need not wait for a node to be seen."""
    done = app("+name=${modle.depth}", "launcher.dry_run=true")
    assert done.returncode == 0 and "name: ${modle.depth}: " in done.stdout, done.stdout


def test_an_unwritable_sweep_directory_is_told_with_its_path(app, tmp_path):
    """The first thing that Hydra's sweeper would do is to fail at it with a traceback."""
    (tmp_path / "file").touch()
    done = app("hydra.sweep.dir=file/sweep")
    assert done.returncode == 1
    assert "file/sweep" in done.stderr and "hydra.sweep.dir=" in done.stderr
    assert "Traceback" not in done.stderr


def test_dry_run_freezes_and_starts_nothing(app, tmp_path):
    """The plan and the run directories are printed."""
    done = app("launcher.dry_run=true", "lr=1,2")
    assert done.returncode == 0, done.stderr
    assert "2 runs, 2 tasks, 1 array" in done.stdout
    assert "runs in out/" in done.stdout
    run = RunDir(tmp_path / "out" / "1")
    assert run.hydra_text("config.yaml", run.load()).count("\nlr: 2\n")
    assert not list(tmp_path.rglob("*.jobid"))


def test_snapshot_runs_the_copy(app, tmp_path):
    """The frozen entry points into the copy, which the run directory links to."""
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    done = app("launcher.code_snapshot=true", "launcher.dry_run=true")
    assert done.returncode == 0, done.stderr
    spec = json.loads((tmp_path / "out" / "0" / "run.json").read_text())
    code = tmp_path / "out" / ".hpc_elastic" / "code"
    assert spec["entry"]["script"] == str(code / "train.py")
    assert (tmp_path / "out" / "0" / "code" / "train.py").read_text() == SCRIPT


def test_other_hydra_scripts_do_not_pay_for_us(tmp_path):
    """Hydra imports the plugin for every script: two modules of ours, and no setting is made."""
    code = (
        "import sys, hydra, hydra._internal.hydra, hydra._internal.core_plugins.basic_sweeper\n"
        "import hydra.plugins.launcher\n"
        "before = set(sys.modules)\n"
        "import hydra_plugins.hpc_elastic_launcher.launcher as plugin\n"
        "print(*sorted(set(sys.modules) - before))\n"
        "with hydra.initialize(version_base='1.3'):\n"
        "    hydra.compose(overrides=['+lr=1'])\n"
        "    print(plugin._node.cache_info().currsize, 'hpc_elastic.config' in sys.modules)\n"
        "    config = hydra.compose(overrides=['+launcher=slurm'])\n"
        "    print(plugin._node.cache_info().currsize, config.launcher.max_restarts)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    plugin = "hydra_plugins.hpc_elastic_launcher"
    imported = f"hpc_elastic hpc_elastic._util hydra_plugins {plugin} {plugin}.launcher"
    most = SlurmSettings().max_restarts
    assert done.stdout.splitlines() == [imported, "0 False", f"1 {most}"]


@pytest.mark.parametrize("error", [ConfigError("a", 1, "b"), WorkerGroupError("x", {"rank": 1})])
def test_an_error_for_hydra_has_the_text_and_the_error_itself(error):
    """Hydra prints it without a traceback; code that catches it has the cause."""
    hidden = hide_traceback(error)
    assert isinstance(hidden, CompactHydraException) and isinstance(hidden, HpcElasticError)
    assert (str(hidden), hidden.__cause__) == (str(error), error)
    assert hide_traceback(hidden) is hidden


def test_a_directory_that_hydra_would_ignore_is_refused(app, tmp_path):
    """``hydra.run.dir`` is that of a single job; with a launcher, runs are those of a sweep."""
    done = app("hydra.run.dir=elsewhere")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "hydra.run.dir='elsewhere'" in done.stderr and "hydra.sweep.dir=" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hydra/launcher=basic"], "hydra/launcher='basic'"),
        (["hydra/launcher=basic", "nodes=2", "nproc_per_node=1", "ft=true"], "hydra/launcher="),
        (["hydra/launcher=basic", "launcher.partition=x", "launcher.env.A=b"], "hydra/launcher="),
        (["hydra.mode=RUN"], "hydra.mode='RUN'"),
        (["hydra.sweeper._target_=hydra_plugins.own.Own"], "hydra/sweeper='basic': this sweeper"),
    ],
)
def test_a_launcher_that_would_have_no_effect_is_refused(app, tmp_path, overrides, message):
    """Hydra would run the training in the submitting process, with exit code 0."""
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "own.py").write_text(OWN_SWEEPER)
    (tmp_path / "config.yaml").write_text("lr: 0.1\n")
    done = app(*overrides, quick=[], multirun="hydra.mode=RUN" not in overrides)
    assert done.returncode == 1 and "runs in workers only" not in done.stderr
    assert f"launcher=local has no effect: {message}" in done.stderr, done.stderr


@pytest.mark.parametrize("name", ["exclude", "constraint", "gpus_per_node"])
def test_a_list_of_slurms_is_no_choice_of_hydras(name):
    """Two runs would train, each without one of the nodes; a quoted list is one value."""
    key, value = f"launcher.{name}", "a:1,b:1"
    with pytest.raises(ConfigError, match="a run for each value") as refused:
        check_overrides(typed(f"{key}={value}"))
    assert str(refused.value).count(f"""'{key}="{value}"'""") == 1
    check_overrides(typed(f'{key}="{value}"', "lr=1,2"))


def test_bytes_that_are_no_text_are_refused_with_their_key(app):
    """As of a UTF-8 terminal with LC_ALL=C and PYTHONUTF8=0: no file could be written."""
    done = app("+name='\udcff'")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "+name=" in done.stderr and "PYTHONUTF8=1" in done.stderr


def test_a_sweep_over_partitions_is_named(capsys):
    """It may be meant; a user of sbatch means one run on nodes of any of them."""
    check_overrides(typed("launcher.partition=a,b"))
    (line,) = capsys.readouterr().err.splitlines()
    assert "a run for each partition" in line and """'launcher.partition="a,b"'""" in line


def typed(*overrides: str) -> DictConfig:
    """A config of Hydra's with these overrides on the command line."""
    return OmegaConf.create({"hydra": {"overrides": {"task": list(overrides)}}})


def test_settings_of_the_launcher_are_no_part_of_a_folders_name(app, tmp_path):
    """launcher.env may hold tokens. What differs from job to job stays."""
    subdir = "hydra.sweep.subdir='${hydra.job.override_dirname}'"
    done = app("+launcher.env.TOKEN=s3cret", "lr=1", "nodes=1,2", subdir)
    assert done.returncode == 0, done.stderr
    names = {path.parent.name for path in (tmp_path / "out").rglob("run.json")}
    assert names == {"lr=1,nodes=1", "lr=1,nodes=2"}


def test_the_folder_of_a_run_may_be_named_by_an_interpolation(app, tmp_path):
    """The number of a job is not known yet when its overrides are looked at."""
    done = app("lr=0.1,0.2", "hydra.sweep.subdir=run-${hydra.job.num}")
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / "out" / f"run-{number}" / "run.json").exists() for number in (0, 1))
