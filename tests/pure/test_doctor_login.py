"""What the doctor makes of the facts of a login node, of its directory and of Slurm."""

from dataclasses import asdict, replace

import pytest

from hpc_elastic.config.schema import RendezvousSettings
from hpc_elastic.doctor import node_checks
from hpc_elastic.doctor.cluster import (
    ClusterFacts,
    check_cluster,
    parse_settings,
    settings_json,
    slurm_settings,
)
from hpc_elastic.doctor.findings import Verdict, worst_verdict
from hpc_elastic.doctor.probe_task import FolderFacts, HostFacts, collect_folder_facts
from hpc_elastic.errors import ConfigError
from hpc_elastic.slurm.parsing import Partition, Qos

GIB = 1 << 30
HOST = HostFacts(
    name="login1",
    limits={"nofile": [1024, 65536], "nproc": [30000, 30000], "memlock": [None, None]},
    clock_kept=True,
    python="/home/u/env/bin/python",
    python_fs="nfs4",
    missing_commands=[],
    cpus=8,
    memory_bytes=64 * GIB,
)
FOLDER = FolderFacts("/scratch/u", "lustre", 500 * GIB, 10**6, {}, 0.0)
GPU = Partition("gpu", "UP", True, 86400.0, 60, "REQUEUE", 16)
CPU = Partition("cpu", "UP", False, None, 0, "OFF", 4)
CLUSTER = ClusterFacts(
    config={
        "SLURM_VERSION": "24.11.5",
        "MaxArraySize": "1001",
        "MaxJobCount": "10000",
        "JobRequeue": "1",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "KillWait": "30 sec",
        "ProctrackType": "proctrack/cgroup",
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "MinJobAge": "300 sec",
    },
    partitions=(GPU, CPU),
    version="24.11.5",
    controllers="Slurmctld(primary) at ctl is UP",
    nodes={"idle": 12, "mixed": 4},
    test="to start now",
)


def with_config(**changes):
    """The good cluster, with other settings."""
    return replace(CLUSTER, config={**CLUSTER.config, **changes})


def findings(cluster=CLUSTER, *words):
    """What is said of a cluster, by check."""
    return {f.check: f for f in check_cluster(cluster, parse_settings(words))}


def test_nothing_is_said_against_a_good_cluster():
    """Login node, directory and Slurm."""
    all_of_them = [
        *node_checks.check_host(HOST),
        *node_checks.check_folder(FOLDER, RendezvousSettings()),
        *findings().values(),
    ]
    assert worst_verdict(all_of_them) is Verdict.OK, all_of_them
    assert len({f.check for f in all_of_them}) == len(all_of_them)


