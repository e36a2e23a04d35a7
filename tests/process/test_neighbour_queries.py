"""How often a leader queries Slurm whose run gives way; commands of a fake Slurm, virtual time."""

import json
import shutil
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from arrays import run_of
from hpc_elastic.run.directory import Submission
from hpc_elastic.site import QueuePolicy, QueueQuestion, neighbours, siblings
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.testing.fake_slurm import FakeSlurm

MINUTES = 3
COMMANDS = ("squeue", "sinfo", "scontrol")
SHIM = """#!/bin/sh
echo {name} >> {log}
exec {program} "$@"
"""


class Leader:
    """The policy of a run on two of three nodes, which is ticked each 5 s of virtual time."""

    def __init__(self, folder: Path, slurm: FakeSlurm, clock: SimpleNamespace, **terms) -> None:
        self._clock, self._log = clock, folder / "calls"
        shims = folder / "shims"
        shims.mkdir(parents=True)
        for name in COMMANDS:
            program = shutil.which(name, path=slurm.env["PATH"])
            (shims / name).write_text(SHIM.format(name=name, log=self._log, program=program))
            (shims / name).chmod(0o755)
        self.job = job = sbatch(slurm, "--array=0-1")
        run = run_of(folder, job, [(0, 0), (0, 1)], partition="low", whole_nodes=True, **terms)
        tasks = [{"dir": str(run.path), "slot": slot} for slot in range(2)]
        Submission(folder / ".hpc_elastic").array(0).tasks.write_text(json.dumps({"runs": tasks}))
        client = SlurmClient(env={**slurm.env, "PATH": f"{shims}:{slurm.env['PATH']}"})
        self._policy = QueuePolicy(run, run.load(), None, client)
        returnable = [(f"{job}_1", "node2")] if terms else []
        self._question = QueueQuestion(trains=True, returnable=returnable)

    def calls(self) -> Counter[str]:
        """Return the commands of some minutes."""
        self._log.write_text("")
        for _ in range(MINUTES * 12):
            self._clock.now_s += 5.0
            advice = self._policy.tick(self._question, ["node1", "node2"])
            assert not advice.returns
        return Counter(self._log.read_text().split())


def sbatch(slurm: FakeSlurm, *options: str) -> str:
    argv = ["sbatch", "--parsable", "--exclusive", "-o", "/dev/null", *options]
    return slurm.run([*argv, "--wrap", "sleep 600"]).stdout.strip()


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=time.time())
    virtual = SimpleNamespace(time=lambda: clock.now_s, monotonic=lambda: clock.now_s)
    for module in (neighbours, siblings):
        monkeypatch.setattr(module, "time", virtual)
    return clock


def test_a_leader_queries_more_only_while_others_wait(tmp_path, clock, caplog):
    """At most four commands a minute, and none while nobody waits."""
    with FakeSlurm(nodes=3) as slurm:
        usual = Leader(tmp_path / "off", slurm, clock)
        usual.calls()
        without = usual.calls()
        slurm.run(["scancel", usual.job])
        leader = Leader(tmp_path / "on", slurm, clock, give_way="on")
        leader.calls()  # the first minutes have what is asked once
        quiet = leader.calls()
        assert quiet.total() <= without.total(), (quiet, without)
        assert quiet["squeue"] <= without["squeue"]
        sbatch(slurm, "--nodes=3")
        busy = leader.calls()
        assert without.total() < busy.total() <= without.total() + 4 * MINUTES, (busy, without)
        assert not caplog.records
