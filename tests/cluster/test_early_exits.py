"""Scripts that end their process before their function returns: no such end is a success."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from sweeps import Sweep, eventually, hosts

from slurm_sandbox import SlurmSandbox

SCRIPT = textwrap.dedent(
    """
    import os
    import signal
    import sys
    import time
    from pathlib import Path

    import hydra
    import torch
    import torch.distributed as dist

    from hpc_elastic import report
    from hpc_elastic.shared_files import is_there

    EXITS = {"sys.exit": sys.exit, "os._exit": os._exit}

    @hydra.main(version_base=None)
    def main(cfg):
        folder = Path(cfg.folder)
        saved, done = folder / "saved", folder / "done"
        if cfg.exits == "handler":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        dist.init_process_group("gloo")
        resumes = is_there(saved) and cfg.exits == "handler"
        step = torch.tensor(int(saved.read_text()) if resumes else 0)
        dist.broadcast(step, 0)
        over = torch.tensor(0)
        while not over:
            time.sleep(0.05)
            over.fill_(is_there(done))
            dist.all_reduce(over)
            step += 1
            report(step=int(step))
            if dist.get_rank() == 0:
                with (folder / "steps").open("a") as f:  # first: it may be ended at any point
                    f.write(f"{int(step)}\\n")
                staged = saved.with_suffix(".new")
                staged.write_text(str(int(step)))
                staged.replace(saved)
            if cfg.exits in EXITS and dist.get_rank() == 1 and step == 5:
                EXITS[cfg.exits](0)
        dist.destroy_process_group()
        return int(step)

    if __name__ == "__main__":
        main()
    """
)


class Run:
    """A run of the script, in a folder of its own."""

    def __init__(self, sweep: Callable[..., Sweep], folder: Path, *overrides: str) -> None:
        folder.mkdir()
        self.folder = folder
        script = folder / "script.py"
        script.write_text(SCRIPT)
        where = [f"hydra.sweep.dir={folder / 'sweep'}", f"+folder={folder}"]
        self.sweep = sweep("+launcher=slurm", *where, *overrides, script=script)
        self.sweep.folder = folder / "sweep"

    def steps(self) -> list[int]:
        """The steps that were made, in order of time."""
        file = self.folder / "steps"
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []

    def trains(self, num_nodes: int, since: int) -> None:
        """Wait until a group of that size has made steps, since so many had been made."""

        def has_trained() -> bool:
            if self.sweep.process.poll() is not None:
                pytest.fail(f"it has ended: {self.sweep.output()}")
            of_size = self.sweep.group_sizes()[-1:] == [num_nodes]
            return of_size and len(self.steps()) > since + 5

        eventually(has_trained, f"{num_nodes} nodes train; sizes: {self.sweep.group_sizes()}")

    def is_left(self, num_times: int) -> None:
        """Wait until so many tasks have left their nodes."""
        eventually(
            lambda: len(self.sweep.events("task_exited")) == num_times, f"{num_times} have left"
        )

    def ends_right(self) -> None:
        """Let the function return: all steps were made, and only now the run has succeeded."""
        assert not self.sweep.events("end") and not self.sweep.events("restart")
        (self.folder / "done").touch()
        output = self.sweep.output()
        assert self.sweep.result()["status"] == "succeeded", output
        assert sorted(set(self.steps())) == list(range(1, self.sweep.value() + 1))


@pytest.mark.long
def test_a_script_with_a_handler_of_its_own_goes_on_after_its_node_was_taken(
    slurm: SlurmSandbox, sweep, tmp_path
):
    """Slurm signals the workers as well, and they exit with code 0.

    On the only node and on one of two, preempted with a grace time, and requeued by the user.
    """
    alone = Run(sweep, tmp_path / "alone", "nodes=1", "+exits=handler")
    pair = Run(
        sweep, tmp_path / "pair", "nodes=1:2", "+exits=handler", "launcher.scale_up=immediate"
    )
    alone.trains(1, 0)
    pair.trains(2, 0)
    taken = [hosts(alone.sweep)[0], hosts(pair.sweep)[1]]
    slurm.preempt(taken, for_s=5)
    alone.is_left(1)
    pair.is_left(1)
    num_steps = len(alone.steps()), len(pair.steps())
    alone.trains(1, num_steps[0])
    pair.trains(2, num_steps[1])
    tasks = [alone.sweep.events("task")[0]["task"]]
    tasks += [m["task"] for m in pair.sweep.events("round")[-1]["members"]]
    for task in tasks:
        slurm.run(["scontrol", "requeue", task])
    alone.is_left(2)
    pair.is_left(3)
    num_steps = len(alone.steps()), len(pair.steps())
    alone.trains(1, num_steps[0])
    pair.trains(2, num_steps[1])
    alone.ends_right()
    pair.ends_right()


PLAIN = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
attempts, saved, done = Path("attempts"), Path("saved"), Path("done")
with attempts.open("a") as file:
    file.write(os.environ["SLURMD_NODENAME"] + "\\n")
step = int(saved.read_text()) if saved.exists() else 0
while not done.exists():
    time.sleep(0.05)
    step += 1
    Path("new").write_text(str(step))
    Path("new").replace(saved)
"""


