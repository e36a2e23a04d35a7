"""States of nodes in sinfo's words: one meaning of idle, busy, planned, drained and lost."""

from types import SimpleNamespace

import pytest

from hpc_elastic.doctor.cluster import _count_nodes
from hpc_elastic.site import NodeState
from hpc_elastic.site.nodes import list_reserved
from hpc_elastic.slurm.parsing import parse_reservations

MEANINGS = {
    "idle": "idle", "idle~": "idle", "idle#": "idle", "idle%": "idle", "idle!": "idle",
    "idle-": "idle planned", "planned": "idle planned", "planned~": "idle planned",
    "plnd": "idle planned",
    "idle*": "lost", "idle~*": "lost", "idle@": "", "idle^": "", "idle$": "",
    "mixed": "busy", "mix": "busy", "mix-": "busy", "mixed-": "busy", "mixed~": "busy",
    "allocated": "busy", "alloc": "busy", "completing": "busy", "comp": "busy",
    "allocated*": "lost", "mixed@": "",
    "drained": "drained lost", "drained*": "drained lost", "drain": "drained lost",
    "draining": "drained lost", "drng": "drained lost", "DRAINING@": "drained lost",
    "failing": "drained lost", "fail": "drained lost",
    "down": "lost", "down*": "lost", "maint": "lost", "reboot^": "lost", "future": "lost",
    "inval": "lost", "unknown*": "lost", "error": "lost",
    "reserved": "", "powering_up": "", "a_later_word": "",
}  # fmt: skip


@pytest.mark.parametrize(("text", "meaning"), MEANINGS.items())
def test_a_state_of_a_node_has_one_meaning(text, meaning):
    """Marks of power saving keep no task away; one that does not answer, or boots, does."""
    state = NodeState.parse(f" {text} ")
    kinds = ("idle", "planned", "busy", "drained", "lost")
    assert [kind for kind in kinds if getattr(state, f"is_{kind}")] == sorted(
        meaning.split(), key=kinds.index
    )


def test_the_name_of_a_state_has_the_marks_that_keep_tasks_away():
    """The doctor counts nodes by it."""
    names = {text: NodeState.parse(text).name for text in ("idle~", "idle-", "down*", "idle@")}
    assert names == {"idle~": "idle", "idle-": "idle", "down*": "down*", "idle@": "idle@"}


def test_the_doctor_counts_each_node_once_by_what_its_state_means():
    """How power is saved is not of interest; a star, no answer, is kept apart with its state."""
    states = {"n1": "idle", "n2": "idle~", "n3": "mixed", "n4": "down*", "n5": "drained"}
    client = SimpleNamespace(each_node=lambda partition: states)
    assert _count_nodes(client, "gpu") == {"idle": 2, "mixed": 1, "down*": 1, "drained": 1}


RESERVATION = (
    "ReservationName=root_1 StartTime=2026-11-30T19:42:56 EndTime=2026-11-30T19:52:56 "
    "Duration=00:10:00 Nodes=node[1-3] NodeCnt=3 CoreCnt=8 Features=(null) PartitionName=(null) "
    "Flags={flags} TRES=cpu=8 Users=root Groups=(null) Accounts=(null) Licenses=(null) "
    "State=INACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)\n"
)


@pytest.mark.parametrize(
    ("flags", "ahead_s", "expected"),
    [
        ("MAINT,IGNORE_JOBS,SPEC_NODES", 300, ["node1"]),
        ("MAINT,IGNORE_JOBS,SPEC_NODES", 3600, []),
        ("MAINT,IGNORE_JOBS,SPEC_NODES", -1, []),
        ("MAINT,SPEC_NODES", 300, []),
    ],
)
def test_a_node_is_left_before_a_reservation_that_ignores_its_task(flags, ahead_s, expected):
    """node2's task ends before it, and on node3 the run has none."""
    (found,) = parse_reservations(RESERVATION.format(flags=flags))
    begin = found.starts_at
    ends = {"node1": begin + 60, "node2": begin - 1, "node4": begin + 60}
    reserved = list_reserved([found], ends, begin - ahead_s)
    assert list(reserved) == expected
    assert set(reserved.values()) <= {"reserved from 19:42"}
