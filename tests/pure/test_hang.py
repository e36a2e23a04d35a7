"""Hang diagnosis by the leader (pure)."""

from dataclasses import replace

import pytest
from leaders import of, rejoin, say, told, training

from groups import A, B, C
from hpc_elastic.rendezvous.effects import Append, Note
from hpc_elastic.rendezvous.failure_policy import strikes_of
from hpc_elastic.rendezvous.hang_diagnosis import (
    ANSWER_S,
    diagnose_hang,
    hang_failures,
    hang_note,
)
from hpc_elastic.rendezvous.messages import RankState, Stacks, StacksRequest, Stall, Stop
from hpc_elastic.run.events import LossReason

HERE = {"place": "train.py:40 in step", "waits_in": "all_reduce"}
THERE = {"place": "train.py:50 in step", "waits_in": "barrier"}
NOWHERE = {"place": "data.py:7 in read", "waits_in": None}
WAITER = {"place": "train.py:40 in step", "waits_in": None}
STALL = Stall(61.0, 60.0)


def ranks(*places: dict | str) -> list:
    """States of ranks, each given by a place or a state."""
    found = []
    for rank, at in enumerate(places):
        fields = {"state": "stands", **at} if isinstance(at, dict) else {"state": at, **NOWHERE}
        found.append((A, RankState(rank, rank, **fields)))
    return found


@pytest.mark.parametrize(
    ("places", "blamed", "shared"),
    [
        ((HERE, HERE, NOWHERE), [2], False),  # one is elsewhere
        ((HERE, NOWHERE), [1], False),  # of two, the one in no collective
        ((WAITER, WAITER, WAITER, HERE), [3], False),  # the majority waits in an unknown call
        ((HERE, HERE, HERE, THERE), [3], False),  # another collective
        ((HERE, HERE, HERE, THERE, NOWHERE), [4], False),  # a rank in a collective waits as well
        ((HERE, HERE, THERE, NOWHERE), [3], False),
        ((HERE, THERE), [0], True),  # undecidable
        ((HERE, HERE, HERE), [0], True),  # the network, or a message that was lost
        ((NOWHERE, WAITER), [0], True),
        ((HERE, HERE, "stopped"), [2], False),
        (("stopped", HERE, NOWHERE, "silent"), [0, 3], False),  # beyond doubt
        (("moves", "moves", "stopped"), [2], False),
        ((NOWHERE,), [0], True),
    ],
)
def test_ranks_that_are_to_blame(places, blamed, shared):
    """Unreachable ranks are to blame, then those outside of the majority."""
    finding = diagnose_hang(ranks(*places), STALL)
    assert finding is not None
    assert ([s.rank for _, s in finding.blamed], finding.shared) == (blamed, shared)


WAITS = {"g": (6, "all_reduce", False)}
BEHIND, DONE = {"g": (5, "all_reduce", True)}, {"g": (6, "all_reduce", True)}
BOTH = {**BEHIND, "h": (2, "broadcast", False)}
LATE = {"h": (1, "broadcast", True)}


@pytest.mark.parametrize(
    ("collectives", "blamed", "shared"),
    [
        ((WAITS, BEHIND), [1], False),  # of two at the same place
        ((WAITS, BEHIND, BEHIND), [1, 2], False),
        ((WAITS, WAITS), [0], True),  # a kernel before it, or the network
        ((WAITS, DONE), [0], True),  # it is done there, so that this one has joined
        ((WAITS, {}), [0], True),  # not of the group, or one without a record
        ((WAITS, BOTH, LATE), [2], False),  # one waits for another one in another group
        ((BEHIND, BEHIND), [0], True),
    ],
)
def test_a_rank_that_has_not_joined_a_collective_of_nccl_is_to_blame(collectives, blamed, shared):
    """All stacks show a wait for the GPU, or something that waits for it."""
    found = [
        (agent, replace(state, collectives=theirs))
        for (agent, state), theirs in zip(
            ranks(*[WAITER] * len(collectives)), collectives, strict=True
        )
    ]
    finding = diagnose_hang(found, STALL)
    assert ([s.rank for _, s in finding.blamed], finding.shared) == (blamed, shared)


def test_a_node_where_nvidia_smi_fails_is_to_blame_for_a_hang():
    """If stacks name no rank: a strike against the node. If it fails on all, it says nothing."""
    sound, failing = ranks(HERE, HERE)
    failing = B, replace(failing[1], gpus_fail=True)
    finding = diagnose_hang([sound, failing], STALL)
    assert [agent for agent, _ in finding.blamed] == [B] and not finding.shared
    (failed,) = hang_failures(finding, 61.0, 3)
    assert "(train.py:40 in step), and nvidia-smi fails on its node, while 1 rank" in failed.message
    assert strikes_of(failed) == 1
    assert diagnose_hang([failing, failing], STALL).shared
    elsewhere = A, replace(sound[1], **NOWHERE)
    assert diagnose_hang([elsewhere, failing], STALL).blamed == (elsewhere,)


