"""A node that is not fit is avoided by its run, on a real Slurm."""

import json
import stat

import pytest
from sweeps import eventually, hosts

SCRIPT = """
import os
import hydra

@hydra.main(version_base=None)
def main(cfg):
    return os.environ["WORLD_SIZE"]

if __name__ == "__main__":
    main()
"""
NVIDIA_SMI = """#!/bin/sh
if [ "$SLURMD_NODENAME" = {bad} ]; then
  echo "Unable to determine the device handle for GPU 0: GPU is lost." >&2; exit 15
fi
echo "0, GPU-aa, 81559, 4, 30"
"""


@pytest.mark.long
def test_a_node_that_has_lost_its_gpu_is_excluded_and_another_takes_its_place(
    slurm, sweep, tmp_path
):
    """Its task goes back to the queue and starts elsewhere; the reason is written down."""
    names = slurm.run(["sinfo", "-h", "-N", "-o", "%N"]).stdout.split()
    bad = sorted(names)[0]  # the one that Slurm gives first
    command = tmp_path / "bin" / "nvidia-smi"
    command.parent.mkdir()
    command.write_text(NVIDIA_SMI.format(bad=bad))
    command.chmod(command.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    env = tmp_path / "env.sh"
    env.write_text(f"export PATH={command.parent}:$PATH\n")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    settings = ["+launcher=slurm", "nodes=2", "nproc_per_node=1"]
    settings += ["+launcher.env.CUDA_VISIBLE_DEVICES=0"]  # Slurm has none here, and says so
    to_file = f"launcher.notify.command='cat >> {tmp_path}/told'"
    settings += [to_file, "launcher.notify.events=[excluded]"]
    s = sweep(*settings, f'launcher.setup=[". {env}"]', script=script)
    eventually(lambda: s.events("preflight"), "the node is found not to be fit")
    output = s.output()
    assert s.result()["status"] == "succeeded", output
    unfit = s.events("preflight")
    assert {(e["host"], e["check"], e["excluded"]) for e in unfit} == {(bad, "gpus", True)}
    assert bad not in hosts(s) and len(hosts(s)) == 2
    excluded = json.loads((s.run() / "excluded_nodes.json").read_text())
    assert "GPU is lost" in excluded[bad]["why"]
    message = json.loads((tmp_path / "told").read_text())  # one
    assert message["host"] == bad and "GPU is lost" in message["text"]
    assert s.result()["restarts"] == 0
