"""Session: one agent's side of the rendezvous; carries out what `follower_state` decides.

`Session` is what the agent's own thread calls; the connection lives in an event loop on a thread
of its own, so that heartbeats go on whatever the agent does. If this agent is to lead, its leader
lives in the same loop. What both threads touch is a `SessionState`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.ft.manager_server import ManagerServer
from hpc_elastic.ft.messages import Message as ReplicaReport
from hpc_elastic.ft.messages import to_frame, unpack
from hpc_elastic.rendezvous.effects import (
    Claim,
    Connect,
    Deliver,
    Disconnect,
    Effect,
    Lead,
    Message,
    PublishResult,
    QuerySlurm,
    ReadLog,
    RoundInfo,
    SendToLeader,
)
from hpc_elastic.rendezvous.follower_state import FollowerState
from hpc_elastic.rendezvous.leader import Leader, LeaderCandidate
from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, LogEntry, claim
from hpc_elastic.rendezvous.replica_state import replica_name
from hpc_elastic.transport.connection import ClientConnection, Listener, connect
from hpc_elastic.worker.shared_page import CheckpointRequest

_log = logging.getLogger(__name__)

T = TypeVar("T")

_SEARCH_TICK_S = 0.05
_CLAIM_AGAIN_S = 0.5


class Session:
    """The agent's connection to its run. All public methods may be called from any thread."""

    def __init__(
        self,
        me: Agent,
        candidacy: LeaderCandidate,
        *,
        progress: Callable[[], Message] = dict,
        ft_socket: Path | None = None,
    ) -> None:
        """Connect to the run.

        Args:
            me: This agent.
            candidacy: What it leads with, if it comes to that.
            progress: Returns what a heartbeat reports of the workers.
            ft_socket: Where this node's workers are a replica of their own: the path of the socket
                on which they are served, in a folder that only the owner may enter.
        """
        self._heard = SessionState()
        self._me = me
        self._candidacy = candidacy
        self._office = candidacy.office
        self._progress = progress
        self._beat_s = self._office.liveness.heartbeat_interval_s
        self.replica: ManagerServer | None = None
        """Serves the workers of this node, if they are a replica of their own."""
        if ft_socket is not None:
            self.replica = ManagerServer(ft_socket, replica_name(me), self.send)
        self._following = FollowerState(
            me, self._office.liveness, time.monotonic(),
            stays=self.replica is not None, generation=self._office.generation,
        )  # fmt: skip
        self._stream: ClientConnection | None = None
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
            RunDirectoryError: the run directory cannot be used.
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
        self._call(lambda: self._carry_out(self._following.add_notice(reason, left_s, now)))

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

    def run_in_loop(self, work: Callable[..., None], *arguments: object) -> None:
        """Run something on the event loop's thread, unless the session has ended."""
        self._call(lambda: work(*arguments))

    # ---- what the leader has sent -------------------------------------------------------

    @property
    def placed(self) -> RoundInfo | None:
        """The round that this agent has a place in; None while it waits for one."""
        return self._heard.round

    @property
    def stop_requested(self) -> bool:
        """Whether this agent's workers must be stopped and `join` be called again."""
        return self._heard.stop_requested

    @property
    def stacks(self) -> int:
        """Number of the leader's question what the workers are at (`hang_diagnosis`); 0: none."""
        return self._heard.stacks

    @property
    def checkpoint_request(self) -> CheckpointRequest | None:
        """The leader's request to all workers of the round; None if there is none."""
        return self._heard.checkpoint_request

    @property
    def noticed(self) -> LeaveRequest | None:
        """Set once this node is to be left, whoever said so."""
        return self._heard.notice

    @property
    def verdict(self) -> RunOutcome | None:
        """How the run ended; None while it goes on."""
        ending = self._heard.ending
        return ending if isinstance(ending, RunOutcome) else None

    @property
    def sent_back(self) -> Requeued | None:
        """Set once this node is to go back to the queue."""
        ending = self._heard.ending
        return ending if isinstance(ending, Requeued) else None

    @property
    def leaving(self) -> Departed | None:
        """Set once this node has left the run because it is to be left."""
        ending = self._heard.ending
        return ending if isinstance(ending, Departed) else None

    # ---- reports of this node's workers -------------------------------------------------

    def failed(self, failures: list[Message]) -> None:
        """Report failed workers: fields of `failures.Failure`, with ``age_s`` for ``time``."""
        self._report("failed", failures=failures)

    def finished(self) -> None:
        """Report that all workers of this agent have returned."""
        self._report("finished")

    def report_checkpoint(self, step: int, *, paused: int) -> None:
        """Report that all workers have announced the checkpoint of a step.

        Args:
            step: The optimizer step that the checkpoint holds.
            paused: The number of the request for which some of them stay there; 0: none stays.
        """
        self._report("checkpoint", step=step, paused=paused)

    def want_checkpoint(self) -> None:
        """Ask that all ranks save at one step soon."""
        self._report("request_checkpoint")

    def stalled(self, stalled_s: float, limit_s: float) -> None:
        """Report that workers have made no step for so long, which is longer than the limit."""
        self._report("stalled", stalled_s=stalled_s, limit_s=limit_s)

    def answer_stacks(self, number: int, ranks: list[Message]) -> None:
        """Answer what the workers of this node are at.

        Args:
            number: Of the question.
            ranks: Fields of `hang.RankState`, with ``age_s`` for ``time``.
        """
        self._report("stacks", number=number, ranks=ranks)

    def vote(self, number: int, *, ok: bool, passed: int | None, rate: float) -> None:
        """Vote on a checkpoint request, and again when all workers have passed a confirmed step.

        Args:
            number: Of the request.
            ok: Each worker of this node is before the step, or waits there.
            passed: The largest step that a worker has published; in the second vote the smallest.
                None: no worker has called `should_checkpoint` yet.
            rate: Steps per second, at least 0.
        """
        self._report("step_vote", number=number, ok=ok, passed=passed, rate=rate)

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
            if self.replica is not None:
                await self.replica.start()
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
            if self.replica is not None:
                await self.replica.stop()

    async def _end_tasks(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _stop_leading(self) -> None:
        if self._leader is not None:
            if self.replica is not None:
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
                case ReadLog():
                    self._start(self._look())
                case Connect(entry):
                    self._attempt = self._start(self._follow(entry))
                case Disconnect():
                    self._hang_up()
                case SendToLeader(message):
                    self._say(message)
                case QuerySlurm(task):
                    self._start(self._inquire(task))
                case Claim():
                    self._start(self._claim(effect))
                case Lead(entry):
                    self._lead(entry)
                case PublishResult(entry):
                    self._start(self._publish(entry, list(remaining)))
                    return
                case Deliver(message):
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
            number, entry, lease = await self._in_thread(self._office.register.look)
        except OSError as e:
            self._carry_out(self._following.log_unreadable(str(e), time.monotonic()))
        else:
            now = time.monotonic()
            self._carry_out(self._following.log_read(number, entry, lease, now))

    async def _publish(self, entry: LogEntry, afterwards: list[Effect]) -> None:
        journal = self._office.make_journal(0)
        await journal.publish(entry)
        await journal.close()
        await self._in_thread(self._office.world.cancel_pending)
        self._carry_out(afterwards)

    async def _inquire(self, task: str) -> None:
        runs = await self._in_thread(self._candidacy.is_running, task)
        self._carry_out(self._following.slurm_answered(task, runs, time.monotonic()))

    # ---- following ----------------------------------------------------------------------

    async def _follow(self, entry: LogEntry) -> None:
        leader = entry.leader
        try:
            stream = await connect(
                leader.address, leader.port, self._office.secret, entry.term, asdict(self._me)
            )
        except OSError as e:
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

    async def _attend(self, stream: ClientConnection) -> None:
        self._stream = stream
        self._carry_out(self._following.connected(time.monotonic()))
        if self.replica is not None:
            self.replica.on_connect()
        why = "its connection closed"
        try:
            while self._stream is stream and self._heard.ending is None:
                message = await stream.receive()
                if self._stream is stream:
                    self._carry_out(self._following.received(message, time.monotonic()))
        except (OSError, ValueError, KeyError) as e:
            why = str(e) or type(e).__name__
        if self._stream is stream:
            self._lose_stream()
            self._carry_out(self._following.disconnected(why, time.monotonic()))

    def _lose_stream(self) -> None:
        self._stream = None
        if self.replica is not None:
            self.replica.on_disconnect()

    def _hang_up(self) -> None:
        if self._stream is not None:
            self._stream.abort()
            self._lose_stream()
        elif self._attempt is not None:
            self._attempt.cancel()

    def _say(self, message: Message) -> None:
        if self._stream is not None:
            if message["type"] == "heartbeat":
                message = {**message, "progress": self._progress()}
            self._stream.send(message)

    def send(self, message: ReplicaReport) -> None:
        """Send a message of this node's replica to the lighthouse (event loop)."""
        self._say(to_frame(message))

    def _hear(self, message: Message) -> None:
        if message["type"] == "ft":
            if self.replica is not None:
                self.replica.on_message(unpack(message["message"]))
            return
        self._heard.hear(message)
        if self._heard.ending is not None:
            self._over.set()

    # ---- leading ------------------------------------------------------------------------

    async def _claim(self, wanted: Claim) -> None:
        """Try to create the next entry as the next leader; whoever creates it first leads."""
        await self._stop_leading()
        try:
            listener = self._listener = Listener(self._candidacy.address)
        except OSError as e:  # too many open files, or the interface is down for a moment
            _log.warning("this node cannot lead, for now: %s", e)
            await asyncio.sleep(_CLAIM_AGAIN_S)
            self._carry_out(self._following.claimed(None, time.monotonic()))
            return
        here = Endpoint(self._candidacy.address, listener.port, self._me.task, self._me.attempt)
        number, before, possibly_alive = wanted.number, wanted.before, wanted.possibly_alive
        self._hear({"type": "news", "text": f"writing entry {number}, to lead the run"})
        mine: LogEntry | None = claim(
            number, before, here, time.time(), possibly_alive=possibly_alive
        )
        try:
            if mine is not None and not await self._create(mine, first=before is None):
                mine = None
        finally:
            if mine is None:
                listener.close()
        self._carry_out(self._following.claimed(mine, time.monotonic()))

    def _lead(self, entry: LogEntry) -> None:
        assert self._listener is not None
        self._leader = Leader(self._office, entry, self._listener)
        self._leader.lead()
        self._start(self._part_with(self._leader))

    async def _part_with(self, leader: Leader) -> None:
        """Let go of a leader that has ended because another leads."""
        await leader.over()
        if self._leader is leader:
            self._leader = None

    async def _create(self, entry: LogEntry, *, first: bool) -> bool:
        try:
            return await self._in_thread(self._office.register.create, entry)
        except RunDirectoryError:
            if first:
                raise  # it never worked here, and no other node will fare better
            _log.exception("this node cannot lead")
        except OSError as e:
            _log.warning("entry %d cannot be written: %s", entry.index, e)
        await asyncio.sleep(_CLAIM_AGAIN_S)
        return False


@dataclass(frozen=True)
class RunOutcome:
    """How the run ended."""

    status: str
    failure: str | None


@dataclass(frozen=True)
class Requeued:
    """This node is to go back to the queue, and not to start again for a while."""

    delay_s: float


@dataclass(frozen=True)
class Departed:
    """This node was to be left, and has left the run; its workers are still to be stopped."""

    reason: str


Ending = RunOutcome | Requeued | Departed
Outcome = RoundInfo | Ending


@dataclass(frozen=True)
class LeaveRequest:
    """This node has to be left."""

    reason: str
    left_s: float
    """How much time there was when it was noticed."""
    deadline: float
    """The same as monotonic seconds."""


class SessionState:
    """The last of everything that an agent was told."""

    def __init__(self) -> None:
        self.round: RoundInfo | None = None
        self.stop_requested = False
        self.stacks = 0
        self.checkpoint_request: CheckpointRequest | None = None
        self.notice: LeaveRequest | None = None
        self.ending: Ending | None = None
        self.news = "reading the entries of the run"
        self.error: BaseException | None = None
        self._changed = threading.Condition()

    # ---- the agent's thread -------------------------------------------------------------

    def outcome_within(self, timeout_s: float, ask: Callable[[], None]) -> Outcome | None:
        """Forget the last round, ask for another, and wait for what comes; None: nothing does.

        Raises:
            BaseException: what the event loop's thread has failed with.
        """
        with self._changed:
            self.round, self.checkpoint_request = None, None
            self.stop_requested, self.stacks = False, 0
            ask()
            self._changed.wait_for(lambda: self.round or self.ending or self.error, timeout_s)
            if self.error is not None:
                raise self.error
            return self.ending or self.round

    # ---- the event loop's thread --------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """There will be no more to hear."""
        with self._changed:
            self.error = error
            self.stop_requested = True
            self._changed.notify_all()

    def hear(self, message: Message) -> None:
        """Take in what `following.Tell` brings."""
        with self._changed:
            self._take(message)
            self._changed.notify_all()

    def _take(self, message: Message) -> None:
        match message["type"]:
            case "round":
                fields = {k: v for k, v in message.items() if k not in ("type", "request")}
                self.round = RoundInfo(**{**fields, "store": tuple(message["store"])})
            case "stop":
                _log.info("workers are to stop: %s", message["reason"])
                self.stop_requested = True
            case "stacks":
                self.stacks = int(message["number"])
            case "checkpoint_request":
                fields = message["request"]
                self.checkpoint_request = None if fields is None else CheckpointRequest(**fields)
            case "noticed":
                self._note_notice(message)
            case "end" | "requeue" | "departed":
                self._end(message)
            case "waiting" | "news":
                if message["text"] != self.news:
                    _log.info("%s", message["text"])
                self.news = message["text"]

    def _note_notice(self, message: Message) -> None:
        left_s = float(message["left_s"])
        self.notice = LeaveRequest(message["reason"], left_s, time.monotonic() + left_s)
        _log.info("this node is to be left within %.0f s: %s", left_s, self.notice.reason)

    def _end(self, message: Message) -> None:
        match message["type"]:
            case "end":
                self.ending = RunOutcome(message["status"], message["failure"])
            case "requeue":
                self.ending = Requeued(float(message["delay_s"]))
                self.stop_requested = True
            case "departed":
                self.ending = Departed(message["reason"])
                self.stop_requested = True
