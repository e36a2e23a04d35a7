"""The messages of a run in JSON, which agents of two versions may exchange after an upgrade."""

import json
from dataclasses import fields

import pytest

from hpc_elastic.ft.messages import CancelRequest
from hpc_elastic.rendezvous.log_entry import Failure
from hpc_elastic.rendezvous.messages import (
    TO_AGENT,
    TO_LEADER,
    CheckpointAnnounced,
    CheckpointRequested,
    CheckpointWanted,
    Close,
    End,
    Failed,
    Finished,
    Heartbeat,
    Join,
    Leave,
    Notice,
    NoticeConfirmed,
    NoticeRequest,
    Probe,
    Probed,
    QuorumMessage,
    RankState,
    Reattach,
    Requeue,
    RoundInfo,
    Stacks,
    StacksRequest,
    Stall,
    Stop,
    Vote,
    Waiting,
)
from hpc_elastic.transport.messages import _reader, _readers, pack, unpack
from hpc_elastic.worker.shared_page import CheckpointRequest

NOW = 1000.0
FAILURE = Failure("7_0", "n1", 3, 1, 990.0, "boom", "ValueError", exit_code=1)
STATE = RankState(3, 1, "stands", "train.py:5 in step", "all_reduce", None, 999.0)
PLACE = RoundInfo(5, 3, 17, 1, 0, 2, 0, 12, ("10.0.0.1", 99), 0, "", "n[1-2]", "8,4")
FROM_AGENTS = [
    (Join(5, ("10.0.0.1", 9), 2.5),
     '{"type":"join","request":5,"store":["10.0.0.1",9],"waited_s":2.5}'),
    (Join(5, probes=(("10.0.0.1", 7),), versions="Python 3.11.7"),
     '{"type":"join","request":5,"store":["",0],"waited_s":0.0,"probes":[["10.0.0.1",7]],'
     '"versions":"Python 3.11.7"}'),
    (Reattach(4, 3, 1), '{"type":"reattach","index":4,"number":3,"replica":1}'),
    (Heartbeat({"step": 3}), '{"type":"heartbeat","progress":{"step":3}}'),
    (Heartbeat({}), '{"type":"heartbeat","progress":{}}'),
    (Leave("preempted"), '{"type":"leave","why":"preempted"}'),
    (Notice("signal", 5.0), '{"type":"notice","reason":"signal","left_s":5.0}'),
    (NoticeConfirmed(), '{"type":"noticed"}'),
    (Probed(2, ("7_1",)), '{"type":"probed","number":2,"failed":["7_1"]}'),
    (Close(index=4), '{"type":"close","index":4}'),
    (Finished(index=4), '{"type":"finished","index":4}'),
    (CheckpointAnnounced(20, 2, index=4), '{"type":"checkpoint","index":4,"step":20,"paused":2}'),
    (CheckpointWanted(index=4), '{"type":"request_checkpoint","index":4}'),
    (Vote(3, True, None, 0.5, index=4),
     '{"type":"step_vote","index":4,"number":3,"ok":true,"passed":null,"rate":0.5}'),
    (Stall(61.0, 60.0, index=4),
     '{"type":"stalled","index":4,"stalled_s":61.0,"limit_s":60.0,"assumed":false}'),
    (QuorumMessage(CancelRequest()),
     '{"type":"ft","message":{"type":"CancelRequest"}}'),
]  # fmt: skip
FROM_THE_LEADER = [
    (PLACE,
     '{"type":"round","request":5,"number":3,"index":17,"restarts":1,"group_rank":0,"group_size":2,'
     '"first_rank":0,"world_size":12,"store":["10.0.0.1",99],"replica":0,"throughputs":"",'
     '"hosts":"n[1-2]","workers":"8,4"}'),
    (Stop("node3 joins"), '{"type":"stop","reason":"node3 joins"}'),
    (CheckpointRequested(CheckpointRequest(2, 20, confirmed=True)),
     '{"type":"checkpoint_request","request":{"number":2,"step":20,"confirmed":true,"pause":false,'
     '"released":false}}'),
    (CheckpointRequested(None), '{"type":"checkpoint_request","request":null}'),
    (StacksRequest(2), '{"type":"stacks","number":2}'),
    (NoticeRequest(600.0), '{"type":"notice","left_s":600.0}'),
    (Heartbeat(), '{"type":"heartbeat"}'),
    (End("succeeded", None), '{"type":"end","status":"succeeded","failure":null}'),
    (Requeue(10.0), '{"type":"requeue","delay_s":10.0}'),
    (Waiting("1 of 2 nodes"), '{"type":"waiting","text":"1 of 2 nodes"}'),
    (Probe(2, {"7_1": (("10.0.0.1", 7),)}),
     '{"type":"probe","number":2,"peers":{"7_1":[["10.0.0.1",7]]}}'),
]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "wire", "types"),
    [*((*row, TO_LEADER) for row in FROM_AGENTS), *((*row, TO_AGENT) for row in FROM_THE_LEADER)],
)
def test_the_json_of_a_message_stays_as_it_is(message, wire, types):
    """Byte for byte, in both directions."""
    assert json.dumps(pack(message, NOW), separators=(",", ":")) == wire
    assert unpack(json.loads(wire), types, NOW) == message


