"""`hpc-elastic run`: scripts that know nothing of Hydra, as they are and with the lines added."""

import os
import re
import runpy
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from local_runs import LocalRun

from doc_pages import ROOT, blocks
from hpc_elastic.cli.main import main

EXAMPLES = ROOT / "examples/conversions"
PAGE = ROOT / "docs/howto/convert.md"
COMMAND = [sys.executable, "-P", "-m", "hpc_elastic"]
LONG = pytest.mark.long
LAST_WORDS = {
    "ddp": "epoch 23: loss", "fsdp2": "trained", "lightning_ddp": "trained", "trainer": "trained",
}  # fmt: skip
"""What each script prints at the end of 24 epochs."""


def arguments(name: str, *, epochs: int, pause_s: float) -> list[str]:
    """Return the command line of a script of the examples."""
    if name == "ddp":
        return ["--epochs", str(epochs), "--pause-s", str(pause_s)]
    return [str(epochs), str(pause_s)]


class ConvertedRun(LocalRun):
    """The run of a script of the examples."""

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Return the outcome of a command about the run."""
        argv = [*COMMAND, *(str(self.path) if a == "RUN" else a for a in arguments)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)

    def trains_with(self, num_nodes: int, times: int) -> None:
        """Wait until this number of groups of this size have made their first step."""

        def has() -> bool:
            rounds = {e["number"] for e in self.events("round") if e["world_size"] == num_nodes}
            return len(rounds & {e["round"] for e in self.events("first_step")}) >= times

        self.eventually(has, f"{num_nodes} nodes train, time {times}")


class CommandRun(ConvertedRun):
    """A run of `hpc-elastic run`, one worker a node."""

    def __init__(
        self,
        folder: Path,
        *command: str,
        settings: tuple[str, ...] = (),
        prefix: tuple[str, ...] = (),
    ) -> None:
        self.folder, self.path = folder, folder / "run"
        self._log = folder / "launcher.log"
        given = ["--run-dir", str(self.path), "--nproc-per-node", "1", *settings]
        with self._log.open("w") as log:
            self.launcher = subprocess.Popen(
                [*prefix, *COMMAND, "run", *given, "--", *command],
                cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=LONG) for n in ("ddp", "fsdp2", "lightning_ddp", "trainer")]
)
def test_a_converted_script_is_killed_and_grows(name, tmp_path):
    """Every sample is trained once all the same."""
    if name == "lightning_ddp":
        pytest.importorskip("lightning")
    if name == "trainer":
        pytest.importorskip("transformers")
    script = str(EXAMPLES / f"after/{name}.py")
    options = arguments(name, epochs=24, pause_s=0.05)
    with CommandRun(tmp_path, "python", script, *options, settings=("--nodes", "1:2")) as run:
        run.trains_with(2, 1)
        assert run.command("node", "kill", "RUN", "local-1").returncode == 0
        run.trains_with(2, 2)
        assert run.wait() == 0, run.output()
    assert run.command("audit", "RUN").returncode == 0
    if name != "trainer":  # it has a folder of its own
        assert list((run.path / "checkpoints").glob("step-*"))
        assert not (tmp_path / "checkpoints").exists(), "also of workers that were warm"
    assert LAST_WORDS[name] in run.command("logs", "RUN").stdout


@pytest.mark.long
def test_a_converted_hydra_script_is_killed_and_grows(tmp_path):
    """As the others, with its schedule, scaler, averaged and best model."""
    script = EXAMPLES / "after/hydra_ddp.py"
    with ConvertedRun(script, tmp_path, "nodes=1:2") as run:
        run.trains_with(2, 1)
        assert run.command("node", "kill", "RUN", "local-1").returncode == 0
        run.trains_with(2, 2)
        assert run.wait() == 0, run.output()
    assert run.command("audit", "RUN").returncode == 0
    assert (run.path / "best.pt").exists()


@pytest.mark.long
def test_a_hydra_script_as_it_is_starts_anew(tmp_path):
    """It needs no more than the name of the launcher on its command line."""
    script = EXAMPLES / "before/hydra_ddp.py"
    given = ("+launcher=local", "nodes=2", "epochs=3", "pause_s=0.02")
    with ConvertedRun(script, tmp_path, *given) as run:
        run.trains_with(2, 1)
        assert run.command("node", "kill", "RUN", "local-1").returncode == 0
        assert run.wait() == 0, run.output()
    assert (run.path / "best.pt").exists()


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_a_script_as_it_is_starts_anew(name, tmp_path):
    """With the variables that torchrun sets, its arguments, and its steps counted."""
    script = str(EXAMPLES / f"before/{name}.py")
    options = arguments(name, epochs=3, pause_s=0.02)
    with CommandRun(tmp_path, "python", script, *options, settings=("--nodes", "2")) as run:
        run.trains_with(2, 1)
        assert run.command("node", "kill", "RUN", "local-1").returncode == 0
        assert run.wait() == 0, run.output()
    if name == "ddp":  # it continues from its own checkpoint
        assert LAST_WORDS["ddp"].replace("23", "2") in run.command("logs", "RUN").stdout
        return
    status = run.command("status", "RUN", "--json")
    assert yaml.safe_load(status.stdout)["step"] >= 3 * (1797 // 48)


@pytest.mark.long
def test_settings_come_from_a_file_and_from_the_command_line(tmp_path):
    """The file stands beside the script; what is typed counts."""
    (tmp_path / "hpc_elastic.yaml").write_text('nodes: "1:2"\nmax_restarts: 0\n')
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(sys.argv[1:], os.environ['WORLD_SIZE'])")
    with CommandRun(tmp_path, "python", str(script), "--lr", "0.1", "x y",
                    settings=("--nodes=2",)) as run:  # fmt: skip
        assert run.wait() == 0, run.output()
    assert "['--lr', '0.1', 'x y'] 2" in run.command("logs", "RUN").stdout
    settings = (run.path / "run.json").read_text()
    assert '"max_restarts": 0' in settings


FINDS = """
import json, sys
import torch
import packaging, resource
print(json.dumps([packaging.__file__, resource.__file__, sys.path]))
"""


@pytest.mark.long
def test_a_script_finds_the_modules_that_python_finds(tmp_path, monkeypatch):
    """No file of the working directory shadows one; those beside the script do, as for Python."""
    for name in ("packaging", "statistics"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('usage: evaluate FILE')\n")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(FINDS)
    (tmp_path / "scripts" / "resource.py").write_text("LIMITS = ()\n")
    (tmp_path / "src").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "src"))
    argv = [sys.executable, "scripts/train.py"]
    expected = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    with CommandRun(tmp_path, "python", "scripts/train.py", settings=("--nodes", "1")) as run:
        assert run.wait() == 0, run.output()
    assert expected.stdout.strip() in run.command("logs", "RUN").stdout


CLEARS = """
import os, shutil, sys
folder = os.environ["HPC_ELASTIC_CONTROL_DIR"]
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    shutil.rmtree(folder)
    sys.exit(3)
