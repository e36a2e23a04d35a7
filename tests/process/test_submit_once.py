"""`hpc-elastic submit --id`: a call that is repeated, also after a kill, submits nothing twice."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from group import eventually
from test_detach import FAKE_TASK, QUICK, ROOT, await_end

from helps import not_in_help
from hpc_elastic.launcher import detach
from hpc_elastic.launcher.detach import submit_once

DEADLINE_S = 60.0
SCRIPT = f"""
import os, select, signal, sys
import hydra
from hpc_elastic.launcher import detach, local, submit
from pathlib import Path

local.task_command = lambda file: [sys.executable, {FAKE_TASK!r}, str(file)]

def at(stage):
    kill, file = os.environ.get("KILL", ""), Path("killed")
    if kill.endswith(stage) and not file.exists():
        file.touch()
        parent = os.pidfd_open(os.getppid())
        signal.pidfd_send_signal(parent, signal.SIGKILL)
        if kill.startswith("both-"):
            os.kill(os.getpid(), signal.SIGKILL)
        select.select([parent], [], [])  # it has ended

def hook(module, name, stage):
    function = getattr(module, name)
    def hooked(*args, **options):
        returned = function(*args, **options)
        at(stage)
        return returned
    setattr(module, name, hooked)

hook(detach, "report_preparing", "preparing")
hook(submit, "write", "written")
hook(detach, "report_starting", "starting")
hook(submit, "start", "started")
hook(detach, "report_submission", "reported")

@hydra.main(version_base=None, config_path=".", config_name="config")
def main(cfg):
    raise AssertionError("runs in workers only")

if __name__ == "__main__":
    at("script")
    main()
"""
SLURM = ["+launcher=slurm", "nodes=1", "nproc_per_node=1"]
STAGES = ["script", "preparing", "written", "starting", "started", "reported"]


SAME, OTHER = "out", "out/${now:%H-%M-%S-%f}"
ALL = [
    *((SAME, "both-", stage) for stage in STAGES),
    (OTHER, "both-", "written"), (OTHER, "both-", "started"),
    (SAME, "", "script"), (SAME, "", "starting"),
]  # fmt: skip
SHOWN = (SAME, "both-", "started"), (SAME, "", "starting"), (OTHER, "both-", "written")
CASES = [c if c in SHOWN else pytest.param(*c, marks=pytest.mark.long) for c in ALL]
"""Sweep directory, whether the launcher is killed with its command, and the moment of the kill."""


@pytest.fixture(params=[SAME])
def folder(tmp_path, request):
    """A user's folder, with a sweep directory that is always the same, or always another one."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config.yaml").write_text(
        f"lr: 0.1\nhydra: {{sweep: {{dir: '{request.param}'}}}}\n"
    )
    return tmp_path


class Submit:
    """Calls of `hpc-elastic submit --id one --json train.py`, with these overrides."""

    def __init__(self, folder: Path, overrides, env) -> None:
        self.folder, self.overrides, self.env, self.num_calls = folder, overrides, env, 0

    def start(self, *more: str, name: str = "one", **variables: str) -> subprocess.Popen[bytes]:
        """Start a call, with more overrides and variables."""
        self.num_calls += 1
        argv = ["submit", "--id", name, "--json", "train.py", *self.overrides, *more]
        state = {"XDG_STATE_HOME": str(self.folder / "state"), "PYTHONPATH": str(ROOT)}
        with self.output("out").open("w") as out, self.output("err").open("w") as err:
            return subprocess.Popen(
                [sys.executable, "-m", "hpc_elastic", *argv],
                cwd=self.folder, env={**self.env, **state, **variables}, stdout=out, stderr=err,
            )  # fmt: skip

    def output(self, name: str, number: int = 0) -> Path:
        """Return the file of the output of a call, by default of the last one."""
        return self.folder / f"{number or self.num_calls}.{name}"

    def kill(self, **variables: str) -> None:
        """Make a call that is killed."""
        assert self.start(**variables).wait(DEADLINE_S) == -signal.SIGKILL

    def __call__(self, *more: str, **options: str) -> tuple[int, list, str]:
        """Return the exit code of a call, its JSON, and its standard error."""
        code = self.start(*more, **options).wait(DEADLINE_S)
        out, err = (self.output(name).read_text() for name in ("out", "err"))
        return code, json.loads(out) if code == 0 else [], err

    def runs(self) -> list[Path]:
        """The runs that were started, by their job ids."""
        return sorted(self.folder.rglob("array-*.jobid"))


@pytest.fixture
def local(folder):
    return Submit(folder, QUICK, os.environ)


@pytest.fixture
def on_slurm(folder, fake_slurm):
    return Submit(folder, SLURM, fake_slurm.env)


def jobs(on_slurm: Submit) -> set[str]:
    listed = subprocess.run(["squeue", "-h", "-t", "all", "-o", "%A"], env=on_slurm.env,
                            capture_output=True, text=True, check=True)  # fmt: skip
    return set(listed.stdout.split())


def test_a_repeated_call_prints_the_same_and_submits_nothing(local):
    """With other overrides it is refused, and both are named; another id is another submission."""
    code, (first,), err = local()
    assert code == 0 and first["repeated"] is False and not not_in_help("submit", first), err
    code, (again,), err = local()
    assert code == 0 and again == {**first, "repeated": True}, err
    await_end(first["pid"])
    code, (again,), _ = local()
    assert again == {**first, "repeated": True} and len(local.runs()) == 1
    code, _, err = local("lr=0.2")
    assert code == 2 and "lr=0.2" in err and f"{QUICK[-1]}`" in err
    code, _, err = local(name="a/b")
    assert code == 2 and "letters, digits" in err
    assert len(local.runs()) == 1
    code, (other,), _ = local("hydra.sweep.dir=other", name="two")
    assert code == 0 and other["runs"] != first["runs"] and len(local.runs()) == 2
    await_end(other["pid"])


