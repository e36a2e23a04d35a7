"""Unchanged scripts with a loop of their own: continued inside of an epoch, or left as they are."""

import contextlib
import gc
import json
import shutil
import sys
import types
from pathlib import Path
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from framework_runs import CommandRun
from gloo_ranks import run_ranks
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler

from hpc_elastic.checkpoint import checkpointer
from hpc_elastic.errors import InexactError
from hpc_elastic.integrations import plain
from hpc_elastic.run.directory import RUN_DIR_VARIABLE
from hpc_elastic.worker import checkpoint_trigger, optimizer_steps
from hpc_elastic.worker.script_loops import LOOPS, NAME, prepare

UNCHANGED = Path(__file__).parents[1] / "unchanged"
LEVEL_2 = "hpc_elastic: adapted: plain loop (state, position), level 2: no step is lost"


class Kill(BaseException):
    """What no script handles."""


class Runs:
    """Runs scripts in this process, one after another, as workers of their own would."""

    def __init__(self, monkeypatch, folder: Path) -> None:
        self._patch, self.folder = monkeypatch, folder
        self.saves = {20}
        monkeypatch.chdir(folder)
        monkeypatch.setattr(plain, "_most_workers", lambda: 1)
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(
            checkpoint_trigger, "should_checkpoint", lambda step, **_: step in self.saves
        )

    def run(self, script: Path | str, *words: str, run: str = "run", killed_at: int = -1) -> object:
        """Run a script; it is killed after a number of optimizer steps."""
        gc.collect()  # a worker of its own has no objects of an earlier one
        source = script.read_bytes() if isinstance(script, Path) else script.encode()
        num_steps = 0

        def on_step(*_: object) -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps == killed_at:
                raise Kill

        with self._patch.context() as patch, contextlib.ExitStack() as stack:
            patch.setenv(RUN_DIR_VARIABLE, str(self.folder / run))
            patch.setenv("MASTER_PORT", "0")
            patch.setattr(sys, "argv", ["x.py", *words])
            for kind in (DataLoader, *plain._ORDERS):
                patch.setattr(kind, "__iter__", kind.__iter__)
            patch.setattr(optimizer_steps._steps, "then", [])
            patch.setattr(optimizer_steps._steps, "optimizers", WeakSet())
            LOOPS.__init__()
            stack.callback(LOOPS.__init__)
            LOOPS.is_enabled = True
            stack.callback(register_optimizer_step_post_hook(on_step).remove)
            main = types.ModuleType("__main__")
            main.__file__ = str(self.folder / "x.py")
            patch.setitem(sys.modules, "__main__", main)
            names = vars(main)
            if not dist.is_initialized():
                store = dist.HashStore()
                init = dist.init_process_group
                patch.setattr(
                    dist, "init_process_group",
                    lambda *_: init("gloo", store=store, rank=0, world_size=1),
                )  # fmt: skip
            stack.callback(checkpointer._settle_all)
            stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
            torch.manual_seed(0)
            tree = prepare(source, names["__file__"], names)
            plain.install.cache_clear()
            plain.install()
            stack.callback(lambda: "log" in names and names["log"].close())
            exec(compile(tree, names["__file__"], "exec"), names)
        return names.get("result")

    def compare(self, script: Path | str, *words: str, killed_at: int = 23, **same: object) -> None:
        """Run a script whole, and killed and continued; both have the same results."""
        whole = self.run(script, *words, run="whole")
        shutil.rmtree(self.folder / "whole", ignore_errors=True)
        result = Path(words[0]).read_text() if words else repr(whole)
        with pytest.raises(Kill):
            self.run(script, *words, killed_at=killed_at)
        found = self.run(script, *words)
        assert (Path(words[0]).read_text() if words else repr(found)) == result


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Return what runs scripts."""
    return Runs(monkeypatch, tmp_path)


@pytest.mark.parametrize("script", ["plain_module.py", "plain_main.py", "plain_methods.py"])
def test_a_killed_script_ends_as_an_undisturbed_one(runs, capsys, script):
    """With its schedule, average, scaler, best value, history and numbers."""
    runs.saves = {20, 60}
    runs.compare(UNCHANGED / script, "result.json", killed_at=63)
    assert capsys.readouterr().err.count(LEVEL_2) == 3


def require_continued(runs: Runs, capsys, source: str) -> None:
    """A script ends as an undisturbed one, by the checkpoint of a step, and says so each time."""
    runs.compare(source)
    said = capsys.readouterr().err
    assert said.count(LEVEL_2) == 3 and "level 1" not in said
    assert list(runs.folder.glob("run/checkpoints/step-*20*"))


SCRIPT = """
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset
{imports}
x = torch.randn(21, 3)
data = TensorDataset(x, x.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=2, shuffle=True)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
{setup}

