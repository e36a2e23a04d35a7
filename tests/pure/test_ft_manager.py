"""The Manager's steps, with a fake client, process group and transport."""

import threading
from collections import Counter, defaultdict
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import HashStore, ReduceOp
from torch.futures import Future

from ft_fakes import FakeWork, heals, make, place, start, state_of
from hpc_elastic.errors import ConfigError
from hpc_elastic.ft.checkpointing import UnusableStateError
from hpc_elastic.ft.manager import LeftQuorumError, SaveAgreement, WorldSizeMode
from hpc_elastic.ft.manager_client import find_server, resolve_place
from hpc_elastic.ft.messages import CheckpointBeforeLeave, LeaveGranted
from hpc_elastic.ft.quorum import CommittedProgress
from hpc_elastic.ft.quorum_client import DamagedStateError, QuorumClient
from hpc_elastic.worker import reporting

STEP_3 = {"step": 3, "batches_committed": 6}


def one_step(manager, value=1.0):
    """Make a step; return the mean, and whether it was committed."""
    manager.start_quorum()
    tensor = torch.tensor([value])
    manager.allreduce(tensor).wait()
    return tensor.item(), manager.should_commit()


def version_of(manager):
    """Return the state version that a peer would get."""
    return manager._manager_state_dict()["torchft"]["state_version"]


# ---- steps that are committed -------------------------------------------------------------------


def test_step_in_an_unchanged_quorum_sends_nothing(monkeypatch):
    """Only the first of three steps requests, and only it configures the group."""
    made = make(monkeypatch, place())
    for _ in range(3):
        one_step(made.manager)
    assert len(made.client.requests) == 1
    assert made.group.configured == [(1, 0, 2)]
    assert made.manager.current_step() == 3
    assert made.manager.batches_committed() == 6
    assert made.manager.state_dict() == {"step": 3, "batches_committed": 6}


@pytest.mark.parametrize(("op", "expected"), [(ReduceOp.SUM, 6.0), (ReduceOp.AVG, 3.0)])
def test_mean_is_over_the_participants(monkeypatch, op, expected):
    """Of two: the sum is halved; another operation is not divided."""
    made = make(monkeypatch, place())
    made.group.others = 5.0
    made.manager.start_quorum()
    tensor = torch.tensor([1.0])
    made.manager.allreduce(tensor, reduce_op=op).wait()
    assert tensor.item() == expected
    assert made.manager.should_commit()


@pytest.mark.parametrize(("size", "quantizes"), [(2, True), (7, True), (8, False)])
def test_a_quantized_mean_gathers_8_bit_integers_in_small_groups(monkeypatch, size, quantizes):
    """It is divided by the participants; groups so large that it costs more are exact."""
    made = make(monkeypatch, place(size=size))
    sent = []

    def allgather(outputs, inputs):
        sent.append(inputs[0].nbytes)
        for output in outputs[0]:
            output.copy_(inputs[0])
        work = FakeWork()
        work.future.set_result(outputs)
        return work

    monkeypatch.setattr(made.group, "size", lambda: size, raising=False)
    monkeypatch.setattr(made.group, "allgather", allgather, raising=False)
    made.manager.start_quorum()
    tensor = torch.linspace(-1, 1, 512)
    exact = tensor.clone()
    assert made.manager.allreduce(tensor, should_quantize=True).wait()
    assert made.manager.should_commit()
    assert sent == ([520] if quantizes else [])
    if quantizes:
        assert 0 < (tensor - exact).abs().max() < 1 / 253
    else:
        torch.testing.assert_close(tensor, exact / size)


def test_mean_of_integers_is_refused(monkeypatch):
    """As in torchft."""
    made = start(monkeypatch, place())
    with pytest.raises(ValueError, match="int64"):
        made.manager.allreduce(torch.tensor([1]))


def test_future_holds_the_mean(monkeypatch):
    """It is divided once, with any number of waits."""
    made = make(monkeypatch, place())
    made.group.others = 5.0
    made.manager.start_quorum()
    work = made.manager.allreduce(torch.tensor([1.0]))
    assert work.get_future().wait().item() == 3.0
    work.wait()
    assert work.get_future().value().item() == 3.0


