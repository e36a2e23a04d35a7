"""Process groups in one process: wrappers, works, and the private parts of torch below them."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    ReduceOp,
    ReduceScatterOptions,
    Work,
)
from torch.futures import Future

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft import gloo, reconfigurable
from hpc_elastic.ft.nccl import WorkWatchdog
from hpc_elastic.ft.process_group import (
    AbortedError,
    CollectiveTimeoutError,
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ManagedProcessGroup,
    ManagedWork,
    NotConfiguredError,
    ProcessGroupBabyGloo,
    ProcessGroupDummy,
    ProcessGroupError,
    ProcessGroupGloo,
    translate_error,
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


def test_managed_group_uses_its_manager():
    """A managed group reduces through the Manager, and is as large as its contributors."""
    ops = []
    manager = SimpleNamespace(
        _pg=ProcessGroupDummy(0, 1),
        allreduce=lambda tensor, reduce_op: ops.append(reduce_op),
        num_participants=lambda: 3,
    )
    group = ManagedProcessGroup(manager)
    options = AllreduceOptions()
    options.reduceOp = ReduceOp.AVG
    for opts in (options, ReduceOp.MAX, None):
        group.allreduce([torch.ones(1)], opts)
    assert ops == [ReduceOp.AVG, ReduceOp.MAX, ReduceOp.SUM] and group.size() == 3
    with pytest.raises(ValueError, match="2 tensors"):
        group.allreduce([torch.ones(1), torch.ones(1)])


def test_group_without_members():
    """Operations raise; the rank is 0, and an abort is remembered."""
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
        reconfigurable.parse_store_addr(address)


def test_store_address_of_ipv6():
    """An IPv6 address may stand in brackets, and a prefix may have slashes."""
    assert reconfigurable.parse_store_addr("[::1]:29500/a/b") == ("::1", 29500, "a/b")
    assert reconfigurable.parse_store_addr("10.0.0.1:1") == ("10.0.0.1", 1, "")


def work_group(**fields):
    """A group of works that has not ended."""
    given = {"place": "the group of quorum 2", "end_error": None, "is_at_rest": False}
    return SimpleNamespace(**{**given, "pending": set(), **fields})


def test_errors_are_translated():
    """torch's texts become errors that name the operation, the group and the seconds."""
    group = work_group()
    late = translate_error(RuntimeError("Timed out waiting 1500ms for recv"), "allreduce", group)
    assert isinstance(late, CollectiveTimeoutError) and isinstance(late, TimeoutError)
    assert "allreduce timed out after 1.5 s in the group of quorum 2" in str(late)
    closed = RuntimeError("Connection closed by peer")
    other = translate_error(closed, "barrier", group)
    assert type(other) is ProcessGroupError and "barrier failed" in str(other)
    group.end_error = AbortedError("aborted")
    assert translate_error(closed, "barrier", group) is group.end_error
    assert group.end_error.__cause__ is closed
    own = ProcessGroupError("named")
    assert translate_error(own, "barrier", group) is own and own.__cause__ is None


class StuckWork(Work):
    """torch's work that does not end before a test ends its future."""

    def __init__(self):
        super().__init__()
        self.future = Future()

    def wait(self, timeout=None):  # noqa: D102
        if not self.future.done():
            raise RuntimeError("Operation timed out!")
        self.future.wait()
        return True

    def is_completed(self):  # noqa: D102
        return self.future.done()

    def get_future(self):  # noqa: D102
        return self.future


@pytest.mark.parametrize(
    ("group", "is_abortable", "in_wait", "in_future"),
    [
        (work_group(), True, ProcessGroupError, ProcessGroupError),
        (work_group(), False, ProcessGroupError, RuntimeError),
        (None, False, RuntimeError, RuntimeError),
    ],
    ids=["gloo's", "NCCL's", "an unknown group's"],
)
def test_work_names_its_errors(group, is_abortable, in_wait, in_future):
    """A future that is torch's own keeps torch's error, unless the work is managed."""
    work = StuckWork()
    errors, tensor = [], torch.ones(1)
    managed = ManagedWork(work, "barrier", group, is_abortable=is_abortable)
    other = ManagedWork(work, "barrier", group, is_abortable=is_abortable)
    other.manage(tensor, 2, errors.append)
    future, managed_future = managed.get_future(), other.get_future()
    work.future.set_exception(RuntimeError("closed"))
    for wait, expected in ((managed.wait, in_wait), (future.wait, in_future)):
        with pytest.raises(RuntimeError, match="closed") as error:
            wait()
        assert error.type is expected
    assert managed_future.wait() is tensor and not other.wait()
    assert [type(e) for e in errors] == [in_wait] and tensor.item() == 1.0


