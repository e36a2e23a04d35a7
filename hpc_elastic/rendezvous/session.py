"""Session: one agent's side of the rendezvous; carries out what `follower_state` decides.

The agent's own thread calls `Session`. The connection lives in an event loop on another thread, so
that heartbeats continue while the agent is busy. If this agent leads, its `Leader` runs in the same
loop. Both threads use the attributes of the `SessionState`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.ft.manager_server import ManagerServer, Relay, RelayPort
from hpc_elastic.ft.messages import Message as ReplicaReport
from hpc_elastic.rendezvous import effects, messages
from hpc_elastic.rendezvous.follower_state import FollowerState
from hpc_elastic.rendezvous.leader import Leader, LeaderContext
from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, LogEntry, claim
from hpc_elastic.rendezvous.reachability import PROBE_S
from hpc_elastic.rendezvous.replica_state import replica_name
from hpc_elastic.transport.connection import (
    ClientConnection,
    Listener,
    ProbePorts,
    connect,
    reaches,
)
from hpc_elastic.transport.messages import Json, pack, unpack
from hpc_elastic.worker.shared_page import CheckpointRequest

_log = logging.getLogger(__name__)

T = TypeVar("T")

_SEARCH_TICK_S = 0.05
_CLAIM_RETRY_S = 0.5

Ending = messages.End | messages.Requeue | messages.Departed
Outcome = messages.RoundInfo | Ending


class SessionState:
    """The last message of each type that the leader has sent."""

    def __init__(self) -> None:
        self.placed: messages.RoundInfo | None = None
        """The round that this agent has a place in; None while it waits for one."""
        self.stop_requested = False
        """Whether this agent must stop its workers and call `join` again."""
        self.stacks = 0  # number of the leader's last request for stacks (`hang_diagnosis`)
        self.checkpoint_request: CheckpointRequest | None = None
        """The leader's request to all workers of the round."""
        self.leader_notice: messages.PreemptionNotice | None = None
        """The leader's last notice for this node."""
        self.ending: Ending | None = None
        self.news = "reading the entries of the run"
        self.error: BaseException | None = None
        self._changed = threading.Condition()

    @property
    def verdict(self) -> messages.End | None:
        """How the run ended; None while it continues."""
        return self.ending if isinstance(self.ending, messages.End) else None

    @property
    def requeued(self) -> messages.Requeue | None:
        """Set once this node must go back to the queue."""
        return self.ending if isinstance(self.ending, messages.Requeue) else None

    @property
    def departed(self) -> messages.Departed | None:
        """Set once this node has left the run because of its notice."""
        return self.ending if isinstance(self.ending, messages.Departed) else None

    def wait_for_outcome(
        self, timeout_s: float, request: Callable[[], None], waited_s: Callable[[], float]
    ) -> Outcome | None:
        """Reset the round, request another, and wait for the outcome (agent's thread).

        Returns None if there is none within ``timeout_s``. Raises the error that has ended the
        event loop's thread.
        """
        with self._changed:
            self.placed, self.checkpoint_request = None, None
            self.stop_requested, self.stacks = False, 0
            request()
            left_s = timeout_s
            while not self._changed.wait_for(
                lambda: self.placed or self.ending or self.error, max(left_s, _SEARCH_TICK_S)
            ):
                left_s = timeout_s - waited_s()
                if left_s <= 0:
                    break
            if self.error is not None:
                raise self.error
            return self.ending or self.placed

    def fail(self, error: BaseException) -> None:
        """Record the error that ends the rendezvous (event loop's thread)."""
        _log.error("the rendezvous failed", exc_info=error)
        with self._changed:
            self.error = error
            self.stop_requested = True
            self._changed.notify_all()

    def handle_message(self, message: messages.RunMessage) -> None:
        """Store the message of a `Deliver` effect (event loop's thread)."""
        with self._changed:
            match message:
                case messages.RoundInfo():
                    self.placed = message
                case messages.Stop(reason):
                    _log.info("workers are to stop: %s", reason)
                    self.stop_requested = True
                case messages.StacksRequest(number):
                    self.stacks = number
                case messages.CheckpointRequested(request):
                    self.checkpoint_request = request
                case messages.PreemptionNotice():
                    self.leader_notice = message
                case messages.End():
                    self.ending = message
                case messages.Requeue() | messages.Departed():
                    self.ending = message
                    self.stop_requested = True
                case messages.Waiting(text):
                    if text != self.news:
                        _log.info("%s", text)
                    self.news = text
            self._changed.notify_all()


