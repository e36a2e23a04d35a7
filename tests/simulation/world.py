"""Virtual time: a heap of events, processes that may be paused or dead, the network, and Slurm."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import combinations, permutations
from typing import Any, Protocol

from hpc_elastic.slurm.job_state import Phase, TaskState
from simulation.scenario import SLURM_TIMEOUT_S

TRACE_LINES = 40

Call = tuple[Callable[..., None], tuple[Any, ...]]


class Process:
    """A process of a node: handles its events in order, unless it is paused or dead."""

    __slots__ = ("_backlog", "alive", "paused")

    def __init__(self) -> None:
        self.alive = True
        self.paused = False
        self._backlog: list[Call] = []

    def call(self, handler: Callable[..., None], *args: Any) -> None:
        """Let the process handle an event: now, after its pause, or (if it is dead) never."""
        if self.paused:
            self._backlog.append((handler, args))
        elif self.alive:
            handler(*args)

    def resume(self, timers_last: bool) -> None:
        """End a pause, and handle the events that came during it.

        Args:
            timers_last: Handle messages of the network before timers that are due.
        """
        self.paused = False
        backlog, self._backlog = self._backlog, []
        if timers_last:
            backlog.sort(key=lambda call: not call[1])
        for handler, args in backlog:
            self.call(handler, *args)


class World:
    """The clock that no simulated node sees, the random generator, and the trace of events."""

    __slots__ = ("_heap", "_num", "now", "num_events", "rng", "trace")

    def __init__(self, seed: int, whole_trace: bool = False) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.num_events = 0
        self.trace: deque[tuple[float, str, str, object]] = deque(
            maxlen=None if whole_trace else TRACE_LINES
        )
        self._heap: list[
            tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]
        ] = []
        self._num = 0

    def after(
        self, delay_s: float, process: Process | None, handler: Callable[..., None], *args: Any
    ) -> None:
        """Schedule an event, in a process or (None) outside of all."""
        self._num += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._num, process, handler, args))

    def run(self, until: float) -> None:
        """Handle all events up to this time."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            self.now, _, process, handler, args = pop(heap)
            self.num_events += 1
            if process is None:
                handler(*args)
            elif process.alive:
                process.call(handler, *args)
        self.now = until

    def log_event(self, who: str, what: str, detail: object = "") -> None:
        """Add a line to the trace, which is formatted only when it is shown."""
        self.trace.append((self.now, who, what, detail))


# ---- Connections as TCP makes them: ordered, reset by a crash, silent in a partition


CLIENT, SERVER = 0, 1
_LOST = object()
"""Marks the end of the connection in the queue."""


