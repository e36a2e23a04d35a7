"""Graphs of torch.compile are kept in the run, also where the folder of a node is new."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from hpc_elastic.agent import worker_main
from hpc_elastic.agent.worker_main import CompileCache
from hpc_elastic.run.directory import RunDir

CODE = """
import json, pathlib, sys, threading
from hpc_elastic.agent.worker_main import _prepare_torch
from hpc_elastic.run.directory import RunDir
import torch
_prepare_torch(RunDir(pathlib.Path(sys.argv[1])))
w = torch.nn.Parameter(torch.ones(3))
sgd = torch.optim.SGD([w], 0.1)
for _ in range(2):
    torch.compile(lambda x: (x.sin() * 3 + x).sum())(w).backward()
    sgd.step()
[t.join() for t in threading.enumerate() if t.name == "compile cache"]
from torch._dynamo.utils import counters
print(json.dumps({k: v for k, v in counters["inductor"].items() if k.startswith("fxgraph")}))
"""


def worker(run: Path, node: Path) -> tuple[int, int]:
    """Train on a node with a folder of its own; return the cache's hits and misses."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(node), "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(run)], env=env, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return found.get("fxgraph_cache_hit", 0), found.get("fxgraph_cache_miss", 0)


@pytest.mark.long
def test_a_worker_on_a_new_node_does_not_compile_again(tmp_path):
    """It reads what the first worker has put into the run."""
    assert worker(tmp_path, tmp_path / "node1") == (0, 2), "forward and backward"
    (file,) = (tmp_path / "compile").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert worker(tmp_path, tmp_path / "node2") == (2, 0)


def test_a_file_that_others_may_write_is_not_read(tmp_path, monkeypatch, caplog):
    """torch unpickles it; a damaged one is as good as none."""
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", loaded := Mock())
    cache = CompileCache(RunDir(tmp_path))
    cache.load()
    cache._file.parent.mkdir()
    cache._file.write_bytes(b"any")
    cache._file.chmod(0o660)
    cache.load()
    assert not loaded.called and "others may write it" in caplog.text
    cache._file.chmod(0o600)
    cache.load()
    assert loaded.call_args.args == (b"any",)
    monkeypatch.undo()
    cache.load()


def test_the_type_of_a_node_is_its_gpu_or_cpu(tmp_path, monkeypatch):
    """As the kernel shows them."""
    gpus, cpus = tmp_path / "gpus", tmp_path / "cpuinfo"
    monkeypatch.setattr(worker_main, "NVIDIA_GPUS", gpus)
    monkeypatch.setattr(worker_main, "_CPUS", cpus)
    assert worker_main.node_type() == "unknown"
    cpus.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert worker_main.node_type() == "Some CPU @ 2 GHz"
    (gpus / "0000:3b:00.0").mkdir(parents=True)
    (gpus / "0000:3b:00.0" / "information").write_text("Model: \t\t NVIDIA H100\nIRQ:   1\n")
    assert worker_main.node_type() == "NVIDIA H100"
