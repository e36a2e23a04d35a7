"""What the Manager does when something fails, with everybody else played."""

from datetime import timedelta

import pytest
import torch
from ft_fakes import heals, make, place, state_of
from test_ft_manager import one_step
from torch.futures import Future

from hpc_elastic.ft.manager import LeftQuorumError
from hpc_elastic.ft.messages import CheckpointBeforeLeave, LeaveGranted
from hpc_elastic.ft.quorum_client import DamagedStateError


def test_an_error_costs_the_step_and_is_told_at_once(monkeypatch):
    """It is not raised; the next step asks anew, and says how many failed."""
    played = make(monkeypatch, place(), place(2, size=1, cohort=(0, 1)))
    played.manager.start_quorum()
    played.manager.wait_quorum()
    played.group.error = RuntimeError("peer gone")
    played.manager.allreduce(torch.tensor([1.0])).wait()
    assert "peer gone" in str(played.manager.errored())
    [(quorum_id, why)] = played.link.reports
    assert quorum_id == 1
    assert "peer gone" in why
    assert not played.manager.should_commit()
    assert one_step(played.manager) == (1.0, True)
    assert [ask.commit_failures for ask in played.link.asks] == [0, 1]
    assert played.manager.errored() is None


def test_after_an_error_collectives_do_nothing(monkeypatch):
    """The tensor stays as it is."""
    played = make(monkeypatch, place())
    played.manager.start_quorum()
    played.manager.report_error(ValueError("mine"))
    tensor = torch.tensor([5.0])
    assert played.manager.allreduce(tensor).wait()
    assert tensor.item() == 5.0
    assert isinstance(played.manager.errored().original_exception, ValueError)
    assert not played.manager.should_commit()


def test_a_broken_quorum_ends_the_collectives_under_way(monkeypatch):
    """They are aborted, and the step fails."""
    played = make(monkeypatch, place())
    played.group.held = []
    played.manager.start_quorum()
    work = played.manager.allreduce(torch.tensor([1.0]))
    played.link.breaks()
    assert not work.wait()
    assert not played.manager.should_commit()


def test_a_future_of_a_failed_collective_holds_no_error(monkeypatch):
    """DDP must not see it."""
    played = make(monkeypatch, place())
    played.group.held = []
    played.manager.start_quorum()
    tensor = torch.tensor([1.0])
    future = played.manager.allreduce(tensor).get_future()
    played.link.breaks()
    assert future.wait() is tensor
    assert not played.manager.should_commit()


def test_a_quorum_that_breaks_after_the_last_collective_costs_no_step(monkeypatch):
    """What was reduced is right; the next step asks."""
    played = make(monkeypatch, place(), place(2, size=1, cohort=(0, 1), step=1))
    played.manager.start_quorum()
    played.manager.allreduce(torch.tensor([1.0])).wait()
    played.link.breaks()
    assert played.manager.should_commit()
    assert one_step(played.manager)[1]
    assert len(played.link.asks) == 2


def test_a_quorum_that_breaks_before_the_first_collective_costs_no_step(monkeypatch):
    """Another one is entered in its place, in the forward pass's shadow."""
    played = make(monkeypatch, place(), place(2, size=1, cohort=(0, 1)))
    played.manager.start_quorum()
    played.manager.wait_quorum()
    played.link.breaks()
    tensor = torch.tensor([4.0])
    played.manager.allreduce(tensor).wait()
    assert tensor.item() == 4.0
    assert played.manager.should_commit()
    assert played.manager.quorum_id() == 2


def test_a_script_that_knows_its_share_keeps_it_for_the_step(monkeypatch):
    """It may have chosen samples by it: the step fails instead."""
    played = make(monkeypatch, place())
    played.manager.start_quorum()
    assert played.manager.num_participants() == 2
    played.link.breaks()
    played.manager.allreduce(torch.tensor([4.0])).wait()
    assert not played.manager.should_commit()
    assert len(played.link.asks) == 1


def test_a_group_of_several_ranks_stays_in_step(monkeypatch):
    """None of them enters another quorum alone within a step."""
    played = make(monkeypatch, place(), world_size=2)
    played.manager.start_quorum()
    played.manager.wait_quorum()
    played.link.breaks()
    played.manager.allreduce(torch.tensor([4.0])).wait()
    assert not played.manager.should_commit()
    assert played.link.votes == [False]


