"""The files that a leader writes for readers."""

import asyncio
import json
import threading
from dataclasses import asdict

import pytest

from hpc_elastic import shared_files
from hpc_elastic.rendezvous import term as module
from hpc_elastic.rendezvous.log_entry import Endpoint, Failure, LogEntry, RunEnding
from hpc_elastic.rendezvous.term import StatusWriter
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.events import EventLog, read_events

CAUSE = Failure("7_0", "node1", 0, 0, 1.0, "boom", exit_code=1)
VICTIM = Failure("7_1", "node2", 1, 0, 2.0, "Connection closed by peer")
LEADER = Endpoint("10.0.0.1", 4000, "7_0", 0)


def ended(*ending) -> LogEntry:
    """A log entry that ends the run."""
    return LogEntry(9, 2, LEADER, round=4, restarts=2, started=1000.0, ending=RunEnding(*ending))


@pytest.fixture
def run(tmp_path) -> RunDir:
    """An empty run directory."""
    (tmp_path / "events").mkdir()
    run = RunDir(tmp_path)
    run.first_term.mkdir(parents=True)
    return run


def write(run: RunDir, *steps, term: int = 1) -> None:
    """Run steps with the status writer of a term, and close it."""

    async def lead() -> None:
        writer = StatusWriter(run, "run-1", EventLog(run.events("7_0"), "7_0"), term)
        for step in steps:
            await step(writer)
        await writer.close()

    asyncio.run(lead())


def publish(entry: LogEntry):
    """A step that publishes the result of an entry."""
    return lambda writer: writer.publish_result(entry)


def event(kind: str, **fields):
    """A step that appends an event."""

    async def step(writer: StatusWriter) -> None:
        writer.append_event(kind, **fields)

    return step


def status(*lines, **fields):
    """A step that writes the status, and lines of the progress."""

    async def step(writer: StatusWriter) -> None:
        writer.write_status(fields, lines)

    return step


def test_events_are_written_in_order(run):
    """All of them, once the writer is closed."""
    write(run, *(event("joined", n=n) for n in range(50)))
    assert [e["n"] for e in read_events(run.path / "events")] == list(range(50))


def test_the_status_is_the_last_one(run):
    """Its time shows a reader that a leader lives."""
    write(run, status(nodes=1), status(nodes=2))
    shown = json.loads(run.status.read_text())
    assert shown["nodes"] == 2 and shown["updated"] > 1e9


def test_the_result_of_a_run_that_succeeded(run):
    """It names the folder of the workers' results."""
    write(run, publish(ended("succeeded")))
    result = json.loads(run.result.read_text())
    assert result.pop("ended") > 1e9
    assert result == {
        "run_id": "run-1", "status": "succeeded", "started": 1000.0, "rounds": 4, "restarts": 2,
        "failure": None, "secondary_failures": [], "results": "results/round-4",
    }  # fmt: skip
    (event,) = read_events(run.path / "events")
    assert (event["kind"], event["status"], event["rounds"]) == ("end", "succeeded", 4)


def test_the_result_of_a_run_that_failed(run):
    """The first failure, and the secondary ones."""
    write(run, publish(ended("failed", CAUSE, (VICTIM,))))
    result = json.loads(run.result.read_text())
    assert result["failure"] == asdict(CAUSE) and result["secondary_failures"] == [asdict(VICTIM)]
    assert result["results"] is None


def test_a_result_is_written_once(run):
    """Several agents may publish it, since the leader may have died before it could."""
    write(run, publish(ended("failed", CAUSE)))
    first = run.result.read_text()
    write(run, publish(ended("failed", CAUSE)))
    assert run.result.read_text() == first


def test_a_status_that_cannot_be_written_is_logged(run, caplog):
    """The events are written all the same."""
    run.status.mkdir()
    write(run, status(nodes=1), event("joined"))
    assert "status.json: not written" in caplog.text
    assert [e["kind"] for e in read_events(run.path / "events")] == ["joined"]


def test_an_event_that_cannot_be_written_is_logged(run, caplog):
    """The status is written all the same."""
    (run.path / "events").rmdir()
    write(run, event("joined"), status(nodes=1))
    assert "events not written" in caplog.text and run.status.exists()