@pytest.mark.parametrize("is_managed", [False, True])
def test_stuck_work_ends_with_its_group(is_managed):
    """Its future and its waiters, though torch's work never ends; a late end changes nothing."""
    group, errors, tensor = work_group(), [], torch.ones(1)
    works = [ManagedWork(StuckWork(), "allreduce", group, is_abortable=True) for _ in range(2)]
    if is_managed:
        for work in works:
            work.manage(tensor, 2, errors.append)
    future = works[0].get_future()
    assert group.pending == {works[0]}
    group.end_error, group.is_at_rest = AbortedError("peer lost"), True
    works[0].end_future(None, group.end_error)
    assert not group.pending
    if is_managed:
        assert future.wait() is tensor and not works[0].wait() and not works[1].wait()
        assert errors == [group.end_error] * 2
    else:
        for wait in (future.wait, works[1].wait):
            with pytest.raises(AbortedError, match="peer lost"):
                wait()
    works[0]._work.future.set_result([tensor])
    assert tensor.item() == 1.0


def test_wait_has_a_time_out():
    """Its own; 0 is torch's for none."""
    work = StuckWork()
    managed = ManagedWork(work, "allreduce", work_group(), is_abortable=True)
    with pytest.raises(CollectiveTimeoutError, match=r"allreduce timed out after 0.05 s in the gr"):
        managed.wait(timedelta(seconds=0.05))
    work.future.set_result([])
    assert managed.wait(timedelta(0))


def test_managed_work_divides_once():
    """By any order of waits and futures."""
    for first in ("wait", "get_future"):
        work, tensor = StuckWork(), torch.tensor([6.0])
        work.future.set_result([tensor])
        managed = ManagedWork.of(work).manage(tensor, 3, pytest.fail)
        getattr(managed, first)()
        assert managed.wait() and managed.get_future().wait() is tensor and managed.wait()
        assert tensor.item() == 2.0


def test_used_work_is_wrapped():
    """The group's own work is managed itself, unless its future is known already."""
    fresh, used = (ManagedWork(StuckWork()) for _ in range(2))
    used.get_future()
    assert ManagedWork.of(fresh) is fresh
    assert ManagedWork.of(used) is not used


def test_cancelled_task_discards_its_result():
    """A result that comes after the cancellation; the reader gets the first error."""
    go_on, discarded = threading.Event(), threading.Event()
    task = CancellableTask[str](
        lambda task: "built" if go_on.wait(10) else "",
        discard=lambda built: discarded.set(),
        timeout_s=30,
        name="a thing",
    )
    task.start()
    assert task.cancel(AbortedError("enough")) and not task.cancel(AbortedError("again"))
    with pytest.raises(AbortedError, match="enough"):
        task.result()
    go_on.set()
    assert discarded.wait(10)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (None, "allreduce timed out after 0.01 s"),
        ("NCCL reports REMOTE_ERROR", "NCCL reports REMOTE_ERROR"),
    ],
)
def test_watchdog_reports_an_error_and_the_first_late_operation(error, why):
    """Not those that have completed."""
    reported, found = threading.Event(), []
    watchdog = WorkWatchdog(lambda why: (found.append(why), reported.set()), lambda: error)
    watchdog.add_work(SimpleNamespace(is_completed=lambda: True), "broadcast", 0.01)
    watchdog.add_work(SimpleNamespace(is_completed=lambda: False), "allreduce", 0.01)
    assert reported.wait(10) and found == [why]
    watchdog.stop()


def test_addresses_as_gloo_writes_them():
    """The start of a sockaddr is family, port and address, as the kernel lays it out."""
    assert gloo.raw_address(socket.AF_INET, ("127.0.0.1", 258))[2:] == b"\1\2\x7f\0\0\1"
    raw = gloo.raw_address(socket.AF_INET6, ("::1", 258, 0, 0))
    assert raw[2:4] == b"\1\2" and raw.endswith(b"\1") and len(raw) == 24
    assert gloo.raw_address(socket.AF_UNIX, ("/x",)) == b""


