"""When output was written: the index beside a file, its readers, and the thread that keeps it."""

import logging
import os
import threading
import time
from bisect import bisect_left
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hpc_elastic.agent import output_files
from hpc_elastic.agent.output_files import OutputTimes
from hpc_elastic.run.log_index import Index, IndexWriter, index_of
from hpc_elastic.shared_files import Mount


def eventually(condition) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


@pytest.fixture
def times():
    """Make threads that are ended with the test."""
    made = []

    def make(*files):
        made.append(OutputTimes(files))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_an_index_tells_when_each_byte_was_there(tmp_path):
    """In any order, of more records than a reader has in memory."""
    writer = IndexWriter(tmp_path / "out")
    sizes = [7 * n + 3 for n in range(5000)]
    for n, size in enumerate(sizes):
        writer.append(size, 100.0 + n)
    index = Index(tmp_path / "out")
    for end in [0, 3, 4, 10, 11, *range(0, sizes[-1], 997), 5, sizes[-1]]:
        assert index.time_at(end) == 100.0 + bisect_left(sizes, end), end
    assert index.time_at(sizes[-1] + 1) is None
    assert (index.first_time, index.covered) == (100.0, sizes[-1])
    assert [index.written_before(t) for t in (0, 100, 100.5, 200, 1e9)] == [
        0, 0, sizes[0], sizes[99], sizes[-1]
    ]  # fmt: skip
    writer.append(sizes[-1] + 50, 9e9)
    assert index.time_at(sizes[-1] + 1) == 9e9, "it grows while it is read"
    writer.close()


def test_a_file_without_an_index_has_no_times(tmp_path):
    """As of a run of an earlier version."""
    index = Index(tmp_path / "out")
    assert (index.time_at(5), index.first_time, index.covered) == (None, None, 0)
    assert index.written_before(7.0) == 0


def test_a_torn_record_is_none_and_is_written_over(tmp_path):
    """The disk was full, or the node died."""
    out = tmp_path / "out"
    writer = IndexWriter(out)
    writer.append(10, 1.0)
    writer.close()
    with index_of(out).open("ab") as f:
        f.write(b"torn")
    assert (Index(out).covered, Index(out).time_at(11)) == (10, None)
    again = IndexWriter(out)
    again.append(20, 2.0)
    again.close()
    assert Index(out).time_at(11) == 2.0 and index_of(out).stat().st_size == 32


def test_what_is_written_is_timed_while_it_is_written(times, tmp_path):
    """Each piece between the moments before and after it, but for the exactness of a look."""
    out = tmp_path / "round-1.rank-0.out"
    keeper = times()
    keeper.new_round([out, tmp_path / "never"])
    began, ends = [], []
    with out.open("wb", buffering=0) as f:
        for n in range(3):
            began.append(time.time())
            f.write(b"some bytes\n" * (n + 1))
            ends.append(f.tell())
            eventually(lambda: Index(out).covered == ends[-1])
    found = [Index(out).time_at(end) for end in ends]
    after = [*began[1:], time.time()]
    assert all(b <= t <= a for b, t, a in zip(began, found, after, strict=True))
    assert not index_of(tmp_path / "never").exists()


def test_the_last_output_of_a_round_is_timed(times, tmp_path):
    """A worker that was killed has written what it has written; then its files are let go."""
    keeper = times()
    out = tmp_path / "out"
    keeper.new_round([out])
    out.write_bytes(b"first\n")
    eventually(lambda: Index(out).covered == 6)
    with out.open("ab") as f:
        f.write(b"last words\n")
    keeper.new_round([tmp_path / "other"])
    eventually(lambda: Index(out).covered == 17)
    eventually(lambda: out not in {Path(file.path) for file in psutil.Process().open_files()})


def test_the_end_of_the_agent_is_the_last_look(times, tmp_path, monkeypatch):
    """What was written just before is timed, too."""
    monkeypatch.setattr(output_files, "_JOIN_S", 60.0)
    out = tmp_path / "agent.log"
    keeper = times(out)
    out.write_bytes(b"hello\n")
    eventually(lambda: Index(out).covered == 6)
    with out.open("ab") as f:
        f.write(b"bye\n")
    keeper.close()
    assert Index(out).covered == 10


