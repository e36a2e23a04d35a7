"""Serves the rendezvous machine to the agents: connections in, actions out.

Everything runs in one event loop; whatever may block (files, Slurm) runs in a thread. Messages to
an agent: ``welcome``, ``round``, ``stop``, ``end``, ``waiting`` and ``beat``; from an agent:
``hello``, ``join``, ``failed``, ``finished``, ``leave``, ``close`` and ``beat``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from hpc_elastic.config import RendezvousSettings
from hpc_elastic.rendezvous.failures import Failure
from hpc_elastic.rendezvous.journal import Journal
from hpc_elastic.rendezvous.machine import (
    Action,
    Agent,
    EndRun,
    Machine,
    Note,
    Phase,
    StartRound,
    StopRound,
)
from hpc_elastic.rendezvous.stream import Stream, accept, close
from hpc_elastic.rendezvous.wire import MAX_FRAME_BYTES, BadFrameError

_log = logging.getLogger(__name__)

StoreAddress = tuple[str, int]

_NO_AGENT_OF_OURS = (OSError, BadFrameError, ValueError, KeyError, TypeError)
"""What a connection shows that has ended, or never was an agent's."""


@dataclass(frozen=True)
class Surroundings:
    """What a leader needs of the world, so that tests can give it another one."""

    make_store: Callable[[], StoreAddress]
    """Start a fresh bootstrap store for a round; return its address and port."""
    running_tasks: Callable[[], frozenset[str] | None]
    """Ask (blocking) which tasks of the run are RUNNING; None where nobody knows."""
    latest_epoch: Callable[[], int]
    """Return (blocking) the highest epoch that anybody has claimed."""
    cancel_pending: Callable[[], None]
    """Take back (blocking) the run's tasks that are still in the queue."""


@dataclass
class _Peer:
    stream: Stream
    heard: float
    progress: dict[str, Any]


