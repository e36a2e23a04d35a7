"""Rules of the quorum: its members, when it can be formed, and which of them heal (pure).

Membership
----------
A quorum is *active* until it ends: it is aborted because a member was lost or cannot go on, or all
its members request the next one at the step of a switch. Newcomers wait for that. Then the next
quorum is formed as soon as

- every live previous member requests it. The lighthouse waits for them for
  `QuorumRules.live_timeout_s` from the first request, longer where their steps take longer, and at
  most for `LIVE_TIMEOUT_SHARE` of the time-out of any that requests; then it drops them. It does
  not wait for a member that is lost, stopped, done or dropped, until that requests again, as a
  newcomer. It waits only briefly for a member that has not connected to a new lighthouse;
- or, without live previous members: all connected groups request it, or more than half of them do
  and `QuorumRules.join_timeout_s` has passed since the first request. A lighthouse that has just
  started first waits `QuorumRules.startup_wait_s` for members of a quorum unknown to it;
- there are the fewest members that the lighthouse and every requesting group work with;
- at least half of the possible members request it, so no minority goes on beside the others;
- the groups have as many workers as the first member's group.

A member whose healing has failed `MAX_HEAL_FAILURES` times in a row is kept out, for a time that
doubles with each further failure (`keep_out_s`): each attempt costs the others a step.

Newcomers that request by then become members too, unless a previous member asks for `shrink_only`.
(A newcomer's `shrink_only` does not count: it would exclude others for as long as it waits.)
Previous members keep their order; newcomers follow, by replica id.

Each event is cheap, and only the one that completes a quorum examines all members, so the cost of a
round grows linearly. Times are the lighthouse's monotonic seconds.

Healing
-------
Members with the newest step *and one state version* are the *cohort*: they have the same
parameters. Of several versions at that step the one of most members wins, then that of the lowest
rank. All others heal, also those at the same step with another version. States that were
initialised at random have different versions at step 0, so all but one member heal there.

Each worker that heals gets several sources, and they are spread: the i-th healing member starts, in
its r-th worker, with the (i + r)-th member of the cohort.

The healing members *catch up* beside the training (`messages`) if all members can, and the cohort
is large enough for the steps to be committed without them. At step 0 no state is worth a step.
"""

# ruff: noqa: D102, D103  (some names say it all)

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice

from hpc_elastic.ft import messages

MAX_SOURCES = 4
LIVE_TIMEOUT_SHARE = 0.8
"""The longest wait for a live member, as a share of the time-out of a group that requests."""
MAX_HEAL_FAILURES = 3
"""Quorums in a row in which a group may fail to heal before it is kept out for a time."""
LONGEST_KEEP_OUT_S = 300.0
_LISTED = 5
_VERSION_BYTES = 16


@dataclass(frozen=True)
class QuorumRules:
    """Sizes and time-outs of quorums, in seconds.

    Attributes:
        min_replicas: The fewest members, at least 1.
        join_timeout_s: Wait of the first quorum for groups that are connected.
        live_timeout_s: Wait for previous members that live but do not request the next quorum.
        reconnect_timeout_s: Wait of a new lighthouse for members that have not connected to it.
        short_reconnect_timeout_s: The same if at least half of the quorum requests the next one:
            most likely the missing members aborted it, or have left. A live one joins again at the
            next switch.
        startup_wait_s: A lighthouse without a quorum forms none for this time after its
            start, since members of one may be reconnecting.
    """

    min_replicas: int = 1
    join_timeout_s: float = 0.1
    live_timeout_s: float = 60.0
    reconnect_timeout_s: float = 5.0
    short_reconnect_timeout_s: float = 1.0
    startup_wait_s: float = 0.5


