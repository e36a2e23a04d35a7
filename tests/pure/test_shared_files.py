"""Files of a folder that several machines share: whose a file is, and what is taken for absent."""

import ast
import contextlib
import errno
import gc
import os
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

import hpc_elastic
from hpc_elastic import shared_files
from hpc_elastic.agent.worker_process import NodeIdentity, WorkerFiles, describe
from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.term import RunFiles
from hpc_elastic.run.directory import RunDir, Submission
from hpc_elastic.run.fencing import entry_path
from hpc_elastic.shared_files import read_bytes
from hpc_elastic.slurm import scheduler
from hpc_elastic.slurm.parsing import JobIdentity

PACKAGE = Path(hpc_elastic.__file__).parent
WATCH = PACKAGE.parent / "tools" / "hpc_elastic_watch" / "hpc_elastic_watch"
MODULES = {
    str(module.relative_to(package.parent)).removeprefix("hpc_elastic/"): module
    for package in (PACKAGE, WATCH)
    for module in sorted(package.rglob("*.py"))
}
"""The modules that read the files of runs."""
FROM_MEMORY = {"exists", "is_file", "is_dir", "stat", "lstat"}
"""What a client of NFS answers from memory; see `hpc_elastic.shared_files`."""
ONE_MACHINE = {
    "agent/stacks.py": "a file in this node's own memory",
}
"""Modules that wait for what no other machine makes."""


READ_BY_THEMSELVES = {
    "shared_files.py": "the kernel's table of mounts",
    **dict.fromkeys(
        ("slurm/local_queue.py", "slurm/environment.py", "ft/gloo.py", "launcher/local.py"),
        "the kernel's files of processes",
    ),
    **dict.fromkeys(
        ("agent/worker_main.py", "agent/warm_workers.py", "checkpoint/node_memory.py",
         "gpus.py"),
        "the kernel's files of devices, processes and memory",
    ),
    "agent/stacks.py": "a file in this node's own memory, and the kernel's",
    **dict.fromkeys(
        ("doctor/probe_files.py", "doctor/probe_job.py", "doctor/probe_task.py"),
        "the probe's folder, which it has made",
    ),
    **dict.fromkeys(
        ("launcher/user_code.py", "launcher/submit.py", "cli/init.py", "cli/submit.py",
         "cli/check.py", "agent/main_block.py", "agent/command.py", "worker/own_checkpoints.py"),
        "the user's own scripts",
    ),
    "launcher/detach.py": "a file that this process has made, and the kernel's files of processes",
    "hpc_elastic_watch/live_pages.py": "a file of this package",
    "transport/interface.py": "the site's nccl.conf, and the user's own",
    "transport/auth.py": "the user's key, whose owner and mode are checked",
    **dict.fromkeys(
        ("integrations/wandb.py", "integrations/tensorboard.py", "integrations/huggingface.py"),
        "files of other libraries in folders that the script names",
    ),
}  # fmt: skip
"""Modules that read whole files otherwise than by `shared_files.open_file`: none of a run's."""


def test_files_of_a_run_are_read_by_one_rule():
    """A FIFO or a link in place of one stops or misleads its reader; see `shared_files`."""
    found = {
        name
        for name, module in MODULES.items()
        for call in ast.walk(ast.parse(module.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("read_text", "read_bytes")
        and ast.unparse(call.func.value) != "shared_files"
    }
    assert found == set(READ_BY_THEMSELVES)


def polls(module: Path) -> list[int]:
    """Return the lines on which a module asks again and again for a path.

    What reads the files of a run is called again and again, from loops of other modules.
    """
    loop = ast.Module if module.parent.name == "report" else ast.While
    loops = [n for n in ast.walk(ast.parse(module.read_text())) if isinstance(n, loop)]
    calls = [n for loop in loops for n in ast.walk(loop) if isinstance(n, ast.Call)]
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in FROM_MEMORY
    ]


def test_nothing_is_waited_for_by_its_path():
    """Who lists the folder first sees what the server has; who asks for a path, its memory."""
    found = {name: polls(module) for name, module in MODULES.items()}
    assert {m: lines for m, lines in found.items() if lines and m not in ONE_MACHINE} == {}


def test_a_file_that_a_lost_reply_has_made_is_ours(tmp_path, monkeypatch):
    """The server made the link, and the client asked again: it is told that the name is taken."""
    link = os.link

    def lost(source, target):
        link(source, target)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))

    monkeypatch.setattr(os, "link", lost)
    assert shared_files.create_atomic(tmp_path / "x", "mine")
    monkeypatch.undo()
    assert not shared_files.create_atomic(tmp_path / "x", "another's")
    assert (tmp_path / "x").read_text() == "mine"
    assert [f.name for f in tmp_path.iterdir()] == ["x"]


