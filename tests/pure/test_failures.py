"""Which failure is the cause, and what is said of it."""

import os
import signal

from hpc_elastic.agent.worker_process import NodeIdentity, WorkerFiles, describe
from hpc_elastic.rendezvous.log_entry import Failure, first_failure


def failed(rank: int, time: float, message: str, signal: str | None = None) -> Failure:
    """One failed worker."""
    return Failure(f"7_{rank}", f"node{rank}", rank, 0, time, message, signal=signal)


def test_the_earliest_failure_is_the_cause():
    """Among workers that failed by themselves the clock decides."""
    late, early = failed(0, 2.0, "ValueError: a"), failed(1, 1.0, "ValueError: b")
    assert first_failure([late, early]) == (early, [late])


def test_a_worker_that_lost_its_peer_is_a_victim_whatever_its_clock_says():
    """Broken connections and SIGTERM from the agent are consequences."""
    cause = failed(3, 9.0, "ValueError: boom")
    broken = failed(0, 1.0, "RuntimeError: [gloo/tcp/pair.cc] Connection closed by peer [10.0.0.1]")
    stopped = failed(1, 2.0, "ended by SIGTERM", signal="SIGTERM")
    assert first_failure([broken, stopped, cause]) == (cause, [broken, stopped])


def test_a_segmentation_fault_is_no_victim():
    """A signal that nobody sends is a cause."""
    cause = failed(2, 9.0, "ended by SIGSEGV", signal="SIGSEGV")
    assert first_failure([failed(0, 1.0, "Broken pipe"), cause])[0] is cause


def test_a_rank_that_exited_comes_before_those_that_lost_it():
    """It left no error; that its peers' connections ended is what they saw of it."""
    how = "exited with code 0 at step 5 before its function returned"
    broken = failed(0, 1.0, "Connection closed by peer")
    exited = failed(1, 2.0, how)
    assert first_failure([broken, exited]) == (exited, [broken])
    assert exited.summary() == f"rank 1 (local rank 0) on node1 {how}"
    caught = failed(2, 0.5, "exited with code 1, while it handled RuntimeError: Socket closed")
    assert first_failure([caught, broken, exited])[0] is exited


def test_a_killed_worker_comes_before_those_that_lost_it():
    """They see its connection end before its agent sees that it is dead; it was killed first."""
    cause = failed(2, 9.0, "ended by SIGKILL", signal="SIGKILL")
    broken = failed(0, 1.0, "Connection closed by peer")
    stopped = failed(1, 2.0, "ended by SIGTERM", signal="SIGTERM")
    assert first_failure([broken, stopped, cause]) == (cause, [broken, stopped])


def test_a_worker_that_used_up_its_cpu_time_is_told_where_the_limit_comes_from(tmp_path):
    """Slurm hands the `ulimit -t` of a login node on; a segmentation fault has no such remedy."""
    files = WorkerFiles(NodeIdentity("7_1", "node2", tmp_path), 1, 0, 0)
    ended = describe(-signal.SIGXCPU, files)
    assert ended.signal == "SIGXCPU" and "ulimit -t" in ended.remedy
    assert describe(-signal.SIGSEGV, files).remedy is None


def test_files_of_a_terabyte_cost_a_report_nothing(tmp_path):
    """The last lines are read from the end; an error file that no worker writes is not read."""
    files = WorkerFiles(NodeIdentity("7_1", "node2", tmp_path), 1, 0, 0)
    for file in (files.err, files.error):
        with file.open("wb") as f:
            os.truncate(f.fileno(), 1 << 40)
            f.seek(0, os.SEEK_END)
            f.write(b"\nthe last words\n")
    ended = describe(-signal.SIGKILL, files)
    assert ended.traceback.endswith("the last words") and len(ended.traceback) <= 10_000
    assert ended.message == "ended by SIGKILL"


def test_an_error_file_that_is_nested_too_deep_costs_only_itself(tmp_path):
    """A script may write anything there: the agent reports the worker all the same."""
    files = WorkerFiles(NodeIdentity("7_1", "node2", tmp_path), 1, 0, 0)
    files.error.write_text("[" * 100_000)
    assert describe(3, files).exit_code == 3
