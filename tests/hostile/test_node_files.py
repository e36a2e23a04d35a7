"""Files, memory and sockets that the processes of a node share: another user gets none of them."""

import fcntl
import os
import socket
import tempfile
from pathlib import Path

import pytest

from hpc_elastic.checkpoint import node_memory
from hpc_elastic.errors import ConfigError, UntrustedRunError
from hpc_elastic.ft.manager_server import open_listener
from hpc_elastic.rendezvous import torch_handler
from hpc_elastic.rendezvous.round_stores import open_port
from hpc_elastic.transport import auth
from hpc_elastic.worker import shared_page
from hpc_elastic.worker.shared_page import SharedPage

_TRY_ALL = """
import os, socket, sys
for path in sys.argv[1:]:
    for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT | os.O_EXCL):
        try:
            os.close(os.open(path, flags))
            print("opened", path)
        except OSError:
            pass
    for act in (os.listdir, os.unlink, os.rmdir, lambda p: os.rename(p, p + "x"),
                lambda p: os.chmod(p, 0o777), lambda p: os.mkdir(p + "/x"),
                lambda p: socket.socket(socket.AF_UNIX).connect(p)):
        try:
            act(path)
            print("did", act, path)
        except OSError:
            pass
"""


@pytest.fixture
def shared(open_folder) -> Path:
    """A folder as /dev/shm is: all may make files there, and remove their own."""
    open_folder.chmod(0o1777)
    return open_folder


def test_the_page_and_the_memory_of_an_agent_are_its_owners(shared, stranger, monkeypatch):
    """Its folder in /dev/shm, the control pages in it, and what its workers keep there."""
    with node_memory.AgentFolder(shared) as agent:
        folder = agent.path
        page = SharedPage.create(folder, 0)
        page.report(7, 0.5, 1)
        monkeypatch.setenv(shared_page.DIRECTORY_VARIABLE, str(folder))
        kept = node_memory.NodeMemory.of(node_memory.base_folder(), 1, shared / "checkpoints")
        files = [folder, folder / "worker-0", folder / "owner", kept.folder, folder / "new"]
        done = stranger(_TRY_ALL, *files)
        assert (done.stdout, done.stderr) == ("", "")
        assert SharedPage.of(folder, 0).read().step == 7


def test_nobody_takes_the_name_of_an_agents_folder(shared, monkeypatch):
    """A stranger who sees the first name appear may make the next one before the agent does."""
    lock = fcntl.flock

    def flock(file: object, how: int) -> None:
        for name in os.listdir(shared):  # noqa: PTH208
            for taken in {name.lstrip("."), f".{name}"} - {name}:
                (shared / taken / "full").mkdir(parents=True)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with node_memory.AgentFolder(shared) as agent:
        folder = agent.path
        assert folder.stat().st_mode & 0o777 == 0o700


def test_leftovers_of_a_stranger_are_left(shared, stranger):
    """What he has named like an agent's folder leads to no change of the owner's files."""
    own = shared / "own"
    (own / "deep").mkdir(parents=True)
    (own / "owner").write_text("mine")
    done = stranger(
        "import os, sys; os.chdir(sys.argv[1]); os.symlink('own', 'hpc_elastic-a');"
        "os.mkdir('hpc_elastic-b'); os.symlink('../own/owner', 'hpc_elastic-b/owner');"
        "os.symlink('../own', 'hpc_elastic-b/own'); os.mkdir('hpc_elastic-c');"
        "os.mkfifo('hpc_elastic-c/owner'); os.mkdir('hpc_elastic-d')",
        shared,
    )
    assert done.stderr == ""
    node_memory.remove_leftovers(shared)
    assert (own / "owner").read_text() == "mine" and (own / "deep").is_dir()


