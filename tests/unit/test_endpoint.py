"""Endpoint files: one creator an epoch, and only signed ones count."""

import json
import threading

import pytest

from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.rendezvous.endpoint import Endpoint, EndpointDir

LEADER = Endpoint(1, "10.0.0.1", 4000, "7_0", 0)


def test_the_latest_epoch_leads(tmp_path):
    """A later epoch's endpoint replaces an earlier one's."""
    files = EndpointDir(tmp_path, b"s")
    assert files.latest() == (0, None)
    second = Endpoint(2, "10.0.0.2", 4001, "7_1", 0)
    assert files.claim(LEADER) and files.claim(second)
    assert files.latest() == (2, second)


def test_one_of_many_racing_agents_wins_an_epoch(tmp_path):
    """link(2) has one winner, and the file is whole for all others."""
    files = EndpointDir(tmp_path, b"s")
    won: list[int] = []
    start = threading.Barrier(16)

    def race(port: int) -> None:
        start.wait()
        if files.claim(Endpoint(1, "10.0.0.1", port, f"7_{port}", 0)):
            won.append(port)

    threads = [threading.Thread(target=race, args=(port,)) for port in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    _, latest = files.latest()
    assert latest is not None and [latest.port] == won
    assert [p.name for p in tmp_path.iterdir()] == ["endpoint.1.json"]


@pytest.mark.parametrize("damage", ["cut", "forged", "renamed"])
def test_a_file_that_does_not_verify_names_no_leader(tmp_path, damage):
    """Cut short, signed by another run, or moved to another epoch: no leader, but a taken epoch."""
    key = b"other" if damage == "forged" else b"s"
    EndpointDir(tmp_path, key).claim(LEADER)
    file = tmp_path / "endpoint.1.json"
    if damage == "cut":
        file.write_text(file.read_text()[:40])
    if damage == "renamed":
        file.rename(tmp_path / "endpoint.2.json")
    files = EndpointDir(tmp_path, b"s")
    epoch, endpoint = files.latest()
    assert endpoint is None and epoch >= 1


def test_the_secret_is_not_in_the_file(tmp_path):
    """Whoever may read the run directory's files learns nothing that lets him in."""
    EndpointDir(tmp_path, b"topsecret").claim(LEADER)
    text = (tmp_path / "endpoint.1.json").read_text()
    assert "topsecret" not in text and json.loads(text)["mac"]


def test_a_directory_without_hard_links_is_named(tmp_path, monkeypatch):
    """The error says what the file system lacks."""

    def no_links(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.link", no_links)
    with pytest.raises(RunDirectoryError, match="hard links"):
        EndpointDir(tmp_path, b"s").claim(LEADER)
