"""The user's code at submission: its function as an entry, its origin, and a copy of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_elastic.errors import ConfigError, SubmissionError
from hpc_elastic.launcher.user_code import (
    entry_of,
    git_state,
    link_snapshot,
    own_files,
    parse_git_status,
    provenance,
    remap,
    search_path,
    take_snapshot,
)
from hpc_elastic.run.directory import Entry

ENTRY = Entry("function", "main", script="/code/train.py")


def test_entry_of_a_module_function():
    """A function of a module is found by its dotted name."""
    entry = entry_of(parse_git_status, "function", [1, "a"])
    assert (entry.module, entry.script) == ("hpc_elastic.launcher.user_code", None)
    assert (entry.qualname, entry.args) == ("parse_git_status", [1, "a"])


@pytest.mark.parametrize("as_module", [False, True])
def test_entry_of_a_main_function(tmp_path, as_module):
    """A function of the script is found by the file, or by the module that `python -m` ran.

    A link stays one, since scripts look for files beside themselves; its folder for imports is that
    of its target, as Python has it.
    """
    (tmp_path / "package").mkdir()
    (tmp_path / "link").mkdir()
    script = tmp_path / "package" / "train.py"
    link = tmp_path / "link" / "train.py"
    link.symlink_to("../package/train.py")
    script.write_text(
        "from hpc_elastic.launcher.user_code import entry_of\ndef main(): pass\n"
        "import json, dataclasses\nif __name__ == '__main__':\n"
        "    print(json.dumps(dataclasses.asdict(entry_of(main, 'hydra'))))\n"
    )
    argv = ["-m", "package.train"] if as_module else [str(link)]
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, *argv], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    entry = Entry(**json.loads(done.stdout))
    expected = (None, "package.train") if as_module else (str(link), None)
    assert (entry.script, entry.module) == expected
    assert entry.sys_path[0] == str(tmp_path if as_module else script.parent)
    assert entry.cwd == str(tmp_path)


@pytest.mark.parametrize(
    ("last", "refused"),
    [
        ("main()", True),
        ("if True:\n    main()", True),
        ("if '__main__' == __name__:\n    main()", False),
        ("__name__ == '__main__' and main()", False),
    ],
)
def test_a_script_that_would_submit_itself_again_is_refused(tmp_path, last, refused):
    """A worker imports it. The message names the line, and what to write."""
    script = tmp_path / "train.py"
    script.write_text(
        "from hpc_elastic.launcher.user_code import entry_of\n"
        f"def main():\n    print(entry_of(main, 'hydra'))\n{last}\n"
    )
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert (done.returncode != 0) == refused, done.stderr
    if refused:
        assert f"line {3 + last.count('main()') + last.count('if True')}" in done.stderr
        assert 'if __name__ == "__main__"' in done.stderr


def test_a_function_of_the_main_block_is_refused(tmp_path):
    """Workers do not run that block; they would find it out on the node."""
    script = tmp_path / "train.py"
    script.write_text(
        "from hpc_elastic.launcher.user_code import entry_of\nif __name__ == '__main__':\n"
        "    def main(): pass\n    entry_of(main, 'hydra')\n"
    )
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert "define it above" in done.stderr


def test_functions_without_a_name_are_refused():
    """Workers import the function by name: a nested one or a lambda has none."""

    def nested():
        pass

    for function in (nested, lambda: None):
        with pytest.raises(ConfigError, match="module level"):
            entry_of(function, "function")


def test_a_decorator_that_hides_the_functions_name_is_named():
    """To move the function to module level does not help: it is there."""

    def logged(function):
        def wrapper(config):
            return function(config)

        return wrapper

    with pytest.raises(ConfigError, match=r"functools\.wraps"):
        entry_of(logged(parse_git_status), "hydra")


def test_search_path_leaves_out_what_every_interpreter_has():
    """The worker's own standard library and site-packages are not shadowed by ours."""
    assert not [p for p in search_path() if p.endswith("site-packages")]


def test_only_named_variables_are_recorded(monkeypatch):
    """The environment holds tokens; none is written down."""
    monkeypatch.setenv("VIRTUAL_ENV", "/venv")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    found = provenance(ENTRY)["environment"]
    assert found["VIRTUAL_ENV"] == "/venv" and "AWS_SECRET_ACCESS_KEY" not in found


def test_git_state_tells_commit_and_dirt(tmp_path):
    """A commit alone does not say what ran; changes and new files count as dirt."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    assert git_state(tmp_path) is None
    for args in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *args], check=True)
    clean = git_state(tmp_path)
    assert clean and len(clean["commit"]) == 40 and not clean["dirty"]
    (tmp_path / "new.py").touch()
    assert git_state(tmp_path)["dirty"]


def test_git_may_be_absent(tmp_path, monkeypatch):
    """A login node without git is no reason not to submit."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None


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
    (entry,) = take_snapshot([entry_in(checkout)], submission)
    code = submission / "code"
    assert copied(code) == {"train.py", ".gitignore", "link", "pkg/neü.py"}
    assert (code / "link").is_symlink()
    assert (entry.script, entry.cwd) == (str(code / "train.py"), str(code))
    assert entry.sys_path == [str(code / "pkg"), "/elsewhere"]


