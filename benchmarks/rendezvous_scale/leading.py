"""Our leader as a run has it, in a process of its own; no store is started, no Slurm asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from hpc_elastic.config.schema import RendezvousSettings
from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.leader import Leader, LeaderContext
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig
from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, LogEntry, RoundRules, claim
from hpc_elastic.rendezvous.status_writer import StatusWriter
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.events import EventLog
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.transport.connection import Listener
from rendezvous_scale.process import allow_files

ADDRESS = "127.0.0.1"
SECRET = b"the secret of a run that lives for a few seconds"


def member(slot: int, attempt: int = 0) -> Agent:
    """Return an agent of the group."""
    return Agent(f"1000_{slot}", attempt, slot, f"node{slot:05d}", nproc=8)


def liveness(size: int) -> HeartbeatConfig:
    """Return what a run of so many nodes has by default."""
    defaults = RendezvousSettings()
    return HeartbeatConfig.of(defaults.heartbeat_interval_s, defaults.heartbeat_timeout_s, size)


class World:
    """Slurm calls every task RUNNING; nothing else is asked for."""

    def __init__(self, size: int) -> None:
        tasks = [member(slot).task for slot in range(size)]
        self._view = {task: TaskState(task, "RUNNING", node="node") for task in tasks}

    def make_store(self) -> tuple[str, int]:
        """No store: nobody starts workers."""
        return ADDRESS, 1

    def view(self) -> dict[str, TaskState]:
        """Slurm's word."""
        return self._view

    def cancel_pending(self) -> None:
        """Nothing is queued."""

    def postpone_pending(self, delay_s: float) -> None:
        """Nothing is queued."""

    def waits_in_vain(self, lost: Mapping[str, int]) -> None:
        """There is no sweep."""

    def let_others_start(self, lost: Iterable[str]) -> None:
        """There are no other runs."""

    def clear_holds(self, tasks: Iterable[str]) -> None:
        """Slurm holds nothing."""

    def exclude(self, hosts: Iterable[str], why: str) -> None:
        """Nothing is queued."""

    def log_of(self, task: str, attempt: int) -> None:
        """There are no logs."""


def lead(pipe: Connection, size: int, folder: Path) -> None:
    """Lead a group of ``size`` nodes, exactly, until the pipe closes.

    Sends the leader's entry first; then, whenever it is asked, the processor seconds used so far.
    """
    allow_files(size)
    asyncio.run(_lead(pipe, size, folder))


async def _lead(pipe: Connection, size: int, folder: Path) -> None:
    office = _office(size, folder)
    listener = Listener(ADDRESS)
    entry = _claim(office.log, listener.port)
    leader = Leader(office, entry, listener)
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


def _office(size: int, folder: Path) -> LeaderContext:
    run = RunDir(folder)
    events = EventLog(run.events(member(0).task), member(0).task)
    for needed in (run.first_term, events.path.parent):
        needed.mkdir(parents=True, exist_ok=True)
    settings = RendezvousSettings()
    rules = RoundRules(size, size, 3, settings.straggler_timeout_s, settings.last_call_s)
    register = DecisionLog(run.rdzv, SECRET)
    return LeaderContext(
        rules,
        liveness(size),
        SECRET,
        register,
        partial(StatusWriter, run, "scale", events),
        World(size),
    )


def _claim(register: DecisionLog, port: int) -> LogEntry:
    here = Endpoint(ADDRESS, port, member(0).task, 0)
    entry = claim(1, None, here, time.time())
    assert register.create(entry)
    return entry
