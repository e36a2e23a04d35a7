"""A lighthouse and manager servers as real processes, which are killed and stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest
from ft_server import PATIENCE_S, Worker, until

from hpc_elastic.cli.main import main
from hpc_elastic.errors import ConfigError
from hpc_elastic.ft.coordination import LighthouseServer
from hpc_elastic.ft.messages import parse_address

_CLI = "import sys; from hpc_elastic.cli.main import main; sys.exit(main())"
_SILENCE_MS = 1000


class Site:
    """One lighthouse, and the replicas that use it."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start the lighthouse, again at the same port."""
        arguments = ["--bind", f"127.0.0.1:{self.port}", "--heartbeat-timeout-ms", str(_SILENCE_MS)]
        self.lighthouse = subprocess.Popen(
            [sys.executable, "-c", _CLI, "lighthouse", *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = self.lighthouse.stdout.readline().strip().partition("=")[2]
        self.port = parse_address(self.url)[1]

    def stop(self, number: int = signal.SIGKILL) -> int:
        """End the lighthouse; return its exit code."""
        self.lighthouse.send_signal(number)
        self.lighthouse.stdout.close()
        return self.lighthouse.wait(PATIENCE_S)

    def workers(self, *names: str, **environment: str) -> list[Worker]:
        """Start replicas of one worker each, with servers of their own."""
        new = [Worker(self.url, name, **environment) for name in names]
        self._workers += new
        return new

    def quorum(self, *names: str) -> list[Worker]:
        """Start replicas, and bring them into one quorum."""
        workers = self.workers(*names)
        together(*workers)
        return workers

    def end(self) -> None:
        """Kill all."""
        for worker in self._workers:
            worker.end()
        if self.lighthouse.poll() is None:
            self.stop()


def together(*workers: Worker, calm: bool = False) -> list[list[str]]:
    """Make steps, in lockstep once they are members, until all are in one quorum.

    Args:
        workers: At the end of a step.
        calm: It is an error if a quorum is aborted meanwhile.

    Returns:
        The place of each: its quorum, its rank, the number of members.
    """
    busy: set[Worker] = set()
    words = ("on", "placed", "aborted") if calm else ("on", "placed")
    before = {worker.place[0] for worker in workers if worker.place}
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for worker in [w for w in workers if may_step(w, workers, busy)]:
            worker.order("step")
            busy.add(worker)
        for worker in list(busy):
            if said := worker.reported(words):
                assert said[0] != "aborted"
                busy.discard(worker)
        places = [worker.place for worker in workers]
        quorums = {place[0] if place else "" for place in places}
        if not busy and len(quorums) == 1 and not quorums & {"", *before}:
            return places
        time.sleep(0.002)  # a step
    raise AssertionError(f"no common quorum: {places}")


def may_step(worker: Worker, workers: Sequence[Worker], busy: set[Worker]) -> bool:
    """Return whether the members of its quorum have made the same steps."""
    if worker.place is None or worker in busy:
        return worker not in busy
    mates = [w for w in workers if w.place and w.place[0] == worker.place[0]]
    return len(mates) == int(worker.place[2]) and not busy.intersection(mates)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def site(tmp_path, monkeypatch) -> Iterator[Site]:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = Site()
    yield made
    made.end()


def test_lighthouse_may_die(site):
    """It is killed and started again: no step fails, quorum ids rise, newcomers join."""
    a, b = site.quorum("a", "b")
    site.stop()
    assert [a.step()[0], b.step()[0]] == ["on", "on"]
    site.start()
    assert [a.step()[0], b.step()[0]] == ["on", "on"]
    (c,) = site.workers("c")
    assert [place[1:] for place in together(a, b, c, calm=True)] == [
        ["0", "3"],
        ["1", "3"],
        ["2", "3"],
    ]


def test_killed_worker_breaks_the_quorum_of_all(site):
    """Each of the others learns it at once, with its name."""
    a, b, c = site.quorum("a", "b", "c")
    os.kill(b.pid, signal.SIGKILL)
    for survivor in (a, c):
        assert "b:" in survivor.wait_for("aborted")
    assert [place[1:] for place in together(a, c)] == [["0", "2"], ["1", "2"]]
    until(lambda: not b.path.parent.exists())


@pytest.mark.long
def test_interpreter_lock_costs_no_membership(site):
    """A worker that holds the interpreter lock for longer than the silence stays a member."""
    a, b = site.quorum("a", "b")
    (c,) = site.workers("c")  # first: its start takes long where the machine is busy
    a.order("hold 4")  # c has withdrawn its request long before
    c.order("step 0.3")
    c.wait_for("late")
    a.wait_for("held")
    together(a, b, c, calm=True)


def test_silent_server_is_lost(site):
    """After the heartbeat time-out; its worker learns it when the server continues."""
    a, b = site.quorum("a", "b")
    os.kill(b.server_pid, signal.SIGSTOP)
    assert "b:" in a.wait_for("aborted")
    os.kill(b.server_pid, signal.SIGCONT)
    assert "aborted" in b.wait_for("aborted")
    together(a, b)


@pytest.mark.long
def test_silent_lighthouse_is_given_up(site):
    """A lighthouse that is stopped costs no step; servers reconnect when it continues."""
    a, b = site.quorum("a", "b")
    site.lighthouse.send_signal(signal.SIGSTOP)
    time.sleep(1.5 * _SILENCE_MS / 1000)
    assert [a.step()[0], b.step()[0]] == ["on", "on"]
    site.lighthouse.send_signal(signal.SIGCONT)
    (c,) = site.workers("c")
    together(a, b, c, calm=True)


@pytest.mark.long
def test_server_process_ends_with_its_workers_only(site):
    """Signals that are meant for the training do not end it; a closed client does."""
    a, b = site.quorum("a", "b")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(b.server_pid, number)
    assert [a.step()[0], b.step()[0]] == ["on", "on"]
    b.order("close")
    b.wait_for("closed")
    until(lambda: not is_alive(b.server_pid))
    assert not b.path.parent.exists()
    assert a.wait_for("aborted")[2:] == ["b", "is", "done"]


@pytest.mark.long
def test_other_keys_are_refused(site, tmp_path):
    """A replica with another key does not join, and its error names the remedy."""
    (tmp_path / "other").mkdir()
    (connection,) = site.workers("a", HOME=str(tmp_path / "other"))
    until(lambda: "~/.config/hpc_elastic/key" in late(connection))


def late(worker) -> str:
    """Return why a worker's step is late."""
    worker.order("step 0.3")
    return " ".join(worker.wait_for("late"))


def test_lighthouse_that_has_ended(site):
    """The error of a replica names its address."""
    (a,) = site.workers("a")
    site.stop()
    until(lambda: f"127.0.0.1:{site.port}" in late(a))


@pytest.mark.long
def test_unauthenticated_connections_do_no_harm(site):
    """Garbage, endless lines and silent connections keep no replica out."""
    connections = []
    for nonsense in (b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 5_000_000, b"0" * 32 + b"\nabc def\n"):
        connections.append(socket.create_connection(("127.0.0.1", site.port), PATIENCE_S))
        try:
            connections[-1].sendall(nonsense)
        except OSError:
            assert len(nonsense) > 1_000_000
    site.quorum("a", "b")
    for connection in connections:
        connection.close()


def test_command_ends_on_sigterm(site):
    """Without an error."""
    assert site.stop(signal.SIGTERM) == 0


def test_taken_port(site, capsys):
    """The error names the port."""
    assert main(["lighthouse", "--bind", f"127.0.0.1:{site.port}"]) == 1
    assert f"--bind 127.0.0.1:{site.port}" in capsys.readouterr().err


def test_server_on_a_thread(tmp_path, monkeypatch):
    """A script may have its own lighthouse; its address is a URL, as torchft's."""
    monkeypatch.setenv("HOME", str(tmp_path))
    server = LighthouseServer(bind="[::]:0", min_replicas=1)
    host, port = parse_address(server.address())
    assert server.address().startswith("http://")
    socket.create_connection((host, port), PATIENCE_S).close()
    server.shutdown()
    server.shutdown()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, port), PATIENCE_S)


@pytest.mark.parametrize("text", ["", "host", "http://host", "host:x", "host:99999"])
def test_addresses_are_checked(text):
    """The error names the form of an address."""
    with pytest.raises(ConfigError, match="host:port"):
        parse_address(text)
    assert parse_address("http://[::1]:5") == parse_address("[::1]:5") == ("::1", 5)


@pytest.mark.parametrize("key", ["min_replicas", "heartbeat_timeout_ms"])
def test_numbers_are_checked(key):
    """The error names the number."""
    with pytest.raises(ConfigError, match=key):
        LighthouseServer("127.0.0.1:0", **{"min_replicas": 1, key: 0})
