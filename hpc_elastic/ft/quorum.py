"""Who is in the quorum, who asks for the next one, and when that can be formed (pure).

The rules
---------
A quorum *stands* until it is *over*: broken, because a member was lost or could not go on, or
because all of its members ask for the next one at the call of a switch. Newcomers wait for that.
Once it is over the next one is formed as soon as

- every live previous member asks. They are waited for, for `QuorumRules.wait_for_live_s` from the
first
  of them that asks (longer, where their calls take so long), and are then dropped. A member that is
  lost, stopped, done or dropped is not waited for, until it asks anew, as a newcomer. A member
  whose connection to a new keeper is still missing is waited for as well, but not for long;
- where there is no live previous member: all that are connected ask, or more than half of them do
  and `QuorumRules.join_timeout_s` has passed since the first asked; and a keeper that has just
  begun has waited for `QuorumRules.greet_s`, for members of a quorum that it has not heard of yet;
- it has the fewest members that the keeper and every asker work with;
- more than half of those that could be members ask. So no minority goes on beside the others;
- the groups have as many workers as the first member's group.

Newcomers that ask by then are members as well, unless a previous member says `shrink_only` (if a
newcomer could, it would keep others out for as long as it waits). Previous members keep their
order, newcomers come behind them, by replica id.

Each event is cheap, and only what completes a quorum looks at all members: their number does not
make a round's cost grow faster than itself. Times are the keeper's monotonic seconds.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

from hpc_elastic.ft.messages import HealSource, QuorumRequest, QuorumResult, QuorumResults

_NAMED = 5


@dataclass(frozen=True)
class QuorumRules:
    """How long is waited, and for how many.

    Attributes:
        min_replicas: The fewest members, at least 1.
        join_timeout_s: What the first quorum waits for those that are connected.
        wait_for_live_s: What is waited for previous members that live but do not ask.
        come_back_s: What a new keeper waits for members that have not connected to it.
        regroup_s: The same where at least half of the quorum asks for the next one: most likely the
            others broke it, or have left; one that lives joins again at the next switch.
        greet_s: A keeper that has heard of no quorum forms none for so long after its start: the
            members of one may be about to come back, and would find it replaced by a newcomer's.
    """

    min_replicas: int = 1
    join_timeout_s: float = 0.1
    wait_for_live_s: float = 60.0
    come_back_s: float = 5.0
    regroup_s: float = 1.0
    greet_s: float = 0.5


class ActiveQuorum:
    """A quorum that stands, or the last one that did.

    Attributes:
        quorum_id: Its id.
        stay: Members by rank that are not lost, gone or dropped.
        silent: Those of them that do not ask.
        size: Members when it was formed.
        num_missing: Members, known by number alone, that have not come to this keeper.
        over: Why it stands no longer.
        since: When it was formed, or heard of.
        is_adopted: It was formed by a keeper before this one.
        num_workers: In each group; 0: not known.
        first_bye: The first member that was done, and when; None: none is.
    """

    def __init__(self, quorum_id: int, members: Iterable[str], now: float) -> None:
        self.quorum_id = quorum_id
        self.stay = dict.fromkeys(members)
        self.silent = dict.fromkeys(self.stay)  # not a set: its order is not by chance
        self.num_missing = 0
        self.over: str | None = None
        self.since = now
        self.size = len(self.stay)
        self.is_adopted = False
        self.num_workers = 0
        self.first_bye: tuple[str, float] | None = None
        self._ranks: dict[str, int] = {m: i for i, m in enumerate(self.stay)}
        self._first_ask_at: float | None = None
        self._pace_s = 0.0

    @classmethod
    def adopt(cls, quorum_id: int, size: int, now: float) -> ActiveQuorum:
        """Return a quorum of which only the id and the size are known yet."""
        standing = cls(quorum_id, (), now)
        standing.num_missing = standing.size = size
        standing.is_adopted = True
        return standing

    @property
    def stands(self) -> bool:
        """Whether it is not over."""
        return self.over is None

    def came_back(self, replica: str, rank: int) -> None:
        """A member has connected (again)."""
        if replica in self.stay:
            return
        if replica not in self._ranks:
            self._ranks[replica] = rank
            self.num_missing = max(0, self.num_missing - 1)
        by_rank = sorted([*self.stay, replica], key=lambda r: self._ranks[r])
        self.stay = dict.fromkeys(by_rank)
        self.silent[replica] = None

    def remove(self, replica: str) -> None:
        """A member is not waited for any more."""
        self.stay.pop(replica, None)
        self.silent.pop(replica, None)

    def asked(self, replica: str, call: int, now: float) -> None:
        """A member asks for the next quorum at its call of this one."""
        self.silent.pop(replica, None)
        if self._first_ask_at is None:
            self._first_ask_at = now
            self._pace_s = (now - self.since) / max(1, call)

    def is_long_waited_for(self, now: float, wait_s: float) -> bool:
        """Whether members that do not ask have had the time for it: two of their calls at least."""
        first = self._first_ask_at
        return first is not None and now - first >= max(wait_s, 2 * self._pace_s)


class ReplicaRegistry:
    """All replica groups that one keeper knows.

    Attributes:
        standing: The quorum, or the last one; None: there was none.
        asks: What those want that ask for the next one.
        fresh: Connected, and have neither asked nor been members yet.
        connected: Those whose connection stands.
        notices: Who is under notice -> when it is to be gone.
        lost: Groups that are known to be dead and never came to this keeper.
        first_ask_at: Since when somebody has been asking without a break.
        started_at: When the first event came; None: none has.
    """

    def __init__(self, rules: QuorumRules, lost: Iterable[str] = ()) -> None:
        self.rules = rules
        self.standing: ActiveQuorum | None = None
        self.asks: dict[str, QuorumRequest] = {}
        self.fresh: dict[str, None] = {}
        self.connected: set[str] = set()
        self.notices: dict[str, float] = {}
        self.lost = set(lost)
        self.first_ask_at = 0.0
        self.started_at: float | None = None

    # ---- events --------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """The keeper is at work; only the first call counts."""
        if self.started_at is None:
            self.started_at = now

    def arrive(self, replica: str) -> None:
        """A group has connected, for the first time or again; what it asked for is forgotten."""
        self.connected.add(replica)
        self.lost.discard(replica)
        self.forget_ask(replica)
        self.notices.pop(replica, None)
        if not self.is_member(replica):
            self.fresh[replica] = None

    def came_back(self, replica: str, rank: int) -> None:
        """A connected group says that it is in the standing quorum."""
        assert self.standing is not None
        self.standing.came_back(replica, rank)
        self.fresh.pop(replica, None)

    def leave(self, replica: str) -> None:
        """Its connection is gone."""
        if replica not in self.connected:
            self.lost.add(replica)
        self.connected.discard(replica)
        self.notices.pop(replica, None)
        self.retire(replica)

    def retire(self, replica: str) -> None:
        """It does not count for anything until it asks anew."""
        self.asks.pop(replica, None)
        self.fresh.pop(replica, None)
        if self.standing is not None:
            self.standing.remove(replica)

    def ask(self, replica: str, ask: QuorumRequest, now: float) -> None:
        """A group wants to be in the next quorum."""
        if not self.asks:
            self.first_ask_at = now
        self.fresh.pop(replica, None)
        self.asks[replica] = ask
        if self.standing is not None and self.is_member(replica):
            self.standing.asked(replica, ask.call, now)

    def forget_ask(self, replica: str) -> None:
        """It does not ask any more; it may be waited for again."""
        if self.asks.pop(replica, None) is None:
            return
        if self.standing is not None and self.is_member(replica):
            self.standing.silent[replica] = None
        else:
            self.fresh[replica] = None

    def formed(self, quorum_id: int, members: Iterable[str], now: float) -> None:
        """A quorum has been formed; those that it left behind go on asking."""
        self.standing = ActiveQuorum(quorum_id, members, now)
        self.standing.num_workers = len(self.asks[next(iter(self.standing.stay))].metadata)
        for member in self.standing.stay:
            del self.asks[member]
        self.first_ask_at = now

    # ---- questions -----------------------------------------------------------------------

    def is_member(self, replica: str) -> bool:
        """Whether it is a member of the last quorum, and has not left it."""
        return self.standing is not None and replica in self.standing.stay

    @property
    def num_missing(self) -> int:
        """Members of an adopted quorum that may still connect."""
        if self.standing is None:
            return 0
        return max(0, self.standing.num_missing - len(self.lost))

    @property
    def has_previous(self) -> bool:
        """Whether there are live previous members."""
        return self.standing is not None and bool(self.standing.stay)

    def is_back_time_over(self, now: float) -> bool:
        """Whether members that did not come to a new keeper have had the time for it."""
        standing = self.standing
        if standing is None:
            return True
        num_asking = len(standing.stay) - len(standing.silent)
        half_ask = 2 * num_asking >= standing.size
        wait_s = self.rules.regroup_s if half_ask else self.rules.come_back_s
        return now - standing.since >= wait_s

    def next_quorum(self, now: float) -> tuple[str, ...] | str:
        """Return the members by rank of a quorum that can be formed now, or who is missing.

        The last one is over. The text is for people, and short however many are missing.
        """
        if not self.asks:
            return "nobody asks"
        if self.has_previous or self.num_missing:
            waits_for = self._previous_members_awaited(now)
        else:
            waits_for = self._connected_awaited(now)
        return waits_for or self._form()

    # ---- rules ---------------------------------------------------------------------------

    def _previous_members_awaited(self, now: float) -> str:
        standing = self.standing
        assert standing is not None
        if self.num_missing and not self.is_back_time_over(now):
            return f"{self.num_missing} members of quorum {standing.quorum_id} to reconnect"
        patience_s = self.rules.wait_for_live_s
        if standing.silent and not standing.is_long_waited_for(now, patience_s):
            return f"previous members that have not asked: {name_some(standing.silent)}"
        return ""

    def _connected_awaited(self, now: float) -> str:
        waited_s = now - self.first_ask_at
        if self.standing is None and now - (self.started_at or 0.0) < self.rules.greet_s:
            return "groups that may be about to reconnect"
        if not self.fresh or waited_s >= self.rules.wait_for_live_s:
            return ""
        if waited_s < self.rules.join_timeout_s or len(self.asks) <= len(self.fresh):
            return f"groups that have not asked: {name_some(self.fresh)}"
        return ""

    def _form(self) -> tuple[str, ...] | str:
        order = self._eligible()
        silent = self.standing.silent if self.standing is not None else {}
        least = max([self.rules.min_replicas, *(self.asks[r].min_replicas for r in order)])
        if len(order) < least:
            return f"{least - len(order)} more groups ({len(order)} of at least {least} ask)"
        if len(order) <= len(silent):
            return f"a majority: {name_some(silent)} live and do not ask"
        return tuple(order)

    def _eligible(self) -> list[str]:
        """Return who can be a member, by rank."""
        stay = self.standing.stay if self.standing is not None else {}
        order = [r for r in stay if r in self.asks]
        if not any(self.asks[r].shrink_only for r in order):
            order += sorted(r for r in self.asks if r not in stay)
        num = self._num_workers(order)
        return [r for r in order if len(self.asks[r].metadata) == num]

    def _num_workers(self, order: list[str]) -> int:
        """Return how many workers a group must have, like those of the first member."""
        if self.has_previous and self.standing is not None and self.standing.num_workers:
            return self.standing.num_workers
        return len(self.asks[order[0]].metadata) if order else 0

    def misfits(self) -> dict[str, str]:
        """Return those that ask and whose groups have another size than the members', and why."""
        num = self._num_workers(sorted(self.asks))
        return {
            r: f"groups of {num} workers, as the members have; this one has {len(a.metadata)}"
            for r, a in self.asks.items()
            if len(a.metadata) != num
        }

    @property
    def has_newcomers(self) -> bool:
        """Whether a group asks that the standing quorum could take in."""
        assert self.standing is not None
        num = self.standing.num_workers
        return any(not num or len(a.metadata) == num for a in self.asks.values())


