"""A lighthouse and its attendants: real processes, which are killed, stopped and lied to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from ft_group import PATIENCE_S, Worker

from hpc_elastic.cli.main import main
from hpc_elastic.errors import ConfigError
from hpc_elastic.ft import manager_server_process
from hpc_elastic.ft.coordination import LighthouseServer
from hpc_elastic.ft.manager_client import ManagerClient
from hpc_elastic.ft.messages import parse_address

_CLI = "import sys; from hpc_elastic.cli.main import main; sys.exit(main())"
_SILENCE_MS = 1000


class Sea:
    """One lighthouse, and whoever looks out for it."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self.port = 0
        self.light()

    def light(self) -> None:
        """Start the lighthouse, again at the same port."""
        arguments = ["--bind", f"127.0.0.1:{self.port}", "--heartbeat-timeout-ms", str(_SILENCE_MS)]
        self.lighthouse = subprocess.Popen(
            [sys.executable, "-c", _CLI, "lighthouse", *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = self.lighthouse.stdout.readline().strip().partition("=")[2]
        self.port = parse_address(self.url)[1]

    def put_out(self, number: int = signal.SIGKILL) -> int:
        """End the lighthouse; return its exit code."""
        self.lighthouse.send_signal(number)
        self.lighthouse.stdout.close()
        return self.lighthouse.wait(PATIENCE_S)

    def workers(self, *names: str, **environment: str) -> list[Worker]:
        """Start replicas of one worker each, with attendants."""
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
            self.put_out()


def together(*workers: Worker, calm: bool = False) -> list[list[str]]:
    """Make steps, in lockstep once they are members, until all are in one quorum.

    Args:
        workers: They are at the end of a step.
        calm: It is an error if a quorum breaks meanwhile.

    Returns:
        The place of each: its quorum, its rank, the number of members.
    """
    busy: set[Worker] = set()
    words = ("on", "placed", "broken") if calm else ("on", "placed")
    before = {worker.place[0] for worker in workers if worker.place}
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for worker in [w for w in workers if may_step(w, workers, busy)]:
            worker.tell("step")
            busy.add(worker)
        for worker in list(busy):
            if said := worker.has_said(words):
                assert said[0] != "broken"
                busy.discard(worker)
        places = [worker.place for worker in workers]
        quorums = {place[0] if place else "" for place in places}
        if not busy and len(quorums) == 1 and not quorums & {"", *before}:
            return places
        time.sleep(0.002)  # a step
    raise AssertionError(f"no common quorum: {places}")


def may_step(worker: Worker, workers: Sequence[Worker], busy: set[Worker]) -> bool:
    """Tell whether those that it would meet in a collective have made the same steps."""
    if worker.place is None or worker in busy:
        return worker not in busy
    mates = [w for w in workers if w.place and w.place[0] == worker.place[0]]
    return len(mates) == int(worker.place[2]) and not busy.intersection(mates)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def sea(tmp_path, monkeypatch) -> Iterator[Sea]:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = Sea()
    yield made
    made.end()


def test_lighthouse_may_die(sea):
    """It is killed and comes back: no step fails meanwhile, quorum ids rise, newcomers get in."""
    a, b = sea.quorum("a", "b")
    sea.put_out()
    assert [a.step()[0], b.step()[0]] == ["on", "on"]
    sea.light()
    assert [a.step()[0], b.step()[0]] == ["on", "on"]
    (c,) = sea.workers("c")
    assert [place[1:] for place in together(a, b, c, calm=True)] == [
        ["0", "3"],
        ["1", "3"],
        ["2", "3"],
    ]


def test_killed_worker_breaks_the_quorum_of_all(sea):
    """When one worker is killed, each of the others is told at once, by its name."""
    a, b, c = sea.quorum("a", "b", "c")
    os.kill(b.pid, signal.SIGKILL)
    for survivor in (a, c):
        assert "b:" in survivor.says("broken")
    assert [place[1:] for place in together(a, c)] == [["0", "2"], ["1", "2"]]
    until(lambda: not b.path.parent.exists())


def test_interpreter_lock_costs_no_membership(sea):
    """A worker that holds the interpreter lock for longer than the silence stays a member."""
    a, b = sea.quorum("a", "b")
    a.tell("hold 2")
    (c,) = sea.workers("c")
    c.tell("step 0.3")
    c.says("late")
    a.says("held")
    together(a, b, c, calm=True)


def test_silent_attendant_is_lost(sea):
    """An attendant that says nothing is given up after the heartbeat timeout."""
    a, b = sea.quorum("a", "b")
    os.kill(b.attendant, signal.SIGSTOP)
    assert "b:" in a.says("broken")
    os.kill(b.attendant, signal.SIGCONT)
    assert "broken" in b.says("broken")
    together(a, b)


def test_silent_lighthouse_is_given_up(sea):
    """A lighthouse that stands still costs no step; attendants come back when it goes on."""
    a, b = sea.quorum("a", "b")
    sea.lighthouse.send_signal(signal.SIGSTOP)
    time.sleep(1.5 * _SILENCE_MS / 1000)
    assert [a.step()[0], b.step()[0]] == ["on", "on"]
    sea.lighthouse.send_signal(signal.SIGCONT)
    (c,) = sea.workers("c")
    together(a, b, c, calm=True)


def test_attendant_ends_with_its_workers_only(sea):
    """Signals that are meant for the training do not end it; a closed link does, in peace."""
    a, b = sea.quorum("a", "b")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(b.attendant, number)
    assert [a.step()[0], b.step()[0]] == ["on", "on"]
    b.tell("close")
    b.says("closed")
    until(lambda: not is_alive(b.attendant))
    assert not b.path.parent.exists()
    assert a.says("broken")[2:] == ["b", "is", "done"]


def test_other_keys_are_refused(sea, tmp_path):
    """A replica with another key does not get in, and its error says what to do."""
    (tmp_path / "other").mkdir()
    (stranger,) = sea.workers("a", HOME=str(tmp_path / "other"))
    until(lambda: "~/.config/hpc_elastic/key" in late(stranger))


def late(worker) -> str:
    """Return why a worker's step is late."""
    worker.tell("step 0.3")
    return " ".join(worker.says("late"))


def test_nobody_there(sea):
    """Who can not reach the lighthouse is told so by its address."""
    (a,) = sea.workers("a")
    sea.put_out()
    until(lambda: f"127.0.0.1:{sea.port}" in late(a))


def test_strangers_do_no_harm(sea):
    """Garbage, endless lines and silent connections do not keep anybody else out."""
    strangers = []
    for nonsense in (b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 5_000_000, b"0" * 32 + b"\nabc def\n"):
        strangers.append(socket.create_connection(("127.0.0.1", sea.port), PATIENCE_S))
        try:
            strangers[-1].sendall(nonsense)
        except OSError:
            assert len(nonsense) > 1_000_000
    sea.quorum("a", "b")
    for stranger in strangers:
        stranger.close()


def test_command_ends_when_it_is_told_to(sea):
    """SIGTERM ends the command, without an error."""
    assert sea.put_out(signal.SIGTERM) == 0


def test_taken_port(sea, capsys):
    """A port that can not be had is named."""
    assert main(["lighthouse", "--bind", f"127.0.0.1:{sea.port}"]) == 1
    assert f"--bind 127.0.0.1:{sea.port}" in capsys.readouterr().err


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


def test_spare_attendant(sea, monkeypatch):
    """One that was started ahead of its orders is taken, and ends unused with its process."""
    script = "from hpc_elastic.ft.manager_server_process import prewarm; prewarm()"
    assert subprocess.run([sys.executable, "-W", "error", "-c", script], timeout=30).returncode == 0
    monkeypatch.setattr(manager_server_process, "_spare", None)
    manager_server_process.prewarm()
    spare = manager_server_process._spare
    taken = manager_server_process.start_attendant(sea.url, "a", 1)
    assert taken is spare
    ManagerClient(taken.path, 0, 1, on_broken=print, timeout_s=PATIENCE_S).close()
    taken.end()
    assert taken.process.returncode == 0
    assert not taken.path.parent.exists()


@pytest.mark.parametrize("text", ["", "host", "http://host", "host:x", "host:99999"])
def test_addresses_are_checked(text):
    """What is no address is refused with what one looks like."""
    with pytest.raises(ConfigError, match="host:port"):
        parse_address(text)
    assert parse_address("http://[::1]:5") == parse_address("[::1]:5") == ("::1", 5)


@pytest.mark.parametrize("key", ["min_replicas", "heartbeat_timeout_ms"])
def test_numbers_are_checked(key):
    """A number out of range is refused by its name."""
    with pytest.raises(ConfigError, match=key):
        LighthouseServer("127.0.0.1:0", **{"min_replicas": 1, key: 0})
