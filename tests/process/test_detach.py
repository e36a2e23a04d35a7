"""`hpc-elastic submit` of local runs: their launcher goes on, with a stand-in for agents."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from group import eventually

from ended import is_gone
from helps import not_in_help
from hpc_elastic.launcher import detach
from hpc_elastic.run.directory import RunDir

ROOT = Path(__file__).parents[2]
FAKE_TASK = str(Path(__file__).parent / "fake_task.py")
DEADLINE_S = 60.0
SCRIPT = f"""
import sys
import hydra
from hpc_elastic.launcher import local

local.task_command = lambda file: [sys.executable, {FAKE_TASK!r}, str(file)]

@hydra.main(version_base=None, config_path=".", config_name="config")
def main(cfg):
    raise AssertionError("runs in workers only")

if __name__ == "__main__":
    main()
"""
QUICK = ["+launcher=local", "nodes=1", "nproc_per_node=1", "launcher.poll_interval_s=0.1"]


@pytest.fixture
def call(tmp_path):
    """Return a function that runs Python with these arguments beside the user's script."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config.yaml").write_text("lr: 0.1\nhydra: {sweep: {dir: out}}\n")

    def run(*argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        return subprocess.run(
            [sys.executable, *argv, *QUICK], cwd=tmp_path, env=env, capture_output=True, text=True
        )

    return run


def await_end(pid: int) -> None:
    """Wait for the launcher, which goes on behind the command."""
    eventually(lambda: is_gone(pid), DEADLINE_S)


def test_the_launcher_of_a_sweep_of_several_batches_goes_on_to_the_last(call, tmp_path):
    """The command has returned by the second; what it was told of is the first."""
    sweep = ["-m", "lr=1,2,3,4", "hydra.sweeper.max_batch_size=2", "launcher.max_agents=1"]
    done = call("-m", "hpc_elastic", "submit", "--json", "train.py", *sweep)
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(done.stdout)
    assert len(told["runs"]) == 2 and not not_in_help("submit", told)
    await_end(told["pid"])
    log = Path(told["log"]).read_text()
    results = [tmp_path / "out" / str(number) / "result.json" for number in range(4)]
    assert all(result.exists() for result in results) and "Error" not in log, log


def test_who_submits_is_told_what_to_do_next(call, tmp_path):
    """Which process goes on and where its output is; of each run its id, folder, and commands."""
    done = call("-m", "hpc_elastic", "submit", "train.py", "-m", "lr=1,2")
    assert done.returncode == 0, done.stderr
    began, *runs = done.stdout.split("\n\n")
    found = re.fullmatch(r"started .* by process (\d+); its output is in (\S+)", began)
    assert found and (tmp_path / found[2]).exists()
    assert len(runs) == 2
    for number, run in enumerate(runs):
        run_id, folder, *commands = map(str.strip, run.splitlines())
        assert RunDir(Path(folder)).load().run_id == run_id
        assert Path(folder) == tmp_path / "out" / str(number)
        assert commands == [
            f"hpc-elastic {what}"
            for what in (f"status {run_id}", f"logs {run_id} --follow", f"cancel {run_id}")
        ]
    await_end(int(found[1]))


def test_a_launcher_that_can_not_tell_what_it_has_started_ends_it(call, tmp_path):
    """Nobody would know of it."""
    report = tmp_path / "reports" / "report"
    report.parent.mkdir()
    report.touch()
    loses_it = """
submit = local.submit
def submit_and_lose(plan):
    jobs = submit(plan)
    shutil.rmtree("reports")
    return jobs
local.submit = submit_and_lose
"""
    script = SCRIPT.replace("@hydra.main", f"import shutil{loses_it}\n@hydra.main")
    (tmp_path / "train.py").write_text(script)
    done = call("train.py", "+launcher.env.PLOT=hang", **{detach.VARIABLE: str(report)})
    assert done.returncode == 1
    submission = tmp_path / "out" / ".hpc_elastic"
    log = (submission / "launcher-0.log").read_text()
    assert "the runs were ended" in log and "FileNotFoundError" in log
    (task,) = json.loads((submission / "local-tasks.json").read_text()).values()
    assert task["state"] == "ENDED" and is_gone(task["pid"])


def test_a_command_runs_behind_the_one_that_has_submitted_it(tmp_path):
    """`run --detach`: the id is that of its folder, and what is wrong is said at once."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")}

    def call(*argv: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "hpc_elastic", *argv]
        return subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)

    settings = ["--nproc-per-node", "1", "agent.warm_workers=false"]
    done = call("run", "--detach", "--json", *settings, "--", "sh", "-c", "sleep 1; touch ran")
    (told,) = json.loads(done.stdout)
    ((run_id, run),) = [entry.values() for entry in told["runs"]]
    assert (told["launcher"], Path(run)) == ("local", tmp_path / "runs" / run_id)
    assert not (tmp_path / "ran").exists()
    waited = call("wait", run_id, "--json")
    assert json.loads(waited.stdout)[0]["status"] == "succeeded" and (tmp_path / "ran").exists()
    await_end(told["pid"])
    refused = call("run", "--detach", "--json", "--nodes", "0", "--", "true")
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["error"]["code"] == "config-error"
