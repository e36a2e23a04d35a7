"""The event log: lines, and how they are read while they are written."""

import json
import resource
import threading

import pytest
from long_history import work_of

from hpc_elastic import shared_files
from hpc_elastic.run import events
from hpc_elastic.run.events import VERSION, EventLog, EventReader, read_events


def test_a_line_has_a_version_a_time_a_kind_and_a_task(tmp_path):
    """Whatever else its kind has."""
    EventLog(tmp_path / "7_0.jsonl", "7_0").write("joined", host="node0")
    (event,) = read_events(tmp_path)
    assert list(event) == ["v", "time", "kind", "task", "host"]
    assert (event["v"], event["task"]) == (VERSION, "7_0")


def test_the_events_of_all_tasks_come_in_order_of_time(tmp_path):
    """Each has a file of its own."""
    for time, task in ((3.0, "7_0"), (1.0, "7_1"), (2.0, "7_0")):
        EventLog(tmp_path / f"{task}.jsonl", task).write("n", time=time)
    assert [e["time"] for e in read_events(tmp_path)] == [1.0, 2.0, 3.0]


def test_a_reader_returns_what_is_new(tmp_path):
    """A file may come later, and so may the folder."""
    reader = EventReader(tmp_path / "events")
    assert reader.new() == []
    (tmp_path / "events").mkdir()
    first, second = (EventLog(tmp_path / f"events/{task}.jsonl", task) for task in ("7_0", "7_1"))
    first.write("a")
    assert [e["kind"] for e in reader.new()] == ["a"]
    second.write("b")
    first.write("c")
    assert [e["kind"] for e in reader.new()] == ["b", "c"]
    assert reader.new() == []


def test_a_line_that_is_being_written_comes_when_it_is_whole(tmp_path):
    """Shared file systems show a part of it."""
    reader, line = EventReader(tmp_path), json.dumps({"time": 1.0, "kind": "é", "task": "7_0"})
    with (tmp_path / "7_0.jsonl").open("w") as f:
        print(line[:-5], end="", file=f, flush=True)
        assert reader.new() == []
        print(line[-5:], file=f, flush=True)
        assert [e["kind"] for e in reader.new()] == ["é"]


def test_what_an_attempt_left_half_written_costs_one_event(tmp_path):
    """The next attempt of the task goes on in the same line."""
    log = EventLog(tmp_path / "7_0.jsonl", "7_0")
    log.write("a")
    with log.path.open("a") as f:
        f.write(log.line("torn")[:-9])
    log.write("b")
    with log.path.open("a") as f:
        f.write("no JSON\n[1]\n{}\n" + '{"time": "x", "kind": "k", "task": "7_0"}\n')
    log.write("c")
    assert [e["kind"] for e in read_events(tmp_path)] == ["a", "b", "c"]


def test_a_byte_that_is_no_utf_8_costs_no_event(tmp_path):
    """A file's name in an error may have one; a time that is text, or is too large, is damage."""
    log = EventLog(tmp_path / "7_0.jsonl", "7_0")
    log.write("restart", failure="no file \udcff, \U0001f600")
    for time in ('"1"', "1e400", "9" * 30, "true, []"):
        with log.path.open("a") as f:
            print(f'{{"v": 1, "time": {time}, "kind": "k\\udcff", "task": "7_0"}}', file=f)
    (event,) = read_events(tmp_path)
    assert event["failure"] == "no file \udcff, \U0001f600"


