"""A folder that nodes see as through NFS: what each caches, and the faults of the server."""

import contextlib
import errno
import json
import mmap
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpc_elastic import shared_files
from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.shared_files import Mount
from slurm_sandbox import SandboxConfig, SlurmSandbox, nfs
from slurm_sandbox.cli import main
from slurm_sandbox.config import client_options
from slurm_sandbox.pytest_plugin import require_sandbox
from slurm_sandbox.state import DEFAULT_ROOT

QUICK = "acregmin=1,acregmax=4,acdirmin=2,acdirmax=2,dirty=600"
NAME = "shared"


@pytest.fixture(scope="module", autouse=True)
def _possible():
    """Skip all of it where there is no FUSE, no compiler or no root."""
    require_sandbox(nfs=True)


class Mounts:
    """Clients of one folder, without any Slurm."""

    def __init__(self, folder):
        self.folder = folder
        self.server = folder / "server"
        self.control = folder / "control"
        self.server.mkdir()
        self.control.mkdir()
        self.processes = []

    def client(self, name, options=""):
        """Mount the folder once more and return where."""
        point = self.folder / name
        point.mkdir()
        argv = [nfs.client_program(DEFAULT_ROOT), name, self.server, point, self.control]
        self.processes.append(subprocess.Popen([*argv, client_options(options)]))
        wait("the mount", lambda: nfs.mounted_below(point))
        return point

    def pair(self, options=""):
        """Mount the folder for two clients."""
        return self.client("a", options), self.client("b", options)

    def faults(self, server):
        """Set the faults of the server."""
        fresh = self.control / "new"
        fresh.write_text(nfs.faults_to_text(server))
        fresh.replace(self.control / "faults")

    def counts(self, name):
        """What a client has asked for."""
        return nfs.parse_counters((self.control / f"{name}.counts").read_bytes())

    def end(self):
        """Unmount all."""
        self.faults(nfs.ServerFaults())
        for process in self.processes:
            process.kill()
            process.wait()
        for point in nfs.mounted_below(self.folder):
            subprocess.run(["umount", "--lazy", point], check=True)


@pytest.fixture
def mounts(tmp_path):
    """Clients of a folder of their own."""
    made = Mounts(tmp_path)
    yield made
    made.end()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A sandbox of two nodes with a shared folder, whose caches live for a short time."""
    SlurmSandbox(NAME).down()
    folder = str(tmp_path_factory.mktemp("nfs").resolve())
    config = SandboxConfig(name=NAME, nodes=2, gpus_per_node=0, nfs=folder, nfs_options=QUICK)
    yield SlurmSandbox.up(config)
    SlurmSandbox(NAME).down()


@pytest.fixture
def healed(shared):
    """The sandbox, healed after the test."""
    yield shared
    shared.heal_all()


def wait(what, condition, timeout_s=20.0):
    """Wait for a condition."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def names(folder):
    """List a folder."""
    return [path.name for path in Path(folder).iterdir()]


def refuses(number, action, *arguments):
    """Assert that an action raises that error."""
    with pytest.raises(OSError) as caught:
        action(*arguments)
    assert caught.value.errno == number, caught.value


@pytest.mark.long
def test_a_name_that_another_client_has_renamed_stays(mounts):
    """It leads to the file under its new name, until the directory is listed."""
    a, b = mounts.pair()
    (a / "old").write_text("text")
    assert (b / "old").read_text() == "text"
    (a / "old").rename(a / "new")
    assert (b / "old").exists()
    assert (b / "old").read_text() == "text"
    assert names(b) == ["new"]
    assert not (b / "old").exists()
    assert (b / "new").read_text() == "text"


def test_a_name_that_was_not_there_stays_away(mounts):
    """A name that another client has made since is not seen, until the directory is listed."""
    a, b = mounts.pair()
    assert not (b / "new").exists()
    (a / "new").write_text("text")
    assert not (b / "new").exists()
    refuses(errno.ENOENT, (b / "new").read_text)
    asked = mounts.counts("b")["lookup"]
    assert not (b / "new").exists()
    assert mounts.counts("b")["lookup"] == asked
    names(b)
    assert (b / "new").read_text() == "text"


