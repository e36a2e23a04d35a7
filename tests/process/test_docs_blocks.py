"""Every block of code of the documentation: it is run, or a table here names why it is not.

A block of Python runs as it stands, in a process with one worker, behind names that its page takes
for granted (`SETUP`). A command line is parsed by the command itself, with its settings checked as
before a submission. A YAML block is composed and checked in the same way.
"""

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from omegaconf import OmegaConf

from doc_pages import NAMES, ROOT, Block, blocks_of, typed_lines
from helps import named
from hpc_elastic.cli import options
from hpc_elastic.config.resolve import resolve
from hpc_elastic.errors import ConfigError
from hpc_elastic.ft.coordination import LighthouseServer

ALL = [block for name in NAMES for block in blocks_of(name)]
PYTHON = {(b.page.removeprefix("docs/"), b.number): b for b in ALL if b.language == "python"}
CONSOLE = [block for block in ALL if block.language in ("console", "bash")]

SETUP = """
import itertools, json
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from hpc_elastic import *
from hpc_elastic import ft

data = TensorDataset(torch.randn(96, 4), torch.arange(96) % 2)
net = nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
sampler = ElasticSampler(data, 48, seed=0)
loader = DataLoader(data, batch_sampler=sampler)
checkpointer = Checkpointer({"net": net, "optimizer": optimizer, "sampler": sampler}, "mine")
model = DistributedDataParallel(net)
step, loss, accuracy, correct = 50, torch.tensor(0.5), 0.9, 0
"""
"""What a page takes for granted: a training as in its tutorial, outside of a run."""

RUN: dict[tuple[str, int], tuple[str, dict[str, str]]] = {
    ("explanation/what-a-failure-looks-like.md", 1): ("", {}),
    ("howto/beside.md", 1): (
        "from types import SimpleNamespace\nfrom pathlib import Path\n"
        "trained = Checkpointer({'net': net}, 'run/checkpoints'); trained.save(3, urgent=True)\n"
        "Path('run/result.json').write_text('{}')\n"
        "cfg = SimpleNamespace(run='run')\nevaluate = lambda net: 0.9",
        {},
    ),
    ("howto/checkpoints.md", 1): ("", {}),
    ("howto/checkpoints.md", 2): ("save_my_way = print", {}),
    ("howto/convert.md", 1): (
        "from pathlib import Path\nimport torch.distributed as dist",
        {"dist.barrier()": "dist.barrier()\n\ndownload = Path.mkdir\nfetch(Path('data'))"},
    ),
    ("howto/convert.md", 2): (
        "import torch.distributed as dist",
        {"/ len(held_out)": "/ len(held_out)\n\naccuracy_of(net, data, 'cpu')"},
    ),
    ("howto/convert.md", 3): ("", {}),
    ("howto/debug.md", 2): (
        "trained = Checkpointer({'net': net, 'optimizer': optimizer}, 'run/checkpoints')\n"
        "trained.save(3, urgent=True); trained.close()",
        {},
    ),
    ("howto/fault-tolerance.md", 1): (
        "sgd, loss_of = optimizer, cross_entropy\nstate = {'net': net, 'sgd': sgd}\n"
        "save = lambda: {name: part.state_dict() for name, part in state.items()}\n"
        "load = lambda s: [part.load_state_dict(s[name]) for name, part in state.items()]",
        {},
    ),
    ("howto/islands.md", 1): (
        "inner, x, y, loss_of = optimizer, *data[:48], cross_entropy\n"
        "batch_size, sequence_length = 48, 1",
        {"/shared/my-training": "islands", "10e9": "480", "500": "2"},
    ),
    ("howto/streams.md", 1): (
        "from pathlib import Path\nrun_dir = Path.cwd()\nfiles = ['a.jsonl', 'b.jsonl']\n"
        "lines = [json.dumps([[0.1 * i, 1.0, 0.5, 0.2], i % 2]) for i in range(200)]\n"
        "[Path(file).write_text('\\n'.join(lines)) for file in files]",
        {"num_workers=4": "num_workers=0"},
    ),
    ("howto/sweeps.md", 1): ("", {}),
    ("howto/trackers.md", 3): ("", {}),
    ("howto/watch-runs.md", 2): ("scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)", {}),
    ("howto/watch-runs.md", 3): ("validation, evaluate = [1, 2], lambda batch: 1", {}),
    ("howto/watch-runs.md", 4): (
        "from torch.utils.tensorboard import SummaryWriter\nwriter = SummaryWriter('board')",
        {},
    ),
}
"""Blocks that run: what they take for granted besides, and what is replaced so that they end."""

