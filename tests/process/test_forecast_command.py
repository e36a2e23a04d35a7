"""`submit --test-only` on a cluster of shell scripts, which print what Slurm's commands print."""

import json
import os
import time
from pathlib import Path

import pytest

from helps import not_in_help
from hpc_elastic.cli.main import main

HOUR = 3600
CONFIG = (
    "PrivateData = none\nSchedulerType = sched/backfill\nMaxArraySize = 1001\nKillWait = 30 sec"
)
PARTITION = (
    "PartitionName=gpu Default=YES DefaultTime=NONE MaxTime=1-00:00:00 PreemptMode=OFF State=UP "
    "TotalNodes=4 MaxNodes=UNLIMITED GraceTime=0"
)


def date(hours: float) -> str:
    """A time from now as Slurm prints it, of local time."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + hours * HOUR))


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Return a function that writes what the commands print; `cluster.calls()` lists the calls.

    Two nodes are planned in three hours for a job of ten hours, one is busy for three hours.
    """
    log, folder = tmp_path / "log", tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "train.py").write_text(
        "import hydra\n"
        "@hydra.main(version_base=None, config_path=None)\ndef main(cfg): pass\n"
        "if __name__ == '__main__': main()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def write(config=CONFIG, queue=None, test="exit 0", states="n1|planned\nn2|planned\n", ran=()):
        planned = f"PENDING||n[1-3]|{date(3)}|N/A|10:00:00|3|N/A|8|90|gpu|Resources|"
        running = f"RUNNING|n3||{date(-1)}|{date(3)}|4:00:00|1|N/A|7|90|gpu|None|"
        lines = [running, planned] if queue is None else queue
        scripts = {
            "scontrol": f'case "$*" in *partition*) echo "{PARTITION}";; *) echo "{config}";; esac',
            "sinfo": f'echo "{states}n3|allocated\nn4|drained"',
            "squeue": "echo '" + "\n".join(lines) + "'",
            "sbatch": test,
            "sacct": "echo '" + "\n".join(ran) + "'" if ran else "exit 1",
            "sacctmgr": "echo 'standby|NoReserve|requeue|00:01:00||'",
        }
        for name, text in scripts.items():
            path = folder / name
            path.write_text(f'#!/bin/sh\necho {name} "$*" >> {log}\n{text}\n')
            path.chmod(0o755)

    write.calls = lambda: log.read_text().splitlines()
    return write


def starts(hours: float) -> str:
    """A fake sbatch that would start any job at one time."""
    return f"echo 'sbatch: Job 9 to start at {date(hours)} a using 1 processors on nodes n1' >&2"


def when(capsys, *overrides: str) -> dict:
    """What the command prints as JSON."""
    assert main(["submit", "--test-only", "--json", "train.py", "+launcher=slurm", *overrides]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_shorter_time_limit_that_fits_in_a_gap_is_found(cluster, capsys, tmp_path):
    """Two nodes are idle until a planned job: two hours start now, and twelve after that job."""
    begun = time.time()  # of the plans; the command may take long to start
    cluster(test=starts(0))
    found = when(capsys, "nodes=1:4", "launcher.time=12:00:00")
    assert not not_in_help("submit", found) and found["partition"] == "gpu"
    assert (found["idle"], found["planned"], found["busy"], found["out_of_service"]) == (2, 2, 1, 1)
    own, shorter = found["shapes"]
    assert (own["time_limit_s"], shorter["time_limit_s"]) == (12 * HOUR, 2 * HOUR)
    assert own["starts_at"] - begun == pytest.approx(13 * HOUR, abs=10)
    assert shorter["starts_at"] - found["time"] < 60 and found["soonest"] == 1
    assert shorter["growth"][0]["nodes"] == 2
    assert len(found["notes"]) == 1 and "`sbatch --test-only` counts" in found["notes"][0]
    assert found["test_only"]["1"] - found["time"] < 60 and found["waiting_jobs"] == 1
    assert not [path for path in tmp_path.iterdir() if path.name in ("multirun", "outputs")]


def test_a_run_of_listed_sizes_has_no_other(cluster, capsys):
    """Two nodes are idle, and one of them trains until there are three."""
    cluster()
    given = ["nodes=1:3", "nproc_per_node=2", "launcher.time=2:00:00"]
    found = when(capsys, *given, "launcher.world_sizes=[2,6]")
    assert [step["nodes"] for step in found["shapes"][0]["growth"]] == [1, 3]
    assert when(capsys, *given)["shapes"][0]["growth"][0]["nodes"] == 2


def test_a_standby_qos_starts_in_the_gap_with_its_own_time_limit(cluster, capsys):
    """No shorter time limit is better; that it is preempted then is a note."""
    cluster(test=starts(0))
    found = when(capsys, "nodes=1:4", "launcher.time=12:00:00", "launcher.qos=standby")
    (own,) = found["shapes"]
    assert own["starts_at"] - found["time"] < 60 and own["growth"][0]["nodes"] == 2
    assert any("QOS standby has NoReserve" in note for note in found["notes"])
    assert len(cluster.calls()) <= 14


def test_slots_between_other_jobs_are_in_the_forecast(cluster, capsys):
    """With time_min and with harvest a task of twelve hours starts in the gap of three."""
    cluster(test=starts(0))
    for override, why in {
        "launcher.time_min=30": "launcher.time_min=30: tasks start in gaps",
        "launcher.harvest=auto": "launcher.time_min=5: tasks start in gaps",
    }.items():
        found = when(capsys, "nodes=1:4", "launcher.time=12:00:00", override)
        (own,) = found["shapes"]
        assert own["time_limit_s"] == 12 * HOUR and own["growth"][0]["nodes"] == 2
        assert own["starts_at"] - found["time"] < 60
        assert any(note.startswith(why) for note in found["notes"])
    own, *_ = when(capsys, "nodes=1:4", "launcher.time=12:00:00", "launcher.time_min=5:00:00")[
        "shapes"
    ]
    assert own["starts_at"] - found["time"] > 2 * HOUR


def test_each_pool_is_in_the_forecast(cluster, capsys):
    """Two nodes for twelve hours, after the planned job, and two more in the gap before it."""
    cluster(test=starts(0))
    pools = "launcher.pools=[{nodes: 1}, {nodes: 3, time: '60'}]"
    found = when(capsys, "nodes=1:4", "launcher.time=12:00:00", pools)
    own = found["shapes"][0]
    assert own["time_limit_s"] == 12 * HOUR and own["growth"][0]["nodes"] == 2
    assert sum("sbatch --test-only" in call for call in cluster.calls()) == 2, "each array once"


def test_the_forecast_in_words(cluster, capsys):
    """Which time limit starts soonest, and in place of what; without a word of the script's."""
    cluster(test=starts(0))
    arguments = ["train.py", "+launcher=slurm", "nodes=1:4", "launcher.time=12:00:00"]
    assert main(["submit", "--test-only", *arguments]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("gpu: 4 nodes, 2 idle (2 planned for other jobs), 1 busy, 1 out")
    assert "launcher.time=120 starts soonest: now with 2 nodes; with 12 h the start is at" in shown
    assert "2 now, 3 at" in shown and "4 unknown" in shown


def test_few_commands_are_called(cluster, capsys):
    """Thirteen at most with those of the dry run, for any number of nodes; a test for each size."""
    cluster(test=starts(0))
    when(capsys, "nodes=2:4", "launcher.time=12:00:00")
    calls = cluster.calls()
    assert len(calls) <= 13, calls
    tests = [call.removeprefix("sbatch --test-only ") for call in calls if "sbatch" in call]
    flags = [test.rpartition(" ")[0] for test in tests]
    assert flags == [f"--nodes={n} --ntasks={n} --array=0" for n in (1, 2, 4)]


def test_a_start_is_learned_from_jobs_that_ended(cluster, capsys):
    """All jobs of a user run for a quarter of their limit: the next one ends in half an hour."""
    ran = [f"{i}|COMPLETED|eve|gpu|01:00:00|04:00:00|{date(-i)}" for i in range(1, 40)]
    ran += ["7|RUNNING|eve|gpu|00:30:00|04:00:00|Unknown"]
    queue = [f"RUNNING|n3||{date(-0.5)}|{date(3.5)}|4:00:00|1|N/A|7|90|gpu|None|"]
    cluster(test=starts(0), ran=ran, queue=queue, states="")
    arguments = ["train.py", "+launcher=slurm", "nodes=1", "launcher.time=60"]
    found = when(capsys, *arguments[2:])
    (own,), now = found["shapes"], found["time"]
    assert not not_in_help("submit", found) and own["starts_at"] - now > 3.4 * HOUR
    learned = [at - now for at in own["learned"]["1"].values()]
    assert learned == sorted(learned) and learned[1] == pytest.approx(HOUR / 2, abs=60)
    assert found["learned_from"] == "learned from 39 ended jobs (sacct)"
    assert main(["submit", "--test-only", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "The run starts in 30 to " in shown and "starts: learned from 39 ended jobs" in shown


def test_on_an_empty_queue_what_sbatch_knows_besides_counts(cluster, capsys):
    """For example a reservation, although the nodes are idle."""
    begun = time.time()
    cluster(queue=[], test=starts(5), states="n1|idle\nn2|idle\n")
    found = when(capsys, "nodes=1:2")
    assert found["shapes"][0]["starts_at"] - begun == pytest.approx(5 * HOUR, abs=10)


def test_what_is_not_known_is_named(cluster, capsys):
    """Hidden jobs, no backfill, jobs without a plan, shares of nodes, features of nodes."""
    config = CONFIG.replace("none", "jobs,usage").replace("backfill", "builtin")
    queue = ["PENDING||(null)|N/A|N/A|10:00:00|1|0-9%2|8|90|gpu|Priority|"]
    cluster(config, queue, states="n1|planned\nn2|idle\n")
    found = when(capsys, "nodes=1:4", "launcher.gpus_per_node=1", "launcher.constraint=a100")
    notes = "\n".join(found["notes"])
    for what in (
        "PrivateData hides", "sched/builtin", "1 busy node with hidden jobs", "1 idle node planned",
        "10 waiting jobs without a visible", "share of a node", "launcher.constraint=a100",
    ):  # fmt: skip
        assert what in notes
    assert found["unknown"] == 2 and found["shapes"][0]["time_limit_s"] == 24 * HOUR


def test_what_sbatch_refuses_is_an_error_with_its_key(cluster, capsys):
    """As at a submission. A size that it refuses is a note."""
    cluster(test="echo 'sbatch: error: Invalid qos specification' >&2; exit 1")
    assert main(["submit", "--test-only", "train.py", "+launcher=slurm", "launcher.qos=x"]) == 1
    assert "launcher.qos" in capsys.readouterr().err
    refuses = 'case "$*" in *nodes=4*) echo "allocation failure: too many" >&2; exit 1;; esac; '
    cluster(test=refuses + starts(0))
    notes = when(capsys, "nodes=1:4")["notes"]
    assert "sbatch --test-only, 4 nodes: allocation failure: too many" in notes


def test_only_slurm_has_a_queue(cluster, capsys):
    """A script that fails is named with its exit code."""
    cluster()
    assert main(["submit", "--test-only", "train.py", "+launcher=local"]) == 1
    assert "launcher=slurm" in capsys.readouterr().err
    Path("train.py").write_text("import hydra\nraise SystemExit(7)")
    assert main(["submit", "--test-only", "train.py"]) == 1
    assert "train.py ended with exit code 7" in capsys.readouterr().err
