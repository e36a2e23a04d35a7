"""The training of all contestants: node time that is to be spent, without torch.

A step is a sleep, and makes as much progress as there are workers. The first rank keeps the
progress in a file, and appends each step to a trail. Each rank notes the moments of its steps in a
file of its node. ``work.py FOLDER SETTINGS`` submits it as a run of hpc_elastic, and waits.
"""

import json
import os
import sys
import time
from pathlib import Path

STEP_S = 0.5


class Training:
    """The progress of the training in a folder; all ranks make the same steps."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self._folder, self._is_first, self._world = folder, rank == 0, world
        plan = json.loads((folder / "plan.json").read_text())
        self.work: float = plan["work"]
        saved = folder / "progress.json"
        found = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "done": 0.0}
        self.step: int = found["step"]
        self.done: float = found["done"]
        self._steps = folder / "steps" / os.environ["SLURMD_NODENAME"]
        self._steps.parent.mkdir(exist_ok=True)

    @property
    def is_complete(self) -> bool:
        return self.done >= self.work

    def make_step(self) -> None:
        time.sleep(STEP_S)
        self.step += 1
        self.done += STEP_S * self._world
        with self._steps.open("a") as steps:
            steps.write(f"{time.time():.2f}\n")
        if self._is_first:
            with (self._folder / "trail").open("a") as trail:
                trail.write(f"{time.time():.2f} {self._world} {self.done}\n")

    def save(self) -> None:
        """Keep the progress (first rank); note the end."""
        if not self._is_first:
            return
        staged = self._folder / "progress.new"
        staged.write_text(json.dumps({"step": self.step, "done": self.done}))
        staged.replace(self._folder / "progress.json")
        if self.is_complete and not (self._folder / "complete").exists():
            (self._folder / "complete").write_text(str(time.time()))


def train_fixed(folder: Path, rank: int, world: int) -> None:
    training = Training(folder, rank, world)
    while not training.is_complete:
        training.make_step()
        training.save()


def train(folder: str) -> None:
    """Train as a run of hpc_elastic: the launcher asks for the step at which to save."""
    from hpc_elastic import mark_checkpoint, should_checkpoint

    training = Training(Path(folder), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    while not training.is_complete:
        training.make_step()
        if should_checkpoint(training.step, every_s=15.0) or training.is_complete:
            training.save()
            mark_checkpoint(step=training.step)


def submit(folder: str, settings: str) -> None:
    """Submit `train`, and wait, as a launcher on a login node does."""
    from hpc_elastic import launch

    launch(
        train, folder, nproc_per_node=1, launcher="slurm", run_dir=Path(folder, "run"),
        **json.loads(settings),
    )  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(submit(*sys.argv[1:]))
    names = ("RANK", "WORLD_SIZE") if "RANK" in os.environ else ("SLURM_PROCID", "SLURM_NTASKS")
    train_fixed(Path(sys.argv[1]), *(int(os.environ[name]) for name in names))
