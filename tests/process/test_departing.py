"""Agents under notice, over real sockets and files: one agreed step, and nobody is waited for."""

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from group import PATIENCE_S, Group, eventually, kill

from hpc_elastic.agent.worker_channel import WorkerChannel
from hpc_elastic.rendezvous.leader import Leader
from hpc_elastic.rendezvous.leader_state import MAX_UNMATCHED, LeaveRequests
from hpc_elastic.rendezvous.log_entry import Agent, claim
from hpc_elastic.rendezvous.messages import Departed, PreemptionNotice
from hpc_elastic.rendezvous.session import Session
from hpc_elastic.rendezvous.term import DEFAULT_LEFT_S, RunFiles, TermFolder
from hpc_elastic.run.directory import RunDir
from hpc_elastic.shared_files import carried_out
from hpc_elastic.slurm.exit_action import Reason
from hpc_elastic.worker.shared_page import SharedPage


def within(left_s: float, reason: Reason) -> PreemptionNotice:
    """Return the notice of a node that is to be left."""
    return PreemptionNotice(reason, time.monotonic() + left_s)


class Worker:
    """A node's worker, which makes steps and saves where all agree, and its agent's looks."""

    def __init__(self, session: Session, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.session = session
        self.page = SharedPage.create(folder, 0)
        self.saved: list[int] = []
        self.over = threading.Event()
        self._channel = WorkerChannel(session, [self.page])
        self._threads = [threading.Thread(target=t) for t in (self._train, self._watch)]
        for thread in self._threads:
            thread.start()

    def _train(self) -> None:
        step = 0
        while not self.over.wait(0.005):
            step += 1
            if self.page.poll_checkpoint(step):
                self.saved.append(step)
                self.page.pause_at(step)

    def _watch(self) -> None:
        while not self.over.wait(0.02):
            self._channel.poll(time.monotonic())

    def end(self) -> None:
        """End the worker, wherever it waits."""
        self.over.set()
        self.page.request_checkpoint(None)
        for thread in self._threads:
            thread.join(PATIENCE_S)


@pytest.fixture
def train(tmp_path):
    """Start a worker for each of these sessions; they are ended with the test."""
    workers: list[Worker] = []

    def start(*sessions: Session) -> list[Worker]:
        begun = len(workers)
        workers.extend(Worker(s, tmp_path / f"w{begun + i}") for i, s in enumerate(sessions))
        new = workers[begun:]
        eventually(lambda: all((w.page.read().passed or 0) > 3 for w in new))
        return new

    yield start
    for worker in workers:
        worker.end()


def training(g: Group, num_agents: int) -> list[Session]:
    """Agents that have a round."""
    agents = [g.agent(slot) for slot in range(num_agents)]
    g.join(*agents)
    return agents


@pytest.mark.parametrize("leads", [False, True])
def test_all_save_at_one_step_and_the_others_go_on_without_the_node(group, train, leads):
    """Also where the node that is taken is the leader's."""
    g = group(max_nodes=3, scale_up="checkpoint")
    agents = training(g, 3)
    workers = train(*agents)
    leaving = g.leader if leads else g.followers[0]
    others = [s for s in agents if s is not leaving]
    leaving.add_notice(within(8.0, Reason.SIGNAL))
    eventually(lambda: leaving.departed and all(s.stop_requested for s in others))
    assert leaving.departed == Departed(Reason.SIGNAL) and leaving.stop_requested
    assert leaving.join(1.0) == Departed(Reason.SIGNAL)
    (saved,) = {tuple(w.saved) for w in workers}
    assert len(saved) == 1
    assert {w.page.read().passed for w in workers} == set(saved), "no step was made beyond it"
    began = time.monotonic()
    assert {r.world_size for r in g.join(*others)} == {2}
    assert time.monotonic() - began < g.rules.straggler_timeout_s / 2
    eventually(lambda: g.events("members_released"))
    (released,) = g.events("members_released")
    assert len(released["tasks"]) == 1


def test_everybody_leaves_at_one_step(group, train):
    """The whole run is preempted: the leader goes with the others, once they have been told."""
    g = group(max_nodes=2, scale_up="checkpoint")
    agents = training(g, 2)
    workers = train(*agents)
    for s in agents:
        s.add_notice(within(60.0, Reason.TIME_LIMIT))
    eventually(lambda: all(s.departed for s in agents))
    assert len({tuple(w.saved) for w in workers}) == 1 and len(workers[0].saved) == 1


def test_a_worker_may_want_a_checkpoint(group, train):
    """All ranks save at one step, and go on."""
    g = group(max_nodes=2, scale_up="checkpoint")
    workers = train(*training(g, 2))
    workers[0].page.want_checkpoint()
    eventually(lambda: all(w.saved for w in workers))
    (saved,) = {tuple(w.saved) for w in workers}
    eventually(lambda: all((w.page.read().passed or 0) > saved[0] + 5 for w in workers))
    workers[1].page.want_checkpoint()
    eventually(lambda: all(len(w.saved) == 2 for w in workers))
    assert workers[0].saved == workers[1].saved


def test_a_newcomer_comes_in_at_an_agreed_step(group, train):
    """Though the script makes no checkpoint of its own for long."""
    g = group(scale_up="checkpoint", scale_up_timeout_s=60.0)
    agents = training(g, 2)
    workers = train(*agents)
    late = g.agent(2)
    waiting = g.threads.submit(late.join, PATIENCE_S)
    eventually(lambda: all(s.stop_requested for s in agents))
    assert len({tuple(w.saved) for w in workers}) == 1 and len(workers[0].saved) == 1
    assert {r.world_size for r in g.join(*agents)} == {3}
    assert waiting.result(PATIENCE_S).world_size == 3


def test_a_node_whose_time_is_over_leaves_though_nothing_was_saved(group):
    """Its workers never asked."""
    g = group(max_nodes=2, scale_up="checkpoint")
    leaving, other = training(g, 2)
    leaving.add_notice(within(5.0, Reason.SIGNAL))
    eventually(lambda: g.events("preemption_notice"))
    assert leaving.departed is None
    leaving.leave_now()
    eventually(lambda: leaving.departed and other.stop_requested)
    assert g.join(other)[0].world_size == 1


def test_a_node_that_loses_its_leader_leaves_if_it_is_under_notice(group):
    """The round is over: it takes no place in another."""
    g = group(max_nodes=2, scale_up="checkpoint")
    training(g, 2)
    (leaving,) = g.followers
    leaving.add_notice(within(60.0, Reason.SIGNAL))
    kill(g.leader)
    eventually(lambda: leaving.departed)


def test_a_node_that_waits_leaves_at_once(group):
    """Nobody joins meanwhile."""
    g = group(min_nodes=2)
    lone = g.agent(0)
    waiting = g.threads.submit(lone.join, PATIENCE_S)
    eventually(lambda: g.events("joined"))
    lone.add_notice(within(600.0, Reason.ASKED))
    assert waiting.result(PATIENCE_S) == Departed(Reason.ASKED)


# ---- notice files -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["7_1", "node1", "all"])
def test_a_notice_file_asks_a_node_to_leave(group, name):
    """By its task, its host, or all; the file is gone once it was passed on."""
    g = group(max_nodes=2, scale_up="checkpoint")
    agents = training(g, 2)
    g.run.notices.mkdir()
    staged, file = (g.run.notices / n for n in (f".{name}", name))
    staged.write_text("30\n")
    staged.rename(file)
    eventually(lambda: agents[1].leader_notice and not file.exists())
    eventually(lambda: not list(g.run.rdzv.glob("term.*/notice.*")))
    notice = agents[1].leader_notice
    assert notice.reason is Reason.ASKED and notice.by <= time.monotonic() + 30.0
    if name == "all":
        eventually(lambda: agents[0].leader_notice)
    else:
        assert agents[0].leader_notice is None


def test_a_notice_for_the_leaders_own_node_is_taken_away_though_it_stops_at_once(
    group, monkeypatch
):
    """Else its task, once it is back, would be asked to leave again."""
    remove, stop, stops = RunFiles.remove_notice, Leader.stop, threading.Event()

    def remove_late(files: RunFiles, term: int, name: str) -> None:
        assert stops.wait(PATIENCE_S)
        remove(files, term, name)

    async def stop_and_tell(leader: Leader) -> None:
        stops.set()
        await stop(leader)

    monkeypatch.setattr(RunFiles, "remove_notice", remove_late)
    monkeypatch.setattr(Leader, "stop", stop_and_tell)
    g = group(max_nodes=2, scale_up="checkpoint")
    training(g, 2)
    g.run.notices.mkdir()
    leader = g.leader
    file = g.run.notices / f"7_{g.sessions.index(leader)}"
    file.touch()
    eventually(lambda: leader.leader_notice)
    leader.leave("asked")
    assert not file.exists() and not list(g.run.rdzv.glob("term.*/*"))


def test_a_leader_that_is_deposed_ends_and_the_next_has_its_notices(group):
    """Status and notices are the next leader's from then on; a notice that waits moves on."""
    g = group(max_nodes=2, scale_up="checkpoint")
    agents = training(g, 2)
    g.run.notices.mkdir()
    (g.run.notices / "7_2").touch()  # its task is not there yet
    eventually(lambda: list(g.run.rdzv.glob("term.1/notice.7_2")))
    old = g.leader
    leader = old._leader
    number, entry = g.register.last()
    here = replace(entry.leader, task="7_2", port=1)
    assert g.register.create(claim(number + 1, entry, here, time.time()))
    eventually(lambda: old._leader is not leader)
    assert leader._term.is_over and not leader._duties and not leader._names
    eventually(lambda: any(s._leader for s in agents))
    eventually(lambda: list(g.run.rdzv.glob("term.3/notice.7_2")))
    assert [f.name for f in g.run.rdzv.glob("term.*")] == ["term.3"]
    eventually(lambda: json.loads(g.run.status.read_text())["term"] == 3)
    terms = [json.loads(line)["term"] for line in g.run.progress.read_text().splitlines()]
    assert terms == sorted(terms)


@pytest.fixture
def claimed(tmp_path):
    """What a leader finds after it has claimed these notices."""
    run = RunDir(tmp_path)
    run.first_term.mkdir(parents=True)
    run.notices.mkdir()
    folder = TermFolder(1, RunFiles(run))

    def claim_all(**texts: bytes) -> dict[str, float]:
        for name, text in texts.items():
            (run.notices / name).write_bytes(text)
        found = carried_out(folder.claim_notices())
        assert not [f for f in run.notices.iterdir() if not f.name.startswith(".")]
        return found

    return claim_all


@pytest.mark.parametrize(
    ("text", "left_s"),
    [
        (b"", DEFAULT_LEFT_S), (b"12.5", 12.5), (b"-3", 0.0), (b"soon", DEFAULT_LEFT_S),
        (b"nan", 600.0), (b"\xff\xfe6\0", 600.0),
    ],
)  # fmt: skip
def test_what_a_notice_file_holds(tmp_path, claimed, text, left_s):
    """Seconds; nothing, or no number, is ten minutes."""
    (tmp_path / "preempt" / ".40_4.staged").write_text("1")
    assert claimed(**{"40_3": text}) == {"40_3": left_s}


def test_a_notice_that_the_client_remembers_as_absent_is_claimed(claimed, monkeypatch):
    """A listing shows it; each call on its name fails until the server is asked about it."""
    absent, rename, mkdir = {"40_3"}, Path.rename, Path.mkdir

    def renamed(file, target):
        if file.name in absent:
            raise FileNotFoundError(2, "No such file or directory")
        return rename(file, target)

    def made(folder, *args, **how):
        absent.discard(folder.name)
        return mkdir(folder, *args, **how)

    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(Path, "mkdir", made)
    assert claimed(**{"40_3": b"7"}) == {"40_3": 7.0}


def test_a_notice_that_may_not_be_read_is_one_all_the_same(claimed, monkeypatch):
    """Somebody made it who may write there; the others count as well."""
    open_file = os.open

    def opened(file, *args, **how):
        if Path(file).name == "notice.40_3":
            raise PermissionError(13, "Permission denied")
        return open_file(file, *args, **how)

    monkeypatch.setattr(os, "open", opened)
    found = claimed(**{"40_3": b"5", "40_4": b"5"})
    assert found == {"40_3": DEFAULT_LEFT_S, "40_4": 5.0}


def test_a_file_whose_name_is_none_keeps_no_notice_from_its_node(tmp_path, claimed):
    """It cannot be claimed; others are, whatever their names."""
    found = RunFiles(RunDir(tmp_path)).new_notices
    too_long = tmp_path / "preempt" / ("4" * 255)
    too_long.touch()
    assert found() == []
    too_long.unlink()
    odd = {"a" * 248: b"7", "\udcff\n": b"6"}
    assert claimed(**odd, z=b"5") == {"a" * 248: 7.0, "\udcff\n": 6.0, "z": 5.0}


def test_no_notice_folder_is_no_notice(tmp_path, claimed):
    """As nearly always."""
    (tmp_path / "preempt").rmdir()
    assert RunFiles(RunDir(tmp_path)).new_notices() == []


A, B = (Agent(f"40_{slot}", 0, slot, f"node{slot}", 1) for slot in range(2))


def test_a_notice_for_nobody_is_kept_for_a_while():
    """Its task may be on its way to a new leader."""
    asked = LeaveRequests()
    looks = [asked.match_agents({"40_3": 5.0}, [A, B]) for _ in range(MAX_UNMATCHED)]
    assert looks == [([], [], [])] * (MAX_UNMATCHED - 1) + [([], [], ["40_3"])]


def test_a_node_is_told_until_it_has_confirmed_the_notice():
    """A message may be lost; and one that has come is not repeated for the task's next attempt."""
    asked = LeaveRequests()
    for _ in range(2):
        assert asked.match_agents({"40_0": 5.0}, [A, B]) == ([(A, 5.0)], [], [])
    assert asked.confirmed(A, [A, B]) == ["40_0"]
    assert asked.match_agents({}, [B]) == ([], [], [])
    assert asked.match_agents({"40_0": 5.0}, [A, B]) == ([(A, 5.0)], [], []), "it is asked again"


def test_a_notice_to_all_is_over_when_all_have_confirmed_it():
    """Or are not there any more."""
    asked = LeaveRequests()
    asked.match_agents({"all": 5.0}, [A, B])
    assert asked.confirmed(A, [A, B]) == []
    assert asked.match_agents({"all": 5.0}, [A, B]) == ([(B, 5.0)], [], [])
    assert asked.match_agents({"all": 5.0}, [A]) == ([], ["all"], [])
