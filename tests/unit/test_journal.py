"""What one leader writes, the next one goes on from."""

import asyncio
import json
from pathlib import Path

import pytest

from hpc_elastic.events import EventLog, read_events
from hpc_elastic.rendezvous.failures import Failure
from hpc_elastic.rendezvous.journal import Journal
from hpc_elastic.rendezvous.machine import Agent, EndRun, Machine, Phase, Rules, StartRound
from hpc_elastic.rundir import RunDir

A, B = Agent("7_0", 0, 0, "node1", 2), Agent("7_1", 3, 1, "node2", 2)
RULES = Rules(1, 4, 3, 60.0, 5.0)


@pytest.fixture
def run(tmp_path) -> RunDir:
    """An empty run directory."""
    run = RunDir(tmp_path)
    run.rdzv.mkdir()
    (tmp_path / "events").mkdir()
    return run


def journal(run: RunDir) -> Journal:
    """The journal of one leader."""
    return Journal(run, "run-1", EventLog(run.events("7_0"), "7_0"))


def write(run: RunDir, *steps) -> None:
    """Let one leader write, and end."""

    async def lead() -> None:
        j = journal(run)
        for step in steps:
            await step(j)
        await j.close()

    asyncio.run(lead())


def restored(run: RunDir) -> Machine:
    """The machine that the next leader begins with."""
    machine = Machine(RULES)
    journal(run).restore(machine)
    return machine


def test_the_first_leader_starts_from_nothing(run):
    """No file, no counts."""
    machine = restored(run)
    assert (machine.round, machine.restarts, machine.members) == (0, 0, ())


def test_rounds_restarts_and_ranks_survive_a_leader(run):
    """A requeue of every node does not give a failing run its restarts back."""
    before = Machine(RULES, round=4, restarts=2, members=(B, A))
    write(run, lambda j: j.round_started(before, epoch=1))
    after = restored(run)
    assert (after.round, after.restarts, after.members) == (4, 2, (B, A))


def test_the_next_leader_knows_which_tasks_were_lost(run):
    """Slurm calls a dead node's task RUNNING for a while: no leader may wait for it."""
    before = Machine(RULES, round=2, members=(A,), lost={B.task: B.attempt})
    write(run, lambda j: j.round_started(before, epoch=1))
    after = restored(run)
    after.join(A, 0.0)
    assert any(
        isinstance(a, StartRound) for a in after.slurm_says(frozenset({A.task, B.task}), 0.1)
    )


def test_a_run_that_has_ended_stays_ended(run):
    """A leader that comes after the end tells the verdict, and does not write another result."""
    failure = Failure("7_0", "node1", 0, 0, 1.0, "boom", exit_code=1)
    machine = Machine(RULES, round=1)
    write(run, lambda j: j.ended(machine, EndRun("failed", failure)))
    first = run.result.read_text()
    after = restored(run)
    assert after.phase is Phase.ENDED and after.end == EndRun("failed")
    write(run, lambda j: j.ended(after, EndRun("succeeded")))
    assert run.result.read_text() == first
    assert json.loads(first)["failure"]["message"] == "boom"


def test_a_directory_that_can_not_be_written_costs_the_files_only(run, caplog):
    """A full disk is logged; the leader goes on."""
    run.rdzv.rmdir()
    write(run, lambda j: j.round_started(Machine(RULES, round=1, members=(A,)), epoch=1))
    assert "state.json: not written" in caplog.text
    assert [e["kind"] for e in read_events(Path(run.path) / "events")] == ["round"]
