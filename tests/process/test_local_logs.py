"""The output of a run of two nodes on this machine, while it trains and afterwards."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disks import full, mounted
from group import eventually
from turns import LAST_OF_FIRST_ROUND, TURNS, take_turns

from hpc_elastic import launch
from hpc_elastic.agent.output_files import OutputTimes
from hpc_elastic.cli.main import main
from hpc_elastic.run.log_index import Index

START_S = 90.0
EXPECTED = [
    *(f"round 1 turn {n}" for n in range(LAST_OF_FIRST_ROUND + 1)),
    *(f"round 2 turn {n}" for n in range(TURNS)),
]


class Following:
    """`hpc-elastic logs RUN --follow --json`, as a process of its own."""

    def __init__(self, run: Path, printed: Path, *options: str) -> None:
        self._printed = printed
        argv = [sys.executable, "-m", "hpc_elastic", "logs", str(run), "--follow", "--json"]
        with printed.open("w") as out:
            self.process = subprocess.Popen([*argv, *options], stdout=out, stderr=subprocess.PIPE)

    def turns(self) -> list[str]:
        """What the workers have said so far, as it was printed."""
        lines = self._printed.read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [line["text"] for line in found if "turn" in line["text"]]

    def end(self) -> str:
        """Wait for its end; return its standard error."""
        _, errors = self.process.communicate(timeout=START_S)
        assert self.process.returncode == 0, errors
        return errors.decode()


@pytest.fixture
def follow(tmp_path):
    """Start to follow runs; ends with the test."""
    made = []

    def start(run: Path, *options: str) -> Following:
        made.append(Following(run, tmp_path / f"printed-{len(made)}", *options))
        return made[-1]

    yield start
    for following in made:
        following.process.kill()
        following.process.wait()


def test_the_order_is_the_real_one_also_when_a_killed_worker_is_started_again(
    tmp_path, follow, capsys
):
    """Line by line across two nodes, whose workers write to different files, twice over.

    It is followed from before there is any output, to the end of the run, by itself.
    """
    run = tmp_path / "run"
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(
            launch, take_turns, str(tmp_path), nodes="2", nproc_per_node=1, launcher="local",
            run_dir=run, poll_interval_s=0.2, max_restarts=1, agent={"warm_workers": False},
        )  # fmt: skip
        eventually(lambda: result.done() or (run / "run.json").exists(), START_S)
        following = follow(run, "--since", "1h")
        eventually(lambda: result.done() or len(following.turns()) > LAST_OF_FIRST_ROUND, START_S)
        assert following.turns() == EXPECTED[: LAST_OF_FIRST_ROUND + 1]
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((tmp_path / "pid-1-1").read_text()), signal.SIGKILL)
        assert result.result(START_S).restarts == 1
    told = following.end()
    assert following.turns() == EXPECTED
    assert "it has ended: succeeded" in told

    capsys.readouterr()  # of the launcher
    assert main(["logs", str(run), "--json", "--grep", "turn"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in found] == EXPECTED
    assert all(line["timed"] for line in found)
    by_rank = {(line["rank"], line["stream"], line["host"][-2:]) for line in found}
    assert {(rank, stream) for rank, stream, _ in by_rank} == {(0, "out"), (1, "err")}
    assert {host for *_, host in by_rank} == {"-0", "-1"}, "nodes of one machine are told apart"


def test_a_full_disk_costs_the_times_only_as_long_as_it_is_full(tmp_path, caplog):
    """It is told once, however many files there are and however often it was tried."""
    with mounted(tmp_path / "disk", "1m") as disk:
        files = [disk / f"round-1.rank-{rank}.out" for rank in range(3)]
        for file in files:
            file.write_text("as much as there was room for\n")
        times = OutputTimes()
        with full(disk), caplog.at_level(logging.WARNING):
            times.new_round(files)
            times.start()
            eventually(lambda: "No space left" in caplog.text)
            tried = [times._round[n] for n in range(3)]
            eventually(lambda: all(file._index is not None for file in tried))
        eventually(lambda: all(Index(file).covered == file.stat().st_size for file in files))
        times.close()
    assert caplog.text.count("less exact") == 1
