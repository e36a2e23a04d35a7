"""A Manager with a fake client, process group and transport, whose answers a test chooses."""
# ruff: noqa: D102  # the methods are those of the faked classes

import threading
from collections import deque
from types import SimpleNamespace

import torch
from torch.distributed import Work
from torch.futures import Future

from hpc_elastic.ft import manager as module
from hpc_elastic.ft.messages import NO_QUORUM, CheckpointBeforeLeave, HealSource, QuorumResult


class FakeClient:
    """Answers requests with the results that a test has queued."""

    def __init__(self, on_abort):
        self.on_abort = on_abort
        self.steps = self
        self.replica_id = "r"
        self.quorum_id = NO_QUORUM
        self.quorum_step = -1
        self.abort_reason = None
        self.lasting_errors = {}
        self.answers = deque()
        self.requests = []
        self.timeouts = []
        self.reports = []
        self.events = []
        self.votes = []
        self.decision = True
        self.must_save = False
        self.is_saved = False
        self.closed = False

    def start_step(self, *, last_failed):
        self.is_saved = self.must_save
        self.quorum_step += 1
        return last_failed or self.quorum_id == NO_QUORUM or self.abort_reason is not None

    def request_quorum(self, request, timeout_s):
        self.requests.append(request)
        self.timeouts.append(timeout_s)
        answer = self.answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, QuorumResult):
            self.quorum_id, self.quorum_step, self.abort_reason = answer.quorum_id, 0, None
        self.must_save = isinstance(answer, CheckpointBeforeLeave)
        return answer

    def report_abort(self, quorum_id, reason, *, is_lasting=False):
        if is_lasting:
            self.lasting_errors[quorum_id] = reason
        if quorum_id == self.quorum_id and self.abort_reason is None:
            self.abort_reason = reason
            self.reports.append((quorum_id, reason))

    def report_event(self, event):
        self.events.append(event)

    def abort(self, reason="a member was lost"):
        """Let the lighthouse abort the present quorum."""
        self.abort_reason = reason
        self.on_abort(self.quorum_id, reason)

    def vote(self, commit, timeout_s):
        self.votes.append(commit)
        return commit and self.decision

    def settle_next_step(self):
        return self.must_save

    def close(self, *, is_step_over):
        self.closed = True


class FakeWork(Work):
    """Ends when a test ends its future."""

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
    """A process group whose other members add a number that a test sets."""

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
            tensors[0].add_(torch.tensor(self.others).to(tensors[0].dtype))
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
    """Returns the state that a test has set."""

    multi_source = False
    needs_group = True
    in_place = False

    def __init__(self):
        self.state: dict | Exception | None = None
        self.sent = []
        self.refused = []
        self.calls = []
        self.failures = []

    def metadata(self):
        return "here"

    def send_checkpoint(self, dst_ranks, step, state_dict, timeout):
        self.sent.append((dst_ranks, step, state_dict))

    def refuse_checkpoint(self, dst_ranks, step, reason, timeout):
        self.refused.append((dst_ranks, step, reason))

    def recv_checkpoint(self, src_rank, metadata, step, timeout):
        self.calls.append(("recv", src_rank, metadata, step))
        if self.failures:
            raise self.failures.pop()
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


def place(quorum_id=1, rank=0, size=2, *, cohort=(0, 2), step=0, version="L", **more):
    """Return a quorum's result; by default all members have the newest state."""
    return QuorumResult(quorum_id, rank, size, "h:1", step, version, *cohort, **more)


def heals(quorum_id=1, rank=1, size=2, *, step=7, version="L"):
    """Return the result of a member that heals from member 0."""
    return place(
        quorum_id, rank, size, cohort=(None, size - 1), step=step, version=version,
        sources=(HealSource(0, "there"),),
    )  # fmt: skip


def state_of(step=7, value=3.0, version="L"):
    """Return the state that a peer sends."""
    progress = {"step": step, "batches_committed": 2 * step, "state_version": version}
    return {"user": {"default": {"w": torch.tensor([value])}}, "torchft": progress}


def make(monkeypatch, *answers, has_state=True, loaded=None, peer_state=None, **arguments):
    """Return a Manager and its fakes: manager, client, group, transport, and the user's tensor.

    It has loaded the checkpoint ``loaded``, and ``peer_state`` is what a peer sends.
    """
    group, transport, w = FakeGroup(), FakeTransport(), torch.tensor([1.0])
    made = []

    def make_client(*_, on_abort, **__):
        made.append(FakeClient(on_abort))
        return made[0]

    policies = []
    monkeypatch.setattr(module, "ManagerClient", make_client)
    server = SimpleNamespace(path=None, wait=lambda **_: None)
    monkeypatch.setattr(module, "find_server", lambda *_, **__: server)
    monkeypatch.setattr(module.checkpoint_trigger, "set_checkpoint_policy", policies.append)
    given = {"rank": 0, "world_size": 1, "store_addr": "h", "store_port": 1, "min_replica_size": 1}
    manager = module.Manager(
        group,
        (lambda state: w.copy_(state["w"])) if has_state else None,
        (lambda: {"w": w}) if has_state else None,
        checkpoint_transport=transport,
        **{**given, **arguments},
    )
    (client,) = made
    client.answers.extend(answers)
    transport.state = peer_state
    if loaded is not None:
        manager.load_state_dict(loaded)
    return SimpleNamespace(
        manager=manager,
        client=client,
        group=group,
        transport=transport,
        w=w,
        should_save=policies[0],
    )


def start(monkeypatch, *answers, **arguments):
    """Return what `make` does, in its first step."""
    made = make(monkeypatch, *answers, **arguments)
    made.manager.start_quorum()
    return made
