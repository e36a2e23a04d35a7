"""The parameters and the invariants of a random schedule of the quorum."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from hpc_elastic.ft.messages import QuorumResult, StateMismatch
from hpc_elastic.ft.quorum import LONGEST_KEEP_OUT_S, QuorumRules
from hpc_elastic.ft.state_check import Mismatch
from hpc_elastic.step_agreement import VOTE_WITHIN_S
from simulation.invariants import InvariantError
from simulation.world import World


class Kind(Enum):
    """The faults of a schedule.

    Attributes:
        QUIET: None: replicas join and leave as announced, and some are slow.
        KEEPER: As QUIET, and the keeper dies.
        ALL: All kinds.
        LASTING: What lasts for minutes: a node is away, a replica is slow, a newcomer cannot heal.
    """

    QUIET = "quiet"
    KEEPER = "keeper"
    ALL = "all"
    LASTING = "lasting"


@dataclass(frozen=True)
class Scenario:
    """The parameters of one schedule; times in seconds.

    Attributes:
        num_groups: Replica groups, 2 to 5.
        num_nodes: Nodes of each group, 1 to 3, with one worker each.
        num_spares: Nodes that are of no group at first.
        num_late: Number of groups that start late.
        step_s: Mean duration of a step; the slowest replica may need three times as much.
        heal_s: Mean time to fetch a state.
        is_sync: Members fetch states before the forward pass, not during it.
        is_run: The keeper lives on the node of a group, and dies with it.
        heals_corrupted: A group with a wrong state heals; else it is only named.
        calm_after_s: Time after which no fault is injected, and all are healed.
        request_timeout_s: Time that a worker waits for a quorum; 0 without a limit, as in a run.
    """

    kind: Kind
    num_groups: int
    num_nodes: int
    num_spares: int
    num_late: int
    rules: QuorumRules
    step_s: float
    heal_s: float
    is_sync: bool
    is_run: bool
    heals_corrupted: bool
    longest_delay_s: float
    calm_after_s: float
    tick_s: float
    request_timeout_s: float = 0.0

    @property
    def bound_s(self) -> float:
        """Time of calm within which all replicas are in one quorum and have made steps."""
        waits = 12.0 + 8 * self.longest_delay_s + 4 * self.heal_s
        if self.num_nodes > 1:  # a relay, a vote that comes too late, workers that start again
            waits += 15.0 + 8 * self.longest_delay_s
        if self.kind is Kind.LASTING:  # until a newcomer is let in again
            waits += LONGEST_KEEP_OUT_S
        return waits + 20 * 3 * self.step_s + self.rules.reconnect_timeout_s

    @property
    def lost_bound_s(self) -> float:
        """Time within which a lost member no longer holds up the others."""
        return 1.0 + 6 * self.longest_delay_s

    @property
    def long_notice_s(self) -> float:
        """A notice that leaves enough time for any group."""
        return 30 * self.step_s + self.bound_s


def draw(rng: random.Random) -> Scenario:
    """Return a random scenario."""
    kind = rng.choices((Kind.QUIET, Kind.KEEPER, Kind.ALL), [3, 1, 8])[0]
    num_groups = rng.randint(2, 5)
    num_nodes = rng.choices((1, 2, 3), (5, 4, 1))[0]
    # as LocalSGD: calls are far apart, so a keeper may die long before one that is agreed on
    is_rare = rng.random() < (0.3 if kind is Kind.KEEPER else 0.04)
    step_s = rng.uniform(8.0, 20.0) if is_rare else rng.choice((0.05, 0.1, 0.3))
    rules = QuorumRules(
        min_replicas=2 if num_groups > 2 and rng.random() < 0.2 else 1,
        live_timeout_s=60.0 if kind is not Kind.ALL or rng.random() < 0.7 else 3.0,
    )
    return Scenario(
        kind=kind,
        num_groups=num_groups,
        num_nodes=num_nodes,
        num_spares=rng.choice((0, 1, 2)) if num_nodes > 1 else 0,
        num_late=rng.randint(0, num_groups - 1),
        rules=rules,
        step_s=step_s,
        heal_s=rng.choice((0.02, 0.3, 1.0)),
        is_sync=rng.random() < 0.3,
        is_run=rng.random() < 0.6,
        heals_corrupted=rng.random() < 0.8,
        longest_delay_s=rng.choice((0.02, 0.3, 2.0) if kind is Kind.ALL else (0.02, 0.3)),
        calm_after_s=150.0 if is_rare else rng.uniform(5.0, 9.0),
        tick_s=0.5 if is_rare else 0.1,
    )


def draw_lasting(rng: random.Random) -> Scenario:
    """Return one of minutes, with every default; in a run it may need all of its replicas."""
    num_groups, is_run = rng.randint(3, 4), rng.random() < 0.5
    needs_all = is_run and rng.random() < 0.5
    return Scenario(
        kind=Kind.LASTING,
        num_groups=num_groups,
        num_nodes=1,
        num_spares=0,
        num_late=rng.randint(0, 1),
        rules=QuorumRules(min_replicas=num_groups if needs_all else 1),
        step_s=rng.choice((0.5, 2.0)),
        heal_s=rng.choice((0.3, 5.0)),
        is_sync=rng.random() < 0.3,
        is_run=is_run,
        heals_corrupted=True,
        longest_delay_s=rng.choice((0.02, 0.3)),
        calm_after_s=rng.uniform(300.0, 600.0),
        tick_s=0.1,
        request_timeout_s=0.0 if is_run else rng.choice((30.0, 60.0, 60.0, 600.0)),
    )


@dataclass(frozen=True)
class State:
    """The parameters of a model, with a hash of their history; ``flips`` is 0 if no bit flipped."""

    step: int
    state_version: str
    history: int
    flips: int = 0


# ---- The invariants
# Ids         Quorum ids always rise, over all keepers.
# Lineage     States with equal step and token have the same history.
# Mean        The contributors to a collective have the same state, and each divides by their
#             number; all are at the same call.
# Announced   Without other faults, a group that joins or leaves as announced costs no other a
#             step; nor does a keeper's death.
# Last        Without other faults, a group that leaves with the newest state could save it.
# Minority    A quorum has more members than it leaves out live members of the last one.
# Switch      No group waits at a proposed call for long, unless there is no keeper.
# Votes       A group of several workers commits a step only with the votes of all its ranks on all
#             nodes; all ranks that commit it have the same step and version, and all are in the
#             same step of the same quorum whenever they meet in a collective of the group.
# Held up     A member that is dead, stopped, or on a lost node holds the others up, those of its
#             own group too, no longer than it takes to detect that. Members of a group that has
#             lost another node silently wait until that is detected.
# Corruption  Where most members have states without a flipped bit, a check finds and names all the
#             others, and none of them. A corrupted member that heals has the majority's state.
# Patience    No sound worker gives up waiting for a quorum, whatever lasts for minutes elsewhere.
# Kept out    A newcomer that cannot heal breaks quorums of the others at growing intervals only.
# Files       Files that leaders share: see `simulation.storage`.
# Progress    In the calm all live replicas are in one quorum and make steps; see `simulator`.


class Monitor:
    """Checks the invariants, and raises `InvariantError` at once."""

    def __init__(self, scenario: Scenario, world: World) -> None:
        self.num_checks = 0
        self.quorums = 0
        self.commits = 0
        self.failed_steps = 0
        self.heals = 0
        self.caught_up = 0
        self.corrupted = 0
        self.named_wrong = 0
        self.completed = 0
        self.switches = 0
        self.leaves_granted = 0
        self.dropped = 0
        self._scenario = scenario
        self._world = world
        self._last_id = -1
        self._histories: dict[tuple[int, str, int], int] = {}
        self._wrong: set[tuple[int, str]] = set()
        self._failed_heals: dict[str, list[float]] = {}

    def check(self, holds: bool, what: str, *facts: object) -> None:
        """Raise `InvariantError` with these facts unless an invariant holds."""
        self.num_checks += 1
        if not holds:
            raise InvariantError(f"{what}: {', '.join(map(str, facts))}")

    # ---- the keeper -----------------------------------------------------------------------

    def formed(self, quorum_id: int, members: Collection[str], live: Collection[str]) -> None:
        """A keeper has formed a quorum without these ``live`` members of the last one."""
        self.quorums += 1
        self.check(quorum_id > self._last_id, "a quorum id came again", quorum_id, self._last_id)
        self._last_id = quorum_id
        self.dropped += bool(live)
        # half of them are enough, so that one of two replicas does not wait for a slow other one
        self.check(len(members) >= len(live), "a minority formed a quorum", members, live)

    def placed(self, places: Sequence[QuorumResult]) -> None:
        """A keeper has sent their places to all members of a new quorum."""
        size = len(places)
        self.check([p.replica_rank for p in places] == [*range(size)], "ranks", places)
        cohort = [p for p in places if not p.heals]
        self.check(bool(cohort) and all(p.cohort_size == len(cohort) for p in places), "cohort")
        for place in places:
            ranks = [s.replica_rank for s in place.sources]
            has = all(
                place.replica_rank in places[r].source_of and not places[r].heals for r in ranks
            )
            self.check(has and place.heals == bool(ranks), "sources", place)

    # ---- workers --------------------------------------------------------------------------

    def state_reached(self, worker: str, rank: int, state: State) -> None:
        """A worker of a rank in its group has committed a step or healed."""
        key = state.step, state.state_version, rank
        known = self._histories.setdefault(key, state.history)
        self.check(known == state.history, "two histories with one token", worker, state.step)

    def reduced(self, call: int, given: list[tuple[str, State]], divisors: set[int]) -> None:
        """All members have joined a collective.

        Args:
            call: Its number.
            given: The contributors, and their states.
            divisors: The divisors of all members.
        """
        states = {replace(state, flips=0) for _, state in given}
        self.check(len(states) == 1, "different states were averaged", call, given)
        self.check(divisors == {len(given)}, "the mean counts others", call, divisors, given)

    def compared(
        self, step: int, names: Sequence[str], states: Mapping[int, State], found: Mismatch,
        heals: bool,
    ) -> None:  # fmt: skip
        """A check has found that states differ.

        Args:
            step: The step of the check.
            names: Of the members, by replica rank.
            states: The same.
            found: Its conclusion.
            heals: Whether members with wrong states heal.
        """
        suspects = [found.names[rank] for rank in found.suspects]
        wrong = [names[rank] for rank, state in sorted(states.items()) if state.flips]
        if 2 * len(wrong) < len(states):
            self.check(found.is_certain, "a check is not certain", step, suspects, wrong)
            self.check(suspects == wrong, "a check blames others", step, suspects, wrong)
            self._wrong |= {(step, name) for name in wrong}
        if found.is_certain:
            most = max(Counter((s.history, s.flips) for s in states.values()).values())
            self.check(2 * most > len(states), "certain without a majority", step, suspects)
            self.corrupted += len(suspects) if heals else 0
        else:
            self.check(len(suspects) > 1, "a check blames one of equals", step, suspects)

    def named(self, mismatch: StateMismatch) -> None:
        """The server of a group has received the name of a worker with a wrong state."""
        self.named_wrong += (mismatch.step, mismatch.worker) in self._wrong

    def healed_corrupted(self, worker: str, state: State, others: Sequence[State]) -> None:
        """A worker whose state was found to be wrong has fetched another one.

        Args:
            worker: Its name.
            state: What it has fetched.
            others: The states of the other members of the quorum.
        """
        newest = [s for s in others if s.step == state.step]
        clean = [s for s in newest if not s.flips]
        if 2 * len(clean) > len(newest) and len(clean) == len(newest):
            self.check(not state.flips, "healed to a wrong state", worker, state, others)

    def step_failed(self, worker: str, why: str) -> None:
        """A worker's step was not committed."""
        self.failed_steps += 1
        quiet = self._scenario.kind in (Kind.QUIET, Kind.KEEPER)
        self.check(not quiet, "an announced change costs a step", worker, why)

    def heal_failed(self, worker: str) -> None:
        """A worker could not heal."""
        times = self._failed_heals.setdefault(worker, [])
        times.append(self._world.now)
        if len(times) > 3:
            limit_s = self._scenario.request_timeout_s or math.inf
            least_s = min(2.0 ** min(len(times) - 4, 10), LONGEST_KEEP_OUT_S, 0.8 * limit_s)
            waited_s = times[-1] - times[-2]
            self.check(waited_s >= 0.99 * least_s, "a failed heal again", worker, waited_s, least_s)

    def leave_granted(
        self, worker: str, state: State, saved: State | None, others: Collection[State]
    ) -> None:
        """A keeper lets a group leave.

        Args:
            worker: The group's worker.
            state: The worker's state.
            saved: The last state that its script has saved, if any.
            others: The states of the other groups.
        """
        self.leaves_granted += 1
        if self._scenario.kind is not Kind.ALL:
            held = any(other.step >= state.step for other in others)
            unnoticed = not held and state.step > 0 and state != saved
            self.check(not unnoticed, "the last state leaves unnoticed", worker)

    def worker_waits(self, worker: str, waits: Callable[[], bool]) -> None:
        """A worker starts to wait at a proposed call; ``waits`` returns whether it still does."""

        def check() -> None:
            self.check(not waits(), "a worker waits at a proposed call for ever", worker)

        hops = 3 if self._scenario.num_nodes == 1 else 7
        bound_s = VOTE_WITHIN_S + 1.0 + hops * self._scenario.longest_delay_s
        self._world.after(bound_s, None, check)
