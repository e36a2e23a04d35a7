"""The training of the preemption tests: it counts its steps, and its end can be compared.

It goes slowly until it is told to hurry, so that a test can do to it what it wants while it trains,
however fast the machine is.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sweeps import ROOT, Sweep

SCRIPT = textwrap.dedent(
    """
    import os
    import time
    from pathlib import Path

    import hydra
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    from hpc_elastic import Checkpointer, should_checkpoint
    from hpc_elastic.data import ElasticSampler
    from hpc_elastic.shared_files import is_there

    EPOCHS, PAUSE_S = {epochs}, 0.15

    def say(line):
        os.write(1, f"{line}\\n".encode())  # in one piece: a thread of the checkpointer logs

    @hydra.main(version_base=None, config_path=None)
    def main(cfg):
        return train(Path(cfg.folder), cfg.every)

    def train(folder, every=None):
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        made = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(960, 8, generator=made))
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        sampler = ElasticSampler(data, 24)
        loader = DataLoader(data, batch_sampler=sampler)
        state = {"net": net, "optimizer": optimizer, "sampler": sampler}
        checkpoints = Checkpointer(state, folder / "checkpoints")
        resumed = checkpoints.load_latest() or 0
        say(f"resumed {resumed} {dist.get_world_size()}")
        model, hurry = DistributedDataParallel(net), False
        for epoch in sampler.epochs(EPOCHS):
            for batch in sampler.batches(loader):
                optimizer.zero_grad()
                samples = 0
                for (x,), weight in batch.micro_batches(model):
                    (weight * nn.functional.mse_loss(model(x), x)).backward()
                    samples += len(x)
                optimizer.step()
                say(f"step {batch.step} {time.time()} {samples}")
                hurry = hurry or is_there(folder / "hurry")
                time.sleep(0 if hurry else PAUSE_S)
                if should_checkpoint(batch.step, every_steps=every):
                    checkpoints.save(batch.step)
        checkpoints.wait()
        loss = nn.functional.mse_loss(net(data.tensors[0]), data.tensors[0])
        dist.destroy_process_group()
        return loss.item()

    if __name__ == "__main__":
        main()
    """
)
LONG = bool(os.environ.get("HPC_ELASTIC_LONG"))
EPOCHS = 120 if LONG else 24
"""As long as all that a test does to a run takes at seven steps a second."""
NUM_STEPS = EPOCHS * 40


@dataclass(frozen=True)
class Round:
    """What the first worker of one round said."""

    number: int
    resumed: int
    """Steps that it found in the checkpoint."""
    steps: tuple[int, ...]


@dataclass(frozen=True)
class Counting:
    """A run of the script."""

    sweep: Sweep
    folder: Path

    def hurry(self) -> None:
        """Let it come to its end without further pauses."""
        (self.folder / "hurry").touch()

    def rounds(self) -> list[Round]:
        """The rounds whose first worker has said something, in order."""
        files = self.sweep.run().glob("tasks/*/attempt-*/round-*.rank-0.out")
        by_number = {int(re.search(r"round-(\d+)\.", f.name)[1]): f.read_text() for f in files}
        return [_round(n, text) for n, text in sorted(by_number.items()) if "resumed" in text]

    def steps(self) -> list[int]:
        """All steps that were made, in order of time."""
        return [step for r in self.rounds() for step in r.steps]

    def replayed(self) -> int:
        """How many steps were made that another round made again."""
        return len(self.steps()) - len(set(self.steps()))

    def is_complete(self) -> bool:
        """Whether every step was made."""
        return sorted(set(self.steps())) == list(range(1, NUM_STEPS + 1))

    def audit(self) -> subprocess.CompletedProcess[str]:
        """Let the audit prove that every sample was trained exactly once an epoch."""
        return self.sweep.audit()


def _round(number: int, text: str) -> Round:
    steps = re.findall(r"^step (\d+) ", text, re.MULTILINE)
    resumed = re.search(r"^resumed (\d+)", text, re.MULTILINE)
    assert resumed is not None
    return Round(number, int(resumed[1]), tuple(map(int, steps)))


def counting(sweep, folder: Path, *overrides: str, every: int | None = None) -> Counting:
    """Start the script as a run; each needs a folder of its own.

    Args:
        sweep: The fixture.
        folder: Of the script, its checkpoints and its run.
        *overrides: The nodes, and settings of the launcher.
        every: Steps between two periodic checkpoints; None: as the default is.
    """
    folder.mkdir(parents=True)
    script = folder / "counting.py"
    script.write_text(_script())
    where = f"hydra.sweep.dir={folder / 'sweep'}"
    own = [where, f"+folder={folder}", f"+every={every or 'null'}"]
    s = sweep("+launcher=slurm", *own, *overrides, script=script)
    s.folder = folder / "sweep"
    return Counting(s, folder)


def _script() -> str:
    return SCRIPT.replace("{epochs}", str(EPOCHS))


@cache
def undisturbed_loss() -> float:
    """Return the loss at which one worker arrives whom nobody disturbs, outside a run."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "counting.py").write_text(_script())
        Path(folder, "hurry").touch()
        code = "import counting, pathlib; print(counting.train(pathlib.Path()))"
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        env = {**os.environ, **alone, "PYTHONPATH": str(ROOT)}
        argv = [sys.executable, "-c", code]
        done = subprocess.run(
            argv, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True
        )
    return float(done.stdout.splitlines()[-1])
