"""A fake Slurm whose commands behave as they do at a site."""

import os
import shutil
from collections.abc import Iterator

import pytest

from hpc_elastic.launcher import slurm
from hpc_elastic.testing.fake_slurm import FakeSlurm
from sites import SITES


@pytest.fixture(scope="session")
def sites_cluster() -> Iterator[FakeSlurm]:
    """One fake for all sites."""
    with FakeSlurm(nodes=4, grace_s=1, kill_wait_s=1, requeue_hold_s=1) as cluster:
        yield cluster


@pytest.fixture
def site(request, sites_cluster, tmp_path, monkeypatch) -> Iterator[FakeSlurm]:
    """Let the product find a site's commands on PATH; its cluster is idle."""
    described, here = SITES[request.param], tmp_path / "site"
    here.mkdir()
    for command, text in described.commands.items():
        real = shutil.which(command, path=sites_cluster.env["PATH"])
        path = here / command
        path.write_text(f'#!/bin/sh\nhere={here}\nreal() {{ {real} "$@"; }}\n{text}\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}{os.pathsep}{sites_cluster.env['PATH']}")
    monkeypatch.setenv("SLURM_CONF", sites_cluster.env["SLURM_CONF"])
    monkeypatch.setattr(slurm, "_LOOKS_S", (0.0, 1.0, 2.0))
    yield sites_cluster
    sites_cluster.heal_all()
