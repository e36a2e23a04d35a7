"""The log on the file system: one agent creates each index, and only signed entries count."""

import errno
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.effects import RemoveEntries
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig, LeaderState
from hpc_elastic.rendezvous.log_entry import Endpoint, LogEntry, RoundRules, claim

SECRET = b"s"
LEADER = Endpoint("10.0.0.1", 4000, "7_0", 0)
FIRST = LogEntry(1, 1, LEADER, started=5.0)


@pytest.fixture
def log(tmp_path) -> DecisionLog:
    """The empty log of a run."""
    return DecisionLog(tmp_path, SECRET)


def entry(number: int, port: int = 4000) -> LogEntry:
    """An entry of some leader."""
    return LogEntry(number, 1, replace(LEADER, port=port), started=5.0)


def files(log: DecisionLog) -> list[str]:
    """The names in the log's folder, once background removals are done."""
    for thread in threading.enumerate():
        if thread.name.startswith("removal of "):
            thread.join(10)
    return sorted(p.name for p in log.path.iterdir())


def failing(monkeypatch, call: str, number: int, *, after: bool = False) -> None:
    """Let a system call fail; ``after``: once it has done its work."""
    real = getattr(os, call)

    def fail(*arguments: object) -> None:
        if after:
            real(*arguments)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(f"os.{call}", fail)


# ---- exclusive creation -------------------------------------------------------------------


def test_an_empty_log_has_no_entry(log):
    """Index 0 stands for none."""
    assert log.last() == (0, None) and log.last_index() == 0


def test_the_highest_index_counts(log):
    """The tenth entry comes after the ninth."""
    for number in range(1, 12):
        assert log.create(entry(number))
    assert log.last() == (11, entry(11))


def test_an_index_is_taken_once(log):
    """The first entry stays."""
    assert log.create(entry(1, 4000))
    assert not log.create(entry(1, 4001))
    assert log.last() == (1, entry(1, 4000))


def test_one_of_many_racing_threads_wins_each_index(log):
    """link(2) has one winner, and the entry is whole for all others."""
    begin = threading.Barrier(16)

    def race(port: int) -> list[int]:
        won = []
        for number in range(1, 21):
            begin.wait(10)  # a winner that is overtaken is refused
            if log.create(entry(number, port)):
                won.append(number)
            assert log.last()[1] is not None, "an entry is seen whole, or not at all"
        return won

    with ThreadPoolExecutor(16) as pool:
        won = [number for numbers in pool.map(race, range(4000, 4016)) for number in numbers]
    assert sorted(won) == list(range(1, 21))
    assert len(files(log)) == 20


_RACER = """
import sys
from pathlib import Path
from hpc_elastic.rendezvous.log_entry import Endpoint, LogEntry
from hpc_elastic.rendezvous.decision_log import DecisionLog
log, port = DecisionLog(Path(sys.argv[1]), b"s"), int(sys.argv[2])
leader = Endpoint("10.0.0.1", port, "7_0", 0)
print("ready", flush=True)
for n in range(1, 101):
    sys.stdin.readline()
    print(log.create(LogEntry(n, 1, leader)), flush=True)
"""


