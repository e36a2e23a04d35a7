"""Many light agents in one event loop: the product's decisions and connections, without threads.

What an agent would read from the run directory it is given, but for the leader's lease.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.effects import (
    Claim,
    Connect,
    Deliver,
    Disconnect,
    Effect,
    ReadLog,
    SendToLeader,
)
from hpc_elastic.rendezvous.follower_state import FollowerState
from hpc_elastic.rendezvous.log_entry import Agent, LogEntry
from hpc_elastic.rendezvous.messages import (
    TO_AGENT,
    Heartbeat,
    RoundInfo,
    RunMessage,
    Stop,
)
from hpc_elastic.run.directory import RunDir
from hpc_elastic.transport.connection import ClientConnection, connect
from hpc_elastic.transport.messages import pack, unpack
from rendezvous_scale.leading import SECRET, heartbeat, member
from rendezvous_scale.process import allow_files

_TICKS_A_BEAT = 2
_TURN_S = 0.01
_STARTS_A_TURN = 32
_HANDSHAKE_LINES = 2
_TCP_INFO_BYTES = struct.Struct("=120xQQ")
"""tcpi_bytes_acked and tcpi_bytes_received of linux/tcp.h: what the peer and we have taken."""

_PROGRESS = {"step": 12345, "total": 100_000, "loss": 1.2345678901234567}


@dataclass(frozen=True)
class Reached:
    """What it took until all agents had their rank."""

    wall_s: float
    tries: int
    """Connections tried so far."""
    messages: int
    """Sent and received so far, over all agents that are connected."""
    sent_bytes: int
    received_bytes: int


class LightAgent:
    """One agent: carries out what its `FollowerState` decides."""

    def __init__(self, group: Group, me: Agent) -> None:
        self.group = group
        self.me = me
        self.rank: int | None = None
        self.stream: ClientConnection | None = None
        self.following = FollowerState(me, group.heartbeat, time.monotonic())
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.following.join()
        self.tick()

    def tick(self) -> None:
        self._carry_out(self.following.tick(time.monotonic()))

    def die(self) -> None:
        """Be gone without a word."""
        if self.stream is not None:
            self.stream.abort()
        if self._task is not None:
            self._task.cancel()

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case ReadLog():
                    entry, lease = self.group.entry, self.group.lease()
                    now = time.monotonic()
                    self._carry_out(self.following.log_read(entry.index, entry, lease, now))
                case Connect(entry):
                    self._task = asyncio.create_task(self._follow(entry))
                case Disconnect():
                    self.die()
                case SendToLeader(message) if self.stream is not None:
                    if isinstance(message, Heartbeat):
                        message = Heartbeat(_PROGRESS)
                    self.stream.send(pack(message, time.time()))
                case Deliver(message):
                    self._hear(message)
                case Claim():
                    raise AssertionError("an agent takes the leader for dead")

    def _hear(self, message: RunMessage) -> None:
        if isinstance(message, RoundInfo):
            self.rank = message.group_rank
            self.group.waiting.discard(self)
            self.group.check()
        elif isinstance(message, Stop):  # its workers, if it had any, would be stopped now
            self.group.waiting.add(self)
            self._carry_out(self.following.join())

    async def _follow(self, entry: LogEntry) -> None:
        where, hello = entry.leader, asdict(self.me)
        self.group.tries += 1
        try:
            self.stream = await connect(where.address, where.port, SECRET, entry.term, hello)
        except OSError as e:
            refused, why = isinstance(e, ConnectionRefusedError), type(e).__name__
            now = time.monotonic()
            self._carry_out(self.following.not_connected(why, now, refused=refused))
            return
        self._carry_out(self.following.connected(time.monotonic()))
        stream = self.stream
        try:
            while True:
                message = unpack(await stream.receive(), TO_AGENT, time.time())
                assert message is not None
                self._carry_out(self.following.received(message, time.monotonic()))
        except OSError as e:
            self.stream = None
            self._carry_out(self.following.disconnected(str(e), time.monotonic()))
        finally:
            stream.abort()


class Group:
    def __init__(self, entry: LogEntry, size: int, folder: Path) -> None:
        self.entry = entry
        self.heartbeat = heartbeat(size)
        self._register = DecisionLog(RunDir(folder).rdzv, SECRET)
        self.tries = 0
        self._agents = [LightAgent(self, member(slot)) for slot in range(size)]
        self.waiting: set[LightAgent] = set()
        """Who has no rank, or is to get another one."""
        self._complete = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    async def form(self) -> Reached:
        """Let all agents go at once; return when the last has its rank."""
        since = time.perf_counter()
        self.waiting.update(self._agents)
        self._life = asyncio.create_task(self._live())
        for i, agent in enumerate(self._agents):
            agent.start()
            if i % _STARTS_A_TURN == 0:
                await asyncio.sleep(0)  # nobody's connection is to wait until the last has begun
        return await self._reach(since)

    async def form_again(self) -> Reached:
        """Lose the last node, which comes back at once; return when all have their new ranks."""
        since = time.perf_counter()
        self._complete.clear()
        self.waiting.update(self._agents)
        lost = self._agents.pop()
        lost.die()
        self.waiting.remove(lost)
        back = LightAgent(self, member(len(self._agents), attempt=1))
        self._agents.append(back)
        self.waiting.add(back)
        back.start()
        return await self._reach(since)

    def end(self) -> None:
        if self._life is not None:
            self._life.cancel()

    async def _live(self) -> None:
        """Let time pass for every agent: in turn, as on as many nodes, and in time for each."""
        done, now = 0.0, time.monotonic()
        while True:
            size, before, now = len(self._agents), now, time.monotonic()
            tick_s = self._agents[0].following.heartbeat.heartbeat_interval_s / _TICKS_A_BEAT
            due = done + min(1.0, (now - before) / tick_s) * size
            for i in range(int(done), int(due)):
                agent = self._agents[i % size]
                if agent.following.joining or agent.rank is not None:
                    agent.tick()
            done = due
            await asyncio.sleep(_TURN_S)

    def lease(self) -> int | None:
        return self._register.lease(self.entry.term)

    def check(self) -> None:
        if not self.waiting:
            self._complete.set()

    async def _reach(self, since: float) -> Reached:
        assert self._life is not None
        complete = asyncio.create_task(self._complete.wait())
        await asyncio.wait({complete, self._life}, return_when=asyncio.FIRST_COMPLETED)
        if self._life.done():
            self._life.result()  # raises what went wrong
        wall_s = time.perf_counter() - since
        assert {a.rank for a in self._agents} == set(range(len(self._agents)))
        streams = [a.stream for a in self._agents if a.stream is not None]
        signers = [s._signer for s in streams]
        messages = sum(c.sent + c.received + _HANDSHAKE_LINES for c in signers)
        counted = [_tcp_bytes(s._writer.get_extra_info("socket")) for s in streams]
        sent, received = (sum(side) for side in zip(*counted, strict=True))
        return Reached(wall_s, self.tries, messages, sent, received)


def _tcp_bytes(connection: socket.socket) -> tuple[int, int]:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES.size)
    return _TCP_INFO_BYTES.unpack(info)


def follow(pipe: Connection, size: int, entry: LogEntry, folder: Path) -> None:
    """Be ``size`` agents; form and form again, each when told to, until the pipe closes."""
    allow_files(size)
    gc.disable()  # each agent has a process of its own in a real run
    asyncio.run(_follow(pipe, size, entry, folder))


async def _follow(pipe: Connection, size: int, entry: LogEntry, folder: Path) -> None:
    group = Group(entry, size, folder)
    pipe.send("ready")
    while await asyncio.to_thread(_told, pipe):
        pipe.send(await (group.form_again() if group.tries else group.form()))
    group.end()


def _told(pipe: Connection) -> bool:
    try:
        return pipe.recv() is not None
    except (EOFError, OSError):
        return False
