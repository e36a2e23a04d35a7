"""Random schedules of faults, played to real processes, and a verdict on what these report."""

import itertools
import math
import os
import random
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ft.crew import Crew, Member
from ft.libraries import OURS, Lighthouse

# ---- schedules for a training of two to five replicas (pure)

HARD = ("kill", "node", "stop")
"""The others lose a step by them. A worker dies; its agent dies with it; it is stopped."""
SOFT = ("coordinator", "slow", "hold", "join", "notice")
"""Nobody loses anything by them: the coordinator dies; a worker is slow, or holds the GIL; one
joins; one leaves, as announced."""
KINDS = (*HARD, *SOFT)
SPAN_S = 2.0
_LENGTHS_S = {
    "kill": (0.0, 0.8),  # until a new process takes its place
    "node": (0.0, 0.8),
    "stop": (0.05, 1.8),  # until it continues
    "coordinator": (0.0, 1.2),  # until another one is started
    "slow": (0.05, 0.8),
    "hold": (0.2, 1.5),
    "join": (0.0, 0.0),
    "notice": (0.0, 0.5),  # until a new process takes the place of the one that has left
}
PLACES = ("quorum", "allreduce", "commit")
"""Before which call of its step a replica is slow, or holds the GIL."""


@dataclass(frozen=True)
class Fault:
    """What happens: `HARD` or `SOFT`, ``at_s`` seconds after the start, for ``length_s``.

    Attributes:
        slot: Which replica it is about; "join" has none: the last slot's first process starts.
        place: One of `PLACES`.
    """

    at_s: float
    kind: str
    slot: int
    length_s: float
    place: str


@dataclass(frozen=True)
class Schedule:
    """A training and what happens to it.

    Attributes:
        slots: Replicas.
        agents: Each has an agent, which can be given a notice; else the Manager starts its server.
        late: The last of them starts only when "join" says so.
        step_s: How long a step's computation takes, by slot.
        sync: Whether the quorum is waited for at the begin of a step.
        numbers: Floats in the state.
    """

    seed: int
    slots: int
    agents: bool
    late: bool
    step_s: tuple[float, ...]
    sync: bool
    numbers: int
    faults: tuple[Fault, ...]

    @property
    def is_soft(self) -> bool:
        """Whether no step may be lost."""
        return not any(fault.kind in HARD for fault in self.faults)


def schedule(seed: int) -> Schedule:
    """Return the schedule of that seed; one in four has soft faults only."""
    rng = random.Random(seed)
    slots = rng.randint(2, 5)
    agents = seed % 2 == 0
    soft = ("coordinator", "slow", "hold", *(["notice"] if agents else []))
    kinds = soft if seed % 8 in (3, 6) else (*HARD, *HARD, *soft)
    faults = [_fault(rng, rng.choice(kinds), slots) for _ in range(rng.randint(1, 6))]
    late = rng.random() < 0.4
    if late:
        faults.append(_fault(rng, "join", slots))
    return Schedule(
        seed, slots, agents, late,
        step_s=tuple(rng.choice((0.0, 0.002, 0.01)) for _ in range(slots)),
        sync=rng.random() < 0.3,
        numbers=rng.choice((100, 1 << 14, 1 << 18)),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
    )  # fmt: skip


def _fault(rng: random.Random, kind: str, slots: int) -> Fault:
    return Fault(
        at_s=rng.uniform(0.0, SPAN_S),
        kind=kind,
        slot=rng.randrange(slots),
        length_s=rng.uniform(*_LENGTHS_S[kind]),
        place=rng.choice(PLACES),
    )


# ---- the verdict (pure)


@dataclass(frozen=True)
class Commit:
    """A committed step: its number (from 1), the state's hash before and after, contributors."""

    step: int
    before: str
    after: str
    participants: int
    at_s: float = 0.0


