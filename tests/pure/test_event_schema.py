"""The registry of the kinds of events: whether it is right, and its page fresh."""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from hpc_elastic.report.timeline import Cause, Cost, TimelineEntry
from hpc_elastic.run.events import COMMON, KINDS, LossReason, problems, valid_events
from made_events import event, group

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))

from generate import attributes, events_page

ROOT = Path(__file__).parents[2]
_WRITERS = ("Note", "note", "write", "write_behind")


def test_the_page_is_fresh():
    """`python docs/generate.py` writes it."""
    assert (ROOT / "docs/reference/events.md").read_text() == events_page()


def written(path: Path) -> Iterator[str]:
    """The kinds that a module writes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        names = {getattr(node.func, "attr", ""), getattr(node.func, "id", "")}
        first = node.args[0] if node.args else None
        if names & {"partial"} and isinstance(first, ast.Attribute) and first.attr in _WRITERS:
            first = node.args[1]
        elif not names & set(_WRITERS):
            continue
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def test_all_kinds_that_are_written_are_described():
    """What the agents and the leader write."""
    folders = [ROOT / "hpc_elastic" / name for name in ("agent", "rendezvous")]
    files = [path for folder in folders for path in folder.glob("*.py")]
    found = {kind for path in files for kind in written(path)}
    assert {"task", "workers_stopped", "round", "node_lost", "restart"} <= found
    assert found <= set(KINDS)


def test_the_leader_gives_each_reason_of_a_loss():
    """None that only the report knows."""
    sources = "".join(path.read_text() for path in (ROOT / "hpc_elastic/rendezvous").glob("*.py"))
    assert all(f"LossReason.{reason.name}" in sources for reason in LossReason)


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_described_in_sentences(name):
    """The page is made of them."""
    kind = KINDS[name]
    assert re.fullmatch("[a-z]+(_[a-z]+)*", name)
    assert kind.meaning.endswith(".") and not kind.when.endswith(".")
    names = [field.name for field in (*COMMON, *kind.fields)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (event(1.0, "news"), "'news' is no kind of event"),
        (event(1.0, "leader"), "leader: term is missing"),
        (event(1.0, "leader", term=True), "leader: term is True, which is no integer"),
        (event(1.0, "leader", term=1.5), "leader: term is 1.5, which is no integer"),
        (event(1.0, "leader", term=1, of="7"), "leader: of is no field of it"),
        ({**event(1.0, "leader", term=1), "v": 2}, "leader: v is 2, not 1"),
        ({"time": 1.0, "kind": "leader", "task": "7", "term": 1}, "leader: v is missing"),
        ({**event(1.0, "leader", term=1), "time": "1"}, "time is '1', which is no number"),
        (event(1.0, "members_released", tasks=[1]), "tasks is [1], which is no texts"),
        ({**group(1.0, 1, 0), "members": [{}]}, "members is [{}], which is no members"),
        (event(1.0, "nodes_requeued", delay_s=1, all=1), "all is 1, which is no flag"),
    ],
)
def test_what_is_wrong_with_an_event_is_said(wrong, said):
    """The kind, the field and what it is."""
    (problem,) = problems(wrong)
    assert said in problem


def test_optional_fields_may_be_null_or_absent():
    """Both mean that it is not known."""
    end = event(1.0, "end", status="succeeded", rounds=1, restarts=0)
    assert problems(end) == [] and problems({**end, "failure": None}) == []


@pytest.mark.parametrize("made_of", [TimelineEntry, Cost, Cause])
def test_every_key_of_the_story_is_on_the_page(made_of):
    """It is taken from the docstring, and no field is forgotten there."""
    assert [name for name, _ in attributes(made_of)] == [f.name for f in fields(made_of)]
    assert all(meaning.endswith(".") for _, meaning in attributes(made_of))


def test_readers_pass_over_what_is_damaged_and_take_what_is_newer():
    """A field that is missing or of another type; but not one that was added, or another kind."""
    fits = [event(1.0, "leader", term=1, of="7"), event(2.0, "news"), group(3.0, 1, 0)]
    newer = {**group(3.0, 1, 0), "members": [{**fits[2]["members"][0], "gpus": 8}]}
    damaged = [event(1.0, "leader"), event(1.0, "leader", term="1"), {**newer, "members": [{}]}]
    assert valid_events([*damaged, *fits, newer]) == [*fits, newer]
