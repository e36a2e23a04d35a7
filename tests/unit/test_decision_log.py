"""The entries on the file system: one creator a number, and only signed ones count."""

import errno
import os
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
from hpc_elastic.rendezvous.log_entry import Endpoint, LogEntry

SECRET = b"s"
LEADER = Endpoint("10.0.0.1", 4000, "7_0", 0)
FIRST = LogEntry(1, 1, LEADER, started=5.0)


@pytest.fixture
def register(tmp_path) -> DecisionLog:
    """The empty register of a run."""
    return DecisionLog(tmp_path, SECRET)


def entry(number: int, port: int = 4000) -> LogEntry:
    """An entry of some leader."""
    return LogEntry(number, 1, replace(LEADER, port=port), started=5.0)


def files(register: DecisionLog) -> list[str]:
    """What lies in the register's folder, once what is removed behind is gone."""
    for thread in threading.enumerate():
        if thread.name.startswith("removal of "):
            thread.join(10)
    return sorted(p.name for p in register.path.iterdir())


def failing(monkeypatch, call: str, number: int, *, after: bool = False) -> None:
    """Let a call of the operating system fail; ``after``: when it has done its work."""
    real = getattr(os, call)

    def fail(*arguments: object) -> None:
        if after:
            real(*arguments)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(f"os.{call}", fail)


# ---- exclusive creation -------------------------------------------------------------------


def test_an_empty_register_has_no_entry(register):
    """Number 0 stands for none."""
    assert register.last() == (0, None) and register.last_index() == 0


def test_the_highest_number_counts(register):
    """The tenth entry comes after the ninth."""
    for number in range(1, 12):
        assert register.create(entry(number))
    assert register.last() == (11, entry(11))


def test_a_number_is_taken_once(register):
    """What stands there stays."""
    assert register.create(entry(1, 4000))
    assert not register.create(entry(1, 4001))
    assert register.last() == (1, entry(1, 4000))


def test_one_of_many_racing_threads_wins_each_number(register):
    """link(2) has one winner, and the entry is whole for all others."""
    start = threading.Barrier(16)

    def race(port: int) -> list[int]:
        start.wait(10)
        won = []
        for number in range(1, 21):
            if register.create(entry(number, port)):
                won.append(number)
            assert register.last()[1] is not None, "an entry is seen whole, or not at all"
        return won

    with ThreadPoolExecutor(16) as pool:
        won = [number for numbers in pool.map(race, range(4000, 4016)) for number in numbers]
    assert sorted(won) == list(range(1, 21))
    assert len(files(register)) == 20


_RACER = """
import sys
from pathlib import Path
from hpc_elastic.rendezvous.log_entry import Endpoint, LogEntry
from hpc_elastic.rendezvous.decision_log import DecisionLog
register, port = DecisionLog(Path(sys.argv[1]), b"s"), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
leader = Endpoint("10.0.0.1", port, "7_0", 0)
print(*(n for n in range(1, 101) if register.create(LogEntry(n, 1, leader))))
"""


