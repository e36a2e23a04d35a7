"""What strangers, paused leaders and wrong clocks do to a run: nothing. All sockets are real."""

import contextlib
import json
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fuzz
import pytest
from group import PATIENCE_S, SECRET, Group, eventually, kill
from training import Training

from hpc_elastic.rendezvous import session as sessions
from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig
from hpc_elastic.rendezvous.log_entry import Endpoint, claim
from hpc_elastic.rendezvous.messages import Finished
from hpc_elastic.run.events import read_events

FUZZ_S = float(os.environ.get("HPC_ELASTIC_FUZZ_S", "5"))
HERE = Path(__file__).parent
MAX_GROWTH_KIB = 200_000
MAX_CONNECTIONS = 1000


# ---- strangers at the ports of a run that trains ------------------------------------------


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> Iterator[Training]:
    """A run that has begun to train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        made = Training(tmp_path_factory.mktemp("training"))
        try:
            made.has_begun()
            yield made
        finally:
            made.end()


def size_kib(pid: int) -> int:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def num_files(pid: int) -> int:
    """Open files and sockets of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_training_is_not_disturbed_by_garbage_on_its_ports(training):
    """No restart, no node lost or gained, and the leader's memory and files stay bounded."""
    entry, secret = training.last_index(), training.run.secret.read_bytes()
    leader = (entry.leader.address, entry.leader.port)
    pid = training.agents()[entry.leader.task]
    kib, files = size_kib(pid), num_files(pid)
    attacks = [*fuzz.ON_ANY_PORT, *(fuzz.replay(secret, e) for e in (entry.term, 0))]
    most = 0
    with ThreadPoolExecutor(4) as threads:
        reports = [
            threads.submit(fuzz.fuzz, port, FUZZ_S, chosen, seed=seed)
            for port, chosen in ((leader, attacks), (training.store(), fuzz.ON_ANY_PORT))
            for seed in range(2)
        ]
        while not all(r.done() for r in reports):
            training.goes_on()
            most = max(most, num_files(pid))
    for report in reports:
        print(report.result())
    print(f"leader: {kib} -> {size_kib(pid)} KiB; {files}, at most {most} files and sockets")
    assert most < files + MAX_CONNECTIONS
    assert size_kib(pid) < kib + MAX_GROWTH_KIB
    eventually(lambda: num_files(pid) <= files + 10)
    training.goes_on()
    kinds = [e["kind"] for e in read_events(training.run.path / "events")]
    assert (kinds.count("round"), kinds.count("leader"), kinds.count("task")) == (1, 1, 2)
    assert not {"node_lost", "round_stopped"} & set(kinds)