print(sorted(os.listdir(folder)), oct(os.stat(folder).st_mode & 0o777))
"""


@pytest.mark.long
def test_a_node_whose_shared_memory_was_cleared_goes_on(tmp_path):
    """As by systemd-logind, when the user's last session on it ends: a round can still begin."""
    (tmp_path / "clears.py").write_text(CLEARS)
    with CommandRun(tmp_path, "python", "clears.py", settings=("--nodes", "1")) as run:
        assert run.wait() == 0, run.output()
    assert (
        "'owner'" in (output := run.command("logs", "RUN", "--agent").stdout) and "0o700" in output
    )
    assert "RemoveIPC=no" in output


FILLS = """
import contextlib, os, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    with open("/dev/shm/all", "wb", buffering=0) as f, contextlib.suppress(OSError):
        while True:
            f.write(bytes(4096))
    sys.exit(3)
"""


def test_a_node_whose_shared_memory_is_full_for_a_moment_starts_its_workers_later(tmp_path):
    """The round is not lost, nor the agent."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a tmpfs")
    (tmp_path / "fills.py").write_text(FILLS)
    mounts = "mount -t tmpfs -o size=32m tmpfs /dev/shm"
    noticed = "grep -qs 'workers not started' run/tasks/*/attempt-*/agent.log"
    empties = f"(while kill -0 $$ && ! {noticed}; do sleep 0.1; done; rm /dev/shm/all)"
    prefix = ("unshare", "-m", "sh", "-c", f'{mounts} || exit; {empties} & exec "$0" "$@"')
    with CommandRun(
        tmp_path, "python", "fills.py", settings=("--nodes", "1"), prefix=prefix
    ) as run:
        assert run.wait() == 0, run.output()
    assert "workers not started" in run.command("logs", "RUN", "--agent").stdout


@pytest.mark.parametrize(
    ("command", "says"),
    [
        pytest.param(["python", "-c", "raise SystemExit(3)"], "exit code 3", marks=LONG),
        pytest.param(["sh", "-c", "kill -9 $$"], "SIGKILL", marks=LONG),
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
    [
        "import sys\nsys.exit(0)",
        pytest.param("import os\nos._exit(0)", marks=LONG),
        pytest.param("import os\nos.execv('/bin/true', ['true'])", marks=LONG),
        pytest.param("import sys\nsys.exit()", marks=LONG),
        pytest.param(
            "import signal, sys\nsignal.signal(15, signal.SIG_DFL)\nsys.exit(0)", marks=LONG
        ),
    ],
)
def test_a_script_that_exits_with_0_has_succeeded(script, tmp_path):
    """As its user means it, and as torchrun takes it, however the process ends."""
    (tmp_path / "script.py").write_text(script)
    with CommandRun(tmp_path, "python", "script.py") as run:
        assert run.wait() == 0, run.output()


HANDLER = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
attempts = pathlib.Path("attempts")
with attempts.open("a") as file:
    print(os.getpid(), os.getppid(), file=file)
while len(attempts.read_text().splitlines()) < 2:
    time.sleep(0.05)
"""


