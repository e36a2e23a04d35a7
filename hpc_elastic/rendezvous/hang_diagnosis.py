"""Hang diagnosis: whether a group that makes no step is hung, and which rank is to blame (pure).

Theory of operation
-------------------
In synchronous training all ranks stop when one does. So an agent whose workers make no step says
so (*stalled*), and the leader asks every member what each of its ranks is at. An agent looks at its
workers' stacks several times over a second or two, writes them to files, and answers with the place
where each stands. Who has not answered after `ANSWER_S` is judged as one that nobody can look into.

Not hung    while a rank is busy with what takes long and is no step (a checkpoint of ours), or has
            returned; nor while a rank's stack *moves*: that may be a validation. A group that moves
            without a step for `PATIENCE` times the limit is hung all the same. A process that is
            stopped by a signal, or cannot be looked into, is never taken for one at work.

Blame       goes to ranks that are stopped, or cannot be looked into. Else to those that are not
            where most of the ranks are; if some of these are in a collective and others in none, to
            those in none. Without a majority the ranks that are in a collective wait for those that
            are not. If all are at the same place, or all in collectives and no majority, the blame
            is nobody's alone, and the message says that.

The group is started again then, as after any failure of a worker (`failure_policy`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpc_elastic.rendezvous.effects import Effect, Message, Note, Send
from hpc_elastic.rendezvous.log_entry import Agent, Failure
from hpc_elastic.rendezvous.replica_state import Rounds
from hpc_elastic.rendezvous.round_state import RoundPhase, RunState

ANSWER_S = 20.0
"""An agent answers within so long, or it cannot."""
PATIENCE = 10.0
"""A group that moves, but makes no step, is hung after so many times the limit."""
_NAMED = 8
_OUT_OF_REACH = ("stopped", "silent")
_AT_WORK = ("busy", "done")


@dataclass(frozen=True)
class RankState:
    """What a rank was found at.

    Attributes:
        rank: Its global rank.
        local_rank: Its rank on its node.
        state: ``stands``: its stack did not change; ``moves``: it did; ``busy``, ``done``: see
            above; ``stopped``: by a signal, as SIGSTOP; ``silent``: nobody can look into it.
        place: Its innermost frame of the user's own code, ``file:line in function``; or, where the
            process has none or is out of reach, a few words.
        waits_in: The collective, or the like, that it is in; None: in none that is known.
        stack: Path of the file with its stacks.
        time: Unix seconds of its last sign of life.
    """

    rank: int
    local_rank: int
    state: str
    place: str
    waits_in: str | None = None
    stack: str | None = None
    time: float = 0.0

    @property
    def where(self) -> str:
        """Where it stands, for people."""
        return f"in {self.waits_in} ({self.place})" if self.waits_in else f"at {self.place}"


@dataclass(frozen=True)
class HangFinding:
    """Who holds the others up, by agent, and what those do."""

    blamed: tuple[tuple[Agent, RankState], ...]
    others: str
    """What the ranks that are not to blame are at; empty where there are none."""
    shared: bool = False
    """Whether the blame is nobody's alone."""


def judge(found: Sequence[tuple[Agent, RankState]], *, patient: bool) -> HangFinding | None:
    """Return who is to blame; None: the group is not hung.

    Args:
        found: Every rank of the group.
        patient: Whether ranks whose stacks move are given more time.
    """
    lost = tuple(f for f in found if f[1].state in _OUT_OF_REACH)
    if lost:
        return HangFinding(lost, _told([f for f in found if f not in lost]))
    states = {state.state for _, state in found}
    if not found or states & set(_AT_WORK) or (patient and "moves" in states):
        return None
    blamed = _apart(found)
    if not blamed or len(blamed) == len(found):
        return HangFinding(tuple(found[:1]), _told(found), shared=True)
    return HangFinding(blamed, _told([f for f in found if f not in blamed]))


def _apart(found: Sequence[tuple[Agent, RankState]]) -> tuple[tuple[Agent, RankState], ...]:
    """Return the ranks that are not where they should be; none or all: that cannot be told."""
    places = Counter(_key(state) for _, state in found)
    (most, count), *_ = places.most_common(1)
    idle = tuple(f for f in found if f[1].waits_in is None)
    if 2 * count <= len(found):  # no majority
        return idle
    apart = tuple(f for f in found if _key(f[1]) != most)
    return tuple(f for f in apart if f in idle) or apart


def _key(state: RankState) -> tuple[str | None, str]:
    return state.waits_in, state.place


def _told(found: Sequence[tuple[Agent, RankState]]) -> str:
    """Say where ranks are: how many are at each place, the most first."""
    places = Counter(state.where for _, state in found)
    parts = [f"{n} {'rank is' if n == 1 else 'ranks are'} {at}" for at, n in places.most_common(3)]
    return ", ".join(parts)


