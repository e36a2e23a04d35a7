"""Files of a folder that several machines share: whose a file is, and what is taken for absent."""

import ast
import errno
import os
from pathlib import Path

import pytest

import hpc_elastic
from hpc_elastic import shared_files
from hpc_elastic.rendezvous.term import RunFiles
from hpc_elastic.run.directory import RunDir

PACKAGE = Path(hpc_elastic.__file__).parent
FROM_MEMORY = {"exists", "is_file", "is_dir", "stat", "lstat"}
"""What a client of NFS answers from memory; see `hpc_elastic.shared_files`."""
ONE_MACHINE = {
    "agent/stacks.py": "a file in this node's own memory",
}
"""Modules that wait for what no other machine makes."""


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
    modules = [m for m in sorted(PACKAGE.rglob("*.py")) if "testing" not in m.parts]
    found = {str(m.relative_to(PACKAGE)): polls(m) for m in modules}
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
