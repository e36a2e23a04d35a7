"""ProcessGroupNCCL: abort and configure again in one process. Needs GPUs, and skips without."""

from collections.abc import Iterator
from datetime import timedelta

import ft_members
import pytest
import torch
import torch.distributed as dist
from ft_members import members, together

from hpc_elastic.errors import ConfigError

needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not dist.is_nccl_available(),
    reason=f"NCCL between two processes needs two GPUs; here are {torch.cuda.device_count()}",
)


@pytest.fixture
def address() -> Iterator[str]:
    with ft_members.store() as found:
        yield found


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_without_nccl():
    """Where torch has no NCCL, the error says so, and what to use instead."""
    from hpc_elastic.ft.process_group import ProcessGroupNCCL

    with pytest.raises(ConfigError, match="use ProcessGroupGloo"):
        ProcessGroupNCCL()


def configure_nccl(group, rank: int, address: str, size: int, quorum: int) -> str:
    from hpc_elastic.ft.process_group import ProcessGroupNCCL

    torch.cuda.set_device(rank % torch.cuda.device_count())
    if not hasattr(group, "nccl"):
        group.nccl = ProcessGroupNCCL(timedelta(seconds=20))
    group.nccl.configure(f"{address}/nccl/{quorum}", f"replica_{rank}", rank, size, quorum)
    return "configured"


def total(group, number: float) -> float:
    tensor = torch.tensor([number], device="cuda")
    group.nccl.allreduce([tensor]).wait()
    assert group.nccl.errored() is None
    return tensor.item()


def begin_alone(group) -> None:
    group.work = group.nccl.allreduce([torch.ones(1000, device="cuda")])


def abort(group) -> str:
    group.nccl.abort(why="a peer was lost")
    return repr(group.nccl.errored())


def late(group) -> str:
    group.nccl.set_timeout(timedelta(seconds=1))
    group.nccl.allreduce([torch.ones(1000, device="cuda")])
    return repr(group.nccl.errored())


@needs_two_gpus
def test_abort_and_configure_again(address):
    """A collective that can not end is aborted, and the same objects form the next group."""
    with members(2) as them:
        together(them, configure_nccl, address, 2, 1, ranked=True)
        assert together(them, total, 1.0) == [2.0] * 2
        them[0].do(begin_alone)
        assert all("a peer was lost" in error for error in together(them, abort))
        together(them, configure_nccl, address, 2, 2, ranked=True)
        assert together(them, total, 1.0) == [2.0] * 2


@needs_two_gpus
def test_a_missed_deadline_aborts(address):
    """An operation that misses its time-out aborts the group, and errored names it."""
    with members(2) as them:
        together(them, configure_nccl, address, 2, 1, ranked=True)
        assert "allreduce timed out after 1 s" in them[0].do(late)
