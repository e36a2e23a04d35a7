"""Files of output as they lie in a run directory: found, read, and read from behind."""

import os
import tracemalloc

import pytest
from output_files import EPOCH, Output, make_run

from hpc_elastic.report import log_files, log_follow
from hpc_elastic.report.log_files import (
    Discovery,
    LogSource,
    Selection,
    begin_of,
    lines,
    start_of,
    tail,
)
from hpc_elastic.report.log_follow import Follower
from hpc_elastic.run.directory import RunDir


def told(found) -> list[tuple[float, str]]:
    """Times, in seconds since the epoch of this file, and texts."""
    return [(line.time - EPOCH, line.text) for line in found]


@pytest.fixture
def out(tmp_path) -> Output:
    """A file that grew four times, the third time in the middle of a line."""
    output = Output(tmp_path / "out")
    output.write("a\nb\n", 1)
    output.write("c\n", 5)
    output.write("d\nbeginning ", 7)
    output.write("and end\nf\n", 9)
    return output


def test_each_line_has_the_time_at_which_it_was_complete(out):
    """And the last one is shown without an end of line, too."""
    with out.path.open("a") as f:
        f.write("unseen")
    os.utime(out.path, (EPOCH + 30, EPOCH + 30))
    found = list(lines(out.source))
    assert told(found) == [
        (1, "a"), (1, "b"), (5, "c"), (7, "d"), (9, "beginning and end"), (9, "f"), (30, "unseen")
    ]  # fmt: skip
    assert [line.timed for line in found] == [True] * 6 + [False]


def test_without_an_index_lines_have_the_time_of_their_file(tmp_path):
    """As of a run of an earlier version."""
    path = tmp_path / "out"
    path.write_text("a\nb\n")
    os.utime(path, (EPOCH, EPOCH + 3))
    source = LogSource(path, "out", "7_0")
    assert told(lines(source)) == [(3, "a"), (3, "b")]
    assert begin_of(source, None) == EPOCH + 3


def test_a_clock_that_was_set_back_does_not_disturb_the_order(tmp_path):
    """No line lies before the one before it."""
    output = Output(tmp_path / "out")
    output.write("a\n", 10)
    output.write("b\n", 4)
    output.write("c\n", 11)
    assert told(lines(output.source)) == [(10, "a"), (10, "b"), (11, "c")]


@pytest.mark.parametrize(
    ("since", "expected"),
    [(0, "a"), (1, "a"), (2, "c"), (6, "d"), (8, "beginning and end"), (9, "beginning and end")],
)
def test_reading_begins_at_the_line_that_a_time_lies_in(out, since, expected):
    """Nothing before it is read."""
    start = start_of(out.source, EPOCH + since)
    assert next(lines(out.source, start)).text == expected
    assert begin_of(out.source, EPOCH + since) == EPOCH + max(1, since)


def test_a_file_that_is_older_than_what_is_wanted_is_not_read(out):
    """But for what the clock of a file server may be wrong by."""
    assert begin_of(out.source, EPOCH + 9 + 3600) is None
    assert start_of(out.source, EPOCH + 50) == out.path.stat().st_size


@pytest.mark.parametrize("num_lines", [0, 1, 2, 5, 6, 50])
def test_the_last_lines_are_the_end_of_all_lines(out, num_lines):
    """However many are asked for."""
    everything = told(lines(out.source))
    found = told(tail([out.source], num_lines, lambda _: True))
    assert found == (everything[-num_lines:] if num_lines else [])


def test_the_last_lines_of_several_files_are_the_last_of_all(out, tmp_path):
    """In order of time, up to where each file is to be read."""
    other = Output(tmp_path / "other", rank=1)
    other.write("x\n", 6)
    other.write("y\n", 8)
    both = [out.source, other.source]
    assert told(tail(both, 4, lambda _: True)) == [
        (7, "d"), (8, "y"), (9, "beginning and end"), (9, "f")
    ]  # fmt: skip
    until = {out.path: 6, other.path: 2}
    assert told(tail(both, 2, lambda _: True, until=until)) == [(5, "c"), (6, "x")]
    assert told(tail(both, 9, lambda _: True, since=EPOCH + 6.5))[0] == (7, "d")


def test_the_last_lines_that_match_are_found_however_far_back_they_are(tmp_path):
    """In blocks, from behind."""
    output = Output(tmp_path / "out")
    output.write(
        "".join(f"loss {n}\n" if n % 5000 == 0 else f"step {n}\n" for n in range(40_000)), 1
    )
    found = tail([output.source], 3, lambda line: "loss" in line.text)
    assert [line.text for line in found] == ["loss 25000", "loss 30000", "loss 35000"]


