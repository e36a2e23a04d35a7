"""Whole runs with `launcher=local`: real agents and workers, no Slurm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_elastic.slurm.environment import as_array_task, outside

TORCHRUN = [
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
]  # fmt: skip

SCRIPT = """
import os
import sys
import hydra
from hydra.core.hydra_config import HydraConfig

@hydra.main(version_base=None)
def main(cfg):
    if cfg.get("fail_first") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(7)
    return {
        "env": {name: os.environ.get(name) for name in %r},
        "file": __file__,
        "seed": cfg.get("seed"),
        "output_dir": HydraConfig.get().runtime.output_dir,
    }

if __name__ == "__main__":
    main()
"""


class Runs:
    """A folder with a script that imports nothing of ours, and sweeps of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "script.py"
        self.script.write_text(SCRIPT % (TORCHRUN,))
        self.sweep = folder / "sweep"

    def start(self, *overrides: str) -> str:
        """Run a sweep to its end; return what it printed."""
        done = subprocess.run(
            [
                sys.executable, str(self.script), "+launcher=local",
                f"hydra.sweep.dir={self.sweep}", *overrides,
            ],
            cwd=self.folder, capture_output=True, text=True, timeout=120,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def result(self, number: int = 0) -> dict:
        """How a run ended."""
        return json.loads((self.sweep / str(number) / "result.json").read_text())

    def values(self, number: int = 0) -> list[dict]:
        """What the workers of a run returned, by rank."""
        folder = self.sweep / str(number) / self.result(number)["results"]
        return [
            json.loads((folder / f"rank-{r}.json").read_text())
            for r in range(len(list(folder.iterdir())))
        ]


@pytest.fixture
def runs(tmp_path) -> Runs:
    """A fresh folder with the script."""
    return Runs(tmp_path)


def test_workers_see_what_torchrun_would_set(runs):
    """Two nodes of two workers, with every variable of torchrun, from a script without imports."""
    runs.start("nodes=2", "nproc_per_node=2", "launcher.max_restarts=5")
    env = [value["env"] for value in runs.values()]
    assert [e["RANK"] for e in env] == ["0", "1", "2", "3"]
    assert [e["LOCAL_RANK"] for e in env] == ["0", "1", "0", "1"]
    assert [e["GROUP_RANK"] for e in env] == ["0", "0", "1", "1"]
    assert {(e["WORLD_SIZE"], e["LOCAL_WORLD_SIZE"]) for e in env} == {("4", "2")}
    assert {(e["TORCHELASTIC_RESTART_COUNT"], e["TORCHELASTIC_MAX_RESTARTS"]) for e in env} == {
        ("0", "5")
    }
    assert all(value for e in env for value in e.values())
    assert len({(e["MASTER_ADDR"], e["MASTER_PORT"], e["TORCHELASTIC_RUN_ID"]) for e in env}) == 1


def test_a_worker_that_fails_once_is_restarted(runs):
    """One restart is spent, the workers are told so, and the run succeeds."""
    runs.start("nodes=1", "+fail_first=true")
    assert (runs.result()["restarts"], runs.result()["rounds"]) == (1, 2)
    assert runs.values()[0]["env"]["TORCHELASTIC_RESTART_COUNT"] == "1"


def test_every_run_of_a_sweep_has_its_own_config_and_directory(runs):
    """The output directory of Hydra is the run directory, in the workers as well."""
    runs.start("nodes=1", "+seed=1,2")
    values = [runs.values(number)[0] for number in (0, 1)]
    assert [v["seed"] for v in values] == [1, 2]
    assert [v["output_dir"] for v in values] == [str(runs.sweep / n) for n in "01"]


def test_a_snapshot_is_what_runs(runs):
    """With `launcher.code_snapshot` the workers load a copy of the code from the run directory."""
    for argv in (["init", "-q"], ["add", "script.py"]):
        subprocess.run(["git", *argv], cwd=runs.folder, check=True)
    runs.start("nodes=1", "launcher.code_snapshot=true")
    copy = Path(runs.values()[0]["file"])
    assert copy != runs.script and copy.read_text() == runs.script.read_text()
    assert copy.is_relative_to((runs.sweep / "0" / "code").resolve())


def test_a_task_that_starts_after_the_end_exits_at_once(runs):
    """Exit code 0, a line that says why, and no trace in the run directory."""
    runs.start("nodes=1")
    run = runs.sweep / "0"
    before = sorted(run.rglob("*"))
    env = {**outside(os.environ), **as_array_task(9, 0, node_name="late", cpus=1)}
    late = subprocess.run(
        [
            sys.executable, "-m", "hpc_elastic.agent",
            str(runs.sweep / ".hpc_elastic" / "array-0.json"),
        ],
        env=env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert late.returncode == 0 and "the run has ended" in late.stdout
    assert sorted(run.rglob("*")) == before
