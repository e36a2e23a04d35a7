"""Leader: carries out the effects of `leader_state`, over connections, files and Slurm.

Everything runs in one event loop; calls that may block (files, Slurm) run in threads. All effects
pass through the leader's `term`; when that is over, the leader stops. `messages` has what it sends
and receives.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from hpc_elastic.rendezvous import effects, messages
from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.follower_state import REMOVED
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig, LeaderState
from hpc_elastic.rendezvous.log_entry import Agent, Failure, LogEntry, RoundRules, RunEnding
from hpc_elastic.rendezvous.round_state import RoundPhase
from hpc_elastic.rendezvous.run_status import waiting_for
from hpc_elastic.rendezvous.term import RunFiles, StatusWriter, Term, TermFolder, TermOverError
from hpc_elastic.run.directory import STATUS_SELDOM_S
from hpc_elastic.run.events import LossReason
from hpc_elastic.shared_files import carried_out
from hpc_elastic.site import OptionalCalls, QueueAdvice, QueuePolicy, QueueQuestion
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.transport.auth import text_of
from hpc_elastic.transport.connection import Listener, ServerConnection
from hpc_elastic.transport.messages import pack, read_fields, unpack

_log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_S = 0.5
_STORE_TRIES = 120  # a leader that can make no store in a minute gives up its term: another may
_LONGEST_TEXT = 4000  # of the message and of the traceback of an error of its own
_GARBAGE = 50_000
"""Allocations between two garbage collections: with ten thousand agents each takes long, and there
is next to no garbage."""
_READMIT_S = 10.0
_QUORUM_TICK_S = 0.05
_NODES_PER_STATUS_S = 500
"""status.json is written once a second, plus another second for each group of this size."""


class Leader:
    """Leads one term, from its claim until `stop`, a newer term, or the end of the run.

    ``me`` is the agent of this process, ``claim`` the log entry that began the term; agents connect
    to ``listener``.
    """

    def __init__(
        self, context: LeaderContext, me: Agent, claim: LogEntry, listener: Listener
    ) -> None:
        now = time.monotonic()
        self._context = context
        self._me = me
        self._status_writer = context.make_status_writer(claim.term)
        self._claim = claim
        self._listener = listener
        rng = random.Random()
        self._state = LeaderState(claim, context.rules, context.heartbeat, now, rng)
        self._term = Term(self._state, self, 0.0 if context.is_local else STATUS_SELDOM_S)
        files = context.files
        self._folder = TermFolder(claim.term, files) if files is not None else None
        self._is_notice_confirmed = asyncio.Event()
        self._agents: dict[Agent, ServerConnection] = {}
        self._names: dict[ServerConnection, Agent] = {}
        self._duties: set[asyncio.Task[None]] = set()
        self._clean_up: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        """Releases all resources once the term is over; None before."""
        self._threads = ThreadPoolExecutor(thread_name_prefix="leader")
        self._store: messages.Address = ("", 0)  # bootstrap store of the last round's workers
        self._readmitting: asyncio.Task[None] | None = None
        self._calls = OptionalCalls()
        self._lease = context.log.make_lease(claim.term)
        self._is_renewing = False
        self.error: Exception | None = None
        """Why the leader has failed, if it could not record that; None otherwise."""

    # ---- start and stop -----------------------------------------------------------------

    def lead(self) -> None:
        """Begin to decide."""
        gc.set_threshold(max(_GARBAGE, gc.get_threshold()[0]))
        self._term.handle(self._state.start_leading)
        self._listener.serve(self._context.secret, self._claim.term, self)
        duties = [self._tick(), self._watch_log(), self._write_status()]
        duties.append(self._repeat(_READMIT_S, self._term.readmit))
        if self._folder is not None:
            duties.append(self._watch_notices(self._folder))
        if self._context.rules.ft:
            duties.append(self._repeat(_QUORUM_TICK_S, self._tick_quorum))
        for duty in duties:
            self._start(duty, self._duties)
        self._start(self._in_thread(self._context.scheduler.prepare_store), self._duties)

    async def record_departure(self, agent: Agent, within_s: float = 1.0) -> None:
        """Append an entry without this leader's own node, for the next leader.

        Otherwise the next leader counts its replica as one that died with this leader.
        """
        now = time.monotonic()
        self._term.handle(self._state.disconnected, agent, LossReason.LEADER_LEAVES, now)
        while self._state.is_deciding and time.monotonic() < now + within_s:
            await asyncio.sleep(0.005)

    async def stop(self, linger_s: float = 10.0) -> None:
        """Stop leading, once all agents have received the end of the run or ``linger_s`` is over.

        If it is cancelled, call it again: only a stop that returns has released everything.
        """
        if not self._term.is_over:
            await self._finish(linger_s)
            self._term.end_term()
        await self.wait_until_over()

    async def wait_until_over(self) -> None:
        """Wait until the term is over and all resources are released."""
        while self._closing is None:
            await asyncio.sleep(0.1)
        await asyncio.shield(self._closing)

    async def _finish(self, linger_s: float) -> None:
        """Wait until all agents have received the end of the run and begun work is done."""
        deadline = time.monotonic() + linger_s
        last = (RoundPhase.ENDED, RoundPhase.DISBANDED)
        while self._state.run.phase in last and self._agents and time.monotonic() <= deadline:
            await asyncio.sleep(0.02)
        self._term.handle(self._state.notice_confirmed, self._claim.leader.task)  # it is leaving
        for duty in self._duties:
            duty.cancel()
        if self._folder is not None:
            self._start(self._remove_confirmed(self._folder), self._clean_up)
        await asyncio.gather(*self._duties, *self._clean_up, return_exceptions=True)

    def disconnect_all(self) -> None:
        """See `Executor`: the agents find the next leader."""
        self._listener.close()
        for task in (*self._duties, *self._clean_up):
            task.cancel()
        self._closing = asyncio.create_task(self._release_resources())

    async def _release_resources(self) -> None:
        await asyncio.gather(*self._duties, *self._clean_up, return_exceptions=True)
        await self._listener.wait_closed()
        await self._status_writer.close()
        self._lease.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(
        self, duty: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]
    ) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await duty
            except Exception as e:
                self._fail(e)

        task = asyncio.create_task(run())
        among.add(task)
        task.add_done_callback(among.discard)
        task.add_done_callback(lambda _: duty.close())  # cancelled before its first step
        return task

    def _handle(self, event: Callable[..., list[effects.Effect]], *args: object) -> None:
        """Pass an event of a connection to the state, whose error ends the term."""
        try:
            self._term.handle(event, *args)
        except Exception as e:
            self._fail(e)

    def _fail(self, error: Exception, *, drops_append: bool = False) -> None:
        """Give up the term; ``drops_append``: the error is that no entry can be appended."""
        _log.exception("the leader failed; stepping down; its last events:\n%s", self._term.story)
        try:
            if not self._state.has_failed:
                self._term.handle(self._state.failed, self._failure_of(error), drops_append)
            elif drops_append:
                raise error
            elif not self._state.is_deciding:
                self._term.end_term()
        except Exception as e:
            self.error = e
            self._term.end_term()

    def _failure_of(self, error: Exception) -> Failure:
        me, lines = self._me, "".join(traceback.format_exception(error))
        return Failure(
            me.task, me.host, 0, 0, time.time(), str(error)[:_LONGEST_TEXT], type(error).__name__,
            lines[-_LONGEST_TEXT:], phase="lead",
            log=self._context.scheduler.log_of(me.task, me.attempt),
        )  # fmt: skip

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    # ---- agents -------------------------------------------------------------------------

    def on_connect(self, connection: ServerConnection, hello: dict[str, Any]) -> None:
        """See `ConnectionOwner`."""
        agent = read_fields(Agent, hello)
        self._handle(self._state.connected, agent, time.monotonic())
        self._agents[agent] = connection
        self._names[connection] = agent

    def on_message(self, connection: ServerConnection, message: dict[str, Any]) -> None:
        """See `ConnectionOwner`."""
        agent = self._names[connection]
        if self._agents.get(agent) is not connection:
            return  # the agent has another connection by now
        unpacked = unpack(message, messages.TO_LEADER, time.time())
        if unpacked is not None:
            self._handle(self._state.received, agent, unpacked, time.monotonic())

    def on_disconnect(self, connection: ServerConnection, reason: str) -> None:
        """See `ConnectionOwner`."""
        agent = self._names.pop(connection, None)
        if agent is None:
            return  # it was no hello of an agent
        _log.info("the connection to %s ended: %s", agent.task, reason)
        if self._agents.get(agent) is connection:
            self._disconnect(agent, reason)
            why = LossReason.CONNECTION_CLOSED
            self._handle(self._state.disconnected, agent, why, time.monotonic())

    def _send(self, agents: Iterable[Agent], message: messages.RunMessage) -> None:
        text = text_of(pack(message, time.time()))
        for connection in map(self._agents.get, agents):
            if connection is not None and not self._term.is_over:
                connection.send(text)

    def _disconnect(self, agent: Agent, reason: str) -> None:
        connection = self._agents.pop(agent, None)
        if connection is not None:
            connection.abort(reason)

    # ---- effects ------------------------------------------------------------------------

    def carry_out(self, effect: effects.Effect) -> None:
        """See `Executor`."""
        scheduler = self._context.scheduler
        match effect:
            case effects.Send(agents, message):
                self._send(list(self._agents) if agents is None else agents, message)
            case effects.Disconnect(agent):
                assert agent is not None
                self._disconnect(agent, "it timed out, or has connected again")
            case effects.Note(kind, fields):
                self._status_writer.append_event(kind, **fields)
                send = self._context.prepare_message(kind, fields, self._state.at.index)
                if send is not None:
                    self._start(self._call_if_leading(send), self._clean_up)
            case effects.Append():
                self._start(self._append(effect), self._duties)
            case effects.Announce():
                for agent, place in effects.places(effect, self._store):
                    self._send((agent,), place)
                self._term.show(time.time())
            case effects.QueryTasks():
                self._start(self._query_tasks(), self._duties)
            case effects.QueryQueue(question):
                self._start(self._query_queue(question), self._clean_up)
            case effects.RenewLease():
                if not self._is_renewing:  # the file system may hang
                    self._is_renewing = True
                    self._start(self._renew_lease(), self._duties)
            case effects.RemoveEntries(index, term):
                work = self._in_thread(self._context.log.remove_old, index, term)
                self._start(work, self._duties)
            case effects.Show(status, lines):
                self._status_writer.write_status(status, lines)
            case effects.RemoveNotice(name, matches_no_agent):
                if matches_no_agent:
                    _log.warning("the notice %s names no task or host of the run", name)
                assert self._folder is not None
                self._folder.confirm(name)
                self._is_notice_confirmed.set()
            case effects.Postpone(delay_s):
                without = "pending tasks of the run were not postponed"
                self._start_slurm_call(without, scheduler.postpone_pending, delay_s)
            case effects.Exclude(hosts, why, until):
                without = f"the run may start on {', '.join(hosts)} again"
                self._start_slurm_call(without, scheduler.exclude_nodes, hosts, why, until)
            case effects.Readmit(tasks):
                if self._readmitting is None or self._readmitting.done():
                    without = "tasks of the run avoid nodes that may be usable again"
                    self._readmitting = self._start_slurm_call(without, scheduler.readmit, tasks)
            case effects.ClearHolds(tasks, possibly_alive, failed_on):
                avoids = sorted({*possibly_alive.values()})
                write, restart = self._status_writer.append_event, scheduler.restart_tasks
                write("tasks_restarted", tasks=list(tasks), avoids=avoids)
                without = "tasks of the run may restart late, or not at all"
                self._start_slurm_call(without, restart, tasks, possibly_alive, failed_on)

    def publish(self, entry: LogEntry, afterwards: list[effects.Effect]) -> None:
        """See `Executor`."""
        self._start(self._publish(entry, afterwards), self._clean_up)

    def _start_slurm_call(
        self, without: str, call: Callable[..., None], *arguments: object
    ) -> asyncio.Task[None]:
        """Start a call of the scheduler; ``without``: the effect of its failure."""
        work = partial(self._calls.answer, without, partial(call, *arguments))
        return self._start(self._call_if_leading(work), self._clean_up)

    async def _call_if_leading(self, work: Callable[[], object]) -> None:
        """Make a call that no log entry guards, unless the log shows another leader."""
        while not await self._in_thread(self._try_if_leading, work):
            await asyncio.sleep(_RETRY_S)

    def _try_if_leading(self, work: Callable[[], object]) -> bool:
        """Make the call unless another agent leads; return whether the log could be read."""
        last: LogEntry | None = None
        try:
            if not self._context.log.is_removed():
                _, last = self._context.log.last()
        except OSError as e:
            _log.info("whether term %d is over cannot be read: %s", self._claim.term, e)
            return False
        if not self._term.is_over and (last is None or last.term <= self._claim.term):
            work()
        return True

    async def _append(self, append: effects.Append) -> None:
        """Append an entry, however long the file system takes."""
        try:
            if append.needs_store:
                self._store = await self._make_store()
            is_created = await self._create(append.entry)
        except Exception as e:
            self._fail(e, drops_append=True)
        else:
            self._term.handle(self._state.appended if is_created else self._state.refused)

    async def _make_store(self) -> messages.Address:
        make = self._context.scheduler.make_store
        for _ in range(_STORE_TRIES - 1):
            try:
                return await self._in_thread(make)
            except OSError as e:
                _log.warning("the store of the round cannot be made yet, retrying: %s", e)
                await asyncio.sleep(_RETRY_S)
        return await self._in_thread(make)

    async def _create(self, entry: LogEntry) -> bool:
        while True:
            try:
                return await self._in_thread(self._context.log.create, entry)
            except OSError as e:
                _log.warning("entry %d is not written yet, retrying: %s", entry.index, e)
                await asyncio.sleep(_RETRY_S)

    async def _publish(self, entry: LogEntry, afterwards: list[effects.Effect]) -> None:
        self._term.show(time.time())  # before the result, so that readers take it for the last
        await self._status_writer.publish_result(entry)
        self._term.do(afterwards)
        await self._call_if_leading(self._context.cancel_pending)
        await self._in_thread(self._context.send_end, entry.ending)

    async def _query_tasks(self) -> None:
        without, query = "the tasks of the run cannot be listed", self._context.scheduler.poll_tasks
        states = await self._in_thread(self._calls.answer, without, query)
        self._term.handle(self._state.slurm_answered, states, time.monotonic())

    async def _query_queue(self, question: QueueQuestion) -> None:
        policy, advice = self._context.queue, QueueAdvice()
        hosts = sorted({agent.host for agent in self._agents})

        def query() -> None:
            nonlocal advice
            advice = advice if policy is None else policy.tick(question, hosts)

        await self._call_if_leading(query)
        self._term.handle(self._state.advised, advice, time.monotonic())

    async def _renew_lease(self) -> None:
        try:
            await self._in_thread(self._lease.renew)
        except OSError as e:
            _log.info("lease not renewed: %s", e)
        else:
            self._term.handle(self._state.renewed)
        finally:
            self._is_renewing = False

    # ---- duties -------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            self._term.handle(self._state.tick, time.monotonic())
            await asyncio.sleep(self._context.heartbeat.heartbeat_interval_s)

    def _tick_quorum(self) -> None:
        self._term.handle(self._state.tick_quorum, time.monotonic())

    async def _repeat(self, interval_s: float, act: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(interval_s)
            act()

    async def _watch_log(self) -> None:
        """Step down once the log shows another leader; end the run once the log was removed."""
        log = self._context.log
        while True:
            try:
                index = await self._in_thread(log.last_index)
                self._term.handle(self._state.log_advanced, index)
            except OSError:
                if await self._in_thread(log.is_removed):
                    self._term.do([effects.Send(None, REMOVED)])
                    work = self._call_if_leading(self._context.cancel_pending)
                    self._start(work, self._clean_up)
                    return
            await asyncio.sleep(self._context.poll_interval_s)

    async def _watch_notices(self, folder: TermFolder) -> None:
        """Claim notices, so that the agents of their nodes leave."""
        while True:
            with self._end_if_deposed(), contextlib.suppress(OSError):
                self._is_notice_confirmed.clear()
                claimed = await self._in_thread(carried_out, folder.claim_notices())
                self._term.handle(self._state.notices_claimed, claimed)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._context.poll_interval_s):
                    await self._is_notice_confirmed.wait()

    async def _remove_confirmed(self, folder: TermFolder) -> None:
        with self._end_if_deposed(), contextlib.suppress(OSError):  # the next leader removes it
            await self._in_thread(carried_out, folder.remove_confirmed())

    @contextlib.contextmanager
    def _end_if_deposed(self) -> Iterator[None]:
        try:
            yield
        except TermOverError as e:
            _log.warning("term %d is over: %s", self._claim.term, e)
            self._term.end_term()

    async def _write_status(self) -> None:
        while True:
            if self._status_writer.is_over:
                self._term.end_term()
            self._term.show(time.time())
            if self._listener.num_refused:
                text = "%d connections were not from agents of the run"
                _log.info(text, self._listener.num_refused)
                self._listener.num_refused = 0
            run = self._state.run
            if run.phase is RoundPhase.FORMING:
                text = waiting_for(run, self._context.scheduler.log_of)
                self._send(list(run.participants.joined), messages.Waiting(text))
            await asyncio.sleep(1.0 + len(self._agents) / _NODES_PER_STATUS_S)


class LeaderScheduler(Protocol):
    """The scheduler and the run's processes. All calls but the last may block.

    If `make_store` raises `OSError`, it is called again, for a minute. Any other error of it
    ends the term, and none of the others does.
    """

    def prepare_store(self) -> None:
        """Start what takes seconds before a store can be used: this agent leads now."""

    def make_store(self) -> messages.Address:
        """Return a fresh bootstrap store; it may take seconds until torch accepts connections."""

    def poll_tasks(self) -> Mapping[str, TaskState] | None:
        """Return the states of the run's tasks; None if unknown."""

    def is_running(self, task: str) -> bool | None:
        """Return whether a task is RUNNING; None if unknown."""

    def cancel_pending(self) -> None:
        """Cancel the run's queued tasks: it has ended."""

    def postpone_pending(self, delay_s: float) -> None:
        """Start none of the run's queued tasks for this time."""

    def restart_tasks(
        self,
        tasks: Iterable[str],
        possibly_alive: Mapping[str, str],
        failed_on: Mapping[str, Sequence[str]],
    ) -> None:
        """Start tasks again soon that Slurm holds or has ended; see `slurm.scheduler`."""

    def readmit(self, tasks: Iterable[str]) -> None:
        """Let tasks start again on nodes where their processes, or their exclusion, have ended."""

    def exclude_nodes(self, hosts: Iterable[str], why: str, until: float) -> None:
        """Start none of the run's queued tasks on these hosts until this time (Unix seconds)."""

    def log_of(self, task: str, attempt: int) -> str | None:
        """Return the path of an attempt's log."""


