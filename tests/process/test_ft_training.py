"""Real processes that train together with DDP while their peers and coordinator come and go."""

import contextlib
import signal
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from ft.crew import Crew, Member
from ft.libraries import OURS, Lighthouse, free_port

from hpc_elastic.ft.coordination import LighthouseServer

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def crew(tmp_path_factory):
    made = Crew(tmp_path_factory.mktemp("crew"), "ft_trainer")
    yield made
    made.close()


@pytest.fixture
def training(crew):
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    made = Training(crew, lighthouse.address())
    yield made
    made.end()
    lighthouse.shutdown()


class Training:
    """Replica groups of one training, by slot: the workers that live."""

    def __init__(self, crew: Crew, lighthouse: str) -> None:
        self._crew = crew
        self._lighthouse = lighthouse
        self._all: list[Member] = []
        self.groups: dict[int, list[Member]] = {}

    def start(self, slot: int, ranks: int = 1, **more: float) -> list[Member]:
        """Start a group; ``more`` are arguments of `ft_trainer.Trainer`."""
        port = free_port()
        self.groups[slot] = [
            self._crew.start(
                OURS, "train", lighthouse=self._lighthouse, slot=slot, rank=rank, ranks=ranks,
                port=port, **more,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        self._all += self.groups[slot]
        return self.groups[slot]

    def kill(self, slot: int) -> None:
        """Kill a group's workers."""
        for member in self.groups.pop(slot):
            member.signal(signal.SIGKILL)

    def go_on(self, participants: int, *slots: int, steps: int = 3) -> None:
        """Wait until groups (default: all) have committed steps with so many contributors."""
        members = [m for s, group in self.groups.items() if not slots or s in slots for m in group]
        seen = {m.name: len(m.events) for m in members}

        def have() -> bool:
            self._look_for_crashes()
            return all(
                [c[2] for c in commits(m, seen[m.name])][-steps:] == [participants] * steps
                for m in members
            )

        self._crew.need(have, f"{steps} steps of {participants}", PATIENCE_S)

    def compare(self) -> None:
        """Compare all that the groups have told, rank by rank, step by step."""
        for ranks in zip(*self.groups.values(), strict=True):
            assert_alike(ranks)

    def end(self) -> None:
        """Kill all."""
        self._crew.end(*self._all)

    def _look_for_crashes(self) -> None:
        for group in self.groups.values():
            for member in group:
                assert not member.gone, f"{member.name} has ended: {member.error}"


def commits(member: Member, since: int = 0) -> list[list]:
    """What a worker told of its committed steps: number, hash, contributors."""
    return [e["commit"] for e in member.events[since:] if "commit" in e]


def failed(*members: Member) -> list:
    """What they told of the steps that were not committed."""
    return [e["failed"] for m in members for e in m.events if "failed" in e]


def assert_alike(members) -> None:
    """After each step all that committed it have the same parameters."""
    states: dict[int, set[str]] = {}
    for member in members:
        for step, state, _ in commits(member):
            states.setdefault(step, set()).add(state)
    assert len(states) > 3
    assert {step: found for step, found in states.items() if len(found) > 1} == {}


def test_a_dead_replica_costs_one_step_and_its_return_none(training):
    """Two survive a kill in their processes; who comes back heals while they train."""
    survivors = [training.start(slot)[0] for slot in (0, 1)]
    training.start(2)
    training.go_on(3)
    joined = len(failed(*survivors))
    training.kill(2)
    training.go_on(2)
    assert all(len(failed(m)) <= 1 for m in survivors), failed(*survivors)
    lost = len(failed(*survivors))
    training.start(2)
    training.go_on(3)
    assert joined == 0, failed(*survivors)
    assert len(failed(*survivors)) == lost, failed(*survivors)
    training.compare()


@pytest.mark.parametrize("groups", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_replica_that_is_done_costs_the_others_no_step(training, groups):
    """Its last step is completed, and the next one, in its forward pass, has another quorum."""
    staying = [training.start(slot, forward_s=0.1)[0] for slot in range(1, groups)]
    [leaver] = training.start(0, forward_s=0.1, leave_at=20)
    training.go_on(groups)
    del training.groups[0]
    training.go_on(groups - 1)
    assert commits(leaver)[-1][0] == 20
    assert failed(*staying, leaver) == []
    assert_alike([*staying, leaver])


def test_a_stopped_replica_is_left_behind_and_comes_back(training):
    """The others do not wait for it; when it goes on it heals."""
    for slot in range(3):
        training.start(slot)
    training.go_on(3)
    [stopped] = training.groups[1]
    stopped.signal(signal.SIGSTOP)
    training.go_on(2, 0, 2)
    stopped.signal(signal.SIGCONT)
    training.go_on(3)
    training.compare()


def test_the_coordinators_death_costs_no_step(crew):
    """Steps go on without it, and when it is back a dead replica is noticed again."""
    lighthouse = Lighthouse(OURS, by_cli=True)
    lighthouse.start()
    training = Training(crew, lighthouse.address)
    try:
        members = [training.start(slot)[0] for slot in range(3)]
        training.go_on(3)
        lighthouse.kill()
        training.go_on(3, steps=20)
        lighthouse.start()
        training.go_on(3, steps=20)
        assert failed(*members) == []
        training.kill(1)
        training.go_on(2)
        training.compare()
    finally:
        training.end()
        lighthouse.kill()


def test_groups_of_several_workers_stay_in_step(training):
    """All ranks of a group take the same answer; a group that lost one starts again, and heals."""
    training.start(0, ranks=2)
    training.start(1, ranks=2)
    training.go_on(2)
    dead, left = training.groups.pop(1)
    dead.signal(signal.SIGKILL)
    training.go_on(1)
    with contextlib.suppress(ProcessLookupError):  # its group's own collective may have ended it
        left.signal(signal.SIGKILL)
    training.start(1, ranks=2)
    training.go_on(2)
    training.compare()
