"""The process group of a worker: whether it is that of all workers, and the store that makes it.

Processes that the script starts by `torch.multiprocessing.spawn` import this module: the worker's
own is its main module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hpc_elastic.errors import PermanentError
from hpc_elastic.worker import optimizer_steps, process_group
from hpc_elastic.worker.reporting import own_page
from hpc_elastic.worker.shared_page import ROUND_VARIABLE

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_RUN_ID = "TORCHELASTIC_RUN_ID"


class GroupCheck:
    """Whether the workers of a group train together: each has a process group of all of them.

    Without one, each trains a model of its own, and all write the same files.
    """

    _OTHERS = ("horovod", "mpi4py.MPI")  # modules that make groups of their own

    def __init__(self, world_size: int, is_required: bool) -> None:
        self._world_size = world_size
        self._is_required = is_required
        self.is_done = world_size == 1

    def on_step(self, size: int) -> None:
        """Publish the size of torch's process group at an optimizer step, 0 without one.

        Raises PermanentError if it is not that of all workers, and that is required.
        """
        if self.is_done or any(name in sys.modules for name in self._OTHERS):
            return
        self.is_done = size == self._world_size
        page = own_page()
        if page is not None:
            page.report_group(size)
        if self._is_required and not self.is_done:
            what = f"a process group of {size}" if size else "no process group"
            raise PermanentError(
                f"this worker has {what} at its first optimizer step, and the run has "
                f"{self._world_size} workers: call torch.distributed.init_process_group(), or "
                "leave out launcher.require_group"
            )


def keep_own_stores(given: Mapping[str, str]) -> None:
    """Let rank 0 host the store that a script names by an address or a port of its own.

    torch takes any store for that of the agent's while TORCHELASTIC_USE_AGENT_STORE is set, and all
    ranks wait for a server. The function that makes stores, a private name, is replaced
    (test_worker_main fails if torch changes it). At the agent's address such a store is on the
    node of rank 0, since the agent that leads may be on another one.

    A store in a file (``init_method="file://..."``) has one for each round: what a killed round has
    left in it would let the next one wait for ever.
    """
    rendezvous = sys.modules["torch.distributed.rendezvous"]  # the package has a function so named
    name = "_create_c10d_store"
    theirs = getattr(rendezvous, name)
    agents = given.get("MASTER_ADDR"), given.get("MASTER_PORT")

    def create(hostname: str, port: int, *args: Any, **options: Any) -> Any:
        if (hostname, str(port)) == agents or os.environ.get(_AGENT_STORE) is None:
            return theirs(hostname, port, *args, **options)
        if hostname == agents[0]:
            hostname = given.get("SLURM_LAUNCH_NODE_IPADDR", hostname)
        with _without_agent_store():
            return theirs(hostname, port, *args, **options)

    setattr(rendezvous, name, create)
    file_store, suffix = "FileStore", f".{given.get(_RUN_ID)}-{given.get(ROUND_VARIABLE)}"
    of_torch = getattr(rendezvous, file_store)
    setattr(rendezvous, file_store, lambda path, *args: of_torch(path + suffix, *args))


def free_children() -> None:
    """Let processes of multiprocessing have a group of their own.

    The variable would let all of them wait for a server at their own address. What starts a process
    by "spawn" or "forkserver", a private name, is replaced; a forked one has `keep_own_stores`.
    """
    util, name = sys.modules["multiprocessing.util"], "spawnv_passfds"
    theirs = getattr(util, name)

    def spawn(*args: Any) -> Any:
        with _without_agent_store():
            return theirs(*args)

    setattr(util, name, spawn)


@contextlib.contextmanager
def _without_agent_store() -> Iterator[None]:
    used = os.environ.pop(_AGENT_STORE, None)
    try:
        yield
    finally:
        if used is not None:
            os.environ[_AGENT_STORE] = used


def keep_spawned(given: Mapping[str, str], world_size: int, is_required: bool) -> None:
    """Let processes of `torch.multiprocessing.spawn` host stores, and be checked, as a worker."""
    module = sys.modules["torch.multiprocessing.spawn"]  # the package has a function so named
    theirs = module.start_processes
    names = ("MASTER_ADDR", "MASTER_PORT", "SLURM_LAUNCH_NODE_IPADDR", _RUN_ID, ROUND_VARIABLE)
    stores = {name: given[name] for name in names if name in given}

    def start(fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **options: Any) -> Any:
        spawned = SpawnedFunction(fn, nprocs, stores, world_size, is_required)
        return theirs(spawned, args, nprocs, *rest, **options)

    for each in (module, sys.modules["torch.multiprocessing"]):
        each.start_processes = start  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class SpawnedFunction:
    """The function of a script that several processes of one worker run.

    The first one checks the group, which has all workers if it has all processes of each, and
    prints at its first step that its steps are not those of the worker.
    """

    fn: Callable[..., Any]
    num: int
    stores: Mapping[str, str]
    world_size: int
    is_required: bool

    def __call__(self, index: int, *args: Any) -> None:
        """Run the function in one of the processes."""
        importlib.import_module("torch.distributed.rendezvous")
        keep_own_stores(self.stores)
        if index == 0:
            group = GroupCheck(self.world_size, self.is_required)
            notes = ["hpc_elastic: steps of processes that a script spawns are not counted, and "
                     "their hangs are not found: start them by --nproc-per-node"]  # fmt: skip

            def on_step(_optimizer: object) -> None:
                group.on_step((process_group.size() or 0) // self.num)
                while notes:
                    print(notes.pop(), file=sys.stderr)

            optimizer_steps.watch(on_step)
        self.fn(index, *args)
