"""The loops of a script: what they carry, how they are changed, and what cannot be continued."""

import ast
import pickle
import types

import pytest

from hpc_elastic.worker import script_loops
from hpc_elastic.worker.script_loops import LOOPS, ScriptSource, changed, why_not_continued

LOOP = "for i in range(3):\n    "


def carried(body: str, after: str = "", before: str = "") -> set[str]:
    """Return what a loop of a script carries."""
    source = before + LOOP + "\n    ".join(body.splitlines()) + f"\n{after}"
    (loop,) = [
        each for each in ScriptSource(source, "x.py").scopes[0].loops if each.key.endswith(" i")
    ]
    return set(loop.carried)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("total += i", {"total"}),
        ("best = max(best, i)", {"best"}),
        ("loss = f(i)\nprint(loss)", set()),
        ("if i > best:\n    best = i", {"best"}),
        ("if i:\n    x = 1\nelse:\n    x = 2\nprint(x)", set()),
        ("if i:\n    x = 1\nprint(x)", {"x"}),
        ("if not i:\n    continue\nelse:\n    x = 1\nprint(x)", set()),
        ("for k in range(2):\n    x = k\nprint(x)", set()),
        ("total = 0\nfor k in range(2):\n    total += k", set()),
        ("print(x)\nx = i", {"x"}),
        ("y = [k for k in range(i)]\nprint(y)", set()),
        ("try:\n    x = 1\nexcept E:\n    pass\nprint(x)", {"x"}),
        ("with f() as g:\n    x = g\nprint(x)", set()),
        ("def f():\n    return x\nx = 1", {"x"}),
        ("if (n := i):\n    print(n)", set()),
        ("d['a'] = 1", set()),
        ("x = i\nx += 1", set()),
    ],
)
def test_what_an_iteration_finds_from_the_one_before(body, names):
    """A name is carried if it may be read before it is assigned."""
    assert carried(body) == names


def test_what_is_read_after_the_loop_is_carried_if_an_iteration_may_leave_it():
    """As the path of the best model."""
    assert carried("if i:\n    path = i", "print(path)") == {"path"}
    assert carried("path = i", "print(path)") == set()
    body = "for k in range(i):\n    x = k\nprint(x)"
    assert carried(body, before="x = 3\n") == {"x"}, "the loop inside may have no iteration"


SOURCE = """
def main():
    best, seen = 0, 0
    for epoch in bar(tqdm(range(5)), 2) if False else tqdm(range(5)):
        for i, batch in tqdm(enumerate(batches, 1)):
            seen += batch
            rows.append((epoch, i, batch, seen))
        best = max(best, epoch)
        bests.append(best)
"""
EPOCHS, BATCHES = "main: for epoch", "main: for (i, batch)"


def run(source: str = SOURCE.replace("bar(tqdm(range(5)), 2) if False else ", "")) -> dict:
    """Run a changed script; return its names."""
    names = {"tqdm": lambda it: it, "batches": [10, 20], "rows": [], "bests": []}
    names[script_loops.NAME] = LOOPS
    exec(compile(changed(ScriptSource(source, "x.py")), "x.py", "exec"), names)
    names["main"]()
    return names


@pytest.fixture(autouse=True)
def loops():
    """Give each test loops that know nothing."""
    LOOPS.__init__()
    yield
    LOOPS.__init__()


def test_a_changed_script_does_what_it_did():
    """Until something is continued."""
    names = run()
    assert names["rows"][:2] == [(0, 1, 10, 10), (0, 2, 20, 30)] and len(names["rows"]) == 10
    assert names["bests"] == [0, 1, 2, 3, 4]
    assert LOOPS.active == []


def test_a_continued_script_begins_inside_of_its_epoch():
    """Its variables and numbers are those of the epoch that goes on, and then its own."""

    def begin(key, values):
        assert key == EPOCHS
        LOOPS.values = {EPOCHS: {"best": 7}, BATCHES: {"seen": 100}}
        LOOPS.first_index[BATCHES] = 4
        return values[3:]

    LOOPS.on_begin = begin
    names = run()
    assert names["rows"] == [(3, 5, 10, 110), (3, 6, 20, 130), (4, 1, 10, 140), (4, 2, 20, 160)]
    assert names["bests"] == [7, 7]
    assert LOOPS.values == {} and LOOPS.first_index == {}


