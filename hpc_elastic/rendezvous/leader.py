"""Leader: carries out what `leader_state` decides, by connections, files and Slurm.

Everything runs in one event loop; whatever may block (files, Slurm) runs in threads. All that the
leader does passes through its `term`; when that is over, the leader ends. Messages to an
agent: ``welcome``, ``round``, ``stop``, ``checkpoint_request``, ``stacks``, ``notice``,
``end``, ``give back``, ``waiting``, ``ft`` and ``beat``; from an agent: ``hello``, ``join``,
``here``, ``failed``, ``finished``, ``checkpoint``, ``request_checkpoint``, ``step_vote``,
``stalled``, ``stacks``, ``notice``, ``noticed``, ``leave``, ``close``, ``ft`` and ``beat``. What is
in an ``ft`` is for the lighthouse (`hpc_elastic.ft.messages`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import resource
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.effects import (
    Announce,
    Append,
    ClearHolds,
    Disconnect,
    Effect,
    Exclude,
    LetOthersStart,
    Note,
    Postpone,
    QuerySweep,
    QueryTasks,
    Readmit,
    RemoveNotice,
    RenewLease,
    Send,
    Show,
    place_message,
    places,
)
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig, LeaderState
from hpc_elastic.rendezvous.log_entry import Agent, LogEntry, RoundRules, carried_out
from hpc_elastic.rendezvous.round_state import RoundPhase
from hpc_elastic.rendezvous.run_status import waiting_for
from hpc_elastic.rendezvous.status_writer import StatusWriter
from hpc_elastic.rendezvous.term import SharedFiles, Term, TermFolder, TermOverError
from hpc_elastic.run.directory import STATUS_SELDOM_S
from hpc_elastic.shared_files import Mount
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.transport.connection import (
    BUFFER_BYTES,
    CONNECTION_ERRORS,
    Listener,
    ServerConnection,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_S = 0.5
_GARBAGE = 50_000
"""Objects between two looks for garbage: with ten thousand agents each look is long, and there is
next to none."""
_READMIT_S = 10.0
_QUORUM_TICK_S = 0.05
_NODES_A_STATUS = 500
"""status.json is written once a second, and once more for every so many nodes."""


class Leader:
    """Leads one term, from its claim until `stop`, a newer term, or the end of the run."""

    def __init__(self, office: LeaderContext, claim: LogEntry, listener: Listener) -> None:
        now = time.monotonic()
        self._office = office
        self._journal = office.make_journal(claim.term)
        self._claim = claim
        self._listener = listener
        rng = random.Random()
        self._leadership = LeaderState(claim, office.rules, office.liveness, now, rng)
        self._term = Term(self._leadership, self, office.pace.show_s)
        notices = office.notices
        self._folder = TermFolder(claim.term, notices) if notices is not None else None
        self._is_notice_confirmed = asyncio.Event()
        self._agents: dict[Agent, ServerConnection] = {}
        self._visitors: dict[ServerConnection, Agent | None] = {}
        """Everybody who is connected; None: it has not proved yet to be an agent."""
        self._strangers: dict[ServerConnection, None] = {}
        """Those of them, the longest first: they may not take all that may be open."""
        self._max_strangers = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._num_refused = 0
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._arrivals: set[asyncio.Task[None]] = set()
        self._duties: set[asyncio.Task[None]] = set()
        self._clean_up: set[asyncio.Task[None]] = set()
        self._ending: asyncio.Task[None] | None = None
        """What is to be done when the term is over; None: it is not."""
        self._threads = ThreadPoolExecutor(thread_name_prefix="leader")
        self._store: StoreAddress | None = None
        """Where the workers of the last round meet."""
        self._readmitting: asyncio.Task[None] | None = None
        self._lease = office.register.make_lease(claim.term)
        self._renewing = False

    # ---- life ---------------------------------------------------------------------------

    def lead(self) -> None:
        """Begin to decide."""
        gc.set_threshold(max(_GARBAGE, gc.get_threshold()[0]))
        self._term.handle(self._leadership.begin)
        self._listener.serve(self._take)
        duties = self._tick(), self._watch_log(), self._tell_status(), self._readmit()
        for duty in duties:
            self._start(duty, self._duties)
        if self._folder is not None:
            self._start(self._watch_notices(self._folder), self._duties)
        if self._office.rules.ft:
            self._start(self._tick_quorum(), self._duties)

    async def depart(self, agent: Agent, within_s: float = 1.0) -> None:
        """Entry that this leader's own node leaves, for the next one to know.

        Without that, its replica would be taken for one that died with the leader.
        """
        why, now = "it leaves", time.monotonic()
        self._term.handle(self._leadership.disconnected, agent, why, now)
        while self._leadership.is_deciding and time.monotonic() < now + within_s:
            await asyncio.sleep(0.005)

    async def stop(self, linger_s: float = 10.0) -> None:
        """Stop leading. Agents that have not heard the last word yet are waited for.

        If it is cancelled, call it again: only a stop that returns leaves nothing behind.
        """
        if not self._term.is_over:
            await self._finish(linger_s)
            self._term.end()
        await self.over()

    async def over(self) -> None:
        """Wait until the term is over, and nothing of this leader is left."""
        while self._ending is None:
            await asyncio.sleep(0.1)
        await asyncio.shield(self._ending)

    async def _finish(self, linger_s: float) -> None:
        """Let everybody hear the last word, and what is begun be done."""
        deadline = time.monotonic() + linger_s
        last = (RoundPhase.ENDED, RoundPhase.DISBANDED)
        while self._leadership.run.phase in last and self._agents:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.02)
        self._term.handle(self._leadership.knows_notice, self._claim.leader.task)  # it is going
        for duty in self._duties:
            duty.cancel()
        if self._folder is not None:
            self._start(self._remove_confirmed(self._folder), self._clean_up)
        await asyncio.gather(*self._duties, *self._clean_up, return_exceptions=True)

    def let_go(self) -> None:
        """See `Hands`: they will find the next leader."""
        self._listener.close()
        for visitor in self._visitors:
            visitor.close()
        for task in (*self._duties, *self._clean_up):
            task.cancel()
        self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        await asyncio.gather(*self._duties, *self._clean_up, return_exceptions=True)
        while self._visitors:  # a second at most (`ServerConnection.close`)
            await asyncio.sleep(0.01)
        await self._journal.close()
        self._lease.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(
        self, duty: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(self._until_it_fails(duty))
        among.add(task)
        task.add_done_callback(among.discard)
        task.add_done_callback(lambda _: duty.close())  # cancelled before its first step
        return task

    async def _until_it_fails(self, duty: Coroutine[Any, Any, None]) -> None:
        try:
            await duty
        except Exception:
            self._fail()

    @contextlib.contextmanager
    def _or_fail(self) -> Iterator[None]:
        try:
            yield
        except CONNECTION_ERRORS:
            raise
        except Exception:
            self._fail()

    def _fail(self) -> None:
        _log.exception("the leader failed; stepping down")
        self._term.end()

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, work, *arguments)

    # ---- agents -------------------------------------------------------------------------

    def _take(self, connection: socket.socket) -> None:
        visitor = ServerConnection(self._office.secret, self._claim.term, self, self._buffer)
        self._visitors[visitor] = None
        self._strangers[visitor] = None
        if len(self._strangers) > self._max_strangers:
            next(iter(self._strangers)).abort("too many have not proved who they are")
        self._start(self._let_in(visitor, connection), self._arrivals)

    async def _let_in(self, visitor: ServerConnection, connection: socket.socket) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: visitor, connection)
        except OSError as e:
            connection.close()
            self.on_disconnect(visitor, f"it ended as soon as it came: {e}")

    def on_connect(self, visitor: ServerConnection, hello: dict[str, Any]) -> None:
        """See `Host`."""
        agent = Agent(**hello)
        with self._or_fail():
            self._term.handle(self._leadership.connected, agent, time.monotonic())
        self._agents[agent] = visitor
        self._visitors[visitor] = agent
        self._strangers.pop(visitor, None)

    def on_message(self, visitor: ServerConnection, message: dict[str, Any]) -> None:
        """See `Host`."""
        agent = self._visitors[visitor]
        if agent is None or self._agents.get(agent) is not visitor:
            return  # the agent has come back on another connection
        with self._or_fail():
            now = time.monotonic()
            self._term.handle(self._leadership.received, agent, _on_our_clock(message), now)

    def on_disconnect(self, visitor: ServerConnection, why: str) -> None:
        """See `Host`."""
        agent = self._visitors.pop(visitor)
        self._strangers.pop(visitor, None)
        if agent is None:
            self._num_refused += 1
            return
        _log.info("the connection to %s ended: %s", agent.task, why)
        if self._agents.get(agent) is visitor:
            self._let_go(agent, why)
            with self._or_fail():
                now, why = time.monotonic(), "its connection closed"
                self._term.handle(self._leadership.disconnected, agent, why, now)

    def _send(self, agent: Agent, message: dict[str, Any]) -> None:
        if agent in self._agents and not self._term.is_over:
            self._agents[agent].send(message)

    def _let_go(self, agent: Agent, why: str) -> None:
        visitor = self._agents.pop(agent, None)
        if visitor is not None:
            visitor.abort(why)

    # ---- effects ------------------------------------------------------------------------

    def carry_out(self, effect: Effect) -> None:
        """See `Hands`."""
        world = self._office.world
        match effect:
            case Send(agents, message):
                for agent in self._agents if agents is None else agents:
                    self._send(agent, message)
            case Disconnect(agent):
                assert agent is not None
                self._let_go(agent, "silent, or connected anew")
            case Note(kind, fields):
                self._journal.append_event(kind, **fields)
            case Append():
                self._start(self._append(effect), self._duties)
            case Announce():
                for agent, place in places(effect, self._store or ("", 0)):
                    self._send(agent, place_message(effect, agent, place))
                self._term.show(time.time())
            case QueryTasks():
                self._start(self._query_tasks(), self._duties)
            case QuerySweep(lost):
                self._start(self._query_sweep(lost), self._duties)
            case LetOthersStart(lost):
                self._let_slurm(world.let_others_start, lost)
            case RenewLease():
                self._renew_lease()
            case Show(status, lines):
                self._journal.write_status(status, lines)
            case RemoveNotice(name, in_vain):
                if in_vain:
                    _log.warning("the notice %s names no task or host of the run", name)
                assert self._folder is not None
                self._folder.confirm(name)
                self._is_notice_confirmed.set()
            case Postpone(delay_s):
                self._let_slurm(world.postpone_pending, delay_s)
            case Exclude(hosts, why):
                self._let_slurm(world.exclude, hosts, why)
            case Readmit(tasks):
                if self._readmitting is None or self._readmitting.done():
                    self._readmitting = self._let_slurm(world.readmit, tasks)
            case ClearHolds(tasks, possibly_alive, failed_on):
                avoids = sorted({*possibly_alive.values()})
                self._journal.append_event("tasks_restarted", tasks=list(tasks), avoids=avoids)
                self._let_slurm(world.clear_holds, tasks, possibly_alive, failed_on)

    def publish(self, entry: LogEntry, afterwards: list[Effect]) -> None:
        """See `Hands`."""
        self._start(self._publish(entry, afterwards), self._clean_up)

    def _let_slurm(self, work: Callable[..., None], *arguments: object) -> asyncio.Task[None]:
        return self._start(self._if_it_leads(work, *arguments), self._clean_up)

    async def _if_it_leads(self, work: Callable[..., None], *arguments: object) -> None:
        """Do in a thread what no entry guards, unless an entry says that another leads."""
        while not await self._in_thread(self._try_if_it_leads, partial(work, *arguments)):
            await asyncio.sleep(_RETRY_S)

    def _try_if_it_leads(self, work: Callable[[], None]) -> bool:
        """Return whether it is known who leads; a thread waits for nothing else."""
        try:
            _, last = self._office.register.last()
        except OSError as e:
            _log.info("whether term %d is over cannot be read: %s", self._claim.term, e)
            return False
        if not self._term.is_over and (last is None or last.term <= self._claim.term):
            work()
        return True

    async def _append(self, append: Append) -> None:
        """Append an entry, however long the file system takes."""
        entry = append.entry
        while True:
            try:
                if append.needs_store:
                    self._store = await self._in_thread(self._office.world.make_store)
                is_ours = await self._in_thread(self._office.register.create, entry)
                break
            except OSError as e:
                _log.warning("entry %d is not written yet, trying on: %s", entry.index, e)
                await asyncio.sleep(_RETRY_S)
        self._term.handle(self._leadership.appended if is_ours else self._leadership.refused)

    async def _publish(self, entry: LogEntry, afterwards: list[Effect]) -> None:
        self._term.show(time.time())  # before the result, whose readers take it for the last
        await self._journal.publish_result(entry)
        self._term.do(afterwards)
        await self._if_it_leads(self._office.world.cancel_pending)

    async def _query_tasks(self) -> None:
        view = await self._in_thread(self._office.world.view)
        self._term.handle(self._leadership.slurm_says, view, time.monotonic())

    async def _query_sweep(self, lost: Mapping[str, int]) -> None:
        why = await self._in_thread(self._office.world.waits_in_vain, lost)
        self._term.handle(self._leadership.sweep_says, why, time.monotonic())

    def _renew_lease(self) -> None:
        if not self._renewing:  # the file system may hang
            self._renewing = True
            self._start(self._renew(), self._duties)

    async def _renew(self) -> None:
        try:
            await self._in_thread(self._lease.renew)
        except OSError as e:
            _log.info("lease not renewed: %s", e)
        else:
            self._term.handle(self._leadership.renewed)
        finally:
            self._renewing = False

    # ---- duties -------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            self._term.handle(self._leadership.tick, time.monotonic())
            await asyncio.sleep(self._office.liveness.heartbeat_interval_s)

    async def _tick_quorum(self) -> None:
        """Let the lighthouse of replicas see that time passes."""
        while True:
            await asyncio.sleep(_QUORUM_TICK_S)
            self._term.handle(self._leadership.tick_quorum, time.monotonic())

    async def _watch_log(self) -> None:
        """Step down once somebody else leads."""
        while True:
            with contextlib.suppress(OSError):
                number = await self._in_thread(self._office.register.last_index)
                self._term.handle(self._leadership.saw, number)
            await asyncio.sleep(self._office.pace.look_s)

    async def _watch_notices(self, folder: TermFolder) -> None:
        """Pass on who is asked to leave."""
        while True:
            with self._if_not_over(), contextlib.suppress(OSError):
                self._is_notice_confirmed.clear()
                claimed = await self._in_thread(carried_out, folder.claim_notices())
                self._term.handle(self._leadership.asked_to_leave, claimed)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._office.pace.look_s):
                    await self._is_notice_confirmed.wait()

    async def _remove_confirmed(self, folder: TermFolder) -> None:
        with self._if_not_over(), contextlib.suppress(OSError):  # the next leader finds it again
            await self._in_thread(carried_out, folder.remove_confirmed())

    @contextlib.contextmanager
    def _if_not_over(self) -> Iterator[None]:
        try:
            yield
        except TermOverError as e:
            _log.warning("term %d is over: %s", self._claim.term, e)
            self._term.end()

    async def _readmit(self) -> None:
        while True:
            await asyncio.sleep(_READMIT_S)
            self._term.readmit()

    async def _tell_status(self) -> None:
        while True:
            if self._journal.is_over:
                self._term.end()
            self._term.show(time.time())
            self._count_strangers()
            run = self._leadership.run
            if run.phase is RoundPhase.FORMING:
                text = waiting_for(run, self._office.world.log_of)
                for agent in list(run.participants.joined):
                    self._send(agent, {"type": "waiting", "text": text})
            await asyncio.sleep(1.0 + len(self._agents) / _NODES_A_STATUS)

    def _count_strangers(self) -> None:
        if self._num_refused:
            _log.info("%d connections were none of the run's agents", self._num_refused)
            self._num_refused = 0


def _on_our_clock(message: dict[str, Any]) -> dict[str, Any]:
    """Give failures the leader's time: agents send their age, since their clocks may differ."""
    for item in (*message.get("failures", ()), *message.get("ranks", ())):
        item["time"] = time.time() - float(item.pop("age_s"))
    return message