@pytest.fixture
def longest_file():
    """Limits how long a file may become: what is written beyond is taken in part, then refused."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_a_full_disk_does_not_take_is_written_later(tmp_path, longest_file, caplog):
    """Each event once, and whole, and in its place."""
    log = EventLog(tmp_path / "7_0.jsonl", "7_0")
    log.write("before")
    longest_file(log.path.stat().st_size + 9)
    log.write("first", number=1)
    log.write("second", number=2)
    assert log.path.read_bytes().count(b"\n") == 1 and log.path.read_bytes().endswith(b"\n")
    assert [e["kind"] for e in read_events(tmp_path)] == ["before"]
    assert "not written so far" in caplog.text
    longest_file(resource.RLIM_INFINITY)
    log.write("after")
    assert [e["kind"] for e in read_events(tmp_path)] == ["before", "first", "second", "after"]
    assert len(log.path.read_bytes().splitlines()) == 4


def test_what_waits_does_not_grow_without_end(tmp_path, monkeypatch):
    """The oldest go first; where the file system takes them, there may be any number."""
    monkeypatch.setattr("hpc_elastic.run.events._KEPT", 3)
    log = EventLog(tmp_path / "events" / "7_0.jsonl", "7_0")
    for number in range(5):
        log.write("n", number=number)
    log.path.parent.mkdir()
    log.append([])
    assert [e["number"] for e in read_events(log.path.parent)] == [2, 3, 4]
    log.append([log.line("n", number=number) for number in range(5, 10)])
    assert [e["number"] for e in read_events(log.path.parent)] == list(range(2, 10))


def test_nobody_waits_for_what_is_written_behind(tmp_path, monkeypatch):
    """The time is that of the call."""
    may_write, append = threading.Event(), EventLog.append
    monkeypatch.setattr(
        EventLog, "append", lambda log, lines: may_write.wait(60.0) and append(log, lines)
    )
    log = EventLog(tmp_path / "7_0.jsonl", "7_0")
    log.write_behind("slow")
    assert read_events(tmp_path) == []
    writers = [t for t in threading.enumerate() if t is not threading.current_thread()]
    may_write.set()
    for writer in writers:
        writer.join(60.0)
    (event,) = read_events(tmp_path)
    assert event["kind"] == "slow"


def test_at_a_limit_of_threads_it_is_written_at_once(tmp_path, monkeypatch):
    """The agent does not end for it."""

    def refuse(thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    EventLog(tmp_path / "7_0.jsonl", "7_0").write_behind("told")
    assert [e["kind"] for e in read_events(tmp_path)] == ["told"]


def test_of_too_many_events_the_newest_are_kept(tmp_path, monkeypatch):
    """Those of each node in each round go first; what is left out is counted, and said."""
    monkeypatch.setattr(events, "_MOST_EVENTS", 10)  # a million are a minute
    for task in ("7_0", "7_1"):
        log = EventLog(tmp_path / f"{task}.jsonl", task)
        log.append([log.line("task")])
        log.append([log.line("first_step", number=number) for number in range(30)])
    reader = EventReader(tmp_path)
    found = reader.new()
    assert [e["kind"] for e in found].count("task") == 2 and len(found) == 10
    assert {e["number"] for e in found if e["task"] == "7_1" and "number" in e} == {*range(22, 30)}
    assert reader.num_left_out == 52 and "52 of the oldest events are left out" in reader.doubt


def test_of_a_log_that_is_too_large_the_end_is_read(tmp_path, monkeypatch):
    """From the first whole line on."""
    log = EventLog(tmp_path / "7_0.jsonl", "7_0")
    log.append([log.line("n", number=number) for number in range(10)])
    monkeypatch.setattr(shared_files, "LINES_BYTES", log.path.stat().st_size // 2)
    numbers = [e["number"] for e in read_events(tmp_path)]
    assert numbers in ([*range(5, 10)], [*range(6, 10)])


def test_a_reader_may_begin_with_what_comes(tmp_path, monkeypatch):
    """It parses nothing of the events before."""
    log = EventLog(tmp_path / "7_0.jsonl", "7_0")
    log.append([log.line("before") for _ in range(100)])
    reader, parsed = EventReader(tmp_path), []
    parse = events._parsed
    monkeypatch.setattr(events, "_parsed", lambda line: parsed.append(line) or parse(line))
    reader.skip()
    assert reader.new() == []
    log.write("after")
    EventLog(tmp_path / "7_1.jsonl", "7_1").write("new")
    assert [e["kind"] for e in reader.new()] == ["after", "new"] and len(parsed) == 2


def test_events_are_decoded_many_at_once(tmp_path):
    """A run of weeks has a hundred thousand; two damaged lines cost only themselves."""
    log = EventLog(tmp_path / "7_0.jsonl", "7_0")
    log.append([log.line("first_step", attempt=0, round=n, step=n) for n in range(1000)])
    assert work_of(lambda: read_events(tmp_path)) < 8 * 1000
    with log.path.open("a") as f:
        f.write('{"v": 1, "torn": "' + log.line("next") + '\n{"a":' + "[" * 300 + "]" * 300 + "}\n")
    log.append([log.line("last")])
    assert [e["kind"] for e in read_events(tmp_path)][999:] == ["first_step", "next", "last"]


def test_lines_are_whole_wherever_a_block_ends(tmp_path, monkeypatch):
    """One that is longer than a block is left out; so is what follows it up to its end."""
    monkeypatch.setattr(shared_files, "LINE_BYTES", 16)
    lines = [bytes([97 + n % 26]) * (n * 7 % 24) for n in range(300)]
    short = [line + b"\n" for line in lines if len(line) < 16]
    (tmp_path / "log").write_bytes(b"".join(line + b"\n" for line in lines) + b"no end")
    assert list(shared_files.lines_in(tmp_path / "log")) == short
    assert list(shared_files.lines_in(tmp_path / "log", unfinished=True)) == [*short, b"no end"]
    for end, block in shared_files.blocks_in(tmp_path / "log"):
        (_, rest), *_ = shared_files.blocks_in(tmp_path / "log", end, unfinished=True)
        assert (tmp_path / "log").read_bytes()[end - len(block) : end] == block and rest
