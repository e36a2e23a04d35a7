"""Our leader as a run has it, in a process of its own; no store is started, no Slurm asked."""

import asyncio
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from hpc_elastic.config.schema import RendezvousSettings
from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.leader import Leader, LeaderContext
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig
from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, RoundRules, claim
from hpc_elastic.rendezvous.term import StatusWriter
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.events import EventLog
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.transport.connection import Listener
from rendezvous_scale.process import allow_files

ADDRESS = "127.0.0.1"
SECRET = b"the secret of a run that lives for a few seconds"


def member(slot: int, attempt: int = 0) -> Agent:
    return Agent(f"1000_{slot}", attempt, slot, f"node{slot:05d}", nproc=8)


def heartbeat(size: int) -> HeartbeatConfig:
    defaults = RendezvousSettings()
    return HeartbeatConfig.of(defaults.heartbeat_interval_s, defaults.heartbeat_timeout_s, size)


class IdleScheduler:
    """A scheduler that reports every task as RUNNING, and has nothing queued."""

    def __init__(self, size: int) -> None:
        tasks = [member(slot).task for slot in range(size)]
        self._view = {task: TaskState(task, "RUNNING", node="node") for task in tasks}

    def make_store(self) -> tuple[str, int]:
        """Return an address: no worker is started that would use it."""
        return ADDRESS, 1

    def poll_tasks(self) -> dict[str, TaskState]:
        return self._view

    def _do_nothing(self, *_: object) -> None:
        """Nothing is queued."""

    is_running = prepare_store = cancel_pending = postpone_pending = _do_nothing
    restart_tasks = readmit = exclude_nodes = log_of = _do_nothing


def lead(pipe: Connection, size: int, folder: Path) -> None:
    """Lead a group of ``size`` nodes, exactly, until the pipe closes.

    Sends the leader's entry first; then, whenever it is asked, the processor seconds used so far.
    """
    allow_files(size)
    asyncio.run(_lead(pipe, size, folder))


async def _lead(pipe: Connection, size: int, folder: Path) -> None:
    context = _context(size, folder)
    listener = Listener(ADDRESS)
    here = Endpoint(ADDRESS, listener.port, member(0).task, 0)
    entry = claim(1, None, here, time.time())
    assert context.log.create(entry)
    leader = Leader(context, member(0), entry, listener)
    leader.lead()
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), _tell_cpu, pipe, over)
    pipe.send(entry)
    await over.wait()
    await leader.stop(linger_s=0.0)


def _tell_cpu(pipe: Connection, over: asyncio.Event) -> None:
    try:
        pipe.recv()
        pipe.send(time.process_time())
    except (EOFError, OSError):
        asyncio.get_running_loop().remove_reader(pipe.fileno())
        over.set()


def _context(size: int, folder: Path) -> LeaderContext:
    run = RunDir(folder)
    events = EventLog(run.events(member(0).task), member(0).task)
    for needed in (run.first_term, events.path.parent):
        needed.mkdir(parents=True, exist_ok=True)
    settings = RendezvousSettings()
    waits_s = settings.straggler_timeout_s, settings.last_call_s
    rules = RoundRules(size, size, 3, *waits_s, below_min_timeout_s=None)
    log = DecisionLog(run.rdzv, SECRET)
    status = partial(StatusWriter, run, "scale", events)
    scheduler, address = IdleScheduler(size), "127.0.0.1"
    return LeaderContext(rules, heartbeat(size), SECRET, log, status, scheduler, address)
