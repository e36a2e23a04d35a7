"""The command hpc-elastic doctor, where there is no Slurm."""

import json
import os
import subprocess
import sys

import pytest

from helps import not_in_help
from hpc_elastic.cli.check import doctor_command
from hpc_elastic.cli.main import main


@pytest.fixture
def without_slurm(tmp_path, monkeypatch):
    """An empty directory, and a PATH without Slurm's commands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def test_without_slurm_it_says_so_and_looks_at_the_rest(without_slurm, capsys):
    """The exit code is 1; a probe is not tried."""
    assert main(["doctor", "--json", "--probe"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not not_in_help("doctor", report)
    verdicts = {f["check"]: f["verdict"] for f in report["findings"]}
    assert verdicts["host.commands"] == verdicts["slurm.controller"] == "fail"
    assert verdicts["directory.link"] == "ok"
    assert report["verdict"] == "fail" and report["versions"]["slurm"] is None


def test_people_get_a_table(without_slurm, capsys):
    """With what to do, and no colours where no terminal is."""
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "Shared directory" in output and "module load slurm" in output
    assert "\x1b" not in output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["partiton=gpu"], "partition"),
        (["launcher=local"], "only slurm"),
        (["--probe-nodes=0"], "1<=x"),
        (["--nodes=0"], "nodes=0: allowed"),
        (["--partiton", "gpu"], "partition"),
        (["--launcher.nods", "1"], "nods"),
    ],
)
def test_wrong_arguments_are_refused(words, says, capsys):
    """The exit code is 2."""
    assert main(["doctor", *words]) == 2
    assert says in capsys.readouterr().err


def test_settings_complete_in_the_shell():
    """As the keys that a script has."""
    (argument,) = (p for p in doctor_command.params if p.name == "settings")
    with doctor_command.make_context("doctor", []) as ctx:
        found = [item.value for item in argument.shell_complete(ctx, "par")]
    assert found == ["partition="]


def test_it_imports_no_torch(tmp_path):
    """A login node answers at once, with its version of torch none the less."""
    argv = [sys.executable, "-X", "importtime", "-m", "hpc_elastic", "doctor", "--json"]
    env = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert json.loads(done.stdout)["versions"]["torch"]
    assert "hpc_elastic.doctor.examine" in names and "torch" not in names