def test_the_end_of_a_large_file_is_read_without_the_rest(tmp_path, monkeypatch):
    """A file of a gigabyte, most of it a hole, costs a block or two."""
    output = Output(tmp_path / "out")
    with output.path.open("r+b" if output.path.exists() else "wb") as f:
        f.truncate(1 << 30)
    output.write("\nlast but one\nlast\n", 1)
    read = []
    theirs = log_files._bytes_at
    monkeypatch.setattr(
        log_files, "_bytes_at", lambda *a: (data := theirs(*a), read.append(len(data)))[0]
    )
    assert told(tail([output.source], 2, lambda _: True)) == [(1, "last but one"), (1, "last")]
    assert sum(read) <= 4 * log_files.BLOCK


def test_a_large_file_is_streamed(tmp_path):
    """Memory does not grow with it."""
    output = Output(tmp_path / "out")
    for n in range(10):
        output.write(f"{'a long line of a worker' * 20}\n" * 2_000, n)
    assert output.path.stat().st_size > 9_000_000
    tracemalloc.start()
    assert sum(1 for _ in lines(output.source)) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.fixture
def run(tmp_path) -> RunDir:
    """A run directory with two tasks, of which one was requeued."""
    return make_run(tmp_path)


def test_all_files_of_a_run_are_found_with_their_nodes(run):
    """By round and rank; what Slurm captured of a task that was on several nodes has none."""
    found = [(s.stream, s.round, s.rank, s.attempt, s.host) for s in Discovery(run).sources()]
    assert {f for f in found if f[0] == "agent"} == {
        ("agent", None, None, 0, "n1"), ("agent", None, None, 0, "n2"),
        ("agent", None, None, 1, "n3"),
    }  # fmt: skip
    assert [f for f in found if f[0] == "slurm"] == [("slurm", None, None, None, "")]
    assert [f for f in found if f[2] is not None] == [
        ("err", 1, 0, 0, "n1"), ("out", 1, 0, 0, "n1"), ("err", 1, 1, 0, "n2"),
        ("out", 1, 1, 0, "n2"), ("err", 2, 1, 1, "n3"), ("out", 2, 1, 1, "n3"),
    ]  # fmt: skip


def test_files_that_came_within_a_tick_of_the_servers_clock_are_found(run, monkeypatch):
    """The folder is dated as it was when it was listed; it is listed once more."""
    now = [100.0]
    monkeypatch.setattr(log_files.time, "monotonic", lambda: now[0])
    folder = run.attempt("7_0", 0)
    found = Discovery(run)
    before, date = found.sources(), folder.stat().st_mtime_ns
    (folder / "round-2.rank-0.out").touch()
    os.utime(folder, ns=(date, date))
    now[0] += 2.0
    assert len(found.sources()) == len(before) + 1


def test_following_finds_what_appears(run):
    """Lines that are complete, of new files and old; at the end also what has no end."""
    follower = Follower(Discovery(run), Selection(), lambda _: True)
    until = follower.skip(Discovery(run).sources())
    assert follower.poll() == []
    old = run.attempt("7_0", 0) / "round-1.rank-0.out"
    new = run.attempt("7_0", 1)
    new.mkdir()
    (new / "round-3.rank-0.out").write_text("of a new attempt\n")
    with old.open("a") as f:
        f.write("added\nnot ended")
    found = []
    while len(found) < 2:
        found += follower.poll()
    assert {line.text for line in found} == {"of a new attempt", "added"}
    assert [line.text for line in follower.finish()] == ["not ended"]
    assert until[old] == 4


def test_a_file_that_does_not_grow_is_looked_at_twice_a_second(run, monkeypatch):
    """Each look opens it, which asks the server."""
    now, looks = [100.0], []
    status_of = log_files.status_of
    monkeypatch.setattr(log_files, "status_of", lambda p: (looks.append(p), status_of(p))[1])
    monkeypatch.setattr(log_follow.time, "monotonic", lambda: now[0])
    follower = Follower(Discovery(run), Selection(), lambda _: True)
    follower.skip(Discovery(run).sources())
    for _ in range(100):
        now[0] += 0.1
        follower.poll()
    quiet = run.attempt("7_0", 0) / "round-1.rank-0.err"
    assert 15 < looks.count(quiet) < 30
    with quiet.open("a") as f:
        f.write("at last\n")
    found = []
    for _ in range(30):
        now[0] += 0.1
        found += follower.poll()
    assert [line.text for line in found] == ["at last"]


def test_of_a_progress_bar_it_is_told_now_and_then_how_far_it_is(run, monkeypatch):
    """It may come to its end after hours; each state once, and the last one at its end."""
    now = [100.0]
    monkeypatch.setattr(log_follow.time, "monotonic", lambda: now[0])
    follower = Follower(Discovery(run), Selection(ranks=frozenset([0])), lambda _: True)
    follower.skip(Discovery(run).sources())
    bar = run.attempt("7_0", 0) / "round-1.rank-0.err"

    def told_in(seconds: int) -> list[str]:
        found = []
        for _ in range(10 * seconds):
            now[0] += 0.1
            found += [line.text for line in follower.poll()]
        return found

    for state in ("10%", "20%"):
        with bar.open("a") as f:
            f.write(f"\r{state}")
        assert told_in(25) == [state]
    with bar.open("a") as f:
        f.write("\r100%\n")
    assert told_in(25) == ["100%"]