def test_no_process_shows_the_secret(training):
    """In no argument and no environment, of an agent or a worker or anybody else."""
    training.goes_on()
    shown = [_shown(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    # Two agents and two workers at least, or else it is not seen what processes show.
    assert sum(bytes(training.run.path) in text for text in shown) >= 4
    secret = training.run.secret.read_bytes()
    assert not any(secret in text for text in shown)


def test_the_run_succeeds_and_no_other_file_holds_its_secret(training):
    """Whatever was done to it before: without a restart, and with both of its nodes."""
    training.end()
    result = training.results.result()
    assert (len(result), result.restarts) == (2, 0)
    secret = training.run.secret.read_bytes()
    files = [path for path in training.run.path.rglob("*") if path.is_file()]
    assert [path.name for path in files if secret in path.read_bytes()] == ["secret"]
    assert training.run.secret.stat().st_mode & 0o777 == 0o600


def _shown(pid: int) -> bytes:
    """What a process shows to others of its user: arguments and environment."""
    shown = b""
    for name in ("cmdline", "environ"):
        with contextlib.suppress(OSError):  # it has ended
            shown += Path(f"/proc/{pid}/{name}").read_bytes()
    return shown


# ---- strangers who have listened ----------------------------------------------------------


@pytest.fixture
def taps(monkeypatch) -> Iterator[list[fuzz.Tap]]:
    """Relays on the way of every agent to its leader, in the order in which they connected."""
    made: list[fuzz.Tap] = []
    connect = sessions.connect

    async def connect_by_relay(address: str, port: int, *rest: object) -> object:
        tap = fuzz.Tap((address, port))
        made.append(tap)
        return await connect(*tap.address, *rest)

    monkeypatch.setattr(sessions, "connect", connect_by_relay)
    yield made
    for tap in made:
        tap.close()


def test_what_was_heard_on_the_wire_is_of_no_use(group, taps):
    """It holds no secret, and repeated to the same or the next leader it is the words of nobody."""
    g = group(max_nodes=2)
    agents = [g.agent(0), g.agent(1)]
    g.join(*agents)
    words = [bytes(tap.passed["there"]) for tap in taps]
    assert len(words) == 2 and all(b'"type":"join"' in said for said in words)
    assert not any(SECRET in said for tap in taps for said in tap.passed.values())
    with listener_of(g) as leader:
        assert refuses(leader, words)
    (follower,) = g.followers
    kill(g.leader)
    g.running = frozenset({follower._me.task})
    eventually(lambda: follower.stop_requested)
    assert g.join(follower)[0].number == 2
    with listener_of(g) as leader:
        assert refuses(leader, words)
    follower.report(Finished())
    eventually(lambda: follower.verdict)
    assert [e["number"] for e in g.events("round")] == [1, 2]


@contextlib.contextmanager
def listener_of(g: Group) -> Iterator[fuzz.Address]:
    """Where the present leader listens; nobody may be disturbed meanwhile."""
    number, entry = g.register.last()
    assert entry is not None
    yield entry.leader.address, entry.leader.port
    assert g.register.last_index() == number
    assert not any(s.stop_requested for s in g.sessions if s._thread.is_alive())


def refuses(leader: fuzz.Address, conversations: list[bytes]) -> bool:
    """Whether each of these ends in a closed connection, with nothing but a greeting before."""
    for words in conversations:
        with socket.create_connection(leader, PATIENCE_S) as s, s.makefile("rb") as answers:
            s.sendall(words)
            with contextlib.suppress(ConnectionResetError):
                if len(answers.readlines()) > 1:
                    return False
    return True


@pytest.mark.parametrize("greeting", fuzz.GREETINGS.values(), ids=fuzz.GREETINGS)
def test_an_impostor_on_a_dead_leaders_port_stops_nobody(group, greeting):
    """Whatever he says, the agent becomes the leader once the old one's time is over."""
    g = group(max_nodes=1)
    g.heartbeat = HeartbeatConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        dead = Endpoint("127.0.0.1", server.getsockname()[1], "7_9", 0)
        assert g.register.create(claim(1, None, dead, 0.0))
        threading.Thread(target=_greet, args=(server, greeting), daemon=True).start()
        assert g.join(g.agent(0))[0].world_size == 1
        server.shutdown(socket.SHUT_RDWR)
    assert g.register.last()[1].term == 2


def _greet(server: socket.socket, greeting: bytes) -> None:
    """Say the same to everybody, until the server is closed."""
    guests: list[socket.socket] = []
    with contextlib.suppress(OSError):
        while True:
            guest, _ = server.accept()
            guests.append(guest)
            with contextlib.suppress(ConnectionError):
                guest.sendall(greeting)
    for guest in guests:
        guest.close()


# ---- processes that are stopped, and clocks that are wrong --------------------------------


class Peer:
    """An agent in a process of its own."""

    def __init__(self, folder: Path, slot: int, tasks: list[str], offset_s: float) -> None:
        self.slot = slot
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "peer.py"), str(folder), str(slot), str(offset_s), *tasks],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self._said: queue.Queue[dict] = queue.Queue()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def ask(self, what: str) -> None:
        """Tell it what to do."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")

    def says_next(self) -> dict:
        """Wait for the next line."""
        return self._said.get(timeout=PATIENCE_S)

    def says(self, key: str) -> dict:
        """Wait for the next line with a key; skip what comes before."""
        while key not in (said := self.says_next()):
            pass
        return said

    def end(self) -> None:
        """End the process, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self._listener.join()
        assert self.process.stdin is not None and self.process.stdout is not None
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()
        self.process.wait()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(json.loads(line))