class Host:
    """The network's view of a node."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.up = False


class End(Protocol):
    """One side of a connection."""

    process: Process

    @property
    def host(self) -> Host:
        """The node that it is on."""

    def received(self, connection: Connection, message: Any) -> None:
        """Handle a message of the other side."""

    def lost(self, connection: Connection) -> None:
        """The connection has ended."""


class Connection:
    """One connection; each side sends in order, and may close it."""

    __slots__ = ("_closed", "_last", "_missed", "_net", "_queues", "ends", "peer")

    def __init__(self, net: Network, client: End, server: End) -> None:
        self.ends = (client, server)
        self.peer: Any = None
        """Identity of the client, as the server knows it."""
        self._net = net
        self._queues: tuple[deque[Any], deque[Any]] = (deque(), deque())
        self._last = [0.0, 0.0]
        self._missed = [0, 0]
        self._closed = [False, False]

    def send(self, side: int, message: Any) -> None:
        """Send from a side; a message after the end is lost."""
        if self._closed[side]:
            return
        world = self._net.world
        at = max(self._last[side], world.now + self._net.delay())
        self._last[side] = at
        self._queues[side].append(message)
        world.after(at - world.now, None, self._arrive, side)

    def close(self, side: int, lose: bool = False) -> None:
        """Close a side; the other receives that after, or (``lose``) instead of, its messages."""
        if self._closed[side]:
            return
        if lose:
            self._queues[side].clear()
        self.send(side, _LOST)
        self._closed[side] = True

    def reset(self) -> None:
        """End the connection for both sides, as a router or a rebooted node does."""
        for side in (CLIENT, SERVER):
            self.close(side, lose=True)
            self._closed[side] = False  # it still receives the end itself
        for side in (CLIENT, SERVER):
            self._net.world.after(self._net.delay(), None, self._arrive, side)

    def vanish(self, side: int) -> None:
        """The side's node is dead: the other side receives not even the end."""
        self._closed[side] = True

    def retry(self) -> bool:
        """Deliver the messages that a partition held up; return whether there are any."""
        has_missed = any(self._missed)
        for side in (CLIENT, SERVER):
            for _ in range(self._missed[side]):
                self._net.world.after(self._net.delay(), None, self._arrive, side)
            self._missed[side] = 0
        return has_missed

    def _arrive(self, side: int) -> None:
        client, server = self.ends
        if self._net.is_cut(client.host, server.host):
            self._missed[side] += 1
            return
        queue, end = self._queues[side], self.ends[1 - side]
        if not queue or self._closed[1 - side]:
            return
        message = queue.popleft()
        if message is _LOST:
            self._closed[1 - side] = True
            end.process.call(end.lost, self)
        else:
            end.process.call(end.received, self, message)


class Network:
    """Which nodes reach each other."""

    __slots__ = ("_cuts", "_longest_delay_s", "connections", "isolated", "severed", "world")

    def __init__(self, world: World, longest_delay_s: float) -> None:
        self.world = world
        self._longest_delay_s = longest_delay_s
        self.connections: list[Connection] = []
        self.isolated: int | None = None
        """The slot of a node that is cut off for good."""
        self.severed: set[tuple[int, int]] = set()
        """Slots of nodes between which, in this direction, no connection comes up any more.

        Those to the leader stand: it is another network, or the leader is no node of these.
        """
        self._cuts: dict[tuple[int, int], int] = {}

    def delay(self) -> float:
        """Draw the delay of one message: mostly a few milliseconds, at times much longer."""
        chance = self.world.rng.random()
        if chance < 0.96:
            return 0.001 + 0.004 * chance
        return self._longest_delay_s * self.world.rng.random()

    def is_cut(self, a: Host, b: Host) -> bool:
        """Return whether a partition separates two nodes."""
        if a is b:
            return False
        if self.isolated is not None and self.isolated in (a.slot, b.slot):
            return True
        return bool(self._cuts) and bool(self._cuts.get(_pair(a, b)))

    def is_any_cut(self, hosts: list[Host]) -> bool:
        """Return whether any two of these nodes do not reach each other."""
        if not self.is_complete(host.slot for host in hosts):
            return True
        if self.isolated is None and not any(self._cuts.values()):
            return False
        return any(self.is_cut(a, b) for a in hosts for b in hosts)

    def is_complete(self, slots: Iterable[int]) -> bool:
        """Return whether none of these nodes is severed from another one."""
        return not self.severed or self.severed.isdisjoint(permutations(slots, 2))

    def num_complete(self, slots: Collection[int]) -> int:
        """Return the largest number of these nodes that are not severed from each other."""
        sizes = range(len(slots), 0, -1) if self.severed else [len(slots)]
        groups = ((n, group) for n in sizes for group in combinations(slots, n))
        return next((n for n, group in groups if self.is_complete(group)), 0)

    def cut(self, a: Host, b: Host) -> None:
        """Start a partition between two nodes; several may overlap."""
        self._cuts[_pair(a, b)] = self._cuts.get(_pair(a, b), 0) + 1

    def mend(self, a: Host, b: Host) -> None:
        """End a partition: connections deliver what was under way, and some are reset."""
        self._cuts[_pair(a, b)] -= 1
        if self.is_cut(a, b):
            return
        for connection in self.connections:
            hosts = {end.host.slot for end in connection.ends}
            if hosts == {a.slot, b.slot} and connection.retry() and self.world.rng.random() < 0.3:
                connection.reset()

    def connect(self, client: End, server: End) -> Connection:
        """Make a connection."""
        connection = Connection(self, client, server)
        self.connections.append(connection)
        return connection

    def crashed(self, process: Process, silently: bool, lose: Callable[[], bool]) -> None:
        """A process has ended: its peers receive that, unless its node has died too."""
        for connection in self.connections:
            for side in (CLIENT, SERVER):
                if connection.ends[side].process is process:
                    if silently:
                        connection.vanish(side)
                    else:
                        connection.close(side, lose=lose())

    def came_back(self, host: Host) -> None:
        """A node has started again: it resets its old connections."""
        for connection in self.connections:
            for end in connection.ends:
                if end.host is host and not end.process.alive:
                    connection.reset()
        self.connections = [
            c for c in self.connections if c.ends[0].process.alive or c.ends[1].process.alive
        ]


