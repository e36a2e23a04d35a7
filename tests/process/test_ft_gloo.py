"""ProcessGroupGloo between real processes, which are stopped, killed and configured again."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import ft_members
import pytest
import torch
from ft_members import Member, configure, members, together

from hpc_elastic.ft.process_group import sum_quantized

BIG = 4_000_000
SOON_S = 5.0  # against the time-out of 30 s; it takes milliseconds


@pytest.fixture
def address() -> Iterator[str]:
    with ft_members.store() as found:
        yield found


def total(group, number: float) -> float:
    tensor = torch.tensor([number])
    group.allreduce([tensor]).wait()
    return tensor.item()


def begin_big(group) -> None:
    """Begin a collective that can not end, and keep its tensor."""
    group.tensor = torch.ones(BIG)
    group.work = group.allreduce([group.tensor])


def wait_big(group) -> str:
    group.work.wait()
    return "succeeded"


def abort(group) -> float:
    """Abort; return how long that took."""
    begun = time.monotonic()
    group.abort(why="a peer was lost")
    group.kept = group.tensor.clone() if hasattr(group, "tensor") else None
    return time.monotonic() - begun


def is_unchanged(group) -> bool:
    return torch.equal(group.tensor, group.kept)


def error_of(group) -> str:
    return repr(group.errored())


def broken_beside(them: list[Member], lost: Member) -> list[str]:
    """Begin a collective without one member; abort it on the others; return how it failed."""
    others = [m for m in them if m is not lost]
    together(others, begin_big)
    waits = [m.begin(wait_big) for m in others]
    assert all(seconds < SOON_S for seconds in together(others, abort))
    return [wait() for wait in waits]


def test_members_reduce_and_meet_again_as_others(address):
    """The same objects, in the same processes, form one group after another."""
    with members(3) as them:
        assert together(them, configure, address, 3, 1, ranked=True) == ["configured"] * 3
        assert together(them, total, 2.0) == [6.0] * 3
        fewer = [them[2], them[0]]
        assert together(fewer, configure, address, 2, 2, ranked=True) == ["configured"] * 2
        assert together(fewer, total, 2.0) == [4.0] * 2
        assert together(fewer, error_of) == ["None"] * 2


def test_stopped_peer(address):
    """Beside a stopped peer every survivor's collective fails on abort; no byte is written then."""
    with members(4) as them:
        together(them, configure, address, 4, 1, ranked=True)
        them[2].stop()
        survivors = [them[0], them[1], them[3]]
        try:
            failed = broken_beside(them, them[2])
            assert all("Error" in text for text in failed), failed
            assert all("a peer was lost" in text for text in together(survivors, error_of))
            together(survivors, configure, address, 3, 2, ranked=True)
            assert together(survivors, total, 1.0) == [3.0] * 3
        finally:
            them[2].go_on()
        assert "Error" in (them[2].do(total, 1.0))  # it sees that its group is over
        assert together(survivors, is_unchanged) == [True] * 3


def test_killed_peer(address):
    """After a peer's death the survivors, its ring neighbours or not, meet again in place."""
    with members(4) as them:
        together(them, configure, address, 4, 1, ranked=True)
        them[1].kill()
        failed = broken_beside(them, them[1])
        assert all("Error" in text for text in failed), failed
        survivors = [them[0], them[2], them[3]]
        together(survivors, configure, address, 3, 2, ranked=True)
        assert together(survivors, total, 1.0) == [3.0] * 3


def test_abort_while_configuring(address):
    """Abort releases a configure that waits for a member at once, and a later one succeeds."""
    with members(2) as them:
        waiting = them[0].begin(configure, 0, address, 2, 1)
        while them[0].do(is_configuring) is not True:
            pass
        assert them[0].do(abort) < SOON_S
        assert waiting().startswith("AbortedError") and "a peer was lost" in them[0].do(error_of)
        together(them, configure, address, 2, 2, ranked=True)
        assert together(them, total, 1.0) == [2.0] * 2


def is_configuring(group) -> bool:
    return group._task is not None


def test_absent_member_is_named(address):
    """A time-out of configure names who has not come, the quorum and the store."""
    with members(1) as (one,):
        one.do(configure, 0, address, 1, 6)
        one.do(set_timeout, 2.0)
        text = one.do(configure, 0, address, 3, 7)
    assert text.startswith("CollectiveTimeoutError")
    for part in ("ranks 1, 2", "quorum 7", f"{address}/q/7", "2 s"):
        assert part in text


def set_timeout(group, seconds: float) -> None:
    group.set_timeout(timedelta(seconds=seconds))


def test_peer_stopped_while_connecting(address):
    """A peer that stops between its announcement and its connection is not waited for either."""
    with members(3) as them:
        them[0].begin(configure_and_stop, address)
        waiting = them[1].begin(configure, 1, address, 2, 1)
        wait_until_stopped(them[0])
        assert them[1].do(abort) < SOON_S
        # Which of two listens is chance; the other one is connected before the first knows of it.
        assert waiting().partition(":")[0] in ("AbortedError", "configured")
        others = them[1:]
        together(others, configure, address, 2, 2, ranked=True)
        assert together(others, total, 1.0) == [2.0] * 2