class Leader:
    """Leads one epoch, from `start` until `stop`, a newer epoch, or the end of the run."""

    def __init__(
        self,
        machine: Machine,
        journal: Journal,
        settings: RendezvousSettings,
        *,
        secret: bytes,
        epoch: int,
        surroundings: Surroundings,
    ) -> None:
        self._machine = machine
        self._journal = journal
        self._settings = settings
        self._secret = secret
        self._epoch = epoch
        self._world = surroundings
        self._peers: dict[Agent, _Peer] = {}
        self._listener: socket.socket | None = None
        self._duties: list[asyncio.Task[None]] = []
        self._connections: dict[asyncio.Task[None], socket.socket] = {}
        self._acting = asyncio.Lock()
        self._fenced = False
        self._result_written = False
        self._clean_up: list[asyncio.Task[None]] = []

    # ---- life ---------------------------------------------------------------------------

    def listen(self, address: str, port: int) -> int:
        """Open the port (0: any free one) and return it."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = self._listener = socket.create_server((address, port), family=family)
        listener.setblocking(False)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)
        return int(listener.getsockname()[1])

    def lead(self) -> None:
        """Begin to decide; call once the epoch is claimed."""
        self._journal.note("leader", epoch=self._epoch)
        for duty in (self._watch_peers, self._watch_slurm, self._watch_epoch, self._tell_status):
            self._duties.append(asyncio.create_task(self._until_it_fails(duty())))

    async def stop(self, linger_s: float = 10.0) -> None:
        """Stop leading. Agents that have not heard the end of the run yet are waited for.

        If it is cancelled, call it again: only a stop that returns leaves nothing behind.
        """
        deadline = time.monotonic() + linger_s
        while self._machine.phase is Phase.ENDED and self._peers and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for duty in self._duties:
            duty.cancel()
        await asyncio.gather(*self._duties, *self._clean_up, return_exceptions=True)
        self._step_down()
        if self._connections:
            await asyncio.wait(self._connections)
        await self._journal.close()

    async def _until_it_fails(self, duty: Coroutine[Any, Any, None]) -> None:
        try:
            await duty
        except Exception:
            _log.exception("the leader failed; stepping down")
            self._step_down()

    def _step_down(self) -> None:
        """Decide nothing more, and let go of everybody: they will find the next leader."""
        self._fenced = True
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)

    # ---- agents -------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        """Serve a connection; `asyncio.Server` would lose one that comes just before its end."""
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.setblocking(False)
            task = asyncio.create_task(self._until_it_fails(self._serve(connection)))
            self._connections[task] = connection
            task.add_done_callback(self._connections.pop)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_FRAME_BYTES)
        except OSError as e:
            _log.info("a connection ended as soon as it came: %s", e)
            connection.close()
            return
        try:
            stream, hello = await accept(reader, writer, self._secret, self._epoch)
            agent = Agent(**hello)
        except _NO_AGENT_OF_OURS as e:
            _log.info("refused a connection from %s: %s", writer.get_extra_info("peername"), e)
        else:
            await self._attend(agent, stream)
        finally:
            await close(writer)

    async def _attend(self, agent: Agent, stream: Stream) -> None:
        if agent in self._peers:
            self._peers[agent].stream.abort()
            await self._act(self._machine.gone(agent, "connected anew", time.monotonic()))
        peer = self._peers[agent] = _Peer(stream, time.monotonic(), {})
        why = "its connection closed"
        try:
            while True:
                message = await stream.receive()
                peer.heard = time.monotonic()
                if message["type"] == "leave":
                    why = str(message["why"])
                await self._act(self._events(agent, peer, message))
        except _NO_AGENT_OF_OURS as e:
            _log.info("connection to %s ended: %s", agent.task, e)
        if self._peers.get(agent) is peer:
            del self._peers[agent]
            await self._act(self._machine.gone(agent, why, time.monotonic()))

    def _events(self, agent: Agent, peer: _Peer, message: dict[str, Any]) -> list[Action]:
        now = time.monotonic()
        match message["type"]:
            case "join":
                return self._machine.join(agent, now)
            case "finished" if message["round"] == self._machine.round:
                return self._machine.finished(agent, now)
            case "failed" if message["round"] == self._machine.round:
                failures = [_on_our_clock(f) for f in message["failures"]]
                return self._machine.worker_failed(failures, agent, now)
            case "close":
                return self._machine.close()
            case "beat":
                peer.progress = message["progress"]
        return []

    # ---- actions ------------------------------------------------------------------------

    async def _act(self, actions: Iterable[Action]) -> None:
        if self._fenced:
            return
        async with self._acting:
            for action in actions:
                await self._do(action)

    async def _do(self, action: Action) -> None:
        match action:
            case Note(kind, fields):
                self._journal.note(kind, **fields)
            case StopRound(agents, reason):
                self._journal.note("stop", reason=reason)
                self._tell(agents, "stop", reason=reason)
            case StartRound():
                await self._start_round(action)
            case EndRun():
                await self._end_run(action)
        self._write_status()

    async def _start_round(self, start: StartRound) -> None:
        if await self._superseded():
            return
        store = self._world.make_store()
        await self._journal.round_started(self._machine, self._epoch)
        first_rank = 0
        for group_rank, agent in enumerate(start.members):
            self._tell(
                (agent,), "round", number=start.number, restarts=start.restarts, store=store,
                group_rank=group_rank, group_size=len(start.members),
                first_rank=first_rank, world_size=sum(m.nproc for m in start.members),
            )  # fmt: skip
            first_rank += agent.nproc

    async def _end_run(self, end: EndRun) -> None:
        if await self._superseded():
            return
        if not self._result_written:
            self._result_written = True
            await self._journal.ended(self._machine, end)
            clean_up = asyncio.to_thread(self._world.cancel_pending)
            self._clean_up.append(asyncio.create_task(self._until_it_fails(clean_up)))
        summary = end.failure.summary() if end.failure else None
        self._tell(tuple(self._peers), "end", status=end.status, failure=summary)

    def _tell(self, agents: Iterable[Agent], type_: str, **fields: Any) -> None:
        for agent in agents:
            if agent in self._peers:
                self._peers[agent].stream.send(type_, **fields)

    # ---- duties -------------------------------------------------------------------------

    async def _watch_peers(self) -> None:
        """Send heartbeats, and drop the agents that have fallen silent."""
        interval = self._settings.heartbeat_s
        woke = time.monotonic()
        while True:
            await asyncio.sleep(interval)
            now = time.monotonic()
            if now - woke > interval + self._settings.lost_after_s / 2:
                self._forgive_silence(now)  # it was we who slept
            woke = now
            self._drop_silent(now)
            self._tell(tuple(self._peers), "beat")
            await self._act(self._machine.tick(now))

    def _forgive_silence(self, now: float) -> None:
        for peer in self._peers.values():
            peer.heard = now

    def _drop_silent(self, now: float) -> None:
        for agent, peer in self._peers.items():
            if now - peer.heard > self._settings.lost_after_s:
                _log.warning("%s has been silent for %.1f s", agent.task, now - peer.heard)
                peer.stream.abort()

    async def _watch_slurm(self) -> None:
        """While a round forms, keep asking which tasks are RUNNING."""
        while True:
            if self._machine.wants_slurm:
                running = await asyncio.to_thread(self._world.running_tasks)
                if self._machine.wants_slurm:
                    await self._act(self._machine.slurm_says(running, time.monotonic()))
                await asyncio.sleep(self._settings.heartbeat_s)
            else:
                await asyncio.sleep(0.02)

    async def _watch_epoch(self) -> None:
        """Step down once somebody else leads."""
        while not await self._superseded():
            await asyncio.sleep(1.0)

    async def _superseded(self) -> bool:
        with contextlib.suppress(OSError):
            if await asyncio.to_thread(self._world.latest_epoch) > self._epoch:
                _log.warning("epoch %d is over: another agent leads", self._epoch)
                self._step_down()
        return self._fenced

    # ---- status -------------------------------------------------------------------------

    async def _tell_status(self) -> None:
        while True:
            self._write_status()
            if self._machine.phase is Phase.FORMING:
                self._tell(
                    tuple(self._machine.joined), "waiting", joined=len(self._machine.joined),
                    min_nodes=self._machine.rules.min_nodes, missing=self._machine.missing()[:20],
                )  # fmt: skip
            await asyncio.sleep(1.0)

    def _write_status(self) -> None:
        machine = self._machine
        formed = machine.phase is not Phase.FORMING
        members = machine.members if formed else ()
        phase = {Phase.FORMING: "waiting", Phase.RUNNING: "training"}.get(machine.phase)
        if phase is None and machine.end is not None:
            phase = machine.end.status
        self._journal.status({
            "phase": phase, "epoch": self._epoch, "round": machine.round,
            "nodes": len(members), "world_size": sum(m.nproc for m in members),
            "members": [
                {"task": m.task, "host": m.host, "group_rank": rank, "nproc": m.nproc}
                for rank, m in enumerate(members)
            ],
            "joined": len(machine.joined), "restarts": machine.restarts,
            "max_restarts": machine.rules.max_restarts, **self._progress(members),
        })  # fmt: skip

    def _progress(self, members: tuple[Agent, ...]) -> dict[str, Any]:
        reports = [self._peers[m].progress for m in members if m in self._peers]
        steps = [r["step"] for r in reports if r.get("step") is not None]
        losses = [r["loss"] for r in reports if r.get("loss") is not None]
        return {"step": max(steps, default=None), "loss": losses[0] if losses else None}


def _on_our_clock(failure: dict[str, Any]) -> Failure:
    """Give a failure the leader's time: agents send its age, since their clocks may differ."""
    age = float(failure.pop("age_s"))
    return Failure(**failure, time=time.time() - age)
