"""A replica that is behind gets the state of its peers, whatever happens to them on the way."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ft_heals import (
    LONG,
    NUM_MB,
    STEP,
    InThread,
    Relay,
    StallAfter,
    cut_after,
    is_equal,
    make_state,
)  # fmt: skip
from gloo_ranks import run_ranks
from group import eventually

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft import Manager, ProcessGroupGloo
from hpc_elastic.ft.checkpointing import (
    HealError,
    HealTimeoutError,
    HTTPTransport,
    UnusableStateError,
    _wire,
)
from hpc_elastic.ft.checkpointing._wire import StateServer
from hpc_elastic.ft.checkpointing.pg_transport import PGTransport
from hpc_elastic.ft.coordination import LighthouseServer
from hpc_elastic.transport.connection import SignedSocket

KEY = b"the run's"


@pytest.fixture
def transport() -> Iterator[Callable[..., HTTPTransport]]:
    """Makes transports, and ends them."""
    made: list[HTTPTransport] = []

    def make(key: bytes = KEY, **options: object) -> HTTPTransport:
        made.append(HTTPTransport(LONG, key=key, **options))
        return made[-1]

    yield make
    for t in made:
        t.shutdown()


@pytest.fixture
def source(transport) -> Callable[..., HTTPTransport]:
    """Makes transports that offer a state to one destination."""

    def make(state: object, step: int = STEP, **options: object) -> HTTPTransport:
        t = transport(**options)
        t.send_checkpoint([1], step, state, LONG)
        return t

    return make


HANDSHAKE_BYTES = 98
"""What a server sends before its first answer."""


@pytest.fixture
def relay() -> Iterator[Callable[..., Relay]]:
    """Makes stretches of network, and ends them."""
    made: list[Relay] = []

    def make(of: HTTPTransport, on_bytes: Callable[[bytes, int], bytes | None]) -> Relay:
        made.append(Relay(of.metadata().split(",")[-1], on_bytes))
        return made[-1]

    yield make
    for r in made:
        r.close()


@pytest.fixture
def second(monkeypatch) -> threading.Event:
    """Is set once the second source was heard; it is asked however little there is to fetch."""
    monkeypatch.setattr("hpc_elastic.ft.checkpointing.http_transport._WORTH_BYTES", 1)
    return threading.Event()


def waits_for(second: threading.Event) -> Callable[[bytes, int], bytes | None]:
    """Give what the best source begins with, and the rest once the second one was heard."""
    return lambda data, before: data if before < 1e6 or second.wait(20) else None


def has_come(t: HTTPTransport) -> None:
    """Wait until a destination has asked for a state."""
    eventually(lambda: t._server._server._serving)


def fetch(t: HTTPTransport, *metadata: str, timeout: timedelta = LONG) -> dict:
    """Heal from sources, the best first."""
    return t.recv_checkpoint(0, json.dumps(metadata), STEP, timeout)


@pytest.fixture
def stall() -> Iterator[Callable[[int], StallAfter]]:
    """Makes networks that stand still after so many bytes."""
    made: list[StallAfter] = []

    def make(num_bytes: int) -> StallAfter:
        made.append(StallAfter(num_bytes))
        return made[-1]

    yield make
    for s in made:
        s.end.set()


def test_a_replica_gets_the_state_of_one_peer(transport, source):
    """Everything in it is equal, and in memory of its own."""
    state = make_state(tuple=(1, None))
    a = source(state)
    got = transport().recv_checkpoint(0, a.metadata(), STEP, LONG)
    a.disallow_checkpoint()
    state["model"]["small"].zero_()
    assert got["tuple"] == (1, None)
    assert is_equal(got, make_state())


def test_a_state_without_tensors_is_fetched(transport, source):
    """A state may be values alone, or nothing."""
    assert fetch(transport(), source({"a": 1}).metadata()) == {"a": 1}
    assert fetch(transport(), source(None).metadata()) is None


def test_several_peers_give_their_parts(transport, source, relay):
    """Of three sources at the same state, each sends some of it, and not much comes twice."""
    state = make_state(more=torch.ones(12_000_000))  # as much as three connections are worth
    passed = [0, 0, 0]
    changed = threading.Condition()

    def slow_down(i: int) -> Callable[[bytes, int], bytes]:
        def on_bytes(data: bytes, _before: int) -> bytes:
            with changed:
                passed[i] += len(data)
                changed.notify_all()
                changed.wait_for(lambda: passed[i] < 1e6 or min(passed) >= 1e6, 20)
            return data

        return on_bytes

    urls = [relay(source(state), slow_down(i)).url for i in range(3)]
    got = fetch(transport(), *urls)
    assert is_equal(got, state) and got["more"].eq(1).all()
    assert min(passed) >= 1e6
    assert sum(passed) < 1.5 * (NUM_MB + 48) * 1e6


def small_tensors(value: float) -> dict[str, torch.Tensor]:
    """Return as many as three ranges, 19 MB."""
    return {f"s{i}": torch.full((8000,), value) for i in range(600)}


def test_small_tensors_come_from_the_best_source(transport, source, relay, second):
    """Replicas may differ in them (running means, random generators): they are not mixed."""
    all_small = threading.Event()

    def gives_small_ones(data: bytes, before: int) -> bytes:
        if before > 1e6:
            second.wait(20)
        if before > 20e6:
            all_small.set()
        return data

    def waits_for_them(data: bytes, before: int) -> bytes:  # it would not wait for the best one
        if before > 1e6:
            second.set()
            all_small.wait(20)
        return data

    a, b = (source(make_state(v, **small_tensors(v))) for v in (1.0, 2.0))
    got = fetch(transport(), relay(a, gives_small_ones).url, relay(b, waits_for_them).url)
    assert second.is_set() and all_small.is_set()
    assert all(got[name].eq(1).all() for name in small_tensors(1.0))


@pytest.mark.parametrize("num_chunks", [2, 4])
def test_if_the_best_source_fails_small_tensors_come_from_the_next(
    transport, source, relay, num_chunks
):
    """Then all of them do, those that had come too; and its other connections count no more."""
    cut = relay(source(small_tensors(1.0)), cut_after(12_000_000))
    urls = cut.url, source(small_tensors(2.0)).metadata()
    got = fetch(transport(num_chunks=num_chunks), *urls)
    assert all(v.eq(2.0).all() for v in got.values())


@pytest.mark.parametrize("after", [0, 100, 2_000, 9_000_000])
def test_the_best_source_dies_and_is_replaced(transport, source, relay, after):
    """At whatever byte its connections end."""
    dying = relay(source(make_state()), cut_after(after)).url
    assert is_equal(fetch(transport(), dying, source(make_state()).metadata()), make_state())


@pytest.mark.parametrize("after", [0, 100, 2_000, 9_000_000])
def test_the_second_source_dies_and_is_not_missed(transport, source, relay, second, after):
    """At whatever byte its connections end; the best one gives what it had begun with."""

    def dies(data: bytes, before: int) -> bytes | None:
        if before < after:
            return data
        return second.set()

    best, dying = relay(source(make_state()), waits_for(second)), relay(source(make_state()), dies)
    assert is_equal(fetch(transport(), best.url, dying.url), make_state())
    assert second.is_set()


@pytest.mark.parametrize("after", [100, 9_000_000])
def test_a_source_that_stands_still_is_replaced_by_the_others(
    transport, source, relay, stall, after
):
    """Long before the time-out."""
    stopped, other = relay(source(make_state()), stall(after)).url, source(make_state())
    healing = InThread(lambda: fetch(transport(), stopped, other.metadata()))
    assert is_equal(healing.result(), make_state())


def flip_at(at: int) -> Callable[[bytes, int], bytes]:
    """Damage one byte on its way."""

    def on_bytes(data: bytes, before: int) -> bytes:
        if not before <= at < before + len(data):
            return data
        return data[: at - before] + bytes([data[at - before] ^ 1]) + data[at - before + 1 :]

    return on_bytes


@pytest.mark.parametrize("at", [HANDSHAKE_BYTES + 20, HANDSHAKE_BYTES + 60, 1000, 9_000_000])
def test_damage_is_noticed(transport, source, relay, at):
    """In the frame, in the layout and in the bytes; another source gives what is right."""
    damaged = relay(source(make_state()), flip_at(at)).url
    with pytest.raises(HealError, match=r"127.0.0.1:\d+: "):
        fetch(transport(num_chunks=1), damaged)
    damaged = relay(source(make_state()), flip_at(at)).url
    got = fetch(transport(), damaged, source(make_state()).metadata())
    assert is_equal(got, make_state())


def test_a_source_with_another_state_is_left_out(transport, source, relay, second):
    """Equal steps are not enough: every value in the state has to be equal."""

    def is_heard(data: bytes, _before: int) -> bytes:
        second.set()
        return data

    a, b = source(make_state()), source(make_state(2.0) | {"lineage": "other"})
    got = fetch(transport(), relay(a, waits_for(second)).url, relay(b, is_heard).url)
    assert second.is_set() and is_equal(got, make_state())
    a, b = source(make_state()), source(make_state(2.0), step=STEP + 1)
    assert is_equal(fetch(transport(), b.metadata(), a.metadata()), make_state())


def test_another_step_is_refused_by_name(transport, source):
    """The error says which step is offered."""
    with pytest.raises(HealError, match=f"it offers step 4, not {STEP}"):
        fetch(transport(), source(make_state(), step=4).metadata())


@pytest.mark.parametrize("on", ["source", "destination"])
def test_who_does_not_know_the_key_gets_nothing(transport, source, on):
    """Nor is anything taken from him; the error says what is wrong."""
    keys = {"source": KEY, "destination": KEY, on: b"a stranger's"}
    a = source(make_state(), key=keys["source"])
    with pytest.raises(HealError, match="does not know our key"):
        fetch(transport(key=keys["destination"]), a.metadata())


def test_an_impostor_at_a_source_s_address_is_found_out(transport, source, relay):
    """What a peer has said on another connection is nothing on ours."""
    answers: list[bytes] = []
    first = relay(source({"a": 1}), lambda data, _: answers.append(data) or data)
    fetch(transport(num_chunks=1), first.url)
    repeated = iter(answers)
    second = relay(source({"a": 1}), lambda _data, _before: next(repeated, None))
    with pytest.raises(HealError, match="does not know our key"):
        fetch(transport(num_chunks=1), second.url)


def test_what_was_heard_of_a_fetch_is_of_no_use(transport, source, relay):
    """Repeated on another connection it is nobody's, also for a new offer of the same step."""
    a = source(make_state())
    seen = relay(a, lambda data, _: data)
    fetch(transport(num_chunks=1), seen.url)
    a.disallow_checkpoint()
    a.send_checkpoint([], STEP, make_state(2.0), LONG)
    with ask(a, seen.requests) as s:
        assert says_nothing(s)


