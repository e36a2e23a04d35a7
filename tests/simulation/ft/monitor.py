"""What must hold at every step of every schedule.

Ids         Quorum ids rise for ever, over all keepers.
Lineage     States with equal step and token have the same history.
Mean        Those that contribute to one collective have the same state, and each divides by their
            number; all are at the same call.
Announced   Where nothing else goes wrong, whoever joins or leaves as announced costs nobody a step;
            nor does a keeper's death.
Last        Where nothing else goes wrong, who leaves with the newest state could save it.
Minority    No quorum is formed beside as many live members of the last one that are left out.
Switch      Nobody waits at a proposed call for long, unless there is no keeper.
Files       Those that leaders share: see `simulation.shared`.
Progress    In the calm all live replicas are in one quorum and make steps; see `simulator`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from hpc_elastic.ft.messages import QuorumResult
from hpc_elastic.step_agreement import VOTE_WITHIN_S
from simulation.ft.scenario import Kind, Scenario
from simulation.invariants import InvariantError
from simulation.world import World

if TYPE_CHECKING:
    from simulation.ft.worker import State, Worker


class Monitor:
    """Sees everything, and raises `InvariantError` at once."""

    def __init__(self, scenario: Scenario, world: World) -> None:
        self.num_checks = 0
        self.quorums = 0
        self.commits = 0
        self.failed_steps = 0
        self.heals = 0
        self.switches = 0
        self.farewells = 0
        self.dropped = 0
        self._scenario = scenario
        self._world = world
        self._last_id = -1
        self._histories: dict[tuple[int, str], int] = {}

    def check(self, holds: bool, what: str, *facts: object) -> None:
        """Raise unless it holds."""
        self.num_checks += 1
        if not holds:
            raise InvariantError(f"{what}: {', '.join(map(str, facts))}")

    # ---- the keeper -----------------------------------------------------------------------

    def formed(self, quorum_id: int, members: Collection[str], live: Collection[str]) -> None:
        """A keeper has formed a quorum; ``live`` members of the last one could have asked."""
        self.quorums += 1
        self.check(quorum_id > self._last_id, "a quorum id came again", quorum_id, self._last_id)
        self._last_id = quorum_id
        self.dropped += bool(live)
        self.check(len(members) > len(live), "a minority formed a quorum", members, live)

    def placed(self, told: dict[str, QuorumResult]) -> None:
        """All members of a new quorum have been told their places."""
        places = list(told.values())
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

    def has(self, who: str, state: State) -> None:
        """A worker has a state, because it committed a step or healed."""
        known = self._histories.setdefault((state.step, state.state_version), state.history)
        self.check(known == state.history, "two histories with one token", who, state.step)

    def reduced(self, call: int, given: list[tuple[Worker, State]], divisors: set[int]) -> None:
        """All members have come to one collective; so many divide by so much."""
        states = {state for _, state in given}
        self.check(len(states) == 1, "different states were averaged", call, given)
        self.check(divisors == {len(given)}, "the mean counts others", call, divisors, given)

    def step_failed(self, who: str, why: str) -> None:
        """A worker's step was not committed."""
        self.failed_steps += 1
        quiet = self._scenario.kind is not Kind.ALL
        self.check(not quiet, "an announced change costs a step", who, why)

    def farewell(self, worker: Worker, others: Collection[State]) -> None:
        """A group is let go."""
        self.farewells += 1
        if self._scenario.kind is not Kind.ALL and worker.saves:
            state = worker.state
            held = any(other.step >= state.step for other in others)
            unnoticed = not held and state.step > 0 and state != worker.saved
            self.check(not unnoticed, "the last state leaves unnoticed", worker.name)

    def waits(self, worker: Worker) -> None:
        """A worker begins to wait at a proposed call."""
        bound_s = VOTE_WITHIN_S + 1.0 + 3 * self._scenario.longest_delay_s
        self._world.after(bound_s, None, self._waited, worker, worker.waits_since)

    def _waited(self, worker: Worker, since: float) -> None:
        stuck = worker.process.alive and worker.waits_since == since and worker.is_reachable(since)
        self.check(not stuck, "a worker waits at a proposed call for ever", worker.name)
