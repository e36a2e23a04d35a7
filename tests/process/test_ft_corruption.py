"""Real replicas, one with a flipped bit: it is named within the next check, and heals."""

import random
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from ft.crew import Crew, Member
from ft.libraries import OURS, free_port

from hpc_elastic.ft.coordination import LighthouseServer

EVERY = 3
FLIPS = 5


class Replicas:
    """Replica groups that check their states; `groups` by slot, then rank."""

    def __init__(self, crew: Crew, num: int, *, ranks: int = 1, heals: bool = True) -> None:
        self.crew = crew
        self.lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=num)
        self.groups: list[list[Member]] = []
        for slot in range(num):
            port = free_port()
            self.groups.append([
                crew.start(
                    OURS, "train", lighthouse=self.lighthouse.address(), slot=slot, rank=rank,
                    ranks=ranks, port=port, check_every=EVERY, heals=heals,
                )
                for rank in range(ranks)
            ])  # fmt: skip
        self.go_on()

    @property
    def members(self) -> list[Member]:
        """All workers."""
        return [m for group in self.groups for m in group]

    def go_on(self, steps: int = EVERY + 1) -> None:
        """Wait until all have committed this number of further steps of all groups."""
        begun = {m.name: len(m.events) for m in self.members}

        def have() -> bool:
            for m in self.members:
                assert not m.gone, f"{m.name}: {m.error}"
            return all(
                [e["commit"][2] for e in m.events[begun[m.name] :] if "commit" in e][-steps:]
                == [len(self.groups)] * steps
                for m in self.members
            )

        self.crew.need(have, f"{steps} steps of all")

    def flip(self, slot: int, tensor: str, rng: random.Random, rank: int = 0) -> int:
        """Flip a bit; return after how many committed steps."""
        member = self.groups[slot][rank]
        known = len(found(member, "flipped"))
        member.tell({"tensor": tensor, "byte": rng.randrange(1 << 20), "bit": rng.randrange(8)})
        self.crew.need(lambda: len(found(member, "flipped")) > known, "a bit is flipped")
        return found(member, "flipped")[-1]

    def mismatches(self, rank: int = 0) -> list[set[str]]:
        """What the members of one rank have logged, in turn; all the same."""
        logs = (found(g[rank], "mismatch") for g in self.groups)
        return [set(texts) for texts in zip(*logs, strict=False)]

    def are_equal(self, rank: int = 0) -> bool:
        """Whether all have the same bits after the last step that all have committed."""
        states = [{c[0]: c[1] for c in found(g[rank], "commit")} for g in self.groups]
        last = max(set.intersection(*map(set, states)))
        return len({state[last] for state in states}) == 1

    def end(self) -> None:
        """Kill all."""
        self.crew.end(*self.members)
        self.lighthouse.shutdown()


def found(member: Member, key: str) -> list:
    return [e[key] for e in member.events if key in e]


@pytest.fixture(scope="module")
def crew(tmp_path_factory):
    made = Crew(tmp_path_factory.mktemp("crew"), "ft_flipped")
    yield made
    made.close()


@pytest.fixture
def replicas(crew):
    made: list[Replicas] = []

    def make(num: int, **options) -> Replicas:
        made.append(Replicas(crew, num, **options))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.mark.parametrize(
    "flips", [FLIPS, *(pytest.param(n * FLIPS, marks=pytest.mark.long) for n in (5, 20))]
)
def test_each_flipped_bit_is_named_and_healed(replicas, flips):
    """Within the next check, and nothing else: afterwards all have the same bits."""
    group, rng = replicas(3), random.Random(4)
    for number in range(flips):
        slot, tensor = rng.randrange(3), rng.choice(["matrix", "halves", "one"])
        step = group.flip(slot, tensor, rng)
        group.crew.need(lambda n=number: len(group.mismatches()) > n, "it is named")
        group.go_on()
        assert len(group.mismatches()) == number + 1
        (text,) = group.mismatches()[-1]
        assert re.search(
            rf"state of slot{slot}:\S+ \(host \S+, rank 0\) .* in default.{tensor}$", text
        )
        assert 0 <= int(re.match(r"step (\d+):", text)[1]) - step < EVERY + 1
        assert group.are_equal()


def test_a_rank_that_is_corrupted_heals_its_group(replicas):
    """The other rank of the group has no difference: the group heals as one."""
    group = replicas(3, ranks=2)
    group.flip(1, "matrix", random.Random(1), rank=1)
    group.crew.need(lambda: group.mismatches(1), "it is named")
    group.go_on()
    ((text,),) = group.mismatches(1)
    assert re.search(r"state of slot1:\S+ \(host \S+, rank 1\)", text)
    assert not group.mismatches(0)
    assert group.are_equal(0) and group.are_equal(1)


@pytest.mark.parametrize(
    ("num", "heals"), [(2, True), pytest.param(3, False, marks=pytest.mark.long)]
)
def test_what_is_not_healed_is_named_at_each_check(replicas, num, heals):
    """Of two it is unknown which is right: both are named. The training goes on."""
    group = replicas(num, heals=heals)
    group.flip(1, "one", random.Random(2))
    group.crew.need(lambda: len(group.mismatches()) >= 2, "it is named twice")
    for (text,) in group.mismatches():
        assert "slot1" in text and ("slot0" in text) == (num == 2), text
    group.go_on()
    assert not group.are_equal()
