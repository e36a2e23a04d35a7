"""Pytest fixtures with a real Slurm.

Enable them in a conftest.py: ``pytest_plugins = ["slurm_sandbox.pytest_plugin"]``.

They use the sandbox that is up under the name in HPC_ELASTIC_SANDBOX (else ``default``), and cancel
all its jobs. If there is none, they bring one with four nodes up, and take it down at the end. With
HPC_ELASTIC_SANDBOX_NFS=1 the nodes see the tests' temporary folder through NFS clients with caches
of their own; its value may also be mount options, such as ``nocto``.

On a machine that cannot run a sandbox, tests that need it are skipped, or fail if CI is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import pytest

from . import SandboxConfig, SandboxError, SlurmSandbox
from .releases import check_requirements

NUM_NODES = 4
_FALSE = ("", "0", "false", "no")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmSandbox]:
    """Yield a sandbox of at least four nodes, all idle."""
    name = os.environ.get("HPC_ELASTIC_SANDBOX", "default")
    folder, options = tmp_path_factory.getbasetemp().resolve(), nfs_options(os.environ)
    require_sandbox(nfs=options is not None)
    if SlurmSandbox(name).status()["up"]:
        yield _reuse(name, folder, options)
    elif options is None:
        yield from _own(SandboxConfig(name=name, nodes=NUM_NODES))
    else:
        shared = SandboxConfig(name=name, nodes=NUM_NODES, nfs=str(folder), nfs_options=options)
        yield from _own(shared)


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


def require_sandbox(*, nfs: bool = False) -> None:
    """Skip the test if no sandbox can run here, or fail it if CI is set.

    Args:
        nfs: Whether the sandbox shares a folder as by NFS.
    """
    try:
        check_requirements(nfs=nfs)
    except SandboxError as error:
        refuse(str(error), in_ci=os.environ.get("CI", "").lower() not in _FALSE)


def refuse(reason: str, *, in_ci: bool) -> NoReturn:
    """Fail the test in CI, which must have a sandbox; skip it on a user's machine."""
    text = f"NO REAL SLURM TO TEST WITH: {reason}"
    if in_ci:
        pytest.fail(text, pytrace=False)
    pytest.skip(text)


def nfs_options(environ: Mapping[str, str]) -> str | None:
    """Return the mount options of the shared folder, None if nodes see one folder directly."""
    value = environ.get("HPC_ELASTIC_SANDBOX_NFS", "")
    if value.lower() in _FALSE:
        return None
    return "" if value == "1" else value


def _reuse(name: str, folder: Path, options: str | None) -> SlurmSandbox:
    sandbox = SlurmSandbox.attach(name)
    if len(sandbox.nodes) < NUM_NODES:
        pytest.fail(f"sandbox {name!r} is up with fewer than {NUM_NODES} nodes", pytrace=False)
    nfs = sandbox.config.nfs
    if options is not None and (not nfs or sandbox.config.nfs_options != options):
        pytest.fail(f"sandbox {name!r} is not up with --nfs and these options", pytrace=False)
    if nfs and not folder.is_relative_to(nfs):
        pytest.fail(
            f"the tests' files are not in the shared folder: use --basetemp={nfs}/x", pytrace=False
        )
    sandbox.heal_all()
    return sandbox


def _own(config: SandboxConfig) -> Iterator[SlurmSandbox]:
    try:
        yield SlurmSandbox.up(config)
    finally:
        SlurmSandbox(config.name).down()
