"""Islands as real processes on a real folder: deaths, late ones, damage, and groups of ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from group import eventually
from island import model_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft import (
    DivergedIslandError,
    IslandDiLoCo,
    IslandTimeoutError,
    RoundPolicy,
    load_global_parameters,
)
from hpc_elastic.islands.outer_round import OuterRound, contribution_name, last_index, round_name
from hpc_elastic.shared_files import names_in

SCRIPT = Path(__file__).with_name("island.py")
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
QUICK = RoundPolicy(grace_s=0.2, turn_s=0.1)


@pytest.fixture
def launch():
    """Start islands as processes, and end them after the test."""
    started = []

    def start(folder, name, seconds, *, step_s=0.002, sync_every=20, quantize=False):
        argv = [folder, name, seconds, step_s, sync_every, int(quantize)]
        process = subprocess.Popen(
            [sys.executable, SCRIPT, *map(str, argv)],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def report_of(folder, name):
    """Return what an island has written at its end."""
    return json.loads((folder / f"report.{name}.json").read_text())


def newest(folder, fragment=0):
    """Return the newest round of a fragment."""
    path = folder / str(fragment)
    return OuterRound.decode((path / round_name(last_index(names_in(path)))).read_text())


def wait_for_round(folder, index, timeout_s=60):
    """Wait until a round is closed."""
    eventually(lambda: last_index(names_in(folder / "0")) >= index, timeout_s)


def parameters_of(folder):
    """Return the newest global parameters as one vector."""
    model = model_of("reader")
    load_global_parameters(folder, list(model))
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.long
@pytest.mark.parametrize("quantize", [True, False])
def test_islands_that_are_killed_and_start_again_lose_no_contribution(tmp_path, launch, quantize):
    """Killed at any moment, in the middle of a file too; one joins late; all learn one model."""
    a = launch(tmp_path, "a", 8, quantize=quantize)
    for i in range(3):
        b = launch(tmp_path, "b", 100, sync_every=2, step_s=0, quantize=quantize)
        assert b.stdout.readline().startswith("started")
        wait_for_round(tmp_path, last_index(names_in(tmp_path / "0")) + 2)
        time.sleep(0.013 * i)
        b.send_signal(signal.SIGKILL)
        b.wait()
    late = launch(tmp_path, "late", 2, quantize=quantize)
    assert int(late.stdout.readline().split()[1]) > 3
    assert (late.wait(60), a.wait(60)) == (0, 0)
    reports = [report_of(tmp_path, name) for name in ("a", "late")]
    assert reports[0]["losses"][1] < reports[0]["losses"][0] / 4
    found = newest(tmp_path)
    assert found.settled.keys() == {"a", "b", "late"}
    assert found.tokens >= sum(r["steps"] for r in reports)
    first, second = parameters_of(tmp_path), parameters_of(tmp_path)
    assert torch.equal(first, second)
    assert bool(torch.isfinite(first).all())


@pytest.mark.long
def test_islands_that_never_run_at_the_same_time_train_one_model(tmp_path, launch):
    """Each goes on from what the others have left, and counts what they had published."""
    for name in ("a", "b", "a"):
        assert launch(tmp_path, name, 1).wait(60) == 0
    total = newest(tmp_path)
    assert set(total.last_rounds) == {"a", "b"}
    assert report_of(tmp_path, "a")["losses"][0] < 0.6


@pytest.mark.long
def test_a_paused_island_holds_no_other_up(tmp_path, launch):
    """Its late contribution counts once it goes on."""
    a = launch(tmp_path, "a", 7)
    b = launch(tmp_path, "b", 5)
    assert b.stdout.readline() and a.stdout.readline()
    wait_for_round(tmp_path, 4)
    b.send_signal(signal.SIGSTOP)
    before = last_index(names_in(tmp_path / "0"))
    wait_for_round(tmp_path, before + 3)
    b.send_signal(signal.SIGCONT)
    assert (a.wait(60), b.wait(60)) == (0, 0)
    steps = sum(report_of(tmp_path, name)["steps"] for name in "ab")
    assert newest(tmp_path).tokens == newest(tmp_path, 1).tokens == steps


def train(islands, model, inner, num_steps, seed=0):
    """Make inner steps on data of a seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        x = torch.randn(16, 64, generator=generator)
        inner.zero_grad()
        (model(x) - x[:, :4]).square().mean().backward()
        inner.step()


def alone(folder, name="a", **options):
    """Return an island, its model and its inner optimizer."""
    model = model_of(name)
    inner = torch.optim.SGD(model.parameters(), 0.02)
    options = {"policy": QUICK, "poll_s": 0.02, **options}
    return IslandDiLoCo(folder, name, [model], inner, OUTER, 5, **options), model, inner