class ActiveQuorum:
    """The present quorum, or the last one; before the first, an ended one without members.

    Attributes:
        members: Replica ids by rank, without those that are lost, done or dropped (ordered set).
        not_requesting: Members that do not request the next quorum (ordered set).
        size: Number of members when it was formed.
        num_unconnected: Number of members of an adopted quorum that have not connected to this
            lighthouse; their names are unknown.
        first_shutdown: The member that was done first, and when, until the others are aborted.
        first_request_at: When the first of its members requested the next one; None before.
        step_s: Seconds of one of its steps, by then.
    """

    def __init__(self, quorum_id: int, members: Iterable[str], now: float) -> None:
        self.quorum_id = quorum_id
        self.members = dict.fromkeys(members)
        self.not_requesting = dict.fromkeys(self.members)
        self.num_unconnected = 0
        self.end_reason: str | None = None
        self.formed_at = now
        self.size = len(self.members)
        self.is_adopted = False
        self.group_world_size = 0
        self.needs_switch = False
        self.first_shutdown: tuple[str, float] | None = None
        self._ranks: dict[str, int] = {m: i for i, m in enumerate(self.members)}
        self.first_request_at: float | None = None
        self.step_s = 0.0

    @classmethod
    def adopt(cls, quorum_id: int, size: int, now: float) -> ActiveQuorum:
        """Return the quorum of an earlier lighthouse; only its id and size are known yet."""
        quorum = cls(quorum_id, (), now)
        quorum.num_unconnected = quorum.size = size
        quorum.is_adopted = True
        return quorum

    @property
    def is_active(self) -> bool:
        return self.end_reason is None

    def add_reconnected(self, replica: str, rank: int) -> None:
        if replica in self.members:
            return
        if replica not in self._ranks:
            self._ranks[replica] = rank
            self.num_unconnected = max(0, self.num_unconnected - 1)
        by_rank = sorted([*self.members, replica], key=lambda r: self._ranks[r])
        self.members = dict.fromkeys(by_rank)
        self.not_requesting[replica] = None

    def remove_member(self, replica: str) -> None:
        self.members.pop(replica, None)
        self.not_requesting.pop(replica, None)

    def mark_requesting(self, replica: str, quorum_step: int, now: float) -> None:
        """Record that a member requests the next quorum at a step of this one."""
        self.not_requesting.pop(replica, None)
        if self.first_request_at is None:
            self.first_request_at = now
            self.step_s = (now - self.formed_at) / max(1, quorum_step)


