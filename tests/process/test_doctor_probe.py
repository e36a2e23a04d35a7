"""What the doctor makes of what a probe has shown."""

import io
import json
import os
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from hpc_elastic.config.parse import restored
from hpc_elastic.config.schema import RendezvousSettings, SlurmSettings
from hpc_elastic.doctor import findings as findings_module
from hpc_elastic.doctor import node_checks, probe_job, probe_task
from hpc_elastic.doctor.allreduce_check import AllreduceResult
from hpc_elastic.doctor.cluster import parse_settings
from hpc_elastic.doctor.findings import Verdict, fail, ok, warn, worst_verdict
from hpc_elastic.doctor.probe_files import (
    ORPHANED,
    WORKER,
    ProbeFolder,
    signal_time,
    survival_times,
    write_json,
)
from hpc_elastic.doctor.probe_job import Evidence, NodeEnding, NodeReport, ProbeRun, read_reports
from hpc_elastic.doctor.probe_network import (
    CHANGES,
    LinkRace,
    MeetingResult,
    PeerResult,
    Visibility,
    count_race,
)
from hpc_elastic.doctor.probe_task import FolderFacts, HostFacts, NodeFacts
from hpc_elastic.slurm.job_state import TaskState

GIB = 1 << 30
OWN = {"python": "3.12.4", "hpc_elastic": "0.1.0", "torch": "2.6.0"}


def node(number, **changes):
    """The facts of a good node."""
    name = f"n{number}"
    host = HostFacts(name, {"nofile": [1024, None]}, True, "/env/python", "nfs4", [], 64, 512 * GIB)
    folder = FolderFacts("/scratch/u", "lustre", 500 * GIB, None, {}, 0.0)
    facts = NodeFacts(
        name, host, folder, dict(OWN), {"squeue": None, "scontrol": None}, 64, 4, 4,
        {"ib0": [f"10.0.0.{number}"], "eth0": [f"192.168.0.{number}"]}, "ib0", f"10.0.0.{number}",
    )  # fmt: skip
    return replace(facts, **changes)


def seen(number, **changes):
    """What one good node finds of another."""
    return replace(PeerResult(number, f"n{number}", f"10.0.0.{number}", "", 2e-4, 1e-3), **changes)


SEEN = Visibility(dict.fromkeys((*CHANGES, "path"), 0.01), 0.02)


def met(number, *, race=None, torn=False, waited_s=0.02, **times_s):
    """What a node has found that meets another good one."""
    watched = Visibility({**SEEN.times_s, **times_s}, waited_s, torn)
    return MeetingResult([seen(number)], [], watched, race or LinkRace(50))


def result(number, *, meeting=None, allreduce=None, **changes):
    """What a good task of two has measured."""
    other = 1 - number
    said = AllreduceResult(4.0, 4, {"gloo": 1e9, "nccl": 2e10}, {})
    return NodeReport(node(number, **changes), meeting or met(other), allreduce or said)


GOOD = Evidence(
    2,
    reports={0: result(0), 1: result(1)},
    notices={0: {"agent": 0.1, "worker": 0.1}, 1: {"agent": 0.2, "worker": None}},
    endings=[
        NodeEnding("requeue", "n0", {"agent": 29.9, "worker": 29.8}, back_on="n3", back_s=42.0),
        NodeEnding("cancel", "n1", {"agent": 30.0, "worker": 30.1}),
    ],
)


def findings(evidence, settings=None):
    """All that is said of a probe; where several have one name, the worst."""
    settings = settings or SlurmSettings(gpus_per_node=4)
    said = [
        *node_checks.check_nodes(evidence, settings, OWN),
        *node_checks.check_shared_folder(evidence, RendezvousSettings()),
        *node_checks.check_network(evidence),
        *node_checks.check_signals(evidence, 30.0),
    ]
    order = list(Verdict)
    ranked = sorted(said, key=lambda f: order.index(f.verdict), reverse=True)
    return {f.check: f for f in ranked}