def test_several_collectives_are_under_way(monkeypatch):
    """None waits for the one before; all are finished before the commit."""
    made = make(monkeypatch, place())
    made.group.held = []
    made.manager.start_quorum()
    tensors = [torch.tensor([2.0]), torch.tensor([4.0])]
    for tensor in tensors:
        made.manager.allreduce(tensor)
    for work, _ in made.group.held:
        work.future.set_result([])
    assert made.manager.should_commit()
    assert [t.item() for t in tensors] == [1.0, 2.0]


def test_group_commits_if_all_its_ranks_can(monkeypatch):
    """The server counts the votes; one no is the group's."""
    made = make(monkeypatch, place(), world_size=2)
    made.client.decision = False
    assert one_step(made.manager)[1] is False
    assert made.client.votes == [True]
    assert made.manager.current_step() == 0
    [(_, reason)] = made.client.reports
    assert "another rank of the group could not commit" in reason


def test_begin_step_twice_starts_one_step(monkeypatch):
    """A sampler and the optimizer's zero_grad may both call it; a used step is another matter."""
    made = make(monkeypatch, place())
    made.manager.begin_step()
    made.manager.begin_step()
    assert made.client.quorum_step == 0
    made.manager.allreduce(torch.tensor([1.0])).wait()
    assert made.manager.should_commit()
    made.manager.begin_step()
    assert made.client.quorum_step == 1


def test_queries_before_the_first_quorum(monkeypatch):
    """Nothing is known, and nothing is waited for."""
    manager = make(monkeypatch).manager
    assert (manager.participating_rank(), manager.num_participants()) == (None, 0)
    assert not manager.is_participating()
    assert manager.errored() is None
    with pytest.raises(RuntimeError, match="start_quorum"):
        manager.wait_quorum()


@pytest.mark.parametrize("world_size", [1, 2])
def test_before_the_first_quorum_nothing_is_committed(monkeypatch, world_size):
    """An error may be reported, and belongs to no step; no other rank is asked."""
    made = make(monkeypatch, place(), world_size=world_size)
    manager, error = made.manager, RuntimeError("too early")
    manager.report_error(error)
    assert manager.errored().original_exception is error
    assert manager.allreduce(torch.tensor([1.0])).wait()
    assert not manager.should_commit()
    assert (made.client.votes, made.client.reports) == ([], [])
    made.client.decision = True
    assert one_step(manager)[1] is True
    assert manager.errored() is None


def test_spare_adds_zero(monkeypatch):
    """FIXED_WITH_SPARES: two participate, and this is the third."""
    made = make(
        monkeypatch, place(rank=2, size=3, cohort=(2, 3)),
        min_replica_size=2, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES,
    )  # fmt: skip
    made.group.others = 8.0
    assert one_step(made.manager, 100.0) == (4.0, True)
    assert made.manager.participating_rank() is None
    assert made.manager.num_participants() == 2


# ---- healing ------------------------------------------------------------------------------------


def test_healing_replica_adds_zero_and_applies_the_state_before_the_commit(monkeypatch):
    """Async mode: the mean is that of the others, and the step counts from theirs."""
    made = make(monkeypatch, heals(), loaded=STEP_3, peer_state=state_of(step=7, value=3.0))
    made.group.others = 5.0
    made.manager.start_quorum()
    made.manager.wait_quorum()
    assert made.w.item() == 1.0
    assert made.manager.current_step() == 7
    tensor = torch.tensor([100.0])
    made.manager.allreduce(tensor).wait()
    assert tensor.item() == 5.0
    assert made.manager.should_commit()
    assert made.w.item() == 3.0
    assert made.manager.state_dict() == {"step": 8, "batches_committed": 15}
    assert version_of(made.manager) == CommittedProgress(7, 14, "L").after_step(1, 1).state_version


def test_healed_replica_participates_from_the_next_step_on(monkeypatch):
    """Without any message: after the commit of the first step all have the newest state."""
    made = make(monkeypatch, heals(), loaded=STEP_3, peer_state=state_of())
    one_step(made.manager)
    made.manager.start_quorum()
    assert made.manager.participating_rank() == 1
    assert made.manager.num_participants() == 2
    assert len(made.client.requests) == 1


