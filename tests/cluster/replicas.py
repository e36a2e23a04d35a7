"""A run of an example with ``ft=true``, as tests of it see it."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from sweeps import ROOT, Sweep, eventually, unhurried

MADE = "            time.sleep("
SIZE = "min_replica_size=1,"
SAYS = "            print('step', sampler.step, manager.num_participants(), flush=True)\n"


class Replicas:
    """A run of an example that says its steps, and goes slowly until it is to end."""

    def __init__(
        self,
        folder: Path,
        sweep: Callable[..., Sweep],
        example: str,
        *overrides: str,
        catch_up_bytes: int | None = None,
    ) -> None:
        original = ROOT / "examples" / example
        script = folder / original.name
        text = unhurried(original.read_text(), folder)
        assert MADE in text and SIZE in text
        text = text.replace(MADE, SAYS + MADE)
        script.write_text(text.replace(SIZE, f"{SIZE}\n        catch_up_bytes={catch_up_bytes},"))
        shutil.copy(original.with_suffix(".yaml"), folder)
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
        """Wait until this number of replicas makes further steps together."""
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
