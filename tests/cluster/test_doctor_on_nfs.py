"""The doctor's findings about a folder that nodes share as by NFS: sound, slow, or unfit."""

import pytest
from test_doctor import examine, left, place  # noqa: F401
from test_shared_folder import _possible, mounts  # noqa: F401

from hpc_elastic import shared_files
from hpc_elastic.doctor import probe_network
from hpc_elastic.doctor.probe_files import ProbeFolder
from hpc_elastic.doctor.probe_network import CHANGES, NUM_ROUNDS, PATH, LinkRace
from slurm_sandbox import SandboxConfig, SlurmSandbox, nfs

NAME = "nfs_doctor"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A sandbox whose nodes open what they know for ten minutes without asking the server."""
    SlurmSandbox(NAME).down()
    folder = str(tmp_path_factory.getbasetemp().resolve())
    config = SandboxConfig(name=NAME, nodes=3, nfs=folder, nfs_options="nocto,actimeo=600")
    try:
        yield SlurmSandbox.up(config)
    finally:
        SlurmSandbox(NAME).down()


def meet(mounts, options, monkeypatch):  # noqa: F811
    """What a client finds of another one."""
    first, second = (ProbeFolder(point / "probe") for point in mounts.pair(options))
    first.path.mkdir()
    port = probe_network.serve_peers(second, "token")
    both = {
        i: {"host": f"n{i}", "address": "127.0.0.1", "port": port, "addresses": {}} for i in (0, 1)
    }
    monkeypatch.setattr(probe_network, "_SIGHT_S", 10.0)
    return probe_network.meet_peers(first, 0, "token", both, [])


def ask_no_server(monkeypatch):
    """As with a C library without statx(2); nor is the folder's mount looked up anew meanwhile."""
    known: dict[object, shared_files.Mount] = {}
    monkeypatch.setattr(shared_files, "_LIBC", None)
    monkeypatch.setattr(shared_files, "_known_mounts", lambda second: known)


OPTIONS = ["", "actimeo=600", "actimeo=0", "nocto", "nocto,actimeo=600"]


@pytest.mark.parametrize(
    "options", [OPTIONS[0], *(pytest.param(o, marks=pytest.mark.long) for o in OPTIONS[1:])]
)
def test_a_sound_client_sees_all_at_once_but_a_path(mounts, options, monkeypatch):  # noqa: F811
    """Folders are listed, so that names which are answered from memory cost nothing."""
    met = meet(mounts, options, monkeypatch)
    assert met.race == LinkRace(NUM_ROUNDS) and met.problem == "" and not met.seen.torn
    assert all(met.seen.times_s[name] < 5 for name in CHANGES), met.seen
    assert (met.seen.times_s[PATH] is None) == (not options.endswith("=0"))


@pytest.mark.long
def test_a_client_that_is_not_made_to_ask_the_server_is_late(mounts, monkeypatch):  # noqa: F811
    """What is seen late is reported, with the time."""
    ask_no_server(monkeypatch)
    met = meet(mounts, "nocto,actimeo=6", monkeypatch)
    assert met.race == LinkRace(NUM_ROUNDS) and met.problem == ""
    assert all(1 < met.seen.times_s[name] <= 10 for name in CHANGES), met.seen


@pytest.mark.long
def test_a_client_that_sees_nothing_for_long_is_not_waited_for(mounts, monkeypatch):  # noqa: F811
    """A run would wait in vain."""
    ask_no_server(monkeypatch)
    met = meet(mounts, "nocto,actimeo=600", monkeypatch)
    assert {met.seen.times_s[name] for name in CHANGES} == {None} and met.seen.waited_s < 20


def test_links_that_are_not_exclusive_are_seen(mounts, monkeypatch):  # noqa: F811
    """Two nodes both believe to have made some of the names."""
    mounts.faults(
        nfs.ServerFaults(rules=(nfs.FaultRule(1, nfs.ALL, -2, 0, ("link",), nfs.ALL),), last_rule=1)
    )
    met = meet(mounts, "", monkeypatch)
    assert met.race.both > 0


@pytest.mark.long
def test_nothing_is_said_against_a_mount_without_close_to_open(slurm, place):  # noqa: F811
    """Runs query the server themselves there, as the report states."""
    code, findings, _ = examine(slurm, place, "partition=low", "--probe")
    bad = [f for f in findings.values() if f["verdict"] in ("fail", "unknown")]
    assert (code, bad) == (0, [])
    mount = findings["directory.node_mounts"]
    assert "nocto" in mount["found"] and "runs query the server first" in mount["found"]
    directory = {f["verdict"] for check, f in findings.items() if check.startswith("directory.")}
    assert directory == {"ok"}
    assert left(slurm, place) == ([], [])


@pytest.mark.long
def test_a_file_system_without_exclusive_links_is_refused(slurm, place):  # noqa: F811
    """With the reason, and what to do."""
    slurm.fail_files("REPLACES")
    try:
        code, findings, _ = examine(slurm, place, "partition=low", "--probe")
    finally:
        slurm.heal_server()
    election = findings["directory.election"]
    assert (code, election["verdict"]) == (1, "fail")
    assert "link(2) is not exclusive" in election["found"]
    assert "choose another directory" in election["remedy"]
    failed = {check for check, finding in findings.items() if finding["verdict"] == "fail"}
    assert failed == {"directory.election"}


@pytest.mark.long
def test_two_tasks_of_one_node_say_that_they_could_not_try(slurm, place):  # noqa: F811
    """What two nodes see of each other is not known then."""
    words = ("partition=low", "exclusive=false", "cpus_per_node=1", "mem=100M", "--probe")
    _, findings, _ = examine(slurm, place, *words)
    checks = ("directory.election", "directory.delay", "directory.content")
    assert {findings[check]["verdict"] for check in checks} == {"unknown"}
    assert "all tasks were on node" in findings["directory.election"]["found"]