@pytest.mark.parametrize(
    ("result", "loaded", "arguments"),
    [(heals(), STEP_3, {"use_async_quorum": False}), (heals(step=0), None, {})],
    ids=["in sync mode", "at step 0"],
)
def test_healing_before_the_forward_pass(monkeypatch, result, loaded, arguments):
    """The replica participates at once."""
    made = make(monkeypatch, result, **arguments)
    if loaded:
        made.manager.load_state_dict(loaded)
    made.transport.state = state_of(step=result.max_step, value=9.0)
    made.manager.start_quorum()
    assert made.w.item() == 9.0
    assert made.manager.participating_rank() == 1
    assert made.manager.num_participants() == 2


def test_source_sends_its_state_with_its_progress(monkeypatch):
    """The live tensors, the step and the version of the quorum's newest state."""
    made = make(monkeypatch, place(cohort=(0, 1), first_source_of=(1,), source_of=(1, 2)))
    one_step(made.manager)
    [(destinations, step, state)] = made.transport.sent
    assert (destinations, step) == ([1], 0)
    assert state["user"]["default"]["w"] is made.w
    assert state["torchft"] == {"step": 0, "batches_committed": 0, "state_version": "L"}


@pytest.mark.parametrize(("one_source", "metadata"), [(False, '["there"]'), (True, "there")])
def test_metadata_of_the_sources(monkeypatch, one_source, metadata):
    """As JSON, the best first; of one alone if the replicas differ (LocalSGD)."""
    made = make(monkeypatch, heals(), loaded=STEP_3)
    made.transport.multi_source = True
    if one_source:
        made.manager.heal_from_one_source()
    made.transport.state = state_of()
    one_step(made.manager)
    assert ("recv", 0, metadata, 7) in made.transport.calls


def test_state_versions_follow_the_promises(monkeypatch):
    """Random parameters equal no other's; loaded or equally seeded ones equal their peers'."""
    random = [version_of(make(monkeypatch).manager) for _ in range(2)]
    assert random[0] != random[1]
    seeded = [version_of(make(monkeypatch, init_sync=False).manager) for _ in range(2)]
    assert seeded[0] == seeded[1]
    loaded = make(monkeypatch).manager
    loaded.load_state_dict(STEP_3)
    assert version_of(loaded) == CommittedProgress.loaded(3, 6).state_version


def test_key_is_registered_once(monkeypatch):
    """The error names it."""
    manager = make(monkeypatch).manager
    manager.register_state_dict_fn("more", lambda s: None, dict)
    with pytest.raises(ValueError, match="'more'"):
        manager.register_state_dict_fn("more", lambda s: None, dict)


def test_reading_the_state_can_be_disallowed(monkeypatch):
    """Until it is allowed again; the reader gives up after the time-out."""
    made = make(monkeypatch, timeout=timedelta(seconds=0.05))
    made.manager.disallow_state_dict_read()
    made.manager.disallow_state_dict_read()
    with pytest.raises(TimeoutError, match="allow_state_dict_read"):
        made.manager._manager_state_dict()
    made.manager.allow_state_dict_read()
    assert made.manager._manager_state_dict()["torchft"]["step"] == 0


# ---- errors of a step ---------------------------------------------------------------------------


def test_error_costs_the_step_and_is_reported_at_once(monkeypatch):
    """It is not raised; the next step requests a new quorum, with the number of failures."""
    made = start(monkeypatch, place(), place(2, size=1, cohort=(0, 1)))
    made.manager.wait_quorum()
    made.group.error = RuntimeError("peer lost")
    made.manager.allreduce(torch.tensor([1.0])).wait()
    assert "peer lost" in str(made.manager.errored())
    [(quorum_id, reason)] = made.client.reports
    assert quorum_id == 1
    assert "peer lost" in reason
    assert not made.manager.should_commit()
    assert one_step(made.manager) == (1.0, True)
    assert [request.commit_failures for request in made.client.requests] == [0, 1]
    assert made.manager.errored() is None


def test_collectives_after_an_error_do_nothing(monkeypatch):
    """The tensor stays as it is."""
    made = start(monkeypatch, place())
    made.manager.report_error(ValueError("mine"))
    tensor = torch.tensor([5.0])
    assert made.manager.allreduce(tensor).wait()
    assert tensor.item() == 5.0
    assert isinstance(made.manager.errored().original_exception, ValueError)
    assert not made.manager.should_commit()


