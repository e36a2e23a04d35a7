"""``hydra/sweeper=elastic_optuna``: a study whose trials are real runs on this machine."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from local_runs import LocalRun
from omegaconf import OmegaConf

from hpc_elastic.run.events import read_events

optuna = pytest.importorskip("optuna")

SCRIPT = """
import time
from pathlib import Path

import hydra
from hydra.experimental.callback import Callback

import hpc_elastic


class Calls(Callback):
    def on_job_end(self, config, job_return, **kwargs):
        print("end of", config.x, job_return.status.name)


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(cfg):
    go = Path(cfg.go)
    step = 0
    while (cfg.x == 0 and not go.exists()) or cfg.x == 3:
        step += 1
        hpc_elastic.report(step=step, loss=100.0 * (cfg.x == 3) + 1 / step, total_steps=20)
        time.sleep(0.05)
    if cfg.x == 2:
        raise ValueError("too wide")
    return float("nan") if cfg.x == 4 else [10.0, 11.0][cfg.x]


if __name__ == "__main__":
    main()
"""
CONFIG = """
x: 0
go: {folder}/go
hydra:
  callbacks:
    calls: {{_target_: __main__.Calls}}
  sweeper:
    n_trials: 5
    n_jobs: 2
    direction: maximize
    max_failure_rate: 0.4
    prune_every_steps: 5
    sampler:
      _target_: optuna.samplers.GridSampler
      search_space: {{x: [0, 1, 2, 3, 4]}}
      seed: 1
    pruner: {{_target_: optuna.pruners.ThresholdPruner, lower: -50}}
    params:
      x: range(0,5)
"""
SETTINGS = (
    "+launcher=local", "nproc_per_node=1", "hydra/sweeper=elastic_optuna",
    "launcher.max_restarts=0", "launcher.poll_interval_s=0.2", "launcher.agent.warm_workers=false",
)  # fmt: skip


@pytest.fixture
def script(tmp_path) -> Path:
    """The user's script: x=0 waits for the file go, x=2 and x=4 fail, x=3 has to be pruned."""
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


@pytest.mark.long
def test_a_study_of_runs(script, tmp_path):
    """No trial waits for another; one is pruned, two fail, and an interrupted one is continued."""
    journal = tmp_path / "sweep" / "optuna.journal"

    def states() -> dict[int, str]:
        if not journal.exists():
            return {}
        storage = optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(journal))
        )
        trials = optuna.load_study(study_name="train", storage=storage).trials
        return {t.params["x"]: t.state.name for t in trials if "x" in t.params}

    others = {1: "COMPLETE", 2: "FAIL", 3: "PRUNED", 4: "FAIL"}
    with LocalRun(script, tmp_path, *SETTINGS) as first:
        first.eventually(
            lambda: states() == {0: "RUNNING", **others}, "all trials end but the one that waits"
        )
        second = subprocess.run(
            [sys.executable, str(script), *SETTINGS, f"hydra.sweep.dir={tmp_path / 'sweep'}"],
            cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip
        assert second.returncode == 1 and "another process runs the study" in second.stderr
        first.launcher.send_signal(signal.SIGINT)
        assert first.wait() == 130, first.output()
    output = first.output()
    assert "the same command with hydra.sweep.dir=" in output
    assert "ValueError: too wide" in output and "has returned nan" in output
    assert "): pruned at step" in output
    assert "end of 1 COMPLETED" in output and "end of 3 FAILED" in output

    (tmp_path / "go").touch()
    with LocalRun(script, tmp_path, *SETTINGS) as again:
        assert again.wait() == 0, again.output()
    assert "goes on with 1 trial of an earlier process" in again.output()
    assert "UserWarning" not in again.output()
    assert "[5/5] trial" in again.output() and "): 10; best: 11 of trial" in again.output()
    assert states() == {0: "COMPLETE", **others}, "five trials, none twice"
    folders = sorted(path.parent.name for path in (tmp_path / "sweep").glob("*/run.json"))
    assert folders == ["0", "1", "2", "3", "4"]
    runs = [tmp_path / "sweep" / name for name in folders]
    resumed = [r for r in runs if any(e["kind"] == "resume" for e in read_events(r / "events"))]
    assert len(resumed) == 1
    best = OmegaConf.load(tmp_path / "sweep" / "optimization_results.yaml")
    assert best == {"name": "optuna", "best_params": {"x": 1}, "best_value": 11.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((*SETTINGS, "hydra.sweeper.n_trial=3"), "did you mean 'n_trials'?"),
        ((*SETTINGS, "launcher.wait=false"), "its process has to stay"),
        ((*SETTINGS, "hydra.sweep.subdir=x"), "make it depend on the number of the trial"),
        (("-m", "hydra/sweeper=elastic_optuna"), "needs launcher=slurm or launcher=local"),
    ],
)
def test_a_wrong_setting_is_refused_before_the_study_begins(script, tmp_path, settings, message):
    """The error names the key, without a traceback."""
    argv = [sys.executable, str(script), "-m", *settings, "hydra.sweep.dir=sweep"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and message in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "sweep" / "optuna.journal").exists()
