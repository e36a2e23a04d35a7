"""`hpc-elastic submit --id` on a real Slurm: a call that was killed midway, and is repeated."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from sweeps import PATIENCE_S

from hpc_elastic.launcher import detach

SCRIPT = """
import hydra

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    with open("ran", "a") as file:
        file.write("once\\n")

if __name__ == "__main__":
    main()
"""
COMMAND = [sys.executable, "-m", "hpc_elastic"]
SUBMIT = ["submit", "--id", "one", "--json", "train.py", "+launcher=slurm", "nodes=1"]


@pytest.mark.parametrize(
    "stage", [pytest.param(detach.PREPARING, marks=pytest.mark.long), detach.STARTED]
)
def test_a_script_that_is_submitted_twice_with_one_id_runs_once(stage, slurm, tmp_path):
    """The first call and its launcher are killed before they submit, or once Slurm has the job."""
    (tmp_path / "train.py").write_text(SCRIPT)
    report = tmp_path / "state" / "hpc_elastic" / "ids" / "one.report"
    env = {**os.environ, **slurm.env, "XDG_STATE_HOME": str(tmp_path / "state")}

    def start(*argv: str) -> subprocess.Popen[str]:
        with (tmp_path / "err").open("w") as err:
            return subprocess.Popen(
                slurm.on_login([*COMMAND, *argv]), env=env, cwd=tmp_path, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err,
                start_new_session=True,
            )  # fmt: skip

    def call(*argv: str) -> list[dict[str, object]]:
        process = start(*argv)
        out, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, out + (tmp_path / "err").read_text()
        printed: list[dict[str, object]] = json.loads(out)
        return printed

    def jobs() -> set[str]:
        return set(slurm.run(["squeue", "-h", "-t", "all", "-o", "%F"]).stdout.split())

    def has_come() -> bool:
        return report.exists() and any(
            line.get("stage") == stage for line in detach.read_lines(report)
        )

    before, deadline = jobs(), time.monotonic() + PATIENCE_S
    first = start(*SUBMIT)
    while not has_come() and time.monotonic() < deadline:
        time.sleep(0.005)  # the launcher needs longer to end
    os.killpg(first.pid, signal.SIGKILL)
    assert first.communicate()[0] == "", "it was killed before it could print"
    (told,) = call(*SUBMIT)
    (again,) = call(*SUBMIT)
    assert again == {**told, "repeated": True} and jobs() - before == set(told["job_ids"])
    (ended,) = call("wait", str(told["sweep"]), "--json")
    assert ended["status"] == "succeeded" and len(call("list", "--json")) == 1
    assert (tmp_path / "ran").read_text() == "once\n"