def test_a_quorum_that_breaks_while_it_is_entered_is_replaced(monkeypatch):
    """The abort reaches configure, whenever it comes, and nothing is lost by it."""
    played = make(monkeypatch, place(), place(2, size=1, cohort=(0, 1)))
    reached = []

    def hang_once():
        played.group.during_configure = lambda: None
        played.link.breaks()
        played.group.aborted.clear()
        reached.append(played.group.aborted.wait(30.0))
        raise RuntimeError("aborted")

    played.group.during_configure = hang_once
    assert one_step(played.manager)[1]
    assert [c[0] for c in played.group.configured] == [1, 2]
    assert reached == [True]


def test_what_fails_here_alone_is_told_and_tried_again(monkeypatch):
    """The others must not wait for a member that could not enter."""
    played = make(monkeypatch, place(), place(2))
    played.group.fails_to_configure = OSError("no route")
    assert one_step(played.manager)[1]
    assert "no route" in played.link.reports[0][1]


def test_a_member_that_can_never_enter_gives_the_step_up(monkeypatch):
    """After three tries; the script goes on."""
    played = make(monkeypatch, *(heals(n) for n in (1, 2, 3)))
    played.manager.load_state_dict({"step": 3, "batches_committed": 6})
    played.transport.state = OSError("no state")
    assert not one_step(played.manager)[1]
    assert "no state" in str(played.manager.errored())
    assert played.w.item() == 1.0
    assert played.manager.current_step() == 3


def test_a_state_that_came_half_in_place_is_of_no_step(monkeypatch):
    """It is replaced by any peer's; without one the script has to go back to a checkpoint."""
    played = make(monkeypatch, heals(), place(2, size=1, cohort=(0, 1), step=-1))
    played.manager.load_state_dict({"step": 3, "batches_committed": 6})
    played.transport.in_place = True
    played.transport.state = OSError("the peer is gone")
    played.manager.start_quorum()
    with pytest.raises(DamagedStateError, match="checkpoint"):
        played.manager.wait_quorum()
    assert [ask.step for ask in played.link.asks] == [3, -1]


def test_a_state_of_another_history_is_refused(monkeypatch):
    """The token must be the quorum's."""
    played = make(monkeypatch, *(heals(n) for n in (1, 2, 3)))
    played.manager.load_state_dict({"step": 3, "batches_committed": 6})
    played.transport.state = state_of(lineage="another")
    assert not one_step(played.manager)[1]
    assert "another history" in str(played.manager.errored())


def test_a_state_that_has_come_is_applied_though_the_step_fails(monkeypatch):
    """So that the next quorum finds it new."""
    played = make(monkeypatch, heals(), place(2, rank=1, cohort=(1, 2), step=7))
    played.manager.load_state_dict({"step": 3, "batches_committed": 6})
    played.transport.state = state_of(value=3.0)
    played.manager.start_quorum()
    played.manager.wait_quorum()
    played.manager.report_error(ValueError("mine"))
    assert not played.manager.should_commit()
    assert played.w.item() == 3.0
    one_step(played.manager)
    assert (played.link.asks[1].step, played.link.asks[1].lineage) == (7, "L")


def test_a_state_that_was_not_applied_is_not_counted(monkeypatch):
    """The quorum that brought it broke before the first collective: this still has to heal."""
    played = make(monkeypatch, heals(), heals(2))
    played.manager.load_state_dict({"step": 3, "batches_committed": 6})
    played.transport.state = state_of(value=3.0)
    played.manager.start_quorum()
    played.manager.wait_quorum()
    played.link.breaks()
    played.manager.allreduce(torch.tensor([4.0])).wait()
    assert [ask.step for ask in played.link.asks] == [3, 3]
    assert played.manager.should_commit()
    assert played.manager.current_step() == 8


def test_a_step_that_the_script_left_without_a_verdict_has_failed(monkeypatch):
    """Its peers may have committed it: it must not go on as if nothing were."""
    played = make(monkeypatch, place(), place(2))
    played.manager.start_quorum()
    played.manager.allreduce(torch.tensor([1.0])).wait()
    played.manager.start_quorum()
    played.manager.wait_quorum()
    assert len(played.link.asks) == 2
    assert played.link.reports