def train(epoch):
    {before}
    for inputs, wanted in {batches}:
        optimizer.zero_grad()
        loss = (model(inputs) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        {step}

def main():
    {first}
    for epoch in {epochs}:
        {begin}
        train(epoch)
        {end}
    return [p.tolist() for p in model.parameters()]

result = main()
"""


def script(**parts: str) -> str:
    """Return a script with some parts replaced."""
    names = ("imports", "setup", "before", "step", "first", "begin", "end")
    known = dict.fromkeys(names, "pass") | {"batches": "loader", "epochs": "range(4)"}
    return SCRIPT.format(**(known | parts))


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"setup": "loader = DataLoader(data, 2)"},
        {"setup": "loader = DataLoader(data, 2, shuffle=True, num_workers=1)"},
        {"setup": "loader = DataLoader(data, 2, shuffle=True, generator=torch.Generator())"},
        {"first": "best = 9.0", "end": "best = min(best, epoch); model.bias.data.add_(best)"},
        {"first": "seen = []", "end": "seen.append(epoch); model.bias.data.add_(len(seen))"},
        {
            "setup": "class Stopper:\n    count = 0\nstopper = Stopper()",
            "end": "stopper.count += 1; model.bias.data.add_(stopper.count)",
        },
        {
            "setup": "counts = [0] * 20_000",
            "end": "counts[1] += 1; model.bias.data.add_(counts[1])",
        },
        {"before": "n = 0", "step": "n += 1; model.bias.data.add_(n)"},
        {"imports": "from tqdm import tqdm", "batches": "tqdm(loader)", "epochs": "tqdm(range(4))"},
        {"before": "n = 0", "step": "n += 1\n        if n == 8: break"},
        {"epochs": "range(10, 2, -2)"},
        {"imports": "from tqdm import trange", "epochs": "trange(4)"},
        {"imports": "from tqdm import tqdm", "first": "bar = tqdm(range(4))", "epochs": "bar"},
        {"first": "epochs = range(1, 5)", "epochs": "epochs"},
        {"before": "loader = DataLoader(data, 2, shuffle=True)"},
        {
            "imports": "from torch.utils.data import Subset",
            "before": "loader = DataLoader(Subset(data, range(epoch, 21)), 2)",
        },
        {"before": "params = list(model.parameters())",
         "step": "torch.nn.utils.clip_grad_norm_(params, 1)"},
        {"first": "n = 0\n    def get(): return n",
         "end": "n += epoch + 1; model.bias.data.add_(get())"},
    ],
)  # fmt: skip
def test_shapes_that_are_continued(runs, capsys, parts):
    """A restart has what the script itself keeps in variables and objects."""
    require_continued(runs, capsys, script(**parts))


TRAINER = """
import torch
from torch.utils.data import DataLoader, TensorDataset
{imports}
class Terms:
    def __init__(self): self.factor, self.names = 0.5, ["a"]

class Trainer:
    def __init__(self):
        x = torch.randn(21, 3)
        self.loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 2, shuffle=True)
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 7)
        self.terms, self.num, self.first = Terms(), 0, 0
        {setup}

    def run_batch(self, inputs, wanted):
        self.optimizer.zero_grad()
        loss = (self.model(inputs) - wanted).square().mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        {step}

    def run_epoch(self, epoch):
        {before}
        for inputs, wanted in {batches}:
            self.run_batch(inputs, wanted)

    def fit(self, last):
        for epoch in range(self.first, last):
            self.run_epoch(epoch)
            {end}

