"""A replica that is behind gets the state of its peers through a process group."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ft_heals import LONG, STEP, InThread, is_equal, make_state

from hpc_elastic.ft.checkpointing import HealError
from hpc_elastic.ft.checkpointing.pg_transport import PGTransport


class Pair:
    """Two gloo process groups that are each other's peers, in one process."""

    def __init__(self) -> None:
        store = dist.HashStore()
        making = [InThread(lambda r=r: self._make(store, r)) for r in range(2)]
        self.groups = [m.result() for m in making]

    def _make(self, store: dist.Store, rank: int) -> dist.ProcessGroup:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=20)
        return dist.ProcessGroupGloo(store, rank, 2, options)


@pytest.fixture
def pair() -> Pair:
    """Makes two process groups."""
    return Pair()


CPU = torch.device("cpu")


@pytest.mark.parametrize("in_place", [False, True])
def test_a_process_group_carries_a_state(pair, in_place):
    """Everything in it is equal; in place there is no second state."""
    state, own = make_state(t=(1, torch.ones(2, 3).t(), torch.empty(0))), make_state(0.0)
    a = PGTransport(pair.groups[0], LONG, CPU)
    b = PGTransport(pair.groups[1], LONG, CPU, (lambda: own) if in_place else None)
    sending = InThread(lambda: a.send_checkpoint([1], STEP, state, LONG))
    got = b.recv_checkpoint(0, a.metadata(), STEP, LONG)
    sending.result()
    a.disallow_checkpoint()
    assert is_equal(got, state)
    assert got["t"][1].equal(torch.ones(3, 2))
    assert is_equal(got, own) == in_place


def test_a_process_group_refuses_another_step(pair):
    """The error names both steps."""
    a, b = (PGTransport(group, LONG, CPU) for group in pair.groups)
    sending = InThread(lambda: a.send_checkpoint([1], 4, {"a": 1}, LONG))
    with pytest.raises(HealError, match=f"sends step 4, not {STEP}"):
        b.recv_checkpoint(0, a.metadata(), STEP, LONG)
    sending.result()


def test_a_process_group_whose_peer_is_silent_names_it(pair):
    """Time is up."""
    b = PGTransport(pair.groups[1], LONG, CPU)
    with pytest.raises(HealError, match="replica 0 did not send its state"):
        b.recv_checkpoint(0, "<n/a>", STEP, timedelta(seconds=0.2))