@dataclass
class Life:
    """One process of a replica.

    Attributes:
        hit: It was killed or stopped at some time.
        failed: Steps that it did not commit, with the reasons.
        wrong: What its gradients' means were not.
        final: The hash of its last state, and its step; None: it did not live to the end.
    """

    name: str
    hit: bool = False
    commits: list[Commit] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    final: tuple[str, int] | None = None


def judge(lives: Sequence[Life]) -> list[str]:
    """Return what is wrong with a training that has ended; empty: nothing."""
    found = [f"{life.name}: {wrong}" for life in lives for wrong in life.wrong]
    finals = {life.final for life in lives if life.final is not None}
    if len(finals) != 1:
        return [*found, f"the last states differ: { {life.name: life.final for life in lives} }"]
    ((last, step),) = finals
    lineage, broken = trace(last, step, [c for life in lives for c in life.commits])
    found += broken
    for life in lives:
        away = [c.step for c in life.commits if lineage.get(c.step) != c.after]
        if away and not life.hit:
            found.append(
                f"{life.name}, which nothing happened to, made steps that are lost: {away}"
            )
    return found


def trace(last: str, step: int, commits: Iterable[Commit]) -> tuple[dict[int, str], list[str]]:
    """Follow the last state back to its origin; return the hash after each step, and complaints."""
    by_state: dict[tuple[int, str], set[str]] = {}
    for commit in commits:
        by_state.setdefault((commit.step, commit.after), set()).add(commit.before)
    lineage: dict[int, str] = {}
    while step > 0:
        befores = by_state.get((step, last), set())
        if not befores:
            return lineage, [f"nobody told of having made step {step} to {last}"]
        if len(befores) > 1:
            return lineage, [f"step {step} to {last} was made from {len(befores)} states"]
        lineage[step] = last
        (last,), step = befores, step - 1
    return lineage, []


def failures(lives: Sequence[Life], bound: int) -> list[str]:
    """Return the failed steps of those that had more of them than others were hit."""
    too_many = [life for life in lives if not life.hit and len(life.failed) > bound]
    return [f"{life.name} failed {why}" for life in too_many for why in life.failed]


def dropped(lives: Sequence[Life], slots: int) -> list[str]:
    """Return whose steps were made by fewer once all had been there."""
    found = []
    for life in lives:
        sizes = [commit.participants for commit in life.commits]
        if slots in sizes and (fewer := [s for s in sizes[sizes.index(slots) :] if s != slots]):
            found.append(f"{life.name} made {len(fewer)} steps without all {slots}: {fewer[:9]}")
    return found


# ---- the play


PATIENCE_S = 60.0
LAST_STEPS, LAG_S = 20, 1.0
"""All make so many steps more, and those of so many seconds, once they are told to stop: what is
known of them here lags behind, and all are to be told before the first of them has come there."""
NOTICE_S = 30.0
LOOK_S = 0.02
_COUNT = itertools.count()
_MARK = "HPC_ELASTIC_TEST_STAGE"