@pytest.mark.parametrize(
    "text",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 5000,
        b"x" * 5000,
        b"GET /a/b?c HTTP/1.1\r\nX-Mac: 1\r\n\r\n",
    ],
)
def test_strangers_are_turned_away(transport, source, text):
    """They hear nothing but the greeting; peers are served meanwhile."""
    a = source(make_state())
    with ask(a, text) as s:
        assert is_equal(fetch(transport(), a.metadata()), make_state())
        assert says_nothing(s)


def test_a_peer_that_asks_nonsense_ends_its_own_connection(source, transport):
    """As one of another version does; the next peer is served."""
    a = source(make_state())
    address = "127.0.0.1", int(re.search(r":(\d+)/", a.metadata())[1])
    peer = SignedSocket.connect(address, KEY, _wire.SESSION, timeout_s=20)
    with contextlib.closing(peer):
        peer.send({"verb": "layout"})
        with pytest.raises(ConnectionResetError):
            peer.receive()
    assert is_equal(fetch(transport(), a.metadata()), make_state())


def says_nothing(s: socket.socket) -> bool:
    """Return whether a server ends a connection after its greeting."""
    heard = b""
    with contextlib.suppress(ConnectionResetError):
        while received := s.recv(4096):
            heard += received
    return heard.count(b"\n") <= 1 and len(heard) < 100


