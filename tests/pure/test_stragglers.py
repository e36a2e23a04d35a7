"""Which ranks are persistently slower than the others (pure)."""

import pytest
from leaders import of, say, training

from groups import A, B, C
from hpc_elastic.rendezvous.effects import Note
from hpc_elastic.rendezvous.failure_policy import IN_A_ROW, Stragglers
from hpc_elastic.rendezvous.messages import Heartbeat
from hpc_elastic.rendezvous.run_status import status_of


def windows(stragglers: Stragglers, *loads: float, first: int = 1, num: int = 1) -> list[Note]:
    """Record the same loads of three nodes with one rank each for a number of windows."""
    return [
        note
        for number in range(first, first + num)
        for rank, (agent, load_s) in enumerate(zip((A, B, C), loads, strict=False))
        for note in stragglers.record_loads(agent, [number, [(rank, load_s, 1.0)]], 1)
    ]


@pytest.mark.parametrize(
    ("loads", "named"),
    [
        ((0.5, 0.5, 0.9), [2]),
        ((0.5, 0.5, 0.64), []),  # less than 30 % above
        ((0.01, 0.01, 0.04), []),  # not worth mentioning
        ((0.5, 0.9), [1]),
        ((0.9, 0.9, 0.4), []),  # a fast one is none
        ((0.0, 0.0, 0.0), []),
    ],
)
def test_ranks_that_are_stragglers(loads, named):
    """Above the median by 30 %, and by a share of the step that matters."""
    stragglers = Stragglers()
    notes = windows(stragglers, *loads, num=10)
    assert [n.fields["rank"] for n in notes] == named
    assert [s["rank"] for s in stragglers.current] == named


def test_one_event_when_a_rank_becomes_a_straggler_and_one_when_it_ends():
    """After a few windows in a row in both cases."""
    stragglers = Stragglers()
    assert not windows(stragglers, 0.5, 0.5, 0.9, num=IN_A_ROW - 1)
    (note,) = windows(stragglers, 0.5, 0.5, 0.9, first=IN_A_ROW)
    assert note.kind == "straggler"
    assert note.fields == {"rank": 2, "host": C.host, "task": C.task, "ratio": 1.8, "slow": True}
    assert not windows(stragglers, 0.5, 0.5, 0.9, first=10, num=5)
    assert not windows(stragglers, 0.5, 0.5, 0.5, first=20, num=IN_A_ROW - 1)
    (note,) = windows(stragglers, 0.5, 0.5, 0.5, first=30)
    assert note.fields["slow"] is False and stragglers.current == []


def test_one_slow_window_is_no_straggler():
    """Nor are several that are not in a row."""
    stragglers = Stragglers()
    for i in range(10):
        assert not windows(stragglers, 0.5, 0.5, 0.9 if i % 2 else 0.5, first=i)


def test_a_repeated_window_counts_once_and_a_new_round_starts_from_zero():
    """Heartbeats repeat the last window."""
    stragglers = Stragglers()
    for _ in range(20):
        assert not windows(stragglers, 0.5, 0.5, 0.9)
    stragglers.record_loads(A, [1, [(0, 0.5, 1.0)]], 2)
    assert stragglers.current == []


def test_loads_in_heartbeats_lead_to_an_event_and_to_the_status():
    """The status is status.json."""
    leader = training(A, B)
    notes = []
    for number in range(1, 5):
        for rank, (agent, load_s) in enumerate(((A, 0.5), (B, 0.9))):
            progress = {"step": 3, "loads": [number, [[rank, load_s, 1.0]]]}
            notes += of(say(leader, agent, Heartbeat(progress=progress), 2.0), Note)
    assert [n.kind for n in notes] == ["straggler"]
    assert status_of(leader)["stragglers"] == [{"rank": 1, "host": B.host, "ratio": 1.8}]
