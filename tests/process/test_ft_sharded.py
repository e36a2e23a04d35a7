"""Replica groups of two ranks with a sharded model: a fresh group heals while the other trains."""

import re
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from ft.crew import Crew
from ft.libraries import OURS, free_port

from hpc_elastic.ft.coordination import LighthouseServer

PATIENCE_S = 30.0
RANKS = (0, 1)


@pytest.fixture(scope="module")
def crew(tmp_path_factory):
    made = Crew(tmp_path_factory.mktemp("crew"), "ft_sharded_faults")
    yield made
    made.close()


@pytest.fixture
def start(crew):
    """Start a group of one training."""
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    started = []

    def start(slot, **arguments):
        port = free_port()
        group = [
            crew.start(
                OURS, "train", lighthouse=lighthouse.address(), slot=slot, rank=rank, port=port,
                **arguments,
            )
            for rank in RANKS
        ]  # fmt: skip
        started.extend(group)
        return group

    yield start
    crew.end(*started)
    lighthouse.shutdown()


def commits(member):
    """Step, hash and number of participants of each committed step."""
    return [e["commit"] for e in member.events if "commit" in e]


def failed(group):
    """What its ranks sent of steps that were not committed."""
    return [[e["failed"] for e in m.events if "failed" in e] for m in group]


def need_steps(crew, group, participants, steps):
    """Wait until all ranks of a group have committed steps with this number of participants."""

    def is_done():
        for m in group:
            assert not m.gone, f"{m.name} has ended: {m.error}"
        return all(sum(c[2] == participants for c in commits(m)) >= steps for m in group)

    crew.need(is_done, f"{steps} steps of {participants}", PATIENCE_S)


def assert_equal(old, new):
    """Check that the steps that both have committed, 25 at least, made the same states."""
    states = {step: state for step, state, _ in old}
    common = [c for c in new if c[0] in states]
    assert len(common) >= 25
    assert [c[:2] for c in common] == [[c[0], states[c[0]]] for c in common]


CASES = [
    pytest.param("fsdp", True, "", marks=pytest.mark.long),
    ("fsdp x tp", False, "http"),
    ("fsdp", False, "pg"),
    *(
        pytest.param(model, sync, "", marks=pytest.mark.long)
        for model, sync in (
            ("fsdp", False), ("fsdp x tp", True), ("fsdp x tp", False), ("cpu offload", True),
            ("cpu offload", False), ("hsdp", False), ("mixed precision", False),
            ("shared and frozen", False), ("compiled", False),
        )
    ),
]  # fmt: skip


CATCH_UP_CASES = [
    ("fsdp x tp", True),
    pytest.param("shared and frozen", False, marks=pytest.mark.long),
    *(
        pytest.param(model, False, marks=pytest.mark.long)
        for model in ("fsdp", "cpu offload", "hsdp", "mixed precision", "compiled")
    ),
]


@pytest.mark.parametrize(("model", "sync", "transport"), CASES)
def test_a_fresh_sharded_replica_heals(crew, start, model, sync, transport):
    """It has other weights, and no state of the optimizer; the survivor fails one step at most."""
    arguments = {"model": model, "sync": sync, "transport": transport}
    survivor = start(0, **arguments)
    need_steps(crew, survivor, 1, 3)
    newcomer = start(1, **arguments)
    for group in (newcomer, survivor):
        need_steps(crew, group, 2, 30)
    assert all(len(steps) <= 1 for steps in failed(survivor)), failed(survivor)
    for old, new in zip(survivor, newcomer, strict=True):
        assert_equal(commits(old), commits(new))


@pytest.mark.parametrize(("model", "sync"), CATCH_UP_CASES)
def test_a_fresh_sharded_replica_catches_up_beside_the_training(crew, start, model, sync):
    """Over several steps, none of which fails; then its state is the survivor's, bit by bit."""
    arguments = {"model": model, "sync": sync, "catches_up": True}
    survivor = start(0, **arguments)
    need_steps(crew, survivor, 1, 3)
    newcomer = start(1, **arguments)
    for group in (newcomer, survivor):
        need_steps(crew, group, 2, 30)
    assert failed(survivor) == failed(newcomer) == [[], []]
    assert not any("cannot catch up" in m.log.read_text() for m in newcomer)
    for old, new in zip(survivor, newcomer, strict=True):
        alone = [c for c in commits(new) if c[2] == 1]
        assert len(alone) >= 3  # it adds zero until it has caught up
        assert_equal(commits(old), [c for c in commits(new) if c[2] == 2])


