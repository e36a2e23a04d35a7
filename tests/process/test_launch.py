"""`launch` from a program, for real: agents and workers as processes of this machine."""

import subprocess
import sys
from pathlib import Path

import pytest

from hpc_elastic import launch
from hpc_elastic.errors import WorkerGroupError

DEADLINE_S = 60.0
HERE = Path(__file__).parent


def add_up(offset: int) -> dict[str, int]:
    """Meet all other workers, and say who was there."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    rank = dist.get_rank()
    dist.destroy_process_group()
    return {"rank": rank, "total": int(total)}


def fail_on_the_second_node() -> None:
    """Raise in one worker, while the other waits for it."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise LookupError("no such digit")
    dist.barrier()


@pytest.fixture(autouse=True)
def cpus_only(monkeypatch):
    """Two nodes on a machine with one GPU would be refused."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_launch_returns_the_results_by_global_rank(tmp_path):
    """Two nodes form one group; arguments go in and values come out as JSON."""
    results = launch(
        add_up, 10, nodes="2", launcher="local", run_dir=tmp_path / "run", poll_interval_s=0.1
    )
    assert dict(results) == {0: {"rank": 0, "total": 21}, 1: {"rank": 1, "total": 21}}
    assert (results.run_dir, results.restarts) == (tmp_path / "run", 0)


def test_launch_raises_the_first_failure(tmp_path):
    """The traceback is that of the worker that raised, not of the one that waited for it."""
    with pytest.raises(WorkerGroupError) as raised:
        launch(
            fail_on_the_second_node, nodes="2", launcher="local",
            run_dir=tmp_path / "run", poll_interval_s=0.1, max_restarts=0,
        )  # fmt: skip
    error = raised.value
    assert error.failure and error.failure["rank"] == 1
    assert error.failure["exception"] == "LookupError"
    assert "in fail_on_the_second_node" in str(error)
    assert "LookupError: no such digit" in str(error)


def test_a_script_may_launch_itself(tmp_path):
    """Guarded by `__name__`, as in the documentation; the range is elastic from one node."""
    script = tmp_path / "program.py"
    script.write_text(
        "from hpc_elastic import launch\n"
        "def work(word):\n"
        "    return word * 2\n"
        "if __name__ == '__main__':\n"
        "    print(dict(launch(work, 'ab', nodes='1:2', poll_interval_s=0.1)))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True,
        timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0: 'abab'" in done.stdout.splitlines()[-1]
