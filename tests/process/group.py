"""A run's agents as sessions in threads of this process, over real sockets and files."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.leader import LeaderContext
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig
from hpc_elastic.rendezvous.log_entry import Agent, RoundRules
from hpc_elastic.rendezvous.session import Outcome, Session
from hpc_elastic.rendezvous.term import RunFiles, StatusWriter
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.events import EventLog, read_events
from hpc_elastic.slurm.job_state import TaskState

SECRET = b"secret of this run"
PATIENCE_S = 20.0


class Group:
    """A run's agents on this machine, and the scheduler of its leader."""

    def __init__(self, folder: Path, **rules: object) -> None:
        self.run = RunDir(folder)
        for sub in (self.run.first_term, folder / "events"):
            sub.mkdir(parents=True, exist_ok=True)
        defaults = {
            "min_nodes": 1, "max_nodes": 4, "max_restarts": 1,
            "straggler_timeout_s": 60.0, "last_call_s": 0.5, "below_min_timeout_s": None,
            "scale_up": "immediate",
        }  # fmt: skip
        self.rules = RoundRules(**{**defaults, **rules})
        self.heartbeat = HeartbeatConfig(heartbeat_interval_s=0.1, heartbeat_timeout_s=2.0)
        self.register = DecisionLog(self.run.rdzv, SECRET)
        self.address = "127.0.0.1"
        self.running: frozenset[str] = frozenset()
        self.pending: frozenset[str] = frozenset()
        self.cancelled = threading.Event()
        self.brought_back: list[str] = []
        self.excluded: list[str] = []
        self.sessions: list[Session] = []
        self.threads = ThreadPoolExecutor(16)

    def agent(self, slot: int, nproc: int = 1, register: DecisionLog | None = None) -> Session:
        """Start an agent."""
        me = Agent(f"7_{slot}", 0, slot, f"node{slot}", nproc)
        self.running |= {me.task}  # so that the first round waits for it
        events = EventLog(self.run.events(me.task), me.task)
        context = LeaderContext(
            self.rules, self.heartbeat, SECRET,
            register or self.register, partial(StatusWriter, self.run, "run", events), self,
            self.address, RunFiles(self.run),
        )  # fmt: skip
        session = Session(me, context)
        self.sessions.append(session)
        return session

    def make_store(self) -> tuple[str, int]:
        """Return a fake address: no test here starts workers."""
        return "127.0.0.1", 1

    def poll_tasks(self) -> dict[str, TaskState]:
        """Return Slurm's states of the tasks."""
        states = {t: TaskState(t, "PENDING", reason="Resources") for t in self.pending}
        return states | {t: TaskState(t, "RUNNING", node="node9") for t in self.running}

    def cancel_pending(self) -> None:
        """Record the call."""
        self.cancelled.set()

    def _do_nothing(self, *_: object) -> None:
        """No other task is queued."""

    is_running = prepare_store = postpone_pending = readmit = _do_nothing

    def restart_tasks(
        self,
        tasks: Iterable[str],
        possibly_alive: Mapping[str, str],
        failed_on: Mapping[str, Sequence[str]],
    ) -> None:
        """Record the call."""
        self.brought_back += tasks

    def exclude_nodes(self, hosts: Iterable[str], why: str, until: float) -> None:
        """Record the call."""
        self.excluded += hosts

    def log_of(self, task: str, attempt: int) -> str:
        """Return the path of a task's log."""
        return f"/logs/{task}/{attempt}"

    def join(self, *sessions: Session) -> list[Outcome]:
        """Let these agents join at the same time, and return their outcomes."""
        waiting = [self.threads.submit(s.join, PATIENCE_S) for s in sessions]
        return [w.result(PATIENCE_S) for w in waiting]

    @property
    def leader(self) -> Session:
        """The agent that leads; there must be exactly one."""
        (leader,) = (s for s in self.sessions if s._leader is not None)
        return leader

    @property
    def followers(self) -> list[Session]:
        """The agents that do not lead, in their order of start."""
        return [s for s in self.sessions if s._leader is None]

    def events(self, kind: str) -> list[dict]:
        """The run's events of a kind."""
        return [e for e in read_events(self.run.path / "events") if e["kind"] == kind]


def eventually(condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def open_files() -> int:
    """Number of files and sockets that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def kill(session: Session) -> None:
    """End a session as the death of its process does: sockets close, no message is sent."""

    def drop() -> None:
        if session._leader is not None:
            session._leader._term.end_term()
        session._main.cancel()

    session._loop.call_soon_threadsafe(drop)
    session._thread.join(PATIENCE_S)
