"""One agent's side of the rendezvous: carries out what `following` decides.

`Session` is what the agent's own thread calls; the connection lives in an event loop on a thread
of its own, so that heartbeats go on whatever the agent does. If this agent is to lead, its leader
lives in the same loop. What both threads touch stands in `heard`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, TypeVar

from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.net.listener import Listener
from hpc_elastic.net.stream import Stream, connect
from hpc_elastic.net.wire import BadFrameError
from hpc_elastic.rendezvous.agent_effects import (
    Claim,
    Connect,
    Effect,
    HangUp,
    Inquire,
    Lead,
    Look,
    Publish,
    Say,
    Tell,
)
from hpc_elastic.rendezvous.following import Following
from hpc_elastic.rendezvous.heard import (
    Hearing,
    Leaving,
    Notice,
    Outcome,
    Proposal,
    Round,
    SentBack,
    Verdict,
)
from hpc_elastic.rendezvous.leader import Leader
from hpc_elastic.rendezvous.office import Candidacy
from hpc_elastic.rendezvous.record import Agent, Endpoint, Record, claim
from hpc_elastic.rendezvous.replica_group import ReplicaGroup
from hpc_elastic.rendezvous.reports import Reports

__all__ = [
    "Candidacy",
    "Leaving",
    "Notice",
    "Outcome",
    "Proposal",
    "Round",
    "SentBack",
    "Session",
    "Verdict",
]

_log = logging.getLogger(__name__)

T = TypeVar("T")
Message = dict[str, Any]

_SEARCH_TICK_S = 0.05
_CLAIM_AGAIN_S = 0.5


class Session(Hearing, Reports):
    """The agent's connection to its run. All public methods may be called from any thread."""

    def __init__(
        self,
        me: Agent,
        candidacy: Candidacy,
        *,
        progress: Callable[[], Message] = dict,
        group: ReplicaGroup | None = None,
    ) -> None:
        super().__init__()
        self._me = me
        self._candidacy = candidacy
        self._office = candidacy.office
        self._progress = progress
        self._beat_s = self._office.liveness.heartbeat_s
        self._group = group
        """The workers of this node, if they are a replica of their own."""
        self._following = Following(
            me, self._office.liveness, time.monotonic(),
            stays=group is not None, generation=self._office.generation,
        )  # fmt: skip
        self._stream: Stream | None = None
        self._attempt: asyncio.Task[None] | None = None
        """The connection, or the attempt to make one."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._leader: Leader | None = None
        self._listener: Listener | None = None
        """The port of this agent's last candidacy."""
        self._threads = ThreadPoolExecutor(thread_name_prefix="session")
        # By default, the loop would become the agent's thread's, and stay so when closed.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self._main: asyncio.Task[None] | None = None
        self._ending = False
        self._over = asyncio.Event()
        self._thread.start()

    # ---- the agent's thread -------------------------------------------------------------

    def join(self, timeout_s: float) -> Outcome:
        """Ask for a place in the next round and wait for it.

        Returns:
            The round; or the verdict if the run has ended; or that this node is not wanted now, or
            has left because it is under notice.

        Raises:
            TimeoutError: no round closed in time; says what it waited for.
            RunDirectoryError: the run directory can not be used.
        """
        outcome = self._heard.outcome_within(
            timeout_s, lambda: self._call(lambda: self._carry_out(self._following.join()))
        )
        if outcome is not None:
            return outcome
        raise TimeoutError(f"no round closed within {timeout_s:g} s: {self._heard.news}")

    def notice(self, reason: str, left_s: float) -> None:
        """Put this node under notice: it is to be left, and its run to save before that.

        Outside a round `leaving` is set at once, in a round when it is stopped. A second notice
        counts only if it leaves less time; its reason does not replace the first.

        Args:
            reason: A few words for the log, such as ``signal``.
            left_s: Seconds that are left.
        """
        now = time.monotonic()
        self._call(lambda: self._carry_out(self._following.notice(reason, left_s, now)))

    def leave_now(self) -> None:
        """Leave because of the notice, without waiting for the round: sets `leaving`."""
        self._call(lambda: self._carry_out(self._following.leave_now()))

    def close_run(self) -> None:
        """End the run for everybody."""
        self._report("close")

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
            self._fail(e)
        finally:
            self._runner.close()
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _live(self) -> None:
        self._main = asyncio.current_task()
        try:
            if self._group is not None:
                await self._group.start(self._say_for_group)
            while self._heard.ending is None and not self._ending:
                self._carry_out(self._following.tick(time.monotonic()))
                searching = self._stream is None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_SEARCH_TICK_S if searching else self._beat_s / 2):
                        await self._over.wait()
        finally:
            self._ending = True
            await self._end_tasks()
            if self._listener is not None and self._leader is None:
                self._listener.close()
            await self._stop_leading()
            if self._group is not None:
                await self._group.stop()

    async def _end_tasks(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _stop_leading(self) -> None:
        if self._leader is not None:
            if self._group is not None:
                await self._leader.depart(self._me)
            await self._leader.stop()
            self._leader = None  # not before: `_live` finishes what was cut short

    def _fail(self, error: BaseException) -> None:
        _log.error("the rendezvous failed", exc_info=error)
        self._heard.fail(error)

    def _report(self, type_: str, **fields: Any) -> None:
        self._call(lambda: self._carry_out(self._following.report(type_, **fields)))

    def _call(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is to be told
            self._loop.call_soon_threadsafe(work)

    def _leave(self, why: str) -> None:
        if self._stream is not None:
            self._stream.send({"type": "leave", "why": why})
        if self._heard.ending is not None or self._ending:
            return  # it ends by itself, once all have heard the verdict; nothing may cut that short
        self._ending = True
        if self._main is not None:
            self._main.cancel()

    # ---- effects ------------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        remaining = iter(effects)
        for effect in remaining:
            match effect:
                case Look():
                    self._start(self._look())
                case Connect(record):
                    self._attempt = self._start(self._follow(record))
                case HangUp():
                    self._hang_up()
                case Say(message):
                    self._say(message)
                case Inquire(task):
                    self._start(self._inquire(task))
                case Claim():
                    self._start(self._claim(effect))
                case Lead(record):
                    self._lead(record)
                case Publish(record):
                    self._start(self._publish(record, list(remaining)))
                    return
                case Tell(message):
                    self._hear(message)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished_task)
        return task

    def _finished_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())  # type: ignore[arg-type]
            self._leave("its rendezvous failed")

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def _look(self) -> None:
        try:
            number, record, lease = await self._in_thread(self._office.register.look)
        except OSError as e:
            self._carry_out(self._following.blind(str(e), time.monotonic()))
        else:
            now = time.monotonic()
            self._carry_out(self._following.looked(number, record, lease, now))

    async def _publish(self, record: Record, afterwards: list[Effect]) -> None:
        journal = self._office.make_journal(0)
        await journal.publish(record)
        await journal.close()
        await self._in_thread(self._office.world.cancel_pending)
        self._carry_out(afterwards)

    async def _inquire(self, task: str) -> None:
        runs = await self._in_thread(self._candidacy.is_running, task)
        self._carry_out(self._following.slurm_says(task, runs, time.monotonic()))

    # ---- following ----------------------------------------------------------------------

    async def _follow(self, record: Record) -> None:
        leader = record.leader
        try:
            stream = await connect(
                leader.address, leader.port, self._office.secret, record.epoch, asdict(self._me)
            )
        except (OSError, BadFrameError) as e:
            refused, why = isinstance(e, ConnectionRefusedError), str(e) or type(e).__name__
            now = time.monotonic()
            self._carry_out(self._following.not_connected(why, now, refused=refused))
            return
        try:
            await self._attend(stream)
        finally:
            if self._stream is stream:
                self._lose_stream()
            await stream.close()

    async def _attend(self, stream: Stream) -> None:
        self._stream = stream
        self._carry_out(self._following.connected(time.monotonic()))
        if self._group is not None:
            self._group.up()
        why = "its connection closed"
        try:
            while self._stream is stream and self._heard.ending is None:
                message = await stream.receive()
                if self._stream is stream:
                    self._carry_out(self._following.received(message, time.monotonic()))
        except (OSError, BadFrameError, ValueError, KeyError) as e:
            why = str(e) or type(e).__name__
        if self._stream is stream:
            self._lose_stream()
            self._carry_out(self._following.disconnected(why, time.monotonic()))

    def _lose_stream(self) -> None:
        self._stream = None
        if self._group is not None:
            self._group.down()

    def _hang_up(self) -> None:
        if self._stream is not None:
            self._stream.abort()
            self._lose_stream()
        elif self._attempt is not None:
            self._attempt.cancel()

    def _say(self, message: Message) -> None:
        if self._stream is not None:
            if message["type"] == "beat":
                message = {**message, "progress": self._progress()}
            self._stream.send(message)

    def _say_for_group(self, message: Message) -> None:
        self._say({"type": "ft", "message": message})

    def _hear(self, message: Message) -> None:
        if message["type"] == "ft":
            if self._group is not None:
                self._group.heard(message["message"])
            return
        self._heard.hear(message)
        if self._heard.ending is not None:
            self._over.set()

    # ---- leading ------------------------------------------------------------------------

    async def _claim(self, wanted: Claim) -> None:
        """Try to create the next record as the next leader; whoever creates it first leads."""
        await self._stop_leading()
        try:
            listener = self._listener = Listener(self._candidacy.address)
        except OSError as e:  # too many open files, or the interface is down for a moment
            _log.warning("this node can not lead, for now: %s", e)
            await asyncio.sleep(_CLAIM_AGAIN_S)
            self._carry_out(self._following.claimed(None, time.monotonic()))
            return
        here = Endpoint(self._candidacy.address, listener.port, self._me.task, self._me.attempt)
        number, before, unseen = wanted.number, wanted.before, wanted.unseen
        self._hear({"type": "news", "text": f"writing record {number}, to lead the run"})
        mine: Record | None = claim(number, before, here, time.time(), unseen=unseen)
        try:
            if mine is not None and not await self._create(mine, first=before is None):
                mine = None
        finally:
            if mine is None:
                listener.close()
        self._carry_out(self._following.claimed(mine, time.monotonic()))

    def _lead(self, record: Record) -> None:
        assert self._listener is not None
        self._leader = Leader(self._office, record, self._listener)
        self._leader.lead()
        self._start(self._part_with(self._leader))

    async def _part_with(self, leader: Leader) -> None:
        """Let go of a leader that has ended because another leads."""
        await leader.over()
        if self._leader is leader:
            self._leader = None

    async def _create(self, record: Record, *, first: bool) -> bool:
        try:
            return await self._in_thread(self._office.register.create, record)
        except RunDirectoryError:
            if first:
                raise  # it never worked here, and no other node will fare better
            _log.exception("this node can not lead")
        except OSError as e:
            _log.warning("record %d can not be written: %s", record.number, e)
        await asyncio.sleep(_CLAIM_AGAIN_S)
        return False
