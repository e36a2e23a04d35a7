"""The shared file system fails, hangs, fills up, or holds what no agent wrote; sockets are real."""

import contextlib
import errno
import itertools
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from disks import full, mounted, read_only
from group import PATIENCE_S, SECRET, Group, eventually, kill
from training import START_S, Training

from hpc_elastic.agent.task_main import BackgroundLog
from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.rendezvous import term
from hpc_elastic.rendezvous.decision_log import DecisionLog, Lease
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig
from hpc_elastic.rendezvous.log_entry import Endpoint, LogEntry, claim, decode_signed
from hpc_elastic.rendezvous.messages import End, Finished
from hpc_elastic.rendezvous.session import Session

NOBODY = Endpoint("127.0.0.1", 1, "7_9", 0)
"""A leader whose port refuses connections."""
IMPATIENT = HeartbeatConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.8)


class Weather:
    """What the shared file system does to everybody who uses it."""

    def __init__(self) -> None:
        self._errors: Iterator[int] | None = None
        self._spared: tuple[str, ...] = ()
        self._num_failed = 0
        self._answers = threading.Event()
        self._answers.set()

    def meet(self, operation: str) -> None:
        """Let an operation begin, or hang, or fail."""
        assert self._answers.wait(2 * PATIENCE_S)
        if self._errors is not None and operation not in self._spared:
            self._num_failed += 1
            error = next(self._errors)
            raise OSError(error, os.strerror(error))

    def wait_for_failures(self, num: int) -> None:
        """Wait until as many further operations have failed."""
        before = self._num_failed
        eventually(lambda: self._num_failed >= before + num)

    @contextlib.contextmanager
    def failing(self, *errors: int) -> Iterator[None]:
        """Fail every operation with these in turn; on a full file system, those that write."""
        self._spared = ("indices", "read", "lease") if errno.ENOSPC in errors else ()
        self._errors = itertools.cycle(errors)
        try:
            yield
        finally:
            self._errors = None

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Let no operation begin."""
        self._answers.clear()
        try:
            yield
        finally:
            self._answers.set()


class FaultyRegister(DecisionLog):
    """A register on a file system that has weather."""

    def __init__(self, path: Path, secret: bytes, weather: Weather) -> None:
        super().__init__(path, secret)
        self.weather = weather

    def indices(self) -> frozenset[int]:
        """See `DecisionLog`."""
        self.weather.meet("indices")
        return super().indices()

    def read(self, index: int) -> LogEntry | None:
        """See `DecisionLog`."""
        self.weather.meet("read")
        return super().read(index)

    def put(self, entry: LogEntry) -> None:
        """See `DecisionLog`."""
        self.weather.meet("put")
        super().put(entry)

    def make_lease(self, term: int) -> Lease:
        """See `DecisionLog`."""
        lease = super().make_lease(term)
        renew = lease.renew

        def renew_in_weather() -> None:
            self.weather.meet("renew")
            renew()

        lease.renew = renew_in_weather
        return lease

    def lease(self, term: int) -> int | None:
        """See `DecisionLog`."""
        self.weather.meet("lease")
        return super().lease(term)


def faulty(g: Group) -> Weather:
    """Give a group's future agents a file system with weather."""
    weather = Weather()
    g.register = FaultyRegister(g.run.rdzv, SECRET, weather)
    return weather


def entries(g: Group) -> list[LogEntry]:
    """The run's entries that verify, in order."""
    texts = (path.read_text() for path in g.run.rdzv.glob("entry.*.json") if path.is_file())
    found = (decode_signed(text, SECRET) for text in texts if text[:1] == "{")
    return sorted((r for r in found if r is not None), key=lambda entry: entry.index)


def is_connected(session: Session) -> bool:
    """Whether an agent follows a leader."""
    return session._stream is not None


def stay(session: Session, for_s: float) -> None:
    """Let time pass, in which an agent may not lose its group."""
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        assert not session.stop_requested
        time.sleep(0.05)


# ---- a file system that is lost for a while -----------------------------------------------


@pytest.mark.parametrize("errors", [(errno.EIO, errno.ESTALE), (errno.ENOSPC,)])
def test_a_run_outlives_its_file_system_in_every_phase(group, errors):
    """Before the first claim, before a round, in training, and when the leader dies meanwhile."""
    g = group(max_nodes=3)
    g.running = frozenset(f"7_{slot}" for slot in range(3))
    weather = faulty(g)
    with weather.failing(*errors):
        agents = [g.agent(slot) for slot in range(3)]
        weather.wait_for_failures(2 * len(agents))
        assert not any(map(is_connected, agents))
    eventually(lambda: all(map(is_connected, agents)))
    with weather.failing(*errors):
        waiting = [g.threads.submit(s.join, PATIENCE_S) for s in agents]
        weather.wait_for_failures(2)
        assert not any(w.done() for w in waiting)
    assert {w.result(PATIENCE_S).number for w in waiting} == {1}
    with weather.failing(*errors):
        stay(agents[0], 1.0)
    assert not any(s.stop_requested for s in agents)
    leader, others = g.leader, g.followers
    with weather.failing(*errors):
        kill(leader)
        for s in others:
            eventually(lambda s=s: s.stop_requested)
        waiting = [g.threads.submit(s.join, PATIENCE_S) for s in others]
        weather.wait_for_failures(2 * len(others))
        assert not any(w.done() for w in waiting)
    assert {(w.result(PATIENCE_S).number, w.result().world_size) for w in waiting} == {(2, 2)}
    assert [(r.term, r.round) for r in entries(g)] == [(1, 0), (1, 1), (2, 1), (2, 2)]


