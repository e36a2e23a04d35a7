"""What the controller knows of a job, of its steps and of their tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from hpc_elastic.testing.fake_slurm.processes import Process
from hpc_elastic.testing.fake_slurm.request import Request

PENDING, RUNNING = "PENDING", "RUNNING"
COMPLETED, FAILED, CANCELLED = "COMPLETED", "FAILED", "CANCELLED"
TIMEOUT, NODE_FAIL, PREEMPTED = "TIMEOUT", "NODE_FAIL", "PREEMPTED"
COMPACT = {
    **{PENDING: "PD", RUNNING: "R", COMPLETED: "CD", FAILED: "F", CANCELLED: "CA"},
    **{TIMEOUT: "TO", NODE_FAIL: "NF", PREEMPTED: "PR", "COMPLETING": "CG"},
}


@dataclass(frozen=True)
class Exit:
    """How a task ended: its exit code, or the signal that ended it."""

    code: int = 0
    signal: int = 0

    @property
    def as_shell(self) -> int:
        """One number, as a shell has it."""
        return 128 + self.signal if self.signal else self.code

    def __str__(self) -> str:
        return f"{self.code}:{self.signal}"


@dataclass
class Task:
    """One task of a step.

    Attributes:
        rank: Its number in the step.
        node: Where it runs.
        process: The process that looks after it.
        exit: How it ended; None: it has not.
        lost: Whether its node has died, and the controller does not know yet.
    """

    rank: int
    node: str
    process: Process
    exit: Exit | None = None
    lost: bool = False


@dataclass
class Step:
    """A job step; the batch script is one without a number.

    Attributes:
        number: Its number; None: the batch script.
        tasks: Its tasks, by rank.
        no_kill: Whether it outlives the loss of a node.
        kills_on_bad_exit: Whether a task that fails ends the others.
    """

    number: int | None
    tasks: list[Task] = field(default_factory=list)
    no_kill: bool = False
    kills_on_bad_exit: bool = False

    @property
    def is_over(self) -> bool:
        """Whether all of its tasks have ended."""
        return all(task.exit is not None for task in self.tasks)

    @property
    def exit(self) -> Exit:
        """The worst end of its tasks."""
        exits = [task.exit for task in self.tasks if task.exit is not None]
        return max(exits, key=lambda e: e.as_shell, default=Exit())


class Then(Enum):
    """What becomes of a job whose processes are being ended."""

    REQUEUE = "requeue"
    END = "end"


@dataclass
class Ending:
    """A job whose processes are being ended.

    Attributes:
        then: Whether it goes back to the queue.
        state: Its state after that.
        kill_at: When what is left of it is killed, in epoch seconds.
    """

    then: Then
    state: str
    kill_at: float


@dataclass
class Job:
    """One job, or one element of an array.

    Attributes:
        request: What it asks for.
        submitted: When, in epoch seconds.
        order: Its place in the queue.
        number: Its job id; None: it waits in its array's record, and has none yet.
        array: The array's job id; None: it is no element.
        index: Its index in the array.
        limit: How many elements of the array may run at a time; None: all.
        num_in_array: How many elements the array has.
        bounds: The lowest and the highest index of the array.
    """

    request: Request
    submitted: float
    order: int
    number: int | None = None
    array: int | None = None
    index: int | None = None
    limit: int | None = None
    num_in_array: int = 0
    bounds: tuple[int, int] = (0, 0)
    state: str = PENDING
    reason: str = "None"
    held: bool = False
    begin: float = 0.0
    may_requeue: bool = True
    excluded: frozenset[str] = frozenset()
    limit_s: float | None = None
    restarts: int = 0
    nodes: list[str] = field(default_factory=list)
    given: list[str] = field(default_factory=list)
    started: float | None = None
    ended: float | None = None
    preempted: float | None = None
    ending: Ending | None = None
    noticed: bool = False
    exit: Exit = field(default_factory=Exit)
    steps: list[Step] = field(default_factory=list)
    num_steps: int = 0

    @property
    def name(self) -> str:
        """What squeue calls it."""
        return f"{self.array}_{self.index}" if self.array is not None else str(self.number)

    @property
    def shown_state(self) -> str:
        """Slurm's word, COMPLETING included."""
        return "COMPLETING" if self.ending is not None else self.state

    @property
    def waits(self) -> bool:
        """Whether it waits for nodes, or will once its processes have ended."""
        if self.ending is not None:
            return self.ending.then is Then.REQUEUE
        return self.state == PENDING

    @property
    def has_nodes(self) -> bool:
        """Whether it runs, or its processes are being ended."""
        return self.state == RUNNING or self.ending is not None

    @property
    def is_over(self) -> bool:
        """Whether it has ended for good."""
        return self.ending is None and self.state not in (PENDING, RUNNING)

    @property
    def ends_at(self) -> float | None:
        """When its time is up; None: it has no limit, or does not run."""
        if self.started is None or self.limit_s is None:
            return None
        return self.started + self.limit_s

    @property
    def batch(self) -> Step | None:
        """The step of its batch script."""
        return next((step for step in self.steps if step.number is None), None)

    def all_tasks(self) -> Iterator[Task]:
        """Yield the tasks of all its steps."""
        for step in self.steps:
            yield from step.tasks
