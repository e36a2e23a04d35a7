"""Runs that hang: who is named, what is written, that the run goes on. Real agents, no Slurm."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hpc_elastic.events import read_events

SCRIPT = textwrap.dedent(
    """
    import ctypes, os, signal, time
    import hydra
    import torch
    import torch.distributed as dist
    from hpc_elastic import report

    def get_stuck(how):
        if how == "sleep":
            time.sleep(3600)
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "gil":
            libc = ctypes.PyDLL(None)
            while True:
                libc.sleep(3600)

    @hydra.main(version_base=None)
    def main(cfg):
        dist.init_process_group("gloo")
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        for step in range(1, 9):
            if step == 5 and dist.get_rank() == cfg.rank and (first or cfg.get("always")):
                get_stuck(cfg.how)
            dist.all_reduce(torch.ones(1))
            report(step=step)
            time.sleep(0.3)
        dist.destroy_process_group()
        return step

    if __name__ == "__main__":
        main()
    """
)
NEVER_WRONG = textwrap.dedent(
    """
    import time
    import hydra
    import torch
    import torch.distributed as dist
    from hpc_elastic import report
    from hpc_elastic.control import busy

    def wait(how):
        until = time.monotonic() + 6
        with busy() if how == "busy" else __import__("contextlib").nullcontext():
            while time.monotonic() < until:
                if how == "report":
                    report()
                    time.sleep(0.2)
                elif how == "busy":
                    time.sleep(6)
                else:
                    sum(i * i for i in range(100_000))

    @hydra.main(version_base=None)
    def main(cfg):
        dist.init_process_group("gloo")
        for step in range(1, 7):
            if step == 5 and dist.get_rank() == 0:
                wait(cfg.how)
            dist.all_reduce(torch.ones(1))
            report(step=step)
            time.sleep(0.3)
        dist.destroy_process_group()
        return step

    if __name__ == "__main__":
        main()
    """
)


class Run:
    """One run of a script with `launcher=local`."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder = folder
        (folder / "script.py").write_text(script)

    def start(self, *overrides: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        argv = [
            sys.executable, "script.py", "+launcher=local", "+nproc_per_node=1",
            f"hydra.sweep.dir={self.folder / 'sweep'}", "launcher.agent.hang_after_s=2", *overrides,
        ]  # fmt: skip
        return subprocess.run(
            argv, cwd=self.folder, capture_output=True, text=True, timeout=120,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.folder / "sweep" / "0"

    def result(self) -> dict:
        """How it ended."""
        return json.loads((self.path / "result.json").read_text())

    def events(self, kind: str) -> list[dict]:
        """Its events of a kind."""
        return [e for e in read_events(self.path / "events") if e["kind"] == kind]


@pytest.mark.parametrize(
    ("how", "at"),
    [
        ("sleep", "in get_stuck"),
        pytest.param("stop", "stopped by a signal", marks=pytest.mark.long),
        ("gil", "in get_stuck"),
    ],
)
def test_a_rank_that_is_stuck_is_named_and_the_group_started_again(tmp_path, how, at):
    """Of three nodes one does not come to the collective: it is to blame, and the run succeeds."""
    run = Run(tmp_path, SCRIPT)
    done = run.start("nodes=3", f"+how={how}", "+rank=1")
    assert done.returncode == 0, done.stdout + done.stderr
    (hang,) = run.events("hang")
    (blamed,) = hang["ranks"]
    assert blamed["rank"] == 1 and at in blamed["at"]
    assert hang["others"].startswith("2 ranks are in all_reduce (script.py:")
    stacks = sorted(run.path.glob("tasks/*/attempt-*/round-1.rank-*.stack.txt"))
    assert [p.name.split(".")[1] for p in stacks] == ["rank-0", "rank-1", "rank-2"]
    assert "all_reduce" in stacks[0].read_text()
    assert ("get_stuck" in stacks[1].read_text()) == (how != "stop")
    (restart,) = run.events("restart")
    assert "rank 1 (local rank 0)" in restart["failure"] and "hung" in restart["failure"]
    assert (run.result()["restarts"], run.result()["rounds"]) == (1, 2)


def test_a_rank_that_is_stuck_again_ends_the_run_with_its_name(tmp_path):
    """Restarts are limited, and the user is told rank, host, place and the files."""
    run = Run(tmp_path, SCRIPT)
    done = run.start("nodes=2", "+how=sleep", "+rank=1", "+always=true", "launcher.max_restarts=1")
    assert done.returncode != 0
    failure = run.result()["failure"]
    assert (failure["phase"], failure["rank"]) == ("hang", 1)
    told = done.stdout + done.stderr
    assert "rank 1" in told and "hung" in told and "in get_stuck" in told and "stack.txt" in told
    assert len(run.events("hang")) == 2


@pytest.mark.parametrize("how", ["busy", pytest.param("report", marks=pytest.mark.long), "move"])
def test_what_takes_long_is_no_hang(tmp_path, how):
    """A checkpoint, a validation that reports, and one that is seen to compute."""
    run = Run(tmp_path, NEVER_WRONG)
    done = run.start("nodes=2", f"+how={how}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.result()["rounds"] == 1 and not run.events("hang")
