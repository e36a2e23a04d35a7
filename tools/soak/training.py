"""The training of the soak: a tiny network, slowly, in double precision.

Its state counts how often each sample was trained. So the state shows at the end whether every
sample was trained exactly once an epoch, independently of the ledger. The training ends after the
epoch in which the file `FINISH` appears. The same epochs by one undisturbed worker give the same
loss, up to the order of additions.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic import Checkpointer, should_checkpoint
from hpc_elastic.data import ElasticSampler
from hpc_elastic.data.batch import GlobalBatch
from hpc_elastic.shared_files import is_there

FINISH = "finish"
"""The file that ends the training."""
EXIT = "exit-{host}"
"""The file that makes a worker on a node exit; its content is a key of `EARLY_EXITS`."""
EARLY_EXITS: dict[str, Callable[[int], NoReturn]] = {"sys.exit": sys.exit, "os._exit": os._exit}
"""Ways to exit with code 0 before the function has returned."""
CHECKPOINTS = "checkpoints"
NUM_SAMPLES, BATCH = 480, 24
EVERY_STEPS = 20
"""Steps between two periodic checkpoints."""
PAUSE_S = 0.1
_WIDTH = 8
_ENDLESS = 1_000_000
_KEPT: list[nn.Module] = []
"""Models live as long as their process. If one is freed while a thread of gloo still frees the last
collective's tensors, torch 2.13 waits for that thread and holds the interpreter's lock, which the
thread needs: a deadlock."""


def train(folder: str) -> dict[str, Any]:
    """Train until the file `FINISH` appears; every worker of the run calls this.

    Args:
        folder: The folder of the checkpoints and of the files that steer the training.

    Returns:
        The outcome of this rank, see `_Training.outcome`.
    """
    finish = Path(folder, FINISH)
    return _train(Path(folder, CHECKPOINTS), lambda epoch: is_there(finish))


def train_with_handler(folder: str) -> dict[str, Any]:
    """Train as `train` does, but exit on SIGTERM, as many scripts do."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    return train(folder)


def train_undisturbed(folder: Path, num_epochs: int) -> dict[str, Any]:
    """Train a number of epochs without a pause; called by one process outside of any run."""
    return _train(folder / CHECKPOINTS, lambda epoch: epoch + 1 >= num_epochs, in_one_go=True)


class _Training:
    """The network, the data, and the counts of samples.

    Attributes:
        state: Everything that is saved.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        made = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(NUM_SAMPLES, _WIDTH, generator=made, dtype=torch.float64)
        self.data = TensorDataset(self.inputs, torch.arange(NUM_SAMPLES))
        self.net = nn.Sequential(nn.Linear(_WIDTH, 16), nn.Tanh(), nn.Linear(16, _WIDTH)).double()
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9)
        self.sampler = ElasticSampler(NUM_SAMPLES, BATCH, seed=0)
        self.seen = torch.zeros(NUM_SAMPLES, dtype=torch.int64)
        self.state = {
            "net": self.net, "optimizer": self.optimizer, "sampler": self.sampler,
            "seen": self.seen,
        }  # fmt: skip

    def step(self, model: nn.Module, batch: GlobalBatch) -> None:
        """Make one step."""
        self.optimizer.zero_grad()
        trained = torch.zeros_like(self.seen)
        for (x, index), weight in batch.micro_batches(model):
            loss: torch.Tensor = weight * nn.functional.mse_loss(model(x), x)
            loss.backward()  # type: ignore[no-untyped-call]
            trained[index] += 1
        self.optimizer.step()
        dist.all_reduce(trained)
        self.seen += trained

    @torch.no_grad()
    def outcome(self) -> dict[str, Any]:
        """Return the outcome of this rank.

        ``times_seen`` holds the distinct counts of samples: one number if all were trained equally
        often. ``digest`` is the digest of all parameters, momenta and counts.
        """
        loss = nn.functional.mse_loss(self.net(self.inputs), self.inputs)
        momenta = [s["momentum_buffer"] for s in self.optimizer.state.values()]
        tensors = [*self.net.state_dict().values(), *momenta, self.seen]
        content = b"".join(tensor.numpy().tobytes() for tensor in tensors)
        return {
            "epochs": self.sampler.epoch,
            "loss": loss.item(),
            "world_size": dist.get_world_size(),
            "digest": hashlib.sha256(content).hexdigest(),
            "times_seen": sorted(set(self.seen.tolist())),
        }


def _train(
    folder: Path, is_last: Callable[[int], bool], *, in_one_go: bool = False
) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = _Training()
    with Checkpointer(training.state, folder) as checkpoints:
        checkpoints.load_latest()
        model = DistributedDataParallel(training.net)
        loader = DataLoader(training.data, batch_sampler=training.sampler)
        for epoch in training.sampler.epochs(_ENDLESS):
            for batch in training.sampler.batches(loader):
                training.step(model, batch)
                if in_one_go:
                    continue
                time.sleep(PAUSE_S)
                _exit_on_request(folder.parent)
                if should_checkpoint(batch.step, every_steps=EVERY_STEPS):
                    checkpoints.save(batch.step)
            if _rank_0_value(is_last(epoch)):
                break
    outcome = training.outcome()
    _KEPT.append(model)
    dist.destroy_process_group()
    return outcome


def _exit_on_request(folder: Path) -> None:
    request = folder / EXIT.format(host=socket.gethostname())
    if is_there(request):
        how = request.read_text()
        request.unlink()
        EARLY_EXITS[how](0)


def _rank_0_value(value: bool) -> bool:
    """Return the value of rank 0, on all ranks."""
    shared = torch.tensor(int(value))
    dist.broadcast(shared, 0)
    return bool(shared)


if __name__ == "__main__":
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    print(json.dumps(train_undisturbed(Path(sys.argv[1]), int(sys.argv[2]))))
