"""Why a run waits, in one line of words: `status`, `list` and the line of its launcher."""

import json
import signal

import pytest
from sweeps import busy, eventually
from test_status_of_runs import command

HELD = [
    ("launcher.sbatch={begin: now+1hour}", "it may not start before its begin time"),
    ("launcher.sbatch={dependency: 'afterany:BUSY'}", "the job that it depends on has not ended"),
    ("launcher.time=10", "the nodes that fit it are in use"),
]


@pytest.mark.long
@pytest.mark.parametrize(("setting", "words"), HELD, ids=["begin", "dependency", "resources"])
def test_a_run_says_why_it_waits(slurm, sweep, tmp_path, setting, words):
    """In the same words everywhere."""
    other = busy(slurm, len(slurm.nodes))
    try:
        run = sweep("nodes=1:2", setting.replace("BUSY", other))

        def found():
            if not (run.run() / "run.json").exists():
                return None
            return json.loads(command(slurm, "status", run.run(), "--json"))["why_waits"]

        eventually(lambda: words in str(found()), words)
        assert words in " ".join(command(slurm, "status", run.run()).split())
        listed = json.loads(command(slurm, "list", "--json"))
        assert words in next(r["why_waits"] for r in listed if r["run"] == str(run.run()))
        run.process.send_signal(signal.SIGINT)
        assert f": {words}" in run.process.communicate(timeout=60)[0]
        command(slurm, "cancel", run.run())
    finally:
        slurm.run(["scancel", other])
