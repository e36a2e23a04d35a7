"""pytest plugin: torchft's own test files, in which its names are those of `hpc_elastic.ft`.

    python -m pytest -p torchft_alias FOLDER/torchft/manager_integ_test.py

FOLDER has copies of the test files, and of the modules that only they use. Every other module of
torchft is the one of `hpc_elastic.ft` that has its name; without one it cannot be imported.
"""

import faulthandler
import importlib
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from hpc_elastic.ft.process_group import AlteredWork, DummyWork, ManagedWork
from hpc_elastic.ft.reconfigurable import parse_store_addr

OURS, THEIRS = "hpc_elastic.ft", "torchft"
FOLDER_ENV, OUTCOMES_ENV = "TORCHFT_TESTS", "TORCHFT_OUTCOMES"
LIMIT_S = 20.0


def managed_work(manager: Any, work: Any, value: Any) -> ManagedWork:
    """Return what `Manager.allreduce` makes of a work."""
    return ManagedWork(work).manage(value, 1, lambda e: manager.report_error(e))


def create_store_client(store_addr: str, timeout: object) -> PrefixStore:
    """Return a store as a process group finds it."""
    where = parse_store_addr(store_addr)
    store = TCPStore(where.host, where.port, is_master=False, timeout=timeout)
    return PrefixStore(where.prefix, store)


RENAMED = {"_torchft": "coordination", "work": "process_group"}
"""Private modules of torchft, and those that have their classes."""
PRIVATE: dict[str, dict[str, object]] = {
    "checkpointing.http_transport": {"_time": nullcontext},
    "futures": {"_TIMEOUT_MANAGER": SimpleNamespace(_watchdog_interval=None)},
    "manager": {"_ManagedWork": managed_work},
    "process_group": {
        "_DummyWork": DummyWork,
        "_ErrorSwallowingWork": AlteredWork,
        "create_store_client": create_store_client,
    },
}
"""Private names of torchft that its tests use for more than to look inside."""


class AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchft's test files in a folder, and its other modules in this package."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return where a module of torchft is; None for others."""
        top, _, rest = name.partition(".")
        if top != THEIRS:
            return None
        copy = self._folder / THEIRS / rest.replace(".", "/")
        if copy.with_suffix(".py").is_file():
            return importlib.util.spec_from_file_location(name, copy.with_suffix(".py"))
        if rest == "_test":
            return ModuleSpec(name, None, is_package=True)
        return importlib.util.spec_from_loader(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return this package's module."""
        rest = spec.name.partition(".")[2]
        name = ".".join(filter(None, (OURS, RENAMED.get(rest, rest))))
        module = importlib.import_module(name)
        vars(module).update(PRIVATE.get(name.removeprefix(f"{OURS}."), {}))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Undo what the import system has written into a module that has another name."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def pytest_configure() -> None:
    """Set the names up, and what ends a test that hangs: errors in its main thread."""
    sys.meta_path.insert(0, AliasFinder(Path(os.environ[FOLDER_ENV])))
    importlib.import_module(f"{THEIRS}._test_utils")  # else pytest makes a module of the folder

    def end_test(*_: object) -> None:
        faulthandler.dump_traceback(sys.__stderr__)
        raise TimeoutError(f"the test takes longer than {LIMIT_S:g} s")

    signal.signal(signal.SIGALRM, end_test)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Limit the time of a test, and seed it."""
    torch.manual_seed(0)  # of random models, one in thirty has a parameter that no step changes
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S, 2.0)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def write_outcome(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Write one outcome as a JSON line: the test, what became of it, and the error's last line."""
    text = str(report.longrepr or "").strip().splitlines()[-1:]
    with Path(os.environ[OUTCOMES_ENV]).open("a") as file:
        file.write(json.dumps([report.nodeid, report.outcome, *text]) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the outcome of a test."""
    if report.when == "call" or report.outcome != "passed":
        write_outcome(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write that a file cannot be imported."""
    if report.failed:
        write_outcome(report)


def pytest_unconfigure() -> None:
    """End at once: a test that failed may have left threads that never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
