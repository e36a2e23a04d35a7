"""Files of output: bytes as lines, lines by time, files found, selected and followed."""

import math
import os
import random
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hpc_elastic._util import cleaned
from hpc_elastic.report import log_files
from hpc_elastic.report.log_files import (
    MAX_LINE,
    Discovery,
    Follower,
    LogLine,
    LogSource,
    NothingSelectedError,
    Selection,
    Settling,
    Splitter,
    begin_of,
    is_over,
    lines,
    merge,
    newest_of_tasks,
    readable_until,
    require_there,
    source_of,
    start_of,
    tail,
)
from hpc_elastic.run.directory import RunDir
from output_files import EPOCH, Output, make_run


def worker(rank, host="n1", stream="out", attempt=0, round_=1, task="7_0") -> LogSource:
    """A worker's file."""
    path = Path(f"{task}/{attempt}/{round_}.{rank}.{stream}")
    return LogSource(path, stream, task, attempt, round_, rank, host)


AGENT = LogSource(Path("7_0/0/agent.log"), "agent", "7_0", 0, host="n1")
SLURM = LogSource(Path("7_0.log"), "slurm", "7_0", host="n1")
RUN = [worker(0), worker(1), worker(2, "n2", task="7_1"), worker(2, "n2", "err", task="7_1")]


def texts(lines) -> str:
    """What lines say."""
    return " ".join(line.text for line in lines)


def stream(source, *times):
    """A file whose lines say when they were written."""
    return (
        times[0] if times else 0.0,
        iter([LogLine(t, source, f"{source.rank}:{t}") for t in times]),
    )


# ---- bytes as lines


@pytest.mark.parametrize(
    ("text", "plain", "coloured"),
    [
        ("loss 0.1\tstep 7", "loss 0.1\tstep 7", "loss 0.1\tstep 7"),
        ("Grüße, 日本", "Grüße, 日本", "Grüße, 日本"),
        ("\x1b[31mred\x1b[0m", "red", "\x1b[31mred\x1b[0m\x1b[0m"),
        ("\x1b[1;38;5;9mbold", "bold", "\x1b[1;38;5;9mbold\x1b[0m"),
        ("\x1b[2J\x1b[Hgone?", "gone?", "gone?"),
        ("\x1b[A\x1b[2K 10%", " 10%", " 10%"),
        ("\x1b]0;title\x07text", "text", "text"),
        ("\x1b]0;open to the end", "", ""),
        ("\x1bPdevice\x1b\\text", "text", "text"),
        ("\x1b(0bell\x07\x00\x08\x7f\x9b", "bell", "bell"),
        ("\x1bc reset", " reset", " reset"),
        ("gpj\u202etxt\u2029x", "gpjtxtx", "gpjtxtx"),
    ],
)
def test_a_terminal_gets_text_and_colours_alone(text, plain, coloured):
    """It is neither cleared nor renamed; colours are for terminals, and end with their line."""
    assert cleaned(text, colours=False) == plain
    assert cleaned(text, colours=True) == coloured


def test_no_bytes_disturb_a_terminal():
    """Whatever a worker writes: a tensor, half a character, an escape sequence cut in two."""
    dice = random.Random(1)
    for _ in range(300):
        data = dice.randbytes(dice.randrange(200)) + b"\x1b[" + dice.randbytes(3)
        for _, text in [*(s := Splitter()).feed(data), *s.rest()]:
            shown = cleaned(text, colours=False)
            assert all(c == "\t" or not (ord(c) < 32 or 127 <= ord(c) < 160) for c in shown)


def test_lines_are_the_same_however_their_bytes_arrive():
    """Each with the byte at which it ends."""
    data = "eins\nzwölf\n\n日本\r\nlast".encode()
    whole = Splitter(100)
    expected = [*whole.feed(data), *whole.rest()]
    assert expected == [(104, "eins"), (111, "zwölf"), (112, ""), (120, "日本"), (125, "last")]
    for size in range(1, len(data)):
        splitter, found = Splitter(100), []
        for at in range(0, len(data), size):
            found += splitter.feed(data[at : at + size])
        assert [*found, *splitter.rest()] == expected


