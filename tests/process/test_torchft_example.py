"""The script of docs/howto/from-torchft.md: it runs, and only its imports are not torchft's."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from hpc_elastic.ft.coordination import LighthouseServer

PAGE = Path(__file__).parents[2] / "docs/howto/from-torchft.md"
OURS = "hpc_elastic.ft"
PATIENCE_S = 120

# what torchft 0.2.0 takes, of what the script uses
TORCHFT = {
    "torchft": {"DistributedDataParallel", "DistributedSampler", "Manager", "Optimizer"},
    "torchft.process_group": {"ProcessGroupGloo"},
}
ARGUMENTS = {
    "DistributedDataParallel": ["manager", "module", "kwargs"],
    "DistributedSampler": [
        "dataset", "replica_rank", "num_replica_groups", "group_rank", "num_replicas", "kwargs",
    ],
    "Manager": [
        "pg", "load_state_dict", "state_dict", "min_replica_size", "use_async_quorum", "timeout",
        "quorum_timeout", "connect_timeout", "rank", "world_size", "world_size_mode", "store_addr",
        "store_port", "lighthouse_addr", "replica_id", "port", "hostname", "heartbeat_interval",
        "checkpoint_transport", "init_sync", "max_retries", "quorum_retries",
    ],
    "Optimizer": ["manager", "optim"],
    "ProcessGroupGloo": ["timeout", "pg"],
}  # fmt: skip
NOT_OURS = {"ProcessGroupGloo": {"pg"}}
"""Arguments that docs/reference/torchft.md lists as absent here."""
ONLY_OURS = {"Manager": ["check_every", "check_state", "heal_corrupted", "catch_up_bytes"]}
"""Arguments that it lists as new here."""


def script() -> str:
    """Return the example."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (found,) = (block for block in blocks if f"from {OURS}" in block)
    return found


def imported(tree: ast.Module, package: str) -> dict[str, set[str]]:
    """Return what a script imports from the modules of a package."""
    names: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(package):
            names.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return names


def test_only_the_import_lines_differ_from_a_script_for_torchft():
    """With torchft in its import lines, every name and argument is one that torchft has."""
    text = script()
    lines = [line for line in text.splitlines() if OURS in line]
    assert lines and all(line.startswith(f"from {OURS}") for line in lines)
    theirs = ast.parse(text.replace(OURS, "torchft"))
    compile(theirs, "example.py", "exec")
    names = imported(theirs, "torchft")
    assert all(used <= TORCHFT[module] for module, used in names.items())
    for call in (n for n in ast.walk(theirs) if isinstance(n, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id in ARGUMENTS:
            legal = ARGUMENTS[call.func.id]
            assert len(call.args) <= len(legal)
            assert {keyword.arg for keyword in call.keywords} <= set(legal)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_arguments_are_those_of_torchft(name):
    """In name and order; new ones follow."""
    expected = [a for a in ARGUMENTS[name] if a not in NOT_OURS.get(name, ())]
    expected += ONLY_OURS.get(name, [])
    assert arguments(importlib.import_module(OURS), name) == expected


def test_the_table_of_torchfts_arguments_is_right():
    """Where torchft is installed."""
    torchft = pytest.importorskip("torchft", reason="torchft is not installed")
    assert {name: arguments(torchft, name) for name in ARGUMENTS} == ARGUMENTS


def arguments(package, name: str) -> list[str]:
    """Return what a class takes."""
    return list(inspect.signature(getattr(package, name).__init__).parameters)[1:]


def test_the_script_runs_as_it_stands(tmp_path):
    """Two replicas train together, and end with the same parameters."""
    path = tmp_path / "example.py"
    path.write_text(script())
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in "12"]
    replicas = [
        subprocess.Popen(
            [sys.executable, str(path)],
            env={
                **os.environ,
                "TORCHFT_LIGHTHOUSE": lighthouse.address(),
                "NUM_REPLICA_GROUPS": "2",
                "REPLICA_GROUP_ID": str(i),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "RANK": "0",
                "WORLD_SIZE": "1",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for i, store in enumerate(stores)
    ]
    try:
        said = [replica.communicate(timeout=PATIENCE_S)[0] for replica in replicas]
    finally:
        for replica in replicas:
            replica.kill()
        lighthouse.shutdown()
    assert said[0] == said[1]
    assert said[0].startswith("step 100, parameters add up to ")
    assert [replica.returncode for replica in replicas] == [0, 0]
