"""Hang diagnosis: whether a group that makes no step is hung, and which rank is to blame (pure).

Theory of operation
-------------------
In synchronous training all ranks stop when one does. An agent whose workers make no step reports
*stalled*, and the leader queries every member for the states of its ranks. An agent samples the
stacks of its workers several times over a second or two, writes them to files, and answers with the
place of each rank. The ranks of an agent that does not answer within `ANSWER_S` are *silent*.

Not hung    while a rank is busy with something long that is no step (a checkpoint of this package)
            or has returned; nor while the stack of a rank *moves*, since that may be a validation.
            A group that moves without a step for `MOVING_FACTOR` times the limit is hung. A process
            that is stopped by a signal, or that cannot be inspected, never counts as working.

            Before the first step, an *assumed* limit proves nothing unless a rank waits in a
            collective: the script may make no steps that can be counted.

Blame       goes to ranks that are stopped or silent. Otherwise it goes to the ranks that have not
            enqueued a collective of NCCL in which others wait, where torch has recorded those: a
            stack shows no more than a wait for the GPU. Otherwise to the ranks outside the place of
            the majority; if some of these are in a collective and others in none, to those in none.
            Without a majority, ranks in a collective wait for those in none. If all ranks are at
            the same place, or all are in collectives without a majority, those on a node where
            nvidia-smi fails, the sign of a dying GPU. Otherwise no single rank is to blame, and the
            message states that.

The group is then restarted as after any failure of a worker (`failure_policy`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hpc_elastic.rendezvous.effects import Effect, Note, Send
from hpc_elastic.rendezvous.log_entry import Agent, Failure
from hpc_elastic.rendezvous.messages import RankState, Stacks, StacksRequest, Stall
from hpc_elastic.rendezvous.replica_state import Rounds
from hpc_elastic.rendezvous.round_state import RoundPhase

ANSWER_S = 20.0  # time limit of an agent's answer; seconds
MOVING_FACTOR = 10.0  # a group whose stacks move is hung after this many times the limit
_MAX_NAMED = 8
_OUT_OF_REACH = ("stopped", "silent")

_RankOfAgent = tuple[Agent, RankState]


@dataclass(frozen=True)
class HangFinding:
    """The ranks that hold up the others."""

    blamed: tuple[_RankOfAgent, ...]
    others: str  # where the ranks that are not to blame are; empty if there are none
    shared: bool = False  # whether no single rank is to blame


def diagnose_hang(found: Sequence[_RankOfAgent], stall: Stall) -> HangFinding | None:
    """Return the ranks to blame; None if the group is not hung."""
    if stall.assumed and not any(state.waits_in for _, state in found):
        return None
    lost = tuple(f for f in found if f[1].state in _OUT_OF_REACH)
    if lost:
        return HangFinding(lost, _describe_places(f for f in found if f not in lost))
    states = {state.state for _, state in found}
    moving_is_work = stall.stalled_s < MOVING_FACTOR * stall.limit_s
    if not found or states & {"busy", "done"} or (moving_is_work and "moves" in states):
        return None
    blamed = _absent(found) or _outliers(found)
    if not blamed or len(blamed) == len(found):
        blamed = tuple(f for f in found if f[1].gpus_fail)
    if not blamed or len(blamed) == len(found):
        return HangFinding(tuple(found[:1]), _describe_places(found), shared=True)
    return HangFinding(blamed, _describe_places(f for f in found if f not in blamed))


def _absent(found: Sequence[_RankOfAgent]) -> tuple[_RankOfAgent, ...]:
    """Return the ranks that have not enqueued a collective in which others wait.

    If some of them wait for none themselves, only those are returned.
    """
    newest: dict[str, int] = {}
    for _, state in found:
        for group, number in state.awaited.items():
            newest[group] = max(number, newest.get(group, 0))
    absent = tuple(
        (agent, state)
        for agent, state in found
        if any(newest.get(group, 0) > last[0] for group, last in state.collectives.items())
    )
    return tuple(f for f in absent if not f[1].awaited) or absent


def _outliers(found: Sequence[_RankOfAgent]) -> tuple[_RankOfAgent, ...]:
    """Return the ranks outside the place of the others; none or all if that is undecidable."""
    places = [(state.waits_in, state.place) for _, state in found]
    [(most, count)] = Counter(places).most_common(1)
    idle = tuple(f for f in found if f[1].waits_in is None)
    if 2 * count <= len(found):  # no majority
        return idle
    apart = tuple(f for f, place in zip(found, places, strict=True) if place != most)
    return tuple(f for f in apart if f in idle) or apart


def _describe_places(found: Iterable[_RankOfAgent]) -> str:
    """Return how many ranks are at each place, the most frequent place first."""
    places = Counter(state.where for _, state in found)
    parts = [f"{n} {'rank is' if n == 1 else 'ranks are'} {at}" for at, n in places.most_common(3)]
    return ", ".join(parts)


def hang_failures(finding: HangFinding, stalled_s: float, round_: int) -> list[Failure]:
    """Return the ranks to blame as failed workers, after ``stalled_s`` without a step."""
    failures = []
    for agent, state in finding.blamed[:_MAX_NAMED]:
        message = f"no step for {stalled_s:.0f} s: "
        if finding.shared:
            message += f"{finding.others}, and none of them is to blame alone"
        else:
            rest = f", while {finding.others}" if finding.others else ""
            at = state.place if state.state in _OUT_OF_REACH else state.where
            message += f"it is {at}{rest}"
        if state.stack:  # the pattern of the files of all ranks
            name = state.stack.rpartition("/")[2].partition(".rank-")[0]
            message += f"; stacks of all ranks: tasks/*/attempt-*/{name}.rank-*.stack.txt"
        failures.append(Failure(
            agent.task, agent.host, state.rank, state.local_rank, state.time, message,
            phase="hang", log=state.stack, round=round_,
        ))  # fmt: skip
    return failures


def hang_note(finding: HangFinding, stalled_s: float) -> Note:
    """Return the event ``hang``."""
    blamed = [
        {"rank": s.rank, "host": a.host, "task": a.task, "state": s.state, "at": s.where,
         "stack": s.stack}
        for a, s in finding.blamed[:_MAX_NAMED]
    ]  # fmt: skip
    fields = {"stalled_s": round(stalled_s, 1), "ranks": blamed, "others": finding.others}
    return Note("hang", {**fields, "shared": finding.shared})


@dataclass
class HangDiagnosis:
    """The leader's queries after a stall, one at a time."""

    number: int = 0  # of the last query
    _round: int = 0
    _queried_at: float | None = None  # None if no query is open
    _stall: Stall = field(default_factory=lambda: Stall(0.0, 0.0))
    _answers: dict[Agent, list[RankState]] = field(default_factory=dict)

    def received(
        self, rounds: Rounds, agent: Agent, message: Stall | Stacks, now: float
    ) -> list[Effect]:
        """Handle a member's report of a stall, or its answer with the states of its ranks."""
        run = rounds.run
        if run.phase is not RoundPhase.RUNNING or agent not in run.ranks:
            return []
        if isinstance(message, Stall):
            if self._queried_at is not None:
                return []
            self._stall = message
            self.number += 1
            run.reach.suspect(now)
            self._queried_at, self._round, self._answers = now, run.entry.round, {}
            return [Send(run.ranks.members, StacksRequest(self.number))]
        if self._queried_at is None or message.number != self.number:
            return []
        self._answers[agent] = list(message.ranks)
        return self.tick(rounds, now)

    def tick(self, rounds: Rounds, now: float) -> list[Effect]:
        """Diagnose once all members have answered, or `ANSWER_S` is over."""
        if self._queried_at is None:
            return []
        run = rounds.run
        if run.phase is not RoundPhase.RUNNING or run.entry.round != self._round:
            self._queried_at = None
            return []
        are_all = all(agent in self._answers for agent in run.ranks.members)
        if not are_all and now - self._queried_at < ANSWER_S:
            return []
        if not run.reach.is_settled(now):
            return []  # nodes that do not reach each other explain it, and are no worker's failure
        self._queried_at = None
        found = self._ranks_of(run.ranks.members)
        finding = diagnose_hang(found, self._stall)
        if finding is None:
            return []
        failures = hang_failures(finding, self._stall.stalled_s, self._round)
        note, (first, _) = hang_note(finding, self._stall.stalled_s), finding.blamed[0]
        return [note, *rounds.worker_failed(failures, first, now)]

    def _ranks_of(self, members: Sequence[Agent]) -> list[_RankOfAgent]:
        """Return the states of all ranks; one is silent for each agent that has not answered."""
        place = f"out of reach: its agent has not answered for {ANSWER_S:.0f} s"
        found: list[_RankOfAgent] = []
        first = 0
        for agent in members:
            silent = [RankState(first, 0, "silent", place)]
            found += [(agent, state) for state in self._answers.get(agent, silent)]
            first += agent.nproc
        return found