RUN_ELSEWHERE = {
    ("tutorial/5-larger-model.md", 1): "tests/process/test_docs_transcripts.py",
    ("tutorial/5-larger-model.md", 2): "tests/process/test_docs_transcripts.py",
    ("tutorial/5-larger-model.md", 3): "tests/process/test_docs_transcripts.py",
    ("howto/from-torchft.md", 1): "tests/process/test_torchft_example.py",
    ("tutorial/2-own-script.md", 1): "tests/process/test_tutorial.py",
    ("tutorial/2-own-script.md", 2): "tests/process/test_tutorial.py",
}
"""Whole scripts, run in runs: the test that reads them from their page."""

NOT_RUN = {
    ("reference/api/launch.md", 1): "submits to Slurm; tests/process/test_launch.py has its calls",
    (
        "reference/api/launch.md",
        2,
    ): "submits to Slurm; tests/process/test_executor.py has its calls",
    ("howto/gpus.md", 1): "needs a GPU; train.py has its lines",
    ("howto/debug.md", 1): "waits for a debugger",
    ("howto/from-submitit.md", 1): "submits to Slurm; tests/process/test_executor.py has its calls",
    ("howto/from-submitit.md", 2): "submits; tests/process/test_submitit_tasks.py has its calls",
    ("howto/from-torchrun.md", 1): "submits to Slurm; tests/process/test_launch.py has its calls",
    ("howto/lightning.md", 1): "is the page's change with other names; examples/lightning has it",
    ("howto/bitwise.md", 1): "has a group of its own; tests/process/test_virtual_ranks.py calls it",
    ("howto/sweeps.md", 2): "submits to Slurm, and needs Ax",
    ("howto/watch-runs.md", 1): "draws in a notebook; tests/process/test_notebook.py has its calls",
    ("howto/trackers.md", 1): "starts W&B's service; tests/process/test_trackers.py has its calls",
    ("howto/trackers.md", 2): "needs MLflow; tests/process/test_trackers.py has its calls",
    ("../tools/simulated_gpu/README.md", 1): "needs torch's CUDA build; tests/gpu has its calls",
    ("../tools/slurm_sandbox/README.md", 1): "needs root; tests/cluster has its calls",
    ("../tools/slurm_sandbox/README.md", 2): "needs root; tests/cluster has its calls",
}
"""Blocks that are only compiled, and their imports checked (tests/check_pages.py)."""

LONG = {("howto/test-preemptions.md", 1)}
"""Blocks that are whole tests, run where HPC_ELASTIC_LONG=1."""

OF_OTHERS = {
    "apt-get", "cd", "dd", "export", "jq", "mkdir", "mount", "python3", "rm", "sed", "sleep",
    "slurm-sandbox", "source", "squeue", "srun", "tensorboard", "torchrun", "wandb",
}  # fmt: skip
"""Programs of command lines that are not ours: they are not parsed."""