class Stage:
    """One training: a lighthouse, and a process for each slot, which may die and come back."""

    def __init__(self, crew: Crew, plan: Schedule, library: str = OURS) -> None:
        self._crew = crew
        self._plan = plan
        self._lighthouse = Lighthouse(library, by_cli=True)
        self._due: list[tuple[float, Fault]] = []
        self._cast: dict[int, Member] = {}
        self._agents: dict[int, Member] = {}
        self._paths: dict[int, str] = {}
        self._leaving: set[int] = set()
        self._hit: set[str] = set()
        self._stopped: set[int] = set()
        self._dark = False
        self.everybody: list[Member] = []

    def play(self) -> list[Life]:
        """Play the schedule, put everything in order, and let all end at one step."""
        try:
            self._lighthouse.start()
            for slot in range(self._plan.slots - self._plan.late):
                self._enter(slot)
            self._crew.need(self._has_begun, "a first step", PATIENCE_S)
            self._faults()
            self._crew.need(self._is_whole, "all make steps together again", PATIENCE_S)
            self._finish()
            return [_life(member, member.name in self._hit) for member in self.everybody]
        finally:
            self._crew.end(*self.everybody, *self._agents.values())
            self._lighthouse.kill()

    def _faults(self) -> None:
        begun = time.monotonic()
        self._due = [(begun + fault.at_s, fault) for fault in self._plan.faults]
        while self._due:
            assert time.monotonic() < begun + PATIENCE_S, f"nothing comes of {self._due}"
            self._due.sort(key=lambda due: due[0])
            moment, fault = self._due.pop(0)
            self._crew.listen(max(0.0, moment - time.monotonic()))
            getattr(self, f"_{fault.kind}")(fault)

    def _later(self, fault: Fault, kind: str) -> None:
        moment = time.monotonic() + fault.length_s
        self._due.append((moment, Fault(0.0, kind, fault.slot, 0.0, fault.place)))

    # ---- what a fault does ----------------------------------------------------------------

    def _kill(self, fault: Fault) -> None:
        if self._may_lose(fault.slot):
            self._hit.add(self._cast[fault.slot].name)
            self._cast.pop(fault.slot).signal(signal.SIGKILL)
            self._later(fault, "enter")

    def _node(self, fault: Fault) -> None:
        if self._may_lose(fault.slot):
            self._kill(fault)
            if (agent := self._agents.pop(fault.slot, None)) is not None:
                self._crew.end(agent)

    def _notice(self, fault: Fault) -> None:
        if self._may_lose(fault.slot):
            self._agents[fault.slot].tell({"notice": NOTICE_S})
            self._leaving.add(fault.slot)
            self._later(fault, "left")

    def _left(self, fault: Fault) -> None:
        """Look whether who is under notice has left; then somebody new comes in its place."""
        agent, worker = self._agents[fault.slot], self._cast[fault.slot]
        if not agent.first("left"):
            self._later(replace(fault, length_s=LOOK_S), "left")
            return
        self._crew.end(agent, worker)
        del self._agents[fault.slot]
        self._leaving.remove(fault.slot)
        self._enter(fault)

    def _stop(self, fault: Fault) -> None:
        if self._may_lose(fault.slot):
            self._hit.add(self._cast[fault.slot].name)
            self._cast[fault.slot].signal(signal.SIGSTOP)
            self._stopped.add(fault.slot)
            self._later(fault, "continue")

    def _continue(self, fault: Fault) -> None:
        self._cast[fault.slot].signal(signal.SIGCONT)
        self._stopped.remove(fault.slot)

    def _coordinator(self, fault: Fault) -> None:
        if not self._dark:
            self._dark = True
            self._lighthouse.kill()
            self._later(fault, "light")

    def _light(self, fault: Fault) -> None:
        self._lighthouse.start()
        self._dark = False

    def _slow(self, fault: Fault) -> None:
        if (member := self._cast.get(fault.slot)) is not None and member.lines is not None:
            member.tell({"kind": fault.kind, "length_s": fault.length_s, "place": fault.place})

    _hold = _slow

    def _join(self, fault: Fault) -> None:
        self._enter(self._plan.slots - 1)

    def _enter(self, fault: Fault | int) -> None:
        slot = fault if isinstance(fault, int) else fault.slot
        agent = self._agent_of(slot) if self._plan.agents else ""
        member = self._crew.start(
            self._lighthouse.library, "live", lighthouse=self._lighthouse.address, agent=agent,
            slot=slot, numbers=self._plan.numbers, step_s=self._plan.step_s[slot],
            sync=self._plan.sync,
        )  # fmt: skip
        self._cast[slot] = member
        self.everybody.append(member)

    def _agent_of(self, slot: int) -> str:
        """Return the socket of a slot's agent, which expects a new worker."""
        if slot in self._agents:
            self._agents[slot].tell({"expect": True})
            return self._paths[slot]
        self._paths[slot] = str(self._crew.folder / f"agent{next(_COUNT)}")
        agent = self._agents[slot] = self._crew.start(
            self._lighthouse.library, "agent", lighthouse=self._lighthouse.address,
            replica_id=f"slot{slot}:{next(_COUNT)}", path=self._paths[slot],
        )  # fmt: skip
        self._crew.need(lambda: agent.gone or agent.first("serves"), "an agent serves")
        return self._paths[slot]

    # ---- what holds -----------------------------------------------------------------------

    def _may_lose(self, slot: int) -> bool:
        """Whether the state is safe without that one: somebody else has it, and runs."""
        member = self._cast.get(slot)
        out = self._stopped | self._leaving
        if member is None or member.lines is None or slot in out:
            return False
        others = [m for s, m in self._cast.items() if s != slot and s not in out]
        newest = max((_step(m) for m in self._cast.values()), default=0)
        return any(m.name not in self._hit and _step(m) >= newest - 1 > 0 for m in others)

    def _has_begun(self) -> bool:
        self._look_for_crashes()
        return all(_step(member) >= 2 for member in self._cast.values())

    def _is_whole(self) -> bool:
        self._look_for_crashes()
        members = list(self._cast.values())
        return len(members) == self._plan.slots and all(
            [c["commit"][3] for c in m.events[-5:] if "commit" in c] == [len(members)] * 5
            for m in members
        )

    def _finish(self) -> None:
        members = list(self._cast.values())
        stop_at = max(_step(member) + math.ceil(_pace(member) * LAG_S) for member in members)
        stop_at += LAST_STEPS
        for member in members:
            member.tell({"stop_at": stop_at})

        def done() -> bool:
            self._look_for_crashes()
            return all(member.first("final") is not None for member in members)

        self._crew.need(done, f"all end at step {stop_at}", PATIENCE_S)

    def _look_for_crashes(self) -> None:
        for member in (*self._cast.values(), *self._agents.values()):
            if member.gone:
                raise AssertionError(f"{member.name} has ended: {member.error}")


