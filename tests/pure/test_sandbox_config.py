"""The sandbox's pure parts: the files its daemons read, and what is decided without effects."""

import errno
import json
import os
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from slurm_sandbox import MissingPackagesError, SandboxConfig, SandboxError, nfs, pytest_plugin
from slurm_sandbox import config as texts
from slurm_sandbox.config import Layout, client_options
from slurm_sandbox.daemons import is_available, needs_resume
from slurm_sandbox.network import build_commands, choose_octet, drop_program
from slurm_sandbox.processes import (
    Process,
    identify_process,
    is_alive,
    kill_process,
    send_signal,
)
from slurm_sandbox.releases import (
    apt_conf,
    candidate_version,
    check_requirements,
    install_command,
    missing_packages,
)
from slurm_sandbox.state import State, from_text, to_text

CONFIG = SandboxConfig(name="golden", nodes=2)
LAYOUT = Layout("golden", Path("/run/sandbox/golden"), octet=77, port=20130)

SLURM_CONF = """\
ClusterName=hxs_golden
SlurmctldHost=ctl(10.77.0.1)
SlurmctldPort=20130
SlurmdPort=6818
CommunicationParameters=NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket=/run/sandbox/golden/munge/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation=/run/sandbox/golden/state
SlurmdSpoolDir=/run/sandbox/golden/spool/%n
SlurmctldPidFile=/run/sandbox/golden/pid/slurmctld.pid
SlurmdPidFile=/run/sandbox/golden/pid/%n.pid
SlurmctldLogFile=/run/sandbox/golden/log/slurmctld.log
SlurmdLogFile=/run/sandbox/golden/log/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=5
KillWait=5
MinJobAge=300
MaxArraySize=1001
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
GresTypes=gpu
NodeName=node1 NodeAddr=10.77.0.11 CPUs=8 RealMemory=65536 Gres=gpu:2 State=UNKNOWN
NodeName=node2 NodeAddr=10.77.0.12 CPUs=8 RealMemory=65536 Gres=gpu:2 State=UNKNOWN
PartitionName=low Nodes=node1,node2 Default=YES MaxTime=INFINITE PriorityTier=1 \
PreemptMode=REQUEUE GraceTime=5
PartitionName=cancel Nodes=node1,node2 MaxTime=INFINITE PriorityTier=1 \
PreemptMode=CANCEL GraceTime=5
PartitionName=short Nodes=node1,node2 MaxTime=30 PriorityTier=1 \
PreemptMode=REQUEUE GraceTime=5
PartitionName=high Nodes=node1,node2 MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""
GRES_CONF = """\
Name=gpu File=/run/sandbox/golden/dev/gpu0
Name=gpu File=/run/sandbox/golden/dev/gpu1
"""
HOSTS = """\
127.0.0.1 localhost
::1 localhost ip6-localhost ip6-loopback
10.77.0.1 ctl laptop
10.77.0.11 node1
10.77.0.12 node2
"""


def test_slurm_conf():
    """The whole slurm.conf of the default settings, with two nodes."""
    assert texts.slurm_conf(CONFIG, LAYOUT) == SLURM_CONF


def test_gres_conf_and_hosts():
    """Every GPU has a device of its own; every address has a name."""
    assert texts.gres_conf(CONFIG, LAYOUT) == GRES_CONF
    assert texts.hosts(CONFIG, LAYOUT, "laptop") == HOSTS


def test_without_gpus_nothing_mentions_them():
    """Zero GPUs leave no trace in slurm.conf and an empty gres.conf."""
    config = replace(CONFIG, gpus_per_node=0)
    assert "gpu" not in texts.slurm_conf(config, LAYOUT).lower()
    assert texts.gres_conf(config, LAYOUT) == ""


def test_settings_reach_slurm_conf():
    """Grace time, array size, accounting and own lines end up in slurm.conf."""
    config = replace(
        CONFIG, grace_s=9, max_array_size=5, accounting=True, extra_lines=("TreeWidth=2",)
    )
    lines = texts.slurm_conf(config, LAYOUT).splitlines()
    assert "MaxArraySize=5" in lines
    assert any(line.endswith("GraceTime=9") for line in lines)
    assert "AccountingStoragePort=20131" in lines
    assert lines[-1] == "TreeWidth=2"


def test_hosts_never_gives_a_taken_name_to_the_machine():
    """A machine that is itself called node1 does not shadow the sandbox's node1."""
    assert "10.77.0.1 ctl\n" in texts.hosts(CONFIG, LAYOUT, "node1")


def test_cgroups_are_left_alone():
    """Each Slurm gets the plugin that touches no cgroup, by the version of `slurmd -V`."""
    assert texts.cgroup_conf(texts.parse_version("slurm-wlm 22.05.8")) == "CgroupPlugin=cgroup/v1\n"
    assert texts.cgroup_conf(texts.parse_version("slurm 24.11.5")) == "CgroupPlugin=disabled\n"
    text = texts.cgroup_conf((26, 5), constrain_devices=True)
    assert text == "CgroupPlugin=cgroup/v1\nConstrainDevices=yes\n"
    with pytest.raises(ValueError, match="no version"):
        texts.parse_version("")