@pytest.fixture
def one_worker(tmp_path, monkeypatch) -> Iterator[None]:
    """A group of one worker, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_block_of_python_is_run_or_listed():
    """No block is forgotten, and no entry outlives its block."""
    listed = [*RUN, *RUN_ELSEWHERE, *NOT_RUN, *LONG]
    assert len(set(listed)) == len(listed)
    named = {tuple_of(block) for block in ALL if block.language == "python"}
    assert named == set(listed)
    for (page, _), test in RUN_ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text()


def tuple_of(block: Block) -> tuple[str, int]:
    """Return what the tables name a block by."""
    inside = block.page.startswith("docs/")
    return (block.page.removeprefix("docs/") if inside else f"../{block.page}", block.number)


@pytest.mark.parametrize("page, number", RUN)
def test_a_block_of_python_runs(page, number, one_worker, monkeypatch):
    """As it stands, but for numbers that would let it run for days."""
    setup, replaced = RUN[page, number]
    (text,) = (b.text for b in ALL if tuple_of(b) == (page, number) and b.language == "python")
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    with contextlib.ExitStack() as stack:
        if "ft.Manager" in text:
            lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1)
            stack.callback(lighthouse.shutdown)
            store = dist.TCPStore("127.0.0.1", 0, is_master=True)
            environ = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
            environ |= {"MASTER_PORT": store.port, "TORCHFT_LIGHTHOUSE": lighthouse.address()}
            for name, value in environ.items():
                monkeypatch.setenv(name, str(value))
        names: dict[str, object] = {"__name__": page}
        for part in (SETUP, setup, text):
            exec(compile(part, f"{page}, block {number}", "exec"), names)
        for name in ("checkpointer", "trained", "manager", "writer"):
            for method in ("close", "shutdown"):
                if name in names and hasattr(names[name], method):
                    getattr(names[name], method)()


@pytest.mark.long
@pytest.mark.parametrize("page, number", LONG)
def test_a_block_that_is_a_test_passes(page, number, tmp_path):
    """With pytest, in a folder that has the example."""
    (text,) = (b.text for b in ALL if tuple_of(b) == (page, number) and b.language == "python")
    for name in ("train.py", "train.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "test_it.py").write_text(text)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    subprocess.run(argv, cwd=tmp_path, check=True, timeout=400)


# ---- command lines


def group_files(page: str) -> dict[str, str]:
    """Return the group files of settings that a page shows, by their names."""
    shown = [b.text for b in ALL if b.language == "yaml" and "[slurm, _self_]" in b.text]
    here = [b.text for b in ALL if b.page == page and b.text in shown]
    names = set(re.findall(r"launcher=(\w+)", (ROOT / page).read_text())) - {"slurm", "local"}
    return {name: (here or shown)[0] for name in names}


def check_settings(page: str, script: str, words: list[str], folder: Path) -> None:
    """Compose the config of a script as Hydra does, and check it as before a submission.

    Raises:
        ConfigError: A setting is refused.
    """
    named = Path(script).with_suffix(".yaml")
    entered = re.search(r"^\$ cd (\S+)$", (ROOT / page).read_text(), re.MULTILINE)
    folders = [entered[1]] if entered else [".", "examples/*"]
    found = [path for where in folders for path in ROOT.glob(f"{where}/{named}")]
    source = found[0] if found else Path("none")
    shutil.rmtree(folder / "conf", ignore_errors=True)
    (folder / "conf/launcher").mkdir(parents=True)
    for name, text in group_files(page).items():
        (folder / f"conf/launcher/{name}.yaml").write_text(text)
    if source.exists():
        shutil.copy(source, folder / f"conf/{source.name}")
    overrides = []
    for override in OverridesParser.create().parse_overrides(words):
        if override.get_key_element().startswith("hydra"):
            continue
        if not source.exists() and override.get_key_element() == "launcher":
            override.input_line = f"+launcher={override.value()}"
        if override.is_sweep_override():
            value = override.value()
            is_interval = isinstance(value, IntervalSweep)
            first = value.start if is_interval else next(iter(override.sweep_string_iterator()))
            overrides.append(f"{override.get_key_element()}={first}")
        else:
            overrides.append(str(override.input_line))
    with initialize_config_dir(str(folder / "conf"), version_base=None):
        config = compose(source.stem if source.exists() else None, overrides)
        plain = OmegaConf.to_container(config, throw_on_missing=False)
    if "launcher" in plain:
        resolve(plain, overrides=overrides)


def check_ours(page: str, words: list[str], folder: Path) -> None:
    """Have a command of ours parse its arguments, and check the settings among them."""
    name, arguments = words[0], words[1:]
    if name in ("submit", "resume"):
        settings = [word for word in arguments if "=" in word and not word.startswith("--")]
        scripts = [word for word in arguments if word.endswith(".py")]
        for script in scripts:
            (folder / script).parent.mkdir(parents=True, exist_ok=True)
            (folder / script).touch()
        if scripts:
            check_settings(page, scripts[0], settings, folder)
        else:
            check_settings(page, "none.py", ["+launcher=slurm", *settings], folder)
    command, context, rest = named(words)
    assert command is not None, words
    command.make_context(name, rest, parent=context)


def check_pip(words: list[str]) -> None:
    """Check the extras and files that pip is to install from here."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = set(extras["optional-dependencies"])
    for word in words:
        if found := re.fullmatch(r"(?:\.|hpc_elastic)\[([\w,]+)\]", word):
            assert set(found[1].split(",")) <= known, word


def check_line(page: str, line: str, folder: Path) -> None:
    """Check a line of a shell."""
    line = re.sub(r"\s#.*", "", line)
    if line.startswith("eval ") or "$(" in line:
        return  # shells' own; tests/check_pages.py looks into them
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set(";&|"):
            commands.append([])
        else:
            commands[-1].append(word)
    for words in commands:
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if not words:
            continue
        program_name, arguments = words[0], words[1:]
        if program_name == "hpc-elastic":
            check_ours(page, arguments, folder)
        elif program_name == "python" and arguments[0].endswith(".py"):
            settings = [word for word in arguments[1:] if "=" in word and not word.startswith("--")]
            if not arguments[0].startswith("benchmarks/"):
                check_settings(page, arguments[0], settings, folder)
        elif program_name == "python":
            assert arguments[0] == "-m" and arguments[1] in ("pdb", "pytest", "venv"), line
        elif program_name == "pip":
            check_pip(arguments)
        elif "/" in program_name:
            assert (ROOT / program_name).exists(), line
        else:
            assert program_name in OF_OTHERS, line


