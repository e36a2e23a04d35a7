"""`hpc-elastic run`: scripts that know nothing of Hydra, as they are and with the lines added."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from local_runs import LocalRun

from hpc_elastic.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples/conversions"
COMMAND = [sys.executable, "-m", "hpc_elastic"]
LONG = pytest.mark.long


class CommandRun(LocalRun):
    """A run of `hpc-elastic run`, one worker a node."""

    def __init__(self, folder: Path, *command: str, settings: tuple[str, ...] = ()) -> None:
        self.folder, self.path = folder, folder / "run"
        self._log = folder / "launcher.log"
        given = ["--run-dir", str(self.path), "--nproc-per-node", "1", *settings]
        with self._log.open("w") as log:
            self.launcher = subprocess.Popen(
                [*COMMAND, "run", *given, "--", *command],
                cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Return the outcome of a command about the run."""
        argv = [*COMMAND, arguments[0], str(self.path), *arguments[1:]]
        return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)

    def trains_with(self, num_nodes: int, times: int) -> None:
        """Wait until this number of groups of this size have made their first step."""

        def has() -> bool:
            rounds = {e["number"] for e in self.events("round") if e["world_size"] == num_nodes}
            return len(rounds & {e["round"] for e in self.events("first_step")}) >= times

        self.eventually(has, f"{num_nodes} nodes train, time {times}")


@pytest.mark.parametrize(
    "name",
    [
        "ddp",
        *(pytest.param(n, marks=LONG) for n in ("fsdp2", "lightning_ddp", "trainer")),
    ],
)
def test_a_converted_script_is_killed_and_grows(name, tmp_path):
    """Every sample is trained once all the same."""
    if name == "lightning_ddp":
        pytest.importorskip("lightning")
    if name == "trainer":
        pytest.importorskip("transformers")
    script = str(EXAMPLES / f"after/{name}.py")
    with CommandRun(tmp_path, "python", script, "24", "0.05", settings=("--nodes", "1:2")) as run:
        run.trains_with(2, 1)
        assert run.command("kill", "local-1").returncode == 0
        run.trains_with(2, 2)
        assert run.wait() == 0, run.output()
    assert run.command("audit").returncode == 0
    if name != "trainer":  # it has a folder of its own
        assert list((run.path / "checkpoints").glob("step-*"))
        assert not (tmp_path / "checkpoints").exists(), "also of workers that were warm"
    assert "trained" in run.command("logs").stdout


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp2", marks=LONG)])
def test_a_script_as_it_is_starts_anew(name, tmp_path):
    """With the variables that torchrun sets, its arguments, and its steps counted."""
    script = str(EXAMPLES / f"before/{name}.py")
    with CommandRun(tmp_path, "python", script, "3", "0.02", settings=("--nodes", "2")) as run:
        run.trains_with(2, 1)
        assert run.command("kill", "local-1").returncode == 0
        assert run.wait() == 0, run.output()
    status = run.command("status", "--json")
    assert yaml.safe_load(status.stdout)["step"] >= 3 * (1797 // 48)


def test_settings_come_from_a_file_and_from_the_command_line(tmp_path):
    """The file stands beside the script; what is typed counts."""
    (tmp_path / "hpc_elastic.yaml").write_text('nodes: "1:2"\nmax_restarts: 0\n')
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(sys.argv[1:], os.environ['WORLD_SIZE'])")
    with CommandRun(tmp_path, "python", str(script), "--lr", "0.1", "x y",
                    settings=("--nodes=2",)) as run:  # fmt: skip
        assert run.wait() == 0, run.output()
    assert "['--lr', '0.1', 'x y'] 2" in run.command("logs").stdout
    settings = (run.path / "run.json").read_text()
    assert '"max_restarts": 0' in settings


@pytest.mark.parametrize(
    ("command", "says"),
    [
        pytest.param(["python", "-c", "raise SystemExit(3)"], "exit code 3", marks=LONG),
        (["sh", "-c", "kill -9 $$"], "SIGKILL"),
        pytest.param(["./missing"], "No such file", marks=LONG),
        (["python", "fails.py"], "ZeroDivisionError"),
    ],
)
def test_a_command_that_fails_is_told(command, says, tmp_path):
    """With its exit code or signal, or the script's own error."""
    (tmp_path / "fails.py").write_text("def f():\n    return 1 / 0\n\nf()\n")
    with CommandRun(tmp_path, *command, settings=("--max-restarts", "0")) as run:
        assert run.wait() == 1
    assert says in run.output()
    assert "agent/command.py" not in run.output()


@pytest.mark.parametrize(
    "script",
    ["import sys\nsys.exit(0)", pytest.param("import sys\nsys.exit()", marks=LONG)],
)
def test_a_script_that_exits_with_0_has_succeeded(script, tmp_path):
    """As its user means it."""
    (tmp_path / "script.py").write_text(script)
    with CommandRun(tmp_path, "python", "script.py") as run:
        assert run.wait() == 0, run.output()


def test_a_module_and_a_script_of_shell_run(tmp_path):
    """The first in the worker, from the working directory, the second as its child."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").write_text("import sys; print('module', sys.argv[1:])")
    (tmp_path / "script.sh").write_text("#!/bin/sh\necho shell $RANK $1\n")
    (tmp_path / "script.sh").chmod(0o755)
    for name, command, says in (
        ("a", ["python", "-m", "package", "1"], "module ['1']"),
        ("b", ["../script.sh", "2"], "shell 0 2"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        if name == "a":
            (folder / "package").symlink_to(tmp_path / "package")
        with CommandRun(folder, *command) as run:
            assert run.wait() == 0, run.output()
        assert says in run.command("logs").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nodes", "2"], "behind `--`"),
        (["--nodes", "--", "python", "x.py"], "--KEY VALUE"),
        (["--nodez", "2", "--", "python", __file__], "nodes"),
        (["--nodes", "0", "--", "python", __file__], "nodes"),
        (["--", "python", "x.py"], "there is no such script"),
    ],
)
def test_wrong_settings_are_refused(arguments, says, capsys, tmp_path, monkeypatch):
    """Before anything is started."""
    monkeypatch.chdir(tmp_path)
    assert main(["run", *arguments]) in (1, 2)
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_number_of_lines_that_change():
    """As docs/howto/convert.md has it."""
    page = (EXAMPLES.parents[1] / "docs/howto/convert.md").read_text()
    for name in ("ddp", "fsdp2", "lightning_ddp", "trainer"):
        argv = ["git", "diff", "--no-index", "--numstat", f"before/{name}.py", f"after/{name}.py"]
        diff = subprocess.run(argv, cwd=EXAMPLES, capture_output=True, text=True, check=False)
        added, removed, _ = diff.stdout.split(maxsplit=2)
        row = next(line for line in page.splitlines() if f"{name}.py" in line)
        assert f"| {added} | {removed} |" in row, (name, textwrap.shorten(row, 80))