def test_abort_ends_the_collectives_under_way(monkeypatch):
    """The step fails; a work's wait returns False, and a future holds no error, for DDP's sake."""
    made = make(monkeypatch, place())
    made.group.held = []
    made.manager.start_quorum()
    work = made.manager.allreduce(torch.tensor([1.0]))
    tensor = torch.tensor([1.0])
    future = made.manager.allreduce(tensor).get_future()
    made.client.abort()
    assert not work.wait()
    assert future.wait() is tensor
    assert not made.manager.should_commit()


def test_abort_after_the_last_collective_costs_no_step(monkeypatch):
    """Its result is right; the next step requests."""
    made = start(monkeypatch, place(), place(2, size=1, cohort=(0, 1), step=1))
    made.manager.allreduce(torch.tensor([1.0])).wait()
    made.client.abort()
    assert made.manager.should_commit()
    assert one_step(made.manager)[1]
    assert len(made.client.requests) == 2


def test_error_that_only_the_process_group_knows(monkeypatch):
    """A wrapper may swallow errors: the step fails all the same."""
    made = start(monkeypatch, place())
    made.manager.allreduce(torch.tensor([1.0])).wait()
    made.group.error = RuntimeError("seen by the watchdog")
    assert not made.manager.should_commit()


def test_step_without_a_decision_has_failed(monkeypatch):
    """Its peers may have committed it: the replica must not go on as if it had not been."""
    made = start(monkeypatch, place(), place(2))
    made.manager.allreduce(torch.tensor([1.0])).wait()
    made.manager.start_quorum()
    made.manager.wait_quorum()
    assert len(made.client.requests) == 2
    assert made.client.reports


def test_too_few_participants_do_not_commit(monkeypatch):
    """All members find the same, and request again."""
    made = make(
        monkeypatch,
        heals(),
        place(2, step=7),
        min_replica_size=2,
        loaded=STEP_3,
        peer_state=state_of(),
    )
    assert not one_step(made.manager)[1]
    assert "too few participants" in made.client.reports[0][1]
    assert one_step(made.manager)[1]
    assert made.client.requests[1].commit_failures == 1


def test_more_failures_in_a_row_than_allowed_raise(monkeypatch):
    """With the last error."""
    made = start(monkeypatch, place(), max_retries=0)
    made.manager.report_error(ValueError("mine"))
    with pytest.raises(RuntimeError, match=r"max_retries=0.*mine"):
        made.manager.should_commit()


def test_late_error_of_an_earlier_step_costs_nothing_now(monkeypatch):
    """It belongs to its own step."""
    made = start(monkeypatch, place())
    future = Future()
    wrapped = made.manager.wrap_future(future, 5)
    made.manager.allreduce(torch.tensor([1.0])).wait()
    assert made.manager.should_commit()
    made.manager.start_quorum()
    future.set_exception(RuntimeError("late"))
    assert wrapped.wait() == 5
    assert made.manager.errored() is None
    assert not made.client.reports


def test_wrapped_future_always_holds_a_value(monkeypatch):
    """Its own, or the default after an error, or after the time-out."""
    made = start(monkeypatch, place())
    good, never = Future(), Future()
    wrapped = made.manager.wrap_future(good, 5)
    good.set_result(3)
    assert wrapped.wait() == 3
    assert made.manager.errored() is None
    late = made.manager.wrap_future(never, 6, timeout=timedelta(seconds=0.01))
    assert late.wait() == 6
    assert "0.01 s" in str(made.manager.errored())


# ---- entering a quorum that fails ---------------------------------------------------------------


def test_abort_before_the_first_collective_costs_no_step(monkeypatch):
    """Another quorum is entered in its place, while the forward pass goes on."""
    made = start(monkeypatch, place(), place(2, size=1, cohort=(0, 1)))
    made.manager.wait_quorum()
    made.client.abort()
    tensor = torch.tensor([4.0])
    made.manager.allreduce(tensor).wait()
    assert tensor.item() == 4.0
    assert made.manager.should_commit()
    assert made.manager.quorum_id() == 2


