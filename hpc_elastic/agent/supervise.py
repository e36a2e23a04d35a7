"""Wires a task together: the session with the leader, torch's agent, the run directory.

One call, `supervise`, lives as long as the task. It returns the task's exit code, and has told the
leader why this node goes, whatever the reason was.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from hpc_elastic.agent.agent import RunAgent
from hpc_elastic.agent.report import Place
from hpc_elastic.agent.task import Task
from hpc_elastic.agent.tasks import RunTasks, tasks_of
from hpc_elastic.agent.world import RunWorld
from hpc_elastic.config import Nproc
from hpc_elastic.control import DIRECTORY_VARIABLE
from hpc_elastic.errors import ConfigError, HpcElasticError, SlurmCommandError
from hpc_elastic.events import EventLog
from hpc_elastic.rendezvous import address
from hpc_elastic.rendezvous.handler import RoundStores, SlurmRendezvousHandler
from hpc_elastic.rendezvous.journal import Journal
from hpc_elastic.rendezvous.leader import Office
from hpc_elastic.rendezvous.leadership import Liveness
from hpc_elastic.rendezvous.machine import Rules
from hpc_elastic.rendezvous.record import Agent
from hpc_elastic.rendezvous.register import Register
from hpc_elastic.rendezvous.session import Candidacy, SentBack, Session
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.requeue import depart, give_back

_log = logging.getLogger(__name__)

TAKEN = 128 + signal.SIGTERM
_OPEN_FILES = 65_536


def supervise(task: Task) -> int:
    """Run the agent of one node until the run has ended or the node is taken."""
    signal.signal(signal.SIGTERM, _raise_signal)
    events = EventLog(task.run.events(task.name), task.name)
    events.write("task", attempt=task.attempt, host=task.slurm.node_name, pid=os.getpid())
    with tempfile.TemporaryDirectory(prefix="hpc_elastic-", dir=_memory_folder()) as folder:
        try:
            return _Node(task, events, Path(folder)).run()
        except SignalException as e:
            _log.warning("this node is taken: %s", e)
            events.write("taken", signal=e.sigval.name)
            if task.spec.launcher == "slurm":
                depart(task.name, SlurmClient(), attempt=task.attempt)
            return TAKEN
        except (RendezvousError, HpcElasticError) as e:
            events.write("gave up", why=str(e))
            print(f"hpc_elastic: {task.name} on {task.slurm.node_name}: {e}", file=sys.stderr)
            return 1


class _Node:
    """The parts of one task, made in the order in which they need each other."""

    def __init__(self, task: Task, events: EventLog, control: Path) -> None:
        self._task = task
        self._spec = task.spec
        self._events = events
        self._control = control
        self._tasks = tasks_of(task.spec)
        self._interface = _interface(task)
        self._nproc = num_workers(task.spec.nproc_per_node, task.slurm.cpus_on_node)
        self._agent: RunAgent | None = None

    def run(self) -> int:
        self._prepare_environment()
        session = self._open_session()
        try:
            exit_code = self._run_agent(session)
        except SignalException as e:
            session.leave(f"taken by {e.sigval.name}")
            raise
        finally:
            session.leave("its agent ended")
        return self._go_back(session.sent_back) if session.sent_back else exit_code

    def _go_back(self, sent_back: SentBack) -> int:
        """Give this node back to the queue."""
        self._events.write("given back", delay_s=round(sent_back.delay_s, 1))
        try:
            give_back(self._task.name, SlurmClient(), sent_back.delay_s, attempt=self._task.attempt)
        except SlurmCommandError as e:
            _log.error("this node could not be given back, so it ends its task: %s", e)
            return 1
        return TAKEN

    def _run_agent(self, session: Session) -> int:
        handler = SlurmRendezvousHandler(
            session, self._spec.run_id, self._spec.rendezvous.join_timeout_s
        )
        self._agent = RunAgent(
            self._worker_spec(handler), handler,
            place=Place(self._task.name, self._task.slurm.node_name, self._task.logs),
            control=self._control, records=self._task.run.rdzv,
            stop_timeout_s=self._spec.agent.stop_timeout_s, spares=self._spec.agent.spares,
        )  # fmt: skip
        self._agent.run()
        verdict = session.verdict
        return 0 if verdict is not None and verdict.status == "succeeded" else 1

    def _worker_spec(self, handler: SlurmRendezvousHandler) -> WorkerSpec:
        return WorkerSpec(
            role="default",
            local_world_size=self._nproc,
            rdzv_handler=handler,
            entrypoint=sys.executable,
            args=("-u", "-m", "hpc_elastic.agent.worker", str(self._task.run.path)),
            max_restarts=self._spec.max_restarts,
            monitor_interval=self._spec.agent.monitor_interval_s,
        )

    def _open_session(self) -> Session:
        task, slurm = self._task, self._task.slurm
        me = Agent(task.name, task.attempt, task.slot, slurm.node_name, self._nproc)
        office = self._office(self._tasks, task.run.secret.read_bytes())
        candidacy = Candidacy(self._interface.address, office, self._tasks.is_running)
        return Session(me, candidacy, progress=self._progress)

    def _office(self, tasks: RunTasks, secret: bytes) -> Office:
        """Return what this node would lead the run with."""
        run, spec, events = self._task.run, self._spec, self._events
        settings = spec.rendezvous
        return Office(
            rules=Rules(
                spec.min_nodes, spec.max_nodes, spec.max_restarts,
                settings.start_timeout_s, settings.last_call_s,
                grow=spec.grow, grow_after_s=spec.grow_after_s,
                min_wait_s=spec.min_wait_s if spec.launcher == "slurm" else None,
            ),
            liveness=Liveness.of(
                settings.heartbeat_s, settings.lost_after_s, spec.max_nodes
            ),
            secret=secret,
            register=Register(run.rdzv, secret),
            make_journal=lambda: Journal(run, spec.run_id, events),
            world=RunWorld(run, tasks, RoundStores(self._interface.address)),
        )  # fmt: skip

    def _progress(self) -> dict[str, Any]:
        """Return what the first of this node's workers last reported."""
        if self._agent is None or not self._agent.pages:
            return {}
        progress = self._agent.pages[min(self._agent.pages)].read()
        return {"step": progress.step, "total": progress.total_steps, "loss": progress.loss}

    def _prepare_environment(self) -> None:
        _allow_connections()
        cpus = min(self._task.slurm.cpus_on_node, len(os.sched_getaffinity(0)))
        threads = self._spec.agent.omp_num_threads or max(1, cpus // self._nproc)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", self._interface.name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", self._interface.name)
        os.environ[DIRECTORY_VARIABLE] = str(self._control)
        os.environ.update(self._spec.env)


def _allow_connections() -> None:
    """Let this process have as many open files as a leader may need, within the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


def num_workers(wanted: Nproc, cpus: int) -> int:
    """Return how many workers a node runs.

    Args:
        wanted: A number; ``gpu``: one a GPU; ``cpu``: one a CPU; ``auto``: one a GPU, or one
            where there is none.
        cpus: The CPUs that Slurm gave the task on this node.

    Raises:
        ConfigError: ``gpu`` on a node where torch sees none.
    """
    if isinstance(wanted, int):
        return wanted
    gpus = 0 if wanted == "cpu" else torch.cuda.device_count()
    if wanted == "gpu" and gpus == 0:
        raise ConfigError(
            "nproc_per_node", wanted, "torch sees no GPU on this node: set launcher.gpus_per_node"
        )
    return cpus if wanted == "cpu" else max(1, gpus)


def _interface(task: Task) -> address.Interface:
    if task.spec.launcher == "local":
        return address.LOOPBACK
    name = task.slurm.node_name
    return address.find(name, task.spec.interface, lambda: SlurmClient().node_address(name))


def _memory_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _raise_signal(number: int, _: object) -> None:
    raise SignalException(f"signal {number}", signal.Signals(number))
