"""The Manager's steps, with everybody else played; test_ft_manager_faults has what goes wrong."""

from datetime import timedelta

import pytest
import torch
from ft_fakes import heals, make, place, state_of
from torch.distributed import HashStore, ReduceOp

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft import quorum
from hpc_elastic.ft.early import wants_attendant
from hpc_elastic.ft.manager import Manager, SaveAgreement, WorldSizeMode
from hpc_elastic.ft.manager_client import ServerSettings, find_server, group_of


def one_step(manager, value=1.0):
    """Make a step; return the mean and the verdict."""
    manager.start_quorum()
    tensor = torch.tensor([value])
    manager.allreduce(tensor).wait()
    return tensor.item(), manager.should_commit()


def test_a_step_in_an_unchanged_quorum_asks_nobody(monkeypatch):
    """Only the first of three steps asks, and only it configures the group."""
    played = make(monkeypatch, place())
    for _ in range(3):
        one_step(played.manager)
    assert len(played.link.asks) == 1
    assert played.group.configured == [(1, 0, 2)]
    assert played.manager.current_step() == 3
    assert played.manager.batches_committed() == 6
    assert played.manager.state_dict() == {"step": 3, "batches_committed": 6}


def test_the_mean_is_over_the_contributors(monkeypatch):
    """Two contribute: the sum is halved."""
    played = make(monkeypatch, place())
    played.group.others = 5.0
    assert one_step(played.manager, 1.0) == (3.0, True)


@pytest.mark.parametrize(("op", "expected"), [(ReduceOp.SUM, 6.0), (ReduceOp.AVG, 3.0)])
def test_only_a_mean_is_divided(monkeypatch, op, expected):
    """A sum stays one."""
    played = make(monkeypatch, place())
    played.group.others = 5.0
    played.manager.start_quorum()
    tensor = torch.tensor([1.0])
    played.manager.allreduce(tensor, reduce_op=op).wait()
    assert tensor.item() == expected


def test_a_mean_of_integers_is_refused(monkeypatch):
    """As in torchft."""
    played = make(monkeypatch, place())
    played.manager.start_quorum()
    with pytest.raises(ValueError, match="int64"):
        played.manager.allreduce(torch.tensor([1]))


def test_a_future_holds_the_mean(monkeypatch):
    """It is divided once, whoever waits and how often."""
    played = make(monkeypatch, place())
    played.group.others = 5.0
    played.manager.start_quorum()
    work = played.manager.allreduce(torch.tensor([1.0]))
    assert work.get_future().wait().item() == 3.0
    work.wait()
    assert work.get_future().value().item() == 3.0


def test_several_collectives_may_be_under_way(monkeypatch):
    """None waits for the one before; what was not waited for is finished before the commit."""
    played = make(monkeypatch, place())
    played.group.held = []
    played.manager.start_quorum()
    tensors = [torch.tensor([2.0]), torch.tensor([4.0])]
    for tensor in tensors:
        played.manager.allreduce(tensor)
    for work, _ in played.group.held:
        work.future.set_result([])
    assert played.manager.should_commit()
    assert [t.item() for t in tensors] == [1.0, 2.0]


def test_who_heals_adds_zero_and_applies_the_state_before_the_verdict(monkeypatch):
    """Async mode: the mean is that of the others, and the step counts from theirs."""
    played = make(monkeypatch, heals())
    played.manager.load_state_dict({"step": 3, "batches_committed": 6})
    played.transport.state = state_of(step=7, value=3.0)
    played.group.others = 5.0
    played.manager.start_quorum()
    played.manager.wait_quorum()
    assert played.w.item() == 1.0
    assert played.manager.current_step() == 7
    assert not played.manager.is_participating()
    assert played.manager.participating_rank() is None
    tensor = torch.tensor([100.0])
    played.manager.allreduce(tensor).wait()
    assert tensor.item() == 5.0
    assert played.manager.should_commit()
    assert played.w.item() == 3.0
    assert played.manager.state_dict() == {"step": 8, "batches_committed": 15}
    assert played.manager._progress.lineage == quorum.after_step("L", 1, 1)


def test_who_has_healed_contributes_from_the_next_step_on(monkeypatch):
    """Without any message: the commit of the first step says that all are new."""
    played = make(monkeypatch, heals())
    played.manager.load_state_dict({"step": 3, "batches_committed": 6})
    played.transport.state = state_of()
    one_step(played.manager)
    played.manager.start_quorum()
    assert played.manager.participating_rank() == 1
    assert played.manager.num_participants() == 2
    assert len(played.link.asks) == 1