def test_too_few_contributors_do_not_commit(monkeypatch):
    """Everybody finds the same, and asks again."""
    played = make(monkeypatch, heals(), place(2, step=7), min_replica_size=2)
    played.manager.load_state_dict({"step": 3, "batches_committed": 6})
    played.transport.state = state_of()
    assert not one_step(played.manager)[1]
    assert one_step(played.manager)[1]
    assert played.link.asks[1].commit_failures == 1


def test_more_failures_in_a_row_than_allowed_raise(monkeypatch):
    """With the last error."""
    played = make(monkeypatch, place(), max_retries=0)
    played.manager.start_quorum()
    played.manager.report_error(ValueError("mine"))
    with pytest.raises(RuntimeError, match=r"max_retries=0.*mine"):
        played.manager.should_commit()


def test_no_quorum_in_time_raises_who_was_waited_for(monkeypatch):
    """After as many tries as were wanted."""
    late = TimeoutError("waiting for r7")
    played = make(monkeypatch, late, late, place(), quorum_retries=1)
    with pytest.raises(TimeoutError, match="r7"):
        played.manager.start_quorum()
    assert len(played.link.asks) == 2
    assert one_step(played.manager)[1]


def test_who_has_left_is_told_so(monkeypatch):
    """Outside a run, where nobody stops the script."""
    monkeypatch.delenv("HPC_ELASTIC_FT_SOCKET", raising=False)
    played = make(monkeypatch, place(), LeaveGranted())
    one_step(played.manager)
    played.link.broken = "switch"
    played.manager.start_quorum()
    with pytest.raises(LeftQuorumError):
        played.manager.wait_quorum()


def test_who_is_to_save_first_does_so_at_the_end_of_a_step_that_fails(monkeypatch):
    """Whatever its rank was; then it asks again, and says so."""
    played = make(
        monkeypatch, place(rank=1, size=2), CheckpointBeforeLeave(), place(2, size=1, step=1)
    )
    assert one_step(played.manager)[1]
    assert not played.manager._saving.decide(1, False, False)
    played.link.breaks()
    assert not one_step(played.manager)[1]
    assert "nobody who stays has its state" in str(played.manager.errored())
    assert played.manager.participating_rank() == 0
    assert played.manager.current_step() == 1
    assert played.manager._saving.decide(1, False, False)
    assert one_step(played.manager)[1]
    assert [ask.is_saved for ask in played.link.asks] == [False, False, True]


def test_a_late_error_of_an_earlier_step_costs_nothing_now(monkeypatch):
    """It belongs to its own step."""
    played = make(monkeypatch, place())
    played.manager.start_quorum()
    future = Future()
    wrapped = played.manager.wrap_future(future, 5)
    played.manager.allreduce(torch.tensor([1.0])).wait()
    assert played.manager.should_commit()
    played.manager.start_quorum()
    future.set_exception(RuntimeError("late"))
    assert wrapped.wait() == 5
    assert played.manager.errored() is None
    assert not played.link.reports


def test_a_wrapped_future_holds_a_value_whatever_happens(monkeypatch):
    """Its own, or the default after an error, or after the time-out."""
    played = make(monkeypatch, place())
    played.manager.start_quorum()
    good, never = Future(), Future()
    wrapped = played.manager.wrap_future(good, 5)
    good.set_result(3)
    assert wrapped.wait() == 3
    assert played.manager.errored() is None
    late = played.manager.wrap_future(never, 6, timeout=timedelta(seconds=0.01))
    assert late.wait() == 6
    assert "0.01 s" in str(played.manager.errored())


def test_without_state_functions_healing_says_what_to_do(monkeypatch):
    """Nothing to send, nothing to take."""
    played = make(monkeypatch, *(place(n, cohort=(0, 1), first_of=(1,)) for n in (1, 2, 3)))
    played.manager._states._loads.clear()
    assert not one_step(played.manager)[1]
    assert "register_state_dict_fn" in str(played.manager.errored())


def test_errors_that_are_swallowed_below_are_found_all_the_same(monkeypatch):
    """The process group knows of them."""
    played = make(monkeypatch, place())
    played.manager.start_quorum()
    played.manager.allreduce(torch.tensor([1.0])).wait()
    played.group.error = RuntimeError("seen by the watchdog")
    assert not played.manager.should_commit()