class ReplicaRegistry:
    """All replica groups known to one lighthouse.

    Attributes:
        idle: Connected groups that have neither requested a quorum nor been members (ordered set).
        leave_deadlines: When groups under notice are lost.
        lost: Groups known to be dead that never connected to this lighthouse.
        first_request_at: Since when there has always been a request.
        kept_out_until: When groups are let in again whose healing keeps failing.
        started_at: When the first event came; None before.
    """

    def __init__(self, rules: QuorumRules, lost: Iterable[str] = ()) -> None:
        self.rules = rules
        self.quorum = ActiveQuorum(messages.NO_QUORUM, (), -math.inf)
        self.quorum.end_reason = "there was none"
        self.requests: dict[str, messages.QuorumRequest] = {}
        self.idle: dict[str, None] = {}
        self.connected: set[str] = set()
        self.leave_deadlines: dict[str, float] = {}
        self.lost = set(lost)
        self.first_request_at = 0.0
        self.kept_out_until: dict[str, float] = {}
        self.started_at: float | None = None

    # ---- events --------------------------------------------------------------------------

    def add_connection(self, replica: str) -> None:
        """Add a group that has connected (again); its earlier request is void."""
        self.connected.add(replica)
        self.lost.discard(replica)
        self.remove_request(replica)
        self.leave_deadlines.pop(replica, None)
        if not self.is_member(replica):
            self.idle[replica] = None

    def remove_connection(self, replica: str) -> None:
        """Remove a group whose connection is lost, or that is known to be dead."""
        if replica not in self.connected:
            self.lost.add(replica)
        self.connected.discard(replica)
        self.leave_deadlines.pop(replica, None)
        self.drop_replica(replica)

    def drop_replica(self, replica: str) -> None:
        """Ignore a group until it requests a quorum again."""
        self.requests.pop(replica, None)
        self.kept_out_until.pop(replica, None)
        self.idle.pop(replica, None)
        self.quorum.remove_member(replica)

    def add_request(self, replica: str, request: messages.QuorumRequest, now: float) -> None:
        if not self.requests:
            self.first_request_at = now
        self.idle.pop(replica, None)
        self.requests[replica] = request
        if (seconds := keep_out_s(request)) > 0:
            self.kept_out_until[replica] = now + seconds
        if self.is_member(replica):
            self.quorum.mark_requesting(replica, request.quorum_step, now)

    def remove_request(self, replica: str) -> None:
        """Remove a group's request; the group may be waited for again."""
        if self.requests.pop(replica, None) is None:
            return
        if self.is_member(replica):
            self.quorum.not_requesting[replica] = None
        else:
            self.idle[replica] = None

    def set_quorum(self, quorum_id: int, members: Iterable[str], now: float) -> None:
        """Replace the quorum by a new one; the requests of its members are answered."""
        self.quorum = ActiveQuorum(quorum_id, members, now)
        first = next(iter(self.quorum.members))
        self.quorum.group_world_size = len(self.requests[first].metadata)
        for member in self.quorum.members:
            del self.requests[member]
            self.kept_out_until.pop(member, None)
        self.first_request_at = now

    # ---- queries -------------------------------------------------------------------------

    def is_member(self, replica: str) -> bool:
        return replica in self.quorum.members

    @property
    def num_unconnected(self) -> int:
        """Number of members of an adopted quorum that may still connect."""
        return max(0, self.quorum.num_unconnected - len(self.lost))

    def has_newcomers(self, now: float) -> bool:
        """Return whether a group requests that the present quorum could take in."""
        size = self.quorum.group_world_size
        return any(size in (0, len(r.metadata)) for r in self.admitted(now).values())

    def admitted(self, now: float) -> dict[str, messages.QuorumRequest]:
        """Return the requests of groups that are not kept out."""
        until = self.kept_out_until
        if not until:
            return self.requests
        return {r: q for r, q in self.requests.items() if until.get(r, now) <= now}

    def is_reconnect_timeout_over(self, now: float) -> bool:
        """Return whether members that have not connected to a new lighthouse had the time to."""
        quorum, rules = self.quorum, self.rules
        half_request = 2 * (len(quorum.members) - len(quorum.not_requesting)) >= quorum.size
        timeout_s = rules.short_reconnect_timeout_s if half_request else rules.reconnect_timeout_s
        return now - quorum.formed_at >= timeout_s

    def is_live_timeout_over(self, now: float, since: float | None) -> bool:
        """Return whether live groups had the time to request since another has, two steps at least.

        It lies below the time-out of each group that requests: a slow one costs no other its place.
        """
        own = max(self.rules.live_timeout_s, 2 * self.quorum.step_s)
        theirs = (LIVE_TIMEOUT_SHARE * q.timeout_s for q in self.requests.values() if q.timeout_s)
        return since is not None and now - since >= min([own, *theirs])

    def next_members(self, now: float) -> tuple[str, ...] | str:
        """Return the members, by rank, of a quorum that can be formed now, or what it waits for.

        The last quorum has ended. The text is for users, and short however many are missing.
        """
        quorum, rules, requests = self.quorum, self.rules, self.admitted(now)
        if not requests:
            return "no group requests a quorum"
        if quorum.members or self.num_unconnected:
            if self.num_unconnected and not self.is_reconnect_timeout_over(now):
                return f"{self.num_unconnected} members of quorum {quorum.quorum_id} to reconnect"
            first = quorum.first_request_at
            if quorum.not_requesting and not self.is_live_timeout_over(now, first):
                missing = list_some(quorum.not_requesting)
                return f"previous members that have not requested: {missing}"
        else:
            waited_s = now - self.first_request_at
            is_first = quorum.quorum_id == messages.NO_QUORUM
            if is_first and now - (self.started_at or 0.0) < rules.startup_wait_s:
                return "groups that may be about to reconnect"
            is_early = waited_s < rules.join_timeout_s or len(requests) <= len(self.idle)
            if self.idle and is_early and not self.is_live_timeout_over(now, self.first_request_at):
                return f"groups that have not requested: {list_some(self.idle)}"
        previous, live = quorum.members, quorum.not_requesting
        order = [r for r in previous if r in requests]
        if not any(requests[r].shrink_only for r in order):
            order += sorted(r for r in requests if r not in previous)
        size = self._group_world_size(order)
        order = [r for r in order if len(requests[r].metadata) == size]
        least = max([rules.min_replicas, *(requests[r].min_replicas for r in order)])
        if len(order) < least:
            return f"{least - len(order)} more groups ({len(order)} of at least {least} request)"
        if len(order) < len(live):
            return f"half of the members: {list_some(live)} live and do not request"
        return tuple(order)

    def misfit_reasons(self, now: float) -> dict[str, str]:
        """Return why groups cannot join: they are kept out, or of another size than the members."""
        size = self._group_world_size(sorted(self.requests))
        text = "the end of its pause, as its healing keeps failing"
        kept_out = {r: text for r, until in self.kept_out_until.items() if until > now}
        return kept_out | {
            r: f"groups of {size} workers, as the members have; this one has {len(q.metadata)}"
            for r, q in self.requests.items()
            if len(q.metadata) != size
        }

    def _group_world_size(self, order: list[str]) -> int:
        """Return how many workers a group must have: as many as the first member."""
        if self.quorum.members and self.quorum.group_world_size:
            return self.quorum.group_world_size
        return len(self.requests[order[0]].metadata) if order else 0