def test_later_edits_do_not_reach_the_copy(checkout, tmp_path):
    """A task that waited for a day runs what was submitted."""
    take_snapshot([entry_in(checkout)], tmp_path / "s")
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
    take_snapshot([entry_in(checkout)], submission)
    assert not [name for name in copied(submission / "code") if name.startswith("multirun")]


def test_submodules_are_copied(checkout, tmp_path):
    """Code in a submodule is code of the checkout."""
    library = tmp_path / "library"
    library.mkdir()
    (library / "lib.py").touch()
    commit_all(library)
    git(checkout, "submodule", "add", "-q", str(library), "lib")
    take_snapshot([entry_in(checkout)], tmp_path / "s")
    assert "lib/lib.py" in copied(tmp_path / "s" / "code")


def test_outside_git_it_is_an_error(tmp_path):
    """The error names the setting and the folder."""
    with pytest.raises(SubmissionError, match=r"launcher\.code_snapshot.*git"):
        take_snapshot([entry_in(tmp_path)], tmp_path / "s")


def test_own_files_are_those_outside_of_sweeps():
    """A folder with .hpc_elastic in it is the output of a sweep, whole."""
    listed = ["a.py", "m/x/.hpc_elastic/array-0.json", "m/x/0/run.json", "m/y.py"]
    assert own_files(listed) == ["a.py", "m/y.py"]


EDITABLE = """
import json, os, site, sys
site.addsitedir(sys.argv[1])
from hpc_elastic.launcher import user_code
import pathlib
import pkg.train
entry = user_code.entry_of(pkg.train.main, "function")
(entry,) = user_code.take_snapshot([entry], pathlib.Path(sys.argv[2]))
print(json.dumps(entry.sys_path))
"""
IMPORTS = """
import json, site, sys
site.addsitedir(sys.argv[1])
sys.path[:0] = json.loads(sys.argv[2])
import pkg.train
print(pkg.train.__file__)
"""


def test_a_package_of_an_editable_install_is_imported_from_the_copy(tmp_path):
    """setuptools imports it by a finder; a console script may be called from another checkout."""
    pytest.importorskip("setuptools")
    project, elsewhere, packages = (tmp_path / name for name in ("project", "elsewhere", "site"))
    (project / "pkg").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "a.txt").touch()
    commit_all(elsewhere)
    (project / "pkg" / "__init__.py").touch()
    (project / "pkg" / "train.py").write_text("def main(): pass\n")
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "pkg"\nversion = "1"\n[tool.setuptools]\npackages = ["pkg"]\n'
    )
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"

    def python(text: str, *args: object, cwd: Path) -> str:
        argv = [sys.executable, "-c", text, *map(str, args)]
        return subprocess.run(argv, cwd=cwd, check=True, capture_output=True, text=True).stdout

    python(build, tmp_path, cwd=project)
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, packages, "zip")
    (info,) = packages.glob("*.dist-info")
    origin = {"url": project.as_uri(), "dir_info": {"editable": True}}  # pip writes it
    (info / "direct_url.json").write_text(json.dumps(origin))
    commit_all(project)
    paths = python(EDITABLE, packages, tmp_path / "s", cwd=elsewhere).splitlines()[-1]
    assert "pkg/train.py" in copied(tmp_path / "s" / "code")
    imported = python(IMPORTS, packages, paths, cwd=elsewhere).strip()
    assert imported == str(tmp_path / "s" / "code" / "pkg" / "train.py")


def test_a_checkout_behind_a_link_is_copied_too(checkout, tmp_path):
    """PYTHONPATH may name it by another path than git does."""
    (tmp_path / "home").symlink_to(checkout)
    entry = replace(entry_in(checkout), sys_path=[str(tmp_path / "home" / "pkg")])
    (found,) = take_snapshot([entry], tmp_path / "s")
    assert found.sys_path == [str(tmp_path / "s" / "code" / "pkg")]


def test_a_script_behind_a_link_is_that_of_the_copy(checkout, tmp_path):
    """A link in the checkout is one in the copy; one elsewhere leads to the copy of its target."""
    (tmp_path / "outside.py").symlink_to(checkout / "train.py")
    code = tmp_path / "code"
    for script, found in [(checkout / "link", "link"), (tmp_path / "outside.py", "train.py")]:
        entry = replace(entry_in(checkout), script=str(script))
        assert remap(entry, checkout, code).script == str(code / found)


def test_remap_keeps_what_lies_elsewhere():
    """A package that is installed is not looked for in the copy."""
    entry = Entry("hydra", "main", module="pkg.train", cwd="/home/me", sys_path=["/opt/lib"])
    assert remap(entry, Path("/home/me/project"), Path("/sweep/code")) == entry


def test_each_run_links_to_the_copy(tmp_path):
    """The run directory shows the code that it ran."""
    link_snapshot(tmp_path, tmp_path / ".hpc_elastic")
    link_snapshot(tmp_path, tmp_path / ".hpc_elastic")
    assert (tmp_path / "code").readlink() == tmp_path / ".hpc_elastic" / "code"
