"""The graphs that torch.compile has compiled, kept in the run for each type of node (worker).

    <run>/compile/<type>.<local rank>.bin     what torch.compiler.save_cache_artifacts() returns

torch itself keeps compiled graphs in a folder of the node. A worker does not find them after a
restart on another node, nor in a job whose /tmp is new. So each worker puts them into the run after
its first steps, if the script compiles at all, and a worker that starts puts them back into the
folder of its node, before the script is imported. torch checks that they fit: its version, the
device and the graph are part of their keys.

torch unpickles such a file, so it is read only if this user alone can write it.

Source: https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_tutorial.html
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

from hpc_elastic.gpus import NVIDIA_GPUS
from hpc_elastic.run.directory import RunDir
from hpc_elastic.shared_files import make_folder, open_file, write_atomic

_log = logging.getLogger(__name__)

_CPUS = Path("/proc/cpuinfo")


class CompileCache:
    """What this worker has compiled, and the file in the run."""

    def __init__(self, run: RunDir) -> None:
        import torch

        name = f"{node_type()}-torch-{torch.__version__}.{os.environ.get('LOCAL_RANK', '0')}.bin"
        self._file = run.compiled / re.sub(r"[^\w.+-]", "_", name)
        self._is_first_node = os.environ.get("GROUP_RANK") == "0"
        self._next_step = 1
        self._stored: Any = None
        """What the file holds, as far as this worker knows."""

    def load(self) -> None:
        """Put the graphs of earlier workers into this node's folder, where torch finds them."""
        import torch

        try:
            if _is_private(self._file):
                with open_file(self._file) as file:
                    self._stored = torch.compiler.load_cache_artifacts(file.read())
        except FileNotFoundError:
            return
        except Exception as e:  # torch's own: the graphs are compiled anew
            _log.warning("%s: compiled graphs cannot be used: %s", self._file, e)

    def on_step(self, number: int) -> None:
        """Store new graphs after the first step of this worker, its tenth, hundredth and so on."""
        if number != self._next_step:
            return
        self._next_step *= 10
        if "torch._inductor" not in sys.modules:
            return
        import torch

        found = torch.compiler.save_cache_artifacts()
        if found is None or found[1] == self._stored:
            return
        content, self._stored = found
        threading.Thread(
            target=self._write, args=(content,), name="compile cache", daemon=True
        ).start()

    def _write(self, content: bytes) -> None:
        try:
            # one node of each type is enough; where two see no file, both write the same
            if self._is_first_node or not self._file.exists():
                make_folder(self._file.parent, mode=0o700)
                write_atomic(self._file, content, mode=0o600)
        except OSError as e:
            _log.warning("%s: compiled graphs are not kept: %s", self._file, e)


def node_type() -> str:
    """Return the model of this node's first GPU, or of its CPU without one; ``unknown`` if unknown.

    It is read without the driver: a script may still choose its device, or fork.
    """
    try:
        gpus = sorted(NVIDIA_GPUS.glob("*/information"))
        text, key = (gpus[0].read_text(), "Model") if gpus else (_CPUS.read_text(), "model name")
        found = re.search(rf"^{key}\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else "unknown"


def _is_private(file: Path) -> bool:
    found = file.stat()
    if found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        return True
    _log.warning("%s is not used: others may write it (chmod go-w, or remove it)", file)
    return False