class Session(SessionState):
    """The agent's connection to its run. All public methods may be called from any thread."""

    def __init__(
        self,
        me: Agent,
        context: LeaderContext,
        *,
        progress: Callable[[], Json] = dict,
        ft_socket: Path | None = None,
    ) -> None:
        """Connect to the run.

        ``context`` is for the case that this agent leads, too. ``progress`` returns the workers'
        progress for a heartbeat. ``ft_socket`` serves this node's workers if they are of a replica
        of their own; it is in a folder that only the owner may enter.
        """
        super().__init__()
        self._me = me
        self._context = context
        self._progress = progress
        self.replica: ManagerServer | None = None
        """Serves the workers of this node if they are of a replica of their own."""
        if ft_socket is not None:
            relays = None
            if context.rules.unit_nodes > 1:
                relays = RelayPort(context.address, context.secret)
            self.replica = ManagerServer(ft_socket, replica_name(me), self.send, relays=relays)
        self._following = FollowerState(
            me, context.heartbeat, time.monotonic(),
            stays=self.replica is not None, generation=context.generation,
        )  # fmt: skip
        self._probe_ports = ProbePorts(context.group_addresses or (context.address,))
        self._following.probe_ports = self._probe_ports.where
        self._following.versions = _versions()
        self._stream: ClientConnection | None = None
        self._attempt: asyncio.Task[None] | None = None
        """The task that connects to a leader and receives its messages."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._leader: Leader | None = None
        self._listener: Listener | None = None  # the port of this agent's last claim
        self._threads = ThreadPoolExecutor(thread_name_prefix="session")
        # The default factory would set the loop as that of the agent's thread, even once closed.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self._main: asyncio.Task[None] | None = None
        self._ending = False
        self._over = asyncio.Event()
        self._thread.start()

    # ---- the agent's thread -------------------------------------------------------------

    def join(self, timeout_s: float, store: tuple[str, int] = ("", 0)) -> Outcome:
        """Request a place in the next round and wait for it.

        Args:
            timeout_s: The longest wait, in seconds, in which the leader or the log answers.
            store: Address and port of a fresh store, for a replica whose first node this is.

        Raises:
            TimeoutError: No round closed in time; the message names what is missing.
            RunDirectoryError: The run directory cannot be used.
        """
        outcome = self.wait_for_outcome(
            timeout_s,
            lambda: self.run_in_loop(lambda: self._carry_out(self._following.join(store))),
            lambda: self._following.waited_s,
        )
        if outcome is not None:
            return outcome
        raise TimeoutError(f"no round closed within {timeout_s:g} s: {self.news}")

    def add_notice(self, notice: messages.PreemptionNotice) -> None:
        """Put this node under notice: its run saves, and the node leaves the run.

        Outside a round `departed` is set at once, in a round when the round stops. A later notice
        counts only if it leaves less time; its reason does not replace the first one.
        """
        now = time.monotonic()
        self.run_in_loop(lambda: self._carry_out(self._following.add_notice(notice, now)))

    def leave_now(self) -> None:
        """Leave because of the notice, without waiting for the round: sets `departed`."""
        self.run_in_loop(lambda: self._carry_out(self._following.leave_now()))

    def expect_workers(self, place: messages.RoundInfo, server: tuple[str, int] | None) -> None:
        """Let the workers of this node connect, which are of a replica and about to be started.

        ``server`` is the address and port of the replica's server, if that is on another node.
        """
        assert self.replica is not None
        replica, secret, relay = self.replica, self._context.secret, None
        if server is not None:
            relay = partial(
                Relay, *server, secret, place.index, self._me.host,
                replica.on_relayed, replica.on_relay_end,
            )  # fmt: skip
        self.run_in_loop(replica.restore_socket)
        self.run_in_loop(replica.expect_workers, place.world_size, place.index, relay)

    def leave(self, why: str, timeout_s: float = 10.0) -> None:
        """Leave the run: send the leader the reason, stop leading, end the thread. Repeatable."""
        self.run_in_loop(self._leave, why)
        self._thread.join(timeout_s)

    def run_in_loop(self, work: Callable[..., None], *arguments: object) -> None:
        """Call a function on the event loop's thread, unless the session has ended."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(work, *arguments)

    def report(self, report: messages.MemberReport) -> None:
        """Report to the leader of the present round; times are of this node's clock."""
        self.run_in_loop(lambda: self._carry_out(self._following.report(report)))

    # ---- the event loop's thread --------------------------------------------------------

    def _run(self) -> None:
        try:
            self._runner.run(self._live())
        except asyncio.CancelledError:
            pass
        except BaseException as e:
            self.fail(e)
        finally:
            self._runner.close()
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _live(self) -> None:
        self._main = asyncio.current_task()
        following_tick_s = self._context.heartbeat.heartbeat_interval_s / 2
        try:
            self._probe_ports.serve(self._context.secret)
            if self.replica is not None:
                await self.replica.start()
            while self.ending is None and not self._ending:
                self._carry_out(self._following.tick(time.monotonic()))
                tick_s = _SEARCH_TICK_S if self._stream is None else following_tick_s
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(tick_s):
                        await self._over.wait()
        finally:
            self._ending = True
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._probe_ports.close()
            if self._listener is not None and self._leader is None:
                self._listener.close()
            await self._stop_leading()
            if self.replica is not None:
                await self.replica.stop()

    async def _stop_leading(self) -> None:
        if self._leader is not None:
            if self.replica is not None:
                await self._leader.record_departure(self._me)
            await self._leader.stop()
            self._leader = None  # only now: if this was cancelled, `_live` stops the leader

    def _leave(self, why: str) -> None:
        if self._stream is not None:
            self._stream.send(pack(messages.Leave(why), time.time()))
        if self.ending is not None or self._ending:
            return  # the loop ends by itself, once the leader has sent all agents the outcome
        self._ending = True
        if self._main is not None:
            self._main.cancel()

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)
            self._leave("its rendezvous failed")

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    # ---- effects ------------------------------------------------------------------------

    def _carry_out(self, due: Iterable[effects.Effect]) -> None:
        remaining = iter(due)
        for effect in remaining:
            match effect:
                case effects.ReadLog():
                    self._start_task(self._read_log())
                case effects.Connect(entry):
                    self._attempt = self._start_task(self._follow(entry))
                case effects.Disconnect():
                    if self._stream is not None:
                        self._stream.abort()
                        self._drop_stream()
                    elif self._attempt is not None:
                        self._attempt.cancel()
                case effects.SendToLeader(message):
                    self._send_to_leader(message)
                case effects.QuerySlurm(task):
                    self._start_task(self._query_slurm(task))
                case effects.Claim():
                    self._start_task(self._claim(effect))
                case effects.Lead(entry):
                    assert self._listener is not None
                    self._leader = Leader(self._context, self._me, entry, self._listener)
                    self._leader.lead()
                    self._start_task(self._await_end(self._leader))
                case effects.PublishResult(entry):
                    self._start_task(self._publish_result(entry, list(remaining)))
                    return
                case effects.Deliver(message):
                    self._deliver(message)
                case effects.ProbePeers(probe):
                    self._start_task(self._probe(probe, self._stream))

    async def _read_log(self) -> None:
        try:
            number, entry, lease = await self._in_thread(self._context.log.read_last)
        except OSError as e:
            if await self._in_thread(self._context.log.is_removed):
                self._carry_out(self._following.run_removed())
            self._carry_out(self._following.log_unreadable(str(e), time.monotonic()))
        else:
            self._carry_out(self._following.log_read(number, entry, lease, time.monotonic()))

    async def _publish_result(self, entry: LogEntry, afterwards: list[effects.Effect]) -> None:
        writer = self._context.make_status_writer(0)
        await writer.publish_result(entry)
        await writer.close()
        await self._in_thread(self._context.cancel_pending)
        await self._in_thread(self._context.send_end, entry.ending)
        self._carry_out(afterwards)

    async def _query_slurm(self, task: str) -> None:
        runs = await self._in_thread(self._context.scheduler.is_running, task)
        self._carry_out(self._following.slurm_answered(task, runs, time.monotonic()))

    async def _probe(self, query: messages.Probe, stream: ClientConnection | None) -> None:
        """Probe all ports at once; send the leader that asked the tasks that are out of reach."""
        secret = self._context.secret
        wanted = [(task, where) for task, ports in query.peers.items() for where in ports]
        probes = (reaches(*where, secret, PROBE_S) for _, where in wanted)
        found = await asyncio.gather(*probes)
        failed = [task for (task, _), is_reached in zip(wanted, found, strict=True)
                  if not is_reached]  # fmt: skip
        if failed:
            _log.warning("this node does not reach %s", ", ".join(failed))
        if self._stream is stream:
            self._send_to_leader(messages.Probed(query.number, failed))

    def _send_to_leader(self, message: messages.RunMessage) -> None:
        if self._stream is not None:
            if isinstance(message, messages.Heartbeat):
                message = messages.Heartbeat(self._progress())
            self._stream.send(pack(message, time.time()))

    def send(self, message: ReplicaReport) -> None:
        """Send a message of this node's replica to the lighthouse (event loop's thread)."""
        self._send_to_leader(messages.QuorumMessage(message))

    def _deliver(self, message: messages.RunMessage) -> None:
        if isinstance(message, messages.QuorumMessage):
            if self.replica is not None:
                self.replica.on_message(message.message)
            return
        self.handle_message(message)
        if self.ending is not None:
            self._over.set()

    # ---- following ----------------------------------------------------------------------

    async def _follow(self, entry: LogEntry) -> None:
        where, secret = (entry.leader.address, entry.leader.port), self._context.secret
        try:
            stream = await connect(*where, secret, entry.term, asdict(self._me))
        except OSError as e:
            refused, why = isinstance(e, ConnectionRefusedError), str(e) or type(e).__name__
            now = time.monotonic()
            self._carry_out(self._following.not_connected(why, now, refused=refused))
            return
        try:
            await self._receive_all(stream)
        finally:
            if self._stream is stream:
                self._drop_stream()
            await stream.close()

    async def _receive_all(self, stream: ClientConnection) -> None:
        self._stream = stream
        self._carry_out(self._following.connected(time.monotonic()))
        if self.replica is not None:
            self.replica.on_connect()
        why = "its connection closed"
        try:
            while self._stream is stream and self.ending is None:
                message = unpack(await stream.receive(), messages.TO_AGENT, time.time())
                if self._stream is stream and message is not None:
                    self._carry_out(self._following.received(message, time.monotonic()))
        except (OSError, ValueError, KeyError) as e:
            why = str(e) or type(e).__name__
        if self._stream is stream:
            self._drop_stream()
            self._carry_out(self._following.disconnected(why, time.monotonic()))

    def _drop_stream(self) -> None:
        self._stream = None
        if self.replica is not None:
            self.replica.on_disconnect()

    # ---- leading ------------------------------------------------------------------------

    async def _claim(self, wanted: effects.Claim) -> None:
        """Try to append the next entry as the next leader; the agent that appends it leads."""
        await self._stop_leading()
        address, number = self._context.address, wanted.number
        try:
            listener = self._listener = Listener(address)
        except OSError as e:  # too many open files, or the interface is temporarily down
            _log.warning("this node cannot lead, for now: %s", e)
            await asyncio.sleep(_CLAIM_RETRY_S)
            self._carry_out(self._following.claimed(None, time.monotonic()))
            return
        endpoint = Endpoint(address, listener.port, self._me.task, self._me.attempt)
        self._deliver(messages.Waiting(f"writing entry {number}, to lead the run"))
        entry = claim(
            number, wanted.before, endpoint, time.time(), possibly_alive=wanted.possibly_alive
        )
        created = False
        try:
            created = await self._in_thread(self._context.log.create, entry)
        except OSError as e:
            if isinstance(e, RunDirectoryError) and wanted.before is None:
                raise  # no entry was ever written: the other nodes would fail too
            _log.warning("this node cannot lead: entry %d cannot be written: %s", number, e)
            await asyncio.sleep(_CLAIM_RETRY_S)
        finally:
            if not created:
                listener.close()
        self._carry_out(self._following.claimed(entry if created else None, time.monotonic()))

    async def _await_end(self, leader: Leader) -> None:
        """Drop a leader whose term is over; fail with its error if it could not record that."""
        await leader.wait_until_over()
        if self._leader is leader:
            self._leader = None
        if leader.error is not None:
            raise leader.error


def _versions() -> str:
    """Return the versions that all nodes of a run should have, without importing anything."""
    found = [f"Python {platform.python_version()}"]
    for name in ("torch", "hpc_elastic"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)