def test_each_leader_appends_to_the_progress(run):
    """Also after a line that the previous leader did not finish."""
    write(run, status({"time": 1.0}, {"time": 2.0}), status())
    with run.progress.open("a") as f:
        f.write('{"time": 3.0, "st')
    run.status.unlink()
    write(run, status({"time": 4.0}), term=2)
    lines = run.progress.read_text().splitlines()
    assert lines == ['{"time": 1.0}', '{"time": 2.0}', '{"time": 3.0, "st', '{"time": 4.0}']


def test_a_new_leader_keeps_the_last_status_of_the_previous_one(run):
    """It may have died between two lines of the progress; a damaged status is skipped."""
    run.status.write_text(json.dumps({"updated": 7.5, "step": 31, "nodes": 2, "members": []}))
    write(run, status(nodes=1), status(nodes=1))
    (line,) = map(json.loads, run.progress.read_text().splitlines())
    assert (line["time"], line["step"], line["nodes"]) == (7.5, 31, 2) and "members" not in line
    run.status.write_text("{")
    write(run, status(nodes=1))
    assert len(run.progress.read_text().splitlines()) == 1


def test_progress_that_cannot_be_written_is_logged(run, caplog):
    """The status is written all the same."""
    run.progress.mkdir()
    write(run, status({"time": 1.0}), status(nodes=1))
    assert "progress.jsonl: not written" in caplog.text and run.status.exists()


def test_a_result_is_retried_until_it_is_written(run, monkeypatch):
    """The end is announced only once the result can be read."""
    tries = []
    real = module.write_atomic

    def fails_twice(path, text) -> None:
        tries.append(path)
        if len(tries) < 3:
            raise OSError(28, "No space left on device")
        real(path, text)

    monkeypatch.setattr(module, "write_atomic", fails_twice)
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    write(run, publish(ended("succeeded")))
    assert tries == [run.result] * 3 and run.result.exists()


def test_a_file_system_that_hung_gets_the_newest_status_alone(run, monkeypatch):
    """The result follows at once, and no line of the progress is lost."""
    written, answers = [], threading.Event()
    real = module.write_atomic

    def hang(path, text, **how) -> None:
        written.append(path)
        assert answers.wait(30)
        real(path, text, **how)

    async def hand_over(writer: StatusWriter) -> None:
        for step in range(1000):
            writer.write_status({"step": step}, [{"time": float(step)}])
        asyncio.get_running_loop().call_soon(answers.set)
        await writer.publish_result(ended("succeeded"))

    monkeypatch.setattr(module, "write_atomic", hang)
    write(run, hand_over)
    assert written in ([run.status, run.status, run.result], [run.status, run.result])
    assert json.loads(run.status.read_text())["step"] == 999
    lines = run.progress.read_text().splitlines()
    assert [json.loads(line)["time"] for line in lines] == list(map(float, range(1000)))


# ---- terms --------------------------------------------------------------------------------


def test_a_status_of_a_term_that_is_over_is_not_written(run):
    """Nor are its lines, although its leader does not know yet that another one leads."""
    write(run, status({"time": 1.0, "term": 2}), status(nodes=3), term=2)
    write(run, status({"time": 2.0, "term": 1}), status(nodes=0), term=1)
    assert json.loads(run.status.read_text())["nodes"] == 3
    assert [json.loads(line)["time"] for line in run.progress.read_text().splitlines()] == [1.0]


def test_a_writer_finds_that_its_term_is_over(run):
    """The leader steps down then."""

    async def see(writer: StatusWriter) -> None:
        await writer.close()
        assert writer.is_over

    write(run, status(nodes=3), term=2)
    write(run, status(nodes=0), see, term=1)


def test_a_status_that_was_staged_before_another_led_is_not_put_in_place(run, monkeypatch):
    """Its process was stopped between two system calls until the next leader had written."""
    real = shared_files._stage

    def stopped_meanwhile(path, content, mode, folder):
        staged = real(path, content, mode, folder)
        monkeypatch.setattr(shared_files, "_stage", real)
        write(run, status(nodes=3), term=2)
        return staged

    monkeypatch.setattr(shared_files, "_stage", stopped_meanwhile)
    write(run, status(nodes=0), term=1)
    assert json.loads(run.status.read_text())["nodes"] == 3
    assert not list(run.rdzv.glob("term.*/.*")), "the staged file is removed"


def test_without_a_term_folder_no_status_is_written(run, caplog):
    """A folder that the leader creates itself would fence no other leader."""
    run.first_term.rmdir()
    write(run, status(nodes=1))
    assert "no term folder" in caplog.text or "rdzv: not written" in caplog.text
    assert not run.status.exists()