def test_in_sync_mode_who_heals_does_so_before_the_forward_pass(monkeypatch):
    """And contributes at once."""
    played = make(monkeypatch, heals(), use_async_quorum=False)
    played.manager.load_state_dict({"step": 3, "batches_committed": 6})
    played.transport.state = state_of(value=3.0)
    played.manager.start_quorum()
    assert played.w.item() == 3.0
    assert played.manager.participating_rank() == 1
    assert played.manager.num_participants() == 2


def test_at_step_0_all_take_one_state_before_the_forward_pass(monkeypatch):
    """In async mode too, so that all contribute to the first step."""
    played = make(monkeypatch, heals(step=0))
    played.transport.state = state_of(step=0, value=9.0)
    played.manager.start_quorum()
    assert played.w.item() == 9.0
    assert played.manager.num_participants() == 2
    assert played.manager.participating_rank() == 1


def test_a_source_sends_its_state_with_its_history(monkeypatch):
    """The live tensors, the step and the token."""
    played = make(monkeypatch, place(cohort=(0, 1), step=0, first_of=(1,), serves=(1, 2)))
    one_step(played.manager)
    [(destinations, step, state)] = played.transport.sent
    assert (destinations, step) == ([1], 0)
    assert state["user"]["default"]["w"] is played.w
    assert state["torchft"] == {"step": 0, "batches_committed": 0, "lineage": "L"}


def test_a_transport_with_several_sources_gets_them_all(monkeypatch):
    """As JSON, the best first; and a source is told of all that may come."""
    played = make(monkeypatch, heals())
    played.manager.load_state_dict({"step": 3, "batches_committed": 6})
    played.transport.multi_source = True
    played.transport.state = state_of()
    one_step(played.manager)
    assert ("recv", 0, '["there"]', 7) in played.transport.calls


def test_replicas_that_differ_heal_from_one_source(monkeypatch):
    """Pieces of several would make no model."""
    played = make(monkeypatch, heals())
    played.manager.load_state_dict({"step": 3, "batches_committed": 6})
    played.transport.multi_source = True
    played.manager.heal_from_one_source()
    played.transport.state = state_of()
    one_step(played.manager)
    assert ("recv", 0, "there", 7) in played.transport.calls


def test_a_spare_adds_zero(monkeypatch):
    """FIXED_WITH_SPARES: two contribute, and this is the third."""
    played = make(
        monkeypatch, place(rank=2, size=3, cohort=(2, 3)),
        min_replica_size=2, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES,
    )  # fmt: skip
    played.group.others = 8.0
    assert one_step(played.manager, 100.0) == (4.0, True)
    assert played.manager.participating_rank() is None
    assert played.manager.num_participants() == 2


def test_histories_are_told_apart_by_what_was_promised(monkeypatch):
    """Random parameters are like nobody's; loaded or equally seeded ones are like their peers'."""
    tokens = [make(monkeypatch).manager._progress.lineage for _ in range(2)]
    assert tokens[0] != tokens[1]
    same = [make(monkeypatch, init_sync=False).manager._progress.lineage for _ in range(2)]
    assert same[0] == same[1]
    loaded = make(monkeypatch).manager
    loaded.load_state_dict({"step": 3, "batches_committed": 6})
    assert loaded._progress.lineage == quorum.known(3, 6)


def test_a_group_commits_what_all_its_ranks_can(monkeypatch):
    """The server counts; one no is everybody's."""
    played = make(monkeypatch, place(), world_size=2)
    played.link.verdict = False
    assert one_step(played.manager)[1] is False
    assert played.link.votes == [True]
    assert played.manager.current_step() == 0


def test_beginning_a_step_twice_begins_one(monkeypatch):
    """So a sampler and the optimizer's zero_grad may both do it; a used step is another matter."""
    played = make(monkeypatch, place())
    played.manager.begin_step()
    played.manager.begin_step()
    assert played.link.call == 0
    played.manager.allreduce(torch.tensor([1.0])).wait()
    assert played.manager.should_commit()
    played.manager.begin_step()
    assert played.link.call == 1


