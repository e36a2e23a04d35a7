"""The training of `shared_folder.py`."""

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic import Checkpointer, report, should_checkpoint
from hpc_elastic.data import ElasticSampler
from shared_folder.submit import TOLD, begin_file

NUM_SAMPLES, BATCH = 240, 24
_ENDLESS = 1_000_000
_BALLAST_MIB = 8
_kept: list[nn.Module] = []
"""Models that live as long as the process, as in `soak.training`."""


def train(local: str, checkpoints: str, mib: int, every_steps: int, pause_s: float) -> int:
    """Train until told to finish, at the end of an epoch of ten steps; return the steps.

    ``local`` is a folder that all nodes see at once; the state has ``mib`` on all ranks together;
    ``pause_s`` is what a step takes beside its work.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(local)
    trail = begin_file(folder, "trail")
    torch.manual_seed(0)
    net = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    sampler = ElasticSampler(NUM_SAMPLES, BATCH, seed=0)
    sizes = range(mib // _BALLAST_MIB)
    ballast = {f"t{n}": torch.rand(_BALLAST_MIB * (1 << 18)) for n in sizes}
    state = {"net": net, "optimizer": optimizer, "sampler": sampler, "ballast": ballast}
    with Checkpointer(state, checkpoints) as checkpointer:
        checkpointer.load_latest()
        model = DistributedDataParallel(net)
        _kept.append(model)
        saves = _Saves(checkpointer, folder, every_steps)
        loader = DataLoader(TensorDataset(torch.randn(NUM_SAMPLES, 8)), batch_sampler=sampler)
        for _ in sampler.epochs(_ENDLESS):
            for batch in sampler.batches(loader):
                optimizer.zero_grad()
                for (x,), weight in batch.micro_batches(model):
                    (weight * nn.functional.mse_loss(model(x), x)).backward()
                optimizer.step()
                report(step=batch.step)
                trail.write(f"{time.time()} {batch.step}\n")
                time.sleep(pause_s)
                saves.look(batch.step)
            if saves.finish:
                break
    dist.destroy_process_group()
    begin_file(folder, "end")
    return sampler.step


class _Saves:
    """Saves when it is time, or asked for; writes down how long that took."""

    def __init__(self, checkpointer: Checkpointer, folder: Path, every_steps: int) -> None:
        self._checkpointer, self._folder = checkpointer, folder
        self._every_steps = every_steps
        self._file = begin_file(folder, "saves")
        self._num_saves = self._told()
        self._begun: dict[str, float] | None = None
        self.finish = False

    def look(self, step: int) -> None:
        """See what is asked for, and save if it is time."""
        self._see_end()
        num_saves = self._told()
        due = should_checkpoint(step, every_steps=self._every_steps)
        if num_saves > self._num_saves or due:
            begin = time.time()
            self._checkpointer.save(step)
            blocked_s = self._checkpointer.blocked_s
            self._begun = {"step": step, "begin": begin, "blocked_s": blocked_s}
        self._num_saves = num_saves

    def _told(self) -> int:
        """Return how many saves were asked for; all ranks hear the same."""
        told = torch.zeros(2, dtype=torch.int64)
        if dist.get_rank() == 0:
            raw = json.loads((self._folder / TOLD).read_text())
            told = torch.tensor([raw["saves"], raw["finish"]])
        dist.broadcast(told, 0)
        self.finish = bool(told[1])
        return int(told[0])

    def _see_end(self) -> None:
        if self._begun is not None and self._checkpointer.is_idle:
            ended = {**self._begun, "end": time.time(), "failures": self._checkpointer.failures}
            self._file.write(json.dumps(ended) + "\n")
            self._begun = None
