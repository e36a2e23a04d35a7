"""A keeper of the quorum with a port of its own; `lighthouse_frames` says what is heard there.

Runs that Slurm started have no lighthouse: their leader keeps the quorum.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hpc_elastic.ft.keeper import Keeper, Send
from hpc_elastic.ft.lighthouse_frames import SESSION_EPOCH, frame
from hpc_elastic.ft.protocol import unpack
from hpc_elastic.net.listener import Listener
from hpc_elastic.net.stream import BUFFER_BYTES, Visitor

_MAX_STRANGERS = 512
_MAX_ID = 256
_STILL_S = 0.3
"""A lighthouse that has not looked at its clock for so long stood still: its process was stopped,
or the thread of a script that it is held the interpreter lock."""
_EXCUSED_S = 1.0
"""Whose connection has ended meanwhile may take so long to come back."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Terms:
    """What a lighthouse goes by.

    Attributes:
        tick_s: How often it looks at its time-outs; whatever happens is acted on at once.
        silence_s: A replica that says nothing for longer is lost.
    """

    tick_s: float
    silence_s: float


class Lighthouse:
    """Serves a keeper to attendants, in one event loop."""

    def __init__(self, listener: Listener, keeper: Keeper, terms: Terms, secret: bytes) -> None:
        self._listener = listener
        self._keeper = keeper
        self._terms = terms
        self._secret = secret
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._replicas: dict[str, Visitor] = {}
        self._names: dict[Visitor, str] = {}
        self._heard: dict[Visitor, float] = {}
        self._strangers: dict[Visitor, None] = {}
        """Who has not proved yet that it knows the secret, the longest first."""
        self._arrivals: set[asyncio.Task[None]] = set()
        self._awaited: dict[str, asyncio.TimerHandle] = {}
        """Who went while this process stood still, and may come back."""
        self._ticked = self._excused_until = 0.0
        self._loop = asyncio.get_running_loop()

    async def serve(self) -> None:
        """Serve until cancelled; then close all connections."""
        self._listener.serve(self._take)
        self._ticked = self._loop.time()
        try:
            while True:
                await asyncio.sleep(self._terms.tick_s)
                self._look_at_clock()
                self._ticked = self._loop.time()
                self._drop_silent()
                self._carry_out(self._keeper.tick(self._loop.time()))
        finally:
            self._listener.close()
            for timer in self._awaited.values():
                timer.cancel()
            for visitor in [*self._names, *self._strangers]:
                visitor.close()

    def _take(self, connection: socket.socket) -> None:
        visitor = Visitor(self._secret, SESSION_EPOCH, self, self._buffer)
        self._strangers[visitor] = None
        if len(self._strangers) > _MAX_STRANGERS:
            next(iter(self._strangers)).abort("too many have not proved who they are")
        task = asyncio.create_task(self._let_in(visitor, connection))
        self._arrivals.add(task)
        task.add_done_callback(self._arrivals.discard)

    async def _let_in(self, visitor: Visitor, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: visitor, connection)
        except OSError as e:
            connection.close()
            self.left(visitor, f"it ended as soon as it came: {e}")

    # ---- what connections report (`net.stream.Host`) ------------------------------------

    def arrived(self, visitor: Visitor, hello: dict[str, Any]) -> None:
        """Let a replica in; the one of the same name before it is no more."""
        name = hello["replica"]
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_ID:
            raise ValueError("no replica id")
        self._strangers.pop(visitor, None)
        before = self._replicas.pop(name, None)
        if before is not None:
            self._forget(before)
            before.abort("it has come back on another connection")
        if name in self._awaited:
            self._awaited.pop(name).cancel()
        self._replicas[name] = visitor
        self._names[visitor] = name
        self._heard[visitor] = self._loop.time()
        visitor.send({"type": "terms", "silence_s": self._terms.silence_s})
        self._carry_out(self._keeper.arrived(name, self._loop.time()))

    def said(self, visitor: Visitor, message: dict[str, Any]) -> None:
        """Hand a message to the keeper."""
        name = self._names.get(visitor)
        if name is None:
            return
        now = self._heard[visitor] = self._loop.time()
        if message["type"] == "ft":
            self._carry_out(self._keeper.said(name, unpack(message["message"]), now))
        else:
            visitor.send({"type": "beat"})

    def left(self, visitor: Visitor, why: str) -> None:
        """Tell the keeper who is lost."""
        self._strangers.pop(visitor, None)
        name = self._names.get(visitor)
        self._forget(visitor)
        if name is not None:
            del self._replicas[name]
            self._look_at_clock()
            if self._loop.time() < self._excused_until:
                later = self._loop.call_later
                self._awaited[name] = later(_EXCUSED_S, self._lose, name, why)
            else:
                self._lose(name, why)

    def _lose(self, name: str, why: str) -> None:
        self._awaited.pop(name, None)
        _log.info("the connection of %s ended: %s", name, why)
        self._carry_out(self._keeper.left(name, why, self._loop.time()))

    def _look_at_clock(self) -> None:
        """Notice that this process has stood still: replicas gave it up, and will be back."""
        now = self._loop.time()
        if now - self._ticked > self._terms.tick_s + _STILL_S:
            self._excused_until = now + _EXCUSED_S
            self._heard = dict.fromkeys(self._heard, now)

    def _forget(self, visitor: Visitor) -> None:
        self._names.pop(visitor, None)
        self._heard.pop(visitor, None)

    def _drop_silent(self) -> None:
        since = self._loop.time() - self._terms.silence_s
        for visitor in [v for v, heard in self._heard.items() if heard < since]:
            visitor.abort(f"silent for {self._terms.silence_s:g} s")

    def _carry_out(self, sends: Iterable[Send]) -> None:
        for send in sends:
            visitor = self._replicas.get(send.replica)
            if visitor is not None:
                visitor.send(frame(send.message))