def test_a_lone_island_does_what_diloco_does(tmp_path):
    """The outer optimizer steps by the whole movement since the last round."""
    islands, model, inner = alone(tmp_path)
    expected = model_of("a")
    outer = OUTER(list(expected.parameters()))
    with islands:
        for seed in range(3):
            train(islands, model, inner, 5, seed)
            ends = time.monotonic() + 20
            while islands.round < seed + 2 and time.monotonic() < ends:
                time.sleep(0.02)
                islands._fragments[0].synchronize(is_due=False)
            trained = model_of("a")
            trained.load_state_dict(expected.state_dict())
            sgd = torch.optim.SGD(trained.parameters(), 0.02)
            train(None, trained, sgd, 5, seed)
            for p, q in zip(expected.parameters(), trained.parameters(), strict=True):
                p.grad = p.detach() - q.detach()
            outer.step()
        islands.finish(20)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_damaged_contribution_is_discarded_and_a_damaged_state_passed_over(tmp_path):
    """The checksums find one flipped byte; the training goes on from the round before."""
    islands, model, inner = alone(tmp_path, policy=RoundPolicy(quorum=2))
    with islands:
        train(islands, model, inner, 5)
    path = tmp_path / "0" / contribution_name("a", 1)
    flip_byte(path)
    second, model, inner = alone(tmp_path, "b")
    with second:
        train(second, model, inner, 10)
        second.finish(20)
    found = newest(tmp_path)
    assert (found.settled["a"], found.tokens) == (1, 10)
    flip_byte(tmp_path / "0" / found.state)
    third, model, inner = alone(tmp_path, "c")
    with third:
        assert third.round == found.index - 1
        train(third, model, inner, 5)
        third.finish(20)
    assert newest(tmp_path).index == found.index + 1


def flip_byte(path):
    """Change one byte of a file's parameters."""
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def test_an_island_that_has_diverged_ends_and_harms_no_other(tmp_path):
    """Its error names it; nothing that is not finite is published."""
    islands, model, inner = alone(tmp_path)
    with pytest.raises(DivergedIslandError, match="island a"), islands:
        train(islands, model, inner, 3)
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))
        for _ in range(500):
            train(islands, model, inner, 1)
            time.sleep(0.01)
    assert bool(torch.isfinite(parameters_of_one(tmp_path)).all())


def parameters_of_one(folder):
    """Return the global parameters of a model of one fragment."""
    model = model_of("reader")
    load_global_parameters(folder, [model])
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_a_folder_of_another_model_is_refused(tmp_path):
    """Before a step is made."""
    with alone(tmp_path)[0]:
        pass
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    other = IslandDiLoCo(tmp_path, "b", [model], inner, OUTER, 5)
    with pytest.raises(ConfigError, match="another model"), other:
        pass


def test_what_lacks_a_quorum_stays_in_the_folder_and_counts_later(tmp_path):
    """The time-out names it; the training itself never waited."""
    policy = RoundPolicy(quorum=2, grace_s=0.1, max_open=2)
    islands, model, inner = alone(tmp_path, policy=policy)
    with pytest.raises(IslandTimeoutError, match="contribution 1"), islands:
        train(islands, model, inner, 50)
        islands.finish(1)
    second, model, inner = alone(tmp_path, "b", policy=policy)
    with second:
        train(second, model, inner, 5)
        second.finish(20)
    assert newest(tmp_path).tokens == 55


def island_of_ranks(rank, folder, shards):
    """Train one island of two ranks beside nothing else; return its parameters."""
    model = model_of("a" if rank == 0 else "other")
    group = dist.group.WORLD
    if shards:
        mesh = init_device_mesh("cpu", (2,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    inner = torch.optim.SGD(model.parameters(), 0.02)
    with IslandDiLoCo(
        folder, "a", [model], inner, OUTER, 5, policy=QUICK, poll_s=0.02, group=group
    ) as islands:
        while islands.round < 4:
            train(islands, model, inner, 1, seed=rank if shards else 0)
            time.sleep(0.005)
        islands.finish(30)
        tokens = islands.tokens
    full = [p.full_tensor() if shards else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in full]).tolist(), tokens


@pytest.mark.parametrize("shards", [False, True])
def test_an_island_of_several_ranks_adopts_a_round_at_one_step(tmp_path, shards):
    """Replicated or sharded: all ranks end with the global parameters."""
    (first, tokens), (second, same) = run_ranks(island_of_ranks, 2, tmp_path, shards)
    assert first == second == parameters_of_one(tmp_path).tolist()
    assert tokens == same >= 15
