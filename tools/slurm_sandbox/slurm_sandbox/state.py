"""What a sandbox remembers between commands: its configuration, its place, its processes.

The file is replaced as a whole after every step, so a sandbox whose `up` was killed midway is
described by what it had reached. A lock for each sandbox keeps two commands apart; its empty file
stays behind, since removing a lock's file would let two hold it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .commands import wait_until
from .config import SandboxConfig
from .layout import Layout
from .processes import Process

DEFAULT_ROOT = Path("/run/hpc-elastic-sandbox")
_LOCK_TIMEOUT_S = 180.0
_TUPLES = ("open_paths", "extra_lines")


@dataclass(frozen=True)
class State:
    """One sandbox.

    Attributes:
        config: What was asked for.
        layout: Where it is.
        processes: The daemons started, by name. A node's entry is the process that stands outside
            its namespaces and with which it ends.
        ready: Whether `up` has come to its end.
    """

    config: SandboxConfig
    layout: Layout
    processes: Mapping[str, Process] = field(default_factory=dict)
    ready: bool = False

    def with_process(self, name: str, process: Process) -> State:
        """Return the state with one more process, or another one under that name."""
        return replace(self, processes={**self.processes, name: process})


def to_json(state: State) -> str:
    """Return the text of the state file."""
    content = asdict(state)
    layout = state.layout
    content["layout"]["directory"] = str(layout.directory)
    content["layout"]["tree"] = None if layout.tree is None else str(layout.tree)
    return json.dumps(content, indent=1) + "\n"


def from_json(text: str) -> State:
    """Return the state that `to_json` wrote."""
    content = json.loads(text)
    config, layout = content["config"], content["layout"]
    return State(
        config=SandboxConfig(
            **{**config, **{name: tuple(config.get(name, ())) for name in _TUPLES}}
        ),
        layout=_layout(layout),
        processes={name: Process(**entry) for name, entry in content["processes"].items()},
        ready=content["ready"],
    )


def _layout(content: dict[str, Any]) -> Layout:
    tree = content.get("tree")
    places = {
        "directory": Path(content["directory"]),
        "tree": None if tree is None else Path(tree),
    }
    return Layout(**{**content, **places})


def path_of(name: str, root: Path) -> Path:
    """Return a sandbox's state file."""
    return root / name / "state.json"


def load(name: str, root: Path) -> State | None:
    """Return a sandbox's state, or None if there is no such sandbox."""
    try:
        return from_json(path_of(name, root).read_text())
    except FileNotFoundError:
        return None


def save(state: State) -> State:
    """Write the state, whole or not at all, and return it."""
    target = state.layout.directory / "state.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_suffix(".new")
    fresh.write_text(to_json(state))
    fresh.replace(target)
    return state


def forget(state: State) -> None:
    """Remove the sandbox's directory, the state file last: what is half removed stays known."""
    for entry in state.layout.directory.iterdir():
        if entry.name == "state.json":
            continue
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.rmtree(state.layout.directory)


@contextlib.contextmanager
def locked(name: str, root: Path) -> Iterator[None]:
    """Hold the lock of that name below `root`.

    Raises:
        SandboxTimeoutError: Another command holds it for too long.
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
