"""The doctor's parts that run on nodes, as real processes and over real sockets."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from group import eventually

from hpc_elastic.config.parse import restored
from hpc_elastic.doctor import allreduce_check, probe_network, probe_task
from hpc_elastic.doctor.probe_files import (
    ORPHANED,
    WORKER,
    ProbeFolder,
    ProbePlan,
    last_heartbeat,
    signal_time,
    start_worker,
    survival_times,
)
from hpc_elastic.doctor.probe_network import CHANGES, NUM_ROUNDS, PATH, FolderTrial, LinkRace
from hpc_elastic.slurm.client import SlurmClient

PATIENCE_S = 30.0
TOKEN = "t0ken"
LO = {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture
def place(tmp_path):
    """A probe's folder with its plan."""
    found = ProbeFolder(tmp_path / ".hpc_elastic")
    found.path.mkdir()
    found.write_plan(ProbePlan(TOKEN, lifetime_s=60))
    return found


def test_this_host_is_looked_at(tmp_path):
    """Limits and clock are there, and it reads back."""
    found = probe_task.collect_host_facts()
    assert found.limits["nofile"][0] is None or found.limits["nofile"][0] > 0
    assert found.cpus >= 1 and found.memory_bytes > 0 and found.python == sys.executable
    assert restored(probe_task.HostFacts, asdict(found)) == found


def test_a_file_system_without_limits_is_read_back(tmp_path, monkeypatch):
    """CephFS reports 2**64 - 1 free files, and some file systems of FUSE as many blocks."""
    space = SimpleNamespace(f_bavail=2**64 - 1, f_frsize=4096, f_files=9, f_favail=2**64 - 1)
    monkeypatch.setattr(probe_task.os, "statvfs", lambda path: space)
    found = probe_task.collect_folder_facts(tmp_path)
    assert found.free_files is None and found.free_bytes > 2**62
    assert restored(probe_task.FolderFacts, json.loads(json.dumps(asdict(found)))) == found


def test_a_worker_writes_down_what_it_gets_and_when_it_lived_last(place):
    """SIGTERM does not end it, SIGKILL does, and the time between shows."""
    worker = start_worker(str(place.array_file), 0)
    eventually(lambda: last_heartbeat(place, "worker", 0) is not None, PATIENCE_S)
    worker.send_signal(signal.SIGUSR2)
    eventually(lambda: signal_time(place, "worker", 0, "SIGUSR2"), PATIENCE_S)
    worker.send_signal(signal.SIGTERM)
    eventually(lambda: signal_time(place, "worker", 0, "SIGTERM"), PATIENCE_S)
    asked = signal_time(place, "worker", 0, "SIGTERM")
    eventually(lambda: last_heartbeat(place, "worker", 0) > asked, PATIENCE_S)
    worker.kill()
    worker.wait()
    assert survival_times(place, 0)["worker"] > 0 and survival_times(place, 0)["agent"] is None
    assert signal_time(place, WORKER, 0, ORPHANED) is None


