"""Output that is written on one node and followed on another, through NFS.

These two clients send nothing by themselves, and know for ten minutes what they have seen: what is
not sent, or is looked for by its path, is not seen within a test's patience.
"""

import errno
import json
import threading
import time

import pytest
from test_shared_folder import _possible, mounts, wait  # noqa: F401

from hpc_elastic.agent import output_files
from hpc_elastic.agent.output_files import OutputTimes
from hpc_elastic.report import log_files
from hpc_elastic.report.log_files import Discovery, Follower, LogLine, Selection
from hpc_elastic.run.directory import Entry, RunDir
from slurm_sandbox import nfs
from specs import spec_of, started_run

TASK = "7_0"
MOUNTS = ["", pytest.param("nocto,", marks=pytest.mark.long)]


class Written:
    """A worker that writes on one node, in a round of an attempt, and holds its files open."""

    def __init__(self, run: RunDir, attempt: int, round_: int, times: OutputTimes) -> None:
        folder = run.attempt(TASK, attempt)
        folder.mkdir(parents=True, exist_ok=True)
        out = folder / f"round-{round_}.rank-0.out"
        self.file = out.open("w")
        times.new_round([out])

    def say(self, text: str) -> None:
        """Write a line."""
        self.file.write(f"{text}\n")
        self.file.flush()


class Followed:
    """What a follower on another node has shown."""

    def __init__(self, run: RunDir) -> None:
        self._follower = Follower(Discovery(run), Selection(agents=True), lambda _: True)
        self.lines: list[LogLine] = []

    def shows(self, text: str) -> bool:
        """Whether a line is seen, now that the follower has looked once more.

        What the server has refused is a hole in the file, before it.
        """
        self.lines += self._follower.poll()
        return text in [line.text.lstrip("\0") for line in self.lines]


def begin(run: RunDir, attempt: int, host: str) -> None:
    """Write the event that an attempt of the task has begun, as its agent does."""
    event = {"time": time.time(), "kind": "task", "task": TASK, "attempt": attempt, "host": host}
    with run.events(TASK).open("a") as file:
        file.write(json.dumps(event) + "\n")


@pytest.fixture(params=[""])
def runs(request, mounts):  # noqa: F811
    """One run directory as two nodes see it: that of the writer, that of the reader."""
    here = RunDir(mounts.server / "run")
    entry = Entry("function", "train", module="m")
    started_run(here, spec_of("id", 1, 1, 1, 0, entry, str(mounts.server), [(0, 0)]))
    here.tasks.mkdir()
    pair = mounts.pair(f"{request.param}dirty=600,actimeo=600")
    return tuple(RunDir(seen / "run") for seen in pair)


@pytest.fixture
def times(runs, monkeypatch):
    """What the writer's agent has: it looks, and sends."""
    monkeypatch.setattr(output_files, "SYNC_S", 0.3)
    made = OutputTimes([runs[0].attempt(TASK, 0) / "agent.log"])
    made.start()
    yield made
    made.close()


@pytest.mark.parametrize("runs", MOUNTS, indirect=True)
def test_what_is_written_into_an_open_file_is_seen_elsewhere_with_its_time(
    runs, times, monkeypatch
):
    """The lines of a worker and of its agent, as they come; nobody has closed a file."""
    monkeypatch.setattr(log_files, "INDEX_WAIT_S", 600.0)
    theirs, ours = runs
    worker, followed = Written(theirs, 0, 1, times), Followed(ours)
    with (theirs.attempt(TASK, 0) / "agent.log").open("w") as log:
        for number in range(2):
            worker.say(f"line {number}")
            log.write(f"agent {number}\n")
            log.flush()
            wait("the worker's line", lambda n=number: followed.shows(f"line {n}"))
            wait("the agent's line", lambda n=number: followed.shows(f"agent {n}"))
    assert all(line.timed for line in followed.lines)
    worker.file.close()


@pytest.mark.parametrize("runs", MOUNTS, indirect=True)
def test_a_round_an_attempt_and_its_node_are_found_when_they_come(runs, times):
    """However long the reader remembers that they were not there."""
    theirs, ours = runs
    followed = Followed(ours)
    assert not followed.shows("first")
    for attempt, round_, host in [(0, 1, "n1"), (0, 2, "n1"), (1, 3, "n2")]:
        worker = Written(theirs, attempt, round_, times)
        worker.say(f"round {round_}")
        wait("the line", lambda n=round_: followed.shows(f"round {n}"))
        begin(theirs, attempt, host)
        worker.say(f"on {host} in round {round_}")
        wait("the next line", lambda h=host, n=round_: followed.shows(f"on {h} in round {n}"))
        worker.file.close()
    last = followed.lines[-1].source
    assert (last.attempt, last.round) == (1, 3)
    found = Followed(ours)
    wait("all of it, from the beginning", lambda: found.shows("on n2 in round 3"))
    assert {line.source.host for line in found.lines} == {"n1", "n2"}


@pytest.mark.long
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_a_server_that_refuses_ends_nothing(runs, times, mounts, caplog, error):  # noqa: F811
    """It is said once, and what is written later is seen."""
    theirs, ours = runs
    worker, followed = Written(theirs, 0, 1, times), Followed(ours)
    mounts.faults(
        nfs.ServerFaults(rules=(nfs.FaultRule(1, "a", getattr(errno, error), 0, ("write",), "*"),))
    )
    for number in range(3):
        worker.say(f"refused {number}")
        before = mounts.counts("a")["write"]
        wait("a try to send it", lambda b=before: mounts.counts("a")["write"] > b)
    wait("the complaint", lambda: "late" in caplog.text)
    mounts.faults(nfs.ServerFaults())
    worker.say("taken")
    wait("the line", lambda: followed.shows("taken"))
    assert sum("late" in record.message for record in caplog.records) == 1
    worker.file.close()


@pytest.mark.long
def test_a_server_that_does_not_answer_keeps_nobody(runs, times, mounts):  # noqa: F811
    """What is written waits for it; the task's end does not."""
    theirs, ours = runs
    worker, followed = Written(theirs, 0, 1, times), Followed(ours)
    worker.say("before")
    wait("the first line", lambda: followed.shows("before"))
    mounts.faults(nfs.ServerFaults(stopped=("a",)))
    worker.say("meanwhile")
    wait("the sender waits", lambda: times._round[0]._syncing.locked())
    end = threading.Thread(target=times.close)
    end.start()
    wait("the end", lambda: not end.is_alive())
    mounts.faults(nfs.ServerFaults())
    wait("the next line", lambda: followed.shows("meanwhile"))
    worker.file.close()