def test_one_of_several_processes_wins_each_number(register):
    """Nothing of what makes it exclusive lives in a process."""
    command = [sys.executable, "-c", _RACER, str(register.path)]
    racers = [
        subprocess.Popen(
            [*command, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for port in (1, 2, 3)
    ]
    try:
        for racer in racers:
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        outputs = [racer.communicate(timeout=60)[0] for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    won = sorted(int(number) for output in outputs for number in output.split())
    assert won == list(range(1, 101))


def test_a_link_that_came_true_though_its_answer_was_lost(register, monkeypatch):
    """open(2), O_EXCL: the number of links of one's own file tells."""
    failing(monkeypatch, "link", errno.EIO, after=True)
    assert register.create(FIRST)
    assert register.last() == (1, FIRST) and files(register) == ["entry.1.json"]


def test_a_link_that_was_made_twice_by_the_client_came_true(register, monkeypatch):
    """A client of NFS that repeats a lost call is told that the file exists: its own."""
    failing(monkeypatch, "link", errno.EEXIST, after=True)
    assert register.create(FIRST)


def test_an_entry_of_a_try_before_is_ones_own(register):
    """A try whose outcome nobody could tell may be repeated."""
    assert register.create(FIRST) and register.create(FIRST)


def test_no_decision_waits_for_a_removal_that_hangs(register, monkeypatch):
    """A server of NFS waits 100 s for a dead client's delegation before it removes a name."""
    goes_on, unlink = threading.Event(), Path.unlink

    def hang(path, missing_ok=False):
        goes_on.wait(10)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", hang)
    try:
        assert register.create(FIRST) and register.last() == (1, FIRST)
        assert len(list(register.path.iterdir())) == 2, "its other name is there still"
    finally:
        goes_on.set()
    assert files(register) == ["entry.1.json"]


# ---- failures -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV]
)
def test_a_file_system_without_hard_links_is_named(register, monkeypatch, number):
    """The error says what the file system lacks, and what to do."""
    failing(monkeypatch, "link", number)
    with pytest.raises(RunDirectoryError, match=r"hard links.*hydra\.sweep\.dir") as e:
        register.create(FIRST)
    assert str(register.path) in str(e.value) and files(register) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_written_is_named(register, monkeypatch, number):
    """It will not become writable by trying again."""
    failing(monkeypatch, "link", number)
    with pytest.raises(RunDirectoryError, match="not writable on this node") as e:
        register.create(FIRST)
    assert str(register.path) in str(e.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EDQUOT])
@pytest.mark.parametrize("call", ["link", "fsync"])
def test_a_file_system_that_fails_for_now_may_be_tried_again(register, monkeypatch, call, number):
    """The error is the file system's own, nothing is left behind, and the next try succeeds."""
    with monkeypatch.context() as failed:
        failing(failed, call, number)
        with pytest.raises(OSError, match=os.strerror(number)) as e:
            register.create(FIRST)
    assert not isinstance(e.value, RunDirectoryError) and e.value.errno == number
    assert files(register) == []
    assert register.create(FIRST)


def test_a_missing_folder_is_an_error_of_the_file_system(tmp_path):
    """To read nothing from it would be to claim the first term again."""
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
def test_a_damaged_entry_counts_and_the_one_before_is_read(register, how):
    """Its number is taken; what it said is unknown."""
    register.create(FIRST)
    register.create(entry(2))
    damage(register.path / "entry.2.json", how)
    assert register.last() == (2, FIRST)
    assert not register.create(entry(2))


def test_where_no_entry_verifies_the_numbers_still_count(register):
    """The next claim comes after them."""
    (register.path / "entry.3.json").write_text("garbage")
    (register.path / "entry.2.json").write_text("garbage")
    (register.path / "entry.1.json").write_text("garbage")
    assert register.last() == (3, None)


# ---- leases -------------------------------------------------------------------------------


def test_a_lease_shows_each_renewal(register):
    """Readers see another number, and need no clock but their own."""
    assert register.lease(1) is None
    lease = register.make_lease(1)
    for beats in (1, 2):
        lease.renew()
        assert register.lease(1) == beats


def test_each_term_has_a_lease_of_its_own(register):
    """A fenced leader that renews its lease on does not speak for the present one."""
    first, second = register.make_lease(1), register.make_lease(2)
    first.renew()
    assert register.lease(2) is None
    second.renew()
    first.renew()
    assert (register.lease(1), register.lease(2)) == (2, 1)


def test_a_lease_that_does_not_verify_is_none(register):
    """Of another run, of another term, cut short, or garbage."""
    lease = register.path / "lease.2"
    DecisionLog(register.path, b"other").make_lease(2).renew()
    assert register.lease(2) is None
    register.make_lease(1).renew()
    lease.write_text((register.path / "lease.1").read_text())
    assert register.lease(2) is None
    for garbage in (b"", b"2|7|", b"\xff\xfe", b"2|7", b"||"):
        lease.write_bytes(garbage)
        assert register.lease(2) is None


def test_a_lease_whose_file_went_stale_is_opened_anew(register):
    """As after a restart of the file server: one renewal fails, the next one does not."""
    lease = register.make_lease(1)
    lease.renew()
    os.close(lease._fd)
    with pytest.raises(OSError, match="Bad file"):
        lease.renew()
    lease.renew()
    assert register.lease(1) == 3


def test_a_lease_is_closed_behind_a_renewal_that_hangs(register, monkeypatch):
    """Its descriptor may be another file's by then."""
    lease, goes_on, closed = register.make_lease(1), threading.Event(), []
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


def test_a_lease_is_no_entry(register):
    """It takes no number."""
    register.make_lease(9).renew()
    assert register.last() == (0, None)