def main():
    trainer = Trainer()
    trainer.fit(4)
    return [p.tolist() for p in trainer.model.parameters()]

result = main()
"""


def trainer(**parts: str) -> str:
    """Return a script whose loops are methods, with some parts replaced."""
    known = dict.fromkeys(("imports", "setup", "step", "before", "end"), "pass")
    return TRAINER.format(**(known | {"batches": "self.loader"} | parts))


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"before": "len(next(iter(self.loader))[0])"},
        {"imports": "from tqdm import tqdm", "batches": "tqdm(self.loader)"},
        {"step": "self.num += 1; self.model.bias.data.add_(self.num)"},
        {"end": "self.terms.factor *= 2; self.model.bias.data.add_(self.terms.factor)"},
        {"end": "self.terms.names.append(epoch)\n"
                "            self.model.bias.data.add_(len(self.terms.names))"},
        {
            "imports": "class Mean(dict):\n    def state_dict(self): return dict(self)\n"
            "    load_state_dict = dict.update",
            "setup": "self.mean = Mean(n=0)", "step": "self.mean['n'] += 1",
            "end": "self.model.bias.data.add_(self.mean['n'])",
        },
        {
            "imports": "from argparse import Namespace", "setup": "self.args = Namespace(n=0)",
            "step": "self.args.n += 1", "end": "self.model.bias.data.add_(self.args.n)",
        },
        {"setup": "self.terms.owner = self", "step": "self.terms.factor += 1",
         "end": "self.model.bias.data.add_(self.terms.factor)"},
    ],
)  # fmt: skip
def test_loops_in_methods_are_continued(runs, capsys, parts):
    """What the object keeps in attributes is put back, and what these keep in theirs."""
    require_continued(runs, capsys, trainer(**parts))


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"setup": "self.mean = torch.zeros(())", "step": "self.mean = self.mean + loss.item()"},
         "self changes, and holds more than is saved"),
        ({"setup": "self.terms.mean = torch.zeros(())", "step": "self.terms.mean += loss.item()"},
         "self changes, and holds more than is saved"),
        ({"setup": "self.parts = [Terms()]", "step": "self.parts[0].factor += 1"},
         "parts holds more than plain values"),
        ({"setup": "type(self).data = property(lambda self: self.loader)", "batches": "self.data"},
         "the loop draws from self.data"),
        ({"setup": "self.noise = torch.Generator()", "end": "torch.randn(1, generator=self.noise)"},
         "self.noise is a Generator, whose state is unknown"),
    ],
)  # fmt: skip
def test_loops_in_methods_that_stay_as_they_are(runs, capsys, parts, why):
    """What the object keeps is not known."""
    runs.run(trainer(**parts))
    said = capsys.readouterr().err
    assert "level 1" in said and why in said


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"epochs": "[0, 1]"}, "no loop over range(...)"),
        ({"batches": "map(tuple, loader)"}, "the loop draws from map(tuple, loader)"),
        ({"setup": "calls = []\ndef made():\n    assert len(calls) < 4\n    return [calls, loader]",
          "batches": "[made()[0].append(1), loader][1]"}, "the loop draws from [made()[0]."),
        ({"setup": "class Odd:\n    @property\n    def __dict__(self): raise OSError('gone')\n"
                   "odd = Odd()", "end": "odd"}, "its objects cannot be read (OSError: gone)"),
        (
            {"setup": "class Rows(IterableDataset):\n    def __iter__(self): return iter(data)\n"
                      "loader = DataLoader(Rows(), 2)"},
            "the loop draws from an IterableDataset (Rows)",
        ),
        (
            {"setup": "class Own(SequentialSampler): pass\n"
                      "loader = DataLoader(data, 2, sampler=Own(data))"},
            "its order is that of a Own",
        ),
        ({"setup": "kept = [optimizer]\ndel optimizer", "before": "optimizer = kept[0]"}, None),
        ({"first": "noise = torch.Generator()", "end": "torch.randn(1, generator=noise)"},
         "main.noise is a Generator, whose state is unknown"),
        ({"first": "mean = torch.zeros(())", "end": "mean = mean + epoch"}, "mean (Tensor)"),
        ({"before": "total = torch.zeros(())", "step": "total = total + loss; f = total"},
         "total (Tensor)"),
        (
            {"setup": "class Meter:\n    def __init__(self): self.parts = [object()]\n"
                      "meter = Meter()", "end": "meter.parts"},
            "meter.parts holds more than plain values",
        ),
        ({"setup": "schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1)]",
          "end": "schedules[0].step()"}, "StepLR has no name"),
        ({"first": "n = 0", "begin": "n += 1"}, "n is used before the batches of an epoch"),
        ({"begin": "model.lr = epoch"}, "a part of model is assigned in the loop"),
        ({"setup": "mean = {'loss': torch.zeros(1)}", "step": "mean['loss'].add_(loss.item())"},
         "mean changes"),
        ({"setup": "mean = torch.zeros(1)\ndef add(t, v): t.data = t.data + v",
          "step": "add(mean, loss.item())"}, "mean changes"),
        ({"setup": "class Mean:\n    value = torch.zeros(1)\n"
                   "    def add(self, v): self.value = self.value + v\nmean = Mean()",
          "step": "mean.add(loss.item())"}, "mean changes"),
        ({"setup": "class Mean:\n    value = 0\ndef add(v): setattr(Mean, 'value', v)",
          "step": "add(loss.item())"}, "Mean changes"),
        ({"setup": "def make():\n    n = 0\n    def add(v):\n        nonlocal n\n        n += v\n"
                   "    return add\nadd = make()", "step": "add(loss.item())"}, "add changes"),
        ({"setup": "import numpy\nseen = numpy.zeros(4)\ndef put(a, v): a[0] += v",
          "step": "put(seen, loss.item())"}, "seen changes"),
        ({"setup": "class Counted(torch.nn.Linear):\n    n = 0\n    def forward(self, x):\n"
                   "        self.n += 1\n        return super().forward(x)\nmodel = Counted(3, 1)\n"
                   "optimizer = torch.optim.Adam(model.parameters())"}, "model changes"),
        ({"setup": "model.register_buffer('n', torch.zeros(1), persistent=False)",
          "step": "model.n.add_(1)"}, "model changes"),
        ({"step": "model.bias.requires_grad_(False)"}, "model changes"),
        ({"step": "model.eval()"}, "model changes"),
        ({"setup": "class Counted(TensorDataset):\n    n = 0\n    def __getitem__(self, i):\n"
                   "        self.n += 1\n        return super().__getitem__(i)\n"
                   "loader = DataLoader(Counted(*data.tensors), 2)"}, "loader changes"),
        ({"imports": "from argparse import Namespace", "setup": "parts = [Namespace(n=0)]",
          "step": "parts[0].n += 1"}, "parts changes"),
        ({"setup": "others = iter(DataLoader(data))", "step": "next(others)", "epochs": "range(1)"},
         "others is an iterator, whose position is unknown"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_not_guessed(runs, capsys, parts, why):
    """Nothing is saved, and the line has the reason."""
    runs.saves = {3}
    runs.run(script(**parts))
    said = capsys.readouterr().err
    if why is None:
        assert said.count("level 2") == 1, said
        return
    assert f"hpc_elastic: not adapted: plain loop, level 1: {why}" in said
    assert said.count("level") == 1
    assert not list(runs.folder.glob("run/checkpoints/step-*"))


def test_a_loop_without_a_loader_is_said_to_be_one(runs, capsys):
    """And so are a second loader, and a second loop, once they are seen."""
    runs.saves = set(range(60))
    runs.run("import torch\noptimizer = torch.optim.SGD([torch.ones(2)], 1)\noptimizer.step()")
    assert "level 1: no batch was drawn from a DataLoader" in capsys.readouterr().err
    runs.run(script().replace("optimizer.zero_grad()", "pass"))
    assert "the script does not call zero_grad()" in capsys.readouterr().err
    hidden = "class Hidden: others = iter(DataLoader(data, 1))"
    runs.run(script(setup=hidden, step="next(Hidden.others)", epochs="range(1)"))
    assert "a second loader is drawn from inside of the loop" in capsys.readouterr().err
    runs.run(script(end="pass\n    for epoch in range(2):\n        train(epoch)"), run="other")
    said = capsys.readouterr().err
    assert LEVEL_2 in said and "there is a second training loop" in said
    both = "loaders = [loader, DataLoader(data, batch_size=2, shuffle=True)]"
    other = "loaders.reverse(); train(epoch); loaders.reverse()"
    runs.run(script(setup=both, batches="loaders[0]", end=other), run="both")
    said = capsys.readouterr().err
    assert LEVEL_2 in said and "or a second loader" in said


def test_a_script_of_our_own_api_is_left_alone(runs, capsys):
    """It says itself how exact it is."""
    runs.run(script(imports="from hpc_elastic import report"))
    assert "level" not in capsys.readouterr().err
    own = "import own\nown.keep(model)"
    (runs.folder / "own.py").write_text(
        "from hpc_elastic import Checkpointer\n"
        "def keep(model):\n    global kept\n    kept = Checkpointer({'model': model}, 'own')\n"
    )
    sys.path.insert(0, str(runs.folder))
    runs.run(script(setup=own))
    sys.path.remove(str(runs.folder))
    assert "level" not in capsys.readouterr().err
    sys.modules.pop("own").kept.close()


RESUMES = {
    "imports": "from pathlib import Path\nfile = Path('own.pt')",
    "setup": "start = 0\nif file.exists():\n    start = torch.load(file)['next']\n"
             "    model.load_state_dict(torch.load(file)['model'])\n"
             "    optimizer.load_state_dict(torch.load(file)['optimizer'])",
    "epochs": "range(start, 4)",
    "end": "torch.save({'next': epoch + 1, 'model': model.state_dict(), "
           "'optimizer': optimizer.state_dict()}, file)",
}  # fmt: skip


@pytest.mark.parametrize("killed_at", [21, 25])
def test_what_the_script_itself_has_read_counts_where_it_is_later(runs, capsys, killed_at):
    """Eleven steps are an epoch; the checkpoint is of step 20, in the second one."""
    source = script(**RESUMES)
    with pytest.raises(Kill):
        runs.run(source, killed_at=killed_at)
    before = torch.load("own.pt")["next"]
    assert before == (1 if killed_at == 21 else 2)
    runs.run(source)
    assert torch.load("own.pt")["next"] == 4
    steps = torch.load("own.pt")["optimizer"]["state"][0]["step"]
    assert steps == 44, "none is lost, and none made twice"


COMPILED = """
import torch
batches = [torch.ones(2), torch.ones(2)]