def _pair(a: Host, b: Host) -> tuple[int, int]:
    return (a.slot, b.slot) if a.slot < b.slot else (b.slot, a.slot)


# ---- Slurm, as a run sees it: late, and silent at times


_SOONEST_ANSWER_S = 0.03


class Slurm:
    """Slurm's view of each task: its state and its attempt."""

    __slots__ = (
        "_longest_answer_s", "_reports_attempts", "_tasks", "_world", "down", "excluded", "hanging",
        "postponed_until",
    )  # fmt: skip

    def __init__(self, world: World, longest_answer_s: float, reports_attempts: bool) -> None:
        self._world = world
        self._longest_answer_s = longest_answer_s
        self._reports_attempts = reports_attempts
        self._tasks: dict[str, TaskState] = {}
        self.down = 0
        """Number of present faults that make it refuse to answer."""
        self.hanging = 0
        self.postponed_until = 0.0
        """No queued task starts before this time."""
        self.excluded: dict[str, float] = {}
        """Hosts on which no queued task starts, each with the end of its exclusion."""

    def set_state(
        self, task: str, state: str, attempt: int, starts_in_s: float | None = None, node: str = ""
    ) -> None:
        """Record a task's state."""
        self._tasks[task] = TaskState(
            task, state, reason="BeginTime" if starts_in_s else "", node=node,
            restarts=attempt if self._reports_attempts else None, starts_in_s=starts_in_s,
        )  # fmt: skip

    def end_exclusions(self) -> None:
        """Let queued tasks start on hosts whose exclusion has ended."""
        now = self._world.now
        self.excluded = {host: until for host, until in self.excluded.items() if until > now}

    def query_tasks(
        self, process: Process, answer: Callable[[dict[str, TaskState] | None], None]
    ) -> None:
        """Query the states of all tasks; the answer is None if Slurm does not answer."""
        if self.hanging:
            self._world.after(SLURM_TIMEOUT_S, process, answer, None)
        elif self.down:
            self._world.after(_SOONEST_ANSWER_S, process, answer, None)
        else:
            rng = self._world.rng
            takes = max(_SOONEST_ANSWER_S, self._longest_answer_s * rng.random())
            before = takes * rng.random()

            def read() -> None:
                self._world.after(takes - before, process, answer, dict(self._tasks))

            self._world.after(before, None, read)

    def query_task(
        self, process: Process, task: str, answer: Callable[[bool | None], None]
    ) -> None:
        """Query whether a task runs; the answer is None if that is unknown."""

        def runs(view: dict[str, TaskState] | None) -> None:
            state = (view or {}).get(task)
            answer(None if state is None else state.phase in (Phase.RUNNING, Phase.COMPLETING))

        self.query_tasks(process, runs)