def configure_and_stop(group, address: str) -> None:
    from hpc_elastic.ft import reconfigurable

    get = reconfigurable.AbortableStore.get

    def get_and_stop(self: reconfigurable.AbortableStore, key: str) -> bytes:
        value = get(self, key)
        if key.endswith("1"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return value

    reconfigurable.AbortableStore.get = get_and_stop  # type: ignore[method-assign]
    configure(group, 0, address, 2, 1)


def wait_until_stopped(member: Member) -> None:
    until = time.monotonic() + 30
    with open(f"/proc/{member.pid}/stat") as stat:  # noqa: PTH123
        while ") T " not in stat.read():
            assert time.monotonic() < until
            time.sleep(0.005)
            stat.seek(0)


def test_timeout_is_named(address):
    """An operation's time-out names the operation, the group and the seconds."""
    with members(2) as them:
        together(them, configure, address, 2, 5, ranked=True)
        them[0].do(set_timeout, 0.3)
        text = them[0].do(total, 1.0)
    assert text.startswith("CollectiveTimeoutError: allreduce timed out after 0.3 s")
    assert "quorum 5" in text


def test_nothing_leaks(address):
    """Configured again and again, a process keeps its descriptors and threads."""
    with members(2) as them:
        together(them, churn, address, 100, 10, ranked=True)
        before = together(them, count)
        together(them, churn, address, 200, 60, ranked=True)
        after = together(them, count)
    assert all(now < then + 5 for now, then in zip(after, before, strict=True)), (before, after)


def churn(group, rank: int, address: str, start: int, times: int) -> None:
    for quorum in range(start, start + times):
        configure(group, rank, address, 2, quorum)
        total(group, 1.0)
        if quorum % 3 == 0:
            group.abort(why="of a test")


def count(group) -> int:
    """Count descriptors and threads, once those that end have ended."""
    group.abort(why="of a test")
    until = time.monotonic() + 10
    while any(t.name.startswith("hpc-elastic-ft") for t in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))  # noqa: PTH208


def test_other_connections_stay(address):
    """An abort cuts the group's own connections only."""
    with members(2) as them:
        together(them, configure, address, 2, 1, ranked=True)
        assert together(them, abort_beside_a_connection) == [b"hello"] * 2


def abort_beside_a_connection(group) -> bytes:
    one, other = ft_members.connected_pair()
    with one, other:
        group.abort()
        one.sendall(b"hello")
        return other.recv(5)


def test_abort_in_a_callback(address):
    """A callback, which runs on gloo's own thread, may abort the group that calls it."""
    with members(2) as them:
        together(them, configure, address, 2, 1, ranked=True)
        assert together(them, abort_in_callback) == ["aborted"] * 2
        together(them, configure, address, 2, 2, ranked=True)
        assert together(them, total, 1.0) == [2.0] * 2


def abort_in_callback(group) -> str:
    aborted = threading.Event()

    def callback(future: torch.futures.Future) -> None:
        group.abort()
        aborted.set()

    work = group.allreduce([torch.ones(BIG)])
    work.get_future().then(callback)
    assert aborted.wait(30)
    return "aborted"


def test_nothing_is_written_after_abort(address):
    """Aborted at any moment of busy collectives, no tensor changes once abort has returned."""
    with members(3) as them:
        for quorum in range(1, 5):
            together(them, configure, address, 3, quorum, ranked=True)
            changed = together(them, abort_amid, quorum)
            assert changed == [False] * 3


def abort_amid(group, quorum: int) -> bool:
    """Abort after some of many collectives; tell whether a tensor changed after that."""
    tensors = [torch.full((BIG // 4,), 1.0) for _ in range(8)]
    works = [group.allreduce([tensor]) for tensor in tensors]
    with contextlib.suppress(RuntimeError):  # another one was faster
        works[quorum % 4].wait()
    group.abort(why="of a test")
    kept = [tensor.clone() for tensor in tensors]
    for work in works:
        with contextlib.suppress(RuntimeError):
            work.wait()
    return not all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))


def test_registered_group_serves_functional_collectives(address):
    """A registered group works with torch.distributed's functions, also after a new quorum."""
    with members(1) as (one,):
        for quorum in (1, 2):
            one.do(configure, 0, address, 1, quorum)
            assert one.do(reduce_by_name) == (1.0, 1.0)


def test_a_time_out_of_zero_is_none(address):
    """torch's C++ code waits with a time-out of 0, by which it means none: a peer may be late."""
    with members(2) as them:
        together(them, configure, address, 2, 1, ranked=True)
        early = them[0].begin(total_by_zero, 1.0)
        while not them[0].do(is_waiting):
            pass
        assert them[1].do(total, 2.0) == 3.0
        assert early() == 3.0


def total_by_zero(group, number: float) -> float:
    tensor = torch.tensor([number])
    work = group.allreduce([tensor])
    group.waits_since = time.monotonic()
    work.wait(timedelta(0))
    return tensor.item()


def is_waiting(group) -> bool:
    return time.monotonic() - getattr(group, "waits_since", float("inf")) > 0.3


def reduce_by_name(group) -> tuple[float, float]:
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert group.register("replicas") is group
    one = torch.ones(1)
    dist.all_reduce(one, group=group)
    return one.item(), functional.all_reduce(torch.ones(1), "sum", group).item()


def sum_in_8_bits(group, rank, size):
    """Sum a tensor that differs by member; return the sum and its largest error."""
    values = [torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    mine = values[rank].clone()
    sum_quantized(group, mine).wait()
    return mine.tolist(), float((mine - torch.stack(values).sum(dim=0)).abs().max())


def test_members_sum_8_bit_integers(address):
    """All get the same sum, bit by bit; the error is within its bound; a lost peer is an error."""
    with members(3) as them:
        together(them, configure, address, 3, 1, ranked=True)
        found = together(them, sum_in_8_bits, 3, ranked=True)
        assert found[0] == found[1] == found[2]
        assert 0 < found[0][1] < 3 * 5 / 254
        them[2].kill()
        assert all("Error" in text for text in together(them[:2], sum_in_8_bits, 3, ranked=True))
