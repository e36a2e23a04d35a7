"""Where runs are, on a local disk or in a folder shared as by NFS; and runs that are under way."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence.machine import ROOT
from evidence.sandbox import sandbox_of
from evidence.trails import show_ends
from recovery.trail import Notice, Worker, group_of, host_of_leader, read_notices, read_workers

from shared_folder.submit import tell
from slurm_sandbox import SandboxConfig, SlurmSandbox
from slurm_sandbox.processes import wait_until

LOCAL, NFS = "local disk", "NFS"
SUBMIT = Path(__file__).with_name("submit.py")
NEVER = 1_000_000_000
"""In place of a number of steps between two saves."""
PATIENCE_S = 300.0
"""For a run to start, to get over something, or to end; it bounds hanging."""


@dataclass(frozen=True)
class Place:
    """A sandbox, and the folder for its runs, as the nodes see it.

    This machine sees what the file server has.
    """

    name: str
    sandbox: SlurmSandbox
    folder: Path


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="shared-folder-")).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def place_of(name: str, sandbox: str, folder: Path, nodes: int = 4) -> Iterator[Place]:
    """Bring a sandbox up whose runs are in a folder, and down at the end."""
    folder.mkdir()
    nfs = str(folder) if name == NFS else ""
    with sandbox_of(SandboxConfig(name=sandbox, nodes=nodes, nfs=nfs)) as made:
        yield Place(name, made, folder)


@dataclass
class Training:
    """A training under way, and its launcher, which waits for it on the login node.

    ``local`` is a folder that all see at once, for what workers and launcher write down.
    """

    place: Place
    local: Path
    run: Path
    launcher: subprocess.Popen[bytes]
    num_saves: int = 0

    name = "hpc_elastic"
    program = "hpc_elastic.agent"

    def leader(self, _: Path | None = None) -> str:
        return host_of_leader(self.run)

    def notices(self, _: Path) -> list[Notice]:
        return read_notices(self.run)

    def workers(self) -> list[Worker]:
        return read_workers(self.local)

    def group(self, size: int, since: float = 0.0) -> list[Worker]:
        """Return the newest group of that size if all have made a step since then, else nothing."""
        found = group_of(self.workers(), size)
        steps = [w.steps[-1][0] for w in found if w.steps]
        return found if len(steps) == size and min(steps) > since else []

    def wait_for_group(
        self, size: int, since: float = 0.0, timeout_s: float = PATIENCE_S
    ) -> list[Worker]:
        """Wait until a group of that size has made a step since then, and return its workers."""

        def trains() -> bool:
            assert self.launcher.poll() is None, "the run has ended"
            return bool(self.group(size, since))

        try:
            wait_until(f"a group of {size}", trains, timeout_s)
        except BaseException:
            show_ends([self.log])
            raise
        return self.group(size, since)

    @property
    def log(self) -> Path:
        return self.local / "launcher.log"

    def save(self) -> list[dict[str, float]]:
        """Ask for a save, wait for its end on all ranks, and return what each wrote down."""
        size, before = len(self.place.sandbox.nodes), time.time()
        self.num_saves += 1
        tell(self.local, saves=self.num_saves)

        def found() -> list[dict[str, float]]:
            return [save for save in self.saves() if save["begin"] > before]

        wait_until("the end of a save", lambda: len(found()) == size, PATIENCE_S)
        return found()

    def saves(self) -> list[dict[str, float]]:
        texts = [path.read_text() for path in self.local.glob("*.saves")]
        whole = [line for text in texts for line in text.split("\n")[1:-1]]
        return [json.loads(line) for line in whole]

    def finish(self) -> Sequence[str]:
        """Tell the training to finish, wait for the launcher's end, and return what it said wrong.

        None if the exit code is 0 and its last word that the run has succeeded.
        """
        tell(self.local, saves=self.num_saves, finish=True)
        try:
            code = self.launcher.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return [f"the launcher has not ended within {PATIENCE_S:g} s"]
        text = self.log.read_text()
        words = re.findall(r"\b(succeeded|failed|lost|cancelled)\b", text)
        said = [] if words[-1:] == ["succeeded"] else [f"the launcher says: {text[-300:]}"]
        return [*said, *([f"exit code {code}"] if code else [])]

    @property
    def end_s(self) -> tuple[float, float]:
        """Seconds until the launcher's last word: from the result, from the last worker's end."""
        said = self.log.stat().st_mtime
        workers = max(path.stat().st_mtime for path in self.local.glob("*.end"))
        result = (self.run / "result.json").stat().st_mtime
        return said - result, said - workers


@contextlib.contextmanager
def training(
    place: Place,
    *,
    nodes: str = "1:4",
    mib: int = 0,
    every_steps: int = 50,
    pause_s: float = 0.03,
    light: bool = False,
    settings: dict[str, Any] | None = None,
) -> Iterator[Training]:
    """Start a training on the login node; end what is left of it, and bring the nodes back.

    ``every_steps``: between two saves, beside those that are asked for; ``light``: the one without
    torch, which saves nothing; ``settings``: of the launcher, where they are not the default.
    """
    sandbox = place.sandbox
    with tempfile.TemporaryDirectory(prefix="shared-folder-local-") as name:
        local, sweep = Path(name), place.folder / f"sweep-{time.time()}"
        tell(local)
        arguments = [name, str(sweep / "checkpoints"), mib, every_steps, pause_s]
        setup = [f"date +%s.%N > {name}/began-$(hostname)"]
        given = {
            "training": f"shared_folder.{'submit' if light else 'training'}",
            "arguments": arguments, "nodes": nodes, "run": str(sweep / "run"),
            "settings": {"setup": setup, **(settings or {})},
        }  # fmt: skip
        argv = [sys.executable, str(SUBMIT), json.dumps(given)]
        env = {**os.environ, **sandbox.env, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
        env["XDG_STATE_HOME"] = str(local / "state")  # the run is none of the user's
        with (local / "launcher.log").open("wb") as log:
            launcher = subprocess.Popen(
                sandbox.on_login(argv), env=env, cwd=name,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            yield Training(place, local, sweep / "run", launcher)
        finally:
            launcher.terminate()
            launcher.wait()
            sandbox.heal_all()
            shutil.rmtree(sweep, ignore_errors=True)