def test_ten_seconds_of_a_hanging_file_system_are_not_noticed(group):
    """Training goes on; a leader that dies in that time is replaced once it answers again."""
    g = group(max_nodes=2)
    weather = faulty(g)
    agents = [g.agent(slot) for slot in range(2)]
    g.join(*agents)
    leader, (follower,) = g.leader, g.followers
    with weather.hanging():
        stay(follower, 10.0)
        assert not leader.stop_requested
        kill(leader)
        eventually(lambda: follower.stop_requested)
        waiting = g.threads.submit(follower.join, PATIENCE_S)
        time.sleep(0.5)
        assert not waiting.done()
    assert (waiting.result().number, waiting.result().world_size) == (2, 1)


class HangingLog(logging.Handler):
    """Writes nothing until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.answers = threading.Event(), threading.Event()

    def emit(self, _entry: logging.LogRecord) -> None:
        """Hang."""
        self.hangs.set()
        assert self.answers.wait(2 * PATIENCE_S)


@pytest.fixture
def hanging_log(caplog) -> Iterator[HangingLog]:
    """The log of all agents is on a file system that hangs, until the test is over."""
    caplog.set_level(logging.INFO)
    handler = HangingLog()
    log = BackgroundLog(lambda: [handler])
    yield handler
    handler.answers.set()
    log.close()
    logging.getLogger().removeHandler(handler)


def test_a_log_that_can_not_be_written_costs_no_heartbeat(group, hanging_log):
    """The leader logs that a node comes, for which there is no place; the others train on."""
    g = group(max_nodes=2)
    agents = [g.agent(slot) for slot in range(2)]
    g.join(*agents)
    late = g.agent(2)
    with pytest.raises(TimeoutError):
        late.join(1.0)
    stay(g.followers[0], 2 * g.heartbeat.heartbeat_timeout_s)
    assert hanging_log.hangs.is_set()
    hanging_log.answers.set()
    for agent in agents:  # who was to stop may have hung before it could tell
        stay(agent, 0.5)


def test_a_decision_whose_answer_was_lost_is_made_once(group, monkeypatch):
    """EIO from link(2) that came true all the same: the round is closed, under one entry."""
    g = group(max_nodes=1)
    link, lost = os.link, list[Path]()

    def link_and_fail(source: Path, target: Path) -> None:
        link(source, target)
        lost.append(target)
        raise OSError(errno.EIO, "lost on its way")

    monkeypatch.setattr(os, "link", link_and_fail)
    assert g.join(g.agent(0))[0].number == 1
    assert [path.name for path in lost] == ["entry.1.json", "entry.2.json"]


def test_only_the_result_waits_for_a_journal_that_can_not_be_written(group, monkeypatch):
    """Status and events are given up; the end is announced once result.json is there."""
    g = group(max_nodes=2)
    write, failed = term.write_atomic, threading.Event()

    def fail(path: Path, text: str) -> None:
        if path == g.run.result:
            failed.set()
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(term, "write_atomic", fail)
    (g.run.path / "events").rename(g.run.path / "elsewhere")
    agents = [g.agent(slot) for slot in range(2)]
    assert {r.world_size for r in g.join(*agents)} == {2}
    for s in agents:
        s.report(Finished())
    assert failed.wait(PATIENCE_S)
    assert not any(s.verdict for s in agents)
    (g.run.path / "elsewhere").rename(g.run.path / "events")
    monkeypatch.setattr(term, "write_atomic", write)
    for s in agents:
        eventually(lambda s=s: s.verdict == End("succeeded", None))
    assert json.loads(g.run.result.read_text())["status"] == "succeeded"


# ---- a real one that is full, or read-only ------------------------------------------------


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """One megabyte."""
    with mounted(tmp_path / "disk", "1m") as disk:
        yield disk


@pytest.mark.parametrize("state", [full, read_only])
def test_nodes_come_and_go_while_the_disk_can_not_be_written(group, small_disk, state):
    """The new groups are formed as soon as it can be; the leader stays the same."""
    g = group(small_disk / "run", max_nodes=2)
    g.running = frozenset({"7_0"})
    a = g.agent(0)
    g.join(a)
    g.running |= {"7_1"}
    with state(small_disk):
        b = g.agent(1)
        joining = g.threads.submit(b.join, PATIENCE_S)
        eventually(lambda: a.stop_requested)
        again = g.threads.submit(a.join, PATIENCE_S)
        time.sleep(1.0)
        assert not joining.done() and not again.done()
    assert {joining.result().number, again.result().number} == {2}
    with state(small_disk):
        kill(b)
        eventually(lambda: a.stop_requested)
        alone = g.threads.submit(a.join, PATIENCE_S)
        g.running = frozenset({"7_0"})
        time.sleep(1.0)
        assert not alone.done()
    assert (alone.result().number, alone.result().world_size) == (3, 1)
    assert {r.term for r in entries(g)} == {1}


@pytest.mark.long
def test_a_real_run_loses_its_leader_while_its_disk_is_full(small_disk, tmp_path, monkeypatch):
    """The other node trains on alone once there is room, and the run succeeds."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    training = Training(tmp_path, small_disk / "run", nodes="1:2")
    try:
        eventually(lambda: "2" in training.sizes, START_S)
        with full(small_disk):
            os.kill(training.agents()[training.last_index().leader.task], signal.SIGKILL)
            time.sleep(3.0)
        eventually(lambda: training.sizes[-1] == "1", START_S)
        training.goes_on()
    finally:
        training.end()
    assert len(training.results.result()) == 1 and training.results.result().restarts == 0