def ask(a: HTTPTransport, text: bytes) -> socket.socket:
    """Send bytes to a transport."""
    port = int(re.search(r":(\d+)/", a.metadata())[1])
    s = socket.create_connection(("127.0.0.1", port), 20)
    s.sendall(text)
    return s


def test_a_fetch_waits_for_the_offer(transport):
    """The destination may be first."""
    a, b = transport(), transport()
    waiting = InThread(lambda: fetch(b, a.metadata()))
    a.send_checkpoint([1], STEP, make_state(), LONG)
    assert is_equal(waiting.result(), make_state())


def test_time_is_up_for_a_source_that_offers_nothing(transport):
    """The error names the peer, and is a TimeoutError."""
    a = transport()
    with pytest.raises(HealTimeoutError, match=r"127.0.0.1:\d+: has not offered its state in time"):
        fetch(transport(), a.metadata(), timeout=timedelta(seconds=0.2))


def test_time_is_up_for_a_source_that_stands_still(transport, source, relay, stall):
    """The only source is waited for until then."""
    stopped = relay(source(make_state()), stall(9_000_000)).url
    with pytest.raises(TimeoutError, match="has not sent all in time"):
        fetch(transport(), stopped, timeout=timedelta(seconds=2))


def test_a_fetch_that_makes_progress_outlasts_its_time(transport, source, monkeypatch):
    """The time-out is without any progress, on both sides."""
    send_block = StateServer._send_block

    def send_slowly(*args):
        time.sleep(0.1)
        return send_block(*args)

    monkeypatch.setattr(StateServer, "_send_block", send_slowly)
    a, second = transport(), timedelta(seconds=0.6)
    a.send_checkpoint([1], STEP, make_state(), second)  # of 24 blocks, over two connections
    healing = InThread(lambda: fetch(transport(), a.metadata(), timeout=second))
    InThread(a.disallow_checkpoint).result()
    assert is_equal(healing.result(), make_state())