@pytest.mark.long
def test_names_are_valid_as_long_as_the_attributes_of_their_directory(mounts):
    """After acdirmin seconds, and not before, a poll of a path sees the new file."""
    a, b = mounts.pair("acdirmin=2,acdirmax=2")
    assert not (b / "new").exists()
    began = time.monotonic()
    (a / "new").touch()
    wait("the file", (b / "new").exists)
    assert 1.5 < time.monotonic() - began < 5


@pytest.mark.long
def test_a_renamed_folder_stays_under_its_old_name(mounts):
    """A folder's files are found under its old name; a process in it stays where it is."""
    a, b = mounts.pair()
    (a / "old").mkdir()
    (a / "old" / "file").touch()
    assert (b / "old" / "file").exists()
    (a / "old").rename(a / "new")
    assert (b / "old" / "file").exists()
    code = "import os; os.listdir('..'); print(os.path.exists('file'), os.path.exists('../old'))"
    argv = ["python3", "-c", code]
    done = subprocess.run(argv, cwd=b / "old", capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.long
def test_listing_an_unchanged_folder_keeps_its_names(mounts):
    """Only the attributes of the folder are fetched then."""
    _, b = mounts.pair()
    (mounts.server / "file").touch()
    assert (b / "file").exists()
    names(b)
    before = mounts.counts("b")
    for _ in range(10):
        names(b)
        assert (b / "file").exists()
    after = mounts.counts("b")
    asked = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert asked == {"opendir": 10}


@pytest.mark.long
def test_own_changes_keep_the_names_of_a_folder(mounts):
    """What this client makes is no reason to look up the rest, what another makes is."""
    a, b = mounts.pair()
    assert not (a / "absent").exists()
    for number in range(10):
        (a / str(number)).touch()
        assert not (a / "absent").exists()
    assert mounts.counts("a")["lookup"] == 11
    (b / "absent").touch()
    (a / "more").touch()
    wait("the other's file", (a / "absent").exists, timeout_s=2)


@pytest.mark.long
def test_attributes_stay_until_their_time_is_up(mounts):
    """The size of a file is an old one for acregmin seconds, which then grow."""
    a, b = mounts.pair("acregmin=2,acregmax=8,acdirmin=60,acdirmax=60")
    (a / "file").write_text("1")
    assert (b / "file").stat().st_size == 1
    time.sleep(2.1)
    assert (b / "file").stat().st_size == 1  # fetched again, unchanged: valid for 4 s now
    (a / "file").write_text("22")
    time.sleep(2.1)
    assert (b / "file").stat().st_size == 1
    wait("the new size", lambda: (b / "file").stat().st_size == 2, timeout_s=6)


@pytest.mark.long
def test_the_count_of_links_is_an_attribute(mounts):
    """Neither client sees two links after link(2), until it opens the file."""
    a, b = mounts.pair()
    (a / "file").touch()
    assert (b / "file").stat().st_nlink == 1
    (a / "link").hardlink_to(a / "file")
    assert (a / "file").stat().st_nlink == 1
    assert (a / "link").stat().st_nlink == 1
    assert (b / "file").stat().st_nlink == 1
    for mount in (a, b):
        (mount / "file").read_text()
        assert (mount / "file").stat().st_nlink == 2


@pytest.mark.long
def test_opening_a_file_fetches_it_and_closing_sends_it(mounts):
    """Written data is seen by its writer at once, by others after its close and their open."""
    a, b = mounts.pair()
    (a / "file").write_text("old text")
    early = (b / "file").open()
    assert early.read() == "old text"
    with (a / "file").open("r+") as writer:
        writer.write("NEW")
        writer.flush()
        fd = os.open(a / "file", os.O_RDONLY)
        assert os.read(fd, 20) == b"NEW text"
        assert (b / "file").read_text() == "old text"
    early.seek(0)
    assert early.read() == "old text"
    assert (b / "file").read_text() == "NEW text"
    os.close(fd)
    early.close()


@pytest.mark.long
def test_fsync_sends_what_was_written(mounts):
    """A file that stays open is seen by others after fsync, and after `dirty` seconds."""
    a, b = mounts.pair("dirty=1")
    with (a / "log").open("w") as log:
        log.write("one ")
        log.flush()
        assert (b / "log").read_text() == ""
        os.fsync(log.fileno())
        assert (b / "log").read_text() == "one "
        log.write("two ")
        log.flush()
        assert (b / "log").read_text() == "one "
        wait("the second word", lambda: (b / "log").read_text() == "one two ", timeout_s=5)


def test_without_cto_an_opened_file_is_an_old_one(mounts):
    """With nocto a file, and the listing of a folder, stay as they are until their time is up."""
    a, b = mounts.pair("nocto,acregmin=2,acregmax=2,acdirmin=2,acdirmax=2")
    (a / "file").write_text("1")
    assert (b / "file").read_text() == "1"
    assert names(b) == ["file"]
    (a / "file").write_text("22")
    (a / "other").touch()
    assert (b / "file").read_text() == "1"
    assert names(b) == ["file"]
    assert not [name for name in names(b) if name == "other"]
    wait("the new text", lambda: (b / "file").read_text() == "22", timeout_s=5)
    wait("the new file", lambda: len(names(b)) == 2, timeout_s=5)


def test_what_our_files_say_is_fresh_without_cto_too(mounts):
    """The rule of `hpc_elastic.shared_files` holds where not even opening asks the server."""
    a, b = mounts.pair("nocto,actimeo=600")
    (a / "file").write_text('{"is": 1}')
    lease = DecisionLog(a, b"secret").make_lease(1)
    lease.renew()
    log = DecisionLog(b, b"secret")
    assert shared_files.read_json(b / "file") == {"is": 1}
    assert shared_files.read_json(b / "late") is None
    assert not shared_files.is_there(b / "late")
    assert log.lease(1) == 1
    for path in ("file", "late"):
        shared_files.write_atomic(a / path, '{"is": 2}')
    lease.renew()
    assert set(names(b)) == {"file", "lease.1"}, "this is how it is without our rule"
    assert shared_files.read_json(b / "file") == {"is": 2}
    assert shared_files.is_there(b / "late")
    assert shared_files.read_json(b / "late") == {"is": 2}
    assert log.lease(1) == 2
    (a / "file").write_text('{"is": 3}')
    assert shared_files.read_json(b / "file") == {"is": 3}
    lease.close()


def test_a_file_that_is_replaced_is_read_whole(mounts):
    """A name that leads to a removed file is ESTALE for the client, which looks it up again."""
    a, b = mounts.pair()
    for number in range(20):
        (a / "fresh").write_text(str(number))
        (a / "fresh").rename(a / "file")
        assert (b / "file").read_text() == str(number)


def test_exclusive_creation_asks_the_server(mounts):
    """O_EXCL, link and mkdir rely on no cached name, neither of a file nor of an absent one."""
    a, b = mounts.pair()
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    (a / "source").touch()
    for make in (lambda path: os.close(os.open(path, flags)), os.mkdir,
                 lambda path: os.link(a / "source", path)):  # fmt: skip
        assert not (a / "name").exists()
        (b / "name").mkdir()
        refuses(errno.EEXIST, make, a / "name")
        names(a)
        assert (a / "name").exists()
        (b / "name").rmdir()
        make(a / "name")
        names(b)
        (b / "name").rmdir() if (b / "name").is_dir() else (b / "name").unlink()
        names(a)


@pytest.mark.long
def test_appending_and_truncating(mounts):
    """Appends go to the end of the file as it is when it is opened."""
    a, b = mounts.pair()
    for mount, word in ((a, "one"), (b, "two"), (a, "three")):
        with (mount / "log").open("a") as log:
            log.write(f"{word}\n")
    assert (b / "log").read_text().split() == ["one", "two", "three"]
    os.truncate(b / "log", 4)
    assert (a / "log").read_text() == "one\n"
    (a / "log").write_text("four")
    assert (b / "log").read_text() == "four"


@pytest.mark.long
def test_an_open_file_outlives_its_removal(mounts):
    """Its remover keeps it as a .nfs file until it is closed; another client loses its name."""
    a, b = mounts.pair()
    (a / "file").write_text("text")
    with (a / "file").open() as mine, (b / "file").open() as theirs:
        (a / "file").unlink()
        assert [name[:4] for name in names(b)] == [".nfs"]
        assert mine.read() == theirs.read() == "text"
    wait("the end of the .nfs file", lambda: names(b) == [])


@pytest.mark.long
def test_files_are_mapped(mounts):
    """A mapped file is read; what is written into a map is sent when the map is closed."""
    a, b = mounts.pair()
    (a / "file").write_bytes(b"x" * 10000)
    with (b / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as seen:
        assert seen[:] == b"x" * 10000
    with (a / "file").open("r+b") as file, mmap.mmap(file.fileno(), 0) as written:
        written[5000:5003] = b"abc"
        written.flush()
    assert (b / "file").read_bytes()[4999:5004] == b"xabcx"


@pytest.mark.long
def test_large_files_go_through_whole(mounts):
    """100 MB are what they were, in operations of 1 MiB; how fast is only printed."""
    a, b = mounts.pair()
    block = os.urandom(1 << 20)
    began = time.monotonic()
    with (a / "file").open("wb", buffering=0) as file:
        for _ in range(100):
            file.write(block)
    written = time.monotonic()
    with (b / "file").open("rb", buffering=0) as file:
        assert all(file.read(1 << 20) == block for _ in range(100))
    took = time.monotonic() - written
    print(f"100 MiB: written {100 / (written - began):.0f} MiB/s, read {100 / took:.0f} MiB/s")
    assert mounts.counts("a")["written_bytes"] == 100 << 20
    assert mounts.counts("a")["write"] <= 200


@pytest.mark.long
def test_rename_with_flags_is_refused(mounts):
    """As by NFS; mv --no-clobber of newer coreutils falls back to a look-up."""
    a, _ = mounts.pair()
    (a / "one").touch()
    code = (
        "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True); "
        f"print(libc.renameat2(-100, b'{a}/one', -100, b'{a}/two', 1), ctypes.get_errno())"
    )
    done = subprocess.run(["python3", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["-1", str(errno.EINVAL)]


def paths(sandbox, name):
    """Return a path of the shared folder: the server's, and as two nodes see it."""
    path = Path(sandbox.config.nfs) / name
    return path, sandbox.seen_by(1, path), sandbox.seen_by(2, path)


@pytest.mark.long
def test_jobs_work_on_the_shared_folder(healed):
    """A step of two nodes and a batch job write there, and each node by its own client."""
    folder = Path(healed.config.nfs) / "jobs"
    folder.mkdir()
    step = f"cd {folder} && hostname > $(hostname) && stat -f -c %T ."
    shown = healed.run(["srun", "-N2", "sh", "-c", step]).stdout
    assert shown.split() == ["fuseblk"] * 2 or "fuse" in shown
    assert sorted(names(folder)) == ["node1", "node2"]
    wrap = ["--wrap", "hostname; exit 3"]
    healed.run(["sbatch", "-W", "-w", "node2", "-o", f"{folder}/out", *wrap], check=False)
    assert (folder / "out").read_text() == "node2\n"
    counted = healed.file_operations(2)
    assert counted["create"] >= 2
    assert counted["written_bytes"] >= 12
    assert healed.file_operations("login")["create"] == 0


@pytest.mark.long
def test_the_login_node_is_a_client_of_its_own(healed, capfd):
    """A command on the login node does not see what a node has made since it has looked."""
    path, _, _ = paths(healed, "late")
    code = (
        f"import os, time; p = {str(path)!r}; print(os.path.exists(p)); open(p + '.asked', 'w')\n"
        "while not os.path.exists(p + '.made'): os.listdir(os.path.dirname(p)); time.sleep(0.1)\n"
    )
    command = healed.on_login(["python3", "-c", code + "print(os.path.exists(p))"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asked:
        wait("the question", Path(f"{path}.asked").exists)
        healed.exec_on(1, ["touch", str(path), f"{path}.made"])
        assert asked.communicate(timeout=20)[0].split() == ["False", "True"]
    assert healed.file_operations("login")["opendir"]


@pytest.mark.long
def test_a_killed_node_loses_what_it_has_not_sent(healed):
    """What was written and neither closed nor synced is gone, what was closed is there."""
    path, _, _ = paths(healed, "cut")
    code = (
        f"import time; print('sent', file=open('{path}.sent', 'w')); f = open('{path}', 'w'); "
        f"f.write('unsent'); f.flush(); open('{path}.go', 'w').close(); time.sleep(600)"
    )
    wrap = ["--wrap", f'python3 -c "{code}"']
    healed.run(["sbatch", "-w", "node2", "-o", "/dev/null", "--no-requeue", *wrap])
    wait("the job", Path(f"{path}.go").exists)
    healed.kill_node(2)
    assert Path(f"{path}.sent").read_text() == "sent\n"
    assert path.read_text() == ""
    healed.start_node(2)
    assert healed.exec_on(2, ["cat", f"{path}.sent"]).stdout == "sent\n"


@pytest.mark.long
def test_a_stopped_server_holds_every_operation(healed):
    """All wait, a killed process ends; when the server goes on, they go on."""
    path, first, second = paths(healed, "stopped")
    path.write_text("text")
    assert first.read_text() == second.read_text() == "text"
    healed.stop_server()
    with (
        subprocess.Popen(["cat", first], stdout=subprocess.PIPE) as one,
        subprocess.Popen(["cat", second], stdout=subprocess.PIPE) as other,
        subprocess.Popen(["cat", first]) as killed,
    ):
        try:
            time.sleep(0.5)
            states = [process.poll() for process in (one, other, killed)]
            killed.kill()
            killed.wait(timeout=5)
        finally:
            healed.start_server()
        assert (*states, killed.returncode) == (None, None, None, -9)
        assert one.communicate(timeout=10)[0] == other.communicate(timeout=10)[0] == b"text"
    healed.stop_server(2)
    assert first.read_text() == "text"
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["cat", second], timeout=0.5, check=True)


@pytest.mark.long
def test_a_node_that_waits_for_the_server_can_be_paused(healed):
    """Its processes stand still, and go on when both are back."""
    path, _, _ = paths(healed, "paused")
    path.write_text("text")
    wrap = ["--wrap", f"echo > {path}.go; sleep 1; cat {path} > {path}.copy"]
    healed.run(["sbatch", "-w", "node2", "-o", "/dev/null", "--no-requeue", *wrap])
    wait("the job", Path(f"{path}.go").exists)
    healed.stop_server(2)
    time.sleep(1.5)
    healed.pause_node(2)
    assert healed.status()["nodes"][1]["processes"] == "paused"
    healed.start_server()
    time.sleep(0.5)
    copy = Path(f"{path}.copy")
    assert not copy.exists() or copy.read_text() == ""  # the server still does what it was asked
    healed.resume_node(2)
    wait("the copy", lambda: copy.exists() and copy.read_text() == "text")


@pytest.mark.long
def test_a_restarted_server_does_not_know_open_files(healed):
    """They are ESTALE, what was not sent is lost, and files opened afterwards are sound."""
    path, first, _ = paths(healed, "restart")
    first.write_text("old")
    reader, writer = os.open(first, os.O_RDONLY), os.open(first, os.O_WRONLY)
    os.write(writer, b"new")
    assert main(["restart-server", "--name", NAME]) == 0
    refuses(errno.ESTALE, os.write, writer, b"more")
    refuses(errno.ESTALE, os.close, writer)
    refuses(errno.ESTALE, os.pread, reader, 10, 0)
    os.close(reader)
    assert path.read_text() == "old"
    assert first.read_text() == "old"
    first.write_text("sound")
    assert path.read_text() == "sound"


@pytest.mark.long
def test_chosen_writes_fail(healed):
    """By error, node, path and number of times; the error arrives at close or fsync."""
    path, first, second = paths(healed, "step-1")
    path.mkdir()
    healed.fail_files("ENOSPC", client=1, pattern="step-1/*.pt", times=1)
    refuses(errno.ENOSPC, (first / "a.pt").write_text, "text")
    (first / "a.pt").write_text("text")
    (first / "a.txt").write_text("text")
    (second / "b.pt").write_text("text")
    assert main(["fail-files", "EDQUOT", "--name", NAME, "--node", "2", "--pattern", "*/c"]) == 0
    with (second / "c").open("w") as file:
        file.write("text")
        file.flush()
        refuses(errno.EDQUOT, os.fsync, file.fileno())
    healed.fail_files("EIO", operations=["read"])
    refuses(errno.EIO, (second / "a.pt").read_text)
    healed.heal_server()
    assert (second / "a.pt").read_text() == "text"
    with pytest.raises(ValueError, match="ENOTHING"):
        healed.fail_files("ENOTHING")
    with pytest.raises(ValueError, match="chew"):
        healed.fail_files("EIO", operations=["chew"])


@pytest.mark.long
def test_read_only_for_a_while_on_one_node(healed):
    """One client is refused every change, reads on, and may write again."""
    path, first, second = paths(healed, "ro")
    path.mkdir()
    (first / "file").write_text("text")
    healed.fail_files("EROFS", client=1)
    refuses(errno.EROFS, (first / "file").write_text, "more")
    refuses(errno.EROFS, (first / "new").touch)
    refuses(errno.EROFS, (first / "file").unlink)
    assert (first / "file").read_text() == "text"
    (second / "new").touch()
    healed.heal_server()
    (first / "file").write_text("more")


def test_a_lost_reply_makes_a_link_look_failed(healed):
    """link(2) reports that the name exists; it does, and it is one's own."""
    path, first, _ = paths(healed, "lost")
    path.mkdir()
    (first / "file").touch()
    healed.fail_files("LOST", client=1, times=1)
    refuses(errno.EEXIST, os.link, first / "file", first / "link")
    assert (path / "link").samefile(path / "file")
    os.link(first / "file", first / "other")


@pytest.mark.long
def test_a_link_that_is_not_exclusive_is_won_by_two(mounts):
    """Where both ask for a name at once, both succeed."""
    first, second = mounts.pair()
    rule = nfs.FaultRule(1, nfs.ALL, -2, 0, ("link",), nfs.ALL)
    for point in (first, second):
        (point / point.name).touch()

    def link(point, number, start):
        start.wait()
        with contextlib.suppress(FileExistsError):
            (point / f"link{number}").hardlink_to(point / point.name)
            return True
        return False

    def num_won_by_both(first_number):
        """Let the clients race for a hundred names."""
        starts = [threading.Barrier(2) for _ in range(100)]
        with ThreadPoolExecutor(2) as pool:
            won = [
                pool.map(lambda p, n=first_number + i, s=start: link(p, n, s), (first, second))
                for i, start in enumerate(starts)
            ]
            return sum(all(pair) for pair in won)

    assert num_won_by_both(0) == 0
    mounts.faults(nfs.ServerFaults(rules=(rule,), last_rule=1))
    assert num_won_by_both(100) > 0


@pytest.mark.parametrize(
    ("options", "stale_s", "path_stale_s"),
    [
        pytest.param("", 0, 60, marks=pytest.mark.long),
        pytest.param("acdirmax=7", 0, 7, marks=pytest.mark.long),
        ("nocto,actimeo=5", 5, 5),
        pytest.param("nocto,acregmax=80", 80, 60, marks=pytest.mark.long),
    ],
)
def test_a_client_shows_how_old_its_answers_may_be(mounts, options, stale_s, path_stale_s):
    """In the kernel's table of mounts, as NFS does."""
    mount = Mount.of(mounts.client("a", options) / "not there yet")
    assert (mount.stale_s, mount.path_stale_s) == (stale_s, path_stale_s)


@pytest.mark.long
def test_operations_for_people_and_programs(healed, capsys):
    """The command tells what each client has asked for; other sandboxes have nothing to tell."""
    _, first, _ = paths(healed, "counted")
    before = healed.file_operations("node1")
    first.write_text("text")
    assert main(["operations", "--name", NAME, "--json"]) == 0
    after = json.loads(capsys.readouterr().out)["node1"]
    assert {n: after[n] - before[n] for n in ("create", "write", "written_bytes")} == {
        "create": 1,
        "write": 1,
        "written_bytes": 4,
    }
    assert set(after) == {*nfs.OPERATIONS, "read_bytes", "written_bytes"}
    assert main(["operations", "--name", NAME]) == 0
    assert "create 1" in capsys.readouterr().out or after["create"] > 1
    assert main(["stop-server", "--name", "nobody"]) == 1


@pytest.mark.long
def test_down_keeps_the_folder_and_leaves_no_mount(shared, tmp_path):
    """What is in the shared folder is the user's own."""
    folder = tmp_path / "mine"
    config = SandboxConfig(name="shared2", nodes=1, gpus_per_node=0, nfs=str(folder))
    sandbox = SlurmSandbox.up(config)
    directory = SlurmSandbox.attach("shared2").seen_by(1, folder).parents[1]
    try:
        sandbox.run(["srun", "touch", f"{folder}/kept"])
        assert len(nfs.mounted_below(directory)) == 2
    finally:
        sandbox.down()
    assert names(folder) == ["kept"]
    assert nfs.mounted_below(directory) == []
