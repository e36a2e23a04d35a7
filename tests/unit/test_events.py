"""The event log: lines, and how they are read while they are written."""

import json

from hpc_elastic.events import VERSION, EventLog, EventReader, read_events


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