@dataclass(frozen=True)
class LeaderContext:
    """Dependencies of an agent that may lead."""

    rules: RoundRules
    heartbeat: HeartbeatConfig
    secret: bytes
    log: DecisionLog
    make_status_writer: Callable[[int], StatusWriter]
    """Makes the writer of the leader of a term; 0: of an agent that does not lead."""
    scheduler: LeaderScheduler
    address: str  # where it listens
    files: RunFiles | None = None  # files that request nodes to leave; None if the run has none
    group_addresses: tuple[str, ...] = ()
    """Where the process groups of the workers listen, if not there."""
    generation: int = 0  # the run's, as this agent's task was submitted
    is_local: bool = True
    """Whether the run's files are on this machine; a file server is polled less often."""
    queue: QueuePolicy | None = None
    """What the queue lets the run do; None if it has no tasks there."""
    prepare_message: Callable[..., Callable[[], None] | None] = lambda kind, facts, index=0: None
    """See `Notifier.prepare`."""

    @property
    def poll_interval_s(self) -> float:
        """Between two polls for a later leader, and for notices."""
        return 1.0 if self.is_local else 6.0

    def send_end(self, ending: RunEnding | None) -> None:
        """Send the message about the end of the run, unless another agent has."""
        if ending is not None:
            facts = {"status": ending.status, "failure": ending.summary}
            if (send := self.prepare_message("end", facts)) is not None:
                send()

    def cancel_pending(self) -> None:
        """Cancel the queued tasks of the run, which has ended; siblings may start in its place."""
        calls = OptionalCalls()
        calls.answer("pending tasks of the run were not cancelled", self.scheduler.cancel_pending)
        if self.queue is not None:
            self.queue.end_run()
