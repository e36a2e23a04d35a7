"""A small training on gloo that goes on until it is told to stop."""

import contextlib
import json
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from group import eventually

from hpc_elastic import launch
from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.log_entry import LogEntry
from hpc_elastic.run.directory import RunDir

GIVE_UP_S = 180.0
START_S = 90.0
"""Patience with processes that import torch on a busy machine."""


def train(folder: str) -> int:
    """Step until ``folder/stop`` exists; return the number of steps of this round.

    ``folder/round-<n>.json`` says where the round's store is, and ``folder/steps`` grows by a line
    with the world size for each step.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if rank == 0:
        where = {"address": os.environ["MASTER_ADDR"], "port": int(os.environ["MASTER_PORT"])}
        Path(folder, f"round-{os.environ['HPC_ELASTIC_ROUND']}.json").write_text(json.dumps(where))
    until, steps = time.monotonic() + GIVE_UP_S, 0
    while True:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        steps += 1
        stop = torch.tensor(int(Path(folder, "stop").exists() or time.monotonic() > until))
        dist.all_reduce(stop)
        if rank == 0:
            with Path(folder, "steps").open("a") as f:
                f.write(f"{size}\n")
        if stop.item():
            dist.destroy_process_group()
            return steps
        time.sleep(0.05)


class Training:
    """A run of two nodes on this machine, with a worker each.

    Args:
        folder: Where the workers write to.
        run: The run directory; by default it is below that folder.
        nodes: With how many it may go on.
    """

    def __init__(self, folder: Path, run: Path | None = None, nodes: str = "2") -> None:
        self.folder = folder
        self.run = RunDir(run or folder / "run")
        self._threads = ThreadPoolExecutor(1)
        self.results: Future = self._threads.submit(
            launch, train, str(folder), nodes=nodes, nproc_per_node=1, launcher="local",
            run_dir=self.run.path, poll_interval_s=0.2, max_restarts=0,
        )  # fmt: skip

    def has_begun(self) -> None:
        """Wait for the first steps."""
        eventually(lambda: self.results.done() or self.steps, START_S)
        self.goes_on()

    @property
    def sizes(self) -> list[str]:
        """World size at each step so far."""
        path = self.folder / "steps"
        return path.read_text().split() if path.exists() else []

    @property
    def steps(self) -> int:
        """Steps that all workers have done together."""
        return len(self.sizes)

    def goes_on(self) -> None:
        """Wait for further steps."""
        reached = self.steps
        eventually(lambda: self.results.done() or self.steps >= reached + 3)
        assert not self.results.done(), self.results.result()

    def last_index(self) -> LogEntry:
        """The run's last entry."""
        _, entry = DecisionLog(self.run.rdzv, self.run.secret.read_bytes()).last()
        assert entry is not None
        return entry

    def store(self) -> tuple[str, int]:
        """Where the first round's TCPStore is."""
        where = json.loads((self.folder / "round-1.json").read_text())
        return where["address"], where["port"]

    def agents(self) -> dict[str, int]:
        """Process ids of the agents, by task."""
        tasks = json.loads((self.run.path / ".hpc_elastic" / "local-tasks.json").read_text())
        return {name: task["pid"] for name, task in tasks.items()}

    def end(self) -> None:
        """Let the training stop by itself."""
        (self.folder / "stop").touch()
        with contextlib.suppress(Exception):
            self.results.result(60)
        self._threads.shutdown(wait=False)
