"""torch's `RendezvousHandler` over a `Session`: ``torchrun --rdzv-backend=slurm`` in a Slurm step.

Each round gets a fresh TCPStore on the leader's node. torch's own handler caches the address of the
first store for all rounds, so a node that joins later waits for an address that is never written.

Slurm's variables describe the step; its nodes are the expected tasks. The agents use a folder of
the user's home directory, which the nodes must share, and authenticate each other by a key file
in it (mode 0600, created on first use).

``--rdzv-conf``: ``join_timeout`` and ``last_call_timeout`` (seconds), as in torch's c10d backend;
``interface``; ``dir``, a shared folder other than ``~/.config/hpc_elastic``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic import rendezvous as elastic

from hpc_elastic.config.schema import RendezvousSettings
from hpc_elastic.errors import SlurmEnvironmentError
from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.leader import LeaderContext
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig
from hpc_elastic.rendezvous.log_entry import Agent, RoundRules
from hpc_elastic.rendezvous.messages import Close, Departed, End, Requeue
from hpc_elastic.rendezvous.round_stores import CONNECT_S, host_store, open_port
from hpc_elastic.rendezvous.session import Session
from hpc_elastic.rendezvous.term import StatusWriter
from hpc_elastic.run import ownership
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.events import EventLog
from hpc_elastic.shared_files import Mount, make_folder
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.environment import SlurmEnvironment
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.transport import interface as interface_module
from hpc_elastic.transport.auth import sign, user_folder, user_key

BACKEND = "slurm"
_KEPT_S = 30 * 24 * 3600.0  # age at which a later step removes the folder of an earlier one

_log = logging.getLogger(__name__)


class SlurmRendezvousHandler(elastic.RendezvousHandler):
    """The ``slurm`` backend of torch's rendezvous."""

    def __init__(self, session: Session, run_id: str, join_timeout_s: float) -> None:
        self.session = session
        self._run_id = run_id
        self._join_timeout_s = join_timeout_s

    def get_backend(self) -> str:
        """Return ``slurm``."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the round's store: a port of their own might be taken."""
        return True

    def next_rendezvous(self) -> elastic.RendezvousInfo:
        """Block until this node has a rank in a round.

        Raises:
            RendezvousTimeoutError: No round closed in time; the message names what is missing.
            RendezvousGracefulExitError: The run has ended, or this node must requeue or has left.
            RendezvousClosedError: An agent has closed the rendezvous.
            RendezvousStateError: The run has failed: torch's agent has no other way to its error.
        """
        while True:
            try:
                outcome = self.session.join(self._join_timeout_s)
            except TimeoutError as e:
                raise elastic.RendezvousTimeoutError(str(e)) from e
            match outcome:
                case Requeue():
                    why = "this node goes back to the queue"
                    raise elastic.RendezvousGracefulExitError(why)
                case Departed(reason):
                    why = f"this node leaves the run: {reason.value}"
                    raise elastic.RendezvousGracefulExitError(why)
                case End("closed"):
                    raise elastic.RendezvousClosedError("the rendezvous has been closed")
                case End("failed", failure):
                    raise elastic.RendezvousStateError(f"the run has failed: {failure}")
                case End(status):
                    raise elastic.RendezvousGracefulExitError(f"the run has {status}")
            address, port = outcome.store
            timeout = timedelta(seconds=CONNECT_S)
            try:
                store = TCPStore(address, port, is_master=False, timeout=timeout)
            except DistError as e:
                _log.warning("the store of round %d is gone: %s", outcome.number, e)
                continue
            where = elastic.RendezvousStoreInfo(address, port)
            return elastic.RendezvousInfo(store, outcome.group_rank, outcome.group_size, where)

    def is_closed(self) -> bool:
        """Return whether the run has ended."""
        return self.session.verdict is not None

    def set_closed(self) -> None:
        """End the run for all agents."""
        self.session.report(Close())

    def num_nodes_waiting(self) -> int:
        """Return 1 if the workers must be restarted in another group, else 0.

        The answer comes from memory, since torch calls this at every monitor interval.
        """
        return int(self.session.stop_requested and self.session.verdict is None)

    def get_run_id(self) -> str:
        """Return the run id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the rendezvous, as torch's own backends do, and leave it."""
        self.session.report(Close())
        self.session.leave("its agent has shut down")
        return True


