"""What torch documents of a RendezvousHandler, over real sockets and stores."""

import socket

import pytest
from group import PATIENCE_S, Group, eventually
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from hpc_elastic.rendezvous.failure_policy import FAILED_TERMS
from hpc_elastic.rendezvous.log_entry import Failure
from hpc_elastic.rendezvous.messages import Finished
from hpc_elastic.rendezvous.round_stores import RoundStores, host_store, open_port
from hpc_elastic.rendezvous.torch_handler import SlurmRendezvousHandler


@pytest.fixture
def run(group):
    """Makes a group whose rounds have real stores."""

    def make(**rules) -> Group:
        g = group(**rules)
        g.make_store = make_store
        return g

    def make_store() -> tuple[str, int]:
        with open_port("127.0.0.1") as listening:
            stores.append(host_store(listening, {}))
            return listening.getsockname()

    stores = []
    return make


def handlers(g: Group, count: int, timeout_s: float = PATIENCE_S) -> list[SlurmRendezvousHandler]:
    """So many nodes of a run."""
    return [SlurmRendezvousHandler(g.agent(n), "run 7", timeout_s) for n in range(count)]


def rendezvous(g: Group, *joining: SlurmRendezvousHandler) -> list[RendezvousInfo]:
    """Let these join at the same time."""
    waiting = [g.threads.submit(h.next_rendezvous) for h in joining]
    return [w.result(PATIENCE_S) for w in waiting]


def test_a_round_gives_ranks_and_one_store(run):
    """Every node gets its rank, the size, and a store that all of them share."""
    g = run(max_nodes=2)
    infos = rendezvous(g, *handlers(g, 2))
    assert sorted(i.rank for i in infos) == [0, 1] and {i.world_size for i in infos} == {2}
    infos[0].store.set("key", "value")
    assert infos[1].store.get("key") == b"value"
    assert len({i.bootstrap_store_info.master_port for i in infos}) == 1


def test_a_store_listens_at_its_address_only():
    """It is not open to other networks, and looks up clients by the address's own family."""
    with open_port("127.0.0.2") as listening:
        address, port = listening.getsockname()
        assert address == "127.0.0.2"
        socket.create_connection((address, port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_the_process_of_stores_hosts_the_last_one_and_reads_others():
    """A killed one is started again; the next store ends the one before."""
    stores, others = RoundStores("127.0.0.1"), RoundStores("127.0.0.1")
    stores.contents = {"key": "value"}
    try:
        first, second = stores.make(), stores.make()
        assert others.read(second, "key") == "value"
        with pytest.raises(OSError):
            others.read(first, "key")
        stores._process.kill()
        stores._process.wait()
        assert others.read(stores.make(), "key") == "value"
    finally:
        stores.close()
        others.close()


def test_a_store_that_torch_cannot_start_is_tried_again(monkeypatch):
    """Where strangers hold all descriptors, it is an OSError, which ends no term for a minute."""

    def refuse(*_: object, **__: object) -> None:
        raise DistStoreError("Too many open files")

    monkeypatch.setattr("torch.distributed.TCPStore", refuse)
    with (
        open_port("127.0.0.1") as listening,
        pytest.raises(OSError, match="no store for the round: Too many open files"),
    ):
        host_store(listening, {})


def test_what_it_says_of_itself(run):
    """Its name, its run, and that workers are to use the round's store."""
    g = run(max_nodes=1)
    (h,) = handlers(g, 1)
    assert (h.get_backend(), h.get_run_id(), h.use_agent_store) == ("slurm", "run 7", True)
    assert not h.is_closed() and h.num_nodes_waiting() == 0


def test_a_node_that_waits_shows_until_the_group_is_formed_anew(run):
    """torch's agent restarts its workers for that, without spending a restart."""
    g = run(max_nodes=2)
    a, b = handlers(g, 2)
    g.running = frozenset({"7_0"})
    rendezvous(g, a)
    assert a.num_nodes_waiting() == 0
    waiting = g.threads.submit(b.next_rendezvous)
    eventually(lambda: a.num_nodes_waiting() == 1)
    assert a.next_rendezvous().world_size == 2 == waiting.result(PATIENCE_S).world_size
    assert a.num_nodes_waiting() == 0


def test_closed_is_closed_for_everybody(run):
    """And whoever asks for another round is told so."""
    g = run(max_nodes=2)
    a, b = handlers(g, 2)
    rendezvous(g, a, b)
    a.set_closed()
    eventually(lambda: a.is_closed() and b.is_closed())
    for h in (a, b):
        with pytest.raises(RendezvousClosedError):
            h.next_rendezvous()


def test_torchrun_fails_with_the_error_of_a_run_that_has_failed(run):
    """It knows the end from nowhere else; the agents of a run read the result."""
    g = run(max_nodes=1)
    (h,) = handlers(g, 1)

    def make_store() -> tuple[str, int]:
        raise TypeError("torch takes no socket")

    g.make_store = make_store
    failed = Failure("7_0", "node0", 0, 0, 0.0, "before", "TypeError", phase="lead")
    eventually(lambda: h.session._leader is not None)
    h.session._leader._state.run.policy.failed_terms = (failed,) * (FAILED_TERMS - 1)
    with pytest.raises(RendezvousStateError, match="torch takes no socket"):
        h.next_rendezvous()


def test_shutdown_closes_the_rendezvous(run):
    """As torch's own backends do."""
    g = run(max_nodes=2)
    a, b = handlers(g, 2)
    rendezvous(g, a, b)
    assert a.shutdown() is True
    eventually(b.is_closed)


def test_a_run_that_has_succeeded_is_left_gracefully(run):
    """A node that comes too late has nothing to do, and that is no error."""
    g = run(max_nodes=1)
    a, late = handlers(g, 2)
    rendezvous(g, a)
    a.session.report(Finished())
    eventually(a.is_closed)
    with pytest.raises(RendezvousGracefulExitError, match="succeeded"):
        late.next_rendezvous()


def test_a_time_out_is_torchs_and_names_who_is_missing(run):
    """The error that torch's agent knows, with our diagnosis."""
    g = run(min_nodes=2)
    g.pending = frozenset({"7_3"})
    (h,) = handlers(g, 1, timeout_s=2.5)
    with pytest.raises(RendezvousTimeoutError, match=r"7_3 \(PENDING, Resources\)"):
        h.next_rendezvous()
