"""Entries: sealed under the run's secret, and each claim follows from the entry before."""

import json
from dataclasses import replace

import pytest

from hpc_elastic.rendezvous.log_entry import (
    Agent,
    Endpoint,
    Failure,
    FailureCounters,
    LogEntry,
    RunEnding,
    claim,
    decode_signed,
)
from hpc_elastic.transport.auth import sign

SECRET = b"topsecret"
A, B = Agent("7_0", 0, 0, "node1", 2), Agent("7_1", 3, 1, "nöde2", 2)
FIRST, SECOND = Endpoint("10.0.0.1", 4000, "7_0", 0), Endpoint("fd00::2", 4001, "7_1", 3)
CAUSE = Failure("7_0", "node1", 0, 0, 12.5, "boom", exception="ValueError", exit_code=1)
VICTIM = Failure("7_1", "nöde2", 2, 1, 12.7, "Connection closed by peer", signal="SIGTERM")
BEFORE = LogEntry(
    6, 2, FIRST, round=4, restarts=1, members=(A, B), lost={"7_3": 1},
    times_requeued=2, started=1000.5, possibly_alive={"7_4": "node9"},
)  # fmt: skip


@pytest.mark.parametrize(
    "ending", [None, RunEnding("succeeded"), RunEnding("failed", CAUSE, (VICTIM, VICTIM))]
)
def test_an_entry_survives_its_file(ending):
    """All fields, with their types: what was decided is what is read."""
    entry = replace(BEFORE, ending=ending)
    assert decode_signed(entry.encode_signed(SECRET), SECRET) == entry


def test_a_file_cut_short_is_no_entry():
    """However much of it there is."""
    text = BEFORE.encode_signed(SECRET)
    assert all(decode_signed(text[:length], SECRET) is None for length in range(len(text)))


def test_another_runs_entry_is_none_of_ours():
    """The signature goes by the run's secret."""
    assert decode_signed(BEFORE.encode_signed(b"another"), SECRET) is None


def test_an_entry_that_was_changed_is_none():
    """Each character is under the signature."""
    assert (
        decode_signed(BEFORE.encode_signed(SECRET).replace("10.0.0.1", "10.6.6.6"), SECRET) is None
    )


@pytest.mark.parametrize("text", ["", "null", "[]", "7", "{}", '{"entry": 1, "mac": 2}', "\0\0"])
def test_garbage_is_no_entry(text):
    """Whatever somebody leaves there, no reader fails on it."""
    assert decode_signed(text, SECRET) is None


@pytest.mark.parametrize("change", [{"leader": None}, {"members": 7}, {"ending": 7}])
def test_a_signed_entry_of_another_form_is_none(change):
    """An entry that this version does not understand is not guessed at."""
    body = json.dumps(json.loads(json.loads(BEFORE.encode_signed(SECRET))["entry"]) | change)
    text = json.dumps({"entry": body, "mac": sign(SECRET, f"entry|{body}")})
    assert decode_signed(text, SECRET) is None


def test_the_secret_is_not_in_the_file():
    """Whoever may read the run directory's files learns nothing that lets him in."""
    assert "topsecret" not in BEFORE.encode_signed(SECRET)


def test_the_first_claim_begins_the_run():
    """Nothing is known but who leads, and since when."""
    assert claim(1, None, FIRST, 1000.0) == LogEntry(1, 1, FIRST, started=1000.0, claimed=1000.0)


def test_a_claim_keeps_what_was_decided():
    """Another leader, the next term, the next number: all else is as it was."""
    now = claim(7, BEFORE, SECOND, 2000.0)
    assert (now.index, now.term, now.leader) == (7, 3, SECOND)
    kept = ("round", "restarts", "members", "times_requeued", "started", "ending")
    assert [getattr(now, k) for k in kept] == [getattr(BEFORE, k) for k in kept]


def test_a_claim_notes_that_the_leader_before_was_lost():
    """Slurm may call it RUNNING for minutes; nobody is to wait for it."""
    assert claim(7, BEFORE, SECOND, 2000.0).lost == {"7_3": 1, "7_0": 0}
    assert BEFORE.lost == {"7_3": 1}


def test_who_claims_after_itself_is_not_lost():
    """An agent may lead twice, and its task may come back in its next attempt."""
    for attempt in (0, 1):
        again = replace(FIRST, port=5000, attempt=attempt)
        lost = claim(7, BEFORE, again, 2000.0).lost
        assert lost.get("7_0", -1) < attempt, "the claimer itself counts as lost"


def test_a_claim_notes_where_the_leader_before_may_run_still():
    """It was out of reach only: nobody has seen its end. A claim that saw it end forgets it."""
    assert claim(7, BEFORE, SECOND, 2000.0, possibly_alive=True).possibly_alive == {
        "7_0": "node1",
        "7_4": "node9",
    }
    before = replace(BEFORE, possibly_alive={"7_0": "node1", "7_1": "nöde2", "7_3": "node4"})
    assert claim(7, before, SECOND, 2000.0).possibly_alive == {"7_3": "node4"}
    assert claim(7, before, SECOND, 2000.0, possibly_alive=True).possibly_alive == {
        "7_0": "node1",
        "7_3": "node4",
    }
    assert claim(7, before, FIRST, 2000.0, possibly_alive=True).possibly_alive == {
        "7_1": "nöde2",
        "7_3": "node4",
    }


def test_damaged_entries_may_each_have_begun_a_term():
    """A term is never led twice, so none is counted less than once."""
    assert claim(9, BEFORE, SECOND, 2000.0).term == 5
    assert claim(4, None, SECOND, 2000.0).term == 4


def with_new_fields(value):
    """JSON values in which each object has a field of a later version."""
    if isinstance(value, list):
        return [with_new_fields(item) for item in value]
    if isinstance(value, dict):
        return {key: with_new_fields(item) for key, item in value.items()} | {"new": {"a": [1]}}
    return value


def test_an_entry_of_a_newer_version_is_no_damage():
    """Its new fields are left out; a damaged entry would be claimed over, and revoke its round."""
    counters = FailureCounters(progress=7, first_of_series=CAUSE, exclusions={"node5": 9.0})
    entry = replace(BEFORE, ending=RunEnding("failed", CAUSE, (VICTIM,)), counters=counters)
    body = json.loads(json.loads(entry.encode_signed(SECRET))["entry"])
    fixed = {name: body[name] for name in ("lost", "possibly_alive", "step_times", "requeued")}
    fixed["counters"] = {
        **with_new_fields(body["counters"]),
        **{name: body["counters"][name] for name in ("strikes", "exclusions", "gone")},
    }
    text = json.dumps({**with_new_fields(body), **fixed})
    sealed = json.dumps({"entry": text, "mac": sign(SECRET, f"entry|{text}")})
    assert decode_signed(sealed, SECRET) == entry
