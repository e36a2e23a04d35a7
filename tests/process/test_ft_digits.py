"""LocalSGD and DiLoCo with real replicas: one is killed in the middle, and all learn the digits."""

import subprocess
import sys
from pathlib import Path

import pytest

from hpc_elastic.ft.coordination import LighthouseServer

KINDS = ("LocalSGD", "DiLoCo")
SCRIPT = Path(__file__).with_name("ft_digits.py")
PATIENCE_S = 300


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What became of the replicas, by kind: the accuracy and the hash of each."""
    folder = tmp_path_factory.mktemp("digits")
    lighthouses = {kind: LighthouseServer(bind="127.0.0.1:0") for kind in KINDS}
    jobs = [f"{kind}={lighthouse.address()}" for kind, lighthouse in lighthouses.items()]
    command = [sys.executable, str(SCRIPT), str(folder), *jobs]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    for lighthouse in lighthouses.values():
        lighthouse.shutdown()
    assert ended.returncode == 0, ended.stderr
    print(ended.stderr)  # who was in which quorum, shown if a test fails
    return {
        kind: [path.read_text().split() for path in (folder / kind).glob("result-*")]
        for kind in KINDS
    }


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_all_learn_though_one_is_killed_in_the_middle(kind, results):
    """It comes back, and in the end all have the same parameters, which read digits well."""
    assert len(results[kind]) == 3
    assert len({parameters for _, parameters in results[kind]}) == 1
    assert min(float(accuracy) for accuracy, _ in results[kind]) > 0.85