def test_abort_after_the_script_knows_its_part_costs_the_step(monkeypatch):
    """It may have chosen samples by it."""
    made = start(monkeypatch, place())
    assert made.manager.num_participants() == 2
    made.client.abort()
    made.manager.allreduce(torch.tensor([4.0])).wait()
    assert not made.manager.should_commit()
    assert len(made.client.requests) == 1


def test_abort_in_a_group_of_several_ranks_costs_the_step(monkeypatch):
    """None of them enters another quorum alone within a step."""
    made = start(monkeypatch, place(), world_size=2)
    made.manager.wait_quorum()
    made.client.abort()
    made.manager.allreduce(torch.tensor([4.0])).wait()
    assert not made.manager.should_commit()
    assert made.client.votes == [False]


def test_quorum_that_is_aborted_while_it_is_entered_is_replaced(monkeypatch):
    """The abort reaches configure at any moment, and costs nothing."""
    made = make(monkeypatch, place(), place(2, size=1, cohort=(0, 1)))
    reached = []

    def hang_once():
        made.group.during_configure = lambda: None
        made.client.abort()
        made.group.aborted.clear()
        reached.append(made.group.aborted.wait(30.0))
        raise RuntimeError("aborted")

    made.group.during_configure = hang_once
    assert one_step(made.manager)[1]
    assert [c[0] for c in made.group.configured] == [1, 2]
    assert reached == [True]


def test_own_failure_to_enter_is_reported_and_retried(monkeypatch):
    """The others must not wait for a member that could not enter."""
    made = make(monkeypatch, place(), place(2))
    made.group.fails_to_configure = OSError("no route")
    assert one_step(made.manager)[1]
    assert "no route" in made.client.reports[0][1]


@pytest.mark.parametrize(
    ("state", "error"),
    [(OSError("no state"), "no state"), (state_of(version="another"), "another history")],
    ids=["no state", "a state of another version"],
)
def test_member_that_cannot_heal_gives_the_step_up(monkeypatch, state, error):
    """After three attempts; the script goes on."""
    made = make(monkeypatch, *(heals(n) for n in (1, 2, 3)), loaded=STEP_3, peer_state=state)
    assert not one_step(made.manager)[1]
    assert error in str(made.manager.errored())
    assert made.w.item() == 1.0
    assert made.manager.current_step() == 3


def test_state_received_in_place_in_part_is_of_no_step(monkeypatch):
    """Any peer's replaces it; without one the script has to load a checkpoint."""
    made = make(monkeypatch, heals(), place(2, size=1, cohort=(0, 1), step=-1), loaded=STEP_3)
    made.transport.in_place = True
    made.transport.state = OSError("the peer is lost")
    made.manager.start_quorum()
    with pytest.raises(DamagedStateError, match="checkpoint"):
        made.manager.wait_quorum()
    assert [request.step for request in made.client.requests] == [3, -1]


def test_healed_state_is_applied_though_the_step_fails(monkeypatch):
    """So the replica requests the next quorum with it."""
    made = start(
        monkeypatch,
        heals(),
        place(2, rank=1, cohort=(1, 2), step=7),
        loaded=STEP_3,
        peer_state=state_of(value=3.0),
    )
    made.manager.wait_quorum()
    made.manager.report_error(ValueError("mine"))
    assert not made.manager.should_commit()
    assert made.w.item() == 3.0
    one_step(made.manager)
    assert (made.client.requests[1].step, made.client.requests[1].state_version) == (7, "L")


def test_healed_state_that_was_not_applied_does_not_count(monkeypatch):
    """Its quorum was aborted before the first collective: the replica still has to heal."""
    made = start(monkeypatch, heals(), heals(2), loaded=STEP_3, peer_state=state_of(value=3.0))
    made.manager.wait_quorum()
    made.client.abort()
    made.manager.allreduce(torch.tensor([4.0])).wait()
    assert [request.step for request in made.client.requests] == [3, 3]
    assert made.manager.should_commit()
    assert made.manager.current_step() == 8


