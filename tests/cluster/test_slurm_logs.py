"""The output of a run on a real Slurm, followed while nodes come late, are taken, and come back."""

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from sweeps import PATIENCE_S, busy, eventually, hosts

from hpc_elastic.run.directory import Submission

TALK = """
import os, sys, time
from pathlib import Path
import hydra
from hpc_elastic.shared_files import is_there

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    said, streams = 0, (sys.stdout, sys.stderr)
    while not is_there(Path({end!r})):
        said += 1
        print("rank", os.environ["RANK"], "line", said, flush=True, file=streams[said % 2])
        time.sleep(0.1)

if __name__ == "__main__":
    main()
"""


def logs(run: Path, *options: str) -> list[str]:
    """The command line of `hpc-elastic logs`."""
    return [sys.executable, "-m", "hpc_elastic", "logs", str(run), "--json", "--agent", *options]


@pytest.fixture
def follow(slurm, tmp_path):
    """Start to follow a run; returns the process and what it has printed so far."""
    processes = []

    def start(run: Path):
        printed = tmp_path / "printed"
        with printed.open("w") as out:
            argv = slurm.on_login(logs(run, "--follow", "--since", "1h"))
            processes.append(subprocess.Popen(argv, env={**os.environ, **slurm.env}, stdout=out))
        return processes[-1], printed

    yield start
    for process in processes:
        process.kill()
        process.wait()


def parsed(text: str) -> list[dict]:
    """Lines as objects, a torn last one left out."""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def says(printed: Path, **place: int) -> bool:
    """Whether something was shown that a worker in some place has written."""
    lines = [line for line in parsed(printed.read_text()) if line["rank"] is not None]
    return any(place.items() <= line.items() for line in lines)


def by_file(lines: list[dict]) -> dict[tuple, list[str]]:
    """What each worker's file held, in the order in which it was shown."""
    found: dict[tuple, list[str]] = {}
    for line in lines:
        if line["rank"] is not None:
            place = (line["task"], line["attempt"], line["round"], line["rank"], line["stream"])
            found.setdefault(place, []).append(line["text"])
    return found


def written(run: Path) -> dict[tuple, list[str]]:
    """What each worker's file holds."""
    found = {}
    for file in run.glob("tasks/*/attempt-*/round-*.rank-*.???"):
        round_, rank = (int(part.partition("-")[2]) for part in file.stem.split("."))
        attempt = int(file.parent.name.removeprefix("attempt-"))
        place = (file.parent.parent.name, attempt, round_, rank, file.suffix[1:])
        if file.stat().st_size:
            found[place] = file.read_text().splitlines()
    return found


@pytest.mark.long
@pytest.mark.nfs
def test_a_run_is_followed_across_a_late_node_and_a_requeue(slurm, sweep, follow, tmp_path):
    """Every line of every file once, in its order, to the end of the run; and again afterwards."""
    other = busy(slurm, 3)
    script = tmp_path / "talk.py"
    script.write_text(TALK.format(end=str(tmp_path / "hurry")))
    s = sweep("+launcher=slurm", "nodes=1:2", "launcher.scale_up=immediate", script=script)
    eventually(lambda: (s.run() / "run.json").exists(), "it is submitted")
    following, printed = follow(s.run())
    eventually(lambda: s.group_sizes() == [1], "it trains alone")
    slurm.run(["scancel", other])
    eventually(lambda: s.group_sizes()[-1] == 2, "another node joins")
    eventually(lambda: says(printed, rank=1), "what it says is seen")
    slurm.preempt(hosts(s)[1:], for_s=3)
    eventually(lambda: s.group_sizes()[-1] == 1, "it is taken")
    eventually(lambda: s.group_sizes()[-1] == 2, "it is back")
    eventually(lambda: says(printed, attempt=1), "what it says after its requeue is seen")
    output = s.output()
    assert s.result()["status"] == "succeeded", output
    assert following.wait(PATIENCE_S) == 0

    followed = parsed(printed.read_text())
    assert by_file(followed) == written(s.run())
    events = s.events("task")
    workers = [line for line in followed if line["rank"] is not None]
    assert {(line["task"], line["attempt"], line["host"]) for line in workers} <= {
        (event["task"], event["attempt"], event["host"]) for event in events
    }
    captured = Counter(line["task"] for line in followed if line["stream"] == "slurm")
    assert set(captured) == {event["task"] for event in events}
    assert len(list(Submission(s.folder / ".hpc_elastic").logs.glob("*.log.times"))) == len(
        captured
    )

    env = {**os.environ, **slurm.env}
    done = subprocess.run(
        slurm.on_login(logs(s.run())), env=env, capture_output=True, text=True, check=True
    )
    again = parsed(done.stdout)
    assert by_file(again) == written(s.run())
    assert all(a["time"] <= b["time"] for a, b in pairwise(again))