def test_a_script_that_exits_with_0_at_sigterm_has_not_succeeded(tmp_path):
    """Slurm sends it to all processes of a node that is preempted: the command starts again."""
    (tmp_path / "script.py").write_text(HANDLER)
    attempts = tmp_path / "attempts"
    with CommandRun(tmp_path, "python", "script.py") as run:
        run.eventually(lambda: attempts.exists() and attempts.read_text(), "the script runs")
        for process in attempts.read_text().split():  # the worker, then its agent
            os.kill(int(process), signal.SIGTERM)
        assert run.wait() == 0, run.output()
    assert len(attempts.read_text().splitlines()) == 2


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
        assert says in run.command("logs", "RUN").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nodes", "2"], "after `--`"),
        (["--nodes", "--", "python", "x.py"], "--KEY VALUE"),
        (["--nodez", "2", "--", "python", __file__], "nodes"),
        (["--nodes", "0", "--", "python", __file__], "nodes"),
        (["--", "python", "x.py"], "there is no such script"),
        (["--nodes", "2", "--", "torchrun", "--nproc-per-node", "2", "x.py"], "for itself"),
        (["--nodes", "1:2", "--", "accelerate", "launch", "x.py"], "for itself"),
        (
            ["--nproc-per-node", "2", "--", "python3", "-m", "torch.distributed.run", "x.py"],
            "itself",
        ),
    ],
)
def test_wrong_settings_are_refused(arguments, says, capsys, tmp_path, monkeypatch):
    """Before anything is started."""
    monkeypatch.chdir(tmp_path)
    assert main(["run", *arguments]) in (1, 2)
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("gpus", "is_refused"), [("", False), ("0", False), ("0,1", True)])
def test_a_launcher_for_each_gpu_is_refused(gpus, is_refused, capsys, tmp_path, monkeypatch):
    """Without a number of workers a node has one for each of its GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr("hpc_elastic.api.launch_entry", lambda *_: None)
    assert main(["run", "--", "torchrun", "--nproc-per-node", "2", "x.py"]) == is_refused
    assert ("for itself" in capsys.readouterr().err) == is_refused


def test_the_command_of_the_examples_fits_its_script():
    """The script takes the arguments that examples/README.md types."""
    page = (ROOT / "examples/README.md").read_text()
    script, given = re.findall(r"-- python (examples/conversions/after/\S+) (.*?)`", page)[0]
    runpy.run_path(str(ROOT / script))["parser"].parse_args(given.split())


def test_the_number_of_lines_that_change():
    """As docs/howto/convert.md has it."""
    page = PAGE.read_text()
    for name in ("ddp", "hydra_ddp", "fsdp2", "lightning_ddp", "trainer"):
        argv = ["git", "diff", "--no-index", "--numstat", f"before/{name}.py", f"after/{name}.py"]
        diff = subprocess.run(argv, cwd=EXAMPLES, capture_output=True, text=True, check=False)
        added, removed, _ = diff.stdout.split(maxsplit=2)
        row = next(line for line in page.splitlines() if f"{name}.py]" in line and "|" in line)
        assert f"| {added} | {removed} |" in row, (name, textwrap.shorten(row, 80))


def test_the_changes_of_the_page_are_those_of_the_examples():
    """Whole: what the page shows is what the tests above run."""
    shown = blocks(PAGE.read_text(), "diff")
    for name, change in zip(("ddp.py", "hydra_ddp.py"), shown, strict=True):
        for folder, other in (("before", "+"), ("after", "-")):
            lines = (line for line in change.splitlines(keepends=True) if line[0] != other)
            text = "".join(line[1:] or line for line in lines)
            assert text == (EXAMPLES / folder / name).read_text(), (folder, name)