@pytest.mark.long
def test_a_source_is_lost_while_a_replica_catches_up(crew, start):
    """It goes on with what it has if the others have not made a step since, or begins again."""
    arguments = {"model": "fsdp", "catches_up": True}
    groups = [start(slot, **arguments) for slot in (0, 1)]
    for group in groups:
        need_steps(crew, group, 2, 3)
    newcomer = start(2, **arguments)
    need_steps(crew, newcomer, 2, 2)  # with the zeros that it adds
    for member in groups[0]:
        member.signal(signal.SIGKILL)
    survivor = groups[1]
    for group in (newcomer, survivor):
        need_steps(crew, group, 2, len(commits(survivor[0])) + 30)
    assert all(len(steps) <= 1 for steps in failed(survivor)), failed(survivor)
    for old, new in zip(survivor, newcomer, strict=True):
        states = {step: state for step, state, _ in commits(old)}
        last = commits(new)[-20:]
        assert [c[:2] for c in last] == [[c[0], states[c[0]]] for c in last]


def test_all_sources_are_lost_while_a_replica_catches_up(crew, start):
    """It does not go on with the parts of a state: it ends, with the remedy."""
    survivor = start(0, model="fsdp", catches_up=True)
    need_steps(crew, survivor, 1, 3)
    newcomer = start(1, model="fsdp", catches_up=True)
    need_steps(crew, newcomer, 1, 2)
    for member in survivor:
        member.signal(signal.SIGKILL)
    crew.need(lambda: all(m.gone for m in newcomer), "the newcomer's end", PATIENCE_S)
    assert all("start again from a checkpoint" in m.error for m in newcomer)


def test_a_replica_on_two_hosts_joins_and_is_lost(crew, start):
    """Without a run: a relay on the second host. The survivor fails one step for each change."""
    survivor = start(0)
    need_steps(crew, survivor, 1, 3)
    newcomer = start(1, hosts="first second")
    for group in (newcomer, survivor):
        need_steps(crew, group, 2, 10)
    states = {step: state for step, state, _ in commits(survivor[1])}
    assert any(states.get(step) == state for step, state, _ in commits(newcomer[1]))
    newcomer[1].signal(signal.SIGKILL)
    need_steps(crew, survivor, 1, len(commits(survivor[0])) + 10)
    assert all(len(steps) <= 2 for steps in failed(survivor)), failed(survivor)


@pytest.mark.parametrize(
    ("survivor_has", "newcomer_has", "error"),
    [
        ({}, {"fault": "key"}, "KeyError: 'nothing'"),
        pytest.param(
            {},
            {"fault": "type"},
            "UnusableStateError.*state: /user/default/extra",
            marks=pytest.mark.long,
        ),
        ({"fault": "type"}, {}, "UnusableStateError.*state: /user/default/extra"),
        pytest.param(
            {"fault": "type", "catches_up": True},
            {"catches_up": True},
            "UnusableStateError.*state: /user/default/extra",
            marks=pytest.mark.long,
        ),
        ({}, {"model": "hsdp"}, "UnusableStateError.*states are not resharded"),
    ],
    ids=["a key is missing", "own type", "type at the peer", "beside", "another mesh"],
)
def test_an_error_that_stays_ends_the_fresh_replica(crew, start, survivor_has, newcomer_has, error):
    """Its peers go on without it, and lose two steps at most."""
    survivor = start(0, **survivor_has)
    need_steps(crew, survivor, 1, 3)
    newcomer = start(1, **newcomer_has)
    crew.need(lambda: any(m.gone for m in newcomer), "the newcomer's end", PATIENCE_S)
    gone_at = time.monotonic()
    need_steps(crew, survivor, 1, len(commits(survivor[0])) + 20)
    assert time.monotonic() - gone_at < 10
    assert all(len(steps) <= 2 for steps in failed(survivor)), failed(survivor)
    errors = [m.error for m in newcomer if m.error]
    assert re.search(error, "\n".join(errors), re.DOTALL), errors
