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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic import Checkpointer, ft, report
from hpc_elastic.data import ElasticSampler
from hpc_elastic.data.batch import GlobalBatch
from hpc_elastic.shared_files import is_there

FINISH = "finish"
"""The file that ends the training."""
ORDER = "order-{host}"
"""The file with an order for a worker on a node: a key of `ORDERS`, and its argument."""
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
    return _train(Path(folder, CHECKPOINTS))


def train_replica(folder: str) -> dict[str, Any]:
    """Train as `train` does, as one of the replicas of a run with ``ft=true``."""
    torch.set_num_threads(1)
    training, pg = _Training(), ft.ProcessGroupGloo()
    manager = ft.Manager(pg, training.load, training.healing_state, min_replica_size=1)
    training.sampler = ElasticSampler(NUM_SAMPLES, BATCH, seed=0, manager=manager)
    training.state |= {"sampler": training.sampler, "manager": manager}
    reduce = partial(manager.allreduce, reduce_op=dist.ReduceOp.SUM)
    with Checkpointer(training.state, Path(folder, CHECKPOINTS)) as checkpoints:
        checkpoints.load_latest()
        model = ft.DistributedDataParallel(manager, training.net)
        for batch in training.batches(_ENDLESS):
            manager.begin_step()
            training.step(model, batch, lambda t: reduce(t).wait(), manager.should_commit)
            training.pause(Path(folder))
            checkpoints.save_if_due(training.sampler.step, every_steps=EVERY_STEPS)
    outcome = training.outcome(pg.size())
    _KEPT.append(model)
    manager.shutdown()
    return outcome


def train_with_handler(folder: str) -> dict[str, Any]:
    """Train as `train` does, but exit on SIGTERM, as many scripts do."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    return train(folder)


def train_undisturbed(folder: Path, num_epochs: int) -> dict[str, Any]:
    """Train a number of epochs without a pause; called by one process outside of any run."""
    return _train(folder / CHECKPOINTS, num_epochs)


class _Training:
    """The network, the data, and the counts of samples.

    Attributes:
        state: Everything that is saved.
        seen: How often each sample was trained, and how often a worker has seen `FINISH`: it is
            the same on all, so that all end after the same epoch.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        made = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(NUM_SAMPLES, _WIDTH, generator=made, dtype=torch.float64)
        self.data = TensorDataset(self.inputs, torch.arange(NUM_SAMPLES))
        self.net = nn.Sequential(nn.Linear(_WIDTH, 16), nn.Tanh(), nn.Linear(16, _WIDTH)).double()
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9)
        self.sampler = ElasticSampler(NUM_SAMPLES, BATCH, seed=0)
        self.seen = torch.zeros(NUM_SAMPLES + 1, dtype=torch.int64)
        self.is_finishing = False
        self.state = {
            "net": self.net, "optimizer": self.optimizer, "sampler": self.sampler,
            "seen": self.seen,
        }  # fmt: skip

    def healing_state(self) -> dict[str, Any]:
        """Return what a replica receives from a peer."""
        parts = self.net.state_dict(), self.optimizer.state_dict()
        return dict(zip(("net", "optimizer"), parts, strict=True)) | {"seen": self.seen}

    def load(self, state: dict[str, Any]) -> None:
        """Load what a peer has sent."""
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.seen.copy_(state["seen"])

    def batches(self, num_epochs: int) -> Iterator[GlobalBatch]:
        """Yield the batches until the last epoch, or until the end of one with `FINISH` in it."""
        loader = DataLoader(self.data, batch_sampler=self.sampler)
        for _ in self.sampler.epochs(num_epochs):
            yield from self.sampler.batches(loader)
            if self.seen[-1]:
                return

    def step(
        self,
        model: nn.Module,
        batch: GlobalBatch,
        reduce: Callable[[torch.Tensor], object] = dist.all_reduce,
        commits: Callable[[], bool] = lambda: True,
    ) -> None:
        """Make one step, if it commits."""
        self.optimizer.zero_grad()
        trained = torch.zeros_like(self.seen)
        trained[-1] = self.is_finishing
        for (x, index), weight in batch.micro_batches(model):
            loss: torch.Tensor = weight * nn.functional.mse_loss(model(x), x)
            loss.backward()  # type: ignore[no-untyped-call]
            trained[index] += 1
        reduce(trained)
        if commits():
            self.optimizer.step()
            self.seen += trained

    def pause(self, folder: Path) -> None:
        """Wait a little, and look for `FINISH` and for an order."""
        time.sleep(PAUSE_S)
        self.is_finishing = is_there(folder / FINISH)
        order = folder / ORDER.format(host=socket.gethostname())
        if is_there(order):
            what, argument = order.read_text().split()
            order.unlink()
            ORDERS[what](int(argument))

    @torch.no_grad()
    def outcome(self, world_size: int) -> dict[str, Any]:
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
            "world_size": world_size,
            "digest": hashlib.sha256(content).hexdigest(),
            "times_seen": sorted(set(self.seen[:-1].tolist())),
        }


def _train(folder: Path, num_epochs: int | None = None) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = _Training()
    with Checkpointer(training.state, folder) as checkpoints:
        checkpoints.load_latest()
        model = DistributedDataParallel(training.net)
        for batch in training.batches(num_epochs or _ENDLESS):
            training.step(model, batch)
            if num_epochs is None:
                training.pause(folder.parent)
                checkpoints.save_if_due(batch.step, every_steps=EVERY_STEPS)
    outcome = training.outcome(dist.get_world_size())
    _KEPT.append(model)
    dist.destroy_process_group()
    return outcome


def _be_slow(seconds: int) -> None:
    """Make no step for some time, with signs of life."""
    for _ in range(seconds):
        time.sleep(1.0)
        report()


ORDERS: dict[str, Callable[[int], None]] = {
    "sys.exit": sys.exit, "os._exit": os._exit, "slow": _be_slow,
}  # fmt: skip
"""Ways to exit before the function has returned, and to be slow."""


if __name__ == "__main__":
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    print(json.dumps(train_undisturbed(Path(sys.argv[1]), int(sys.argv[2]))))
