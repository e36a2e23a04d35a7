"""examples/train_ft.py on a real Slurm: replicas survive while nodes die, leave and come back."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from sweeps import ROOT, Sweep, eventually, leader_host, unhurried

TAKEN_S = 6
MADE = "            time.sleep("
SAYS = "            print('step', sampler.step, manager.num_participants(), flush=True)\n"


class Replicas:
    """A run of train_ft.py that says its steps, and goes slowly until it is to end."""

    def __init__(self, folder: Path, sweep: Callable[..., Sweep], *overrides: str) -> None:
        script = folder / "train_ft.py"
        text = unhurried((ROOT / "examples/train_ft.py").read_text(), folder)
        assert MADE in text
        script.write_text(text.replace(MADE, SAYS + MADE))
        shutil.copy(ROOT / "examples/train_ft.yaml", folder)
        self.sweep = sweep("launcher=slurm", *overrides, script=script)

    def outputs(self) -> dict[str, list[Path]]:
        """What the workers of each task wrote, one file a start, in order of their starts."""
        found: dict[str, list[Path]] = {}
        for file in self.sweep.run().glob("tasks/*/attempt-*/round-*.rank-0.out"):
            found.setdefault(file.parents[1].name, []).append(file)
        return {task: sorted(files, key=lambda f: f.stat().st_ino) for task, files in found.items()}

    def steps(self) -> dict[str, tuple[int, int]]:
        """The last step of each task's last worker, and how many took part in it."""
        last: dict[str, tuple[int, int]] = {}
        for task, files in self.outputs().items():
            newest = max(files, key=lambda f: f.stat().st_mtime)
            said = re.findall(r"^step (\d+) (\d+)$", newest.read_text(), re.MULTILINE)
            last |= {task: (int(said[-1][0]), int(said[-1][1]))} if said else {}
        return last

    def train(self, num: int) -> None:
        """Wait until so many make further steps together."""
        before = max((step for step, _ in self.steps().values()), default=0)

        def together() -> bool:
            if self.sweep.process.poll() is not None:
                pytest.fail(f"it has ended: {self.sweep.output()}")
            last = [step for step, size in self.steps().values() if size == num]
            return sum(step > before + 1 for step in last) >= num

        eventually(together, f"{num} replicas train; {self.steps()}")

    def fingerprints(self) -> list[str]:
        """Those of all workers that came to the end."""
        texts = (file.read_text() for files in self.outputs().values() for file in files)
        return [found for text in texts for found in re.findall(r"parameters (\w+)", text)]

    def restored(self) -> set[int]:
        """The steps of the checkpoints that were loaded."""
        texts = (file.read_text() for files in self.outputs().values() for file in files)
        said = r"restored the checkpoint of step (\d+)"
        return {int(step) for text in texts for step in re.findall(said, text)}

    def audit(self) -> subprocess.CompletedProcess:
        """Run `hpc-elastic audit`."""
        return self.sweep.audit()


@pytest.mark.long
def test_replicas_live_on(slurm, sweep, tmp_path):
    """The leader's node dies, the next leader's is preempted; later all are preempted at once.

    They come back. The survivors' workers are never started again, all end with the same
    parameters, what is announced costs no step, and every sample is trained exactly once.
    """
    run = Replicas(tmp_path, sweep, "nodes=2:4", "epochs=10", "pause_s=0.5", "save_every_s=5")
    run.train(4)
    dead = leader_host(run.sweep)
    slurm.kill_node(dead)
    run.train(3)
    slurm.preempt([leader_host(run.sweep)], for_s=TAKEN_S)
    run.train(2)
    slurm.start_node(dead)
    run.train(4)
    assert run.sweep.events("round_stopped") == []
    per_task = sorted(len(files) for files in run.outputs().values())
    assert per_task == [1, 1, 2, 2], "only those that went were started again"
    slurm.preempt(slurm.nodes, for_s=TAKEN_S)
    eventually(lambda: len(run.sweep.events("task_exited")) == 5, "all have left")
    reached = max(step for step, _ in run.steps().values())
    run.train(4)
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output
    assert run.sweep.result()["restarts"] == 0
    assert len(run.fingerprints()) == 4 and len(set(run.fingerprints())) == 1
    assert reached in run.restored(), "what was announced cost no step"
    told = [(e.kind, e.nodes_before, e.nodes_after) for e in run.sweep.timeline()]
    assert told[:4] == [
        ("started", None, None), ("formed", None, 4), ("shrank", 4, 3), ("shrank", 3, 2)
    ]  # fmt: skip
    assert ("stopped", 4, 0) in told and told[-1][0] == "ended"
    audit = run.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr


def test_nodes_that_are_taken_one_after_the_other_lose_no_step(slurm, sweep, tmp_path):
    """The second is no quorum by itself when it is told to go; both come back to the step."""
    run = Replicas(tmp_path, sweep, "nodes=2", "epochs=10", "pause_s=1", "save_every_s=1000")
    run.train(2)
    first = leader_host(run.sweep)
    (second,) = {e["host"] for e in run.sweep.events("task")} - {first}
    slurm.preempt([first], for_s=TAKEN_S)
    slurm.preempt([second], for_s=TAKEN_S)
    eventually(lambda: len(run.sweep.events("task_exited")) == 2, "both have left")
    reached = max(step for step, _ in run.steps().values())
    run.train(2)
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output
    assert run.restored() == {reached}
