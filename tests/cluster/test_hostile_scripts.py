"""What a training prints, and a secret that it is given, on a cluster that strangers use, too."""

import json
import re
import subprocess
import sys

import pytest
from sweeps import Sweep, eventually

TOKEN = "5ecre7" * 5
CONTROL, FAKE = "\x1b]0;owned\x07\x1b[2J\x9b2K\r\u202e", "the run succeeded"
SCRIPT = f"""
import os
import time
from pathlib import Path
from pathlib import Path

import hydra
from hpc_elastic import report

@hydra.main(version_base=None)
def main(cfg):
    assert os.environ["SERVICE"] == {TOKEN[::-1]!r}[::-1]
    step = 0
    while not Path(__file__).with_name("hurry").exists():
        step += 1
        report(step=step)
        print({CONTROL!r} + str(step), flush=True)
        time.sleep(0.5)
    raise ValueError({CONTROL!r} + "\\n" + {FAKE!r})

if __name__ == "__main__":
    main()
"""
SHOWING = [
    ("status",), ("status", "--json"), ("events", "--all"), ("logs",), ("report", "--json"),
    ("list", "--all"),
]  # fmt: skip
READ_ARGUMENTS = """
import contextlib, json, psutil
found = []
for process in psutil.process_iter():
    with contextlib.suppress(psutil.Error):
        found.append(" ".join(process.cmdline()))
print(json.dumps(found))
"""


@pytest.fixture
def run(sweep, tmp_path) -> Sweep:
    """A run of such a script, which trains."""
    script, secrets = tmp_path / "script.py", tmp_path / "secrets"
    script.write_text(SCRIPT)
    secrets.touch(mode=0o600)
    secrets.write_text(f"SERVICE={TOKEN}\n")
    run = sweep(
        "+launcher=slurm", "nodes=2:2", f"launcher.env_file={secrets}",
        "launcher.max_restarts=0",
        script=script,
    )  # fmt: skip
    outputs = "tasks/*/attempt-*/round-*.rank-*.out"
    eventually(
        lambda: [path.stat().st_size > 0 for path in run.run().glob(outputs)] == [True, True],
        "both workers train",
    )
    return run


def shown(run: Sweep, name: str, *more: str) -> str:
    """What a command prints on the login node."""
    argv = [*run.prefix, sys.executable, "-m", "hpc_elastic", name, *more]
    if name != "list":
        argv.append(str(run.run()))
    return subprocess.run(argv, text=True, capture_output=True).stdout


def test_a_secret_is_seen_by_the_workers_alone(slurm, run, tmp_path):
    """Not in arguments, in the job, in the batch script, nor in what others may read."""
    reading = [sys.executable, "-c", READ_ARGUMENTS]
    seen = [
        line for node in slurm.nodes for line in json.loads(slurm.exec_on(node, reading).stdout)
    ]  # fmt: skip
    assert any("worker_main" in line for line in seen), seen
    assert not [line for line in seen if TOKEN in line]
    for job in slurm.run(["squeue", "-h", "-r", "-o", "%A"]).stdout.split():
        for asked in (["show", "job", "-d", job], ["write", "batch_script", job, "-"]):
            assert TOKEN not in slurm.run(["scontrol", *asked]).stdout
    texts = [shown(run, *command) for command in SHOWING]
    run.hurry()
    assert TOKEN not in run.output() + "".join(texts)
    holds = [
        path for path in tmp_path.rglob("*")
        if path.is_file() and TOKEN.encode() in path.read_bytes()
    ]  # fmt: skip
    assert holds and not [path for path in holds if path.stat().st_mode & 0o077]


@pytest.mark.long
def test_output_of_a_script_commands_no_terminal(run):
    """Its lines and its error are shown by each command, and `wait` shows them as they come."""
    argv = [*run.prefix, sys.executable, "-m", "hpc_elastic", "wait", str(run.run())]
    with subprocess.Popen(argv, text=True, stdout=subprocess.PIPE) as waiting:
        texts = [shown(run, *command) for command in SHOWING]
        run.hurry()
        texts += [run.output(), waiting.communicate(timeout=120)[0]]
    texts += [shown(run, *command) for command in SHOWING]
    assert run.result()["status"] == "failed"
    assert any("owned" in text for text in texts)
    for text in texts:
        assert not [c for c in text if c in CONTROL and not c.isprintable()], ascii(text)
        assert not re.search(f"^{FAKE}", text, re.MULTILINE), text
