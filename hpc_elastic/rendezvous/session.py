"""One agent's side of the rendezvous: keeps a connection to the leader, or becomes the leader.

`Session` is what the agent's own thread calls; the connection lives in an event loop on a thread
of its own, so that heartbeats go on whatever the agent does. A session that loses its leader tells
the agent to stop its workers and looks for the next one: it reads the endpoint files, and claims
the next epoch when the last leader's port refuses connections, when Slurm says that its task runs
no more, or when it has been out of reach for ``lost_after_s``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from hpc_elastic.config import RendezvousSettings
from hpc_elastic.rendezvous.endpoint import Endpoint
from hpc_elastic.rendezvous.leader import Leader
from hpc_elastic.rendezvous.machine import Agent
from hpc_elastic.rendezvous.stream import Stream, connect
from hpc_elastic.rendezvous.wire import BadFrameError

_log = logging.getLogger(__name__)

_CONFIRM_REFUSAL_S = 0.2
_LOOK_AGAIN_S = 0.1


@dataclass(frozen=True)
class Round:
    """What a member is told of a closed round."""

    number: int
    restarts: int
    store: tuple[str, int]
    group_rank: int
    group_size: int
    """Nodes in the group."""
    first_rank: int
    """Global rank of this node's first worker."""
    world_size: int
    """Workers in the group."""


@dataclass(frozen=True)
class Verdict:
    """How the run ended."""

    status: str
    failure: str | None


class Endpoints(Protocol):
    """Where endpoints are published (`endpoint.EndpointDir`, `endpoint.FixedEndpoint`)."""

    def latest(self) -> tuple[int, Endpoint | None]:
        """Return the highest epoch that anybody has claimed (0: none), and its endpoint."""

    def claim(self, endpoint: Endpoint) -> bool:
        """Try to become the leader of an epoch."""

    @property
    def can_claim(self) -> bool:
        """Whether this agent may lead."""


@dataclass(frozen=True)
class Candidacy:
    """What this agent needs to lead: where to listen, and how to make a leader of an epoch."""

    address: str
    port: int
    make_leader: Callable[[int, Endpoint | None], Leader]
    """(epoch, the endpoint before) -> a leader that does not listen yet."""
    is_running: Callable[[str], bool | None]
    """Ask (blocking) Slurm whether a task is RUNNING; None where nobody knows."""


