"""torch's `RendezvousHandler` over a `Session`.

Each round gets a fresh TCPStore, hosted by the leader's agent: torch's own handler caches the first
one's address over all rounds, and a joiner then waits for an address that nobody writes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from hpc_elastic.config.schema import RendezvousSettings
from hpc_elastic.errors import SlurmEnvironmentError
from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.effects import RoundInfo
from hpc_elastic.rendezvous.leader import LeaderCandidate, LeaderContext, LeaderTiming
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig
from hpc_elastic.rendezvous.log_entry import Agent, RoundRules
from hpc_elastic.rendezvous.session import Departed, Requeued, Session
from hpc_elastic.rendezvous.status_writer import StatusWriter
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.events import EventLog
from hpc_elastic.shared_files import Mount
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.environment import SlurmEnvironment
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.transport import interface as interface_module
from hpc_elastic.transport.auth import sign, user_folder, user_key

BACKEND = "slurm"
_STORE_TIMEOUT = timedelta(seconds=60)
_CONNECT_TIMEOUT = timedelta(seconds=15)
"""The store listens before its round is announced; if not, the leader has died since."""

_log = logging.getLogger(__name__)


class SlurmRendezvousHandler(RendezvousHandler):
    """The ``slurm`` backend.

    ``num_nodes_waiting`` is positive whenever the group must be formed anew: a node joins, or a
    member was lost. It answers from memory, since torch asks at every monitor interval.
    """

    def __init__(
        self,
        session: Session,
        run_id: str,
        join_timeout_s: float,
        *,
        stores: RoundStores | None = None,
    ) -> None:
        """Take part in a run.

        Args:
            session: The agent's.
            run_id: The run's.
            join_timeout_s: How long to wait for a round.
            stores: Where this node's workers are a group of their own: makes their stores.
        """
        self.session = session
        self._stores = stores
        self.round: RoundInfo | None = None
        """The round this agent is a member of; None before the first."""
        self._run_id = run_id
        self._join_timeout_s = join_timeout_s

    def get_backend(self) -> str:
        """Return ``slurm``."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Workers use the round's store, rather than opening one on a port that may be taken."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Block until this node has a rank in a round.

        Raises:
            RendezvousTimeoutError: no round closed in time; names what it waited for.
            RendezvousGracefulExitError: the run has ended, or this node goes back to the queue, or
                is left.
            RendezvousClosedError: somebody has closed the rendezvous.
        """
        while True:
            self.round = self._join()
            address, port = self._stores.make() if self._stores else self.round.store
            try:
                store = TCPStore(address, port, is_master=False, timeout=_CONNECT_TIMEOUT)
            except DistError as e:
                _log.warning("the store of round %d is gone: %s", self.round.number, e)
                continue
            where = RendezvousStoreInfo(address, port)
            return RendezvousInfo(store, self.round.group_rank, self.round.group_size, where)

    def _join(self) -> RoundInfo:
        try:
            outcome = self.session.join(self._join_timeout_s)
        except TimeoutError as e:
            raise RendezvousTimeoutError(str(e)) from e
        if isinstance(outcome, RoundInfo):
            return outcome
        if isinstance(outcome, Requeued):
            raise RendezvousGracefulExitError("this node goes back to the queue")
        if isinstance(outcome, Departed):
            raise RendezvousGracefulExitError(f"this node is left: {outcome.reason}")
        if outcome.status == "closed":
            raise RendezvousClosedError("the rendezvous has been closed")
        raise RendezvousGracefulExitError(f"the run has {outcome.status}")

    def is_closed(self) -> bool:
        """Return whether the run has ended."""
        return self.session.verdict is not None

    def set_closed(self) -> None:
        """End the run for everybody."""
        self.session.close_run()

    def num_nodes_waiting(self) -> int:
        """Return 1 if the workers must be restarted in another group, else 0."""
        return int(self.session.stop_requested and self.session.verdict is None)

    def get_run_id(self) -> str:
        """Return the run id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the rendezvous, as torch's own backends do, and leave it."""
        self.session.close_run()
        self.session.leave("its agent has shut down")
        return True


class RoundStores:
    """Makes the store of each round; the one before it is closed then, its workers being gone."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._current: TCPStore | None = None

    def make(self) -> tuple[str, int]:
        """Start a fresh store; return its address and port.

        It gets a socket of the address's own family. On one that takes IPv6 and IPv4, as torch
        opens it, torch's server looks up every client's name before it serves the next (the system
        knows no ``::ffff:10.0.0.7`` from its hosts file), and stands still where no name server
        answers.

        Raises:
            OSError: the address is not this node's.
        """
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        listening = socket.create_server((self._address, 0), family=family)
        port = int(listening.getsockname()[1])
        self._current = TCPStore(
            self._address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_STORE_TIMEOUT,
            master_listen_fd=listening.detach(),
        )
        return self._address, port


# ---- ``torchrun --rdzv-backend=slurm`` inside one Slurm allocation
# Everything comes from Slurm's variables: the tasks to wait for are the nodes of the step. The
# agents meet in a folder of the user's home directory, which the nodes must share, and
# authenticate each other by a key file in it (0600, made on first use).
#
# ``--rdzv-conf``: ``join_timeout`` and ``last_call_timeout`` (seconds), as in torch's c10d
# backend; ``interface``; ``dir``, another shared folder than ``~/.config/hpc_elastic``.


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
    interface = interface_module.find(
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
    office = LeaderContext(
        rules=RoundRules(
            parameters.min_nodes, parameters.max_nodes, 0,
            settings.straggler_timeout_s, settings.last_call_s, scale_up="immediate",
        ),
        liveness=HeartbeatConfig.of(
            settings.heartbeat_interval_s, settings.heartbeat_timeout_s, parameters.max_nodes,
            mount.refreshed_stale_s,
        ),
        secret=secret,
        log=DecisionLog(run.rdzv, secret),
        make_status_writer=partial(
            StatusWriter, run, run_id, EventLog(run.path / f"events-{slurm.node_id}.jsonl", me.task)
        ),
        scheduler=_Step(slurm, RoundStores(interface.address)),
        timing=LeaderTiming.of(mount),
    )  # fmt: skip
    session = Session(me, LeaderCandidate(interface.address, office, lambda _: None))
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
        possibly_alive: Mapping[str, str],
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
