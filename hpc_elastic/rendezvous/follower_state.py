"""How an agent finds a leader, follows it, or replaces it (pure).

Theory of operation
-------------------
An agent reads the last log entry, which names the leader, and connects to that leader. It *follows*
the leader as long as messages arrive; workers run only while their agent follows. If the connection
breaks, or no message arrives for ``heartbeat_timeout_s``, the agent stops its workers and reads the
log again. The workers of a replica (`replica_state`) continue meanwhile: their agent *reattaches*
to the next leader with the index of its round's entry and its last report of the workers.

An agent replaces a dead leader (see `LeaderFailureDetector`): it *claims* the next term. Members of
the last round claim one after the other, in rank order, to limit the load on the file system in a
run of ten thousand nodes. The first claim wins, and the other agents follow its leader. After a
term whose leader has failed by an error of its own, the agents pause before the next claim, those
on the nodes of such leaders longest (`election_pause_s`).

Notice. A node *under notice* must be left by a deadline. Outside a round its agent leaves the run
at once. In a round it reports the notice to the leader, which lets all ranks save (`group_change`).
The agent leaves when the round stops, for any reason, instead of joining the next one, or at its
deadline (`leave_now`). It sends ``leave`` before its workers have ended, so that the round that
forms does not wait for them.

Events return the effects to carry out, in order. Times are monotonic seconds of this node. A late
tick shows that this agent was suspended; that time does not count as the leader's silence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from hpc_elastic.rendezvous import effects, messages
from hpc_elastic.rendezvous.effects import Effect
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig
from hpc_elastic.rendezvous.log_entry import Agent, LogEntry, has_no_leader
from hpc_elastic.run.events import LossReason
from hpc_elastic.slurm.exit_action import Reason

CONFIRM_REFUSAL_S = 0.2
"""A port must refuse connections for this time before its leader is taken for dead."""
_CLAIM_STAGGER_S, _READ_STAGGER_S, _MAX_STAGGER_S = 0.02, 0.0001, 1.0
_PUNCTUAL_S = 0.1
_MIN_READ_PAUSE_S, _MAX_READ_PAUSE_S = 0.1, 2.0
_STALLED_S = 30.0  # a longer time without any answer does not count as a wait for a place
_NUM_WATCHERS = 16
"""The first members in rank order read the lease at every heartbeat; the others more rarely."""
_FAILED_PAUSE_S, _OTHERS_FIRST = 1.0, 3.0
_NUM_SLURM_CLIENTS = 3
"""The first members query Slurm about an unreachable leader; the others wait for the lease."""
REMOVED = messages.End("removed", "its directory was removed")
_RESUMED = messages.End(messages.OLDER_ATTEMPT.status, "resumed with other tasks")


class _Link(Enum):
    DOWN = "down"
    CONNECTING = "connecting"
    UP = "up"


class FollowerState:
    """One agent's state: its leader, its round and its notice.

    If it ``stays``, its workers continue without a leader. ``generation`` is the run's when this
    agent's task was submitted.
    """

    def __init__(
        self,
        me: Agent,
        heartbeat: HeartbeatConfig,
        now: float,
        *,
        stays: bool = False,
        generation: int = 0,
    ) -> None:
        self.me = me
        self._generation = generation
        self._stays = stays
        self.joining = False
        self.heartbeat = heartbeat
        self._link = _Link.DOWN
        self._entry: LogEntry | None = None
        """The entry of the present leader, or of the last one that was tried."""
        self._last_message = now
        self._watch = LeaderFailureDetector(since=now)
        self._num_requests = 0  # number of the last ``join`` request; a round must answer that one
        self._store = ("", 0)
        self._waits_since = self._answered = now
        """Since when it waits for a place, and when the leader or the log has answered last."""
        self.probe_ports: list[tuple[str, int]] = []
        """Addresses and ports at which this agent accepts the probes of others (`reachability`)."""
        self.versions = ""  # of Python and packages on this node; the leader compares them
        self._place: messages.RoundInfo | None = None  # the last place of this agent in a round
        self._final_report: messages.MemberReport | None = None
        """The report of how the workers of that round ended; None while they run."""
        self._in_round = False  # whether this agent has a place in a round that was not stopped
        self._notice: messages.PreemptionNotice | None = None
        self._reading = self._claiming = False
        self._read_began = now
        self._read_due = now
        self._read_pause_s = _MIN_READ_PAUSE_S
        self._dead_since: float | None = None
        self._ticked = now
        self._beaten = now
        self._over = False

    # ---- requests of the agent ----------------------------------------------------------

    def join(self, store: tuple[str, int] = ("", 0)) -> list[Effect]:
        """Request a place in the next round, now that the workers have ended; see `Join`."""
        self.joining, self._store, self._waits_since = True, store, self._ticked
        return self._request_place(0.0)

    @property
    def waited_s(self) -> float:
        """How long it has waited for a place, without the time in which nothing has answered."""
        return max(0.0, self._answered - self._waits_since)

    def report(self, report: messages.MemberReport) -> list[Effect]:
        """Report to the leader of the present round; without a leader the report is dropped.

        The next leader receives the final report of a replica's workers (`connected`). A heartbeat
        before `Finished` carries the last progress of the workers.
        """
        report = replace(report, index=0 if self._place is None else self._place.index)
        if self._stays and isinstance(report, (messages.Finished, messages.Failed)):
            self._final_report = report
        if isinstance(report, messages.Finished):
            return self._send_to_leader(messages.Heartbeat(), report)
        return self._send_to_leader(report)

    def add_notice(self, notice: messages.PreemptionNotice, now: float) -> list[Effect]:
        """Put this node under notice; the first reason and the earliest deadline count.

        For the run a SIGTERM at the end of the wall time is that end. The agent, which has to ask
        Slurm what a signal means, keeps the signal (`agent.preemption.merged`).
        """
        known = self._notice
        if self._over or (known is not None and known.by <= notice.by):
            return []
        self._notice = notice if known is None else replace(known, by=notice.by)
        if not self._in_round:
            return self.leave_now()
        return self._send_to_leader(self._notice.for_leader(now))

    def leave_now(self) -> list[Effect]:
        """Leave the run because of the notice, without waiting for a checkpoint."""
        if self._over:
            return []
        reason = self._notice.reason if self._notice is not None else Reason.ASKED
        leave = messages.Leave(f"{LossReason.TO_BE_LEFT}: {reason.value}")
        return [*self._send_to_leader(leave), *self._end_session(messages.Departed(reason))]

    # ---- events -------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Time has passed; call it at least every `HeartbeatConfig.heartbeat_interval_s`."""
        if self._over:
            return []
        late_s, self._ticked = now - self._ticked - self.heartbeat.heartbeat_interval_s, now
        if late_s > _PUNCTUAL_S:
            self._last_message = min(now, self._last_message + late_s)
            self._watch.on_suspended(late_s)
        if self._link is not _Link.UP:
            return self._read_log_if_due(now)
        due: list[Effect] = []
        if now - self._beaten >= self.heartbeat.heartbeat_interval_s:
            self._beaten = now
            due.append(effects.SendToLeader(messages.Heartbeat()))
        silence_s = now - self._last_message
        if silence_s > self.heartbeat.heartbeat_timeout_s:
            return due + self._on_leader_lost(f"silent for {silence_s:.1f} s", now)
        if silence_s > 1.5 * self.heartbeat.heartbeat_interval_s:
            due += self._read_log_if_due(now)  # observe the lease early, for a later claim
        return due

    def log_read(
        self, number: int, entry: LogEntry | None, lease: int | None, now: float
    ) -> list[Effect]:
        """The log was read: its last index, the newest entry that verifies, its term's lease."""
        self._reading = False
        self._record_answer(now)
        if self._over or self._claiming:
            return []
        if entry is not None and entry.generation > self._generation:
            return [effects.Disconnect(), *self._end_session(_RESUMED)]
        if entry is not None and entry.attempts.get(self.me.task, 0) > self.me.attempt:
            return [effects.Disconnect(), *self._end_session(messages.OLDER_ATTEMPT)]
        if entry is not None and entry.ending is not None:
            return [effects.PublishResult(entry), *self._end_session(messages.End.of(entry.ending))]
        whole = entry if entry is not None and entry.index == number else None
        term = -number if whole is None else whole.term  # a damaged entry: a term of its own
        if self._watch.term != term:
            self._watch = LeaderFailureDetector(term, since=now)
            self._dead_since = None
            self._read_pause_s = _MIN_READ_PAUSE_S
        self._watch.record_lease(lease, self._read_began, now)
        if self._link is _Link.UP:
            deposed = self._entry is not None and number > 0 and self._is_newer(entry)
            return self._on_leader_lost("another agent leads", now) if deposed else []
        self._schedule_read(now)
        connecting = self._link is _Link.CONNECTING
        if has_no_leader(number, entry) or self._may_claim(number, entry, now):
            self._claiming, self._link = True, _Link.DOWN
            cancel: list[Effect] = [effects.Disconnect()] if connecting else []
            return [*cancel, effects.Claim(number + 1, entry, self._watch.refused_since is None)]
        if whole is None:
            text = f"entry {number} is damaged: waiting for a leader that follows it"
            return [self._deliver_news(text)]
        if connecting and not self._is_newer(whole):
            return []
        self._link, self._entry = _Link.CONNECTING, whole
        return [*([effects.Disconnect()] if connecting else []), effects.Connect(whole)]

    def run_removed(self) -> list[Effect]:
        """The directory of the run was removed for good, and no leader can be found by it."""
        return [] if self._over or self._link is _Link.UP else self._end_session(REMOVED)

    def log_unreadable(self, why: str, now: float) -> list[Effect]:
        """The shared file system did not answer."""
        self._reading = False
        self._schedule_read(now)
        news = self._deliver_news(f"no entry can be read: {why}")
        return [] if self._link is _Link.UP else [news]

    def connected(self, now: float) -> list[Effect]:
        """The leader has authenticated itself."""
        self._link = _Link.UP
        self._record_answer(now)
        self._last_message = self._beaten = now
        self._read_pause_s = _MIN_READ_PAUSE_S
        self._dead_since = None
        self._watch.followed = True
        self._watch.refused_since, self._watch.slurm_says_dead = None, False
        if self.joining:
            return self._request_place(self.waited_s)
        if not (self._stays and self._in_round):
            return []
        assert self._place is not None
        place = (self._place.index, self._place.number, self._place.replica)
        notice = None if self._notice is None else self._notice.for_leader(now)
        reattach = messages.Reattach(*place, *self._offered)
        reports = (report for report in (reattach, self._final_report, notice) if report)
        return self._send_to_leader(*reports)

    def not_connected(self, why: str, now: float, *, refused: bool) -> list[Effect]:
        """The leader could not be reached; ``refused``: its node has refused the connection."""
        if self._link is not _Link.CONNECTING:
            return []
        self._link = _Link.DOWN
        assert self._entry is not None
        since = self._watch.refused_since
        self._watch.refused_since = (now if since is None else since) if refused else None
        task = self._entry.leader.task
        text = f"the leader of term {self._entry.term}, {task}, cannot be reached: {why}"
        if self._entry.gave_up:
            error = self._entry.counters.failed_terms[-1].summary()
            text = f"term {self._entry.term} has failed: {error}"
        due: list[Effect] = [self._deliver_news(text)]
        if not (refused or self._watch.queried) and self._claim_rank() < _NUM_SLURM_CLIENTS:
            self._watch.queried = True
            due.append(effects.QuerySlurm(task))
        return due

    def received(self, message: messages.RunMessage, now: float) -> list[Effect]:
        """The leader has sent a message."""
        if self._over or self._link is not _Link.UP:
            return []
        self._last_message = now
        self._record_answer(now)
        match message:
            case messages.RoundInfo(request) if self.joining and request == self._num_requests:
                self.joining, self._in_round = False, True
                self._place, self._final_report = message, None
                return [effects.Deliver(message)]
            case messages.Stop() if not self.joining:
                return [effects.Deliver(message), *self._on_round_stopped()]
            case messages.CheckpointRequested() | messages.StacksRequest() if self._in_round:
                return [effects.Deliver(message)]
            case messages.Waiting() | messages.QuorumMessage():
                return [effects.Deliver(message)]
            case messages.Probe():
                return [effects.ProbePeers(message)]
            case messages.NoticeRequest(left_s):
                confirmed = self._send_to_leader(messages.NoticeConfirmed())
                notice = messages.PreemptionNotice(Reason.ASKED, now + left_s)
                added = self.add_notice(notice, now)
                return [*confirmed, effects.Deliver(notice), *added] if added else confirmed
            case messages.End() | messages.Requeue():
                return self._end_session(message)
        return []

    def disconnected(self, why: str, now: float) -> list[Effect]:
        """The connection to the leader is closed."""
        is_up = self._link is _Link.UP and not self._over
        return self._on_leader_lost(why, now) if is_up else []

    def slurm_answered(self, task: str, runs: bool | None, now: float) -> list[Effect]:
        """Slurm reports whether the queried task runs; None if unknown."""
        if self._entry is not None and self._entry.leader.task == task and runs is False:
            self._watch.slurm_says_dead = True
        return self._read_log_if_due(now)

    def claimed(self, entry: LogEntry | None, now: float) -> list[Effect]:
        """This agent has created the claimed entry; None if it has not."""
        self._claiming = False
        if entry is None:
            self._schedule_read(now)
            return self._read_log_if_due(now)
        self._read_due = now
        lead: list[Effect] = [] if self._over else [effects.Lead(entry)]
        return [*lead, *self._read_log_if_due(now)]

    # ---- steps --------------------------------------------------------------------------

    def _record_answer(self, now: float) -> None:
        gap_s = now - max(self._answered, self._waits_since)
        self._answered = now
        if gap_s > _STALLED_S:  # the file system did not answer, or this agent was suspended
            self._waits_since += gap_s

    def _on_leader_lost(self, why: str, now: float) -> list[Effect]:
        """Stop the workers, unless they stay, and search for a leader."""
        self._link = _Link.DOWN
        self._watch.since = min(now, self._last_message + self.heartbeat.heartbeat_interval_s)
        self._watch.refused_since, self._watch.queried = None, False
        behind = max(0, self._claim_rank() - _NUM_WATCHERS)
        self._read_due = now + min(_READ_STAGGER_S * behind, _MAX_STAGGER_S)
        text = f"lost the leader: {why}"
        due: list[Effect] = [effects.Disconnect()]
        if not (self.joining or self._stays):
            due += [effects.Deliver(messages.Stop(text)), *self._on_round_stopped()]
        return [*due, self._deliver_news(text), *self._read_log_if_due(now)]

    def _on_round_stopped(self) -> list[Effect]:
        self._in_round = False
        return self.leave_now() if self._notice is not None else []

    def _request_place(self, waited_s: float) -> list[Effect]:
        self._num_requests += 1
        request = messages.Join(self._num_requests, self._store, waited_s, *self._offered)
        return self._send_to_leader(request)

    @property
    def _offered(self) -> tuple[tuple[messages.Address, ...], str]:
        return tuple(self.probe_ports), self.versions

    def _send_to_leader(self, *to_send: messages.RunMessage) -> list[Effect]:
        return [effects.SendToLeader(each) for each in to_send] if self._link is _Link.UP else []

    def _end_session(self, message: messages.RunMessage) -> list[Effect]:
        self._over = True
        return [effects.Deliver(message)]

    def _deliver_news(self, text: str) -> effects.Deliver:
        return effects.Deliver(messages.Waiting(text))

    def _is_newer(self, entry: LogEntry | None) -> bool:
        assert self._entry is not None
        return entry is not None and entry.term > self._entry.term

    def _read_log_if_due(self, now: float) -> list[Effect]:
        if self._reading or self._claiming or self._over or now < self._read_due:
            return []
        self._reading, self._read_began = True, now
        return [effects.ReadLog()]

    def _schedule_read(self, now: float) -> None:
        self._read_due = now + self._read_pause_s
        if self._watch.refused_since is not None:  # read as soon as the refusal is confirmed
            confirmed_at = self._watch.refused_since + CONFIRM_REFUSAL_S
            if confirmed_at > now:
                self._read_due = min(self._read_due, confirmed_at)
        is_watcher = self._claim_rank() < _NUM_WATCHERS
        longest_s = self.heartbeat.heartbeat_interval_s if is_watcher else _MAX_READ_PAUSE_S
        self._read_pause_s = min(longest_s, 1.3 * self._read_pause_s)

    def _may_claim(self, number: int, entry: LogEntry | None, now: float) -> bool:
        damaged = entry is None or entry.index != number
        if not self._watch.is_dead(self.heartbeat, now, damaged=damaged):
            self._dead_since = None
            return False
        if self._dead_since is None:
            self._dead_since = now
        wait_s = min(_CLAIM_STAGGER_S * self._claim_rank(entry), _MAX_STAGGER_S)
        if entry is not None:
            wait_s += election_pause_s(entry, self.me.host)
        if now - self._dead_since >= wait_s:
            return True
        self._read_due = self._dead_since + wait_s
        return False

    def _claim_rank(self, entry: LogEntry | None = None) -> int:
        """Return how many members claim before this agent; a newcomer is last."""
        entry = entry or self._entry
        members = entry.members if entry is not None else ()
        return next((rank for rank, m in enumerate(members) if m == self.me), len(members))


