"""A script under `hpc-elastic run` and under torchrun: started, disturbed, and what it shows."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import msgspec
import psutil
from evidence import torchrun

from hpc_elastic.run.events import read_events
from known_scripts import data

TABLE = Path(__file__).with_name("scripts.toml")
PATIENCE_S = 240.0
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LEVEL = re.compile(r"hpc_elastic: .*level (\d): ")  # a bar may stand before it


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of scripts.toml, which says what its fields are."""

    repository: str
    revision: str
    command: str
    progress: str
    loss: str
    resume: str
    folder: str = ""
    workers: int = 1
    epoch_steps: int = 0
    first_epoch: int = 0
    step_size: int = 1
    is_drawn: bool = False
    data: dict[str, str] = {}
    files: dict[str, str] = {}
    env: dict[str, str] = {}
    packages: tuple[str, ...] = ()

    def source(self, sources: Path) -> Path:
        return sources / self.repository.rpartition("/")[2] / self.folder

    def missing_packages(self) -> list[str]:
        return [name for name in self.packages if find_spec(name) is None]

    def lay_out(self, sources: Path, folder: Path) -> Path:
        """Copy the script, and make its data; return where its command works."""
        work = folder / "work"
        shutil.copytree(self.source(sources), work, ignore=shutil.ignore_patterns(".git"))
        for name, kind in self.data.items():
            data.make(work / name, kind)
        for name, content in self.files.items():
            (work / name).write_text(content)
        return work

    def position(self, line: str) -> int | None:
        """Return the number of the step that a line shows; None for another line."""
        match = re.search(self.progress, line)
        if match is None:
            return None
        found = {name: int(number) for name, number in match.groupdict().items()}
        step, num = found["step"], self.epoch_steps
        if "of" in found:  # as many as there are, shown as a share of those that are counted
            step = -(-step * num // found["of"])
        return (
            found.get("epoch", self.first_epoch) - self.first_epoch
        ) * num * self.step_size + step


def read_table() -> dict[str, Script]:
    return msgspec.convert(tomllib.loads(TABLE.read_text()), dict[str, Script])


@dataclass(frozen=True)
class Step:
    """A line that shows a step: when it was seen, and the output in which it stands."""

    time: float
    output: str
    position: int


@dataclass(frozen=True)
class Restart:
    """The last step before a group was restarted, and the first behind it."""

    before: int
    first: Step

    def lost(self, script: Script) -> str:
        """Return how many steps were repeated; or left out, which none should be."""
        repeated = (self.before - self.first.position) // script.step_size + 1
        if repeated < 0 and script.is_drawn:
            return "0"
        return str(repeated) if repeated >= 0 else f"**{-repeated} left out**"


def restart(steps: Sequence[Step], since: float, group_since: float = 0.0) -> Restart | None:
    """Return the first restart after a moment, of a group that has trained since another one.

    A restarted worker has a new output. None if there is none.
    """
    began = {step.output: step for step in reversed(steps)}
    first = min((s for s in began.values() if s.time > since), key=lambda s: s.time, default=None)
    if first is None:
        return None
    done = (s.position for s in steps if group_since <= s.time < first.time)
    return Restart(max(done, default=0), first)


@dataclass
class Outputs:
    """What workers write, followed as it comes: a file for each worker of each round."""

    script: Script
    root: Path
    steps: list[Step] = field(default_factory=list)
    loss: str = ""
    """Of the last line that has it."""
    levels: set[str] = field(default_factory=set)
    _read: dict[str, int] = field(default_factory=dict)

    def poll(self) -> list[Step]:
        """Read what is new; return all steps."""
        for path in sorted(self.root.rglob("*.*")):
            if path.suffix in (".out", ".err", ".log") and path.name != "agent.log":
                with contextlib.suppress(OSError), path.open("rb") as file:
                    key = f"{path}:{os.fstat(file.fileno()).st_ino}"
                    file.seek(self._read.get(key, 0))
                    content = file.read()
                    whole = max(content.rfind(b"\n"), content.rfind(b"\r")) + 1
                    self._read[key] = self._read.get(key, 0) + whole
                    self.add(key, content[:whole].decode(errors="replace"), time.time())
        return self.steps

    def add(self, output: str, text: str, now: float) -> None:
        for line in re.split(r"[\r\n]", _CODES.sub("", text)):
            position, loss = self.script.position(line), re.search(self.script.loss, line)
            if position is not None:
                self.steps.append(Step(now, output, position))
            if loss is not None:
                self.loss = loss[1]
            if level := _LEVEL.search(line):
                self.levels.add(level[1])


def _environment(script: Script) -> dict[str, str]:
    given = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    given |= script.env
    given["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{given['PATH']}"
    paths = [env["PYTHONPATH"] for env in (script.env, os.environ) if "PYTHONPATH" in env]
    return given | {"PYTHONPATH": os.pathsep.join(paths)}


class Ours:
    """A run with the local launcher; a node that leaves comes back by itself."""

    def __init__(self, script: Script, work: Path) -> None:
        self.run, self.outputs = work.parent / "run", work.parent / "run" / "tasks"
        self._node = f"local-{script.workers - 1}"
        nodes = "1" if script.workers == 1 else f"1:{script.workers}"
        argv = ["run", "--launcher=local", f"--nodes={nodes}", "--nproc-per-node=1"]
        argv += [f"--run-dir={self.run}", "--scale-up-timeout-s=5", "--"]
        with (work.parent / "launcher.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*_CLI, *argv, *shlex.split(script.command)], cwd=work, env=_environment(script),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def code(self) -> int | None:
        return self._process.poll()

    def preempt(self) -> None:
        self.ask("node", "preempt", str(self.run), self._node)

    def come_back(self) -> None:
        pass

    def kill(self) -> None:
        self.ask("node", "kill", str(self.run), self._node)

    def ask(self, *words: str) -> int:
        """Call a command of hpc-elastic; return its exit code."""
        return subprocess.run([*_CLI, *words], stdout=subprocess.DEVNULL, check=False).returncode

    def end(self) -> None:
        if self.code() is None:
            self._process.send_signal(signal.SIGINT)
        self._process.wait(PATIENCE_S)

    def sizes(self) -> str:
        """Return the numbers of workers of its rounds."""
        folder = self.run / "events"
        events = read_events(folder) if folder.is_dir() else []
        return " ".join(str(e["world_size"]) for e in events if e["kind"] == "round")


_CLI = [sys.executable, "-m", "hpc_elastic"]


class Torchrun:
    """torchrun, an agent a node; one that has ended is started again, as a requeued job is."""

    def __init__(self, script: Script, work: Path, *, alone: bool = False) -> None:
        self.outputs, self._work, self._env = work.parent / "logs", work, _environment(script)
        program, *words = shlex.split(script.command)
        command = words if program == "python" else ["--no-python", program, *words]
        if script.workers == 1 or alone:
            place, num_agents = ["--standalone", f"--nproc-per-node={script.workers}"], 1
        else:
            with socket.create_server(("127.0.0.1", 0)) as free:
                endpoint = f"127.0.0.1:{free.getsockname()[1]}"
            place = [f"--nnodes=1:{script.workers}", "--nproc-per-node=1", "--rdzv-id=1"]
            place += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
            num_agents = script.workers
        logs = ["--redirects=3", f"--log-dir={self.outputs}", "--max-restarts=9"]
        self._options, self._command = [*logs, *place], command
        self._agents = [self._agent(is_host=not number) for number in range(num_agents)]
        self._is_changing = False

    def _agent(self, *, is_host: bool) -> subprocess.Popen[bytes]:
        """Start an agent; the store is on the first node, which is never taken."""
        conf = torchrun.conf({**torchrun.TUNED, "is_host": int(is_host)})
        settings = [] if "--standalone" in self._options else [f"--rdzv-conf={conf}"]
        argv = [str(torchrun.TORCHRUN), *self._options, *settings, *self._command]
        with (self._work.parent / "launcher.log").open("ab") as log:
            return subprocess.Popen(
                argv, cwd=self._work, env=self._env | torchrun.UNSHARED, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def code(self) -> int | None:
        codes = [code for agent in self._agents if (code := agent.poll()) is not None]
        is_over = len(codes) == len(self._agents) and not self._is_changing
        return max(map(abs, codes)) if is_over else None

    def preempt(self) -> None:
        self._is_changing = len(self._agents) == 1
        self._agents[-1].terminate()
        self._agents[-1].wait(PATIENCE_S)
        if self._is_changing:
            self.come_back()

    def come_back(self) -> None:
        self._agents[-1] = self._agent(is_host=len(self._agents) == 1)
        self._is_changing = False

    def kill(self) -> None:
        self._is_changing = True
        _kill(self._agents[-1])
        self.come_back()

    def end(self) -> None:
        for agent in self._agents:
            _kill(agent)


def _kill(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent, and all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(agent.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    agent.kill()
    agent.wait()


Peer = Ours | Torchrun