@pytest.fixture
def peers(tmp_path) -> Iterator[Callable[..., list[Peer]]]:
    """Starts agents as processes, each with its own error of the clock."""
    made: list[Peer] = []

    def start(*offsets_s: float) -> list[Peer]:
        slots = range(len(made), len(made) + len(offsets_s))
        tasks = [f"7_{slot}" for slot in range(slots.stop)]
        started = [Peer(tmp_path, slot, tasks, s) for slot, s in zip(slots, offsets_s, strict=True)]
        made.extend(started)
        return started

    yield start
    for peer in made:
        peer.end()


def test_a_paused_leader_comes_back_as_a_follower(peers, tmp_path):
    """The others elect another meanwhile; its old round is fenced, and it decides nothing more."""
    agents = peers(0.0, 0.0, 0.0)
    rounds = [p.says("round") for p in agents]
    (old,) = (p for p, r in zip(agents, rounds, strict=True) if r["leads"])
    others = [p for p in agents if p is not old]
    register = DecisionLog(tmp_path / "rdzv", SECRET)
    old.process.send_signal(signal.SIGSTOP)
    again = [p.says("round") for p in others]
    assert {(r["round"], r["world_size"]) for r in again} == {(2, 2)}
    assert sum(r["leads"] for r in again) == 1
    _, elected = register.last()
    old.ask("fence")
    old.process.send_signal(signal.SIGCONT)
    assert old.says("fence")["fence"] == "fenced"
    last = [p.says("round") for p in agents]
    assert {r["world_size"] for r in last} == {3}
    assert [p.slot for p, r in zip(agents, last, strict=True) if r["leads"]] != [old.slot]
    for p in agents:
        p.ask("fence")
        assert p.says("fence")["fence"] == "free"
    terms = [register.read(n).term for n in range(1, register.last_index() + 1)]
    assert terms == sorted(terms) and terms[-1] == elected.term == 2


def test_clocks_an_hour_off_neither_lose_a_node_nor_date_a_failure(peers, tmp_path):
    """Ahead, right and behind form one round and keep it; times in the result are the leader's."""
    agents = peers(3600.0, 0.0, -3600.0)
    rounds = [p.says("round") for p in agents]
    assert {(r["round"], r["world_size"]) for r in rounds} == {(1, 3)}
    time.sleep(2.5)  # longer than heartbeat_timeout_s
    assert DecisionLog(tmp_path / "rdzv", SECRET).last_index() == 2
    (offset_s,) = (s for s, r in zip((3600.0, 0.0, -3600.0), rounds, strict=True) if r["leads"])
    begun = time.time() + offset_s
    next(p for p, r in zip(agents, rounds, strict=True) if not r["leads"]).ask("fail")
    assert {p.says("status")["status"] for p in agents} == {"failed"}
    failure = json.loads((tmp_path / "result.json").read_text())["failure"]
    assert begun - 1.0 <= failure["time"] <= time.time() + offset_s + 1.0


def has_files_left(peer, limit: int) -> bool:
    """Tell whether a process may open more files, and is not about to open as many again."""
    time.sleep(0.02)
    return num_files(peer.process.pid) < limit


def test_a_leader_out_of_file_descriptors_keeps_its_group(peers, tmp_path):
    """Silent strangers take them all; a third node gets in once they have gone."""
    agents = peers(0.0, 0.0)
    (leader,) = (p for p in agents if p.says("round")["leads"])
    _, entry = DecisionLog(tmp_path / "rdzv", SECRET).last()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = num_files(leader.process.pid) + 5
    resource.prlimit(leader.process.pid, resource.RLIMIT_NOFILE, (limit, hard))
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            where = entry.leader.address, entry.leader.port
            stack.enter_context(socket.create_connection(where, PATIENCE_S))
        time.sleep(2.5)  # longer than heartbeat_timeout_s
    eventually(lambda: all(has_files_left(leader, limit) for _ in range(30)))
    for p in agents:
        p.ask("fence")
        assert p.says_next() == {"fence": "free"}  # and not that its workers are to stop
    agents += peers(0.0)
    assert {p.says("round")["world_size"] for p in agents} == {3}