@pytest.mark.long
def test_a_command_with_a_handler_of_its_own_goes_on_after_its_node_was_taken(
    slurm: SlurmSandbox, tmp_path
):
    """`hpc-elastic run`: exit code 0 at a preemption, and at a requeue, is no success.

    `test_conversions::test_a_script_that_exits_with_0_at_sigterm_has_not_succeeded` is the short
    test of that rule.
    """
    script, attempts = tmp_path / "script.py", tmp_path / "attempts"
    script.write_text(PLAIN)
    argv = [sys.executable, "-m", "hpc_elastic", "run", "--launcher=slurm", "--nproc-per-node=1"]
    with subprocess.Popen(
        slurm.on_login([*argv, "--", sys.executable, str(script)]),
        cwd=tmp_path, env={**os.environ, **slurm.env}, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as run:  # fmt: skip

        def nodes() -> list[str]:
            if run.poll() is not None:
                pytest.fail(f"it has ended: {run.communicate()[0]}")
            return attempts.read_text().split() if attempts.exists() else []

        try:
            eventually(lambda: len(nodes()) == 1 and (tmp_path / "saved").exists(), "it runs")
            slurm.preempt([nodes()[0]], for_s=5)
            eventually(lambda: len(nodes()) == 2, "it runs again after the preemption")
            listed = slurm.run(["squeue", "-h", "-r", "-t", "R", "-o", "%i"]).stdout.split()
            (task,) = (name for name in listed if "_" in name)  # not the job that preempts
            slurm.run(["scontrol", "requeue", task])
            eventually(lambda: len(nodes()) == 3, "it runs again after the requeue")
            before = int((tmp_path / "saved").read_text())
            eventually(lambda: int((tmp_path / "saved").read_text()) > before + 5, "it goes on")
            (tmp_path / "done").touch()
            output = run.communicate(timeout=120)[0]
        finally:
            run.kill()
    assert run.returncode == 0 and len(attempts.read_text().split()) == 3, output


@pytest.mark.long
def test_a_rank_that_exits_early_is_named_and_not_the_one_that_lost_it(sweep, tmp_path):
    """When it happens, and as the first failure at the end; with the step, and what to do."""
    names = {"exit": "sys.exit", "_exit": "os._exit"}
    runs = {
        name: Run(sweep, tmp_path / name, "nodes=2", f"+exits={how}", "launcher.max_restarts=1")
        for name, how in names.items()
    }
    for name, run in runs.items():
        output = run.sweep.output()
        failure = run.sweep.result()["failure"]
        assert (failure["rank"], failure["exit_code"]) == (1, 0), output
        what = "exited with code 0 at step 5 before its function returned"
        on_host = f"rank 1 (local rank 0) on {failure['host']} {what}"
        assert output.count(f"restart 1 of 1: {on_host}") == 1, name
        assert "return from the function" in output and "died afterwards" in output
        assert {v["rank"] for v in run.sweep.result()["secondary_failures"]} <= {0}