@pytest.mark.parametrize("page", sorted({block.page for block in CONSOLE}))
def test_command_lines_are_taken(page, tmp_path, monkeypatch):
    """What the page types is accepted; what it shows to be refused is refused in these words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "find_run", lambda name, **_: tmp_path)
    monkeypatch.setenv("USER", "ada")
    for name in ("torch.sif", "train.py"):
        (tmp_path / name).touch()
    for block in CONSOLE:
        lines = typed_lines(block.text) if "$ " in block.text else block.text.splitlines()
        for line in lines if block.page == page else ():
            try:
                check_line(page, line, tmp_path)
            except ConfigError as e:
                assert str(e) in block.text, line


# ---- YAML, and what else there is


@pytest.mark.parametrize("block", [b for b in ALL if b.language == "yaml"], ids=str)
def test_settings_in_yaml_are_taken(block, tmp_path, monkeypatch):
    """A group file of a cluster, the settings of `hpc-elastic run`, or those of a sweeper."""
    monkeypatch.chdir(tmp_path)
    content = yaml.safe_load(block.text)
    assert isinstance(content, dict)
    if "hydra" in content:
        (tmp_path / "conf").mkdir()
        with initialize_config_dir(str(tmp_path / "conf"), version_base=None):
            sweeper = compose(None, ["hydra/sweeper=elastic_optuna"], return_hydra_config=True)
            assert set(content["hydra"]["sweeper"]) <= set(sweeper.hydra.sweeper)
    elif "defaults" in content:
        (tmp_path / "conf/launcher").mkdir(parents=True)
        (tmp_path / "conf/launcher/mine.yaml").write_text(block.text)
        with initialize_config_dir(str(tmp_path / "conf"), version_base=None):
            resolve(OmegaConf.to_container(compose(None, ["+launcher=mine"])))
    else:
        launcher = content.pop("launcher")
        top = {key: content.pop(key) for key in ("nodes", "nproc_per_node") if key in content}
        resolve({"launcher": {"backend": launcher, **content}, **top})


OUTPUT = {
    "": ("docs/architecture.md",),
    "{toctree}": ("docs/index.md", "docs/reference/api/index.md"),
    "py": ("docs/reference/api/",),
    "text": (
        "docs/reference/api/",
        *("docs/reference/cli.md", "docs/howto/streams.md", "docs/howto/cluster-admins.md"),
        *("docs/tutorial/6-week.md", "docs/explanation/levels.md"),
    ),
    "diff": (
        *("README.md", "docs/howto/convert.md"),
        *("docs/howto/huggingface.md", "docs/howto/lightning.md"),
    ),
}
"""Pages that may have blocks of other languages: generated, drawn, output, or changes."""


def test_blocks_of_other_languages_are_known():
    """So that code in an unknown fence is not left out."""
    for block in ALL:
        if block.language not in ("python", "console", "bash", "yaml"):
            assert block.page.startswith(OUTPUT.get(block.language, ("none",))), block


def after(diff: str) -> str:
    """Return the lines that a change leads to."""
    return "".join(line[1:] for line in diff.splitlines(True) if not line.startswith("-"))


@pytest.mark.parametrize("page", OUTPUT["diff"])
def test_a_change_leads_to_valid_code(page):
    """What stands behind the change compiles."""
    for block in blocks_of(page):
        if block.language == "diff":
            compile(after(block.text), page, "exec")


SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(96, 4), torch.arange(96) % 2)
net = nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
"""
"""What the README's change takes for granted, in a script."""

STARTED_BY = {
    "python": [sys.executable],
    "a debugger": [sys.executable, "-m", "pdb", "-c", "continue", "-c", "quit"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"],
    "hpc-elastic run": [
        *[sys.executable, "-m", "hpc_elastic", "run", "--launcher=local", "--nodes=2"],
        *["--run-dir=run", "--", "python"],
    ],
}


@pytest.mark.parametrize(
    "way", [w if w == "python" else pytest.param(w, marks=pytest.mark.long) for w in STARTED_BY]
)
def test_the_change_of_the_readme_runs(way, tmp_path):
    """One file trains to its end under each of these, and each of its workers makes all steps."""
    (block,) = (b for b in blocks_of("README.md") if b.language == "diff")
    end = 'print("made", sampler.step, "steps")\n'
    (tmp_path / "script.py").write_text(f"{SCRIPT}{after(block.text)}{end}")
    done = subprocess.run(
        [*STARTED_BY[way], "script.py"], cwd=tmp_path, check=True, timeout=300,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    logs = [path.read_text() for path in sorted(tmp_path.glob("run/tasks/**/*.out"))]
    num_workers = 1 if way in ("python", "a debugger") else 2
    assert "".join([done.stdout, *logs]).count("made 40 steps") == num_workers