def keep_out_s(request: messages.QuorumRequest) -> float:
    """Return for how long a group is kept out whose healing keeps failing; 0 if it is not."""
    over = request.heal_failures - MAX_HEAL_FAILURES
    if over < 0:
        return 0.0
    longest = min(LONGEST_KEEP_OUT_S, LIVE_TIMEOUT_SHARE * (request.timeout_s or math.inf))
    return min(2.0 ** min(over, 10), longest)


def list_some(replicas: Collection[str]) -> str:
    """Return a few replica ids and the number of the others, at the same cost for any number."""
    more = f" and {len(replicas) - _LISTED} more" if len(replicas) > _LISTED else ""
    return ", ".join(islice(replicas, _LISTED)) + more


# ---- healing: the cohort, and the result of each member


@dataclass(frozen=True)
class Cohort:
    """The members with the newest state."""

    step: int
    state_version: str
    ranks: tuple[int, ...]
    healing: tuple[int, ...]


def find_cohort(requests: Sequence[messages.QuorumRequest]) -> Cohort:
    """Return the cohort of the members that made these requests, by rank; at least one."""
    step = max(r.step for r in requests)
    newest = Counter(r.state_version for r in requests if r.step == step)
    version = newest.most_common(1)[0][0]  # among equals the first counted: the lowest rank's
    has = [r.step == step and r.state_version == version for r in requests]
    ranks = tuple(i for i, h in enumerate(has) if h)
    return Cohort(step, version, ranks, tuple(i for i, h in enumerate(has) if not h))


def should_catch_up(requests: Sequence[messages.QuorumRequest], cohort: Cohort) -> bool:
    """Return whether the members that heal do so beside the training of the cohort."""
    is_enough = len(cohort.ranks) >= max(r.min_replicas for r in requests)
    is_worth_it = is_enough and cohort.step > 0 and bool(cohort.healing)
    return is_worth_it and all(r.catch_up for r in requests)