def test_of_a_line_that_was_redrawn_the_last_state_is_shown():
    """As on a terminal, at the end of a progress bar."""
    splitter = Splitter()
    assert splitter.feed(b"start\n\r 10%\r 50%") == [(5, "start")]
    assert [text for _, text in splitter.feed(b"\r100%\r\nnext\n")] == ["100%", "next"]


def test_how_far_a_bar_is_can_be_asked_before_its_end():
    """Of lines that are not redrawn nothing is told, they are only late."""
    splitter = Splitter()
    splitter.feed(b"a line")
    assert splitter.state() == ""
    splitter.feed(b" and its end\n\r 10%\r 20%")
    assert splitter.state() == " 20%"
    splitter.feed(b"\r" + b"x" * 2 * MAX_LINE)
    splitter.feed(b"\r 30%")
    assert splitter.state() == " 30%"
    splitter.feed(b"\nnext")
    assert splitter.state() == ""


def test_a_bar_that_is_redrawn_for_days_takes_no_memory():
    """Only its last state is held."""
    splitter = Splitter()
    for step in range(20_000):
        assert splitter.feed(f"\r{step:7d} of 20000".encode()) == []
    held = [len(value) for value in vars(splitter).values() if isinstance(value, bytes)]
    assert max(held) <= 2 * MAX_LINE
    assert [text for _, text in splitter.rest()] == ["  19999 of 20000"]


def test_what_has_no_end_of_line_comes_in_pieces():
    """A file of zeros is not held in memory until it ends."""
    splitter = Splitter()
    found = [piece for _ in range(10) for piece in splitter.feed(b"x" * 100_000)]
    found += splitter.rest()
    assert sum(len(text) for _, text in found) == 1_000_000
    assert max(len(text) for _, text in found) <= MAX_LINE
    assert [end for end, _ in found] == sorted(end for end, _ in found)


# ---- a file by time


def told(found) -> list[tuple[float, str]]:
    """Times, in seconds since the term of this file, and texts."""
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


# ---- several files by time


def test_lines_of_several_files_come_by_time_and_those_of_one_in_its_order():
    """Lines of one time come by file, and no file is torn apart."""
    merged = merge([stream(RUN[0], 1, 3, 3, 9), stream(RUN[1], 2, 3), stream(RUN[2])])
    assert texts(merged) == "0:1 1:2 0:3 0:3 1:3 0:9"


def test_random_files_are_merged_as_if_they_had_been_sorted_together():
    """For whatever is in them."""
    dice = random.Random(4)
    for _ in range(200):
        files = [sorted(dice.choices(range(9), k=dice.randrange(6))) for _ in range(4)]
        merged = list(merge([stream(worker(r), *times) for r, times in enumerate(files)]))
        assert len(merged) == sum(map(len, files))
        assert all((a.time, a.source.rank) <= (b.time, b.source.rank) for a, b in pairwise(merged))


def test_a_file_is_begun_only_when_its_time_has_come():
    """A run of days has tens of thousands of files, which can not all be open."""
    begun = []

    def file(rank, *times):
        begun.append(rank)
        yield from (LogLine(t, worker(rank), f"{rank}:{t}") for t in times)

    merged = merge([(1.0, file(0, 1, 2)), (5.0, file(1, 5))])
    next(merged), next(merged)
    assert begun == [0]
    assert texts(merged) == "1:5" and begun == [0, 1]


