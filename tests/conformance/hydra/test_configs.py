"""A corpus of configs: what a worker sees of each is what it sees under Hydra alone.

The same script runs twice with the same overrides: as a job of Hydra's own basic launcher, and as
a run of ``launcher=local`` whose worker is started here. `DIFFERENCES` is the list in
docs/explanation/how-it-works.md.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic._util import hydra_release
from hpc_elastic.run.directory import RunDir

ROOT = Path(__file__).parents[3]
CORPUS = Path(__file__).parent / "corpus"
OURS = ["+launcher=local", "nodes=1", "nproc_per_node=1", "launcher.dry_run=true"]
DIFFERENCES = (
    "config: launcher", "config: nodes", "config: nproc_per_node", "config: ft",
    "hydra: launcher", "hydra: mode", "hydra: overrides",
    "hydra: runtime.choices.launcher", "hydra: runtime.choices.hydra/launcher",
    "hydra: job.config.override_dirname.exclude_keys",  # from Hydra 1.4 on
    "hydra: run.dir",  # of another second
)  # fmt: skip
"""Prefixes of what a worker sees otherwise than under Hydra alone."""
CASES = {
    "structured": ["optim.lr=2", "linked_optim='${optim}'", "any.mode=FIT", "either=5"],
    "structured-group": ["data.path=/x", "data.shares=[1,2]", "~named", "linked_optim={lr: 3}"],
    "packages": ["db=mysql", "~db.opts.a", "+site.more={a: [1, null]}", "must=now"],
    "packages-groups": ["site/inner=b", "+db@extra=mysql", "++lr=2", "texts=[x]"],
    "interpolated": ["+far='${optim.lr}'", "optim.lr=0.25"],
    "resolved": ["+other=${times:2,3}"],
    "versions-unset": ["group=b"],
    "versions-1.1": [],
    "versions-1.2": [],
    "versions-1.2-chdir": ["hydra.job.chdir=true", "+hydra.job.env_set.CORPUS_SET=x"],
    "versions-1.3-logs": [
        "+hydra.job_logging.loggers.own={handlers: [file, more, console]}",
        "+hydra.job_logging.handlers.more={class: logging.FileHandler, filename: more.log}",
    ],
    "versions-1.3": ["hydra.job.name=other", "hydra.verbose=true"],
}  # fmt: skip
if hydra_release() >= (
    1,
    4,
):  # it has no earlier behaviour, and 1.4.0rc3 deletes nothing in a sweep
    CASES = {
        case: [override for override in overrides if not override.startswith("~")]
        for case, overrides in CASES.items()
        if not case.startswith(("resolved", "versions-1.1", "versions-1.2"))
    }
QUICK = ("structured", "packages", "versions-1.3")
"""Types, packages, and the present version base; the others run with HPC_ELASTIC_LONG=1."""


def observe(folder: Path, case: str, *, ours: bool, rank: int = 0) -> dict[str, Any]:
    """Run a case in a folder; return what its function saw, ours on a rank."""
    name, *variant = case.split("-")
    environ = {
        **os.environ, "PYTHONPATH": str(ROOT), "CORPUS_SEEN": str(folder / "seen.json"),
        "CORPUS_HOME": "/of/the/submitter", "CORPUS_NUMBER": "12", "CORPUS_NODE": "login",
        "CORPUS_BASE": variant[0] if variant else "1.3", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    typed = [*CASES[case], f"hydra.sweep.dir={folder / 'sweep'}"]
    argv = [sys.executable, str(CORPUS / name / "train.py"), "-m", *typed, *(OURS if ours else [])]
    environ["CORPUS_NODE"] = "login" if ours else "node"
    _run(argv, folder, environ)
    if ours:
        environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "HPC_ELASTIC_ROUND": "1",
            "CORPUS_NODE": "node",
        }
        del environ["CORPUS_HOME"]  # the node has it from the submission
        run = RunDir(folder / "sweep" / "0")
        run.complete(run.load())  # as a task that starts
        worker = [sys.executable, "-m", "hpc_elastic.agent.worker_main", str(run.path)]
        _run(worker, folder, environ)
    seen: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    seen["files"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("written.txt"))
    seen["argv"] = [word for word in seen["argv"] if word not in (*OURS, "-m")]
    return seen


def _run(argv: list[str], folder: Path, environ: dict[str, str]) -> None:
    done = subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    """Yield what differs, a line each."""
    for name in sorted(theirs.keys() | ours.keys()):
        left, right = theirs.get(name), ours.get(name)
        if name in ("order", "yaml", "object"):
            continue
        if not isinstance(left, dict):
            left, right = {"": left}, {"": right}
        for key in sorted(left.keys() | right.keys()):
            place = f"{name}: {key}"
            if left.get(key) != right.get(key) and not place.startswith(DIFFERENCES):
                yield f"{place}: Hydra {left.get(key)}, here {right.get(key)}"


@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.long) for c in CASES]
)
def test_a_worker_sees_what_it_sees_under_hydra(tmp_path, case):
    """Each node has the same class, text, value, types and flags, except what is documented."""
    theirs = observe(tmp_path, case, ours=False)
    shutil.rmtree(tmp_path / "sweep")
    ours = observe(tmp_path, case, ours=True)
    assert list(differences(theirs, ours)) == []
    kept = [
        key for key in ours["order"] if key not in ("launcher", "nodes", "nproc_per_node", "ft")
    ]
    assert kept == theirs["order"]


def test_rank_0_alone_writes_log_files(tmp_path):
    """Any logger may name a handler, which others lack in name only."""
    seen = observe(tmp_path, "versions-1.3-logs", ours=True, rank=1)
    assert seen["log"] == ["INFO", "StreamHandler", "NullHandler"]
    assert not list(tmp_path.rglob("*.log"))