@pytest.mark.parametrize("how", ["os.mkdir", "lambda p: os.symlink(sys.argv[2], p)"])
def test_memory_that_a_stranger_has_made_is_refused(shared, stranger, monkeypatch, how):
    """A folder of his, or a link of his to a folder of the owner, whose files would be removed."""
    own = shared / "own"
    own.mkdir(mode=0o700)
    path = shared / f"{node_memory.PREFIX}{os.getuid()}"
    assert stranger(f"import os, sys; ({how})(sys.argv[1])", path, own).stderr == ""
    monkeypatch.delenv(shared_page.DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setattr(node_memory, "SHARED_MEMORY", shared)
    with pytest.raises(ConfigError, match=r"belongs to user 54321|it is a link"):
        node_memory.base_folder()
    assert not list(own.iterdir())


def test_memory_that_others_may_enter_is_refused(shared, monkeypatch):
    """A folder of the owner's from a time of another umask: what is in it may be others'."""
    path = shared / f"{node_memory.PREFIX}{os.getuid()}"
    path.mkdir()
    path.chmod(0o777)
    monkeypatch.delenv(shared_page.DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setattr(node_memory, "SHARED_MEMORY", shared)
    with pytest.raises(ConfigError, match="chmod 700 it"):
        node_memory.base_folder()


def test_the_socket_of_a_replica_group_is_its_owners(shared, stranger):
    """Also in a folder that all may enter, nobody else connects; nor does a taken name count."""
    path = shared / "socket"
    with open_listener(str(path)):
        assert stranger(_TRY_ALL, path).stdout == ""
    taken = shared / "taken"
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(taken))
        with pytest.raises(OSError, match="no socket at"):
            open_listener(str(taken))
    folder = Path(tempfile.mkdtemp(prefix="hpc-elastic-ft-", dir=shared))  # as a group makes it
    with open_listener(str(folder / "socket")):
        assert stranger(_TRY_ALL, folder, folder / "socket", folder / "x").stdout == ""


# ---- the torchrun backend: its folder, and the key in it


def test_the_folder_of_torchrun_is_its_owners(shared, stranger, monkeypatch):
    """The key, and the log of a step."""
    monkeypatch.setenv("HOME", str(shared))
    folder = auth.user_folder()
    auth.user_key(folder)
    run = torch_handler._make_step_folder(folder / "torchrun", "1.0.id")
    done = stranger(_TRY_ALL, folder, folder / "key", folder / "torchrun", run.path, run.rdzv)
    assert (done.stdout, done.stderr) == ("", "")


_GIVEN = {
    "a key of his": "open(path, 'w').write('k' * 64); os.chmod(path, 0o600)",
    "a link to a file of the reader with known text":
        "os.symlink('/proc/self/personality', path)",
    "a link to an empty file of the owner": "os.symlink(sys.argv[2], path)",
}  # fmt: skip


@pytest.mark.parametrize("key", _GIVEN)
def test_a_key_that_a_stranger_has_made_is_refused(shared, stranger, key):
    """`--rdzv-conf dir=` may be a folder that he can write to: he would know the secret."""
    empty = shared / "empty"
    empty.touch(mode=0o600)
    folder = shared / "dir"
    folder.mkdir()
    folder.chmod(0o777)
    made = stranger(f"import os, sys; path = sys.argv[1]; {_GIVEN[key]}", folder / "key", empty)
    assert made.stderr == "" and os.path.lexists(folder / "key")
    with pytest.raises(PermissionError):
        auth.user_key(folder)


def test_a_step_folder_that_a_stranger_has_made_is_refused(shared, stranger):
    """He would see the log of the step, and could remove or repeat its entries."""
    steps = shared / "torchrun"
    steps.mkdir()
    steps.chmod(0o1777)
    made = stranger("import os, sys; os.umask(0); os.mkdir(sys.argv[1], 0o777)", steps / "1.0.id")
    assert made.stderr == ""
    with pytest.raises(UntrustedRunError, match="belongs to another user"):
        torch_handler._make_step_folder(steps, "1.0.id")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_store_of_a_round_listens_at_one_address(address):
    """Not at all addresses of the node, and not in the other family."""
    with open_port(address) as listening:
        host, port = listening.getsockname()[:2]
        socket.create_connection((host, port), 10).close()
        other = {"127.0.0.1": "::1", "::1": "127.0.0.1"}[address]
        for elsewhere in (other, "127.0.0.2"):
            with pytest.raises(OSError):
                socket.create_connection((elsewhere, port), 10).close()
