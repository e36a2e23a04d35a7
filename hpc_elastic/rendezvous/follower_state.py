"""What an agent does to have a leader: finds it, follows it, or takes its place (pure).

Theory of operation
-------------------
An agent looks at the run's last entry, which names the leader, and connects to it. It *follows* as
long as it hears the leader; workers run only while their agent does. When the connection breaks, or
nothing was heard for ``heartbeat_timeout_s``, its workers are to be stopped and it looks again. The
workers of a replica (`replica_state`) go on meanwhile: their agent tells the next leader that it is
*here*, by which entry, and what it has reported of them.

A leader that is dead (see `LeaderFailureDetector`) is replaced: the agent *claims* the next term.
Members of the last round claim one after the other, in rank order, so that ten thousand of them do
not fall upon the file system at once; whoever comes first has it, the others follow.

Notice. A node that has to be left by some time is *under notice*. Outside a round its agent leaves
the run at once. In a round it tells the leader, who lets all ranks save (`group_change`), and
goes on; it leaves when the round is stopped, for whatever reason, instead of asking for another
place, or when its own time is over (`leave_now`). It says so before its workers have ended: nobody
is to wait for those.

Events return the effects to carry out, in order. Times are monotonic seconds of this node. Where a
tick comes late it was this agent that slept, and the leader's silence does not count for that long.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

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
    SendToLeader,
)
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig
from hpc_elastic.rendezvous.log_entry import Agent, LogEntry, has_no_leader

_STAGGER_S, _LOOK_STAGGER_S, _LONGEST_STAGGER_S = 0.02, 0.0001, 1.0
_PUNCTUAL_S = 0.1
_LOOK_AGAIN_S, _LONGEST_LOOK_S = 0.1, 2.0
_FIRST_IN_LINE = 16
"""So many members watch the lease at every heartbeat; the others look less often."""
_SUPERSEDED = {"type": "end", "status": "superseded", "failure": "resumed with other tasks"}
_ADVISED_BY_SLURM = 3
"""So many members ask Slurm about a leader out of reach; the others wait for the lease."""


class _Link(Enum):
    DOWN = "down"
    CONNECTING = "connecting"
    UP = "up"


@dataclass(frozen=True)
class LeaveDeadline:
    """By when this node has to be left, and why; ``by`` is in its monotonic seconds."""

    reason: str
    by: float


class FollowerState:
    """One agent's search for a leader, and its life under it.

    Args:
        me: The agent.
        liveness: The run's.
        now: The time.
        stays: Whether its workers go on without a leader.
        generation: The run's, when this agent's task was submitted.
    """

    def __init__(
        self,
        me: Agent,
        liveness: HeartbeatConfig,
        now: float,
        *,
        stays: bool = False,
        generation: int = 0,
    ) -> None:
        self.me = me
        self._generation = generation
        self._stays = stays
        self.joining = False
        self.liveness = liveness
        self._link = _Link.DOWN
        self._entry: LogEntry | None = None
        """The entry whose leader is followed, or was tried last."""
        self._heard = now
        self._watch = LeaderFailureDetector(since=now)
        self._asks = 0
        """How often this agent has asked for a place; a round must answer the last time."""
        self._placed = 0
        """The entry number of the last round that this agent got a place in."""
        self._round: Message = {}
        """What it was told of that round."""
        self._told: Message | None = None
        """What became of its workers in that round, as it was reported; None: they are at work."""
        self._in_round = False
        """Whether it has a place in a round that was not stopped."""
        self._notice: LeaveDeadline | None = None
        self._looking = self._claiming = False
        self._asked = now
        """When the last look began."""
        self._look_due = now
        self._look_pause_s = _LOOK_AGAIN_S
        self._dead_since: float | None = None
        self._ticked = now
        self._beaten = now
        self._over = False

    # ---- the agent's wishes -------------------------------------------------------------

    def join(self) -> list[Effect]:
        """Ask for a place in the next round; the agent's workers have been stopped."""
        self.joining = True
        return self._ask()

    def report(self, type_: str, **fields: Any) -> list[Effect]:
        """Tell the leader of the present round; without one it is lost, and the round with it.

        What became of a replica's workers is told to the next leader then. Before the workers'
        end, a heartbeat tells how far they came.
        """
        message = {"type": type_, "index": self._placed, **fields}
        if self._stays and type_ in ("finished", "failed"):
            self._told = message
        last = self._say({"type": "heartbeat"}) if type_ == "finished" else []
        return [*last, *self._say(message)]

    def notice(self, reason: str, left_s: float, now: float) -> list[Effect]:
        """Put this node under notice; the first reason stays, and the nearest deadline."""
        by = now + left_s
        if self._over or (self._notice is not None and self._notice.by <= by):
            return []
        if self._notice is not None:
            reason = self._notice.reason
        self._notice = LeaveDeadline(reason, by)
        noticed = Deliver({"type": "noticed", "reason": reason, "left_s": left_s})
        if not self._in_round:
            return [noticed, *self.leave_now()]
        return [noticed, *self._say({"type": "notice", "reason": reason, "left_s": left_s})]

    def leave_now(self) -> list[Effect]:
        """Leave the run because of the notice: its time is over, or nothing can be lost."""
        if self._over:
            return []
        reason = self._notice.reason if self._notice is not None else "asked"
        left = self._say({"type": "leave", "why": f"its node is to be left: {reason}"})
        return [*left, *self._end({"type": "departed", "reason": reason})]

    # ---- events -------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Time has passed; to be called every `HeartbeatConfig.heartbeat_interval_s` at least."""
        if self._over:
            return []
        self._forgive_if_slept(now)
        if self._link is _Link.UP:
            return self._keep_contact(now)
        return self._look_if_due(now)

    def looked(
        self, number: int, entry: LogEntry | None, lease: int | None, now: float
    ) -> list[Effect]:
        """The last entry has this number, and this is the newest one that verifies."""
        self._looking = False
        if self._over or self._claiming:
            return []
        if entry is not None and entry.generation > self._generation:
            return [Disconnect(), *self._end(_SUPERSEDED)]
        if entry is not None and entry.ending is not None:
            return [PublishResult(entry), *self._end(entry.ending.message)]
        self._note_term(number, entry, now)
        self._watch.saw_lease(lease, self._asked, now)
        if self._link is _Link.UP:
            deposed = self._entry is not None and number > 0 and self._is_newer(entry)
            return self._lost("another agent leads", now) if deposed else []
        self._plan_look(now)
        if has_no_leader(number, entry) or self._may_claim(number, entry, now):
            self._claiming = True
            hang_up: list[Effect] = [Disconnect()] if self._link is _Link.CONNECTING else []
            self._link = _Link.DOWN
            return [*hang_up, Claim(number + 1, entry, self._watch.refused_since is None)]
        if entry is None or entry.index != number:
            return [self._news(f"entry {number} is damaged: waiting for a leader that follows it")]
        hang_up = list[Effect]()
        if self._link is _Link.CONNECTING and self._is_newer(entry):
            self._link, hang_up = _Link.DOWN, [Disconnect()]
        if self._link is _Link.CONNECTING:
            return []
        self._link, self._entry = _Link.CONNECTING, entry
        return [*hang_up, Connect(entry)]

    def blind(self, why: str, now: float) -> list[Effect]:
        """The shared file system did not answer."""
        self._looking = False
        self._plan_look(now)
        return [] if self._link is _Link.UP else [self._news(f"no entry can be read: {why}")]

    def connected(self, now: float) -> list[Effect]:
        """The leader has proved who it is."""
        self._link = _Link.UP
        self._heard = self._beaten = now
        self._look_pause_s = _LOOK_AGAIN_S
        self._dead_since = None
        self._watch.followed = True
        self._watch.refused_since, self._watch.slurm_says_dead = None, False
        return self._ask() if self.joining else self._say_here(now)

    def not_connected(self, why: str, now: float, *, refused: bool) -> list[Effect]:
        """The leader could not be reached; ``refused``: its node says that nobody listens."""
        if self._link is not _Link.CONNECTING:
            return []
        self._link = _Link.DOWN
        assert self._entry is not None
        if not refused:
            self._watch.refused_since = None
        elif self._watch.refused_since is None:
            self._watch.refused_since = now
        leader, term = self._entry.leader, self._entry.term
        news = self._news(f"the leader of term {term}, {leader.task}, cannot be reached: {why}")
        return [news, *self._inquire(refused)]

    def received(self, message: Message, now: float) -> list[Effect]:
        """The leader says something."""
        if self._over or self._link is not _Link.UP:
            return []
        self._heard = now
        match message["type"]:
            case "round" if self.joining and message["request"] == self._asks:
                self.joining, self._placed, self._in_round = False, message["index"], True
                self._round, self._told = message, None
                return [Deliver(message)]
            case "stop" if not self.joining:
                return [Deliver(message), *self._stopped()]
            case "checkpoint_request" | "stacks" if self._in_round:
                return [Deliver(message)]
            case "waiting" | "ft":
                return [Deliver(message)]
            case "notice":
                confirmed = self._say({"type": "noticed"})
                return [*confirmed, *self.notice("asked", float(message["left_s"]), now)]
            case "end" | "requeue":
                return self._end(message)
        return []

    def disconnected(self, why: str, now: float) -> list[Effect]:
        """The connection to the leader is gone."""
        return self._lost(why, now) if self._link is _Link.UP and not self._over else []

    def slurm_answered(self, task: str, runs: bool | None, now: float) -> list[Effect]:
        """Slurm's word on the task that was asked about; None: it gave none."""
        if self._entry is not None and self._entry.leader.task == task and runs is False:
            self._watch.slurm_says_dead = True
        return self._look_if_due(now)

    def claimed(self, entry: LogEntry | None, now: float) -> list[Effect]:
        """The entry asked for was created, or (None) it was not: somebody else was faster."""
        self._claiming = False
        if entry is not None:
            self._look_due = now
        else:
            self._plan_look(now)
        lead: list[Effect] = [Lead(entry)] if entry is not None and not self._over else []
        return [*lead, *self._look_if_due(now)]

    # ---- contact ------------------------------------------------------------------------

    def _keep_contact(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if now - self._beaten >= self.liveness.heartbeat_interval_s:
            self._beaten = now
            effects.append(SendToLeader({"type": "heartbeat"}))
        silence_s = now - self._heard
        if silence_s > self.liveness.heartbeat_timeout_s:
            return effects + self._lost(f"silent for {silence_s:.1f} s", now)
        if silence_s > 1.5 * self.liveness.heartbeat_interval_s:
            effects += self._look_if_due(now)  # watch the lease, to know by when to claim
        return effects

    def _lost(self, why: str, now: float) -> list[Effect]:
        """Let the workers be stopped, and look for the leader anew."""
        self._link = _Link.DOWN
        self._watch.since = min(now, self._heard + self.liveness.heartbeat_interval_s)
        self._watch.refused_since, self._watch.inquired = None, False
        behind = max(0, self._place() - _FIRST_IN_LINE)
        self._look_due = now + min(_LOOK_STAGGER_S * behind, _LONGEST_STAGGER_S)
        stop: list[Effect] = []
        if not (self.joining or self._stays):
            stop = [
                Deliver({"type": "stop", "reason": f"lost the leader: {why}"}),
                *self._stopped(),
            ]
        return [Disconnect(), *stop, self._news(f"lost the leader: {why}"), *self._look_if_due(now)]

    def _stopped(self) -> list[Effect]:
        """The round is over: a node that is to be left takes no place in another."""
        self._in_round = False
        return self.leave_now() if self._notice is not None else []

    def _forgive_if_slept(self, now: float) -> None:
        late_s, self._ticked = now - self._ticked - self.liveness.heartbeat_interval_s, now
        if late_s > _PUNCTUAL_S:
            self._heard = min(now, self._heard + late_s)
            self._watch.slept(late_s)

    def _say_here(self, now: float) -> list[Effect]:
        """Tell a leader who has not placed this replica what he has to know of it."""
        if not (self._stays and self._in_round):
            return []
        here = {"type": "reattach", "index": self._placed, "number": self._round["number"]}
        again = [self._told] if self._told is not None else []
        if self._notice is not None:
            left_s = max(0.0, self._notice.by - now)
            again.append({"type": "notice", "reason": self._notice.reason, "left_s": left_s})
        return [effect for message in (here, *again) for effect in self._say(message)]

    def _ask(self) -> list[Effect]:
        self._asks += 1
        return self._say({"type": "join", "request": self._asks})

    def _say(self, message: Message) -> list[Effect]:
        return [SendToLeader(message)] if self._link is _Link.UP else []

    def _end(self, message: Message) -> list[Effect]:
        self._over = True
        return [Deliver(message)]

    def _news(self, text: str) -> Deliver:
        return Deliver({"type": "news", "text": text})

    # ---- election -----------------------------------------------------------------------

    def _note_term(self, number: int, entry: LogEntry | None, now: float) -> None:
        """Begin to watch anew when the leader in question has changed."""
        term = self._term_of(number, entry)
        if self._watch.term == term:
            return
        self._watch = LeaderFailureDetector(term, since=now)
        self._dead_since = None
        self._look_pause_s = _LOOK_AGAIN_S

    def _term_of(self, number: int, entry: LogEntry | None) -> int:
        """Return an entry's term; one that does not verify stands for a term of its own."""
        if entry is not None and entry.index == number:
            return entry.term
        return -number

    def _is_newer(self, entry: LogEntry | None) -> bool:
        assert self._entry is not None
        return entry is not None and entry.term > self._entry.term

    def _look_if_due(self, now: float) -> list[Effect]:
        if self._looking or self._claiming or self._over or now < self._look_due:
            return []
        self._looking, self._asked = True, now
        return [ReadLog()]

    def _plan_look(self, now: float) -> None:
        self._look_due = now + self._look_pause_s
        if self._watch.refused_since is not None:  # look as soon as that means something
            sure_at = self._watch.refused_since + CONFIRM_REFUSAL_S
            if sure_at > now:
                self._look_due = min(self._look_due, sure_at)
        first = self._place() < _FIRST_IN_LINE
        longest_s = self.liveness.heartbeat_interval_s if first else _LONGEST_LOOK_S
        self._look_pause_s = min(longest_s, 1.3 * self._look_pause_s)

    def _inquire(self, refused: bool) -> list[Effect]:
        if refused or self._watch.inquired or self._place() >= _ADVISED_BY_SLURM:
            return []
        assert self._entry is not None
        self._watch.inquired = True
        return [QuerySlurm(self._entry.leader.task)]

    def _may_claim(self, number: int, entry: LogEntry | None, now: float) -> bool:
        damaged = entry is None or entry.index != number
        if not self._watch.is_dead(self.liveness, now, damaged=damaged):
            self._dead_since = None
            return False
        if self._dead_since is None:
            self._dead_since = now
        wait_s = min(_STAGGER_S * self._place(entry), _LONGEST_STAGGER_S)
        if now - self._dead_since >= wait_s:
            return True
        self._look_due = self._dead_since + wait_s
        return False

    def _place(self, entry: LogEntry | None = None) -> int:
        """Return this agent's place in the line of those who may claim."""
        entry = entry or self._entry
        members = entry.members if entry is not None else ()
        for rank, member in enumerate(members):
            if member == self.me:
                return rank
        return len(members)


# ---- When a leader out of reach is taken for dead, so that another may be elected (pure)
# An agent that cannot reach the leader takes it for dead when
#
# - its port refused connections for ``CONFIRM_REFUSAL_S``: no such process is there any more; or
# - Slurm says that its task does not run (the first few members ask); or
# - it was out of reach for ``heartbeat_timeout_s``, and its lease on the shared file system has
#   lapsed (`HeartbeatConfig.lapse_s`, or ``heartbeat_timeout_s`` if this agent never followed it).
#   A lease that is renewed says that the leader lives and others follow it: then it is this agent
#   that is cut off, and it keeps trying.
#
# That takes two reads of the lease, the second begun so long after the first had ended, and none
# in between that differs. A lease that cannot be read proves nothing, however long.
#
# An entry that does not verify counts as a leader out of reach without a lease. It is passed over
# only if looks further apart than files may be old have found it so: until then another node may
# read a part of what is whole, and would take back what the entry decides.


CONFIRM_REFUSAL_S = 0.2


@dataclass
class LeaderFailureDetector:
    """What is known of one term's leader while it is out of reach; monotonic seconds."""

    term: int = 0
    since: float = 0.0
    """Since when it is out of reach."""
    refused_since: float | None = None
    lease: int | None = None
    lease_since: float | None = None
    """When the lease's present value was first seen; None before the first look."""
    followed: bool = False
    """Whether this agent was connected to it."""
    inquired: bool = False
    slurm_says_dead: bool = False
    seen_since: float | None = None
    """When the first look ended that found this term."""
    lease_until: float = 0.0
    """When the last look began that found this value."""

    def saw_lease(self, lease: int | None, asked: float, now: float) -> None:
        """A look that began at ``asked`` has found this value."""
        if self.seen_since is None:
            self.seen_since = now
        if self.lease_since is None or lease != self.lease:
            self.lease, self.lease_since = lease, now
        self.lease_until = asked

    def slept(self, for_s: float) -> None:
        """This agent was not running for so long: what it has seen before proves nothing."""
        self.since += for_s
        self.lease_since = self.seen_since = None
        self.refused_since = None

    def is_dead(self, liveness: HeartbeatConfig, now: float, *, damaged: bool) -> bool:
        """Return whether the next term may be claimed; ``damaged``: its entry does not verify."""
        if not damaged and self.slurm_says_dead:
            return True
        if not damaged and self.refused_since is not None:
            return now - self.refused_since >= CONFIRM_REFUSAL_S
        if now - self.since <= liveness.heartbeat_timeout_s:
            return False
        if damaged:
            since = self.seen_since
            return since is not None and self.lease_until - since >= liveness.stale_s
        lapse_s = max(liveness.lapse_s, 0.0 if self.followed else liveness.heartbeat_timeout_s)
        seen_s = self.lease_until - self.lease_since if self.lease_since is not None else 0.0
        return seen_s >= lapse_s