def name_some(replicas: Collection[str]) -> str:
    """Return a few of these by name, and the number of the others; at the same cost for many."""
    more = f" and {len(replicas) - _NAMED} more" if len(replicas) > _NAMED else ""
    return ", ".join(islice(replicas, _NAMED)) + more


# ---- Who heals from whom in a new quorum, and where its process groups meet (pure)
# Those with the newest step *and one and the same token* are the *cohort*: their parameters are
# the same. Of several tokens at that step the one that most members have wins, then the one of
# the member with the lowest rank: members of the last quorum come first there. All others heal,
# also those at the same step with another history, and, where states were initialised at random,
# all but one at step 0; so the cohort alone has gradients that count.
#
# Each worker that heals is given several sources, and they are spread: the i-th that heals, in
# its group the r-th worker, begins with the (i + r)-th of the cohort and goes on with those
# behind it.
#
# The work grows with the number of members, not with its square: what they share is made once.


MAX_SOURCES = 4


@dataclass(frozen=True)
class Cohort:
    """Who has the newest state, and who has not.

    Attributes:
        step: The newest step.
        lineage: The token of the state at that step.
        ranks: Places in the quorum of those that have it, rising; at least one.
        healing: Places of all others.
    """

    step: int
    lineage: str
    ranks: tuple[int, ...]
    healing: tuple[int, ...]