def test_a_disk_that_is_full_is_complained_of_once_and_costs_the_times_only(
    times, tmp_path, monkeypatch, caplog
):
    """And when it has room again, the times go on."""
    full = True
    write = os.pwrite

    def pwrite(fd, data, at):
        if full:
            raise OSError(28, "No space left on device")
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with caplog.at_level(logging.WARNING):
        keeper = times()
        out = tmp_path / "out"
        out.write_bytes(b"hello\n")
        keeper.new_round([out, tmp_path / "other"])
        (tmp_path / "other").write_bytes(b"hello\n")
        eventually(lambda: "No space left" in caplog.text)
        full = False
        eventually(lambda: Index(out).covered == 6)
    assert caplog.text.count("less exact") == 1


def test_a_quota_that_is_told_of_at_the_close_costs_one_file_only(times, tmp_path, monkeypatch):
    """The times of the others go on (NFS)."""
    closed = []

    def close(index):
        closed.append(index)
        raise OSError(122, "Disk quota exceeded")

    keeper = times(tmp_path / "agent.log")
    out = tmp_path / "out"
    keeper.new_round([out])
    out.write_bytes(b"hello\n")
    eventually(lambda: Index(out).covered == 6)
    monkeypatch.setattr(IndexWriter, "close", close)
    keeper.new_round([])
    eventually(lambda: closed)
    (tmp_path / "agent.log").write_bytes(b"hello\n")
    eventually(lambda: Index(tmp_path / "agent.log").covered == 6)


def test_files_that_do_not_come_are_looked_for_ever_more_rarely(tmp_path, monkeypatch):
    """On a shared file system each look is a question to its server."""
    now = [0.0]
    asked = []
    monkeypatch.setattr(output_files.time, "monotonic", lambda: now[0])
    keeper = OutputTimes([tmp_path / "never"])
    theirs = os.open
    monkeypatch.setattr(os, "open", lambda *a: asked.append(a) or theirs(*a))
    while now[0] < 60:
        keeper.poll()
        now[0] += output_files.POLL_S
    assert 20 < len(asked) < 40


@pytest.fixture
def sends(monkeypatch):
    """Every file is on NFS, and what grows is sent at once; its server is asked, and answers."""
    asked, answers = threading.Event(), threading.Event()
    answers.set()

    def fdatasync(_):
        asked.set()
        answers.wait(20)

    monkeypatch.setattr(Mount, "keeps_writes", True)
    monkeypatch.setattr(output_files, "SYNC_S", 0.01)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    yield SimpleNamespace(asked=asked, answers=answers)
    answers.set()


def test_while_a_server_does_not_answer_the_times_go_on(times, tmp_path, sends):
    """And the files of a round that is over are let go when it does."""
    sends.answers.clear()
    keeper, out = times(), tmp_path / "out"
    keeper.new_round([out])
    out.write_bytes(b"first\n")
    eventually(sends.asked.is_set)
    with out.open("ab") as f:
        f.write(b"second\n")
    eventually(lambda: Index(out).covered == 13)
    keeper.new_round([tmp_path / "other"])
    (tmp_path / "other").write_bytes(b"of the next round\n")
    eventually(lambda: Index(tmp_path / "other").covered == 18)
    assert out in {Path(file.path) for file in psutil.Process().open_files()}
    sends.answers.set()
    eventually(lambda: out not in {Path(file.path) for file in psutil.Process().open_files()})


def test_only_what_has_grown_is_sent_and_nothing_of_a_local_file_system(tmp_path, monkeypatch):
    """A file and its index, once each for what came since the last time."""
    sent = []
    name_of = lambda fd: str(Path(f"/proc/self/fd/{fd}").readlink())  # noqa: E731
    monkeypatch.setattr(os, "fdatasync", lambda fd: sent.append(name_of(fd)))
    monkeypatch.setattr(Mount, "keeps_writes", True)
    out, quiet = tmp_path / "out", tmp_path / "quiet"
    keeper = OutputTimes([out, quiet])
    quiet.touch()
    for text in (b"first\n", b"second\n"):
        with out.open("ab") as f:
            f.write(text)
        keeper.poll()
        keeper.sync()
        keeper.sync()
        assert sent == [str(out), str(index_of(out))]
        sent.clear()
    monkeypatch.setattr(Mount, "keeps_writes", False)
    local = OutputTimes([out])
    local.poll()
    local.sync()
    assert sent == []