def step(x):
    for epoch in range(2):
        for i, batch in enumerate(batches):
            x = torch.sin(x) + batch * i
    return x

for epoch in range(1):
    found = torch.compile(step, backend="eager", fullgraph=True)(torch.ones(2))
    result = torch.equal(found, step(torch.ones(2))) and step.__code__.co_names
"""


@pytest.mark.filterwarnings("ignore:Guards may run slower")  # torch's, on Python 3.13.0
def test_a_compiled_function_has_no_break_in_its_graph(runs):
    """torch.compile traces the loops of a function as the script has them."""
    assert NAME in runs.run(COMPILED), "its loops are changed"


COMPILED_METHOD = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(3)])
    def encode(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x) * (i + 1)
        return x
    def forward(self, x): return self.encode(x)

net = Net()
def train():
    for batch in [torch.ones(2)]:
        net.encode(batch)
for epoch in range(2):
    train()
found = torch.compile(net, backend="eager", fullgraph=True)(torch.ones(2))
result = torch.equal(found, net(torch.ones(2))) and Net.encode.__code__.co_names
"""


@pytest.mark.filterwarnings("ignore:Guards may run slower")  # torch's, on Python 3.13.0
def test_a_compiled_model_has_no_break_in_its_graph(runs):
    """Nor the methods of a model, which a loop calls too."""
    assert NAME in runs.run(COMPILED_METHOD), "its loop is changed"