def test_the_state_may_change_once_all_that_were_announced_have_it(transport):
    """`disallow_checkpoint` waits for those that have not come yet."""
    a, state = transport(), make_state()
    a.send_checkpoint([1, 2], STEP, state, LONG)

    def change() -> None:
        a.disallow_checkpoint()
        for tensor in state["model"].values():
            tensor.zero_()

    changed = InThread(change)
    for _ in range(2):
        assert is_equal(fetch(transport(), a.metadata()), make_state())
    changed.result()
    assert not state["model"]["small"].any()


@pytest.mark.parametrize("late", [False, True])
def test_a_source_that_was_not_needed_does_not_wait(
    transport, source, relay, stall, late, monkeypatch
):
    """It is told that others gave all, even if it offers its state after that."""
    monkeypatch.setattr("hpc_elastic.ft.checkpointing._wire.ARRIVAL_S", 40.0)
    a, b = source(make_state()), transport()
    if not late:
        b.send_checkpoint([1], STEP, make_state(), LONG)
    unheard = relay(b, stall(HANDSHAKE_BYTES)).url  # what it says is lost, and is not needed
    assert is_equal(fetch(transport(), a.metadata(), unheard), make_state())
    if late:
        b.send_checkpoint([1], STEP, make_state(), LONG)
    InThread(b.disallow_checkpoint).result()