@pytest.mark.parametrize("working", ["busy", "done", "moves"])
def test_a_group_with_a_working_rank_is_not_hung(working):
    """A rank works if it is busy, has returned or moves."""
    assert diagnose_hang(ranks(HERE, HERE, working), STALL) is None


def test_a_group_that_moves_for_ever_without_a_step_is_hung():
    """Moving is no excuse after the limit; a checkpoint is."""
    finding = diagnose_hang(ranks(HERE, HERE, "moves"), replace(STALL, stalled_s=601.0))
    assert finding is not None and [s.rank for _, s in finding.blamed] == [2]
    assert diagnose_hang(ranks(HERE, HERE, "busy"), replace(STALL, stalled_s=601.0)) is None


@pytest.mark.parametrize(
    ("places", "is_hung"),
    [((NOWHERE, WAITER), False), (("silent",), False), ((HERE, NOWHERE), True)],
)
def test_before_the_first_step_an_assumed_limit_needs_a_rank_in_a_collective(places, is_hung):
    """A script that makes no steps, or no process of Python, is not hung by an assumption."""
    stall = Stall(1801.0, 1800.0, assumed=True)
    assert (diagnose_hang(ranks(*places), stall) is not None) == is_hung


def test_the_message_names_place_and_files():
    """The failure has the place of the rank, of the others, and the pattern of the files."""
    state = RankState(
        2, 0, "stands", **NOWHERE, stack="/r/tasks/7_1/attempt-0/round-3.rank-2.stack.txt"
    )
    finding = diagnose_hang([*ranks(HERE, HERE), (B, state)], STALL)
    (failure,) = hang_failures(finding, 61.2, 3)
    assert (failure.task, failure.phase) == (B.task, "hang")
    assert failure.message == (
        "no step for 61 s: it is at data.py:7 in read, while 2 ranks are in all_reduce "
        "(train.py:40 in step); stacks of all ranks: tasks/*/attempt-*/round-3.rank-*.stack.txt"
    )
    assert failure.summary().startswith(f"rank 2 (local rank 0) on {B.host}, hung: no step")
    assert hang_note(finding, 61.2).fields["ranks"][0]["host"] == B.host


# ---- the leader ---------------------------------------------------------------------------------


def answer(leader, agent, now, rank, at, number=1):
    """Let an agent of one worker answer."""
    ranks_ = [RankState(rank, 0, "stands", **at)]
    return say(leader, agent, Stacks(index=2, number=number, ranks=ranks_), now)


def test_the_first_stalled_report_queries_all_members_once():
    """Further reports open no second query."""
    leader = training(A, B, C)
    asked = say(leader, A, Stall(index=2, stalled_s=61.0, limit_s=60.0), 70.0)
    assert told(asked, StacksRequest) == [A, B, C]
    assert not say(leader, B, Stall(index=2, stalled_s=61.0, limit_s=60.0), 70.1)


def test_once_all_have_answered_the_group_is_started_again():
    """The hang is logged, all are stopped, and the run spends a restart."""
    leader = training(A, B, C)
    say(leader, A, Stall(index=2, stalled_s=61.0, limit_s=60.0), 70.0)
    answer(leader, A, 71.0, 0, HERE)
    answer(leader, B, 71.0, 1, NOWHERE)
    effects = answer(leader, C, 71.5, 2, HERE)
    (hang, _) = of(effects, Note)
    assert hang.kind == "hang" and hang.fields["ranks"][0]["rank"] == 1
    assert told(effects, Stop) == [A, B, C]
    effects = [e for agent in (A, B, C) for e in rejoin(leader, agent, 72.0)]
    notes = [e for e in of(effects, Note) if e.kind == "restart"]
    assert leader.run.policy.restarts == 1
    assert "rank 1" in notes[0].fields["failure"] and "hung" in notes[0].fields["failure"]


def test_a_rank_whose_agent_does_not_answer_is_to_blame():
    """The agent sends heartbeats, but cannot inspect its workers."""
    leader = training(A, B)
    say(leader, A, Stall(index=2, stalled_s=61.0, limit_s=60.0), 70.0)
    answer(leader, A, 71.0, 0, HERE)
    effects = leader.tick(70.5 + ANSWER_S)
    (hang, *_) = [n for n in of(effects, Note) if n.kind == "hang"]
    assert [(r["rank"], r["state"]) for r in hang.fields["ranks"]] == [(1, "silent")]


def test_answers_of_an_earlier_round_are_ignored():
    """The round broke for another reason meanwhile."""
    leader = training(A, B)
    say(leader, A, Stall(index=2, stalled_s=61.0, limit_s=60.0), 70.0)
    answer(leader, A, 71.0, 0, HERE)
    leader.disconnected(B, LossReason.CONNECTION_CLOSED, 71.0)
    assert not [n for n in of(leader.tick(71.0 + ANSWER_S), Note) if n.kind == "hang"]
    assert not of(leader.tick(72.0), Append)
