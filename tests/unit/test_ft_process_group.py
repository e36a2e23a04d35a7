"""Process groups in one process: those that imitate and wrap, and what they build on in torch."""

import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceOp

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft import gloo, reconfigurable
from hpc_elastic.ft.nccl import WorkWatch
from hpc_elastic.ft.process_group import (
    AbortedError,
    CollectiveTimeoutError,
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ManagedProcessGroup,
    NotConfiguredError,
    ProcessGroupDummy,
    ProcessGroupError,
    ProcessGroupGloo,
    named,
)
from hpc_elastic.ft.reconfigurable import CancellableTask


class Broken(ProcessGroupDummy):
    """Every operation fails."""

    def _call(self, name, *args, **kwargs):
        raise RuntimeError(f"{name} failed")


def test_dummy_copies_what_one_member_would():
    """The dummy group gathers and scatters its own tensor, and is done at once."""
    group = ProcessGroupDummy(0, 1)
    gathered, parts = torch.zeros(2), torch.zeros(2)
    group.allgather([[gathered]], [torch.ones(2)], None).wait()
    work = group._reduce_scatter_base(parts, torch.full((2,), 3.0))
    assert work.wait() and torch.equal(work.get_future().wait(), torch.full((2,), 3.0))
    assert gathered.tolist() == [1.0, 1.0] and (group.size(), group.rank()) == (1, 0)
    group.configure("host:1/x", "r", 0, 1)
    assert group.configure_count == 1 and group.errored() is None


def test_dummy_is_alone():
    """The dummy group refuses to be one of several."""
    with pytest.raises(ValueError, match="world=2"):
        ProcessGroupDummy(0, 2)


def test_errors_are_swallowed_until_configured_again():
    """After an error operations seem to succeed, and do nothing, until the next configure."""
    group = ErrorSwallowingProcessGroupWrapper(Broken(0, 1))
    tensor = torch.ones(2)
    assert group.allreduce([tensor]).wait()
    assert "allreduce failed" in str(group.error())
    assert group.broadcast_one(tensor, 0).wait() and tensor.tolist() == [1.0, 1.0]
    group.configure("host:1/x", "r", 0, 1)
    assert group.error() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_planted_error():
    """A planted error fails one operation, in its future and its wait, and is swallowed above."""
    fake = FakeProcessGroupWrapper(ProcessGroupDummy(0, 1))
    fake.report_future_error(RuntimeError("planted"))
    work = fake.allreduce([torch.ones(1)])
    with pytest.raises(RuntimeError, match="planted"):
        work.get_future().wait()
    with pytest.raises(RuntimeError, match="planted"):
        work.wait()
    assert fake.allreduce([torch.ones(1)]).wait()
    swallowing = ErrorSwallowingProcessGroupWrapper(fake)
    fake.report_future_error(RuntimeError("planted"))
    swallowing.allreduce([torch.ones(1)]).get_future().wait()
    assert "planted" in str(swallowing.error())


def test_managed_group_asks_its_manager():
    """A managed group reduces through the Manager, and is as large as its contributors."""
    asked = []
    manager = SimpleNamespace(
        _pg=ProcessGroupDummy(0, 1),
        allreduce=lambda tensor, reduce_op: asked.append(reduce_op),
        num_participants=lambda: 3,
    )
    group = ManagedProcessGroup(manager)
    options = AllreduceOptions()
    options.reduceOp = ReduceOp.AVG
    for opts in (options, ReduceOp.MAX, None):
        group.allreduce([torch.ones(1)], opts)
    assert asked == [ReduceOp.AVG, ReduceOp.MAX, ReduceOp.SUM] and group.size() == 3
    with pytest.raises(ValueError, match="2 tensors"):
        group.allreduce([torch.ones(1), torch.ones(1)])


def test_a_group_without_members_says_so():
    """Before configure there is a clear error; rank is 0, and abort is remembered."""
    group = ProcessGroupGloo(timedelta(seconds=1))
    with pytest.raises(NotConfiguredError, match=r"call configure\(\) first"):
        group.allreduce([torch.ones(1)])
    assert group.rank() == 0 and group.errored() is None
    group.abort(why="of a test")
    with pytest.raises(AbortedError, match="of a test"):
        group.barrier()