@pytest.mark.parametrize(
    ("message", "field"),
    [(Failed([FAILURE], index=4), "failures"), (Stacks(2, [STATE], index=4), "ranks")],
)
def test_times_are_sent_as_ages(message, field):
    """The clock of the receiver is 50 s ahead here."""
    raw = json.loads(json.dumps(pack(message, NOW)))
    (item,) = raw[field]
    sent_age_s = item["age_s"]
    assert "time" not in item and sent_age_s == NOW - getattr(message, field)[0].time
    (received,) = getattr(unpack(raw, TO_LEADER, NOW + 50.0), field)
    assert received.time == NOW + 50.0 - sent_age_s


def test_every_message_is_in_a_table_of_this_test():
    """A new message has its JSON here."""
    shown = {type(message) for message, _ in (*FROM_AGENTS, *FROM_THE_LEADER)} | {Failed, Stacks}
    assert shown == {*TO_LEADER.values(), *TO_AGENT.values()}


def test_a_message_of_another_version_is_read_as_far_as_it_is_known():
    """An unknown type is ignored, and so is an unknown field."""
    assert unpack({"type": "hug"}, TO_LEADER, NOW) is None
    assert unpack({"type": "leave", "why": "x", "mood": 3}, TO_LEADER, NOW) == Leave("x")
    assert unpack({"type": "join", "request": 1}, TO_LEADER, NOW) == Join(1)


@pytest.mark.parametrize(
    "raw",
    [
        {"type": "notice", "left_s": 5.0},
        {"type": "notice", "reason": "signal", "left_s": "soon"},
        {"type": "finished", "index": float("inf")},
        {"type": "join", "request": 1, "probes": [7]},
        {"type": "failed", "index": 4, "failures": [{"task": "7_0"}]},
        {"type": "stacks", "index": 4, "number": 1, "ranks": 7},
        {"type": "ft", "message": {"type": "nonsense"}},
        {"type": "checkpoint", "index": 4, "step": None, "paused": 0},
    ],
)
def test_a_malformed_message_is_refused(raw):
    """The connection ends; no part of the leader's state has seen the message."""
    with pytest.raises(ValueError, match=r"malformed|unknown|could not convert"):
        unpack(raw, TO_LEADER, NOW)


def test_every_field_has_a_reader_of_its_type():
    """A field of another type needs one of its own."""
    for kind in {*TO_LEADER.values(), *TO_AGENT.values()}:
        assert [name for name, _ in _readers(kind)] == [field.name for field in fields(kind)]
    with pytest.raises(TypeError, match="needs a reader"):
        _reader(set[int])