def test_one_of_several_processes_wins_each_index(log):
    """The exclusion is the file system's, not the process's."""
    command = [sys.executable, "-c", _RACER, str(log.path)]
    racers = [
        subprocess.Popen(
            [*command, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for port in (1, 2, 3)
    ]
    try:
        for racer in racers:
            assert racer.stdout.readline() == "ready\n"
        for number in range(1, 101):
            for racer in racers:
                racer.stdin.write("go\n")
                racer.stdin.flush()
            answers = sorted(racer.stdout.readline() for racer in racers)
            assert answers == ["False\n", "False\n", "True\n"], number
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    assert log.last_index() == 100


@pytest.mark.parametrize("number", [errno.EIO, errno.EEXIST])
def test_a_link_that_was_made_though_its_reply_was_lost(log, monkeypatch, number):
    """The entry names its leader. An NFS client that repeats the call gets EEXIST."""
    failing(monkeypatch, "link", number, after=True)
    assert log.create(FIRST)
    assert log.last() == (1, FIRST) and files(log) == ["entry.1.json"]


def test_an_entry_of_an_earlier_try_is_its_own(log):
    """A try with an unknown outcome may be repeated."""
    assert log.create(FIRST) and log.create(FIRST)


def test_no_decision_waits_for_a_removal_that_hangs(log, monkeypatch):
    """An NFS server waits 100 s for a dead client's delegation before it removes a name."""
    goes_on, unlink = threading.Event(), Path.unlink

    def hang(path, missing_ok=False):
        goes_on.wait(10)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", hang)
    try:
        assert log.create(FIRST) and log.last() == (1, FIRST)
        assert len(list(log.path.iterdir())) == 2, "its other name is still there"
    finally:
        goes_on.set()
    assert files(log) == ["entry.1.json"]


# ---- removal ------------------------------------------------------------------------------


def test_old_entries_and_leases_are_removed_and_the_last_one_is_found(log):
    """Whatever else is in the folder stays."""
    for number in range(1, 12):
        assert log.create(entry(number))
        log.make_lease(number).renew()
    (log.path / "term.0").mkdir()
    log.remove_old(10, 11)
    assert files(log) == ["entry.10.json", "entry.11.json", "lease.11", "term.0"]
    assert log.last() == (11, entry(11)) and log.create(entry(12))


@pytest.mark.parametrize("lost", [False, True], ids=["", "its reply is lost"])
def test_an_index_that_was_removed_decides_nothing_again(log, monkeypatch, lost):
    """A process that was stalled creates it, finds a later one, and its file goes with the next."""
    for number in range(1, 12):
        log.create(entry(number))
    log.remove_old(11, 0)
    assert files(log) == ["entry.11.json"]
    with monkeypatch.context() as failed:
        if lost:
            failing(failed, "link", errno.EIO, after=True)
        assert not log.create(entry(3, port=4001))
    assert not log.create(entry(3, port=4001)), "nor when it is tried again"
    assert log.last() == (11, entry(11))
    log.remove_old(11, 0)
    assert files(log) == ["entry.11.json"]


def test_an_entry_that_is_removed_while_it_is_read_is_not_damaged(log, monkeypatch):
    """The reader was stalled between its listing and the file: it lists again."""
    log.create(entry(1))
    read = DecisionLog.read

    def read_late(self, index):
        if index == 1:
            log.create(entry(2))
            log.remove_old(2, 0)
            files(log)
        return read(self, index)

    monkeypatch.setattr(DecisionLog, "read", read_late)
    assert log.last() == (2, entry(2))


def test_thousands_of_terms_and_rounds_leave_a_bounded_number_of_files(log):
    """Each leader removes what it finds, though none of them closes many rounds."""
    heartbeat, rules = HeartbeatConfig(1.0, 3.0), RoundRules(1, 1, 0, 60.0, 5.0)
    before, most = None, 0
    for index in range(1, 1001, 2):
        before = claim(index, before, LEADER, 1000.0)
        leader = LeaderState(before, rules, heartbeat, 0.0, random.Random(0))
        assert log.create(before)
        log.make_lease(before.term).renew()
        leader.at = before = replace(before, index=index + 1, round=before.round + 1)
        assert log.create(before)
        removals = [e for now in range(4) for e in leader.tick(now) if type(e) is RemoveEntries]
        assert len(removals) == (index + 1 > LeaderState.num_kept)
        for removal in removals:
            log.remove_old(removal.index, removal.term)
            most = max(most, len(files(log)))
    assert before.round == before.term == 500 and log.last() == (1000, before)
    assert 128 <= most <= 135


# ---- failures -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ("EPERM EOPNOTSUPP ENOSYS EMLINK EXDEV", r"hard links.*hydra\.sweep\.dir"),
        ("EACCES EROFS", "not writable on this node"),
    ],
)
def test_a_permanent_error_names_the_folder_and_the_problem(log, monkeypatch, numbers, problem):
    """A retry would not help."""
    for number in numbers.split():
        with monkeypatch.context() as failed:
            failing(failed, "link", getattr(errno, number))
            with pytest.raises(RunDirectoryError, match=problem) as e:
                log.create(FIRST)
        assert str(log.path) in str(e.value) and files(log) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EDQUOT])