def failures_of(finding: HangFinding, stalled_s: float, round_: int) -> list[tuple[Agent, Failure]]:
    """Return the ranks to blame as failed workers.

    Args:
        finding: The judgement.
        stalled_s: For how long no step was made.
        round_: The number of the round in which that was.
    """
    return [
        (agent, replace(_failure(agent, state, finding, stalled_s), round=round_))
        for agent, state in finding.blamed[:_NAMED]
    ]


def _failure(agent: Agent, state: RankState, finding: HangFinding, stalled_s: float) -> Failure:
    message = f"no step for {stalled_s:.0f} s: "
    if finding.shared:
        message += f"{finding.others}, and none of them is to blame alone"
    else:
        rest = f", while {finding.others}" if finding.others else ""
        message += f"it is {_at(state)}{rest}"
    if state.stack:
        message += f"; stacks of all ranks: tasks/*/attempt-*/{_round_files(state.stack)}"
    return Failure(
        agent.task, agent.host, state.rank, state.local_rank, state.time, message,
        phase="hang", log=state.stack,
    )  # fmt: skip


def _at(state: RankState) -> str:
    return state.place if state.state in _OUT_OF_REACH else state.where


def _round_files(stack: str) -> str:
    """Return the pattern of the files of all ranks, made of one of them."""
    name = stack.rpartition("/")[2]
    return name.partition(".rank-")[0] + ".rank-*.stack.txt"


def note_of(finding: HangFinding, stalled_s: float) -> Note:
    """Return the event ``hang``."""
    blamed = [
        {"rank": s.rank, "host": a.host, "task": a.task, "state": s.state, "at": s.where,
         "stack": s.stack}
        for a, s in finding.blamed[:_NAMED]
    ]  # fmt: skip
    fields = {"stalled_s": round(stalled_s, 1), "ranks": blamed, "others": finding.others}
    return Note("hang", {**fields, "shared": finding.shared})


@dataclass
class HangDiagnosis:
    """The leader's questions after a step that does not come, one at a time."""

    number: int = 0
    """Of the last question."""
    _round: int = 0
    _asked_at: float | None = None
    """None: nothing is asked."""
    _stalled_s: float = 0.0
    _patient: bool = True
    _answers: dict[Agent, list[RankState]] = field(default_factory=dict)

    def received(self, rounds: Rounds, agent: Agent, message: Message, now: float) -> list[Effect]:
        """A member reports that its workers are stalled, or answers what they are at."""
        if rounds.run.phase is not RoundPhase.RUNNING or agent not in rounds.run.ranks:
            return []
        if message["type"] == "stalled":
            return self._open(rounds.run, message, now) if self._asked_at is None else []
        if self._asked_at is None or message["number"] != self.number:
            return []
        self._answers[agent] = [RankState(**state) for state in message["ranks"]]
        return self.tick(rounds, now)

    def tick(self, rounds: Rounds, now: float) -> list[Effect]:
        """Judge once all have answered, or have had the time to."""
        if self._asked_at is None:
            return []
        run = rounds.run
        if run.phase is not RoundPhase.RUNNING or run.entry.round != self._round:
            self._asked_at = None
            return []
        missing = [a for a in run.ranks.members if a not in self._answers]
        if missing and now - self._asked_at < ANSWER_S:
            return []
        self._asked_at = None
        return self._judge(rounds, missing, now)

    def _open(self, run: RunState, message: Message, now: float) -> list[Effect]:
        self._stalled_s = float(message["stalled_s"])
        self._patient = self._stalled_s < PATIENCE * float(message["limit_s"])
        self.number += 1
        self._asked_at, self._round, self._answers = now, run.entry.round, {}
        return [Send(run.ranks.members, {"type": "stacks", "number": self.number})]

    def _judge(self, rounds: Rounds, missing: Collection[Agent], now: float) -> list[Effect]:
        members, round_ = rounds.run.ranks.members, rounds.run.entry.round
        finding = judge(list(_by_rank(members, self._answers, missing)), patient=self._patient)
        if finding is None:
            return []
        failures = failures_of(finding, self._stalled_s, round_)
        failed = [failure for _, failure in failures]
        note = note_of(finding, self._stalled_s)
        return [note, *rounds.worker_failed(failed, failures[0][0], now)]


def _by_rank(
    members: Sequence[Agent],
    answers: Mapping[Agent, Sequence[RankState]],
    missing: Collection[Agent],
) -> list[tuple[Agent, RankState]]:
    """Return what each rank is at; all ranks of an agent that does not answer are out of reach."""
    found: list[tuple[Agent, RankState]] = []
    first = 0
    for agent in members:
        if agent in missing:
            place = f"out of reach: its agent has not answered for {ANSWER_S:.0f} s"
            found.append((agent, RankState(first, 0, "silent", place)))
        found += [(agent, state) for state in answers.get(agent, ())]
        first += agent.nproc
    return found