def _step(member: Member) -> int:
    return next((e["commit"][0] for e in reversed(member.events) if "commit" in e), 0)


def _pace(member: Member) -> float:
    """Its steps a second, lately."""
    commits = [e["commit"] for e in member.events if "commit" in e][-50:]
    if len(commits) < 2:
        return 0.0
    (first, *_, began), (last, *_, ended) = commits[0], commits[-1]
    return (last - first) / max(ended - began, 1e-3)


def _life(member: Member, hit: bool) -> Life:
    life = Life(member.name, hit)
    for event in member.events:
        if "commit" in event:
            life.commits.append(Commit(*event["commit"]))
        if event.get("wrong"):
            life.wrong.append(event["wrong"])
        if "failed" in event:
            life.failed.append(f"step {event['failed']}: {event['why']}")
        if "final" in event:
            life.final = (event["final"], event["step"])
    return life


def verdict(plan: Schedule, lives: list[Life]) -> list[str]:
    """Return what is wrong with how a schedule went."""
    found = judge(lives)
    found += failures(lives, sum(fault.kind in HARD for fault in plan.faults))
    if plan.is_soft and all(fault.kind != "notice" for fault in plan.faults):
        found += dropped(lives, plan.slots)
    return found


def left_over(mark: str) -> list[int]:
    """Return the processes that carry a stage's mark, but for this one."""
    entry = f"{_MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if entry in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@contextmanager
def theatre(folder: Path) -> Iterator[Crew]:
    """A crew for many schedules; nothing of it is left in the end, helpers of dead workers either.

    Raises:
        AssertionError: processes were left.
    """
    mark = str(folder)
    os.environ[_MARK] = mark
    try:
        crew = Crew(folder, "ft_replica")
        try:
            yield crew
        finally:
            crew.close()
        deadline = time.monotonic() + 10.0
        while (pids := left_over(mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        words = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids]
        assert not pids, f"processes are left: {words}"
    finally:
        del os.environ[_MARK]
