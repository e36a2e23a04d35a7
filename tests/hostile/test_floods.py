"""Thousands of connections that say nothing, at each kind of port; real sockets and processes."""

import json
import subprocess
import sys
from pathlib import Path

import flooded
import pytest
from strangers import as_stranger

NUM_STRANGERS = 3000
NUM_PEERS = 20
MAX_THREADS = 40
MAX_GROWTH_KIB = 50_000


@pytest.mark.parametrize(
    "kind", [k if k == "leader" else pytest.param(k, marks=pytest.mark.long) for k in flooded.KINDS]
)
def test_peers_come_through_a_flood(kind, tmp_path, monkeypatch):
    """The server keeps descriptors for its files, and neither threads nor memory grow."""
    monkeypatch.setenv("HOME", str(tmp_path))
    script = str(Path(flooded.__file__))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen([sys.executable, script, kind, str(tmp_path)], **pipes) as server:
        where = json.loads(server.stdout.readline())

        def what_is_open() -> dict[str, int]:
            server.stdin.write("\n")
            return json.loads(server.stdout.readline())

        before = what_is_open()
        flooding = as_stranger(flooded.FLOOD, *flooded.port_of(where), NUM_STRANGERS)
        with subprocess.Popen(flooding, cwd="/", **pipes) as strangers:
            assert strangers.stdout.readline() == "half\n"
            seen = [what_is_open()]
            for number in range(1, NUM_PEERS + 1):
                flooded.GENUINE[kind](where, number)
                seen.append(what_is_open())
            assert strangers.stdout.readline() == "all\n"
            flooded.GENUINE[kind](where, NUM_PEERS + 1)
            seen.append(what_is_open())
            strangers.stdin.write("\n")
        server.stdin.close()
    most = {key: max(each[key] for each in seen) for key in before}
    print(f"{kind}: {before} -> at most {most}")
    assert most["files"] < flooded.FILES * 7 // 8
    assert most["threads"] < MAX_THREADS
    assert most["kib"] < before["kib"] + MAX_GROWTH_KIB
