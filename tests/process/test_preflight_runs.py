"""A node that is not fit does not join, and the others go on: whole runs with `launcher=local`."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from hpc_elastic.run.events import read_events

SCRIPT = textwrap.dedent(
    """
    import os
    import hydra
    from hpc_elastic import report

    @hydra.main(version_base=None)
    def main(cfg):
        for step in range(5):
            report(step=step, loss=0.5, samples=32 * step)
        return int(os.environ["WORLD_SIZE"])

    if __name__ == "__main__":
        main()
    """
)
NVIDIA_SMI = """#!/bin/sh
if [ "$1" = -L ]; then
  echo "GPU 0: A (UUID: GPU-aa)"; echo "GPU 1: A (UUID: GPU-bb)"
elif [ "$CUDA_VISIBLE_DEVICES" = 1 ]; then
  echo "Unable to determine the device handle for GPU 1: GPU is lost." >&2; exit 15
else
  echo "0, GPU-aa, 81559, 4, 30"; echo "1, GPU-bb, 81559, 4, 30"
fi
"""


def start(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run the script to its end, with an nvidia-smi that has lost GPU 1."""
    (folder / "script.py").write_text(SCRIPT)
    command = folder / "nvidia-smi"
    command.write_text(NVIDIA_SMI)
    command.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(
        [
            sys.executable, "script.py", "+launcher=local", "nproc_per_node=1",
            f"hydra.sweep.dir={folder / 'sweep'}", *overrides,
        ],
        cwd=folder, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL,
        env={**env, "PATH": f"{folder}{os.pathsep}{env['PATH']}"},
    )  # fmt: skip


def test_a_node_that_has_lost_its_gpu_does_not_join(tmp_path):
    """It gives the reason, and the other node's run succeeds; its metrics remain."""
    done = start(tmp_path, "nodes='1:2'")
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "sweep" / "0"
    events = read_events(run / "events")
    (unfit,) = [e for e in events if e["kind"] == "preflight"]
    assert (unfit["check"], unfit["fit"], unfit["excluded"]) == ("gpus", False, False)
    assert "GPU is lost" in unfit["reason"]
    assert {e["task"] for e in events if e["kind"] == "joined"}.isdisjoint({unfit["task"]})
    assert json.loads(next(run.glob("results/*/rank-0.json")).read_text()) == 1
    (file,) = (run / "metrics").glob("*.prom")
    found = {
        sample.name: sample
        for family in text_string_to_metric_families(file.read_text())
        for sample in family.samples
    }
    assert found["hpc_elastic_step"].value == 4 and found["hpc_elastic_samples"].value == 128
    assert found["hpc_elastic_step"].labels["task"] == file.stem


def test_nodes_are_not_checked_where_that_is_not_wanted(tmp_path):
    """`launcher.agent.preflight=false`."""
    done = start(tmp_path, "nodes='1:2'", "launcher.agent.preflight=false")
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = [e["kind"] for e in read_events(tmp_path / "sweep" / "0" / "events")]
    assert "preflight" not in kinds
