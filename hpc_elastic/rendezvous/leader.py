"""Carries out what a leader decides: connections, files and Slurm around `leadership`.

Everything runs in one event loop; whatever may block (files, Slurm) runs in threads. Messages to an
agent: ``welcome``, ``round``, ``stop``, ``hold``, ``propose``, ``confirm``, ``stacks``, ``notice``,
``end``, ``give back``, ``waiting``, ``ft`` and ``beat``; from an agent: ``hello``, ``join``,
``here``, ``failed``, ``finished``, ``boundary``, ``want``, ``answer``, ``stalled``, ``stacks``,
``notice``, ``leave``, ``close``, ``ft`` and ``beat``. What is in an
``ft`` is for the replicas' quorum (`quorum_desk`).
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
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from hpc_elastic.net.listener import Listener
from hpc_elastic.net.stream import BUFFER_BYTES, NO_AGENT_OF_OURS, Visitor
from hpc_elastic.rendezvous import notes
from hpc_elastic.rendezvous.actions import ClearHolds, Exclude, Note
from hpc_elastic.rendezvous.diagnosis import waiting_for
from hpc_elastic.rendezvous.leader_effects import (
    Announce,
    AskSlurm,
    Create,
    Drop,
    Effect,
    Postpone,
    Publish,
    RenewLease,
    StepDown,
    Tell,
)
from hpc_elastic.rendezvous.leadership import Leadership
from hpc_elastic.rendezvous.machine import Phase
from hpc_elastic.rendezvous.notice_files import NoticeFiles
from hpc_elastic.rendezvous.office import Office, StoreAddress, World
from hpc_elastic.rendezvous.placements import placements, placements_alone
from hpc_elastic.rendezvous.quorum_desk import Desk, open_desk
from hpc_elastic.rendezvous.record import Agent, Record
from hpc_elastic.rendezvous.replica_leadership import ReplicaLeadership
from hpc_elastic.rendezvous.series import Series
from hpc_elastic.rendezvous.status import status_of

__all__ = ["Leader", "Office", "World"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_S = 0.5
_GARBAGE = 50_000
"""Objects between two looks for garbage: with ten thousand agents each look is long, and there is
next to none."""
_WATCH_S = 1.0
_READMIT_S = 10.0
_NODES_A_STATUS = 500
"""status.json is written once a second, and once more for every so many nodes."""


class Leader:
    """Leads one epoch, from its claim until `stop`, a newer epoch, or the end of the run."""

    def __init__(self, office: Office, claim: Record, listener: Listener) -> None:
        now = time.monotonic()
        self._office = office
        self._journal = office.make_journal()
        self._epoch = claim.epoch
        self._series = Series()
        self._listener = listener
        rng = random.Random()
        kind = ReplicaLeadership if office.rules.ft else Leadership
        self._leadership = kind(claim, office.rules, office.liveness, now, rng)
        self._desk: Desk | None = open_desk(office, claim, self._leadership, self._send)
        """Where the replicas' quorum is kept; None: the nodes are no replicas."""
        self._agents: dict[Agent, Visitor] = {}
        self._visitors: dict[Visitor, Agent | None] = {}
        """Everybody who is connected; None: it has not proved yet to be an agent."""
        self._strangers: dict[Visitor, None] = {}
        """Those of them, the longest first: they may not take all that may be open."""
        self._max_strangers = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._num_refused = 0
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._arrivals: set[asyncio.Task[None]] = set()
        self._duties: set[asyncio.Task[None]] = set()
        self._clean_up: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(thread_name_prefix="leader")
        self._store: StoreAddress | None = None
        """Where the workers of the last round meet."""
        self._renewing = False
        self._beats = 0

    # ---- life ---------------------------------------------------------------------------

    def lead(self) -> None:
        """Begin to decide."""
        gc.set_threshold(max(_GARBAGE, gc.get_threshold()[0]))
        self._journal.note("leader", epoch=self._epoch)
        for note in self._leadership.inherited:
            self._journal.note(note.kind, **note.fields)
        self._listener.serve(self._take)
        duties = self._tick(), self._watch_records(), self._tell_status(), self._readmit()
        for duty in duties:
            self._start(duty, self._duties)
        if self._office.notices is not None:
            self._start(self._watch_notices(self._office.notices), self._duties)
        if self._desk is not None:
            self._start(self._desk.keep(), self._duties)

    async def depart(self, agent: Agent, within_s: float = 1.0) -> None:
        """Record that this leader's own node leaves, for the next one to know.

        Without that, its replica would be taken for one that died with the leader.
        """
        why, now = "it leaves", time.monotonic()
        self._carry_out(self._leadership.disconnected(agent, why, now))
        while self._leadership.is_deciding and time.monotonic() < now + within_s:
            await asyncio.sleep(0.005)

    async def stop(self, linger_s: float = 10.0) -> None:
        """Stop leading. Agents that have not heard the last word yet are waited for.

        If it is cancelled, call it again: only a stop that returns leaves nothing behind.
        """
        deadline = time.monotonic() + linger_s
        last = (Phase.ENDED, Phase.DISBANDED)
        while self._leadership.machine.phase in last and self._agents:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.02)
        for duty in self._duties:
            duty.cancel()
        await asyncio.gather(*self._duties, *self._clean_up, return_exceptions=True)
        self._step_down()
        while self._visitors:  # a second at most (`Visitor.close`)
            await asyncio.sleep(0.01)
        await self._journal.close()
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
        except NO_AGENT_OF_OURS:
            raise
        except Exception:
            self._fail()

    def _fail(self) -> None:
        _log.exception("the leader failed; stepping down")
        self._step_down()

    def _step_down(self) -> None:
        """Decide nothing more, and let go of everybody: they will find the next leader."""
        self._leadership.fenced = True
        self._listener.close()
        for visitor in self._visitors:
            visitor.close()

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, work, *arguments)

    # ---- agents -------------------------------------------------------------------------

    def _take(self, connection: socket.socket) -> None:
        visitor = Visitor(self._office.secret, self._epoch, self, self._buffer)
        self._visitors[visitor] = None
        self._strangers[visitor] = None
        if len(self._strangers) > self._max_strangers:
            next(iter(self._strangers)).abort("too many have not proved who they are")
        self._start(self._let_in(visitor, connection), self._arrivals)

    async def _let_in(self, visitor: Visitor, connection: socket.socket) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: visitor, connection)
        except OSError as e:
            connection.close()
            self.left(visitor, f"it ended as soon as it came: {e}")

    def arrived(self, visitor: Visitor, hello: dict[str, Any]) -> None:
        """See `Host`."""
        agent = Agent(**hello)
        with self._or_fail():
            self._carry_out(self._leadership.connected(agent, time.monotonic()))
        self._agents[agent] = visitor
        self._visitors[visitor] = agent
        self._strangers.pop(visitor, None)
        if self._desk is not None:
            self._desk.arrived(agent)

    def said(self, visitor: Visitor, message: dict[str, Any]) -> None:
        """See `Host`."""
        agent = self._visitors[visitor]
        if agent is None or self._agents.get(agent) is not visitor:
            return  # the agent has come back on another connection
        with self._or_fail():
            now = time.monotonic()
            self._carry_out(self._leadership.received(agent, _on_our_clock(message), now))
            if self._desk is not None and message["type"] == "ft":
                self._desk.said(agent, message["message"])

    def left(self, visitor: Visitor, why: str) -> None:
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
                why = "its connection closed"
                self._carry_out(self._leadership.disconnected(agent, why, time.monotonic()))

    def _send(self, agent: Agent, message: dict[str, Any]) -> None:
        if agent in self._agents:
            self._agents[agent].send(message)

    def _let_go(self, agent: Agent, why: str) -> None:
        visitor = self._agents.pop(agent, None)
        if visitor is not None:
            visitor.abort(why)
        if self._desk is not None:
            self._desk.left(agent, why)

    # ---- effects ------------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        remaining = iter(effects)
        for effect in remaining:
            match effect:
                case Tell(agent, message):
                    self._send(agent, message)
                case Drop(agent):
                    self._let_go(agent, "silent, or connected anew")
                case Note(kind, fields):
                    self._journal.note(kind, **fields)
                case Create(record):
                    self._start(self._create(record), self._duties)
                case Announce():
                    self._announce(effect)
                case AskSlurm():
                    self._start(self._ask_slurm(), self._duties)
                case RenewLease():
                    self._renew_lease()
                case Postpone(delay_s):
                    self._let_slurm(self._office.world.postpone_pending, delay_s)
                case Exclude(hosts, why):
                    self._let_slurm(self._office.world.exclude, hosts, why)
                case ClearHolds(tasks, unseen):
                    avoids = sorted({*unseen.values()})
                    self._journal.note("brought back", tasks=list(tasks), avoids=avoids)
                    self._let_slurm(self._office.world.clear_holds, tasks, unseen)
                case Publish(record):
                    self._start(self._publish(record, list(remaining)), self._clean_up)
                case StepDown():
                    _log.warning("epoch %d is over: another agent leads", self._epoch)
                    self._step_down()

    def _let_slurm(self, work: Callable[..., None], *arguments: object) -> None:
        self._start(self._in_thread(work, *arguments), self._clean_up)

    async def _create(self, record: Record) -> None:
        """Create the record, however long the file system takes."""
        while True:
            try:
                if record.round > self._leadership.at.round and self._desk is None:
                    self._store = await self._in_thread(self._office.world.make_store)
                created = await self._in_thread(self._office.register.create, record)
                break
            except OSError as e:
                _log.warning("record %d is not written yet, trying on: %s", record.number, e)
                await asyncio.sleep(_RETRY_S)
        now = time.monotonic()
        self._carry_out(self._leadership.created(now) if created else self._leadership.refused())

    def _announce(self, announce: Announce) -> None:
        start = announce.start
        placed = placements(announce) if self._desk is None else placements_alone(announce)
        for agent, message in placed:
            self._send(agent, {**message, "store": self._store or ("", 0)})
        note = notes.round_(start, record=announce.record, epoch=self._epoch)
        self._journal.note(note.kind, **note.fields)
        self._write_status()

    async def _publish(self, record: Record, afterwards: list[Effect]) -> None:
        await self._journal.publish(record)
        self._write_status()
        self._carry_out(afterwards)
        await self._in_thread(self._office.world.cancel_pending)

    async def _ask_slurm(self) -> None:
        view = await self._in_thread(self._office.world.view)
        self._carry_out(self._leadership.slurm_says(view, time.monotonic()))

    def _renew_lease(self) -> None:
        if not self._renewing:  # the file system may hang
            self._renewing = True
            self._beats += 1
            self._start(self._renew(self._beats), self._duties)

    async def _renew(self, beats: int) -> None:
        try:
            await self._in_thread(self._office.register.renew_lease, self._epoch, beats)
        except OSError as e:
            _log.info("lease not renewed: %s", e)
        finally:
            self._renewing = False

    # ---- duties -------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            self._carry_out(self._leadership.tick(time.monotonic()))
            await asyncio.sleep(self._office.liveness.heartbeat_s)

    async def _watch_records(self) -> None:
        """Step down once somebody else leads."""
        while True:
            with contextlib.suppress(OSError):
                number = await self._in_thread(self._office.register.last_number)
                self._carry_out(self._leadership.saw(number))
            await asyncio.sleep(_WATCH_S)

    async def _watch_notices(self, files: NoticeFiles) -> None:
        """Pass on who is asked to leave."""
        while True:
            with contextlib.suppress(OSError):
                for name, left_s in (await self._in_thread(files.read)).items():
                    effects = self._leadership.asked_to_leave(name, left_s)
                    self._carry_out(effects)
                    removal = self._passed_on(files, name, to_anybody=bool(effects))
                    await asyncio.shield(self._start(removal, self._clean_up))
            await asyncio.sleep(_WATCH_S)

    async def _passed_on(self, files: NoticeFiles, name: str, *, to_anybody: bool) -> None:
        """Remove a notice file, though this leader may stop at once: it may name its own node."""
        with contextlib.suppress(OSError):
            await self._in_thread(partial(files.passed_on, name, to_anybody=to_anybody))

    async def _readmit(self) -> None:
        """See whether tasks that are gone may start again on the nodes that they were lost with."""
        while True:
            await asyncio.sleep(_READMIT_S)
            machine = self._leadership.machine
            if gone := machine.comebacks.awaited(machine.muster.lost):
                await self._in_thread(self._office.world.readmit, gone)

    async def _tell_status(self) -> None:
        while True:
            self._write_status()
            self._count_strangers()
            machine = self._leadership.machine
            if machine.phase is Phase.FORMING:
                text = waiting_for(machine, self._office.world.log_of)
                for agent in list(machine.joined):
                    self._send(agent, {"type": "waiting", "text": text})
            await asyncio.sleep(1.0 + len(self._agents) / _NODES_A_STATUS)

    def _count_strangers(self) -> None:
        if self._num_refused:
            _log.info("%d connections were none of the run's agents", self._num_refused)
            self._num_refused = 0

    def _write_status(self) -> None:
        status = status_of(self._leadership)
        lines = self._series.look(status, time.time(), self._leadership.at.started)
        self._journal.status({**status, **self._series.rates})
        self._journal.progress(lines)


def _on_our_clock(message: dict[str, Any]) -> dict[str, Any]:
    """Give failures the leader's time: agents send their age, since their clocks may differ."""
    for item in (*message.get("failures", ()), *message.get("ranks", ())):
        item["time"] = time.time() - float(item.pop("age_s"))
    return message
