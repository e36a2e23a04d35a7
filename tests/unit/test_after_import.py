"""What is done once a module has been imported."""

import importlib
import sys

import pytest

from hpc_elastic.agent.worker_main import after_import


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    """A module that can be imported, once it is."""
    (tmp_path / "made_for_this_test.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "made_for_this_test"
    sys.modules.pop("made_for_this_test", None)


def test_it_is_done_when_the_import_is(module):
    """Once, with the module there; the import is as it would have been."""
    seen = []
    after_import(module, lambda: seen.append(sys.modules[module].value))
    assert seen == []
    imported = importlib.import_module(module)
    assert seen == [7] and imported.value == 7 and imported.__spec__.origin.endswith(".py")
    importlib.reload(imported)
    assert seen == [7]


def test_what_is_imported_already_is_done_now(module):
    """A spare has imported it ahead."""
    importlib.import_module(module)
    seen = []
    after_import(module, lambda: seen.append(1))
    assert seen == [1]


def test_what_is_not_there_stays_an_error():
    """The user's own, as it would be."""
    after_import("nowhere_to_be_found", lambda: pytest.fail("it was not imported"))
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        importlib.import_module("nowhere_to_be_found")