def test_nsswitch_keeps_users_and_drops_dns():
    """Users are looked up as on the machine, hosts in files alone."""
    text = texts.nsswitch_conf("passwd: files sss\nhosts: files dns\n")
    assert text == "passwd: files sss\nhosts: files\n"


@pytest.mark.parametrize("name", ["", "A", "a-b", "1a", "a" * 21, "../x"])
def test_bad_names_are_refused(name):
    """A name that cannot be a path and part of a namespace's name is refused."""
    with pytest.raises(ValueError, match="sandbox name"):
        SandboxConfig(name=name)


@pytest.mark.parametrize(
    "change", [{"nodes": 0}, {"nodes": 201}, {"grace_s": -1}, {"cpus_per_node": 0}]
)
def test_bad_settings_are_refused(change):
    """Settings out of range are refused before anything is started."""
    with pytest.raises(ValueError, match="must"):
        SandboxConfig(**change)


def test_nodes_are_given_by_number_or_name():
    """2, "2" and "node2" are one node; node3 of two is none."""
    assert [texts.node_name(node, CONFIG) for node in (2, "2", "node2")] == ["node2"] * 3
    for absent in ("node3", "0", "", "node"):
        with pytest.raises(ValueError, match="no node"):
            texts.node_name(absent, CONFIG)


def test_namespaces_of_two_sandboxes_differ():
    """No sandbox's prefix begins another's, and links keep to the kernel's 15 characters."""
    other = replace(LAYOUT, name="golden2")
    assert not other.switch.startswith(LAYOUT.namespace_prefix)
    assert len(replace(LAYOUT, octet=191).host_leg) <= 15


def test_network_is_deterministic_and_avoids_what_is_taken():
    """A name has its network; if that is taken, the next one; a wide route is overlooked."""
    first = choose_octet("default", [])
    assert choose_octet("default", []) == first
    taken = IPv4Network(f"10.{first}.0.0/24")
    assert choose_octet("default", [taken]) != first
    assert choose_octet("default", [IPv4Network("10.0.0.0/8")]) == first
    assert choose_octet("default", [IPv4Network("10.0.0.0/8"), taken]) != first


def test_no_free_network_is_an_error():
    """When all networks are taken, it is an error that names the range."""
    with pytest.raises(SandboxError, match="no free"):
        choose_octet("default", [IPv4Network(f"10.{octet}.0.0/24") for octet in range(256)])


def test_every_node_gets_loopback_and_eth0():
    """The network's commands bring up lo and eth0 with the node's address."""
    commands = [" ".join(command) for command in build_commands(CONFIG, LAYOUT)]
    for node, address in (("node1", "10.77.0.11"), ("node2", "10.77.0.12")):
        assert f"ip -n hxs-golden-{node} link set lo up" in commands
        assert f"ip -n hxs-golden-{node} addr add {address}/24 dev eth0" in commands


@pytest.mark.parametrize(
    ("absent", "wanted", "packages"),
    [
        ({"slurmctld", "munged"}, {}, ("slurm-wlm", "munge")),
        ({"slurmctld", "munged", "ip"}, {"slurm": "24.11"}, ("munge", "iproute2")),
        ({"slurmdbd", "mariadbd"}, {"accounting": True}, ("slurmdbd", "mariadb-server")),
        ({"slurmdbd"}, {}, ()),
        ({"gcc", "/usr/include/stdio.h"}, {"nfs": True}, ("gcc", "libc6-dev")),
    ],
)
def test_missing_packages_are_named_with_the_command(absent, wanted, packages):
    """Nothing is installed silently: the error names the packages and what installs them."""

    def which(name):
        return None if name in absent else name

    assert missing_packages(which=which, **wanted) == packages
    if packages:
        with pytest.raises(MissingPackagesError) as caught:
            check_requirements(which=which, **wanted)
        assert caught.value.packages == packages
        assert " ".join(install_command(packages)) in str(caught.value)


def test_a_shared_folder_is_bound_where_it_is():
    """Each client's mount takes the folder's place; without a folder nothing does."""
    config = replace(CONFIG, nfs="/srv/my runs")
    line = "[ login = ctl ] || mount --bind /run/sandbox/golden/nfs/login '/srv/my runs'"
    assert texts.bind_line(config, LAYOUT, "login") == line
    assert texts.bind_line(CONFIG, LAYOUT, "login") == ""


def test_state_survives_its_file():
    """What is read back is what was written."""
    state = State(replace(CONFIG, extra_lines=("TreeWidth=2",)), LAYOUT)
    state = state.with_process("node1", Process(pid=12, start_ticks=34))
    assert from_text(to_text(state)) == state


def test_a_sandbox_of_an_earlier_version_can_be_taken_down():
    """A setting that its file lacks has its default."""
    content = json.loads(to_text(State(CONFIG, LAYOUT)))
    del content["config"]["gpus"]
    assert from_text(json.dumps(content)) == State(CONFIG, LAYOUT)


