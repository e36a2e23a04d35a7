"""Some minutes of random faults, on a Slurm of its own: it does not use the other tests' one."""

import os
import subprocess

import pytest

from slurm_sandbox import SlurmSandbox
from slurm_sandbox.pytest_plugin import require_sandbox

MINUTES = 5
SEED = "7"
"""The same faults each time; `scripts/soak` is for others."""
BOUND_S = 60 * MINUTES + 1500
"""Far above what a loaded machine needs for the start, the last fault and the end."""


def release() -> list[str]:
    """Return the option for the Slurm of the other tests; they use it meanwhile."""
    sandbox = SlurmSandbox(os.environ.get("HPC_ELASTIC_SANDBOX", "default"))
    if not sandbox.status()["up"]:
        return []
    slurm = SlurmSandbox.attach(sandbox.name).config.slurm
    return [f"--slurm={slurm}"] if slurm else []


@pytest.mark.long
def test_a_run_gets_over_minutes_of_faults():
    """Nothing is lost or made twice, all is explained, nothing is left."""
    require_sandbox()
    seed = os.environ.get("HPC_ELASTIC_SEED", SEED)
    print("HPC_ELASTIC_SEED =", seed)
    argv = ["./scripts/soak", f"--minutes={MINUTES}"]
    argv += [f"--seed={seed}", *release()]
    soak = subprocess.Popen(argv, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = soak.communicate(timeout=BOUND_S)
    finally:
        soak.terminate()  # then it takes its Slurm down
        soak.wait()
    assert soak.returncode == 0, output
    print(output)