def test_a_script_that_has_changed_is_refused(runs):
    """Where its checkpoint has no place, or no object."""
    with pytest.raises(Kill):
        runs.run(script(), killed_at=23)
    with pytest.raises(InexactError, match="which is not in it"):
        runs.run(script(epochs="range(1)"))
    with pytest.raises(InexactError, match="without the state of its checkpoint"):
        runs.run(script(epochs="[0, 1]"))
    with pytest.raises(InexactError, match="its data was"):
        runs.run(script(setup="loader = DataLoader(TensorDataset(x[1:], x[1:]), 2, shuffle=True)"))
    part = "from torch.utils.data import Subset\nloader = DataLoader(Subset(data, {}), 2)"
    with pytest.raises(Kill):
        runs.run(script(setup=part.format("range(15)")), run="part", killed_at=23)
    with pytest.raises(InexactError, match="its data was"):
        runs.run(script(setup=part.format("range(1, 16)")), run="part")
    with pytest.raises(Exception, match="model"):
        runs.run(script(setup="model = torch.nn.Linear(3, 2)\n"
                              "optimizer = torch.optim.Adam(model.parameters())"))  # fmt: skip
    with pytest.raises(Exception, match="optimizer"):
        runs.run(script(setup="other = optimizer\ndel optimizer", before="optimizer = other"))