@pytest.mark.parametrize("call", ["link", "fsync"])
def test_a_file_system_that_fails_for_now_may_be_tried_again(log, monkeypatch, call, number):
    """The original error is raised, no file stays, and the next try succeeds."""
    with monkeypatch.context() as failed:
        failing(failed, call, number)
        with pytest.raises(OSError, match=os.strerror(number)) as e:
            log.create(FIRST)
    assert not isinstance(e.value, RunDirectoryError) and e.value.errno == number
    assert files(log) == []
    assert log.create(FIRST)


def test_a_missing_folder_is_an_error_of_the_file_system(tmp_path):
    """An empty result would let an agent claim the first term again."""
    gone = DecisionLog(tmp_path / "gone", SECRET)
    with pytest.raises(OSError, match="gone"):
        gone.last()
    with pytest.raises(OSError, match="gone"):
        gone.create(FIRST)


# ---- damage -------------------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    """Damage an entry's file."""
    match how:
        case "cut":
            path.write_text(path.read_text()[:40])
        case "empty":
            path.write_text("")
        case "forged":
            path.write_text(replace(FIRST, index=2).encode_signed(b"other"))
        case "renamed":
            path.write_text(replace(FIRST, index=3, term=9).encode_signed(SECRET))
        case "binary":
            path.write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize("how", ["cut", "empty", "forged", "renamed", "binary"])
def test_a_damaged_entry_counts_and_the_one_before_is_read(log, how):
    """Its index is taken; its decision is unknown."""
    log.create(FIRST)
    log.create(entry(2))
    damage(log.path / "entry.2.json", how)
    assert log.last() == (2, FIRST)
    assert not log.create(entry(2))


def test_if_no_entry_verifies_the_indices_still_count(log):
    """The next claim follows them."""
    for index in (1, 2, 3):
        (log.path / f"entry.{index}.json").write_text("garbage")
    assert log.last() == (3, None)


# ---- leases -------------------------------------------------------------------------------


def test_a_lease_shows_each_renewal(log):
    """Readers see another value, and need only their own clock."""
    assert log.lease(1) is None
    lease = log.make_lease(1)
    for beats in (1, 2):
        lease.renew()
        assert log.lease(1) == beats


def test_each_term_has_a_lease_of_its_own(log):
    """A fenced leader that keeps renewing its lease does not renew the present one."""
    first, second = log.make_lease(1), log.make_lease(2)
    first.renew()
    assert log.lease(2) is None
    second.renew()
    first.renew()
    assert (log.lease(1), log.lease(2)) == (2, 1)


def test_a_lease_that_does_not_verify_is_none(log):
    """It is of another run, of another term, cut short, or garbage."""
    lease = log.path / "lease.2"
    DecisionLog(log.path, b"other").make_lease(2).renew()
    assert log.lease(2) is None
    log.make_lease(1).renew()
    lease.write_text((log.path / "lease.1").read_text())
    assert log.lease(2) is None
    for garbage in (b"", b"2|7|", b"\xff\xfe", b"2|7", b"||"):
        lease.write_bytes(garbage)
        assert log.lease(2) is None


def test_a_lease_whose_file_went_stale_is_opened_anew(log):
    """After a restart of the file server one renewal fails, and the next one succeeds."""
    lease = log.make_lease(1)
    lease.renew()
    os.close(lease._fd)
    with pytest.raises(OSError, match="Bad file"):
        lease.renew()
    lease.renew()
    assert log.lease(1) == 3


def test_a_lease_is_closed_behind_a_renewal_that_hangs(log, monkeypatch):
    """An earlier close could hit the descriptor of another file."""
    lease, goes_on, closed = log.make_lease(1), threading.Event(), []
    monkeypatch.setattr(os, "fdatasync", lambda fd: closed or goes_on.wait(10))
    thread = threading.Thread(target=lease.renew)
    thread.start()
    while lease._fd is None:
        time.sleep(0.01)
    fd = lease._fd
    lease.close()
    os.fstat(fd)
    goes_on.set()
    thread.join(10)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_a_lease_is_no_entry(log):
    """It takes no index."""
    log.make_lease(9).renew()
    assert log.last() == (0, None)