class Session:
    """The agent's connection to its run. All public methods may be called from any thread."""

    def __init__(
        self,
        me: Agent,
        endpoints: Endpoints,
        candidacy: Candidacy,
        settings: RendezvousSettings,
        *,
        secret: bytes,
        progress: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._me = me
        self._endpoints = endpoints
        self._candidacy = candidacy
        self._settings = settings
        self._secret = secret
        self._progress = progress
        self._changed = threading.Condition()
        self._joining = False
        self._asked = False
        self._round: Round | None = None
        self._stop_requested = False
        self._verdict: Verdict | None = None
        self._news = "looking for the leader"
        self._stream: Stream | None = None
        self._leader: Leader | None = None
        self._error: BaseException | None = None
        self._heard = 0.0
        # By default, the loop would become the agent's thread's, and stay so when closed.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self._main: asyncio.Task[None] | None = None
        self._ending = False
        self._thread.start()

    # ---- the agent's thread -------------------------------------------------------------

    @property
    def stop_requested(self) -> bool:
        """Whether this agent's workers must be stopped and `join` be called again."""
        return self._stop_requested

    @property
    def verdict(self) -> Verdict | None:
        """How the run ended; None while it goes on."""
        return self._verdict

    def join(self, timeout_s: float) -> Round | Verdict:
        """Ask for a place in the next round and wait for it.

        Returns:
            The round, or the verdict if the run has ended.

        Raises:
            TimeoutError: no round closed in time; says what it waited for.
            RunDirectoryError: the run directory can not be used.
        """
        with self._changed:
            self._round, self._stop_requested = None, False
            self._joining, self._asked = True, False
            self._call(self._ask)
            self._changed.wait_for(lambda: self._round or self._verdict or self._error, timeout_s)
            self._joining = False
            if self._error is not None:
                raise self._error
            outcome = self._verdict or self._round
        if outcome is not None:
            return outcome
        raise TimeoutError(f"no round closed within {timeout_s:g} s: {self._news}")

    def failed(self, failures: list[dict[str, Any]]) -> None:
        """Report failed workers: fields of `failures.Failure`, with ``age_s`` for ``time``."""
        if self._round is not None:
            self._send("failed", round=self._round.number, failures=failures)

    def finished(self) -> None:
        """Report that all workers of this agent have returned."""
        if self._round is not None:
            self._send("finished", round=self._round.number)

    def close_run(self) -> None:
        """End the run for everybody."""
        self._send("close")

    def leave(self, why: str, timeout_s: float = 10.0) -> None:
        """Leave the run: tell the leader why; lead no more; end the thread. May be repeated."""
        self._call(lambda: self._leave(why))
        self._thread.join(timeout_s)

    # ---- the event loop's thread --------------------------------------------------------

    def _run(self) -> None:
        try:
            self._runner.run(self._live())
        except asyncio.CancelledError:
            pass
        except BaseException as e:
            _log.exception("the rendezvous failed")
            with self._changed:
                self._error = e
                self._stop_requested = True
                self._changed.notify_all()
        finally:
            self._runner.close()

    async def _live(self) -> None:
        self._main = asyncio.current_task()
        try:
            while self._verdict is None and not self._ending:
                await self._follow(await self._reach_leader())
        finally:
            self._ending = True
            await self._stop_leading()

    async def _follow(self, stream: Stream) -> None:
        try:
            await self._attend(stream)
        except (OSError, BadFrameError, ValueError, KeyError) as e:
            self._lost_leader(e)
        finally:
            self._stream = None
            await stream.close()

    async def _attend(self, stream: Stream) -> None:
        self._stream, self._asked = stream, False
        self._ask()
        beating = asyncio.create_task(self._beat(stream))
        try:
            while self._verdict is None:
                message = await stream.receive()
                self._heard = time.monotonic()
                self._take(message)
        finally:
            beating.cancel()

    def _take(self, message: dict[str, Any]) -> None:
        with self._changed:
            match message["type"]:
                case "round" if self._joining:
                    self._joining = False
                    del message["type"]
                    self._round = Round(**{**message, "store": tuple(message["store"])})
                case "stop" if not self._joining:
                    _log.info("workers are to stop: %s", message["reason"])
                    self._stop_requested = True
                case "end":
                    self._verdict = Verdict(message["status"], message["failure"])
                case "waiting":
                    self._news = _describe(message)
            self._changed.notify_all()

    def _lost_leader(self, error: Exception) -> None:
        _log.warning("lost the leader: %s", error or type(error).__name__)
        with self._changed:
            self._stop_requested = self._stop_requested or not self._joining
            self._news = "lost the leader, looking for the next one"

    def _ask(self) -> None:
        """Ask for a place in the next round, once on each connection."""
        with self._changed:
            if self._joining and not self._asked and self._stream is not None:
                self._asked = True
                self._stream.send("join")

    async def _beat(self, stream: Stream) -> None:
        """Send heartbeats, and give up a leader that has fallen silent."""
        self._heard = woke = time.monotonic()
        while True:
            stream.send("beat", progress=self._progress())
            await asyncio.sleep(self._settings.heartbeat_s)
            now = time.monotonic()
            if now - woke > self._settings.heartbeat_s + self._settings.lost_after_s / 2:
                self._heard = now  # it was we who slept
            woke = now
            if now - self._heard > self._settings.lost_after_s:
                stream.abort()

    def _send(self, type_: str, **fields: Any) -> None:
        def send() -> None:
            if self._stream is not None:
                self._stream.send(type_, **fields)

        self._call(send)

    def _call(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is to be told
            self._loop.call_soon_threadsafe(work)

    def _leave(self, why: str) -> None:
        if self._stream is not None:
            self._stream.send("leave", why=why)
        if self._verdict is not None or self._ending:
            return  # it ends by itself, once all have heard the verdict; nothing may cut that short
        self._ending = True
        if self._main is not None:
            self._main.cancel()

    async def _stop_leading(self) -> None:
        if self._leader is not None:
            await self._leader.stop()
            self._leader = None  # not before: `_live` finishes what was cancelled halfway

    # ---- finding the leader -------------------------------------------------------------

    async def _reach_leader(self) -> Stream:
        suspect, out_of_reach_since = 0, time.monotonic()
        while True:
            epoch, endpoint = await asyncio.to_thread(self._endpoints.latest)
            if epoch != suspect:
                suspect, out_of_reach_since = epoch, time.monotonic()
            if epoch == 0:
                await self._stand(1, None)
                continue
            try:
                return await self._connect(endpoint)
            except (OSError, BadFrameError) as e:
                silent_s = time.monotonic() - out_of_reach_since
                self._news = f"the leader of epoch {epoch} can not be reached: {e!r}"
                if await self._is_dead(endpoint, e, silent_s):
                    await self._stand(epoch + 1, endpoint)
                else:
                    await asyncio.sleep(_LOOK_AGAIN_S)

    async def _connect(self, endpoint: Endpoint | None) -> Stream:
        if endpoint is None:
            raise BadFrameError("its endpoint file does not verify")
        return await connect(
            endpoint.address, endpoint.port, self._secret, endpoint.epoch, asdict(self._me)
        )

    async def _is_dead(self, endpoint: Endpoint | None, error: Exception, silent_s: float) -> bool:
        if not self._endpoints.can_claim:
            return False
        if silent_s > self._settings.lost_after_s:
            return True
        if endpoint is None:
            return False
        if isinstance(error, ConnectionRefusedError) and silent_s > _CONFIRM_REFUSAL_S:
            return True
        return await asyncio.to_thread(self._candidacy.is_running, endpoint.task) is False

    async def _stand(self, epoch: int, before: Endpoint | None) -> None:
        """Stand for the leadership of an epoch; whoever creates its endpoint file first has it."""
        await self._stop_leading()
        self._leader = leader = self._candidacy.make_leader(epoch, before)
        port = leader.listen(self._candidacy.address, self._candidacy.port)
        mine = Endpoint(epoch, self._candidacy.address, port, self._me.task, self._me.attempt)
        if await asyncio.to_thread(self._endpoints.claim, mine):
            leader.lead()
        else:
            await self._stop_leading()


def _describe(waiting: dict[str, Any]) -> str:
    missing = ", ".join(waiting["missing"]) or "nobody that runs yet"
    return (
        f"{waiting['joined']} of at least {waiting['min_nodes']} nodes have joined; "
        f"awaited: {missing}"
    )