def test_one_group_saves_and_when_all_leave_at_once(monkeypatch):
    """The contributor of rank 0, when it is due, and in the last step of all."""
    played = make(monkeypatch, place())
    one_step(played.manager)
    dues = [(False, False), (True, False), (False, True)]
    assert [played.manager._saving.decide(1, *due) for due in dues] == [False, True, True]
    played.link.is_last = True
    assert played.manager._saving.decide(1, False, False)


def test_ranks_of_one_group_save_by_one_clock():
    """The first rank's, one step later; the others' clocks do not count."""
    store = HashStore()
    first, second = SaveAgreement(store, is_first=True), SaveAgreement(store, is_first=False)
    answers = [
        (first.at_step(due=a), second.at_step(due=b))
        for a, b in [(False, True), (True, False), (True, True), (False, False)]
    ]
    assert answers == [(False, False), (False, False), (True, True), (False, False)]


def test_questions_before_the_first_quorum(monkeypatch):
    """Nothing is known, and nothing is waited for."""
    manager = make(monkeypatch).manager
    assert (manager.participating_rank(), manager.num_participants()) == (None, 0)
    assert not manager.is_participating()
    with pytest.raises(RuntimeError, match="start_quorum"):
        manager.wait_quorum()


def test_a_key_is_registered_once(monkeypatch):
    """The error names it."""
    manager = make(monkeypatch).manager
    manager.register_state_dict_fn("more", lambda s: None, dict)
    with pytest.raises(ValueError, match="'more'"):
        manager.register_state_dict_fn("more", lambda s: None, dict)


def test_the_state_can_be_kept_from_being_read(monkeypatch):
    """Until it is allowed again; the reader gives up after the time-out."""
    played = make(monkeypatch, timeout=timedelta(seconds=0.05))
    played.manager.disallow_state_dict_read()
    played.manager.disallow_state_dict_read()
    with pytest.raises(TimeoutError, match="allow_state_dict_read"):
        played.manager._manager_state_dict()
    played.manager.allow_state_dict_read()
    assert played.manager._manager_state_dict()["torchft"]["step"] == 0


def test_shutting_down_leaves_in_peace(monkeypatch):
    """The link says so; the transport and the group are released."""
    played = make(monkeypatch)
    played.manager.shutdown()
    assert played.link.closed
    assert played.group.is_down
    assert "shutdown" in played.transport.calls


def test_without_a_run_and_a_lighthouse_both_remedies_are_named(monkeypatch):
    """ft=true, or an address."""
    for name in ("HPC_ELASTIC_FT_SOCKET", "TORCHFT_LIGHTHOUSE"):
        monkeypatch.delenv(name, raising=False)
    group = group_of(0, 1, "h", 1)
    with pytest.raises(ConfigError, match=r"ft=true.*TORCHFT_LIGHTHOUSE"):
        find_server(group, ServerSettings(None, None, 1.0))


@pytest.mark.parametrize(
    ("env", "is_helper", "expected"),
    [
        ({"TORCHFT_LIGHTHOUSE": "h:1"}, False, True),
        ({"TORCHFT_LIGHTHOUSE": "h:1", "RANK": "0"}, False, True),
        ({"TORCHFT_LIGHTHOUSE": "h:1", "RANK": "1"}, False, False),
        ({"TORCHFT_LIGHTHOUSE": "h:1"}, True, False),
        ({"TORCHFT_LIGHTHOUSE": "h:1", "HPC_ELASTIC_FT_SOCKET": "/s"}, False, False),
        ({}, False, False),
    ],
)
def test_an_attendant_is_started_early_where_one_will_be_wanted(env, is_helper, expected):
    """Not in a data loader, not in a run, and not without a lighthouse."""
    assert wants_attendant(env, is_helper=is_helper) is expected


def test_a_missing_place_in_the_group_names_argument_and_variable(monkeypatch):
    """Rank and store come from the environment where they are not given."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match=r"store_addr.*MASTER_ADDR"):
        group_of(0, 1, None, 1)
    monkeypatch.setenv("MASTER_ADDR", "::1")
    assert group_of(0, 1, None, 5).store == "[::1]:5"


def test_the_environment_sets_time_outs(monkeypatch):
    """As torchft's variables do."""
    monkeypatch.setenv("TORCHFT_QUORUM_TIMEOUT_SEC", "7")
    manager: Manager = make(monkeypatch).manager
    assert manager._limits.quorum_timeout_s == 7.0