@pytest.mark.parametrize(
    "error",
    [None, KeyError("lost"), ConfigError("a", object, "convert"), RuntimeError("out of memory")],
)
def test_source_that_cannot_send_its_state_goes_on(monkeypatch, error):
    """The replica that needs it gets the reason instead; without state functions, the remedy."""
    results = [place(n, cohort=(0, 1), first_source_of=(1,)) for n in (1, 2)]
    made = make(monkeypatch, *results, has_state=False)
    if error is not None:
        made.manager.register_state_dict_fn("x", lambda s: None, Mock(side_effect=error))
    assert one_step(made.manager)[1]
    [(destinations, step, reason)] = made.transport.refused
    assert (destinations, step) == ([1], 0)
    assert ("register_state_dict_fn" if error is None else repr(error).split("(")[0]) in reason


def test_transport_of_its_own_that_cannot_send_is_no_failure_of_the_group(monkeypatch):
    """Whatever its error; over the process group it may be the group's, and aborts the quorum."""
    results = [place(n, cohort=(0, 1), first_source_of=(1,)) for n in (1, 2, 3)]
    for over_group in (False, True):
        made = make(monkeypatch, *results)
        made.transport.needs_group = over_group
        made.transport.send_checkpoint = Mock(side_effect=RuntimeError("no memory"))
        monkeypatch.setattr(QuorumClient, "_await_healing", lambda *_: None)
        assert one_step(made.manager)[1] is not over_group
        assert bool(made.transport.refused) is not over_group


def test_own_state_function_that_fails_is_lasting(monkeypatch):
    """A fresh replica reads its own state to heal: any error of the script's ends it."""
    made = make(monkeypatch, heals(), heals(2), heals(3), loaded=STEP_3, has_state=False)
    made.manager.register_state_dict_fn("x", Mock(), Mock(side_effect=RuntimeError("no memory")))
    made.transport.recv_checkpoint = lambda *_: made.transport.state_dict()
    made.manager.start_quorum()
    with pytest.raises(UnusableStateError, match="of 'x' has raised RuntimeError: no memory"):
        made.manager.wait_quorum()
    assert len(made.client.requests) == 2


def test_replica_whose_healing_keeps_failing_counts_and_reports_it_once(monkeypatch):
    """In its requests, so that the others go on without it; a heal that succeeds ends the row."""
    made = make(monkeypatch, *(heals(n) for n in range(1, 8)), loaded=STEP_3)
    made.transport.state = state_of()
    made.transport.failures = [OSError("unreachable") for _ in range(3)]
    assert not one_step(made.manager)[1]
    one_step(made.manager)
    assert [request.heal_failures for request in made.client.requests] == [0, 1, 2, 3]
    (event,) = made.client.events
    assert event.reason == "OSError: unreachable" and event.worker.endswith("rank 0)")
    made.client.abort()
    made.manager.start_quorum()
    made.manager.wait_quorum()
    assert made.client.requests[-1].heal_failures == 0