# ---- the files of a run


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


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("round-3.rank-12.err", ("err", 3, 12)),
        ("round-3.rank-12.out", ("out", 3, 12)),
        ("agent.log", ("agent", None, None)),
        ("round-3.rank-12.out.times", None),
        ("round-3.rank-12.error.json", None),
    ],
)
def test_a_file_is_known_by_its_name(file, expected):
    """Its index, and the report of a failure, are no output."""
    source = source_of(file, Path("/run"), "7_0", 2, "n1")
    found = source and (source.stream, source.round, source.rank)
    assert found == expected


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(), [0, 1, 2, 3]),
        (Selection(agents=True), [0, 1, 2, 3, 4, 5]),
        (Selection(ranks=frozenset([1, 2])), [1, 2, 3]),
        (Selection(ranks=frozenset([1]), agents=True), [1, 4, 5]),
        (Selection(nodes=frozenset(["n2"]), agents=True), [2, 3]),
        (Selection(attempt=0, agents=True), [0, 1, 2, 3, 4, 5]),
        (Selection(attempt=1), []),
        (Selection(round=1), [0, 1, 2, 3]),
        (Selection(round=2), []),
    ],
)
def test_files_are_chosen_by_rank_node_attempt_and_round(selection, expected):
    """Agents have no rank and no round; what Slurm captures has no attempt."""
    files = [*RUN, AGENT, SLURM]
    assert [number for number, file in enumerate(files) if selection.selects(file)] == expected


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        (
            Selection(ranks=frozenset([0, 7])),
            "--rank 7: the run has no such rank; it has ranks 0-2",
        ),
        (Selection(nodes=frozenset(["n9"])), "--node n9: .* it has nodes n1, n2"),
        (Selection(attempt=3), "--attempt 3: .* it has attempt 0"),
        (Selection(round=2), "--round 2: .* it has round 1"),
        (Selection(ranks=frozenset([2]), nodes=frozenset(["n1"])), "these ranks were on n2"),
    ],
)
def test_what_is_not_there_is_refused_and_what_is_there_is_named(selection, words):
    """The next try is to be the right one."""
    with pytest.raises(NothingSelectedError, match=words):
        require_there(selection, RUN)


# ---- following


def test_followed_lines_wait_for_earlier_ones_of_other_files():
    """And go when they have waited, whatever the clock of their node says."""
    settling = Settling()
    ahead = 1000.0
    settling.add([LogLine(ahead + 2, RUN[0], "b")], now=10.0)
    assert settling.take_due(10.4) == []
    settling.add([LogLine(ahead + 1, RUN[1], "a"), LogLine(ahead + 9, RUN[1], "c")], now=10.4)
    assert texts(settling.take_due(10.5)) == "a b"
    assert settling.take_due(10.8) == []
    assert texts(settling.take_due(10.9)) == "c"


def test_lines_of_one_file_stay_in_order_while_they_settle():
    """Also those of the same time."""
    settling = Settling()
    settling.add(
        [LogLine(1.0, RUN[0], "1"), LogLine(1.0, RUN[0], "2"), LogLine(1.0, RUN[0], "3")], 0.0
    )
    assert texts(settling.take_due(1.0)) == "1 2 3"
    settling.add([LogLine(2.0, RUN[0], "4")], 5.0)
    assert texts(settling.take_due(math.inf)) == "4"
    assert settling.take_due(math.inf) == []


@pytest.mark.parametrize(
    ("size", "read", "covered", "waited_s", "expected"),
    [
        (100, 40, 80, 0.0, 80),  # as far as it is known when it came
        (100, 40, 40, 0.3, 40),  # its agent will say soon
        (100, 40, 40, 1.5, 100),  # it does not: there is none
        (60, 40, 80, 0.0, 60),  # the index came over the network before the file
    ],
)
def test_what_grows_is_read_as_far_as_it_is_known_when_it_came(
    size, read, covered, waited_s, expected
):
    """For a while; then it is read all the same."""
    assert readable_until(size=size, read=read, covered=covered, waited_s=waited_s) == expected


def test_a_file_is_over_when_its_task_has_gone_on_to_another_round_or_attempt():
    """What Slurm captures never is."""
    files = [worker(0, round_=1), worker(0, round_=2), replace(AGENT, attempt=0), SLURM]
    newest = newest_of_tasks(files)["7_0"]
    assert newest.round == 2
    assert [is_over(file, newest) for file in files] == [True, False, False, False]
    again = worker(0, attempt=1, round_=3)
    assert [is_over(file, again) for file in files] == [True, True, True, False]


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
    status_of = log_files.shared_files.status_of
    monkeypatch.setattr(
        log_files.shared_files, "status_of", lambda p: (looks.append(p), status_of(p))[1]
    )
    monkeypatch.setattr(log_files.time, "monotonic", lambda: now[0])
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
    monkeypatch.setattr(log_files.time, "monotonic", lambda: now[0])
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