def test_a_destination_that_dies_is_not_waited_for(transport, source, relay, stall):
    """It is done when its connections are gone."""
    a = source(make_state())
    network = stall(9_000_000)
    b, url = transport(), relay(a, network).url
    healing, waiting = InThread(lambda: fetch(b, url)), InThread(a.disallow_checkpoint)
    assert network.reached.wait(20)
    b.abort()
    network.end.set()
    waiting.result()
    with pytest.raises(HealError, match="aborted"):
        healing.result()


def test_a_sender_with_a_full_window_notices_the_end():
    """A destination that has enough goes while more is under way to it: nobody waits for it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        destination = socket.create_connection(server.getsockname())
        source, _ = server.accept()
    with source:
        _wire.prepare(source, LONG.total_seconds())
        sending = InThread(lambda: _wire.send(source, [bytes(64 << 20)]))
        eventually(lambda: is_full(source))
        _wire.cut(destination)
        destination.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while destination.recv(1 << 20):
                pass
        _wire.close(destination)
        with pytest.raises(ConnectionError):
            sending.result()


def is_full(source: socket.socket) -> bool:
    """Return whether no more can be sent."""
    writable = select.poll()  # select(2) knows no descriptor beyond 1023
    writable.register(source, select.POLLOUT)
    return not writable.poll(500.0)


def test_a_destination_has_its_time_and_no_more(transport, relay, stall):
    """One that stands still is waited for until the time-out of the offer."""
    a, network = transport(), stall(9_000_000)
    a.send_checkpoint([1], STEP, make_state(), timedelta(seconds=0.5))
    healing = InThread(lambda: fetch(transport(num_chunks=1), relay(a, network).url))
    assert network.reached.wait(20)
    a.disallow_checkpoint()
    network.end.set()
    with pytest.raises(HealError):
        healing.result()


def test_abort_ends_all_waiting_at_once(transport, source):
    """A source that waits for a destination, and one that waits for an offer."""
    a, b, silent = source(make_state()), transport(), transport()
    waiting, healing = (
        InThread(a.disallow_checkpoint),
        InThread(lambda: fetch(b, silent.metadata())),
    )
    has_come(silent)
    a.abort()
    b.abort()
    waiting.result()
    with pytest.raises(HealError, match="aborted"):
        healing.result()


def test_abort_holds_until_resume(transport, source):
    """What begins after an abort of the same quorum ends at once; after `resume` all goes on."""
    a, b = source(make_state()), transport()
    for t in (a, b):
        t.abort()
    with pytest.raises(HealError, match="aborted"):
        fetch(b, a.metadata())
    a.send_checkpoint([1], STEP, make_state(2.0), LONG)
    a.disallow_checkpoint()
    for t in (a, b):
        t.resume()
    a.send_checkpoint([1], STEP, make_state(), LONG)
    assert is_equal(fetch(b, a.metadata()), make_state())


def test_a_fetch_given_up_is_not_taken_for_the_next(transport, source):
    """A destination that went away while it waited does not count as served."""
    a, b = transport(), transport()
    given_up = InThread(lambda: fetch(b, a.metadata()))
    has_come(a)
    b.abort()
    with pytest.raises(HealError):
        given_up.result()
    a.send_checkpoint([1], STEP, make_state(), LONG)
    waiting = InThread(a.disallow_checkpoint)
    assert is_equal(fetch(transport(), a.metadata()), make_state())
    waiting.result()


def test_in_place_fills_the_tensors_of_this_replica(transport, source):
    """No second state is made."""
    own = make_state(0.0)
    b = transport(state_dict=lambda: own, in_place=True)
    got = fetch(b, source(make_state()).metadata())
    assert all(got["model"][k] is own["model"][k] for k in own["model"])
    assert is_equal(own, make_state())


def test_arguments_that_can_not_work_are_refused():
    """By name, before anything is opened."""
    with pytest.raises(ConfigError, match="num_chunks"):
        HTTPTransport(LONG, num_chunks=-1)
    with pytest.raises(ConfigError, match="in_place"):
        HTTPTransport(LONG, in_place=True)


def test_fifty_heals_leave_no_thread_and_no_file_open(transport):
    """Nor do heals that fail."""
    a, b, silent = transport(), transport(), transport()
    before = None
    for i in range(50):
        a.send_checkpoint([1], STEP, {"w": torch.ones(1000)}, LONG)
        if i % 5:
            fetch(b, a.metadata(), silent.metadata() if i == 8 else "http://127.0.0.1:1/0")
        else:
            a.abort()
        if i % 10 == 5:
            with pytest.raises(HealError):
                fetch(b, a.metadata(), timeout=timedelta(seconds=0.05))
        a.disallow_checkpoint()
        a.resume()
        now = settled(before)
        before = before or now
    assert now == before


def settled(expected: tuple[int, int] | None) -> tuple[int, int]:
    """Return how many threads and open files there are, once they are as expected."""
    for _ in range(500):
        found = threading.active_count(), sum(1 for _ in Path("/proc/self/fd").iterdir())
        if expected is None or found == expected:
            break
        threading.Event().wait(0.01)
    return found


def test_a_transport_that_is_shut_down_leaves_nothing(transport, source):
    """Its threads have ended when it returns, those with a peer connected too."""
    before = threading.enumerate()
    a = source(make_state())
    with ask(a, b"GET") as s:
        a.shutdown()
        assert set(threading.enumerate()) <= set(before)
        with contextlib.suppress(ConnectionResetError):
            while s.recv(4096):  # what it sent before
                pass


@pytest.fixture
def mesh() -> Iterator[object]:
    """A device mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from torch.distributed.device_mesh import init_device_mesh

    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_dtensor_is_healed_from_the_same_rank_s_shard(transport, source, mesh):
    """It needs this replica's own for its mesh; without, the error names the remedy."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    def make(value: float) -> dict[str, DTensor]:
        return {"w": distribute_tensor(torch.full((4, 2), value), mesh, [Shard(0)])}

    a = source(make(1.0))
    own = make(0.0)
    got = fetch(transport(state_dict=lambda: own), a.metadata())["w"]
    assert isinstance(got, DTensor)
    assert got.placements == (Shard(0),)
    assert got.to_local().eq(1).all()
    assert own["w"].to_local().eq(0).all()
    fetch(transport(state_dict=lambda: own, in_place=True), a.metadata())
    assert own["w"].to_local().eq(1).all()
    with pytest.raises(HealError, match=r"/w is a DTensor.*state_dict="):
        fetch(transport(), a.metadata())


def test_a_dtensor_that_is_new_here_gets_a_mesh_of_this_replica(transport, source, mesh):
    """As the state of an optimizer: the mesh of another tensor that is sharded in the same way."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def make(*placements: object, on: object = mesh) -> object:
        return distribute_tensor(torch.arange(6.0).view(3, 2), on, placements)

    def fetched(sent: object, **own: object) -> object:
        return fetch(transport(state_dict=lambda: own), source({"new": sent}).metadata())["new"]

    got = fetched(make(Shard(0)), copied=make(Replicate()), w=make(Shard(0)))
    assert got.placements == (Shard(0),)
    assert got.shape == (3, 2)
    assert got.full_tensor().equal(torch.arange(6.0).view(3, 2))
    with pytest.raises(UnusableStateError, match=r"/new .*mesh of \(1,\) with \(Shard\(dim=0\)\)"):
        fetched(make(Shard(0)), w=make(Shard(1)))
    with pytest.raises(UnusableStateError, match="states are not resharded"):
        fetched(make(Shard(0)), new=make(Shard(1)))
    named = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    with pytest.raises(UnusableStateError, match="dp"):
        fetched(make(Shard(0), on=named), w=make(Shard(0)))