def _is_one_batch_off(monkeypatch):
    rest = plain.rest_of
    monkeypatch.setattr(plain, "rest_of", lambda order, n, *a, **k: rest(order, n - 2, *a, **k))


def _forgets_the_schedule(monkeypatch):
    monkeypatch.setattr(torch.optim.lr_scheduler.LambdaLR, "load_state_dict", lambda *_: None)


def _forgets_variables(monkeypatch):
    monkeypatch.setattr(type(LOOPS), "has", lambda *_: False)


def _forgets_generators(monkeypatch):
    monkeypatch.setattr("hpc_elastic.checkpoint.restore.restore_generators", lambda _: None)


def _forgets_attributes(monkeypatch):
    monkeypatch.setattr(plain, "_assign", lambda *_: None)


@pytest.mark.parametrize(
    ("mistake", "script"),
    [
        (_is_one_batch_off, "plain_module.py"),
        (_is_one_batch_off, "plain_methods.py"),
        (_forgets_the_schedule, "plain_module.py"),
        (_forgets_variables, "plain_module.py"),
        (_forgets_attributes, "plain_methods.py"),
        (_forgets_generators, "plain_module.py"),
        (_forgets_generators, "plain_methods.py"),
    ],
)
def test_a_restart_with_a_mistake_would_be_seen(runs, monkeypatch, mistake, script):
    """The comparison above is not blind to what a restart can forget."""
    mistake(monkeypatch)
    with pytest.raises((AssertionError, InexactError)):
        runs.compare(UNCHANGED / script, "result.json")


def test_a_scheduler_that_is_not_found_is_missed(runs, monkeypatch, capsys):
    """By the search for those that exist."""
    found = plain.find_objects
    monkeypatch.setattr(
        plain, "find_objects",
        lambda place: {n: o for n, o in found(place).items() if n != "scheduler"},
    )  # fmt: skip
    runs.run(UNCHANGED / "plain_module.py", "result.json")
    assert "level 1: LambdaLR has no name" in capsys.readouterr().err


def restored(rank: int) -> list[str]:
    """Return what ranks with a model, a step and a problem of their own find out together."""
    torch.manual_seed(rank)
    model, found = torch.nn.Linear(2, 2), []
    for objects, position in (({"net": model}, {"step": 1}), ({}, {"step": rank}), ({}, {})):
        try:
            plain._compare(objects, position)
        except InexactError as e:
            found.append(str(e.value))
    return [*found, str(plain._first("broken" if rank else None))]


