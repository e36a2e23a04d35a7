"""The parts of near memory: copies over TCP, who keeps them, and the agents' folders."""

import dataclasses
import io
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from group import eventually
from scarcity import no_descriptors, no_thread

from hpc_elastic.checkpoint import MemoryTier
from hpc_elastic.checkpoint.manifest import FileEntry, RankPart, checksum_of
from hpc_elastic.checkpoint.memory_tier import NodeDirectory, complete, lacking_room
from hpc_elastic.checkpoint.node_memory import (
    COPY_CONTEXT,
    AgentFolder,
    MemorySave,
    NodeMemory,
    Receiver,
    base_folder,
    free_bytes,
    push,
    remove_leftovers,
)
from hpc_elastic.errors import CheckpointCorruptError, CheckpointError, ConfigError
from hpc_elastic.transport.connection import SignedSocket

KEY = b"k" * 32
GIB = 1 << 30


# ---- copies over TCP ----------------------------------------------------------------------


@pytest.fixture
def memory(tmp_path):
    """Return a memory."""
    folder = tmp_path / "there"
    folder.mkdir()
    return NodeMemory(folder)


@pytest.fixture
def receiver(memory):
    """Return a receiver of copies."""
    made = Receiver(memory, KEY, ["127.0.0.1"])
    yield made
    made.close()


def part(folder: Path, rank: int = 1, data: bytes = b"x" * 5_000_000, name: str = "") -> RankPart:
    """Write a rank's files."""
    folder.mkdir(exist_ok=True)
    name = name or f"shard-{rank}.safetensors"
    (folder / name).write_bytes(data)
    made = RankPart(rank, (FileEntry(name, len(data), checksum_of(data)),), {}, {}, {})
    (folder / f"part-{rank}.json").write_text(made.to_json())
    return made


SAVE = MemorySave(7, 3, 2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"save": [7, 3]}, "no save"),
        ({"save": [7, 3, 1]}, "rank 1 of 1"),
        ({"save": ["/etc", 3, 2]}, "no save"),
        ({"save": [-7, 3, 2]}, "no save"),
        ({"part": "{}"}, "Corrupt"),
        ({"part": 5}, "Corrupt|Error"),
        ({"checksum": "xxh3_64:0000000000000000"}, "was changed on its way"),
        ({"name": "owner"}, "no name of a shard"),
        ({"name": "../shard-1"}, "name"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_copy_that_is_not_as_it_should_be_is_refused(tmp_path, memory, receiver, change, why):
    """Even of one who has the key: nothing is left behind, and the sender hears why."""
    made = part(tmp_path / "here", data=b"x")
    file = dataclasses.replace(
        made.files[0],
        **{key: value for key, value in change.items() if key in ("name", "checksum")},
    )
    text = dataclasses.replace(made, files=(file,)).to_json()
    message = {"save": [7, 3, 2], "part": text} | change
    with closing(
        SignedSocket.connect(receiver.address, KEY, COPY_CONTEXT, timeout_s=20.0)
    ) as sender:
        sender.send(message)
        sender.send_file(io.BytesIO(b"x"), 1)
        assert re.search(why, sender.receive()["problem"])
    assert memory.saves().get(SAVE, []) == []
    assert not [path for path in tmp_path.glob("there/**/*") if path.is_file()]


def test_a_stranger_gets_nowhere(tmp_path, memory, receiver):
    """Without the key there is no copy; the receiver serves on, and that copy is good."""
    part(tmp_path / "here")
    with pytest.raises(OSError):
        push(receiver.address, b"another key", SAVE, tmp_path / "here", 1)
    assert memory.saves() == {}
    push(receiver.address, KEY, SAVE, tmp_path / "here", 1)
    assert memory.saves() == {SAVE: [1]} and list(memory.good_parts(SAVE, [1])) == [1]


def test_a_want_of_open_files_passes(tmp_path, memory, receiver, caplog):
    """Copies are taken again as soon as there are some."""
    part(tmp_path / "here")
    with socket.socket() as waiting, no_descriptors():
        waiting.connect(receiver.address)
        eventually(lambda: "no connection can be taken for now" in caplog.text)
    push(receiver.address, KEY, SAVE, tmp_path / "here", 1)
    assert memory.saves() == {SAVE: [1]}


def test_a_want_of_threads_passes(tmp_path, memory, receiver, monkeypatch, caplog):
    """Copies are taken again as soon as there are some: the refused ones have kept no place."""
    part(tmp_path / "here")
    with monkeypatch.context() as m:
        m.setattr(threading.Thread, "start", no_thread)
        for _ in range(8):
            with pytest.raises((CheckpointError, OSError)):
                push(receiver.address, KEY, SAVE, tmp_path / "here", 1)
    assert "a connection cannot be served: can't start new thread" in caplog.text
    push(receiver.address, KEY, SAVE, tmp_path / "here", 1)
    assert memory.saves() == {SAVE: [1]}


def test_a_copy_that_breaks_off_leaves_nothing(tmp_path, memory, receiver):
    """The sender dies in the middle of a file: the rank's part is not there."""
    made = part(tmp_path / "here", data=b"x" * 50_000_000)
    (tmp_path / "here" / made.files[0].name).write_bytes(b"x" * 1000)
    with pytest.raises(CheckpointCorruptError, match="cut short"):
        push(receiver.address, KEY, SAVE, tmp_path / "here", 1)
    eventually(lambda: "checkpoint-copy" not in {t.name for t in threading.enumerate()})
    assert memory.saves().get(SAVE, []) == []
    assert not [path for path in tmp_path.glob("there/**/*") if path.is_file()]


# ---- decisions ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ((0, 0), [None, None]),
        ((0, 1), [1, 0]),
        ((0, 0, 1, 1, 5, 5), [2, 3, 4, 5, 0, 1]),
        ((0, 0, 0, 1), [3, 3, 3, 0]),
    ],
)
def test_the_neighbour_is_on_the_next_node(where, expected):
    """In a ring of nodes, with the same place there if there is one."""
    assert [NodeDirectory(where).neighbour(rank) for rank in range(len(where))] == expected