def test_a_recycled_pid_is_never_signalled():
    """A process is its pid and its start: with another start it is gone, and is not signalled."""
    myself = identify_process(os.getpid())
    assert myself is not None
    assert is_alive(myself)
    former = replace(myself, start_ticks=myself.start_ticks - 1)
    assert not is_alive(former)
    assert not send_signal(former, 9)
    assert kill_process(former)


@pytest.mark.parametrize(
    ("node_state", "available", "resume"),
    [
        ("idle", True, False),
        ("allocated", True, False),
        ("idle*", False, False),
        ("unknown", False, False),
        ("down*", False, True),
        ("drained", False, True),
    ],
)
def test_node_states(node_state, available, resume):
    """A node is available, or has to be resumed, or neither."""
    assert is_available(node_state) is available
    assert needs_resume(node_state) is resume


def test_without_a_sandbox_tests_skip_loudly_and_fail_in_ci():
    """A user without root sees skips with the reason; CI never passes without a real Slurm."""
    with pytest.raises(pytest.skip.Exception, match=r"NO REAL SLURM.*needs root"):
        pytest_plugin.refuse("needs root", in_ci=False)
    with pytest.raises(pytest.fail.Exception, match=r"NO REAL SLURM.*needs root"):
        pytest_plugin.refuse("needs root", in_ci=True)


def test_the_ordinary_user_is_added_to_the_machines_users():
    """With a home in the sandbox, under an id of its own."""
    passwd = texts.passwd("root:x:0:0::/root:/bin/sh\n", LAYOUT).splitlines()
    assert passwd[0].startswith("root:")
    assert passwd[1].split(":")[5] == "/run/sandbox/golden/home"
    assert texts.group("root:x:0:\n").splitlines()[1] == "hxsuser:x:61234:"


def test_a_folder_below_a_closed_one_is_opened_and_nothing_beside_it():
    """What is closed is hidden behind an empty folder; what can be reached needs no line."""
    lines = texts.open_lines(LAYOUT, ["/root/py", "/srv/x"], lambda folder: folder != Path("/root"))
    assert lines == [
        "mkdir -p /run/sandbox/golden/open/0",
        "mount --bind /root /run/sandbox/golden/open/0",
        "mount -t tmpfs -o mode=755 tmpfs /root",
        "mkdir -p /root/py",
        "mount --bind /run/sandbox/golden/open/0/py /root/py",
    ]


def test_apt_is_asked_in_a_configuration_of_its_own():
    """The way to the mirror is the machine's; sources, lists and packages are not."""
    text = apt_conf(Path("/a"), ['Acquire::http::Proxy "http://p";', 'Dir::State "var";'])
    assert 'Acquire::http::Proxy "http://p";' in text and 'Dir::State "var";' not in text
    assert 'Dir::State::status "/a/status";' in text and 'Dir::Etc::sourceparts "/a/parts";' in text


def test_the_candidate_version_of_apt_is_read():
    """Empty if the suite has no such package."""
    assert (
        candidate_version("slurmctld:\n  Installed: (none)\n  Candidate: 24.11.5-4\n")
        == "24.11.5-4"
    )
    assert candidate_version("") == ""


def test_options_are_those_of_nfs():
    """actimeo is four times in one; what is not known, or not a time, is refused."""
    assert client_options("nocto,actimeo=5,dirty=1") == (
        "nocto,acregmin=5,acregmax=5,acdirmin=5,acdirmax=5,dirty=1"
    )
    for wrong in ("hard", "actimeo", "acregmin=x", "nocto=1", "acdirmax=-1"):
        with pytest.raises(ValueError, match=wrong):
            client_options(wrong)
    with pytest.raises(ValueError, match="absolute"):
        SandboxConfig(nfs="here")
    with pytest.raises(ValueError, match="nfs_options"):
        SandboxConfig(nfs_options="nocto")


def test_faults_are_read_as_they_were_written():
    """The text of the faults is whole, with blanks in a pattern."""
    rule = nfs.FaultRule(3, "node2", errno.EIO, 0, ("read", "write"), "a b/*.pt")
    faults = nfs.ServerFaults(epoch=2, stopped=("node1", "*"), rules=(rule,), last_rule=3)
    assert nfs.faults_from_text(nfs.faults_to_text(faults)) == faults


def test_a_filter_drops_packets_to_addresses_and_a_share_of_all():
    """In classic BPF, for tc: each jump leads to an instruction, and the end lets packets pass."""
    assert drop_program([], 0.0) == [(0x06, 0, 0, 0xFFFFFFFF)]
    both = drop_program(["10.64.0.2", "10.64.0.3"], 0.2)
    assert (0x15, 0, 1, 0x0A400002) in both and (0x15, 0, 1, 0x0A400003) in both
    assert (0x35, 1, 0, int(0.2 * 0xFFFFFFFF)) in both
    jumps = (0x15, 0x35)
    for at, (code, if_true, if_false, _) in enumerate(both):
        assert code not in jumps or at + 1 + max(if_true, if_false) < len(both)
    assert both[-1] == (0x06, 0, 0, 0xFFFFFFFF)