def assign_results(
    quorum_id: int, members: Sequence[str], requests: Mapping[str, messages.QuorumRequest]
) -> dict[str, messages.QuorumResults]:
    """Return the results of each member of a new quorum; members are replica ids by rank."""
    by_rank = [requests[m] for m in members]
    cohort = find_cohort(by_rank)
    catch_up = should_catch_up(by_rank, cohort)
    workers = [
        _results_of_rank(quorum_id, by_rank, cohort, group_rank, catch_up=catch_up)
        for group_rank in range(len(by_rank[0].metadata))
    ]
    return {
        m: messages.QuorumResults(tuple(w[i] for w in workers), requests[m].number)
        for i, m in enumerate(members)
    }


def _results_of_rank(
    quorum_id: int,
    requests: Sequence[messages.QuorumRequest],
    cohort: Cohort,
    group_rank: int,
    *,
    catch_up: bool,
) -> list[messages.QuorumResult]:
    """Return the results of the workers with one rank in their groups, one of each group."""
    size, num = len(cohort.ranks), len(requests)
    primary = cohort.ranks[group_rank % size]
    following = cohort.ranks[(group_rank + 1) % size] if size > 1 else (primary + 1) % num
    cohort_rank = {rank: i for i, rank in enumerate(cohort.ranks)}
    all_sources = [messages.HealSource(r, requests[r].metadata[group_rank]) for r in cohort.ranks]
    sources: dict[int, tuple[messages.HealSource, ...]] = {}
    source_of: dict[int, list[int]] = {}
    for start, rank in enumerate(cohort.healing, group_rank):
        chosen = [all_sources[(start + j) % size] for j in range(min(MAX_SOURCES, size))]
        sources[rank] = tuple(chosen)
        for source in chosen:
            source_of.setdefault(source.replica_rank, []).append(rank)
    return [
        messages.QuorumResult(
            quorum_id, rank, num, requests[primary].store, cohort.step, cohort.state_version,
            cohort_rank.get(rank), size, sources.get(rank, ()),
            tuple(r for r in source_of.get(rank, ()) if sources[r][0].replica_rank == rank),
            tuple(source_of.get(rank, ())), requests[following].store, catch_up,
        )
        for rank in range(num)
    ]  # fmt: skip


# ---- state versions


@dataclass(frozen=True)
class CommittedProgress:
    """The committed steps of one replica's parameters, and all members' contributions to them."""

    step: int
    batches_committed: int
    state_version: str

    @classmethod
    def initial(cls, *, init_sync: bool) -> CommittedProgress:
        """Return the progress of parameters as a script initialises them; see `Manager`."""
        return cls(0, 0, random_version()) if init_sync else cls.loaded(0, 0)

    @classmethod
    def loaded(cls, step: int, batches_committed: int) -> CommittedProgress:
        """Return the progress of a checkpoint that all groups load alike."""
        return cls(step, batches_committed, _hash(f"loaded|{step}|{batches_committed}"))

    def is_part_of(self, result: messages.QuorumResult) -> bool:
        """Return whether a member that need not heal has the state that its result names.

        It has not where some workers of its group have healed, and others not, and no group is left
        that could heal it. States that a script has initialised may differ in any way.
        """
        own = self.step, self.state_version
        is_initial = self.step == result.max_step == 0
        return result.heals or is_initial or own == (result.max_step, result.state_version)

    def after_step(self, quorum_id: int, num_participants: int) -> CommittedProgress:
        version = next_version(self.state_version, quorum_id, num_participants)
        batches = self.batches_committed + num_participants
        return replace(self, step=self.step + 1, batches_committed=batches, state_version=version)


def random_version() -> str:
    """Return the version of a state that no other group has: one initialised at random."""
    return secrets.token_hex(_VERSION_BYTES)


def next_version(version: str, quorum_id: int, num_participants: int) -> str:
    return _hash(f"{version}|{quorum_id}|{num_participants}")


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=_VERSION_BYTES).hexdigest()
