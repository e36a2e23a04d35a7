"""A Manager whose link, process group and transport are played: each answer can be chosen."""
# ruff: noqa: D102  # the methods are those of what is played

import threading
from collections import deque
from types import SimpleNamespace

import torch
from torch.distributed import Work
from torch.futures import Future

from hpc_elastic.ft import manager as module
from hpc_elastic.ft.messages import NO_QUORUM, CheckpointBeforeLeave, HealSource, QuorumResult


class FakeLink:
    """Answers questions with the placements that a test has put in a queue."""

    def __init__(self, on_broken):
        self.on_broken = on_broken
        self.replica_id = "r"
        self.quorum_id = NO_QUORUM
        self.call = -1
        self.broken = None
        self.answers = deque()
        self.asks = []
        self.reports = []
        self.votes = []
        self.verdict = True
        self.is_last = False
        self.is_saved = False
        self.closed = False

    def needs_quorum(self, *, failed):
        self.is_saved = self.is_last
        self.call += 1
        return failed or self.quorum_id == NO_QUORUM or self.broken is not None

    def ask(self, ask, timeout_s):
        self.asks.append(ask)
        answer = self.answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, QuorumResult):
            self.quorum_id, self.call, self.broken = answer.quorum_id, 0, None
        self.is_last = isinstance(answer, CheckpointBeforeLeave)
        return answer

    def report_broken(self, quorum_id, why):
        if quorum_id == self.quorum_id and self.broken is None:
            self.broken = why
            self.reports.append((quorum_id, why))

    def breaks(self, why="a member was lost"):
        """Play the keeper's word that the present quorum is over."""
        self.broken = why
        self.on_broken(self.quorum_id, why)

    def vote(self, yes, timeout_s):
        self.votes.append(yes)
        return yes and self.verdict

    def settle(self):
        return self.is_last

    def close(self):
        self.closed = True


class FakeWork(Work):
    """Ends when it is told to."""

    def __init__(self):
        super().__init__()
        self.future = Future()

    def wait(self, timeout=None):
        self.future.wait()
        return True

    def is_completed(self):
        return self.future.done()

    def get_future(self):
        return self.future


class FakeGroup:
    """A process group whose sum is what a test says; others are reached by `configured`."""

    def __init__(self):
        self.configured = []
        self.others = 0.0
        self.fails_to_configure: Exception | None = None
        self.during_configure = lambda: None
        self.aborted = threading.Event()
        self.error = None
        self.held: list[tuple[FakeWork, torch.Tensor]] | None = None
        self.is_down = False

    def configure(self, store, replica_id, rank, world_size, quorum_id, *rest):
        self.configured.append((quorum_id, rank, world_size))
        self.error = None
        self.aborted.clear()
        self.during_configure()
        if self.fails_to_configure is not None:
            error, self.fails_to_configure = self.fails_to_configure, None
            raise error

    def allreduce(self, tensors, options):
        if self.error is not None:
            raise self.error
        work = FakeWork()
        if self.held is not None:
            self.held.append((work, tensors[0]))
        else:
            tensors[0].add_(self.others)
            work.future.set_result(tensors)
        return work

    def abort(self):
        self.aborted.set()
        self.error = RuntimeError("aborted")
        for work, _ in self.held or []:
            if not work.future.done():
                work.future.set_exception(self.error)

    def errored(self):
        return self.error

    def shutdown(self):
        self.is_down = True


class FakeTransport:
    """Gives the state that a test has put there."""

    multi_source = False
    needs_group = True
    in_place = False

    def __init__(self):
        self.state: dict | Exception | None = None
        self.sent = []
        self.calls = []

    def metadata(self):
        return "here"

    def send_checkpoint(self, dst_ranks, step, state_dict, timeout):
        self.sent.append((dst_ranks, step, state_dict))

    def recv_checkpoint(self, src_rank, metadata, step, timeout):
        self.calls.append(("recv", src_rank, metadata, step))
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def disallow_checkpoint(self):
        self.calls.append("disallow")

    def abort(self):
        self.calls.append("abort")

    def resume(self):
        self.calls.append("resume")

    def shutdown(self, wait=True):
        self.calls.append("shutdown")


def place(quorum_id=1, rank=0, size=2, *, cohort=(0, 2), step=0, lineage="L", **more):
    """Return a placement; by default all are new."""
    return QuorumResult(quorum_id, rank, size, "h:1", step, lineage, *cohort, **more)


def heals(quorum_id=1, rank=1, size=2, *, step=7, lineage="L"):
    """Return the placement of a member that heals from member 0."""
    return place(
        quorum_id, rank, size, cohort=(None, size - 1), step=step, lineage=lineage,
        sources=(HealSource(0, "there"),),
    )  # fmt: skip


def state_of(step=7, value=3.0, lineage="L"):
    """Return what a peer would send."""
    about = {"step": step, "batches_committed": 2 * step, "lineage": lineage}
    return {"user": {"default": {"w": torch.tensor([value])}}, "torchft": about}


def make(monkeypatch, *answers, **arguments):
    """Return a played Manager: manager, link, group, transport and the user's tensor."""
    group, transport, w = FakeGroup(), FakeTransport(), torch.tensor([1.0])
    monkeypatch.setattr(module, "ManagerClient", lambda *_, on_broken, **__: FakeLink(on_broken))
    monkeypatch.setattr(
        module, "find_server", lambda *_: SimpleNamespace(path=None, attendant=None)
    )
    monkeypatch.setattr(module.checkpoint_trigger, "answer_by", lambda rule: None)
    given = {"rank": 0, "world_size": 1, "store_addr": "h", "store_port": 1, "min_replica_size": 1}
    manager = module.Manager(
        group,
        lambda state: w.copy_(state["w"]),
        lambda: {"w": w},
        checkpoint_transport=transport,
        **{**given, **arguments},
    )
    link = manager._link
    link.answers.extend(answers)
    return SimpleNamespace(manager=manager, link=link, group=group, transport=transport, w=w)
