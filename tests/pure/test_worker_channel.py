"""What one node passes on between its workers' pages and the leader."""

import threading
from dataclasses import replace
from typing import Any

import pytest

from hpc_elastic.agent.worker_channel import WorkerChannel, can_save_at
from hpc_elastic.rendezvous.group_change import STRAGGLE_S
from hpc_elastic.rendezvous.messages import (
    CheckpointAnnounced,
    CheckpointWanted,
    MemberReport,
    Vote,
)
from hpc_elastic.worker.shared_page import (
    CheckpointRequest,
    SharedPage,
    WorkerStatus,
)


class Leader:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.checkpoint_request: CheckpointRequest | None = None
        self.told: list[tuple[int, int]] = []
        self.answers: list[dict[str, Any]] = []
        self.wants = 0

    def report(self, report: MemberReport) -> None:
        """Note it."""
        match report:
            case CheckpointAnnounced(step, paused):
                self.told.append((step, paused))
            case Vote(number, ok, passed):
                self.answers.append({"number": number, "ok": ok, "passed": passed})
            case CheckpointWanted():
                self.wants += 1


class Page:
    """A page that shows what a test wants, and notes what is asked of the worker."""

    def __init__(self) -> None:
        self.shows: dict[str, Any] = {}
        self.asked: list[CheckpointRequest | None] = []

    def read(self) -> WorkerStatus:
        """Return what the worker shows."""
        blank = dict.fromkeys(WorkerStatus.__match_args__)
        return WorkerStatus(**{**blank, "paused": 0, "waiting": 0, "wanted": 0, **self.shows})

    def request_checkpoint(self, request: CheckpointRequest | None) -> None:
        """Note it."""
        self.asked.append(request)


def node(num_workers: int) -> tuple[Leader, list[Page], WorkerChannel]:
    """A node with so many workers."""
    pages = [Page() for _ in range(num_workers)]
    leader = Leader()
    return leader, pages, WorkerChannel(leader, pages)


def test_a_boundary_is_reported_once_all_workers_have_announced_it():
    """The slowest worker counts, nothing is said twice, and a pause with the request it obeys."""
    leader, (first, second), node_ = node(2)
    first.shows = {"boundary": 10}
    node_.poll(0.0)
    assert leader.told == []
    second.shows = {"boundary": 10}
    node_.poll(0.1)
    node_.poll(0.2)
    assert leader.told == [(10, 0)]
    first.shows = second.shows = {"boundary": 20, "paused": 2}
    node_.poll(0.3)
    assert leader.told[1:] == [(20, 2)]


def test_the_leaders_request_reaches_every_page():
    """Each of its states once, and its withdrawal."""
    leader, pages, node_ = node(2)
    request = CheckpointRequest(1, 50)
    states = [request, replace(request, confirmed=True, pause=True), None]
    for state in states:
        leader.checkpoint_request = state
        node_.poll(0.0)
        node_.poll(0.1)
    assert [page.asked for page in pages] == [states] * 2


def test_workers_that_never_announce_are_not_waited_for_long():
    """A script may announce its boundaries on one rank alone."""
    leader, (first, _), node_ = node(2)
    first.shows = {"boundary": 20, "paused": 1}
    node_.poll(0.0)
    node_.poll(STRAGGLE_S - 0.1)
    assert leader.told == []
    node_.poll(STRAGGLE_S)
    assert leader.told == [(20, 1)]


def test_a_wish_for_a_checkpoint_is_passed_on_once():
    """The worker counts its wishes."""
    leader, (_, page), node_ = node(2)
    for wanted in (0, 1, 1, 2):
        page.shows = {"wanted": wanted}
        node_.poll(0.0)
    assert leader.wants == 2