def test_a_call_that_submitted_nothing_is_mended_under_its_id(on_slurm):
    """Its error is on standard output: the launcher's own, or that standard error has more."""
    for override, error in (
        ("launcher.tim=5", ("config-error", "launcher.tim")),
        ("epoch=5", ("script-error", None)),
    ):
        code, _, err = on_slurm(override)
        found = json.loads(on_slurm.output("out").read_text())["error"]
        assert code == 1 and (found["code"], found["key"]) == error and found["remedy"], err
        assert override.partition("=")[0] in err
    code, _, err = on_slurm("lr=0.2")
    assert code == 0 and len(jobs(on_slurm)) == 1, err
    code, _, err = on_slurm("lr=0.3")
    assert code == 2 and "give another id" in err and len(jobs(on_slurm)) == 1


@pytest.mark.parametrize(("folder", "who", "stage"), CASES, indirect=["folder"])
def test_a_killed_call_of_local_runs_is_repeated(local, stage, who):
    """The command alone, or its launcher too: after the next call exactly one run was started."""
    local.kill(KILL=f"{who}{stage}")
    code, (told,), err = local()
    assert code == 0, err
    assert len(local.runs()) == 1
    (run,) = told["runs"]
    assert Path(run["run"], "run.json").exists()
    if who and stage in ("script", "preparing", "written", "starting"):
        assert told["repeated"] is False
    code, (again,), _ = local()
    assert code == 0 and again == {**told, "repeated": True}
    await_end(told["pid"])
    assert len(local.runs()) == 1


@pytest.mark.parametrize(
    ("folder", "who", "stage"),
    [c for c, key in zip(CASES, ALL, strict=True) if key[1:] != ("both-", "starting")],
    indirect=["folder"],
)  # fmt: skip
def test_a_killed_call_of_slurm_jobs_is_repeated(on_slurm, stage, who):
    """As for local runs."""
    on_slurm.kill(KILL=f"{who}{stage}")
    code, (told,), err = on_slurm()
    assert code == 0, err
    assert len(on_slurm.runs()) == 1 and jobs(on_slurm) == set(told["job_ids"])
    code, (again,), _ = on_slurm()
    assert code == 0 and again == {**told, "repeated": True} and len(jobs(on_slurm)) == 1


SBATCH = """#!/bin/sh
# the launcher and its command are killed while this runs; whether the job is submitted is random
launcher=$PPID
command=$(ps -o ppid= -p $launcher)
kill -9 $command $launcher
sleep 0.5
[ "$LOSE" = 1 ] || exec {real} "$@"
"""


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_call_that_was_killed_with_sbatch_at_work(on_slurm, fake_slurm, is_lost, tmp_path):
    """Its job is adopted; if Slurm lists none, the call is refused, and a late task would end."""
    binary = tmp_path / "bin" / "sbatch"
    binary.parent.mkdir()
    binary.write_text(SBATCH.replace("{real}", str(fake_slurm.folder / "bin" / "sbatch")))
    binary.chmod(0o755)
    path = f"{binary.parent}:{on_slurm.env['PATH']}"
    on_slurm.kill(PATH=path, LOSE=str(int(is_lost)))
    code, told, err = on_slurm()
    if is_lost:
        assert code == 1 and str(tmp_path / "out") in err and "another --id" in err
        assert (tmp_path / "out" / "0" / "cancelled.json").exists() and not jobs(on_slurm)
        return
    assert code == 0 and told[0]["repeated"] is True, err
    assert jobs(on_slurm) == set(told[0]["job_ids"]) and len(on_slurm.runs()) == 1


def test_a_call_on_another_host_is_refused(local, tmp_path):
    """Only the first host knows whether the first call is at work."""
    local.kill(KILL="both-preparing")
    record = tmp_path / "state" / "hpc_elastic" / "ids" / "one.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "host": "login7"}))
    code, _, err = local()
    assert code == 1 and "only login7 knows" in err and not local.runs()


def test_a_call_at_work_is_waited_for(on_slurm):
    """Two calls at once submit one run, and print it."""
    calls = [on_slurm.start() for _ in range(2)]
    eventually(lambda: all(call.poll() is not None for call in calls), DEADLINE_S)
    told = [json.loads(on_slurm.output("out", number).read_text())[0] for number in (1, 2)]
    assert sorted(entry.pop("repeated") for entry in told) == [False, True]
    assert told[0] == told[1] and len(jobs(on_slurm)) == 1


def test_an_interrupted_call_may_submit_again(tmp_path, monkeypatch):
    """Its launcher has taken back what it had started."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def interrupt(report, inherited):
        detach.append(report, {"stage": "starting", "sweep": "/s"})
        raise KeyboardInterrupt

    told = {"launcher": "slurm", "runs": []}
    with pytest.raises(KeyboardInterrupt):
        submit_once("one", "train.py", [], interrupt)
    assert submit_once("one", "train.py", [], lambda *_: (0, [told])) == (
        0, [{**told, "repeated": False}],
    )  # fmt: skip