def test_a_count_of_links_from_memory_is_not_believed(tmp_path, monkeypatch):
    """NFS v4.2 answered 1 for the file that it had just linked."""
    link = os.link

    def lost(source, target):
        link(source, target)
        Path(source).unlink()
        Path(source).write_text("the count of links is 1")
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))

    monkeypatch.setattr(os, "link", lost)
    assert shared_files.create_atomic(tmp_path / "x", "mine")


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_file_that_could_not_be_made_is_an_error(tmp_path, monkeypatch, error):
    """Nothing is there: it is neither ours nor somebody else's."""

    def fail(source, target):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(OSError, match=os.strerror(error)):
        shared_files.create_atomic(tmp_path / "x", "mine")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_memory_has_as_absent_is_looked_up_in_its_folder(tmp_path, monkeypatch):
    """As by a client of NFS, which keeps "no such file" until somebody opens the folder."""
    path = tmp_path / "result.json"
    path.write_text('{"status": "succeeded"}')
    memory = {str(path)}
    open_, listdir = os.open, os.listdir

    def remembered(name, *args, **kwargs):
        if str(name) in memory:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(name))
        return open_(name, *args, **kwargs)

    def revalidating(folder):
        memory.clear()
        return listdir(folder)

    monkeypatch.setattr(os, "open", remembered)
    monkeypatch.setattr(os, "listdir", revalidating)
    assert shared_files.read_json(path) == {"status": "succeeded"}
    assert shared_files.read_json(tmp_path / "none.json") is None


