"""Pytest fixtures that give tests a real Slurm; and `fake_slurm`, which needs none.

A conftest.py asks for them by ``pytest_plugins = ["hpc_elastic.testing.pytest_plugin"]``.

The sandbox that is up under the name in HPC_ELASTIC_SANDBOX (else ``default``) is used, with all
its jobs cancelled; if there is none, one with four nodes is brought up, and taken down at the end.
Where no sandbox can run, tests that ask for it are skipped, and fail where CI is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NoReturn

import pytest

from hpc_elastic.testing.fake_slurm.fixture import fake_slurm
from hpc_elastic.testing.slurm_sandbox import SandboxConfig, SandboxError, SlurmSandbox
from hpc_elastic.testing.slurm_sandbox.requirements import check

__all__ = ["NUM_NODES", "fake_slurm", "refuse", "slurm", "slurm_env"]

NUM_NODES = 4
_FALSE = ("", "0", "false", "no")


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmSandbox]:
    """Yield a sandbox of at least four nodes, all idle."""
    name = os.environ.get("HPC_ELASTIC_SANDBOX", "default")
    try:
        check()
    except SandboxError as error:
        refuse(str(error), in_ci=os.environ.get("CI", "").lower() not in _FALSE)
    if SlurmSandbox(name).status()["up"]:
        yield _reuse(name)
    else:
        yield from _own(name)


@pytest.fixture(autouse=True)
def _slurm_is_healed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Undo every fault and cancel every job after each test that used the sandbox."""
    used = "slurm" in request.fixturenames
    sandbox: SlurmSandbox | None = request.getfixturevalue("slurm") if used else None
    yield
    if sandbox is not None:
        sandbox.heal_all()


@pytest.fixture
def slurm_env(slurm: SlurmSandbox, monkeypatch: pytest.MonkeyPatch) -> SlurmSandbox:
    """Point Slurm's commands at the sandbox for the length of a test, and return the sandbox."""
    for variable, value in slurm.env.items():
        monkeypatch.setenv(variable, value)
    return slurm


def refuse(reason: str, *, in_ci: bool) -> NoReturn:
    """Fail the test in CI, where the sandbox must be there; skip it on a user's machine."""
    text = f"NO REAL SLURM TO TEST WITH: {reason}"
    if in_ci:
        pytest.fail(text, pytrace=False)
    pytest.skip(text)


def _reuse(name: str) -> SlurmSandbox:
    sandbox = SlurmSandbox.attach(name)
    if len(sandbox.nodes) < NUM_NODES:
        pytest.fail(f"sandbox {name!r} is up with fewer than {NUM_NODES} nodes", pytrace=False)
    sandbox.heal_all()
    return sandbox


def _own(name: str) -> Iterator[SlurmSandbox]:
    try:
        yield SlurmSandbox.up(SandboxConfig(name=name, nodes=NUM_NODES))
    finally:
        SlurmSandbox(name).down()
