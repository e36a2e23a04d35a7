"""Real processes under random faults: whatever happens, all replicas have the same parameters."""

import itertools
import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import ft_stage
from ft_stage import HARD, SOFT, Commit, Life, judge, schedule

LONG = os.environ.get("HPC_ELASTIC_LONG") == "1"
SEEDS = range(200) if LONG else (0, 3)


@pytest.fixture(scope="module")
def crew(tmp_path_factory):
    with ft_stage.theatre(tmp_path_factory.mktemp("stage")) as made:
        yield made


@pytest.mark.parametrize("seed", SEEDS)
def test_replicas_stay_identical(crew, seed):
    """After any faults all states are equal, each mean is right, and no live one's step is lost."""
    plan = schedule(seed)
    try:
        lives = ft_stage.Stage(crew, plan).play()
    except Exception as e:
        pytest.fail(f"{plan}\n{e}")
    wrong = ft_stage.verdict(plan, lives)
    assert not wrong, "\n".join([str(plan), *wrong])


def test_schedules_contain_every_fault():
    """Each kind of fault comes often, and so does each number of replicas."""
    plans = [schedule(seed) for seed in range(200)]
    kinds = [fault.kind for plan in plans for fault in plan.faults]
    assert min(kinds.count(kind) for kind in (*HARD, *SOFT)) > 30
    assert {plan.slots for plan in plans} == {2, 3, 4, 5}
    assert sum(plan.is_soft for plan in plans) >= 50
    assert any(plans[seed].is_soft for seed in SEEDS)


def steps(name, *states, hit=False, final=True):
    """A life whose commits lead from state to state."""
    commits = [Commit(i + 1, *pair, 2) for i, pair in enumerate(itertools.pairwise(states))]
    return Life(name, hit, commits, final=(states[-1], len(commits)) if final else None)


def test_verdict_notices_what_must_not_be():
    """Other last states, a step from two states, and lost steps of an innocent are found."""
    assert judge([steps("a", *"0123"), steps("b", *"0123")]) == []
    assert "differ" in judge([steps("a", *"0123"), steps("b", *"0124")])[0]
    assert "2 states" in judge([steps("a", *"0123"), steps("b", *"0x23")])[0]
    lost = steps("b", *"01x", final=False)
    assert "lost: [2]" in judge([steps("a", *"0123"), lost])[0]
    lost.hit = True
    assert judge([steps("a", *"0123"), lost]) == []
