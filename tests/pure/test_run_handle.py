"""A submitted run: how it ended, from its files; and the error that says so."""

import json
from dataclasses import replace

import pytest

from hpc_elastic.launcher.run_handle import RunHandle
from hpc_elastic.shared_files import read_tail


@pytest.fixture
def run(tmp_path):
    """Return a run of two tasks with its directories."""
    (tmp_path / "0").mkdir()
    (tmp_path / ".hpc_elastic" / "logs").mkdir(parents=True)
    return RunHandle(tmp_path / "0", "lr=0.1", ("7_0", "7_1"), tmp_path / ".hpc_elastic", None)


def write(run: RunHandle, **result) -> None:
    """Write the run's result.json."""
    run.paths.result.write_text(json.dumps(result))


FAILURE = {
    "host": "node3",
    "task": "7_3",
    "rank": 3,
    "local_rank": 1,
    "exit_code": 1,
    "exception": "ValueError",
    "message": "no loss",
    "traceback": "Traceback (most recent call last):\nValueError: no loss",
}
VICTIM = {"host": "node1", "task": "7_1", "rank": 1, "local_rank": 0, "signal": "SIGTERM"}


def test_a_failed_run_shows_the_first_failure_in_full(run):
    """Host, ranks, exit code and traceback of who failed; who died of it is one line."""
    write(run, status="failed", restarts=2, failure=FAILURE, secondary_failures=[VICTIM])
    end = run.read_end()
    assert end and end.error and end.restarts == 2
    assert str(end.error).splitlines() == [
        f"the run failed: {run.dir}",
        "first failure: rank 3 (local rank 1) on node3, task 7_3: exit code 1",
        "    Traceback (most recent call last):",
        "    ValueError: no loss",
        "  rank 1 (local rank 0) on node1, task 7_1: ended by SIGTERM (died afterwards)",
        f"logs: {run.dir / 'tasks'}",
        f"      {run.submission / 'logs'}",
    ]
    assert (end.error.failure, end.error.secondary_failures) == (FAILURE, [VICTIM])


def test_a_run_whose_leaders_failed_shows_no_ranks(run):
    """It is the error of an agent; what to do stands below its traceback."""
    failure = {**FAILURE, "phase": "lead", "exit_code": None, "remedy": "look for a fault"}
    write(run, status="failed", failure=failure)
    end = run.read_end()
    assert end and str(end.error).splitlines()[1:5] == [
        "first failure: the leader, task 7_3 on node3: ValueError",
        "    Traceback (most recent call last):",
        "    ValueError: no loss",
        "look for a fault",
    ]
    assert end.why == "the leader, task 7_3 on node3: ValueError: no loss"


def test_a_worker_can_write_no_line_of_ours(run):
    """Nor anything that a terminal obeys: whoever shows the error need not clean it."""
    text = "Traceback\x1b]0;owned\x07\x1b[2J\x9b2K\r\u202e\nthe run succeeded"
    write(run, status="failed", failure={**FAILURE, "traceback": text, "host": "n\x1b[1A"})
    end = run.read_end()
    assert end and str(end.error).splitlines()[1:4] == [
        "first failure: rank 3 (local rank 1) on n, task 7_3: exit code 1",
        "    Traceback",
        "    the run succeeded",
    ]


def test_a_failure_of_a_later_attempt_is_not_one_that_died_afterwards(run):
    """The same rank may have failed in each attempt; one that exited is named with the remedy."""
    how = "exited with code 0 at step 5 before its function returned"
    exited = {
        "host": "node2", "task": "7_1", "rank": 1, "local_rank": 0, "exit_code": 0, "round": 1,
        "message": how, "remedy": "return from the function",
    }  # fmt: skip
    victims = [{**VICTIM, "round": 1}, {**exited, "round": 3}]
    write(run, status="failed", restarts=2, failure=exited, secondary_failures=victims)
    end = run.read_end()
    assert end and str(end.error).splitlines()[1:5] == [
        f"first failure: rank 1 (local rank 0) on node2, task 7_1: {how}",
        "return from the function",
        "  rank 1 (local rank 0) on node1, task 7_1: ended by SIGTERM (died afterwards)",
        f"  rank 1 (local rank 0) on node2, task 7_1: {how} (failed in a later attempt, round 3)",
    ]


def test_a_failure_without_a_traceback_still_says_what_it_was(run):
    """A worker that was killed has no exception; one that could not be started has a message."""
    failure = {"host": "n", "exception": "RendezvousTimeoutError", "message": "nobody came"}
    write(run, status="failed", failure=failure, secondary_failures=None)
    end = run.read_end()
    assert end and "RendezvousTimeoutError: nobody came" in str(end.error)


def test_return_values_are_read_by_global_rank(run):
    """The results of the last round, however many ranks it had."""
    folder = run.dir / "results" / "round-2"
    folder.mkdir(parents=True)
    for rank in (0, 1, 10):
        (folder / f"rank-{rank}.json").write_text(json.dumps({"rank": rank}))
    write(run, status="succeeded", restarts=0, results="results/round-2")
    end = run.read_end()
    assert end and end.values == {rank: {"rank": rank} for rank in (0, 1, 10)}
    assert (end.value, end.error) == ({"rank": 0}, None)


@pytest.mark.parametrize(
    "damaged", ["{", '{"status": "succeeded", "results": "results"}', '{"restarts": [1]}']
)
def test_a_run_whose_result_is_damaged_has_failed(run, damaged):
    """The others of its sweep are waited for all the same; the user learns where to look."""
    (run.dir / "results").mkdir(parents=True)
    (run.dir / "results" / "rank-0.json").write_text("{")
    run.paths.result.write_text(damaged)
    end = run.read_end()
    assert end and end.status == "failed"
    assert "result.json" in str(end.error) and "hpc-elastic events" in str(end.error)


def test_no_result_is_no_end(run):
    """A run without result.json has not ended, as far as its directory says."""
    assert run.read_end() is None


def test_a_lost_run_shows_states_and_logs(run):
    """An interpreter that does not start writes to Slurm's log only: its end is shown."""
    lines = [f"line {n}" for n in range(50)]
    (run.submission / "logs" / "7_0.log").write_text("\n".join(lines))
    text = str(run.lost({"7_0": "FAILED (NonZeroExitCode)"}).error)
    assert "task 7_0: FAILED (NonZeroExitCode)" in text and "task 7_1: never seen" in text
    assert "line 30" in text and "line 29" not in text
    assert str(run.submission / "logs" / "7_0.log") in text


def test_a_lost_run_without_logs_says_so(run):
    """The folder is named, so that the user can look again."""
    assert f"written anything to {run.submission / 'logs'}" in str(run.lost({}).error)


def test_the_tail_of_a_huge_log_is_cheap(run):
    """Only the end of the file is read, and bytes that are no text do not matter."""
    log = run.dir / "log"
    log.write_bytes(b"x" * 100_000 + b"\nla\xffst\n")
    assert read_tail(log, at_most_bytes=20).splitlines()[-1] == "la\ufffdst"
    assert read_tail(run.dir / "missing") == ""


def test_runs_are_named_by_their_place_in_the_sweep(run, tmp_path):
    """hydra.sweep.subdir may have several levels; what `launch` makes is its own sweep."""
    assert replace(run, dir=tmp_path / "lr=0.1" / "seed=1").name == "lr=0.1/seed=1"
    assert replace(run, dir=tmp_path).name == tmp_path.name
