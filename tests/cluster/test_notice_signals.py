"""Signals to a task whose batch script is ours: whoever sends them, the agent gets them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_elastic.config.schema import ContainerSettings, SlurmSettings
from hpc_elastic.launcher.batch_script import Script, render
from hpc_elastic.launcher.submit import read_template
from hpc_elastic.run.directory import Submission
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import Phase

DEADLINE_S = 60
AGENT = f"""#!{sys.executable}
import os, signal, sys, time
from pathlib import Path

log = Path(__file__).with_name(os.environ["SLURM_ARRAY_JOB_ID"])
def say(word):
    with log.open("a") as f:
        f.write(word + chr(10))
ends = [time.monotonic() + 600]
def tell(number, _):
    say(signal.Signals(number).name)
    if number == signal.SIGTERM:
        ends.append(time.monotonic() + 2)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, tell)
say("starts")
while "end" not in os.listdir(log.parent) and time.monotonic() < min(ends):
    time.sleep(0.05)
say("ends")
sys.exit(3)
"""
CONTAINER = '#!/bin/bash\n# Takes --bind MOUNTS IMAGE off, and runs the rest.\nshift 4\n"$@"\n'


@pytest.fixture
def client(slurm):
    """Return a client of the sandbox."""
    return SlurmClient(env={**os.environ, **slurm.env})


@pytest.fixture
def submit(slurm, tmp_path):
    """Yield a function that submits our script around a task that logs its signals."""
    for name, text in {"agent": AGENT, "apptainer": CONTAINER}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    submission = Submission(tmp_path / ".hpc_elastic")
    submission.logs.mkdir(parents=True)

    def start(**settings):
        asked = SlurmSettings(cpus_per_node=1, mem="1M", python=str(tmp_path / "agent"), **settings)
        script = Script(asked, "notice", 1, submission.path, 0, sys.executable, tmp_path)
        path = tmp_path / "script"
        path.write_text(render(script, read_template(None)))
        env = {**os.environ, **slurm.env}
        env["PATH"] = f"{tmp_path}:{env['PATH']}"
        done = subprocess.run(
            ["sbatch", "--parsable", path], env=env, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    yield start
    (tmp_path / "end").touch()


def words(folder: Path, job: str) -> list[str]:
    """What the task in a job has logged."""
    log = folder / job
    return log.read_text().split() if log.exists() else []


def wait_for(condition) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


SENT = {
    "--signal=USR2": "SIGUSR2",
    "--signal=TERM": "SIGTERM",
    "--batch --signal=USR2": "SIGUSR2",
    "--batch --signal=TERM": "SIGUSR2",  # srun would kill the task for a SIGTERM
    "--full --signal=USR2": "SIGUSR2",
}


def test_a_notice_reaches_the_task_however_it_is_sent(slurm, submit, client, tmp_path):
    """To the steps, to the batch script, to all; the task goes on, and its exit code is told."""
    jobs = {how: submit() for how in SENT}
    wait_for(lambda: all(words(tmp_path, job) for job in jobs.values()))
    for how, job in jobs.items():
        slurm.run(["scancel", *how.split(), f"{job}_0"])
    for how, job in jobs.items():
        wait_for(lambda job=job, how=how: SENT[how] in words(tmp_path, job))
    (tmp_path / "end").touch()
    tasks = {f"{job}_0" for job in jobs.values()}
    wait_for(lambda: {client.tasks(jobs.values())[task].phase for task in tasks} == {Phase.ENDED})
    assert {client.tasks(jobs.values())[task].state for task in tasks} == {"FAILED"}
    for how, job in jobs.items():
        assert set(words(tmp_path, job)) == {"starts", SENT[how], "ends"}, how


@pytest.mark.long
def test_another_signal_and_a_container_make_no_difference(slurm, submit, tmp_path):
    """launcher.preempt_signal names it; the runtime stands between srun and the task."""
    container = ContainerSettings("apptainer", "image.sif")
    job = submit(preempt_signal="USR1", container=container)
    wait_for(lambda: words(tmp_path, job))
    slurm.run(["scancel", "--batch", "--signal=USR1", f"{job}_0"])
    wait_for(lambda: "SIGUSR1" in words(tmp_path, job))
    assert set(words(tmp_path, job)) == {"starts", "SIGUSR1"}


@pytest.mark.long
def test_a_cancelled_task_gets_sigterm_and_its_time(slurm, submit, client, tmp_path):
    """A plain scancel: the task is told first, and may end by itself."""
    job = submit()
    wait_for(lambda: words(tmp_path, job))
    client.cancel([f"{job}_0"])
    wait_for(lambda: "SIGTERM" in words(tmp_path, job))
    assert client.tasks([job])[f"{job}_0"].phase in (Phase.COMPLETING, Phase.ENDED)
    wait_for(lambda: "ends" in words(tmp_path, job))
