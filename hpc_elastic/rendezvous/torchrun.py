"""``torchrun --rdzv-backend=slurm`` inside one Slurm allocation, without this package's launcher.

Everything comes from Slurm's variables: the tasks to wait for are the nodes of the step. The agents
meet in a folder of the user's home directory, which the nodes must share, and authenticate each
other by a key file in it (0600, made on first use).

``--rdzv-conf``: ``join_timeout`` and ``last_call_timeout`` (seconds), as in torch's c10d backend;
``interface``; ``dir``, another shared folder than ``~/.config/hpc_elastic``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

from hpc_elastic.config import RendezvousSettings
from hpc_elastic.errors import SlurmEnvironmentError
from hpc_elastic.events import EventLog
from hpc_elastic.mount import Mount
from hpc_elastic.net.keys import user_folder, user_key
from hpc_elastic.net.wire import sign
from hpc_elastic.rendezvous import address
from hpc_elastic.rendezvous.attendance import Liveness
from hpc_elastic.rendezvous.handler import RoundStores, SlurmRendezvousHandler
from hpc_elastic.rendezvous.journal import Journal
from hpc_elastic.rendezvous.office import Office, Pace
from hpc_elastic.rendezvous.record import Agent
from hpc_elastic.rendezvous.register import Register
from hpc_elastic.rendezvous.rules import Rules
from hpc_elastic.rendezvous.session import Candidacy, Session
from hpc_elastic.rundir import RunDir
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.environment import SlurmEnvironment
from hpc_elastic.slurm.states import TaskState

_KEPT_S = 30 * 24 * 3600.0
"""What a step leaves in the folder is removed by a later one after a month."""


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Make the handler of this node from torchrun's parameters and Slurm's variables.

    Raises:
        SlurmEnvironmentError: this is not inside a Slurm step.
        ConfigError: ``interface`` names none of this node's.
        PermissionError: others than the owner may read the key file.
    """
    slurm = _step_of_this_process()
    settings = _settings(parameters)
    run_id = f"{slurm.step_identity}.{parameters.run_id}"
    interface = address.find(
        slurm.node_name,
        parameters.get("interface"),
        lambda: SlurmClient().node_address(slurm.node_name),
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface.name)
    me = Agent(f"{slurm.job_id}.{slurm.node_id}", slurm.restart_count, slurm.node_id,
               slurm.node_name, nproc=1)  # fmt: skip
    folder = _folder(parameters)
    run = _meeting_place(folder, run_id)
    secret = sign(user_key(folder), run_id).encode()
    mount = Mount.of(run.path)
    office = Office(
        rules=Rules(
            parameters.min_nodes, parameters.max_nodes, 0,
            settings.start_timeout_s, settings.last_call_s, grow="now",
        ),
        liveness=Liveness.of(
            settings.heartbeat_s, settings.lost_after_s, parameters.max_nodes,
            mount.refreshed_stale_s,
        ),
        secret=secret,
        register=Register(run.rdzv, secret),
        make_journal=partial(
            Journal, run, run_id, EventLog(run.path / f"events-{slurm.node_id}.jsonl", me.task)
        ),
        world=_Step(slurm, RoundStores(interface.address)),
        pace=Pace.of(mount),
    )  # fmt: skip
    session = Session(me, Candidacy(interface.address, office, lambda _: None))
    return SlurmRendezvousHandler(session, parameters.run_id, settings.join_timeout_s)


def _step_of_this_process() -> SlurmEnvironment:
    """Return what Slurm says of this job step."""
    try:
        slurm = SlurmEnvironment.from_env(os.environ)
        _ = slurm.step_identity, slurm.node_id, slurm.hosts
    except SlurmEnvironmentError as e:
        why = f"this is no job step of Slurm ({str(e).partition(',')[0]})"
        remedy = (
            "start it by `srun torchrun ...` in an sbatch script, or after salloc; on this machine "
            "alone use `torchrun --standalone`"
        )
        raise SlurmEnvironmentError(f"{why}: {remedy}") from e
    return slurm


class _Step:
    """The nodes of one Slurm step, which all run from its beginning."""

    def __init__(self, slurm: SlurmEnvironment, stores: RoundStores) -> None:
        names = [f"{slurm.job_id}.{n}" for n in range(slurm.num_nodes)]
        self._tasks = {
            name: TaskState(name, "RUNNING", node=host)
            for name, host in zip(names, slurm.hosts, strict=True)
        }
        self.make_store = stores.make

    def view(self) -> Mapping[str, TaskState]:
        """Return the nodes."""
        return self._tasks

    def cancel_pending(self) -> None:
        """Do nothing: nothing of a step is in the queue."""

    def postpone_pending(self, delay_s: float) -> None:
        """Do nothing: nothing of a step is in the queue."""

    def waits_in_vain(self, lost: Mapping[str, int]) -> None:
        """Do nothing: a step has no sweep."""

    def let_others_start(self, lost: Iterable[str]) -> None:
        """Do nothing: a step has no sweep."""

    def clear_holds(
        self,
        tasks: Iterable[str],
        unseen: Mapping[str, str],
        failed_on: Mapping[str, Sequence[str]],
    ) -> None:
        """Do nothing: nothing of a job step is queued."""

    def readmit(self, tasks: Iterable[str]) -> None:
        """Do nothing, for the same reason."""

    def exclude(self, hosts: Iterable[str], why: str) -> None:
        """Do nothing, for the same reason."""

    def log_of(self, task: str, attempt: int) -> None:
        """Know nothing of the logs: srun and torchrun have them."""


def _settings(parameters: RendezvousParameters) -> RendezvousSettings:
    defaults = RendezvousSettings()
    return RendezvousSettings(
        join_timeout_s=float(parameters.get("join_timeout", defaults.join_timeout_s)),
        last_call_s=float(parameters.get("last_call_timeout", defaults.last_call_s)),
    )


def _folder(parameters: RendezvousParameters) -> Path:
    given = parameters.get("dir")
    if given is None:
        return user_folder()
    folder = Path(given)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _meeting_place(folder: Path, run_id: str) -> RunDir:
    """Return the step's own folder, and remove those that nobody can need any more."""
    steps = folder / "torchrun"
    run = RunDir(steps / run_id)
    run.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    staged = RunDir(Path(tempfile.mkdtemp(dir=run.path)))
    staged.first_term.mkdir(parents=True)
    with contextlib.suppress(OSError):  # another node was faster
        staged.rdzv.rename(run.rdzv)
    shutil.rmtree(staged.path)
    for old in steps.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _KEPT_S:
                shutil.rmtree(old, ignore_errors=True)
    return run
