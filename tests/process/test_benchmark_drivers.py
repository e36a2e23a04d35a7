"""What the benchmarks make of their measurements: tables and verdicts, without measuring."""

import importlib.util
import json
import math
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from evidence.registry import HERE
from evidence.result import Figure
from kernel_nfs import facts

pytestmark = pytest.mark.long


def driver(name: str) -> ModuleType:
    """The script of a benchmark, whose name is also a package's."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def recovery():
    """The script."""
    return driver("recovery")


def recovered(recovery, total_s: float, *, case: str = "follower", peer: str = "hpc_elastic"):
    """A fault that the group got over, a tenth of a second of it by imports."""
    stages = {name: 0.0 for name in recovery.STAGES} | {"start+import": 0.1}
    found = recovery.Recovery(total_s, total_s, 3, 3, stages)
    return recovery.Measurement(case, peer, "recovered", total_s, found)


def lost(recovery, *, case: str = "follower", peer: str = "hpc_elastic"):
    """A fault that it did not."""
    return recovery.Measurement(case, peer, "no step", 120.0)


def test_recovery_has_a_line_for_each_case_and_peer(recovery):
    """In the order of the cases; medians and ranges of those that recovered."""
    measured = [
        recovered(recovery, 2.0, case="link"),
        recovered(recovery, 1.0),
        recovered(recovery, 3.0),
        lost(recovery, peer="torchrun c10d"),
    ]
    made = recovery.result(measured, 2, recovery.nvrx(None, False))
    rows = made.tables[0].texts()
    assert [row[:3] for row in rows] == [
        ["follower", "hpc_elastic", "2.00 (1.00 to 3.00)"],
        ["follower", "torchrun c10d", "no step (120 s)"],
        ["link", "hpc_elastic", "2.00"],
    ]
    assert [t.verdict for t in made.targets] == ["met, 60 % to spare", "missed by 90 %"]
    assert "NVRx ft_launcher: not measured, it is not installed" in made.peers[1].text


def test_recovery_that_did_not_come_misses_the_targets(recovery):
    """Even if all others were fast."""
    made = recovery.result([recovered(recovery, 0.5), lost(recovery)], 2, recovery.nvrx("x", False))
    assert made.tables[0].texts()[0][2] == "0.50, no step (120 s)"
    assert [t.verdict for t in made.targets] == ["missed: 1 of 2 did not recover"] * 2


def test_goodput_is_held_against_the_target():
    """Ours only; all parts are shares of what was available."""
    goodput = driver("goodput")
    parts = {"trained": 80.0, "queued": 20.0}
    account = goodput.Account(100.0, 160, 3, 1, parts)
    names = ("hpc_elastic", "submitit + torchrun, one job")
    measured = [goodput.Measurement(name, 2.0, account) for name in names]
    made = goodput.result(measured, together=True)
    assert [t.verdict for t in made.targets] == ["missed by 11 %"]
    assert made.tables[0].texts()[0] == [
        "hpc_elastic", "80.0%", "96.00", "100", "3", "1", "80.0%", "20.0%",
    ]  # fmt: skip
    assert "all at once" in made.about.title


def test_rendezvous_that_was_given_up_is_no_figure():
    """Ours misses its target, c10d is told by its limit; the exponent goes by the rest."""
    scale = driver("rendezvous_scale")
    reached = scale.agents.Reached(**{"wall_s": 0.1, "messages": 6, "sent_bytes": 100,
                                      "received_bytes": 156, "tries": 256})  # fmt: skip
    ours = {256: [scale.Ours(reached, reached, 0.05, 0.01)], 10_000: []}
    peers = {256: [None], 10_000: []}
    made = scale.result(ours, peers, Namespace(peer_limit_s=300.0, repeats=1))
    first, second = made.tables[0].texts()
    assert (first[0], first[1], first[7], first[10]) == ("256", "0.100", "> 300", "> 3000")
    assert second[:2] == ["10000", "> 120"]
    verdicts = {t.what: t.verdict for t in made.targets}
    assert verdicts["10000 agents"] == "missed: not within 120 s"
    assert verdicts["256 agents: c10d / ours, at least: c10d was given up"].startswith("met")
    assert scale.first_s([]) == math.inf


def test_checkpoints_ratios_are_of_medians():
    """The best of DCP's ways counts; a run without ours has no targets."""
    checkpoint = driver("checkpoint")
    times = {(name, what): [2.0] for name in ("ours", "DCP save", "DCP async_save")
             for what in checkpoint.COLUMNS}  # fmt: skip
    times["DCP save", "blocked"] = [4.0, 8.0, 100.0]
    for floor in (checkpoint.MEMCPY, checkpoint.TORCH_COPY):
        times[floor, "blocked"] = [1.0]
    times[checkpoint.WRITE, "total"] = times[checkpoint.DIRECT, "total"] = [4.0]
    for what in checkpoint.COLUMNS[2:]:
        times[checkpoint.READ, what] = [2.0]
    ours = dict(gib=1.0, tensor_mib=64.0, repeats=3, ways=["ours", "DCP save"])
    made = checkpoint.result(times, [1.0, 3.0, 9.0], [], Namespace(**ours))
    found = {t.what: t.value for t in made.targets}
    assert found["blocked / memmove"] == 2.0
    assert found["blocked / DCP async_save"] == 1.0
    assert found["total / write + fsync"] == 0.5
    assert found["compared, at the first save"] == 3.0
    made = checkpoint.result(
        times, [1.0], [], Namespace(**ours | {"ways": ["DCP save"], "gib": 4.0})
    )
    assert (made.targets, made.about.title) == ((), "Checkpoints of 4 GiB")


