"""What stands around the Manager: DDP, optimizer, sampler, and the package's names."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import hpc_elastic.ft
from ft_fakes import make, place
from hpc_elastic.ft import (
    DistributedDataParallel,
    DistributedSampler,
    Optimizer,
    PureDistributedDataParallel,
)

TORCHFT_NAMES = {
    "DistributedDataParallel",
    "DistributedSampler",
    "Manager",
    "Optimizer",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
}


@pytest.mark.parametrize("wrap", [DistributedDataParallel, PureDistributedDataParallel])
def test_gradients_become_the_mean(monkeypatch, wrap):
    """Of two contributors, the other of which adds 5 everywhere."""
    made = make(monkeypatch, place())
    made.group.others = 5.0
    model = nn.Linear(2, 1, bias=False)
    wrapped = wrap(made.manager, model)
    optimizer = Optimizer(made.manager, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    wrapped(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 3.0)
    assert made.manager.current_step() == 1


def test_a_failed_step_changes_no_parameter(monkeypatch):
    """The optimizer is not stepped, though gradients are there."""
    made = make(monkeypatch, place())
    model = nn.Linear(2, 1)
    wrapped = DistributedDataParallel(made.manager, model)
    optimizer = Optimizer(made.manager, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    wrapped(torch.ones(1, 2)).sum().backward()
    made.manager.report_error(ValueError("bad batch"))
    optimizer.step()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("name", "value"),
    [("find_unused_parameters", False), ("static_graph", True), ("process_group", object())],
)
def test_what_would_change_the_buckets_is_refused(monkeypatch, name, value):
    """A replica that joins later would have others."""
    made = make(monkeypatch)
    with pytest.raises(ValueError, match=name):
        DistributedDataParallel(made.manager, nn.Linear(2, 1), **{name: value})


def test_a_scheduler_takes_the_wrapper(monkeypatch):
    """It changes the wrapped optimizer's rate."""
    made = make(monkeypatch, place())
    inner = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=1.0)
    optimizer = Optimizer(made.manager, inner)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.zero_grad()
    optimizer.step()
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.5
    assert optimizer.state_dict() == inner.state_dict()


def test_a_closure_is_refused(monkeypatch):
    """It would run the collectives again."""
    made = make(monkeypatch, place())
    inner = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=1.0)
    with pytest.raises(ValueError, match="closure"):
        Optimizer(made.manager, inner).step(lambda: 0.0)


def test_shares_of_the_sampler_are_disjoint_and_cover_all():
    """Two groups of two workers each."""
    samplers = [
        DistributedSampler(range(12), replica, 2, group_rank=rank, num_replicas=2, shuffle=False)
        for replica in range(2)
        for rank in range(2)
    ]
    assert sorted(i for sampler in samplers for i in sampler) == list(range(12))
    assert [s.global_rank for s in samplers] == [0, 1, 2, 3]


def test_torchfts_names_are_there():
    """And all that the package lists can be had."""
    assert set(hpc_elastic.ft.__all__) >= TORCHFT_NAMES
    homes = ("hpc_elastic.ft", "hpc_elastic.islands")
    for name in hpc_elastic.ft.__all__:
        assert getattr(hpc_elastic.ft, name).__module__.startswith(homes)
    with pytest.raises(AttributeError, match="nothing"):
        hpc_elastic.ft.nothing  # noqa: B018


def test_the_package_itself_needs_no_torch():
    """The command line imports it on a login node."""
    code = "import sys, hpc_elastic.ft; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