# ---- Dependencies of a leader


StoreAddress = tuple[str, int]


@dataclass(frozen=True)
class LeaderTiming:
    """How often a leader that trains undisturbed turns to the run's files; seconds."""

    look_s: float = 1.0
    """Between two looks for a later leader, and for notices."""
    show_s: float = 0.0
    """Between two statuses that differ in their numbers alone; 0: each second."""

    @classmethod
    def of(cls, mount: Mount) -> LeaderTiming:
        """Return that of a run on a mount: a server of files is asked more seldom."""
        return cls() if mount.is_local else cls(look_s=6.0, show_s=STATUS_SELDOM_S)


class LeaderScheduler(Protocol):
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
        possibly_alive: Mapping[str, str],
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
class LeaderContext:
    """What a leader of a run works with."""

    rules: RoundRules
    liveness: HeartbeatConfig
    secret: bytes
    register: DecisionLog
    make_journal: Callable[[int], StatusWriter]
    """Makes the journal of the leader of a term; 0: of an agent that does not lead."""
    world: LeaderScheduler
    notices: SharedFiles | None = None
    """Where it is asked for nodes to be left; None: nowhere."""
    generation: int = 0
    """The run's, as this agent's task was submitted."""
    pace: LeaderTiming = LeaderTiming()


@dataclass(frozen=True)
class LeaderCandidate:
    """What this agent needs to lead: where to listen, and what a leader works with."""

    address: str
    office: LeaderContext
    is_running: Callable[[str], bool | None]
    """Ask (blocking) Slurm whether a task is RUNNING; None where nobody knows."""
