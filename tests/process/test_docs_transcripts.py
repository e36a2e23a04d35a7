"""What pages show of a terminal is what it shows: their commands are run, the outputs compared.

Numbers, times, folders and drawn bars may differ. Three dots on the page stand for any lines.
Commands that look at a run are repeated until they show what the page has; commands that disturb it
wait until it trains and has a checkpoint.
"""

import contextlib
import getpass
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from doc_pages import ROOT, blocks
from hpc_elastic.testing import FakeSlurm

FAILURES = ROOT / "docs/explanation/what-a-failure-looks-like.md"
LARGER = ROOT / "docs/tutorial/5-larger-model.md"
PATIENCE_S = 300.0

LOOKS = ("status", "events", "logs", "checkpoints verify", "audit")
DISTURBS = ("node preempt", "node kill", "cancel")


def plain(line: str) -> str:
    """Return a line without what differs from run to run."""
    line = re.sub(r"[▁-█━╌─│]+", " ", line.removeprefix("... "))
    line = re.sub(r"\S*/", "", line).replace(getpass.getuser(), "root")
    line = re.sub(r"-[0-9a-f]{8}\b", "", line).replace("(Priority)", "(Resources)")
    line = re.sub(r"\d[\d,.:]*(e-\d+)?", "#", line)
    line = re.sub(r"# (ms|s|min|h|d)( # (s|min|h))*\b", "# s", line)
    line = line.replace(" (from # back to #)", "")  # no step is lost right behind a checkpoint
    return re.sub(r"(RUNNING .*) # s$", r"\1", " ".join(line.split()))  # the time left


def missing(shown: list[str], output: str) -> str | None:
    """Return the first line of a page that an output lacks, in this order, if there is one."""
    lines = iter([plain(line) for line in output.splitlines()])
    for line in shown:
        wanted = plain(line)
        if line == "..." or not wanted:
            continue
        partial = line.startswith("... ")
        if not any(line == wanted or (partial and line.endswith(wanted)) for line in lines):
            return line
    return None