@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_file_system_without_hard_links_is_an_error_at_once(group, monkeypatch, error):
    """Every agent is told what to do, and leaves nothing behind."""
    g = group(max_nodes=2)

    def refuse(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", refuse)
    for s in [g.agent(0), g.agent(1)]:
        with pytest.raises(RunDirectoryError, match=r"has no hard links.*hydra\.sweep\.dir"):
            s.join(PATIENCE_S)
    eventually(lambda: list(g.run.rdzv.iterdir()) == [g.run.first_term])  # removed behind


# ---- files that no agent of this run wrote ------------------------------------------------


def write_entry(g: Group, number: int, *, secret: bytes = SECRET, **changes: object) -> str:
    """Write an entry whose leader is gone, as an agent with this secret would; return its text."""
    text = replace(claim(number, None, NOBODY, 0.0), **changes).encode_signed(secret)
    (g.run.rdzv / f"entry.{number}.json").write_text(text)
    return text


def cut_short(g: Group) -> None:
    """The last entry's end is missing."""
    text = write_entry(g, 2)
    (g.run.rdzv / "entry.2.json").write_text(text[:-9])


def of_another_run(g: Group) -> None:
    """Somebody has copied another run's last entry in; that run has ended."""
    write_entry(g, 2, secret=b"another run's secret", round=7)


def under_another_number(g: Group) -> None:
    """An entry of this run, copied to a later number."""
    (g.run.rdzv / "entry.3.json").write_text(write_entry(g, 2, round=3))


def after_a_gap(g: Group) -> None:
    """Entries 2 to 4 are missing."""
    write_entry(g, 5, round=3)


def damaged_after_a_gap(g: Group) -> None:
    """Entries 2 to 4 are missing, and the fifth does not verify."""
    (g.run.rdzv / "entry.5.json").write_text("{}")


def folder(g: Group) -> None:
    """A folder has the name of an entry."""
    (g.run.rdzv / "entry.9.json").mkdir()


def nested_deeply(g: Group) -> None:
    """The parser's stack would overflow."""
    (g.run.rdzv / "entry.2.json").write_text("[" * 100_000)


def leftovers(g: Group) -> None:
    """Agents died halfway to an entry."""
    for name in (".entry.0123", ".entry.json", "entry.2.json.new", "entry.x.json"):
        (g.run.rdzv / name).write_text("{}")


@pytest.mark.parametrize(
    "damage",
    [
        cut_short, of_another_run, under_another_number, after_a_gap, damaged_after_a_gap,
        folder, nested_deeply, leftovers,
    ],
)  # fmt: skip
def test_damaged_entries_are_passed_over(group, damage: Callable[[Group], None]):
    """After the time that a silent leader would get, the run goes on from the last good entry."""
    g = group(max_nodes=2)
    g.heartbeat = IMPATIENT
    write_entry(g, 1, round=3)
    damage(g)
    before = g.register.last_index()
    assert {(r.number, r.world_size) for r in g.join(g.agent(0), g.agent(1))} == {(4, 2)}
    assert [(r.index, r.term) for r in entries(g)[-2:]] == [
        (before + 1, before + 1),  # each number may have begun a term
        (before + 2, before + 1),
    ]


@pytest.mark.parametrize("lease", [b"", b"\xff\xfe|", b"1|2|00", b"|||", b"[" * 9999])
def test_a_lease_of_garbage_keeps_no_dead_leader_in_office(group, lease):
    """The leader's port takes connections and says nothing; only the lease could speak for it."""
    g = group(max_nodes=1)
    g.heartbeat = IMPATIENT
    with silent_leader(g):
        (g.run.rdzv / "lease.1").write_bytes(lease)
        assert g.join(g.agent(0))[0].world_size == 1
    assert [(r.index, r.term) for r in entries(g)] == [(1, 1), (2, 2), (3, 2)]


@contextlib.contextmanager
def silent_leader(g: Group) -> Iterator[None]:
    """An entry whose leader's port is open, though nobody serves it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        write_entry(g, 1, leader=replace(NOBODY, port=server.getsockname()[1]))
        yield