BAD_SETTINGS = [
    # cluster, words, check, verdict, text of the finding or its remedy
    (CLUSTER, ["partition=gpo"], "slurm.partition", "fail", "did you mean 'gpu'"),
    (replace(CLUSTER, partitions=(CPU,)), [], "slurm.partition", "fail", "no default"),
    (
        replace(CLUSTER, partitions=(replace(GPU, state="DOWN"),)),
        [], "slurm.partition", "fail", "gpu is DOWN",
    ),
    (CLUSTER, ["time=2-0"], "slurm.time", "fail", "launcher.time=1440 or less"),
    (CLUSTER, ["time=UNLIMITED"], "slurm.time", "fail", "at most 1 d"),
    (CLUSTER, ["time=5"], "slurm.time", "warn", "5 is asked for"),
    (CLUSTER, ["nodes=32"], "slurm.nodes", "fail", "nodes=16"),
    (CLUSTER, ["nodes=1:32"], "slurm.nodes", "warn", "nodes=1:16"),
    (
        replace(CLUSTER, nodes={"idle": 1, "down*": 15}),
        ["nodes=2"], "slurm.nodes", "warn", "15 of them out of service",
    ),
    (
        replace(CLUSTER, nodes={"idle": 1, "drained": 15}),
        ["nodes=2"], "slurm.nodes", "warn", "15 of them out of service",
    ),
    (replace(CLUSTER, refusal="launcher.qos='x'"), [], "slurm.submission", "fail", "launcher.qos"),
    (with_config(MaxArraySize="0"), [], "slurm.array", "fail", "MaxArraySize"),
    (with_config(MaxArraySize="4"), ["nodes=1:8"], "slurm.array", "warn", "several arrays"),
    (with_config(MaxArraySize=""), [], "slurm.array", "unknown", "not known"),
    (with_config(JobRequeue="0"), [], "slurm.requeue", "warn", "JobRequeue=0"),
    (
        replace(CLUSTER, partitions=(replace(GPU, preempt_mode="CANCEL"),)),
        [], "slurm.preemption", "warn", "CANCEL",
    ),
    (
        with_config(PreemptType="preempt/qos", PreemptMode="GANG,SUSPEND"),
        [], "slurm.preemption", "warn", "suspended task",
    ),
    (with_config(KillWait="2 sec"), ["partition=cpu"], "slurm.grace", "warn", "KillWait 2 s"),
    (CLUSTER, ["preempt_grace_s=300"], "slurm.grace", "fail", "preempt_grace_s=90 or less"),
    (
        with_config(ProctrackType="proctrack/pgid"),
        [], "slurm.processes", "fail", "proctrack/cgroup",
    ),
    (
        with_config(ProctrackType="proctrack/linuxproc"),
        [], "slurm.processes", "warn", "proctrack/cgroup",
    ),
    (
        replace(CLUSTER, accounting="Connection refused"),
        [], "slurm.accounting", "warn", "Connection refused",
    ),
    (with_config(MinJobAge="2 sec"), [], "slurm.memory", "warn", "MinJobAge=300"),
    (with_config(SLURM_VERSION="17.11.2"), [], "slurm.version", "warn", "older"),
    (
        replace(CLUSTER, controllers="Slurmctld(primary) at a is DOWN Slurmctld(backup) is UP"),
        [], "slurm.controller", "warn", "DOWN",
    ),
    (
        ClusterFacts(problems={"config": "no answer within 10 s"}),
        [], "slurm.controller", "fail", "10 s",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cluster", "words", "check", "verdict", "says"),
    BAD_SETTINGS,
    ids=[f"{row[2]}-{row[4]}" for row in BAD_SETTINGS],
)
def test_each_bad_setting_is_found_with_a_remedy(cluster, words, check, verdict, says):
    """One row for each; nothing else is held against the cluster more than that."""
    found = findings(cluster, *words)
    finding = found[check]
    assert finding.verdict.value == verdict
    assert says in finding.found + finding.remedy
    assert finding.why and (finding.remedy or verdict == "unknown")
    others = [f for f in found.values() if f.verdict is Verdict.FAIL and f is not finding]
    assert not others


def test_no_accounting_is_nothing_to_worry_about():
    """Runs do without it."""
    finding = findings(with_config(AccountingStorageType="accounting_storage/none"))
    assert finding["slurm.accounting"].verdict is Verdict.OK


def test_a_signal_at_preemption_is_told_where_jobs_are_preempted():
    """Not in a partition without preemption."""
    assert "slurm.user_signal" in findings(CLUSTER, "partition=gpu")
    assert "slurm.user_signal" not in findings(CLUSTER, "partition=cpu")


def test_the_signal_at_preemption_has_two_names():
    """As later releases call it, and as 22.05's manual does."""
    later = with_config(PreemptParameters="youngest_first,send_user_signal")
    earlier = with_config(SlurmctldParameters="preempt_send_user_signal,idle_on_node_suspend")
    assert "is not set" in findings()["slurm.user_signal"].found
    assert "--signal counts" in findings(later)["slurm.user_signal"].found
    assert "--signal counts" in findings(earlier)["slurm.user_signal"].found


STANDBY = Qos("standby", frozenset({"NoReserve"}), "requeue", 120.0)
NORMAL = Qos("normal", preempts=frozenset({"standby"}))
BY_QOS = {"PreemptType": "preempt/qos", "AccountingStorageEnforce": "associations,limits,qos"}


@pytest.mark.parametrize(
    ("changes", "config", "words"),
    [
        ({}, {}, "partitions whose preempted tasks are requeued: gpu"),
        ({}, {"PreemptType": "preempt/none"}, "no preemptible QOS or partition is known"),
        (
            {"qos": (STANDBY, NORMAL), "offered_qos": frozenset({"standby"})},
            BY_QOS,
            "QOS standby (NoReserve, REQUEUE, GraceTime 2 min)",
        ),
        ({"qos": (STANDBY, NORMAL)}, BY_QOS, "GraceTime 2 min), not offered to you"),
        (
            {"qos": (replace(STANDBY, flags=frozenset(), preempt_mode="cluster"), NORMAL)},
            {**BY_QOS, "PreemptMode": "CANCEL", "AccountingStorageEnforce": "none"},
            "QOS standby (CANCEL, GraceTime 2 min)",
        ),
        ({"problems": {"qos": "no slurmdbd"}}, {}, "sacctmgr does not answer: no slurmdbd"),
    ],
)
def test_where_idle_nodes_can_be_filled_is_reported(changes, config, words):
    """A QOS that others preempt, and whether the user may name it; or a partition."""
    found = findings(replace(with_config(**config), **changes))["slurm.standby"]
    assert words in found.found
    assert found.verdict is (Verdict.UNKNOWN if "problems" in changes else Verdict.OK)


BAD_HOSTS = [
    ({"missing_commands": ["sbatch"]}, "host.commands", "fail"),
    ({"python_fs": "ext4"}, "host.python", "warn"),
    ({"clock_kept": False}, "host.clock", "warn"),
    ({"clock_kept": None}, "host.clock", "unknown"),
    ({"limits": {**HOST.limits, "nofile": (1024, 1024)}}, "host.nofile", "warn"),
    ({"limits": {**HOST.limits, "nproc": (256, 256)}}, "host.nproc", "warn"),
    ({"limits": {**HOST.limits, "memlock": (65536, 65536)}}, "host.memlock", "ok"),
    ({"limits": {**HOST.limits, "as": (GIB, GIB)}}, "host.address_space", "warn"),
    ({"limits": {**HOST.limits, "cpu": (600, None)}}, "host.cpu_time", "ok"),
    ({"limits": {**HOST.limits, "cpu": (600, 600)}}, "host.cpu_time", "warn"),
]


@pytest.mark.parametrize(("changes", "check", "verdict"), BAD_HOSTS)
def test_what_is_wrong_with_a_login_node_is_found(changes, check, verdict):
    """Locked memory is the nodes' business."""
    found = {f.check: f for f in node_checks.check_host(replace(HOST, **changes))}
    assert found[check].verdict.value == verdict


def test_another_python_on_the_nodes_is_no_business_of_this_one():
    """That of a container, or of launcher.python."""
    local = replace(HOST, python_fs="ext4")
    assert "host.python" not in {f.check for f in node_checks.check_host(local, own_python=False)}


def test_little_locked_memory_matters_on_nodes_with_infiniband():
    """TCP does without it."""
    node = replace(HOST, limits={"memlock": [65536, 65536]})
    hosts = (node, replace(node, has_infiniband=True))
    said = (node_checks.check_process_environment("nodes", [host]) for host in hosts)
    plain, fast = ({f.check: f for f in each} for each in said)
    assert plain["nodes.memlock"].verdict is Verdict.OK
    assert fast["nodes.memlock"].verdict is Verdict.WARN


def judged(**changes):
    """What is said of a directory that differs from a good one, by check."""
    said = node_checks.check_folder(replace(FOLDER, **changes), RendezvousSettings())
    return {f.check: f for f in said}


BAD_FOLDERS = [
    ({"problems": {"write": "Permission denied"}}, "directory.write", "fail"),
    ({"problems": {"link": "Operation not supported"}}, "directory.link", "fail"),
    ({"problems": {"rename": "I/O error"}}, "directory.rename", "fail"),
    ({"problems": {"lock": "No locks available"}}, "directory.lock", "warn"),
    ({"fs": "tmpfs"}, "directory.shared", "warn"),
    ({"fs": ""}, "directory.shared", "warn"),
    ({"free_bytes": GIB}, "directory.space", "warn"),
    ({"free_files": 10}, "directory.space", "warn"),
    ({"clock_offset_s": -90.0}, "directory.clock", "warn"),
    ({"clock_offset_s": None}, "directory.clock", "unknown"),
    ({"fs": "nfs4", "options": {"soft": "", "timeo": "50"}}, "directory.mount", "warn"),
    ({"fs": "fuse.sshfs"}, "directory.mount", "unknown"),
]


@pytest.mark.parametrize(("changes", "check", "verdict"), BAD_FOLDERS)
def test_what_is_wrong_with_a_directory_is_found(changes, check, verdict):
    """One row for each thing that a file system may lack."""
    found = judged(**changes)
    assert found[check].verdict.value == verdict
    assert verdict == "unknown" or found[check].remedy


@pytest.mark.parametrize(
    ("fs", "options", "says"),
    [
        ("ext4", {}, "ext4: an opened file is fresh; the loss of the leader's node is noticed "
         "after 3 s"),
        ("nfs4", {"vers": "4.2", "hard": ""}, "nfs4 (vers=4.2, hard): an opened file is fresh; "
         "the loss of the leader's node is noticed after 3 s; names may be answered from memory "
         "for up to 60 s, so runs list folders"),
        ("nfs", {"vers": "3", "nocto": "", "acregmax": "5", "acdirmax": "7"}, "may be up to 7 s "
         "old, so runs query the server first; the loss of the leader's node is noticed after 3 s"),
        ("beegfs", {}, "beegfs: an opened file may be up to 1 s old; the loss of the leader's "
         "node is noticed after up to 4 s instead of 3 s"),
        ("oddfs", {}, "may be up to 60 s old (unknown, so assumed as on NFS with nocto); the loss "
         "of the leader's node is noticed after up to 63 s instead of 3 s"),
    ],
)  # fmt: skip
def test_what_a_mount_means_for_a_run_is_reported_in_figures(fs, options, says):
    """The file system, the options that matter, and how long a lost leader is not noticed."""
    assert says in judged(fs=fs, options=options)["directory.mount"].found


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"local_lock": "none"}, "locks (fcntl) work; hpc_elastic uses none"),
        ({"local_lock": "flock"}, "locks (fcntl) work; hpc_elastic uses none"),
        ({"nolock": "", "local_lock": "all"}, "on one node only (local_lock=all, nolock)"),
        ({"localflock": ""}, "on one node only (localflock)"),
    ],
)
def test_locks_that_hold_on_one_node_only_are_reported(options, says):
    """No run needs any; caches that several nodes write may."""
    finding = judged(options=options)["directory.lock"]
    assert says in finding.found and finding.verdict.value == "ok"