def election_pause_s(entry: LogEntry, host: str) -> float:
    """Return how long an agent on a host waits before it claims, after a term that has failed.

    The pause doubles with each failed term in a row. It is longer on the hosts of their leaders, so
    that another node leads first if there is one.
    """
    if not entry.gave_up:
        return 0.0
    failed = entry.counters.failed_terms
    pause_s = _FAILED_PAUSE_S * 2.0 ** (len(failed) - 1)
    return pause_s * (_OTHERS_FIRST if any(f.host == host for f in failed) else 1.0)


@dataclass
class LeaderFailureDetector:
    """Detects the death of one term's leader that this agent cannot reach (monotonic seconds).

    The leader is taken for dead when

    - its port has refused connections for ``CONFIRM_REFUSAL_S``: the process has ended; or
    - Slurm reports that its task does not run (the first few members query it); or
    - it was unreachable for ``heartbeat_timeout_s``, and its lease on the shared file system has
      expired (`HeartbeatConfig.lapse_s`, or ``heartbeat_timeout_s`` if this agent never followed
      it). A lease that is renewed shows that the leader lives and others follow it. This agent is
      then cut off, and keeps trying.

    An expired lease takes two reads with the same value and no other value between them. The second
    read must begin that long after the first one ended. An unreadable lease proves nothing.

    A damaged entry, which does not verify, counts as an unreachable leader without a lease. It is
    skipped only if two reads at least `HeartbeatConfig.stale_s` apart found it damaged. Until then
    this node may have read a part of a whole entry, and a claim would revoke its decision.
    """

    term: int = 0
    since: float = 0.0  # when the leader became unreachable
    refused_since: float | None = None
    lease: int | None = None
    lease_since: float | None = None
    """When the first read ended that returned the present value; None before the first read."""
    followed: bool = False  # whether this agent was connected to the leader
    queried: bool = False  # whether this agent has queried Slurm about the leader's task
    slurm_says_dead: bool = False
    seen_since: float | None = None  # when the first read ended that returned this term
    lease_until: float = 0.0  # when the last read began

    def record_lease(self, lease: int | None, began: float, now: float) -> None:
        """Record the lease that a read from ``began`` to ``now`` has returned."""
        if self.seen_since is None:
            self.seen_since = now
        if self.lease_since is None or lease != self.lease:
            self.lease, self.lease_since = lease, now
        self.lease_until = began

    def on_suspended(self, for_s: float) -> None:
        """Discard what was observed before this agent was suspended."""
        self.since += for_s
        self.lease_since = self.seen_since = None
        self.refused_since = None

    def is_dead(self, heartbeat: HeartbeatConfig, now: float, *, damaged: bool) -> bool:
        """Return whether the next term may be claimed; ``damaged``: its entry does not verify."""
        if not damaged and self.slurm_says_dead:
            return True
        if not damaged and self.refused_since is not None:
            return now - self.refused_since >= CONFIRM_REFUSAL_S
        if now - self.since <= heartbeat.heartbeat_timeout_s:
            return False
        if damaged:
            since = self.seen_since
            return since is not None and self.lease_until - since >= heartbeat.stale_s
        lapse_s = max(heartbeat.lapse_s, 0.0 if self.followed else heartbeat.heartbeat_timeout_s)
        seen_s = self.lease_until - self.lease_since if self.lease_since is not None else 0.0
        return seen_s >= lapse_s
