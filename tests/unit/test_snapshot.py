"""A copy of the code: which files it holds, and where the entry points afterwards."""

import subprocess
from pathlib import Path

import pytest

from hpc_elastic.errors import SubmissionError
from hpc_elastic.launcher.user_code import link_snapshot, own_files, remap, take_snapshot
from hpc_elastic.run.directory import Entry


def git(folder: Path, *args: str) -> None:
    """Run git without the user's configuration."""
    config = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", "-C", str(folder), *config, *args], check=True, capture_output=True)


def commit_all(folder: Path) -> None:
    """Make a folder a checkout with everything in it committed."""
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "x")


@pytest.fixture
def checkout(tmp_path):
    """Return a checkout with every kind of file in it."""
    top = tmp_path / "my project"
    (top / "pkg").mkdir(parents=True)
    (top / "train.py").write_text("tracked")
    (top / "pkg" / "gone.py").write_text("deleted later")
    (top / ".gitignore").write_text("data/\n")
    (top / "link").symlink_to("train.py")
    commit_all(top)
    (top / "pkg" / "gone.py").unlink()
    (top / "pkg" / "neü.py").write_text("untracked")
    (top / "data").mkdir()
    (top / "data" / "big").write_text("ignored")
    return top


def entry_in(top: Path) -> Entry:
    """Return the entry of a script at the top of a checkout."""
    paths = [str(top / "pkg"), "/elsewhere"]
    return Entry("hydra", "main", script=str(top / "train.py"), cwd=str(top), sys_path=paths)


def copied(code: Path) -> set[str]:
    """Return the names of the files in the copy."""
    return {str(p.relative_to(code)) for p in code.rglob("*") if p.is_symlink() or p.is_file()}


def test_copies_what_git_tracks_or_does_not_ignore(checkout, tmp_path):
    """Data that is ignored stays out; what is new and not ignored is code, too."""
    submission = tmp_path / "sweep" / ".hpc_elastic"
    entry = take_snapshot(entry_in(checkout), submission)
    code = submission / "code"
    assert copied(code) == {"train.py", ".gitignore", "link", "pkg/neü.py"}
    assert (code / "link").is_symlink()
    assert (entry.script, entry.cwd) == (str(code / "train.py"), str(code))
    assert entry.sys_path == [str(code / "pkg"), "/elsewhere"]


def test_later_edits_do_not_reach_the_copy(checkout, tmp_path):
    """A task that waited for a day runs what was submitted."""
    take_snapshot(entry_in(checkout), tmp_path / "s")
    (checkout / "train.py").write_text("edited")
    assert (tmp_path / "s" / "code" / "train.py").read_text() == "tracked"


def test_output_of_sweeps_is_not_copied(checkout):
    """The sweep lies in the checkout, and may not be ignored by git: no copy of copies."""
    old = checkout / "multirun" / "old"
    (old / ".hpc_elastic").mkdir(parents=True)
    (old / ".hpc_elastic" / "array-0.json").touch()
    (old / "0").mkdir()
    (old / "0" / "checkpoint").touch()
    submission = checkout / "multirun" / "new" / ".hpc_elastic"
    submission.mkdir(parents=True)
    (submission / "array-0.json").touch()
    take_snapshot(entry_in(checkout), submission)
    assert not [name for name in copied(submission / "code") if name.startswith("multirun")]


def test_submodules_are_copied(checkout, tmp_path):
    """Code in a submodule is code of the checkout."""
    library = tmp_path / "library"
    library.mkdir()
    (library / "lib.py").touch()
    commit_all(library)
    git(checkout, "submodule", "add", "-q", str(library), "lib")
    take_snapshot(entry_in(checkout), tmp_path / "s")
    assert "lib/lib.py" in copied(tmp_path / "s" / "code")


def test_outside_git_it_is_an_error(tmp_path):
    """The error names the setting and the folder."""
    with pytest.raises(SubmissionError, match=r"launcher\.code_snapshot.*git"):
        take_snapshot(entry_in(tmp_path), tmp_path / "s")


def test_own_files_are_those_outside_of_sweeps():
    """A folder with .hpc_elastic in it is the output of a sweep, whole."""
    listed = ["a.py", "m/x/.hpc_elastic/array-0.json", "m/x/0/run.json", "m/y.py"]
    assert own_files(listed) == ["a.py", "m/y.py"]


def test_remap_keeps_what_lies_elsewhere():
    """A package that is installed is not looked for in the copy."""
    entry = Entry("hydra", "main", module="pkg.train", cwd="/home/me", sys_path=["/opt/lib"])
    assert remap(entry, Path("/home/me/project"), Path("/sweep/code")) == entry


def test_each_run_links_to_the_copy(tmp_path):
    """The run directory shows the code that it ran."""
    link_snapshot(tmp_path, tmp_path / ".hpc_elastic")
    link_snapshot(tmp_path, tmp_path / ".hpc_elastic")
    assert (tmp_path / "code").readlink() == tmp_path / ".hpc_elastic" / "code"