def test_submission_is_told_above_the_floor():
    """Both times of ours are held against bare sbatch; what has no launcher has no such time."""
    submit = driver("submit")
    timings = {
        "bare sbatch --array": [submit.Timing(0.5, None)],
        submit.OURS: [submit.Timing(2.0, 1.0), submit.Timing(4.0, 2.0)],
    }
    helps = {"status --help": [90.0], "run --help": [100.0, 120.0, 99.0]}
    idle = {"without": [300.0, 320.0], "with": [315.0], "click": [40.0], **helps}
    made = submit.result(timings, idle, "", 2)
    assert [t.value for t in made.targets] == [1.0, 2.5, 5.0, 100.0]
    bare, ours = made.tables[0].rows
    assert bare[2] == "" and ours[3] == Figure(2.5, 2.5, 2.5, 1)
    assert made.tables[0].texts()[1][3] == "+2.50"


def test_runs_on_the_kernels_nfs_have_a_column_for_each_mount():
    """A figure that one of them did not come to is left out; what did not hold is told."""
    kernel_nfs = driver("kernel_nfs")
    report = kernel_nfs.runs.Report
    reports = [
        report("vers=3", {"start": 2.0}, problems=["audit: exit code 1"]),
        report("vers=4.2", {"start": 3.0, "join": 1.0}),
    ]
    made = kernel_nfs.run_table(reports)
    assert [column.name for column in made.columns[1:]] == ["vers=3", "vers=4.2"]
    assert made.texts() == [
        ["start", "2.0", "3.0"],
        ["join", "", "1.0"],
        ["what did not hold", "audit: exit code 1", "nothing"],
    ]


def write_run(folder: Path, entries: list[tuple[int, str]], terms: list[int]) -> None:
    """A run's entries, by their term and leader, and the terms of its lines of progress."""
    (folder / "rdzv").mkdir()
    for number, (term, task) in enumerate(entries, 1):
        body = json.dumps({"term": term, "leader": {"task": task, "attempt": 0}})
        (folder / "rdzv" / f"entry.{number}.json").write_text(json.dumps({"entry": body}))
    lines = [json.dumps({"term": term}) for term in terms]
    (folder / "progress.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("entries", "terms", "problem"),
    [
        ([(1, "7_0"), (1, "7_0"), (2, "7_1")] + [(2, "7_1")] * 8, [1, 1, 2], None),
        ([(1, "7_0"), (1, "7_1")], [1], "term 1 is led by"),
        ([(2, "7_1"), (1, "7_0")], [1], "terms go back"),
        ([(1, "7_0"), (2, "7_1")], [2, 1, 1, 1], "3 lines of progress.jsonl"),
        ([], [1], "there are no entries"),
    ],
)
def test_a_split_leadership_on_the_kernels_nfs_is_found(tmp_path, entries, terms, problem):
    """Entries of a term are by one leader, in order of number; progress is of one at a time."""
    write_run(tmp_path, entries, terms)
    found = facts.split(str(tmp_path))
    assert len(found) == (problem is not None)
    assert problem is None or found[0].startswith(problem)


def test_a_line_of_progress_that_was_cut_short_shows_nothing(tmp_path):
    """Its writer was killed, and the next leader went on behind it."""
    write_run(tmp_path, [(1, "7_0"), (2, "7_1")], [1, 2])
    lines = (tmp_path / "progress.jsonl").read_text().splitlines()
    (tmp_path / "progress.jsonl").write_text("\n".join([lines[0], '{"epo', lines[1]]))
    assert facts.split(str(tmp_path)) == []