def find_cohort(asks: Sequence[QuorumRequest]) -> Cohort:
    """Return who of the members, by rank and at least one, has the newest state."""
    step = max(a.step for a in asks)
    newest = Counter(a.lineage for a in asks if a.step == step)
    lineage = newest.most_common(1)[0][0]  # of equals the first one counted: the lowest rank's
    has = [a.step == step and a.lineage == lineage for a in asks]
    ranks = tuple(i for i, h in enumerate(has) if h)
    return Cohort(step, lineage, ranks, tuple(i for i, h in enumerate(has) if not h))


def place(
    quorum_id: int, members: Sequence[str], asks: Mapping[str, QuorumRequest]
) -> dict[str, QuorumResults]:
    """Return what each member of a new quorum is told.

    Args:
        quorum_id: The new quorum's.
        members: Their replica ids by rank; at least one.
        asks: What each of them asked for; the groups have the same number of workers.
    """
    by_rank = [asks[m] for m in members]
    cohort = find_cohort(by_rank)
    group_size = len(by_rank[0].metadata)
    workers = [_place_workers(quorum_id, by_rank, cohort, r) for r in range(group_size)]
    return {
        m: QuorumResults(tuple(w[i] for w in workers), asks[m].number)
        for i, m in enumerate(members)
    }


