"""The leader's question what workers are at is answered in time, whatever hangs."""

import itertools
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_elastic.agent import hang_watch, stacks
from hpc_elastic.agent.hang_watch import HangWatch, WatchedWorker
from hpc_elastic.agent.worker_failures import NodeIdentity, WorkerFiles
from hpc_elastic.rendezvous.hang_diagnosis import ANSWER_S
from hpc_elastic.worker.shared_page import WorkerStatus

BLANK = WorkerStatus(None, None, None, None, None, None, 0)
STACK = 'Thread 0x01 (most recent call first):\n  File "/u/t.py", line {} in step\n'
NUM_WORKERS = 8


class Leader:
    """Asks what the workers are at, and takes the answer."""

    proposal = None

    def __init__(self) -> None:
        self.stacks = 0
        self.answers = {}
        self.answered = threading.Event()

    def answer_stacks(self, number, ranks) -> None:
        """Keep it."""
        self.answers[number] = [rank["state"] for rank in ranks]
        self.answered.set()


class Page:
    """What a worker has published."""

    def __init__(self, published=BLANK) -> None:
        self.published = published

    def read(self):
        """Return it."""
        return self.published


class Node:
    """Workers, of which as many as wanted are at a checkpoint, and their watch."""

    def __init__(self, folder: Path, *, num_busy: int = 0) -> None:
        busy = replace(BLANK, busy=1)
        self.leader = Leader()
        self.pages = [Page(busy if rank < num_busy else BLANK) for rank in range(NUM_WORKERS)]
        self.files = [WorkerFiles(folder, 1, rank) for rank in range(NUM_WORKERS)]
        workers = [
            WatchedWorker(rank, page, files, folder / f"worker-{rank}.stack")
            for rank, (page, files) in enumerate(zip(self.pages, self.files, strict=True))
        ]
        place = NodeIdentity("7_0", "n1", folder)
        self._watch = HangWatch(self.leader, workers, after_s=0, place=place)

    def ask(self, within_s: float = ANSWER_S) -> list[str]:
        """Ask as the leader does, and return the states of the workers."""
        self.leader.answered.clear()
        self.leader.stacks += 1
        asked_at = time.monotonic()
        while not self.leader.answered.wait(0.05):
            assert time.monotonic() < asked_at + within_s, "no answer in time"
            self._watch.look(dict.fromkeys(range(NUM_WORKERS), os.getpid()), time.monotonic())
        return self.leader.answers[self.leader.stacks]


@pytest.fixture
def shown(monkeypatch):
    """Return what decides what a look at a worker's stack shows, by its local rank."""

    def show(stack_of) -> None:
        def take(pid, dump):
            return stack_of(int(dump.stem.rpartition("-")[2]))

        monkeypatch.setattr(stacks, "take", take)

    monkeypatch.setattr(hang_watch, "_BUSY_SHARE", 1e9)  # all are this process, which computes
    return show


def test_eight_slow_looks_are_answered_in_time(tmp_path, shown):
    """A second each, as py-spy may take; who saves acquits the group."""
    lines = itertools.count()

    def slow(rank):
        assert rank >= 2, "who is busy is not looked into"
        time.sleep(1.0)
        return STACK.format(next(lines) if rank == 7 else 4)

    shown(slow)
    states = Node(tmp_path, num_busy=2).ask(within_s=ANSWER_S / 2)
    assert states == ["busy", "busy", *["stands"] * 5, "moves"]


def test_a_look_that_hangs_costs_the_others_nothing(tmp_path, shown, monkeypatch):
    """Its worker is out of reach; what is known of the others is told."""
    over, lines = threading.Event(), itertools.count()
    monkeypatch.setattr(hang_watch, "WITHIN_S", 3.0)

    def hang(rank):
        if rank == 0:
            over.wait(60)
        return STACK.format(next(lines))

    shown(hang)
    states = Node(tmp_path).ask(within_s=10.0)
    over.set()
    assert states == ["silent", *["moves"] * 7]


def test_who_was_busy_and_goes_on_meanwhile_is_not_taken_for_silent(tmp_path, shown):
    """It has no stacks, since it was not looked into while it was busy."""
    node = Node(tmp_path, num_busy=1)

    def end_save(rank):
        time.sleep(0.5)
        node.pages[0].published = BLANK
        return STACK.format(4)

    shown(end_save)
    assert node.ask()[0] == "busy"


def test_a_file_system_that_hangs_keeps_no_answer(tmp_path, shown, monkeypatch):
    """The stacks are written when it can be; all ranks may be waiting for it themselves."""
    answers, real = threading.Event(), Path.open

    def hang(self, *args, **options):
        if self.name.endswith(".stack.txt"):
            assert answers.wait(60)
        return real(self, *args, **options)

    shown(lambda rank: STACK.format(4))
    monkeypatch.setattr(hang_watch, "_WRITTEN_WITHIN_S", 0.1)
    monkeypatch.setattr(Path, "open", hang)
    node = Node(tmp_path)
    for _ in range(2):
        assert node.ask(within_s=10.0) == ["stands"] * NUM_WORKERS
    answers.set()
    deadline = time.monotonic() + 10
    while not node.files[-1].stack.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "/u/t.py" in node.files[0].stack.read_text()