def test_all_workers_have_to_be_before_the_step_or_wait_there():
    """The node's answer names its furthest worker, and is given once."""
    leader, (first, second), node_ = node(2)
    first.shows, second.shows = {"passed": 7}, {"passed": 9, "waiting": 3}
    leader.checkpoint_request = CheckpointRequest(3, 9)
    node_.poll(0.0)
    node_.poll(0.1)
    assert leader.answers == [{"number": 3, "ok": True, "passed": 9}]
    leader.checkpoint_request = CheckpointRequest(4, 8)
    node_.poll(0.2)
    assert leader.answers[1:] == [{"number": 4, "ok": False, "passed": 9}]


def test_a_worker_at_the_step_that_does_not_wait_is_looked_at_twice():
    """It may be about to wait, and it may have passed the step before the proposal came."""
    leader, (page,), node_ = node(1)
    page.shows, leader.checkpoint_request = {"passed": 9, "waiting": 2}, CheckpointRequest(3, 9)
    node_.poll(0.0)
    assert leader.answers == []
    node_.poll(0.1)
    assert leader.answers == [{"number": 3, "ok": False, "passed": 9}]


def test_the_node_votes_again_once_all_have_passed_the_confirmed_step():
    """A later request would take it off the page of one that has not come there."""
    leader, (first, second), node_ = node(2)
    leader.checkpoint_request = CheckpointRequest(1, 5, confirmed=True)
    first.shows, second.shows = {"passed": 6, "agreed": 5}, {"passed": 5, "agreed": 5}
    node_.poll(0.0)
    assert leader.answers == []
    second.shows = {"passed": 7, "agreed": 5}
    node_.poll(0.1)
    node_.poll(0.2)
    assert leader.answers == [{"number": 1, "ok": True, "passed": 6}]


def test_the_node_votes_against_a_request_without_a_step_once_a_worker_polls():
    """So the leader proposes one after all."""
    leader, (first, _), node_ = node(2)
    leader.checkpoint_request = CheckpointRequest(1, None, confirmed=True, pause=True)
    node_.poll(0.0)
    assert leader.answers == []
    first.shows = {"passed": 3}
    node_.poll(0.1)
    node_.poll(0.2)
    assert leader.answers == [{"number": 1, "ok": False, "passed": 3}]


@pytest.mark.parametrize(
    ("shows", "step", "expected"),
    [
        ({}, 9, True),
        ({"passed": 8}, 9, True),
        ({"passed": 9, "waiting": 1}, 9, True),
        ({"passed": 9}, 9, None),
        ({"passed": 10, "waiting": 1}, 9, True),
        ({"passed": 10}, 9, False),
        ({}, 0, True),
        ({"passed": 0, "waiting": 1}, 0, False),
    ],
)
def test_who_can_save_at_a_step(shows, step, expected):
    """Step 0 stands for the question who passes steps at all."""
    page = Page()
    page.shows = shows
    assert can_save_at(CheckpointRequest(1, step), page.read()) is expected


def test_real_workers_on_one_node_agree_on_a_step(tmp_path):
    """Two threads make steps at their own pace, and save at the same one."""
    pages = [SharedPage.create(tmp_path, rank) for rank in range(2)]
    leader, saved, ended = Leader(), {}, threading.Event()
    node_ = WorkerChannel(leader, pages)

    def work(rank: int) -> None:
        step = 0
        while not ended.wait(0.0005 * (rank + 1)):
            step += 1
            if pages[rank].poll_checkpoint(step):
                saved.setdefault(rank, []).append(step)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    number = 0
    while not (leader.answers and leader.answers[-1]["ok"]):
        number += 1
        passed = leader.answers[-1]["passed"] if leader.answers else 0
        leader.checkpoint_request = CheckpointRequest(number, passed + 40)
        while len(leader.answers) < number:
            node_.poll(float(number))
    agreed = leader.checkpoint_request
    leader.checkpoint_request = CheckpointRequest(agreed.number, agreed.step, confirmed=True)
    while len(leader.answers) == number:
        node_.poll(float(number))
    ended.set()
    for thread in threads:
        thread.join()
    assert saved == {0: [agreed.step], 1: [agreed.step]}