def test_a_changed_script_has_the_lines_of_the_script():
    """So tracebacks and stacks show what the user has written."""
    source = SOURCE.replace("best = max(best, epoch)", "raise KeyError").replace(
        "bar(tqdm(range(5)), 2) if False else ", ""
    )
    with pytest.raises(KeyError) as error:
        run(source)
    lines = [entry.lineno + 1 for entry in error.traceback if str(entry.path).endswith("x.py")]
    assert lines[-1] == 8


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def f(self):\n        for i in range(3):\n            self.g(i)",
        "for i in range(3):\n    x = i",
        "def power(x):\n    for i in range(3):\n        x = g(x)\n    return x",
        "def power(x):\n    for i in range(3):\n        for j in range(i):\n            x = g(x)",
        "for i, name in enumerate(names):\n    print(name)",
        "def range(n): return [n]\nfor i in range(3):\n    f(i)",
        "for i in other(3):\n    f(i)",
    ],
)
def test_other_loops_stay_as_they_are(source):
    """Those in classes, those that lead to no loop over batches, and of a range of its own."""
    assert ast.dump(changed(ScriptSource(source, "x.py"))) == ast.dump(ast.parse(source))


def test_a_function_of_the_script_can_be_pickled():
    """By the name of what its loops call, not with a copy of it."""
    assert pickle.loads(pickle.dumps(LOOPS)) is LOOPS


@pytest.mark.parametrize(
    ("body", "is_shown"),
    [
        ("total += loss", True),
        ("total += loss\nif i % 9 == 0:\n    print(total / i)\n    total = 0.0", True),
        ("total = total + loss", True),
        ("total += loss\nlr = 1 / total", False),
        ("total += loss\nif total > 3:\n    stop()", False),
        ("total += loss\nbar.set_postfix(loss=total)", True),
        ("total += loss\nother += total", False),
    ],
)
def test_a_sum_may_begin_anew_if_it_is_only_shown(body, is_shown):
    """What a training depends on may not."""
    source = LOOP + "\n    ".join(body.splitlines())
    (loop,) = ScriptSource(source, "x.py").scopes[0].loops
    assert loop.is_only_shown("total") == is_shown


PLAIN = """
def train(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

def main():
    {before}
    for epoch in range(3):
        {first}
        train(model, loader, optimizer)
        {last}
"""


def plain(**parts: str) -> str:
    """Return a script with some more lines."""
    return PLAIN.format(**{name: parts.get(name, "pass") for name in ("before", "first", "last")})


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (plain(), None),
        (plain(before="best = 0", last="best = max(best, epoch)"), None),
        (plain(before="n = 0", first="n += 1"), "n is used before the batches"),
        (plain().replace("range(3)", "count()"), "no loop over range"),
        (plain().replace("range(3)", "trange(3)"), None),
        (plain(before="bar = tqdm(range(3))").replace("in range(3)", "in bar"), None),
        (plain(before="bar = [1, 2]").replace("in range(3)", "in bar"), "no loop over range"),
        (plain().replace("in loader", "in zip(a, b)"), "draws from zip(a, b)"),
        (plain().replace("zero_grad", "zero"), "zero_grad"),
        (plain().replace("for epoch", "for fold in folds:\n      for epoch"), "further loop"),
        ("import torch", "no loop"),
        (
            "class A:\n"
            "    def fit(self, n):\n"
            "        for epoch in range(n):\n"
            "            self.run(epoch)\n"
            "    def run(self, epoch):\n"
            "        for x in self.loader:\n"
            "            self.optimizer.zero_grad()\n"
            "            self.model(x).backward()\n"
            "            self.optimizer.step()\n"
            "    def more(self):\n"
            "        self.optimizer.run()\n",
            None,
        ),
    ],
)
def test_what_reading_a_script_shows(source, why):
    """The doctor says it before anything is submitted."""
    found = why_not_continued(ScriptSource(source, "x.py"))
    assert (found is None) if why is None else (why in found)


def test_a_frame_is_found_in_the_source():
    """The innermost function of that name, by its line."""
    source = "def f():\n    pass\n\nclass A:\n    def f(self):\n        pass\n"
    script, codes = ScriptSource(source, "x.py"), compile(source, "x.py", "exec")
    code = next(c for c in codes.co_consts if isinstance(c, types.CodeType))
    assert script.scope_of(code, 2).of_class == ""
    assert script.scope_of(code, 6).of_class == "A."
    assert script.scope_of(compile("", "y.py", "exec"), 1) is None
