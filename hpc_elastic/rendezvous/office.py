"""What an agent leads a run with, if it comes to that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpc_elastic.mount import Mount
from hpc_elastic.rendezvous.attendance import Liveness
from hpc_elastic.rendezvous.journal import Journal
from hpc_elastic.rendezvous.quorum_keeper import MakeKeeper
from hpc_elastic.rendezvous.register import Register
from hpc_elastic.rendezvous.rules import Rules
from hpc_elastic.rendezvous.term_folder import SharedFiles
from hpc_elastic.rundir import STATUS_SELDOM_S
from hpc_elastic.slurm.states import TaskState

StoreAddress = tuple[str, int]


@dataclass(frozen=True)
class Pace:
    """How often a leader that trains undisturbed turns to the run's files; seconds."""

    look_s: float = 1.0
    """Between two looks for a later leader, and for notices."""
    show_s: float = 0.0
    """Between two statuses that differ in their numbers alone; 0: each second."""

    @classmethod
    def of(cls, mount: Mount) -> Pace:
        """Return that of a run on a mount: a server of files is asked more seldom."""
        return cls() if mount.is_local else cls(look_s=6.0, show_s=STATUS_SELDOM_S)


class World(Protocol):
    """What a leader needs beyond the run directory. All calls but the last may block."""

    def make_store(self) -> StoreAddress:
        """Start a fresh bootstrap store for a round; return its address and port.

        torch's may take seconds, for it looks its own name up.
        """

    def view(self) -> Mapping[str, TaskState] | None:
        """Ask how the tasks of the run are; None where nobody knows."""

    def cancel_pending(self) -> None:
        """Take back the run's tasks that are still in the queue: it has ended.

        Other runs of its sweep that stay away may start on its nodes.
        """

    def postpone_pending(self, delay_s: float) -> None:
        """Let none of the run's queued tasks start for a while."""

    def waits_in_vain(self, lost: Mapping[str, int]) -> str | None:
        """Return why the run waits in vain for its min nodes; None if it may yet get them."""

    def let_others_start(self, lost: Iterable[str]) -> None:
        """Let runs of the sweep start that stay away, if there are idle nodes for them."""

    def clear_holds(
        self,
        tasks: Iterable[str],
        unseen: Mapping[str, str],
        failed_on: Mapping[str, Sequence[str]],
    ) -> None:
        """Let tasks that Slurm holds, or has ended, start again soon.

        Those whose end nobody has seen may run still on these nodes, and do not start there; nor
        do others where they failed before they joined.
        """

    def readmit(self, tasks: Iterable[str]) -> None:
        """Let these tasks, which are gone, start there again where the nodes are rid of them."""

    def exclude(self, hosts: Iterable[str], why: str) -> None:
        """Let none of the run's queued tasks start on these hosts."""

    def log_of(self, task: str, attempt: int) -> str | None:
        """Return where an attempt's log is."""


@dataclass(frozen=True)
class Office:
    """What a leader of a run works with."""

    rules: Rules
    liveness: Liveness
    secret: bytes
    register: Register
    make_journal: Callable[[int], Journal]
    """Makes the journal of the leader of an epoch; 0: of an agent that does not lead."""
    world: World
    notices: SharedFiles | None = None
    """Where it is asked for nodes to be left; None: nowhere."""
    make_keeper: MakeKeeper | None = None
    """Makes the keeper of the replicas' quorum; needed where ``rules.ft`` is set."""
    generation: int = 0
    """The run's, as this agent's task was submitted."""
    pace: Pace = Pace()


@dataclass(frozen=True)
class Candidacy:
    """What this agent needs to lead: where to listen, and what a leader works with."""

    address: str
    office: Office
    is_running: Callable[[str], bool | None]
    """Ask (blocking) Slurm whether a task is RUNNING; None where nobody knows."""