def test_the_mode_of_what_others_remove_is_set_again_once_it_is_read(tmp_path, monkeypatch):
    """Linux's client gives a delegation back before that; where it may not, nothing is lost."""
    file, modes = tmp_path / "notice", []
    file.write_text("30")
    file.chmod(0o640)
    monkeypatch.setattr(os, "fchmod", lambda fd, mode: modes.append(mode))
    assert shared_files.read_undelegated(file) == "30" and modes == [0o640]
    assert [shared_files.read_undelegated(file, n) for n in (0, 1, 9)] == ["", "0", "30"]

    def refused(fd: int, mode: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchmod", refused)
    assert shared_files.read_undelegated(file) == "30"
    file.unlink()
    with pytest.raises(FileNotFoundError):
        shared_files.read_undelegated(file)


def test_what_the_next_leader_appends_to_is_left_without_a_delegation(tmp_path, monkeypatch):
    """A server gives one to who opens it for reading, be it for writing as well."""
    run, opened, released = RunFiles(RunDir(tmp_path)), [], []
    progress = run.run.progress
    progress.write_text('{"a": 1}\n{"torn')
    open_, fchmod = os.open, os.fchmod

    def noted(path, flags, *args, **kwargs):
        opened.append((str(path), flags & os.O_ACCMODE))
        return open_(path, flags, *args, **kwargs)

    def times_requeued(fd, mode):
        released.append(Path(f"/proc/self/fd/{fd}").readlink())
        fchmod(fd, mode)

    monkeypatch.setattr(os, "open", noted)
    monkeypatch.setattr(os, "fchmod", times_requeued)
    run.append_progress([{"b": 2}], maybe_torn=True)
    run.append_progress([{"c": 3}], maybe_torn=False)
    assert progress.read_text() == '{"a": 1}\n{"torn\n{"b": 2}\n{"c": 3}\n'
    how = [how for path, how in opened if path == str(progress)]
    assert how == [os.O_RDONLY, os.O_WRONLY, os.O_WRONLY]
    assert released == [progress]


def blocks(read: Callable[[], object]) -> bool:
    """Return whether a call has not come back after some seconds; its error is its answer."""

    def call() -> None:
        with contextlib.suppress(OSError):
            read()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(5.0)
    return thread.is_alive()


def test_no_reader_of_a_run_waits_for_the_writer_of_a_fifo(tmp_path):
    """Whoever may write there, or names a path to Slurm, would stop an agent or a `cancel`."""
    run = RunDir(tmp_path)
    run.rdzv.mkdir()
    array = Submission(tmp_path).array(0)
    worker = WorkerFiles(NodeIdentity("7_0", "node1", tmp_path), 1, 0, 0)
    fifo = tmp_path / "script"
    for file in (fifo, run.secret, array.script, worker.error, worker.err,
                 entry_path(run.rdzv, 1), run.rdzv / "lease.1"):  # fmt: skip
        os.mkfifo(file)
    log = DecisionLog(run.rdzv, b"secret")
    job = JobIdentity("x", str(fifo), "/")
    readers: dict[str, Callable[[], object]] = {
        "a job's script": lambda: scheduler._runs_array(job, array),
        "an entry": lambda: log.read(1),
        "a lease": lambda: log.lease(1),
        "a worker's files": lambda: describe(1, worker),
        "a secret": lambda: read_bytes(run.secret),
    }
    assert [name for name, read in readers.items() if blocks(read)] == []


def test_a_script_behind_a_link_is_that_of_its_array(tmp_path):
    """A copy that was submitted by hand may be named by a link."""
    array = Submission(tmp_path).array(0)
    (tmp_path / "copy").write_text(f"srun python -m hpc_elastic.agent {array.tasks}\n")
    (tmp_path / "link").symlink_to("copy")
    assert scheduler._runs_array(JobIdentity("x", str(tmp_path / "link"), "/"), array)


# ---- a folder that was removed for good -------------------------------------------------------


def removal_watch(folder: Path) -> shared_files.RemovalWatch:
    """A watch over a folder that exists."""
    folder.mkdir(parents=True)
    return shared_files.RemovalWatch(folder)


def test_a_removed_folder_is_removed_for_good_after_a_minute(tmp_path):
    """In fresh listings of its parent, or of the next folder that is left."""
    watch = removal_watch(tmp_path / "sweep" / "0" / "rdzv")
    assert not watch.is_removed(0.0)
    shutil.rmtree(tmp_path / "sweep")
    assert not watch.is_removed(10.0) and not watch.is_removed(69.0)
    assert watch.is_removed(70.0)


def test_a_folder_that_comes_back_was_not_removed(tmp_path):
    """A minute without it is counted anew."""
    watch = removal_watch(tmp_path / "rdzv")
    (tmp_path / "rdzv").rename(tmp_path / "away")
    assert not watch.is_removed(0.0)
    (tmp_path / "away").rename(tmp_path / "rdzv")
    assert not watch.is_removed(59.0)
    (tmp_path / "rdzv").rmdir()
    assert not watch.is_removed(61.0) and not watch.is_removed(120.0)
    assert watch.is_removed(121.0)


@pytest.mark.parametrize("what", ["unreadable", "another file system"])
def test_a_folder_that_cannot_be_asked_about_is_not_removed(tmp_path, monkeypatch, what):
    """The parent cannot be listed, or is the empty mount point of a file system that is away."""
    watch = removal_watch(tmp_path / "rdzv")
    (tmp_path / "rdzv").rmdir()
    if what == "unreadable":
        monkeypatch.setattr(shared_files, "names_listed", raising(OSError(errno.EIO, "no")))
    else:
        watch._device = -1
    assert not watch.is_removed(0.0) and not watch.is_removed(1000.0)


def raising(error: OSError) -> Callable[[Path], list[str]]:
    """A listing that fails."""

    def fail(_: Path) -> list[str]:
        raise error

    return fail


def test_the_error_of_a_missing_file_holds_no_frame_of_its_reader(tmp_path):
    """An error that is its own cause is a cycle, and holds all variables until a collection."""

    class Held:
        pass

    def read() -> weakref.ref:
        held = Held()
        with contextlib.suppress(FileNotFoundError):
            shared_files.read_text(tmp_path / "missing")
        return weakref.ref(held)

    gc.disable()
    try:
        assert read()() is None
    finally:
        gc.enable()