def test_a_worker_that_is_left_behind_says_so_and_ends(place):
    """By this a site whose Slurm loses processes is recognised."""
    module, array = "hpc_elastic.doctor.probe_files", str(place.array_file)
    start = f"from {module} import start_worker as s; s({array!r}"
    parent = f"{start}, 0); import time; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", parent])
    try:
        eventually(lambda: last_heartbeat(place, "worker", 0) is not None, PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    eventually(lambda: signal_time(place, WORKER, 0, ORPHANED), PATIENCE_S)
    place.stop_file.touch()


def test_a_worker_ends_with_the_probe(place):
    """Nothing is left over where the doctor could not cancel it."""
    worker = start_worker(str(place.array_file), 0)
    eventually(lambda: last_heartbeat(place, "worker", 0) is not None, PATIENCE_S)
    place.stop_file.touch()
    assert worker.wait(30) == 0


def peer(port, *, host="n1"):
    """What a task publishes of itself."""
    found = {"eth0": ["127.0.0.1"], "eth1": ["127.0.0.9"]}
    return {"host": host, "address": "127.0.0.1", "port": port, "addresses": found}


def meet(place, others, absent=()):
    """What task 0 finds of others."""
    own = {"host": "n0", "address": "127.0.0.1", "port": 0, "addresses": {}}
    return probe_network.meet_peers(place, 0, TOKEN, {0: own, **others}, list(absent))


def test_two_tasks_meet(place):
    """They reach each other, know the time there, and see each other's files."""
    met = meet(place, {1: peer(probe_network.serve_peers(place, TOKEN))})
    (sight,) = met.peers
    assert sight.problem == "" and 0 < sight.round_trip_s < 5
    assert abs(sight.clock_ahead_s) < 5 and sight.others == {"127.0.0.9": True}
    assert all(0 < met.seen.times_s[name] < 20 for name in (*CHANGES, PATH)) and not met.seen.torn
    assert met.race == LinkRace(NUM_ROUNDS) and not met.problem
    assert restored(probe_network.MeetingResult, json.loads(json.dumps(asdict(met)))) == met


def test_tasks_on_one_node_try_nothing_of_what_lies_between_nodes(place):
    """They share its caches."""
    met = meet(place, {1: peer(probe_network.serve_peers(place, TOKEN), host="n0")})
    assert met.peers[0].problem == "" and met.seen is None and met.race is None


def test_a_task_asks_one_that_is_on_another_node(place):
    """Also where the next one is not."""
    port = probe_network.serve_peers(place, TOKEN)
    others = {1: peer(port, host="n0"), 2: peer(port, host="n1")}
    assert meet(place, others).race == LinkRace(NUM_ROUNDS)


def test_a_folder_that_another_node_can_not_use_is_told(place, tmp_path):
    """With that node, and the reason."""
    met = meet(
        place, {1: peer(probe_network.serve_peers(ProbeFolder(tmp_path / "gone" / "x"), TOKEN))}
    )
    assert "with n1: " in met.problem and "No such file" in met.problem
    assert met.seen is None and met.race is None and not met.peers[0].problem


def test_a_port_that_nobody_listens_on_is_named(place):
    """With the address and the reason; the rest of the meeting is not lost."""
    silent = {**peer(probe_network.serve_peers(place, TOKEN)), "port": probe_task.free_port()}
    met = meet(place, {1: silent}, [2])
    assert "refused" in met.peers[0].problem.lower()
    assert (met.absent, met.seen, met.race) == ([2], None, None)


def changed(trial, change):
    """What an observer sees of a change, that waits for a moment only."""
    trial.make_files()
    return trial.watch_changes(change, 0.5)


def test_what_is_not_seen_is_told(tmp_path):
    """Nothing is made up where another node's changes do not appear."""
    found = changed(FolderTrial(tmp_path / "trial"), lambda: None)
    assert set(found.times_s.values()) == {None} and found.waited_s >= 0.5


def test_a_folder_that_does_not_appear_at_all_is_waited_for_no_longer(tmp_path):
    """As where each node has a directory of its own."""
    found = FolderTrial(tmp_path / "elsewhere").watch_changes(
        lambda: pytest.fail("not prepared"), 0.5
    )
    assert set(found.times_s.values()) == {None}


def test_a_file_that_is_seen_in_part_is_torn(tmp_path):
    """What was synced and renamed is to be read whole."""
    trial = FolderTrial(tmp_path / "trial")

    def change():
        trial.apply_changes()
        (trial.path / "replaced" / "file").write_text("newnew")

    assert changed(trial, change).torn


def test_links_that_replace_each_other_are_seen(tmp_path, monkeypatch):
    """Both nodes win according to their client, and the name belongs to one of them."""
    first, second = FolderTrial(tmp_path / "trial"), FolderTrial(tmp_path / "trial")
    first.make_files()
    for trial, node in ((first, "a"), (second, "b")):
        trial.stage_link(node)
    assert all(first.race_links(0, "a")) and not any(second.race_links(0, "b"))

    def replace(source, name):
        Path(name).unlink(missing_ok=True)
        Path(name).write_text(Path(source).read_text())

    monkeypatch.setattr(os, "link", replace)
    assert all(second.race_links(0, "b")) and set(first.read_winners()) == {"b", ""}


def test_a_link_whose_reply_is_lost_is_ones_own(tmp_path, monkeypatch):
    """The name is there, and it is said that it was there before."""
    trial, link = FolderTrial(tmp_path / "trial"), os.link
    trial.make_files()
    trial.stage_link("a")

    def lose(source, name):
        link(source, name)
        raise FileExistsError

    monkeypatch.setattr(os, "link", lose)
    assert all(trial.race_links(0, "a"))


def test_a_connection_without_the_token_is_refused(place):
    """It creates no files, and gets no answer."""
    port = probe_network.serve_peers(place, TOKEN)
    address = {"address": "127.0.0.1", "port": port}
    with pytest.raises(OSError), probe_network.connect_to_peer(address, "wrong") as connection:
        probe_network.send_request(connection, "prepare", 5)
    assert not (place.path / "trial-5").exists()


def test_two_processes_run_allreduce(monkeypatch):
    """An all_reduce through gloo comes back with the right sum."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # NCCL has no two ranks on one GPU
    port = probe_task.free_port()
    with ThreadPoolExecutor() as pool:
        said = list(
            pool.map(
                lambda rank: allreduce_check.run_allreduce(rank, 2, "127.0.0.1", port, LO), (0, 1)
            )
        )
    assert [s.problems for s in said] == [{}, {}]
    assert all(s.bandwidths["gloo"] > 0 and s.import_s > 0 for s in said)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_with_gpus_the_allreduce_is_done_with_nccl_too(monkeypatch):
    """On the first of them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    said = allreduce_check.run_allreduce(0, 1, "127.0.0.1", probe_task.free_port(), LO)
    assert (said.problems, said.cuda_devices) == ({}, 1)
    assert set(said.bandwidths) == {"gloo", "nccl"}


def test_an_allreduce_without_an_answer_ends(monkeypatch):
    """Its process is ended with all it has started."""
    monkeypatch.setattr(allreduce_check, "TIMEOUT_S", 0.5)
    said = allreduce_check.run_allreduce(0, 2, "127.0.0.1", probe_task.free_port(), LO)
    assert said.import_s is None and "no end within" in said.problems["torch"]


def test_slurm_commands_that_are_missing_are_told_by_name(tmp_path, monkeypatch):
    """As in a container without them."""
    monkeypatch.setitem(os.environ, "PATH", str(tmp_path))
    problems = probe_task.reachable(SlurmClient(2), "1_0")
    assert problems.keys() == {"squeue", "scontrol"}
    assert all("is Slurm installed" in why for why in problems.values())