def test_a_group_of_one():
    """A group of one member works."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group, tensor = ProcessGroupGloo(timedelta(seconds=10)), torch.ones(3)
    group.configure(f"127.0.0.1:{store.port}/one", "r", 0, 1, 4)
    assert group.allreduce([tensor]).wait() and (group.size(), group.rank()) == (1, 0)
    assert "quorum 4" in repr(group)
    group.shutdown()
    with pytest.raises(NotConfiguredError):
        group.size()


@pytest.mark.parametrize("address", ["nowhere", "host:x/p", ":12/p", "host/p"])
def test_malformed_store(address):
    """A store address of another form is refused with the form that is expected."""
    with pytest.raises(ConfigError, match="host:port/prefix"):
        reconfigurable.parse(address)


def test_store_address_of_ipv6():
    """An IPv6 address may stand in brackets, and a prefix may have slashes."""
    assert reconfigurable.parse("[::1]:29500/a/b") == ("::1", 29500, "a/b")
    assert reconfigurable.parse("10.0.0.1:1") == ("10.0.0.1", 1, "")


def test_timeouts_are_translated():
    """torch's texts become errors that name the operation, the group and the seconds."""
    group = SimpleNamespace(place="the group of quorum 2", over=None)
    late = named(RuntimeError("Timed out waiting 1500ms for recv"), "allreduce", group)
    assert isinstance(late, CollectiveTimeoutError) and isinstance(late, TimeoutError)
    assert "allreduce timed out after 1.5 s in the group of quorum 2" in str(late)
    other = named(RuntimeError("Connection closed by peer"), "barrier", group)
    assert type(other) is ProcessGroupError and "barrier failed" in str(other)
    group.over = AbortedError("given up")
    assert named(RuntimeError("Connection closed by peer"), "barrier", group) is group.over


def test_attempt_given_up_discards_what_comes_later():
    """What is built after it was given up is discarded, and the waiting one is told why."""
    import threading

    go_on, discarded = threading.Event(), threading.Event()
    attempt = CancellableTask[str](
        lambda a: "built" if go_on.wait(10) else "",
        discard=lambda built: discarded.set(),
        timeout_s=30,
        name="a thing",
    )
    attempt.start()
    assert attempt.give_up(AbortedError("enough")) and not attempt.give_up(AbortedError("again"))
    with pytest.raises(AbortedError, match="enough"):
        attempt.result()
    go_on.set()
    assert discarded.wait(10)


def test_watch_tells_the_first_late_operation():
    """A watch tells which operation missed its deadline, and keeps silent about completed ones."""
    import threading

    told, late = threading.Event(), []
    watch = WorkWatch(lambda why: (late.append(why), told.set()))
    watch.add(SimpleNamespace(is_completed=lambda: True), "broadcast", 0.01)
    watch.add(SimpleNamespace(is_completed=lambda: False), "allreduce", 0.01)
    assert told.wait(10) and late == ["allreduce timed out after 0.01 s"]
    watch.stop()


def test_addresses_as_gloo_writes_them():
    """The start of a sockaddr is family, port and address, as the kernel lays it out."""
    assert gloo.raw_address(socket.AF_INET, ("127.0.0.1", 258))[2:] == b"\1\2\x7f\0\0\1"
    raw = gloo.raw_address(socket.AF_INET6, ("::1", 258, 0, 0))
    assert raw[2:4] == b"\1\2" and raw.endswith(b"\1") and len(raw) == 24
    assert gloo.raw_address(socket.AF_UNIX, ("/x",)) == b""


def test_private_parts_of_torch():
    """torch has the private names that the groups build on; if not, gloo.py and nccl.py change."""
    from torch.distributed import ProcessGroup, ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    for name in ("_devices", "_timeout", "_threads", "global_ranks_in_group", "group_name"):
        assert hasattr(options, name), f"ProcessGroupGloo._Options.{name}"
    for owner, name in [
        (ProcessGroupGloo, "create_device"),
        (ProcessGroupGloo, "_set_default_timeout"),
        (ProcessGroup, "_register_backend"),
        (ProcessGroup, "_set_default_backend"),
    ]:
        assert hasattr(owner, name), f"{owner.__name__}.{name}"


def test_gloo_publishes_its_address():
    """What gloo writes to the store holds its listener's address: own sockets are found by it."""
    from torch.distributed import HashStore, ProcessGroupGloo

    class Spy(HashStore):
        """Remember what is written."""

        def set(self, key, value):
            written.append(bytes(value))
            super().set(key, value)

    written: list[bytes] = []
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    listeners = set(_own_listeners())
    group = ProcessGroupGloo(meeting_like(Spy()), 0, 1, options)
    assert any(raw in blob for raw in listeners for blob in written), (listeners, written)
    del group


def meeting_like(store):
    from torch.distributed import Store

    class Like(Store):
        """A Python store, as the Meeting is."""

        def set(self, key, value):
            store.set(key, value)

        def get(self, key):
            return store.get(key)

        def wait(self, keys, timeout=None):
            store.wait(keys)

    return Like()


def _own_listeners():
    import psutil

    for connection in psutil.Process().net_connections("tcp4"):
        if connection.status == psutil.CONN_LISTEN:
            yield gloo.raw_address(socket.AF_INET, tuple(connection.laddr))
