"""What a script does under ``if __name__ == "__main__":`` before it calls its function."""

from __future__ import annotations

import ast
import pickle
import sys

import pytest

from hpc_elastic.agent.main_block import split_block
from hpc_elastic.agent.worker_main import load_function
from hpc_elastic.run.directory import Entry

HEAD = "import os\ndef main(): return STATE\nSTATE = []\n"
BLOCK = "if __name__ == '__main__':\n"


@pytest.mark.parametrize(
    ("source", "runs", "left_out"),
    [
        (BLOCK + "    a()\n    b()\n    main()\n    c()", ["a()", "b()"], []),
        (BLOCK + "    a()\n    sys.exit(main())", ["a()"], []),
        (BLOCK + "    a()\n    with x: main()", ["a()"], []),
        (BLOCK + "    main()", [], []),
        (BLOCK + "    other()", [], []),
        ("a()\nmain()", [], []),
        ("def cli():\n    'Doc.'\n    main()\n" + BLOCK + "    a()\n    cli()", ["a()"], []),
        ("def cli():\n    a()\n    main()\n" + BLOCK + "    cli()", [], ["a()"]),
        ("if '__main__' == __name__: a(); main()", ["a()"], []),
    ],
)
def test_the_statements_before_the_call_run_in_workers(source, runs, left_out):
    """Those of the block itself; what a function between does first is named instead."""
    found = split_block(source.encode(), {"main"})
    assert [[ast.unparse(each) for each in part] for part in found] == [runs, left_out]


@pytest.fixture
def as_it_was(monkeypatch, tmp_path):
    """Restore what a worker's import changes in this process."""
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("as_it_was")
def test_a_worker_runs_them_where_the_function_finds_them(tmp_path):
    """With the arguments of the submission; a function of another module finds its caller's."""
    script = tmp_path / "train.py"
    script.write_text(
        HEAD + "import sys\n" + BLOCK + "    STATE += [__name__, *sys.argv[1:]]\n    main()\n"
    )
    entry = Entry("hydra", "main", str(script), args=["lr=1"], cwd=str(tmp_path), main_block=True)
    assert load_function(entry)() == ["__main__", "lr=1"]


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_has_its_own_name_in_a_worker(tmp_path, as_module):
    """Its loggers, its classes in pickles and in a config are found under the name of a script."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package/beside.py").write_text("")
    script = tmp_path / "package/train.py"
    text = "import pickle, package.train\nclass Net: pass\n"
    text += "from . import beside\n" if as_module else ""
    text += "def main(): return pickle.dumps(Net()), package.train.Net is Net, __file__\n"
    script.write_text(text + BLOCK + "    assert main\n    main()\n")
    named = {"module": "package.train"} if as_module else {"script": str(script)}
    entry = Entry("hydra", "main", **named, cwd=str(tmp_path), main_block=True,
                  sys_path=[str(tmp_path)])  # fmt: skip
    try:
        pickled, is_same, file = load_function(entry)()
        assert type(pickle.loads(pickled)) is sys.modules["__main__"].Net
        assert (b"__main__" in pickled, is_same, file) == (True, as_module, str(script))
    finally:
        for name in ("package.train", "package", "package.beside"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "guard",
    [
        "if __name__ == '__main__': FOUND.append(1)",
        "__name__ == '__main__' and FOUND.append(1)",
        "if '__main__' in (__name__,) and not None:\n    FOUND.append(1)",
        "try:\n    if __name__ == '__main__': FOUND.append(1)\nfinally: pass",
        "if __name__.startswith('__main__'): FOUND.append(1)",
        "FOUND.append(1) if __name__ == '__main__' else None",
        "if __name__ != '__main__': pass\nelse: FOUND.append(1)",
    ],
)
@pytest.mark.usefixtures("as_it_was")
def test_the_main_block_is_not_run_by_the_import(tmp_path, guard):
    """However a script asks for its name at module level."""
    script = tmp_path / "train.py"
    script.write_text(f"FOUND = []\ndef main(): return FOUND, __name__\n{guard}\n")
    assert load_function(Entry("function", "main", str(script)))() == ([], "__main__")


@pytest.mark.usefixtures("as_it_was")
def test_a_script_that_calls_a_function_of_a_module_is_loaded_too(tmp_path):
    """It registers what the config needs, in its module and in its main block."""
    (tmp_path / "of_a_module.py").write_text("STATE = []\ndef main(): return STATE\n")
    script = tmp_path / "run.py"
    script.write_text(
        "import of_a_module as m\nm.STATE.append('module')\n"
        + BLOCK + "    m.STATE.append('block')\n    m.main()\n    m.STATE.append('after')\n"
    )  # fmt: skip
    entry = Entry(
        "hydra", "main", str(script), "of_a_module", cwd=str(tmp_path), sys_path=[str(tmp_path)],
        main_block=True,
    )  # fmt: skip
    assert load_function(entry)() == ["module", "block"]