def test_a_save_counts_if_every_rank_is_somewhere():
    """Parts may be on several nodes; those of other groups do not count."""
    rows = [(5, 1, 2, 0), (5, 1, 2, 0), (5, 2, 2, 1), (4, 1, 2, 1), (4, 1, 2, 0), (3, 1, 1, 0)]
    assert complete(rows) == [MemorySave(3, 1, 1), MemorySave(4, 1, 2)]


def test_room_is_needed_for_three_steps_and_the_neighbours_and_for_snapshots():
    """Each node keeps its own and those of the node before it; a snapshot is of its own only."""
    where = NodeDirectory((0, 0, 1))
    rows = [(1 * GIB, 30 * GIB), (1 * GIB, 30 * GIB), (4 * GIB, 17 * GIB)]
    assert lacking_room(where, rows, copies=False) is None
    assert lacking_room(where, rows, copies=True) == (1, 22 * GIB, 17 * GIB)


# ---- memory of agents ---------------------------------------------------------------------

AGENT = """
import sys, time
from pathlib import Path
from hpc_elastic.checkpoint.node_memory import AgentFolder
with AgentFolder(Path(sys.argv[1])) as agent:
    folder = agent.path
    (folder / "page").write_text("")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_agent_left_is_removed_by_the_next(tmp_path):
    """Folders of living agents, and of others, stay."""

    def start() -> tuple[subprocess.Popen, Path]:
        agent = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        return agent, Path(agent.stdout.readline().strip())

    living, kept = start()
    killed, left = start()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    (tmp_path / "hpc_elastic-1000").mkdir()
    assert left.is_dir()
    with AgentFolder(tmp_path) as agent:
        mine = agent.path
        assert not left.exists() and (kept / "page").exists() and mine.is_dir()
        remove_leftovers(tmp_path)
        assert kept.is_dir() and mine.is_dir()
    living.communicate("")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hpc_elastic-1000"]


def test_a_folder_that_was_cleared_is_made_again(tmp_path):
    """With what logind leaves: nothing, or folders that a worker has just made; and it is kept."""
    with AgentFolder(tmp_path) as agent:
        for leaves_folders in (False, True):
            shutil.rmtree(agent.path)
            if leaves_folders:
                agent.path.mkdir(0o700)
                (agent.path / "checkpoints").mkdir()
            agent.restore()
            assert agent.path.stat().st_mode & 0o777 == 0o700
            remove_leftovers(tmp_path)
            assert agent.path.is_dir()
        inode = agent.path.stat().st_ino
        agent.restore()
        assert agent.path.stat().st_ino == inode
    assert not agent.path.exists()


def test_a_folder_that_somebody_else_has_made_since_is_not_used(tmp_path):
    """Its name is known, and anybody may make one in /dev/shm."""
    with AgentFolder(tmp_path) as agent:
        shutil.rmtree(agent.path)
        agent.path.symlink_to(tmp_path)
        with pytest.raises(FileExistsError, match="somebody else"):
            agent.restore()
        agent.path.unlink()


def test_saves_go_on_where_the_memory_was_cleared(tmp_path):
    """In folders that nobody else may enter."""
    (tmp_path / "checkpoints").mkdir()
    memory = NodeMemory.of(tmp_path / "checkpoints", 7, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    made = memory.make(MemorySave(1, 2, 3))
    assert {p.stat().st_mode & 0o777 for p in (made, *made.parents[:2])} == {0o700}


def test_the_memory_of_a_run_is_its_agents(tmp_path, monkeypatch):
    """In a run it is below the agent's folder, for this user only."""
    monkeypatch.setenv("HPC_ELASTIC_CONTROL_DIR", str(tmp_path))
    folder = base_folder()
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o077 == 0


def test_memory_that_can_not_be_used_is_named(tmp_path):
    """The error names the folder, and what to do."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="give another folder"):
        base_folder(tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match="shared_every"):
        MemoryTier(shared_every=0)
    assert 0 < free_bytes(tmp_path) < 1 << 60