def test_a_real_directory_is_tried_out_and_left_as_it_was(tmp_path):
    """Links, renames and locks work here."""
    found = collect_folder_facts(tmp_path)
    assert found.problems == {} and found.fs and found.free_bytes > 0
    assert abs(found.clock_offset_s) < 1
    assert list(tmp_path.iterdir()) == []
    assert FolderFacts(**asdict(found)) == found


def test_settings_are_those_of_a_script():
    """Short keys are below launcher; forms and contradictions are refused as at a submission."""
    settings = parse_settings(
        ["+launcher=slurm", "nodes=1:16", "time=4:00:00", "gpus_per_node=2",
         "launcher.sbatch={reservation: night}", 'setup=["export TOKEN=xyzzy"]',
         "env={TOKEN: xyzzy}"]
    )  # fmt: skip
    launcher = slurm_settings(settings)
    assert (settings.nodes.max, launcher.time, launcher.gpus_per_node) == (16, "4:00:00", 2)
    assert slurm_settings(parse_settings(["partition=gpu,cpu"])).partition == "gpu,cpu"
    assert launcher.sbatch == {"reservation": "night"}
    assert "xyzzy" not in str(settings_json(settings))


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("partiton=gpu", "partition"),
        ("launcher=local", "only slurm"),
        ("partition", "KEY=VALUE"),
        ("time=soon", "launcher.time"),
        ("sbatch={", "Hydra: "),
    ],
)
def test_settings_that_cannot_work_are_refused(word, says):
    """With the key and the remedy."""
    with pytest.raises(ConfigError, match=says):
        parse_settings([word])