def create_handler(parameters: elastic.RendezvousParameters) -> elastic.RendezvousHandler:
    """Return the handler of this node, from torchrun's parameters and Slurm's variables.

    Raises:
        SlurmEnvironmentError: This process is not in a Slurm step.
        ConfigError: ``interface`` is not the name of an interface of this node.
        PermissionError: Other users may read the key file.
    """
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
    settings = RendezvousSettings()
    join_timeout_s = float(parameters.get("join_timeout", settings.join_timeout_s))
    last_call_s = float(parameters.get("last_call_timeout", settings.last_call_s))
    run_id = f"{slurm.step_identity}.{parameters.run_id}"
    interface = interface_module.find(
        slurm.node_name,
        parameters.get("interface"),
        lambda: SlurmClient().node(slurm.node_name).address,
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface.name)
    me = Agent(f"{slurm.job_id}.{slurm.node_id}", slurm.restart_count, slurm.node_id,
               slurm.node_name, nproc=1)  # fmt: skip
    given = parameters.get("dir")
    if given is None:
        folder = user_folder()
    else:
        folder = Path(given)
        make_folder(folder, parents=True, mode=0o700)
    run = _make_step_folder(folder / "torchrun", run_id)
    secret = sign(user_key(folder), run_id).encode()
    mount = Mount.of(run.path)
    context = LeaderContext(
        rules=RoundRules(
            parameters.min_nodes, parameters.max_nodes, 0,
            settings.straggler_timeout_s, last_call_s, scale_up="immediate",
        ),
        heartbeat=HeartbeatConfig.of(
            settings.heartbeat_interval_s, settings.heartbeat_timeout_s, parameters.max_nodes,
            mount.refreshed_stale_s,
        ),
        secret=secret,
        log=DecisionLog(run.rdzv, secret),
        make_status_writer=partial(
            StatusWriter, run, run_id, EventLog(run.path / f"events-{slurm.node_id}.jsonl", me.task)
        ),
        scheduler=_Step(slurm, interface.address),
        address=interface.address,
        is_local=mount.is_local,
    )  # fmt: skip
    return SlurmRendezvousHandler(Session(me, context), parameters.run_id, join_timeout_s)


def _make_step_folder(steps: Path, run_id: str) -> RunDir:
    """Return the step's folder and remove month-old ones; UntrustedRunError if not this user's."""
    run = RunDir(steps / run_id)
    make_folder(run.path, parents=True, mode=0o700)
    ownership.require_own(run.path)
    run.make_log_folder()
    for old in steps.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _KEPT_S:
                shutil.rmtree(old, ignore_errors=True)
    return run


class _Step:
    """The scheduler of one Slurm step: all its nodes run from the start, and none is queued."""

    def __init__(self, slurm: SlurmEnvironment, address: str) -> None:
        names = [f"{slurm.job_id}.{n}" for n in range(slurm.num_nodes)]
        self._tasks = {
            name: TaskState(name, "RUNNING", node=host)
            for name, host in zip(names, slurm.hosts, strict=True)
        }
        self._address = address
        self._store: TCPStore | None = None

    def make_store(self) -> tuple[str, int]:
        with open_port(self._address) as listening:
            self._store = host_store(listening, {})
            return self._address, int(listening.getsockname()[1])

    def poll_tasks(self) -> Mapping[str, TaskState]:
        return self._tasks

    def _do_nothing(self, *_: object, **__: object) -> None:
        """No task of a step is queued, and srun and torchrun write the logs."""

    is_running = prepare_store = cancel_pending = postpone_pending = _do_nothing
    restart_tasks = readmit = exclude_nodes = log_of = _do_nothing