def steps_of(console: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a page's blocks with what the page shows behind it."""
    command, shown = "", []
    for line in "\n".join(console).splitlines():
        if line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = line.removeprefix("$ "), []
        else:
            shown.append(line)
    yield command, shown


class Terminal:
    """A shell in a folder of its own, in which a page is typed."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder = folder
        here = str(Path(sys.executable).parent)
        path = f"{here}:{environ.get('PATH', os.environ['PATH'])}"
        self.env = {**os.environ, **environ, "PATH": path, "COLUMNS": "100"}
        self.env["XDG_STATE_HOME"] = str(folder / "state")

    def call(self, line: str) -> str:
        """Return what a command line prints, on both streams."""
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env=self.env, text=True, timeout=PATIENCE_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.stdout

    def until(self, look: str, shown: list[str]) -> None:
        """Repeat a command until it shows what the page has."""
        deadline = time.monotonic() + PATIENCE_S
        while (lacking := missing(shown, output := self.call(look))) is not None:
            assert time.monotonic() < deadline, f"$ {look}\nlacks: {lacking}\n{output}"
            time.sleep(0.5)

    def until_it_trains(self, run: str) -> None:
        """Wait until a run trains and has a checkpoint."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            output = self.call(f"hpc-elastic status {run} --json 2> /dev/null")
            with contextlib.suppress(ValueError, KeyError):
                found = json.loads(output)
                if found["phase"] == "training" and found["checkpoint"]:
                    return
            assert time.monotonic() < deadline, output
            time.sleep(0.3)

    def node(self, run: str, *, leads: bool) -> str:
        """Return the node that leads a run of two local nodes, or the other one."""
        leader = re.findall(r"(local-\d) leads", self.call(f"hpc-elastic events {run}"))[-1]
        others = {"local-0": "local-1", "local-1": "local-0"}
        return leader if leads else others[leader]

    def type(self, line: str, shown: list[str], *, at_leader: bool) -> None:
        """Type a line of the page, and compare."""
        words = line.split()
        kind = next(
            (k for k in (*LOOKS, *DISTURBS) if f"{line} ".startswith(f"hpc-elastic {k} ")), ""
        )
        run = words[1 + len(kind.split())] if kind else "last"
        if kind in DISTURBS or words[0] == "dd":
            self.until_it_trains(run)
        if kind.startswith("node "):
            line = line.replace(words[4], self.node(run, leads=at_leader))
        if kind in LOOKS:
            self.until(line, shown)
        else:
            output = self.call(line)
            assert (lacking := missing(shown, output)) is None, f"{line}\n{lacking}\n{output}"


def sections(page: Path) -> dict[str, str]:
    """Return the text below each heading of the second level."""
    parts = re.split(r"^## (.*)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture
def terminal(tmp_path) -> Iterator[Terminal]:
    """A shell beside the script of the page; what its runs leave is ended."""
    folder = tmp_path / "failures"
    shutil.copytree(ROOT / "examples/failures", folder)
    terminal = Terminal(folder, {})
    yield terminal
    terminal.call("hpc-elastic cancel last --yes; umount -l small")


ON_SLURM = ("9. ", "12. ")
NUMBERED = [name for name in sections(FAILURES) if name[0].isdigit()]


def test_transcripts_are_compared():
    """A line that is missing, or comes in another order, is found; numbers and folders are not."""
    output = "12:01:02 local-1 was lost; lost 7 steps\n12:01:03 the run failed\nx/y/train.py"
    assert missing(["11:00:00 local-0 was lost; lost 38 steps", "...", "train.py"], output) is None
    assert missing(["the run failed"], output) == "the run failed"
    assert missing(["... the run failed"], output) is None
    assert missing(["... the run failed", "1:1 local-1 was lost; lost 7 steps"], output)
    assert [name.split(". ")[0] for name in NUMBERED] == [str(i) for i in range(1, 17)]


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in NUMBERED if not n.startswith(ON_SLURM)])
def test_a_failure_looks_as_the_page_shows(name, terminal):
    """Each of them on this machine."""
    if "disk" in name and os.geteuid():
        pytest.skip("only root may mount a tmpfs")
    for line, shown in steps_of(blocks(sections(FAILURES)[name], "console")):
        terminal.type(line, shown, at_leader="leads now" in sections(FAILURES)[name])


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in NUMBERED if n.startswith(ON_SLURM)])
def test_a_failure_on_slurm_looks_as_the_page_shows(name, terminal, tmp_path):
    """On the fake one: the time limit, and too few nodes."""
    with FakeSlurm(nodes=4) as slurm:
        if "nodes" in name:
            slurm.run(["scontrol", "update", "nodename=node3,node4", "state=drain", "reason=x"])
        on_slurm = Terminal(terminal.folder, dict(slurm.env))
        for line, shown in steps_of(blocks(sections(FAILURES)[name], "console")):
            on_slurm.type(line, shown, at_leader=False)


@pytest.mark.long
def test_the_larger_model_of_the_tutorial_survives_its_preemption(tmp_path):
    """Sharded, compiled, tracked and judged; no sample is lost, and nothing is warned of."""
    pytest.importorskip("tensorboard")
    text = LARGER.read_text()
    names = re.findall(r"Save this as `(\w+\.py)`", text)
    for name, block in zip(names, blocks(text, "python"), strict=True):
        (tmp_path / name).write_text(block)
    terminal = Terminal(tmp_path, {})
    try:
        for line, shown in steps_of(blocks(text, "console")):
            if not line.startswith("tensorboard"):
                terminal.type(line, shown, at_leader=True)
        warnings = terminal.call("hpc-elastic logs runs/large/0 --grep hpc_elastic:")
        assert "hpc_elastic: " not in warnings
        assert any((tmp_path / "runs/large/0/tensorboard").iterdir())
    finally:
        for run in ("large", "evaluate"):
            terminal.call(f"hpc-elastic cancel runs/{run}/0 --yes")
