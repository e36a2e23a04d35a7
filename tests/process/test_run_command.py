"""hpc_elastic.agent.command: which command runs in the worker, and which beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from hpc_elastic.agent.command import run_command, script_of
from hpc_elastic.cli.main import main


@pytest.fixture
def argv(monkeypatch):
    """Restore what a script changes in this process; another one that it starts would run it."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def other(tmp_path) -> Path:
    """Return the interpreter of another environment, which is a link to that of this one."""
    venv.create(tmp_path / "other", symlinks=True)
    return tmp_path / "other" / "bin" / "python"


@pytest.fixture
def script(tmp_path) -> Path:
    """Return a script that writes the environment and the process that it runs in."""
    path = tmp_path / "x.py"
    text = "import os, pathlib, sys\n"
    text += "pathlib.Path(sys.argv[1]).write_text(f'{sys.prefix} {os.getpid()}')\n"
    path.write_text(text)
    return path


def test_the_python_of_another_environment_runs_itself(other, script, tmp_path, argv):
    """Environments of one interpreter have the same file behind their links."""
    with pytest.raises(SystemExit, match="0"):
        run_command(str(other), str(script), str(tmp_path / "out"))
    prefix, pid = (tmp_path / "out").read_text().split()
    assert (prefix, pid == str(os.getpid())) == (str(tmp_path / "other"), False)
    assert script_of([str(other), "-u", str(script)]) == script


@pytest.mark.parametrize("name", [sys.executable, "a link"])
def test_the_own_python_runs_in_the_worker(name, script, tmp_path, argv):
    """So the optimizer's steps are counted."""
    if name == "a link":
        name = str(Path(sys.executable).with_name("python3"))
    run_command(name, str(script), str(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == f"{sys.prefix} {os.getpid()}"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("partition", "a,b"),
        ("exclude", "node[1-3],node7"),
        ("constraint", "a100&ib"),
        ("constraint", "[rack1|rack2]"),
        ("job_name", "lr=0.1 (b)"),
        ("mem", "0"),
        ("qos", "null"),
    ],
)
def test_a_setting_that_is_a_text_is_taken_as_it_is(monkeypatch, key, text):
    """As sbatch takes it; Hydra's grammar is for Hydra's scripts."""
    given = []
    monkeypatch.setattr("hpc_elastic.api.launch_entry", lambda *args: given.append(args[2]))
    assert not main(["run", "--launcher", "slurm", f"--{key}", text, "--nodes", "1:2", "--", "x"])
    (settings,) = given
    expected = None if text == "null" else text
    assert settings["launcher"] == {"backend": "slurm", key: expected}
    assert settings["nodes"] == "1:2"


SEEN = """
import json, os, sys
main = sys.modules["__main__"]
os.chdir("/")
seen = [__name__, __file__, main.__file__, vars(main) is globals(), __package__]
seen += [sys.argv, sys.path[0], sys._getframe().f_code.co_filename]
print(json.dumps(seen))
"""


@pytest.mark.parametrize("form", ["sub/x.py", "-m"])
def test_a_script_finds_itself_as_under_python(form, tmp_path, monkeypatch, capsys, argv):
    """By its whole path, also after a change of the directory; its arguments are as typed."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/x.py").write_text(SEEN)
    words = [*(["-m", "sub.x"] if form == "-m" else [form]), "--lr", "1"]
    command = [sys.executable, *words]
    alone = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    run_command(*command)
    assert json.loads(capsys.readouterr().out) == json.loads(alone.stdout)