def test_ranks_that_have_restored_different_states_are_refused():
    """All of them, with the name of the object."""
    assert run_ranks(restored, 2) == [["net", "the position", "broken"]] * 2


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("consumed", [0, 4, 12, 36])
def test_the_rest_of_an_epoch_has_each_sample_once(consumed, drop):
    """As DistributedSampler divides it: some come twice, or are left out, to make equal shares."""
    order = list(DistributedSampler(range(37), 1, 0))
    for world_size in (1, 2, 3, 5):
        shares = [
            plain.rest_of(order, consumed, rank, world_size, drop=drop)
            for rank in range(world_size)
        ]
        assert len({len(share) for share in shares}) == 1
        trained = sorted(n for share in shares for n in share)
        once = sorted(order[consumed:])
        more = len(trained) - len(once)
        assert -world_size < more < world_size
        assert (more <= 0 and set(trained) <= set(once)) if drop else set(once) <= set(trained)


def test_the_rest_at_the_same_size_is_what_the_ranks_would_have_drawn():
    """So a restart with as many workers trains the very same batches."""
    order = list(DistributedSampler(range(37), 1, 0))
    for rank in range(3):
        whole = list(DistributedSampler(range(37), 3, rank))
        assert plain.rest_of(order, 12, rank, 3, drop=False) == whole[4:]


def result_of(folder: Path) -> dict:
    """Return what the script of a run has written."""
    return json.loads((folder / "result.json").read_text())


def said_by(run: CommandRun) -> str:
    """Return what the workers of a run have printed."""
    return "".join(file.read_text() for file in (run.path / "tasks").rglob("*.err"))


def preempt(run: CommandRun, step: int) -> None:
    """Preempt the first node of a run, once a step is done."""
    run.trains(1)
    status = run.path / "status.json"
    run.eventually(lambda: (json.loads(status.read_text())["step"] or 0) >= step, f"step {step}")
    run.tell_to_go(run.tasks()[0])


@pytest.mark.long
@pytest.mark.parametrize("script", ["plain_module.py", "plain_main.py", "plain_methods.py"])
def test_a_run_of_two_nodes_that_is_preempted_ends_as_an_undisturbed_one(tmp_path, script):
    """To the last bit, with dropout and a scaler; the same script without the adapter beside it."""
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        shutil.copy(UNCHANGED / script, tmp_path / name)
    command = [script, "result.json"]
    with CommandRun(command, tmp_path / "whole", "--nodes=2", "--adapt=off") as run:
        assert run.wait() == 0, run.output()
    assert "level" not in said_by(run)
    with CommandRun(command, tmp_path / "parts", "--nodes=2", PAUSE_S="0.3") as run:
        preempt(run, 21)
        assert run.wait() == 0, run.output()
    sizes = [e["world_size"] for e in run.events("round")]
    assert sizes == [2, 2], "it was preempted while it trained"
    assert said_by(run).count(LEVEL_2) == 2
    assert result_of(tmp_path / "parts") == result_of(tmp_path / "whole")


@pytest.mark.long
def test_each_sample_is_trained_once_as_nodes_come_and_go(tmp_path):
    """Two nodes, one, and two again; an epoch that goes on has a rest for any number."""
    shutil.copy(UNCHANGED / "plain_module.py", tmp_path)
    command = ["plain_module.py", "result.json"]
    with CommandRun(command, tmp_path, "--nodes=1:2", PAUSE_S="0.3") as run:
        preempt(run, 21)
        assert run.wait() == 0, run.output()
    assert [e["world_size"] for e in run.events("round")] == [2, 1, 2]
    files = [file.read_text() for file in tmp_path.glob("samples-*")]
    rows = [json.loads(line) for text in files for line in text.splitlines()]
    for epoch in range(4):
        trained = sorted(n for e, _, numbers in rows for n in numbers if e == epoch)
        assert trained == list(range(74))
    assert said_by(run).count(LEVEL_2) == 3