@pytest.mark.parametrize("group", [1, 2], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("error", [UnusableStateError("no mesh"), KeyError("lost"), TypeError("w")])
def test_error_that_another_attempt_does_not_cure_is_raised_at_the_second(
    monkeypatch, error, group
):
    """The replica ends, and the others go on without it."""
    answers = heals(), heals(2), heals(3)
    made = make(monkeypatch, *answers, loaded=STEP_3, peer_state=error, world_size=group)
    if group > 1:
        assert not one_step(made.manager)[1]
    made.manager.start_quorum()
    with pytest.raises(type(error)):
        made.manager.wait_quorum()
    assert [request.step for request in made.client.requests] == [3, 3]


def test_state_for_peers_is_that_of_the_step_boundary(monkeypatch):
    """It is read on the main thread, or while that waits; and again once it may be read again."""
    made = make(monkeypatch, place(first_source_of=(1,)), place(2), loaded=STEP_3)
    threads = []

    def save():
        threads.append(threading.current_thread() is threading.main_thread())
        return len(threads)

    made.manager.register_state_dict_fn("x", lambda s: None, save)
    made.manager.disallow_state_dict_read()
    made.manager.start_quorum()
    made.manager.allow_state_dict_read()
    made.manager.wait_quorum()
    assert made.transport.sent[0][2]["user"]["x"] == 2
    assert threads == [True, True]


def test_forward_pass_does_not_change_the_state_for_peers(monkeypatch):
    """Running means and counters change in it; ties stay, and large tensors are not copied."""
    made = make(monkeypatch, place(first_source_of=(1,)), loaded=STEP_3)
    seen, large = torch.zeros(2), torch.zeros(20_000)
    counts = defaultdict(int, {"mean": [seen, seen.view(2)]})
    made.manager.register_state_dict_fn("x", lambda s: None, lambda: (counts, large, Counter(a=2)))
    made.manager.start_quorum()
    seen += 1
    made.manager.wait_quorum()
    sent, sent_large, counter = made.transport.sent[0][2]["user"]["x"]
    a, b = sent["mean"]
    assert a.tolist() == [0, 0]
    assert a is b
    assert sent_large is large
    assert counter == Counter(a=2)
    assert counts["mean"][0] is seen


def test_no_quorum_in_time(monkeypatch):
    """The error names what was waited for, after the given number of attempts."""
    late = TimeoutError("waiting for r7")
    made = make(monkeypatch, late, late, place(), quorum_retries=1)
    with pytest.raises(TimeoutError, match="r7"):
        made.manager.start_quorum()
    assert len(made.client.requests) == 2
    assert one_step(made.manager)[1]


def test_in_a_run_a_quorum_is_waited_for_without_a_limit(monkeypatch):
    """Its leader ends the wait below the minimum, and saves first; no script has failed."""
    monkeypatch.setenv("HPC_ELASTIC_FT_SOCKET", "here")
    made = make(monkeypatch, place(), quorum_timeout=timedelta(seconds=1), quorum_retries=3)
    assert one_step(made.manager)[1]
    assert made.client.timeouts == [None]


def test_rank_of_a_group_does_not_withdraw_its_request(monkeypatch):
    """It could cross its answer, which the other ranks rely on: it waits for longer instead."""
    made = make(monkeypatch, place(), quorum_retries=2, world_size=2)
    made.manager.start_quorum()
    assert made.client.timeouts == [3 * 60.0] and len(made.client.requests) == 1


@pytest.mark.parametrize(("step", "version"), [(2, "L"), (3, "torn")])
def test_group_of_ranks_with_different_states_needs_a_peer(monkeypatch, step, version):
    """Some have healed, others not, and the peer is gone: the script has to load a checkpoint."""
    answer = place(size=1, cohort=(0, 1), step=step, version=version)
    made = make(monkeypatch, answer, loaded=STEP_3, world_size=2)
    made.manager.start_quorum()
    with pytest.raises(DamagedStateError, match=r"rank is at step 3.*from a checkpoint"):
        made.manager.wait_quorum()
    assert "different states" in made.client.reports[0][1]


# ---- leaving, and saving before that ------------------------------------------------------------


def test_group_that_has_left(monkeypatch):
    """Outside of a run, where no agent stops the script, it raises."""
    monkeypatch.delenv("HPC_ELASTIC_FT_SOCKET", raising=False)
    made = make(monkeypatch, place(), LeaveGranted())
    one_step(made.manager)
    made.client.abort_reason = "switch"
    made.manager.start_quorum()
    with pytest.raises(LeftQuorumError):
        made.manager.wait_quorum()


def test_group_that_has_to_save_makes_a_step_that_fails(monkeypatch):
    """Whatever its rank was; then it requests again, and says that it could save."""
    results = [place(rank=1, size=2), CheckpointBeforeLeave(), place(2, size=1, step=1)]
    made = make(monkeypatch, *results)
    assert one_step(made.manager)[1]
    assert not made.should_save(1, False, False)
    made.client.abort()
    assert not one_step(made.manager)[1]
    assert "no replica that stays has its state" in str(made.manager.errored())
    assert made.manager.participating_rank() == 0
    assert made.manager.current_step() == 1
    assert made.should_save(1, False, False)
    assert one_step(made.manager)[1]
    assert [request.is_saved for request in made.client.requests] == [False, False, True]


@pytest.mark.parametrize(
    ("rank", "must_save", "by_step", "by_time", "saves", "urgent"),
    [
        (0, False, False, False, False, False),
        (0, False, True, False, True, False),
        (0, False, False, True, True, False),
        (0, True, False, False, True, True),
        (0, True, True, False, True, True),
        (1, True, True, True, False, False),
        (1, False, True, True, False, False),
    ],
)
def test_first_participant_saves(monkeypatch, rank, must_save, by_step, by_time, saves, urgent):
    """When it is due, and urgently in the last step before all leave."""
    monkeypatch.setattr(reporting, "save_is_last", lambda is_last: urgencies.append(is_last))
    urgencies = []
    made = make(monkeypatch, place(rank=rank, cohort=(rank, 2)))
    one_step(made.manager)
    made.client.must_save = must_save
    assert made.should_save(1, by_step, by_time) is saves
    assert urgencies == [urgent]


def test_a_step_has_one_answer_of_the_group(monkeypatch):
    """However often it is asked; the next step is decided once, and each caller has its period."""
    made = make(monkeypatch, place(rank=0, cohort=(0, 2)))
    one_step(made.manager)
    made.client.must_save = True
    assert made.should_save(1, False, False)
    made.client.must_save = False  # settled: it is not asked again
    assert made.should_save(1, False, False)
    one_step(made.manager)
    assert [made.should_save(2, by_step, False) for by_step in (False, True, False)] == [
        False, True, False,
    ]  # fmt: skip


def test_ranks_of_one_group_save_by_one_clock():
    """The first rank's, one step later; the others' clocks do not count."""
    store = HashStore()
    first, second = SaveAgreement(store, is_first=True), SaveAgreement(store, is_first=False)
    answers = [
        (first.should_save(due=a), second.should_save(due=b))
        for a, b in [(False, True), (True, False), (True, True), (False, False)]
    ]
    assert answers == [(False, False), (False, False), (True, True), (False, False)]


def test_shutdown_releases_everything(monkeypatch):
    """The client leaves on purpose; the transport and the group are released."""
    made = make(monkeypatch)
    made.manager.shutdown()
    assert made.client.closed
    assert made.group.is_down
    assert "shutdown" in made.transport.calls


# ---- the environment ----------------------------------------------------------------------------


def test_without_a_run_and_a_lighthouse_both_remedies_are_named(monkeypatch):
    """ft=true, or an address."""
    for name in ("HPC_ELASTIC_FT_SOCKET", "TORCHFT_LIGHTHOUSE"):
        monkeypatch.delenv(name, raising=False)
    own = resolve_place(0, 1, "h", 1)
    with pytest.raises(ConfigError, match=r"ft=true.*TORCHFT_LIGHTHOUSE"):
        find_server(own, lighthouse_addr=None, replica_id=None, connect_timeout_s=1.0)


def test_missing_place_in_the_group_names_argument_and_variable(monkeypatch):
    """Rank and store come from the environment if they are not given."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match=r"store_addr.*MASTER_ADDR"):
        resolve_place(0, 1, None, 1)
    monkeypatch.setenv("MASTER_ADDR", "::1")
    assert resolve_place(0, 1, None, 5).store == "[::1]:5"


def test_environment_sets_time_outs(monkeypatch):
    """As torchft's variables do."""
    monkeypatch.setenv("TORCHFT_QUORUM_TIMEOUT_SEC", "7")
    made = make(monkeypatch, place())
    one_step(made.manager)
    assert made.client.timeouts == [7.0]


# ---- states that are compared -------------------------------------------------------------------


def test_states_are_compared_every_few_steps(monkeypatch):
    """Only then is anything exchanged; a row that is missing fails the step and accuses none."""
    made = make(monkeypatch, place(step=3), place(2, step=4), loaded=STEP_3, check_every=3)
    exchanged = []

    def allreduce(tensors, options, reduce=made.group.allreduce):
        if tensors[0].dtype == torch.int64:
            exchanged.append(made.manager.current_step())
            made.group.others = 0
        return reduce(tensors, options)

    made.group.allreduce = allreduce
    made.client.quorum_step = 0
    assert one_step(made.manager)[1] is False
    assert exchanged == [3]
    assert "digest of its state" in str(made.manager.errored())
    assert made.client.events == []
    assert one_step(made.manager)[1]
    assert exchanged == [3]


def test_states_that_differ_by_nature_are_not_compared(monkeypatch):
    """With LocalSGD, and a number of steps below 1."""
    with pytest.raises(ConfigError, match="LocalSGD"):
        make(monkeypatch, check_every=3).manager.heal_from_one_source()
    with pytest.raises(ConfigError, match="check_every"):
        make(monkeypatch, check_every=0)
