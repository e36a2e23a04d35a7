"""The two libraries that are compared, under the names that both of them use."""

import contextlib
import importlib
import importlib.util
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
OURS, PEER = "ours", "torchft"
PACKAGES = {OURS: "hpc_elastic.ft", PEER: "torchft"}
PATIENCE_S = 20.0
_SERVE = (
    "import sys, time; from {package}.coordination import LighthouseServer;"
    "server = LighthouseServer(bind=sys.argv[1], min_replicas=1);"
    "time.sleep(1e6)"
)


def part_of(library: str, name: str) -> Any:
    """Return a module of a library: ``manager``, ``process_group``, ``checkpointing``..."""
    return importlib.import_module(f"{PACKAGES[library]}.{name}")


def is_installed(library: str) -> bool:
    return importlib.util.find_spec(PACKAGES[library].partition(".")[0]) is not None


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    return port


@dataclass
class Lighthouse:
    """A library's lighthouse in a process of its own, with all defaults.

    Its command line (``by_cli``) and its Python API may have different ones.
    """

    library: str
    by_cli: bool = False
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, again if need be, at the same port; return once it listens."""
        self.process = subprocess.Popen(
            self._command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.01)
        raise SystemExit(f"the lighthouse of {self.library} does not listen at {self.port}")

    def kill(self) -> None:
        """End it as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _command(self) -> list[str]:
        bind = f"[::]:{self.port}"
        scripts = Path(sysconfig.get_path("scripts"))
        if not self.by_cli:
            code = _SERVE.format(package=PACKAGES[self.library])
            return [sys.executable, "-c", code, bind]
        if self.library == PEER:
            return [str(scripts / "torchft_lighthouse"), "--min_replicas", "1", "--bind", bind]
        main = "from hpc_elastic.cli.main import main; main()"
        return [sys.executable, "-c", main, "lighthouse", "--min-replicas", "1", "--bind", bind]


@contextlib.contextmanager
def lighthouse(library: str, *, by_cli: bool = False) -> Iterator[Lighthouse]:
    made = Lighthouse(library, by_cli)
    try:
        made.start()
        yield made
    finally:
        made.kill()
