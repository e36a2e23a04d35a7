"""The state file of a sandbox: its configuration, its place, its processes; and its lock.

The file is replaced as a whole after every step, so it is right even if `up` was killed midway. A
lock for each sandbox serialises commands; its empty file stays, because removing it would let two
commands hold the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from .config import Layout, SandboxConfig
from .processes import Process, SandboxError, wait_until

DEFAULT_ROOT = Path("/run/hpc-elastic-sandbox")
_LOCK_TIMEOUT_S = 180.0
_TUPLES = ("gpus", "memory_mb", "open_paths", "extra_lines")


class NotUpError(SandboxError):
    """The sandbox is not up: call ``up`` first."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"the Slurm sandbox {name!r} is not up; start it with: slurm-sandbox up --name {name} "
            "(in a clone: scripts/slurm_sandbox.py)"
        )


@dataclass(frozen=True)
class State:
    """One sandbox.

    Attributes:
        config: Its settings.
        layout: Its place.
        processes: The daemons started, by name. A node's entry is the process outside its
            namespaces, whose end is the node's end.
        ready: Whether `up` was completed.
    """

    config: SandboxConfig
    layout: Layout
    processes: Mapping[str, Process] = field(default_factory=dict)
    ready: bool = False

    def with_process(self, name: str, process: Process) -> State:
        """Return the state with a process added or replaced."""
        return replace(self, processes={**self.processes, name: process})


def to_text(state: State) -> str:
    """Return the text of the state file."""
    return json.dumps(asdict(state), indent=1, default=str) + "\n"


def from_text(text: str) -> State:
    """Parse the text of `to_text`, also of an earlier version, which lacks settings of this one."""
    content = json.loads(text)
    config, layout = content["config"], content["layout"]
    tuples = {name: tuple(config[name]) for name in _TUPLES if name in config}
    tree = layout["tree"] and Path(layout["tree"])
    return State(
        config=SandboxConfig(**{**config, **tuples}),
        layout=Layout(**{**layout, "directory": Path(layout["directory"]), "tree": tree}),
        processes={name: Process(**entry) for name, entry in content["processes"].items()},
        ready=content["ready"],
    )


def load_state(name: str, root: Path = DEFAULT_ROOT) -> State | None:
    """Return a sandbox's state, or None if there is no such sandbox."""
    try:
        return from_text((root / name / "state.json").read_text())
    except FileNotFoundError:
        return None


def save_state(state: State) -> State:
    """Write the state atomically, and return it."""
    target = state.layout.directory / "state.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_suffix(".new")
    fresh.write_text(to_text(state))
    fresh.replace(target)
    return state


def remove_directory(state: State) -> None:
    """Remove the sandbox's directory, the state file last, so that a retry finds it."""
    for entry in state.layout.directory.iterdir():
        if entry.name == "state.json":
            continue
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.rmtree(state.layout.directory)


@contextlib.contextmanager
def locked(name: str, root: Path) -> Iterator[None]:
    """Hold the lock of that name below `root`.

    Raises:
        SandboxTimeoutError: Another command holds it too long.
    """
    folder = root / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a") as lock:
        wait_until(f"the lock {lock.name}", lambda: _try_lock(lock.fileno()), _LOCK_TIMEOUT_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
