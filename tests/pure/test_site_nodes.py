"""States of nodes in sinfo's words: one meaning of idle, busy, planned, drained and lost."""

from types import SimpleNamespace

import pytest

from hpc_elastic.doctor.cluster import _count_nodes
from hpc_elastic.site import NodeState

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