def _place_workers(
    quorum_id: int, asks: Sequence[QuorumRequest], cohort: Cohort, group_rank: int
) -> list[QuorumResult]:
    """Return the places of the workers with this rank in their groups, one of each group."""
    size, num = len(cohort.ranks), len(asks)
    primary = cohort.ranks[group_rank % size]
    following = cohort.ranks[(group_rank + 1) % size] if size > 1 else (primary + 1) % num
    store, next_store = asks[primary].store, asks[following].store
    sources, first_of, serves = _assign(asks, cohort, group_rank)
    cohort_rank = {rank: i for i, rank in enumerate(cohort.ranks)}
    return [
        QuorumResult(
            quorum_id, rank, num, store, cohort.step, cohort.lineage, cohort_rank.get(rank), size,
            sources.get(rank, ()), tuple(first_of.get(rank, ())), tuple(serves.get(rank, ())),
            next_store,
        )
        for rank in range(num)
    ]  # fmt: skip


def _assign(
    asks: Sequence[QuorumRequest], cohort: Cohort, group_rank: int
) -> tuple[dict[int, tuple[HealSource, ...]], dict[int, list[int]], dict[int, list[int]]]:
    """Return sources by who heals, and by source whose first one it is, and whom it serves."""
    size = len(cohort.ranks)
    all_sources = [HealSource(r, asks[r].metadata[group_rank]) for r in cohort.ranks]
    sources: dict[int, tuple[HealSource, ...]] = {}
    first_of: dict[int, list[int]] = {}
    serves: dict[int, list[int]] = {}
    for i, rank in enumerate(cohort.healing):
        start = i + group_rank
        chosen = [all_sources[(start + j) % size] for j in range(min(MAX_SOURCES, size))]
        sources[rank] = tuple(chosen)
        first_of.setdefault(chosen[0].replica_rank, []).append(rank)
        for source in chosen:
            serves.setdefault(source.replica_rank, []).append(rank)
    return sources, first_of, serves


# ---- Tokens that tell histories of parameters apart (pure); `messages` says what they are for


_BYTES = 16


def fresh() -> str:
    """Return the token of a state that nobody else has: one that was initialised at random."""
    return secrets.token_hex(_BYTES)


def known(step: int, batches_committed: int) -> str:
    """Return the token of a state that all groups are promised to have alike.

    It was loaded from a checkpoint of that step, or initialised from the same seed (step 0).
    """
    return _hash(f"known|{step}|{batches_committed}")


def after_step(token: str, quorum_id: int, num_participants: int) -> str:
    """Return the token after a step that was committed in a quorum by so many contributors."""
    return _hash(f"{token}|{quorum_id}|{num_participants}")


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=_BYTES).hexdigest()