def test_private_parts_of_torch():
    """torch has the private names that the groups and DDP build on; if not, they change."""
    from torch.autograd import Variable
    from torch.distributed import ProcessGroup, ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    for name in ("_devices", "_timeout", "_threads", "global_ranks_in_group", "group_name"):
        assert hasattr(options, name), f"ProcessGroupGloo._Options.{name}"
    for owner, name in [
        (ProcessGroupGloo, "create_device"),
        (ProcessGroupGloo, "_set_default_timeout"),
        (ProcessGroup, "_register_backend"),
        (ProcessGroup, "_set_default_backend"),
        (Variable._execution_engine, "queue_callback"),
    ]:
        assert hasattr(owner, name), f"{owner}.{name}"


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
    group = ProcessGroupGloo(python_store(Spy()), 0, 1, options)
    assert any(raw in blob for raw in listeners for blob in written), (listeners, written)
    del group


def python_store(store):
    from torch.distributed import Store

    class Like(Store):
        """A Python store, as the AbortableStore."""

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


def alone(group):
    """Configure a group of one member, and return it."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group.configure(f"localhost:{store.port}/alone", "0", 0, 1)
    return group


def test_keys_of_old_quorums_are_removed(monkeypatch):
    """The stores of thousands of quorums do not grow; a store that has ended is forgotten.

    Nor is one connected to again, by which its server looks a name up, for seconds perhaps.
    """
    new_client, clients = reconfigurable._new_client, []

    def counted(*args):
        clients.append(new_client(*args))
        return clients[-1]

    monkeypatch.setattr(reconfigurable, "_new_client", counted)
    groups = [ProcessGroupGloo(timedelta(seconds=10)) for _ in range(2)]
    stores = [TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    counts = []
    with ThreadPoolExecutor() as pool:
        for quorum in range(9):
            if quorum == 5:
                del stores[1]
            store = stores[quorum in (2, 3, 4)]
            where = f"localhost:{store.port}/quorum{quorum}/0"
            PrefixStore(f"quorum{quorum}/0/healed", store).set("all", "1")
            list(pool.map(lambda r, w=where: groups[r].configure(w, "0", r, 2), range(2)))
            counts.append(store.num_keys())
    assert max(counts) <= 4, counts
    assert len(clients) <= 4, "both ranks may be the first at each of both stores"
    for group in groups:
        group.shutdown()


def test_ranks_in_one_process_are_aborted_one_by_one():
    """Each knows its own connections: the others go on."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    groups = [ProcessGroupGloo(timedelta(seconds=10)) for _ in range(3)]
    tensor = torch.zeros(1)
    with ThreadPoolExecutor() as pool:
        where = f"localhost:{store.port}/three"
        list(pool.map(lambda r: groups[r].configure(where, "0", r, 3), range(3)))
        groups[2].abort()
        sent = pool.submit(lambda: groups[0].send([torch.ones(1)], 1, 0).wait())
        groups[1].recv([tensor], 0, 0).wait()
        assert sent.result() and tensor.item() == 1.0
        with pytest.raises(AbortedError):
            groups[2].send([tensor], 0, 0)
        groups[0].abort()
        with pytest.raises(ProcessGroupError):
            groups[1].recv([tensor], 0, 0).wait()
    groups[1].shutdown()


def test_a_work_without_a_future_of_torchs_has_one():
    """gloo's reduce_scatter has none."""
    group, output = alone(ProcessGroupGloo()), torch.zeros(2)
    work = group.reduce_scatter([output], [[torch.ones(2)]], ReduceScatterOptions())
    assert work.get_future().wait() == [output] and output.tolist() == [1.0, 1.0]
    group.shutdown()


@pytest.mark.parametrize("errored", [True, False])
def test_wrappers_pass_on_whether_an_abort_is_an_error(errored):
    """As torchft's: only an error is kept."""
    group = alone(ProcessGroupBabyGloo(10.0))
    wrapper = ErrorSwallowingProcessGroupWrapper(group)
    wrapper.abort(errored=errored)
    assert (group.errored() is not None) is errored
    assert (wrapper.errored() is not None) is errored


def test_a_work_may_do_its_part_in_wait():
    """Of a process group of the user's: its future is complete only then."""

    class Lazy(Work):
        def __init__(self):
            super().__init__()
            self.future = Future()

        def wait(self, timeout=None):
            self.future.set_result(None)
            return True

        def get_future(self):
            return self.future

    work = ManagedWork(Lazy()).manage(torch.ones(1), 1, pytest.fail)
    future = work.get_future()
    assert work.wait() and future.done()
