"""Runs that hang: the named rank, the files, and the continuation. Real agents, no Slurm."""

import textwrap
from pathlib import Path

import pytest
from local_runs import LocalRun

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
    from hpc_elastic.worker.reporting import busy

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


class Run(LocalRun):
    """A run of a script whose hangs are noticed within seconds."""

    def __init__(self, text: str, folder: Path, *overrides: str) -> None:
        script = folder / "script.py"
        script.write_text(text)
        super().__init__(
            script, folder, "+launcher=local", "nproc_per_node=1",
            "launcher.agent.hang_timeout_s=2", *overrides,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "at"),
    [
        ("sleep", "in get_stuck"),
        pytest.param("stop", "stopped by a signal", marks=pytest.mark.long),
        pytest.param("gil", "in get_stuck", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_is_stuck_is_named_and_the_group_started_again(tmp_path, how, at):
    """Of three nodes one does not come to the collective: it is to blame, and the run succeeds."""
    with Run(SCRIPT, tmp_path, "nodes=3", f"+how={how}", "+rank=1") as run:
        assert run.wait() == 0, run.output()
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


@pytest.mark.long
def test_a_group_that_does_not_come_to_its_first_step_is_started_again(tmp_path):
    """One rank never connects: the limit of the first step applies, and names it."""
    text = SCRIPT.replace(
        '    dist.init_process_group("gloo")\n',
        '    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":\n'
        '        get_stuck("sleep")\n'
        '    dist.init_process_group("gloo")\n',
    )
    limit = "launcher.agent.first_step_timeout_s=4"
    with Run(text, tmp_path, "nodes=2", "+how=none", "+rank=9", limit) as run:
        assert run.wait() == 0, run.output()
    (hang,) = run.events("hang")
    assert [r["rank"] for r in hang["ranks"]] == [1]
    assert "in get_stuck" in hang["ranks"][0]["at"]
    assert run.result()["restarts"] == 1


@pytest.mark.long
def test_a_rank_that_is_stuck_again_ends_the_run_with_its_name(tmp_path):
    """Restarts are limited, and the user sees rank, host, place and the files."""
    always = ("+how=sleep", "+rank=1", "+always=true")
    with Run(SCRIPT, tmp_path, "nodes=2", *always, "launcher.max_restarts=1") as run:
        assert run.wait() != 0
    failure = run.result()["failure"]
    assert (failure["phase"], failure["rank"]) == ("hang", 1)
    output = run.output()
    for part in ("rank 1", "hung", "in get_stuck", "stack.txt"):
        assert part in output
    assert len(run.events("hang")) == 2


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.long) for how in ("busy", "report", "move")]
)
def test_what_takes_long_is_no_hang(tmp_path, how):
    """A checkpoint, a validation that reports, and one that is seen to compute."""
    with Run(NEVER_WRONG, tmp_path, "nodes=2", f"+how={how}") as run:
        assert run.wait() == 0, run.output()
    assert run.result()["rounds"] == 1 and not run.events("hang")


LINGERS = textwrap.dedent(
    """
    import atexit, time
    import hydra
    from hpc_elastic import report

    @hydra.main(version_base=None)
    def main(cfg):
        for step in range(1, 9):
            report(step=step)
            time.sleep(0.1)
        atexit.register(time.sleep, 600)
        return step

    if __name__ == "__main__":
        main()
    """
)


@pytest.mark.long
def test_what_lingers_after_a_finished_training_is_ended_and_no_hang(tmp_path):
    """A tracker that sends files at exit: the function has returned, so the run has succeeded."""
    overrides = "nodes=2", "launcher.agent.exit_timeout_s=2"
    with Run(LINGERS, tmp_path, *overrides) as run:
        assert run.wait() == 0, run.output()
    assert run.result()["restarts"] == 0 and not run.events("hang")
    assert {"exit_timeout_s=2" in event["how"] for event in run.events("slow_exit")} == {True}