def test_placements_are_told_apart_by_their_text():
    """FSDP2 over tensor parallelism has a private placement; only its text is sent and compared."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = [
        Shard(0),
        Shard(1),
        Replicate(),
        *(_StridedShard(0, split_factor=n) for n in (2, 4)),
    ]
    assert len({repr(p) for p in placements}) == len(placements)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: this machine has none")
def test_a_state_on_a_gpu_is_served_from_there(transport, source):
    """It comes as tensors on the CPU, which load into those on the GPU."""
    weights = torch.arange(5_000_000, device="cuda")
    got = fetch(transport(), source({"w": weights, "s": weights[:3]}).metadata())
    assert got["w"].device.type == "cpu"
    assert got["w"].equal(weights.cpu())
    assert got["s"].tolist() == [0, 1, 2]


# ---- over a process group ----------------------------------------------------------------


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
    a = PGTransport(pair.groups[0], LONG, "cpu")
    b = PGTransport(pair.groups[1], LONG, CPU, (lambda: own) if in_place else None)
    sending = InThread(lambda: a.send_checkpoint([1], STEP, state, LONG))
    got = b.recv_checkpoint(0, a.metadata(), STEP, LONG)
    sending.result()
    a.disallow_checkpoint()
    assert is_equal(got, state)
    assert got["t"][1].equal(torch.ones(3, 2))
    assert is_equal(got, own) == in_place


def test_a_replica_is_refused_by_a_peer_whose_state_cannot_be_sent(transport):
    """At once, with the reason; and the peer does not wait for it afterwards."""
    a = transport()
    a.refuse_checkpoint([1], STEP, "a wrong type", LONG)
    with pytest.raises(UnusableStateError, match="a wrong type"):
        fetch(transport(), a.metadata())
    a.disallow_checkpoint()


def test_a_process_group_refuses_another_step(pair):
    """The error names both steps."""
    a, b = (PGTransport(group, LONG, CPU) for group in pair.groups)
    sending = InThread(lambda: a.send_checkpoint([1], 4, {"a": 1}, LONG))
    with pytest.raises(HealError, match=f"sends step 4, not {STEP}"):
        b.recv_checkpoint(0, a.metadata(), STEP, LONG)
    sending.result()


def test_a_process_group_carries_a_refusal(pair):
    """A state that cannot be sent fails at the other side at once, with the reason."""
    a, b = (PGTransport(group, LONG, CPU) for group in pair.groups)
    sending = InThread(lambda: a.refuse_checkpoint([1], STEP, "a wrong type", LONG))
    with pytest.raises(UnusableStateError, match="a wrong type"):
        b.recv_checkpoint(0, a.metadata(), STEP, LONG)
    sending.result()


def test_a_process_group_whose_peer_is_silent_names_it(pair):
    """Time is up."""
    b = PGTransport(pair.groups[1], LONG, CPU)
    with pytest.raises(HealError, match="replica 0 did not send its state"):
        b.recv_checkpoint(0, "<n/a>", STEP, timedelta(seconds=0.2))


def heal_slowly(rank, lighthouse):
    """Return whether a replica commits a step with another, which heals for longer than all waits.

    A block of its 12 MB takes half of the time-out.
    """
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    limit, send_block = timedelta(seconds=1.5), StateServer._send_block

    def send_slowly(*args):
        time.sleep(0.5)
        return send_block(*args)

    StateServer._send_block = send_slowly
    net = torch.nn.Linear(1500, 2000)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(limit), net.load_state_dict, net.state_dict, 2, timeout=limit, rank=0,
        world_size=1, store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse,
    )  # fmt: skip
    manager.start_quorum()
    manager.allreduce(torch.ones(1)).wait()
    committed = manager.should_commit()
    total = net.weight.sum().item()
    dist.barrier()
    manager.shutdown()
    return committed, total


def test_a_heal_that_makes_progress_may_outlast_every_time_out():
    """The members wait for it outside of their collectives, so no step fails."""
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000)
    found = run_ranks(heal_slowly, 2, server.address())
    server.shutdown()
    assert len(set(found)) == 1 and found[0][0]