def with_node(**changes):
    """The good probe, with another second node."""
    return replace(GOOD, reports={0: result(0), 1: result(1, **changes)})


def with_ending(index, **changes):
    """The good probe, with another end of a task."""
    endings = list(GOOD.endings)
    endings[index] = replace(endings[index], **changes)
    return replace(GOOD, endings=endings)


def test_nothing_is_said_against_a_good_probe():
    """And every part of it is said."""
    found = findings(GOOD)
    assert worst_verdict(found.values()) is Verdict.OK, [
        f for f in found.values() if f.verdict.value != "ok"
    ]
    assert {f.group for f in found.values()} == {"nodes", "network", "directory", "signals"}
    assert "ib0 10.0.0.0 on n0" in found["network.interface"].found
    assert "others there: eth0" in found["network.interface"].found
    assert "not the workers" in found["signals.notice"].found


CUT = MeetingResult([seen(0, problem="timed out", round_trip_s=None, clock_ahead_s=None,
                    others={"192.168.0.0": True})])  # fmt: skip
BAD = [
    # evidence, check, verdict, what is said
    (Evidence(2, waiting={0: "Priority", 1: "Priority"}), "nodes.start", "fail", "2 tasks of 2"),
    (replace(GOOD, waiting={2: "QOSMaxJobsPerUser"}), "nodes.start", "warn", "launcher.qos"),
    (Evidence(2, waiting={0: "PartitionTimeLimit"}), "nodes.start", "fail", "launcher.time"),
    (replace(GOOD, silent={2: "FAILED on n2: no python"}), "nodes.start", "fail", "no python"),
    (replace(GOOD, problem="squeue failed"), "nodes.start", "fail", "cut short"),
    (with_node(versions={**OWN, "torch": "2.5.0"}), "nodes.versions", "fail", "2.5.0 on n1"),
    (with_node(allreduce=AllreduceResult(problems={"torch": "no libcuda"})), "nodes.torch", "fail",
     "no libcuda"),
    (with_node(allreduce=AllreduceResult(95.0, 4, {}, {})), "nodes.torch", "warn", "95.0 s"),
    (with_node(slurm={"squeue": "not found"}), "nodes.slurm", "warn", "install Slurm's commands"),
    (with_node(slurm={"squeue": "Unable to contact"}), "nodes.slurm", "warn", "network.reach"),
    (replace(GOOD, outside={"n0": "not found"}), "nodes.slurm_outside", "warn", "not found"),
    (with_node(gpus_given=2, gpus_seen=2), "nodes.gpus", "fail",
     "asked for 4 on each node; n1: Slurm gives 2, the driver shows 2"),
    (with_node(gpus_given=None, gpus_seen=None), "nodes.gpus", "fail", "n1: Slurm gives none"),
    (with_node(gpus_given=0, gpus_seen=4), "nodes.gpus", "fail", "n1: Slurm gives none"),
    (with_node(gpus_given=8, gpus_seen=8), "nodes.gpus", "fail", "n1: Slurm gives 8"),
    (with_node(gpus_given=2, gpus_seen=2), "nodes.gpus", "fail", "sinfo -o '%P %G'"),
    (with_node(gpus_seen=2), "nodes.gpus", "fail", "n1: Slurm gives 4, the driver shows 2"),
    (with_node(gpus_seen=8), "nodes.gpus", "warn", "ConstrainDevices"),
    (with_node(cpus_given=8), "nodes.cpus", "warn", "fewer than 4 for each GPU"),
    (with_node(allreduce=AllreduceResult(4.0, 0, {"gloo": 1e9})), "nodes.gpus", "fail",
     "torch does not see"),
    (
        with_node(host=replace(node(1).host, cpus=1)),
        "nodes.cpus", "warn", "bound to a single CPU",
    ),
    (with_node(host=replace(node(1).host, clock_kept=False)), "nodes.clock", "warn", "of n1"),
    (
        with_node(folder=replace(node(1).folder, problems={"link": "Not supported"})),
        "directory.nodes", "fail", "on n1: hard links",
    ),
    (with_node(folder=replace(node(1).folder, problems={"write": "Read-only"})), "directory.nodes",
     "fail", "on n1: /scratch/u cannot be written to: Read-only"),
    (with_node(folder=replace(node(1).folder, fs="nfs4", options={"soft": ""})),
     "directory.node_mounts", "warn", "nfs4 (soft): an opened file is fresh"),
    (with_node(folder=replace(node(1).folder, fs="oddfs")), "directory.node_mounts", "unknown",
     "after up to 63 s instead of 3 s on n1"),
    (with_node(folder=replace(node(1).folder, fs="oddfs")), "directory.node_mounts", "unknown",
     "noticed after 3 s on n0"),
    (with_node(meeting=met(0, race=LinkRace(50, both=3))), "directory.election", "fail",
     "of 100 names that two nodes linked at once, both nodes won 3"),
    (with_node(meeting=met(0, race=LinkRace(50, neither=1))), "directory.election", "fail",
     "no node won 1"),
    (with_node(meeting=met(0, race=LinkRace(50, differ=2))), "directory.election", "fail",
     "different winners of 2"),
    (with_node(meeting=met(0, race=LinkRace(50, both=3))), "directory.election", "fail",
     "choose another directory"),
    (with_node(meeting=met(0, removed=None, waited_s=20.0)), "directory.delay", "fail",
     "on n1 a removal was not seen within 20 s"),
    (with_node(meeting=met(0, **dict.fromkeys(CHANGES), waited_s=20.0)), "directory.delay", "fail",
     "on n1 nothing was seen within 20 s"),
    (with_node(meeting=met(0, created=12.0)), "directory.delay", "warn", "a new file after 12 s"),
    (replace(GOOD, blind={0: "n0", 1: "n1"}, reports={}), "directory.delay", "fail",
     "does not appear on n0, n1"),
    (with_node(meeting=met(0, torn=True)), "directory.content", "fail", "n1 read a part"),
    (replace(GOOD, reports={
        i: result(i, meeting=MeetingResult([seen(1 - i)], problem="with n: EIO")) for i in (0, 1)
     }), "directory.election", "unknown", "n1 with n: EIO"),
    (with_node(problem="no address"), "network.interface", "fail", "n1: no address"),
    (with_node(interface="eth0"), "network.interface", "warn", "not the same"),
    (with_node(meeting=CUT), "network.reach", "fail", "n1 cannot reach n0 at 10.0.0.0: timed out"),
    (with_node(meeting=CUT), "network.reach", "fail", "but at 192.168.0.0"),
    (with_node(meeting=MeetingResult([], [0])), "network.reach", "fail", "n1 found no file of n0"),
    (with_node(meeting=MeetingResult([seen(0, clock_ahead_s=-75.0)], [])), "network.clocks",
     "warn", "75 s"),
    (with_node(allreduce=AllreduceResult(4.0, 4, {}, {"gloo": "timed out"})), "network.gloo",
     "fail", "n1: ti"),
    (replace(GOOD, reports={0: result(0, meeting=MeetingResult())}), "network.reach", "unknown",
     "only n0 was tried"),
    (replace(GOOD, notices={0: {"agent": None, "worker": None}}), "signals.notice", "fail",
     "n0"),
    (with_ending(0, refused="disabled"), "signals.requeue", "warn", "disabled"),
    (with_ending(0, back_on=None), "signals.requeue", "fail", "did not return"),
    (with_ending(0, back_on=None, waits="Priority"), "signals.requeue", "unknown", "Priority"),
    (with_ending(1, lived_s={"agent": None, "worker": None}), "signals.cancel_grace", "fail",
     "no SIGTERM"),
    (with_ending(1, lived_s={"agent": 5.0, "worker": 5.0}), "signals.cancel_grace", "warn",
     "launcher.preempt_grace_s=5"),
    (with_ending(1, capped=True), "signals.cancel_end", "unknown", "longer than the probe"),
    (with_ending(1, orphaned=True), "signals.cancel_end", "fail", "proctrack/cgroup"),
    (replace(GOOD, leftovers=["7_1"]), "signals.leftovers", "warn", "7_1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("evidence", "check", "verdict", "says"), BAD, ids=[f"{row[1]}-{row[3]}" for row in BAD]
)
def test_each_fault_of_nodes_and_network_is_found(evidence, check, verdict, says):
    """One row for each, with what is said of it and why it matters."""
    finding = findings(evidence)[check]
    assert finding.verdict.value == verdict
    assert says in finding.found + finding.remedy
    assert finding.remedy or verdict == "unknown"


@pytest.mark.parametrize(
    ("faulty", "check"),
    [
        ({"meeting": met(1, race=LinkRace(50, both=3))}, "directory.election"),
        ({"meeting": met(1, torn=True)}, "directory.content"),
        ({"allreduce": AllreduceResult(problems={"torch": "no libcuda"})}, "nodes.torch"),
    ],
)
def test_each_of_several_tasks_of_a_node_counts(faulty, check):
    """The next one of the same node, which has found nothing wrong, hides no fault."""
    reports = {0: result(0, **faulty), 1: result(1), 2: result(0)}
    assert findings(replace(GOOD, reports=reports))[check].verdict is Verdict.FAIL


def test_many_tasks_that_fail_alike_are_not_all_listed():
    """A few, and how many more."""
    silent = {i: "FAILED" for i in range(60)}
    said = list(node_checks.check_nodes(Evidence(60, silent=silent), SlurmSettings(), OWN))
    assert len(said) == 3 and "57 more tasks" in said[-1].found


def test_tasks_on_one_machine_show_nothing_of_the_network_and_the_shared_folder():
    """Where a run has shares of nodes, two of its tasks may be on one."""
    alone = {0: MeetingResult([seen(1, host="n0")]), 1: MeetingResult([seen(0)])}
    both = {i: NodeReport(node(0), alone[i], GOOD.reports[i].allreduce) for i in (0, 1)}
    found = findings(replace(GOOD, reports=both))
    not_tried = ("network.reach", "directory.delay", "directory.election", "directory.content")
    assert {found[check].verdict.value for check in not_tried} == {"unknown"}
    assert "all tasks were on n0" in found["directory.election"].found
    assert "exclusive=true" in found["network.reach"].remedy


def test_names_that_are_answered_from_memory_cost_nothing():
    """As by default on NFS: a path is asked for in vain, and a folder that is listed is fresh."""
    nfs = {i: result(i, folder=replace(node(i).folder, fs="nfs4"), meeting=met(1 - i, path=None,
           waited_s=3.1)) for i in (0, 1)}  # fmt: skip
    found = findings(replace(GOOD, reports=nfs))
    assert worst_verdict(found.values()) is Verdict.OK
    assert (
        "by its path alone a new file was not seen within 3.1 s (names are kept for up to 60 s)"
        in (found["directory.delay"].found)
    )


def test_the_winner_of_a_race():
    """Each round has one winner, whom both nodes read afterwards, as far as they read anything."""
    won = [(True, False), (False, True), (True, True), (False, False)]
    winners = [["a", "b", "a", ""], ["a", "b", "b", "a"]]
    assert count_race(won, winners) == LinkRace(4, both=1, neither=1, differ=1)


def test_gpus_that_nobody_asked_for():
    """None there is fine; some that are given are named."""
    none = {
        i: result(i, gpus_given=None, gpus_seen=None, allreduce=AllreduceResult(4.0))
        for i in (0, 1)
    }
    assert (
        findings(replace(GOOD, reports=none), SlurmSettings())["nodes.gpus"].verdict.value == "ok"
    )
    there = {
        i: result(i, gpus_given=None, gpus_seen=None, gpus_there=4, allreduce=AllreduceResult(4.0))
        for i in (0, 1)
    }
    found = findings(replace(GOOD, reports=there), SlurmSettings())["nodes.gpus"]
    assert found.verdict.value == "warn" and "partition has 4" in found.found
    shown = {i: result(i, gpus_given=None, gpus_seen=4) for i in (0, 1)}
    found = findings(replace(GOOD, reports=shown), SlurmSettings())["nodes.gpus"]
    assert found.verdict.value == "warn" and "gpus_per_node" in found.remedy


@pytest.mark.parametrize(
    ("asked_for", "given", "verdict"),
    [
        (2, 2, "ok"),
        (2, None, "fail"),
        ("a100:2", 2, "ok"),
        ("a100:2", 1, "fail"),
        ("a100:2", 4, "fail"),
        ("a100:2,h100:1", 3, "ok"),
        ("a100:2,h100:1", 2, "fail"),
        ({"gres": "gpu:a100:2"}, 2, "ok"),
        ({"gres": "gpu:a100:2"}, 1, "fail"),
    ],
)
def test_gpus_that_are_given_are_those_asked_for(asked_for, given, verdict):
    """As many on every node, of all types together; a mapping is launcher.sbatch."""
    reports = {i: result(i, gpus_given=given, gpus_seen=given) for i in (0, 1)}
    asked = {"sbatch" if isinstance(asked_for, dict) else "gpus_per_node": asked_for}
    found = findings(replace(GOOD, reports=reports), SlurmSettings(**asked))
    assert found["nodes.gpus"].verdict.value == verdict
    assert verdict == "ok" or "n0: Slurm gives" in found["nodes.gpus"].found


@pytest.mark.parametrize(
    ("words", "longest_s", "minutes"),
    [([], None, "10"), (["time=2"], None, "2"), (["time=60"], 180.0, "3"), ([], 30.0, "1")],
)
def test_a_probe_asks_for_no_more_time_than_it_may(words, longest_s, minutes):
    """Ten minutes, the run's time, or the partition's, whichever is least."""
    assert probe_job.time_limit(parse_settings(words), longest_s) == minutes


def test_a_report_reads_back():
    """From the nodes to the login node, and into the JSON of a bug report."""
    text = json.dumps(asdict(GOOD.reports[0]))
    assert restored(NodeReport, json.loads(text)) == GOOD.reports[0]


def test_what_another_version_has_measured_is_named(tmp_path):
    """As where a container has its own: its results cannot be read, and the others are kept."""
    place = ProbeFolder(tmp_path)
    raw = asdict(GOOD.reports[0])
    write_json(place.task_file("node", 0), raw)
    write_json(place.task_file("node", 1), {**raw, "facts": {**raw["facts"], "colour": "red"}})
    write_json(place.task_file("node", 2), {"allreduce": None})
    found, unreadable = read_reports(place, [0, 1, 2, 3])
    assert found == {0: GOOD.reports[0]} and set(unreadable) == {1, 2}
    assert "hpc_elastic 0.1.0, which is not" in unreadable[1]


def test_how_long_a_process_lived_after_sigterm(tmp_path):
    """From its first SIGTERM to its last heartbeat; a signal that never came is None."""
    place = ProbeFolder(tmp_path)
    lines = [{"signal": "SIGTERM", "time": 100.0}, {"signal": "SIGTERM", "time": 105.0}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    place.process_file("agent", 0, "signals").write_text(text)
    place.process_file("agent", 0, "beat").write_text("00000000110.500000")
    assert survival_times(place, 0) == {"agent": 10.5, "worker": None}
    assert signal_time(place, "agent", 0, "SIGUSR2") is None
    assert signal_time(place, WORKER, 0, ORPHANED) is None


class Client:
    """Slurm's commands for a probe whose tasks have not started, or are as given."""

    timeout_s = 1.0

    def __init__(self, *running):
        self.states, self.cancelled = {f"7_{i}": "RUNNING" for i in running}, []

    def tasks(self, _):
        """Return the states of the tasks."""
        return {
            name: TaskState(name, state, node=f"n{name[-1]}") for name, state in self.states.items()
        }

    def cancel(self, names):
        """End all tasks."""
        self.cancelled += names
        self.states.clear()

    kill = cancel


def probe_of(client, folder, *, num_nodes=1, report=lambda _: None):
    """Return a probe that was submitted to a client."""
    place = ProbeFolder(folder / "probe")
    return ProbeRun("7", num_nodes, place, client, report, notice="USR2", kill_wait_s=1.0)


def test_a_probe_is_cancelled_when_the_reader_of_its_output_has_ended(tmp_path):
    """`doctor --probe | head`."""

    def say(_):
        raise BrokenPipeError

    client = Client()
    with pytest.raises(BrokenPipeError):
        probe_of(client, tmp_path, report=say).run(60.0)
    assert client.cancelled == ["7"]


def test_a_probe_that_cannot_start_is_reported_with_the_other_findings(tmp_path):
    """On a full disk: earlier facts are not lost, and without a file the tasks are cancelled."""
    client = Client(0)
    found = probe_of(client, tmp_path / "gone").run(60.0)
    assert "gone" in found.problem and client.cancelled == ["7"] and found.leftovers == []


def test_a_task_that_does_not_see_new_files_differs_from_one_that_has_failed(tmp_path, monkeypatch):
    """It runs, and has published its address: the cause is the directory, not Python."""
    monkeypatch.setattr(probe_job, "_MEASURE_S", 0.0)
    probe = probe_of(Client(0, 1), tmp_path, num_nodes=2)
    (tmp_path / "probe").mkdir()
    write_json(tmp_path / "probe" / "peer-0.json", {})
    found = probe.run(60.0)
    assert found.blind == {0: "n0"} and found.silent.keys() == {1}


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_says_what_to_do_and_failures_come_first(width):
    """No line is wider than the terminal, nor than what is easy to read."""
    rows = [
        ok("host.commands", "fine"),
        warn("slurm.grace", "short " * 30, "saving takes time", "ask the admin"),
        fail("network.reach", "n1 cannot reach n0", "agents meet", "launcher.interface"),
    ]
    console = Console(file=io.StringIO(), width=width)
    findings_module.print_findings(rows, console, probed=False)
    text = console.file.getvalue()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= min(width, 120)
    assert text.index("Login node") < text.index("Network")
    _, _, summary = text.partition("1 passed, 1 failed, 1 warning")
    assert summary.index("network.reach") < summary.index("slurm.grace")
    assert "do launcher.interface" in " ".join(summary.split())
    assert "--probe" in summary


@pytest.mark.parametrize(
    ("uid", "answer", "lingers", "expected"),
    [
        (1000, "b true\n", False, True),
        (1000, "b false\n", False, False),
        (1000, "", False, False),
        (1000, "b true\n", True, False),
        (999, "b true\n", False, False),
    ],
)
def test_nodes_that_clear_the_shared_memory_are_found(
    monkeypatch, tmp_path, uid, answer, lingers, expected
):
    """As systemd-logind does for a user who does not linger, and is no system user."""
    (tmp_path / "busctl").write_text(f"#!/bin/sh\nprintf '{answer}'\n")
    (tmp_path / "busctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(os, "getuid", lambda: uid)
    monkeypatch.setattr(probe_task, "user", lambda: "me")
    monkeypatch.setattr(probe_task, "_LINGER", tmp_path)
    if lingers:
        (tmp_path / "me").touch()
    assert probe_task.clears_shared_memory() == expected
    found = findings(with_node(clears_shm=expected))["nodes.shared_memory"]
    assert (found.verdict is Verdict.WARN) == expected
    assert ("RemoveIPC" in found.found) == expected