# ---- a folder shared as by NFS ------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder():
    """The script."""
    return driver("shared_folder")


def test_what_nfs_costs_is_told_beside_the_local_disk(folder):
    """A save by the difference of the medians, an end by the longest; wrong words are counted."""
    measured = folder.Measured(
        saves={
            "local disk": [folder.ends.Course([0.1, 0.2, 0.1], [1.0, 1.0, 9.0], 2.0, 3.0)],
            "NFS": [folder.ends.Course([0.2, 0.2, 0.5], [4.0, 4.0, 4.0], 6.0, 7.0)],
        },
        ends={
            "local disk": [folder.ends.Course(end_s=1.0)],
            "NFS": [folder.ends.Course(end_s=2.0, problems=("exit code 1",))],
        },
    )
    made = folder.result(measured, folder.PARTS, 1)
    assert made.tables[0].texts()[:2] == [
        ["a save of 96 MiB: held up", "0.10 (0.10 to 0.20)", "0.20 (0.20 to 0.50)", "+0.10"],
        ["a save of 96 MiB: complete", "1.00 (1.00 to 9.00)", "4.00 (4.00 to 4.00)", "+3.00"],
    ]
    assert [t.met for t in made.targets] == [True, False, False, False]
    assert made.notes == ("NFS: exit code 1",)


def test_deaths_are_held_against_the_aim_and_joins_against_the_local_disk(folder):
    """One that did not recover misses the target, wherever that was."""
    death, join, lost = (
        folder.deaths.Measurement,
        folder.deaths.JOIN,
        "the leader's node is killed",
    )
    found = [
        death("a follower's node is killed", "local disk", "recovered", 0.5, 0.6),
        death("a follower's node is killed", "NFS", "recovered", 0.9, 0.8),
        death(lost, "local disk", "recovered", 1.0, 1.0),
        death(lost, "NFS", "no step"),
        death(join, "local disk", "recovered", 9.0, 1.0),
        death(join, "NFS", "recovered", 20.0, 2.5),
    ]
    made = folder.result(folder.Measured(deaths=found), ["deaths"], 1)
    assert made.tables[0].texts()[1] == [lost, "1.00", "1.00", "no step", ""]
    assert {t.what: t.verdict for t in made.targets} == {
        "a follower's node is killed: next step": "met, 10 % to spare",
        "the leader's node is killed: next step": "missed: 1 did not recover",
        "a node joins: pause, more than on the local disk": "missed by 50 %",
    }


def test_what_did_not_hold_is_told(folder):
    """Each as a note; a target is about NFS alone."""
    case, *_ = folder.faults.CASES
    found = [
        folder.faults.Measurement(case, "local disk", ("the audit: x",), 3.0, 2, 4),
        folder.faults.Measurement(case, "NFS", (), 4.0, 2, 4),
    ]
    made = folder.result(folder.Measured(faults=found), ["faults"], 1)
    assert [row[2:4] for row in made.tables[0].texts()] == [["0 of 1", "3.0"], ["1 of 1", "4.0"]]
    assert made.targets[0].met and made.notes == (f"local disk, {case}: the audit: x",)


def test_operations_are_told_a_minute_and_beyond_the_steady_ones(folder):
    """Those of a follower without its own log and ledger; watching is what it adds."""
    from collections import Counter

    operations = folder.operations

    def window(seconds, leader, follower, own, login, files=0):
        own_log = ("write", "run/tasks/N_N/agent.log")
        asked = {
            "login": Counter({("getattr", "run"): login}),
            "node1": Counter({("write", "run/rdzv/lease.N"): leader}),
            "node2": Counter({("getattr", "run"): follower, own_log: own}),
        }
        return operations.Window(seconds, asked, files)

    size = operations.Size(2, "node1", window(60, 120, 3, 10, 30), window(60, 120, 3, 10, 50))
    size.events["a save"] = window(30, 100, 20, 5, 15, 7)
    light = operations.Size(64, "node1", window(60, 120, 3, 10, 30), window(60, 120, 3, 10, 50))
    found = operations.Found([size, light], ["64 agents were not measured: memory."])
    made = folder.result(folder.Measured(operations=found), ["operations"], 1)
    steady = ["120", "3.0", "3.0", "10.0", "30", "20"]
    assert made.tables[0].texts() == [["2", *steady], ["64", *steady]]
    assert made.tables[1].texts() == [["a save", "2", "30", "40", "18", "58", "0", "7"]]
    assert [(t.value, t.met) for t in made.targets] == [(2.0, True), (3.0, True)] * 2
    assert "64 agents were not measured: memory." in made.notes
