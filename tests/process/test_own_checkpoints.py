"""An unchanged script's own checkpoints: what a restart continues from, and what it does not."""

import ast
import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from weakref import WeakSet

import pytest
import torch
from framework_runs import CommandRun
from test_plain_loops import preempt, said_by

from hpc_elastic.agent import command
from hpc_elastic.api import launch
from hpc_elastic.config.resolve import resolve
from hpc_elastic.errors import CheckpointFencedError, ConfigError, InexactError
from hpc_elastic.run import fencing
from hpc_elastic.run.directory import RunDir
from hpc_elastic.worker import optimizer_steps
from hpc_elastic.worker.own_checkpoints import OwnCheckpoints, find_option

UNCHANGED = Path(__file__).parents[1] / "unchanged"
PARSER = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument({option})
args = parser.parse_args()
"""
SCRIPT = """
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(model.parameters())
epoch = 0
if args.resume:
    found = torch.load(args.resume)
    {load}
    epoch = found["epoch"] + 1
def step():
    model(torch.ones(2)).sum().backward()
    optimizer.step()
def save(path, **parts):
    state = {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}}
    torch.save({{**state, **parts}}, path)
step()
{save}
begun_at = epoch
"""
RESUME = '"--resume", default="", type=str'
LOAD = 'model.load_state_dict(found["model"]); optimizer.load_state_dict(found["optimizer"])'


class Groups:
    """Runs scripts in this process, each as the only worker of the next group of a run."""

    def __init__(self, monkeypatch, folder: Path) -> None:
        self._patch, self._num = monkeypatch, 0
        monkeypatch.chdir(folder)
        monkeypatch.setenv("RANK", "0")
        (folder / "out").mkdir()

    def form(self, run: str = "run") -> None:
        """Form the next group of a run."""
        self._num += 1
        entry = fencing.entry_path(Path(run).absolute() / "rdzv", self._num)
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.touch()
        self._patch.setenv("HPC_ELASTIC_ROUND", str(self._num))
        self._patch.setenv(fencing.VARIABLE, str(entry))

    @contextlib.contextmanager
    def worker(self, given: list[str] | None = None, run: str = "run"):
        """Return what a worker has of the script's checkpoints, with torch watched."""
        own = OwnCheckpoints(RunDir(Path(run).absolute()), given)
        with self._patch.context() as patch, contextlib.ExitStack() as stack:
            stack.callback(own.__init__)  # its hook may still wait for a step
            for name in ("save", "load"):
                patch.setattr(torch, name, getattr(torch, name))
            patch.setattr(optimizer_steps._steps, "optimizers", WeakSet())
            patch.setattr(sys, "argv", ["x.py"])
            optimizer_steps.watch()
            own.watch_torch()
            if "accelerate.accelerator" in sys.modules:
                kind = sys.modules["accelerate.accelerator"].Accelerator
                patch.setattr(kind, "save_state", kind.save_state)
                own.watch_accelerate()
            yield own

    def run(self, text: str, *words: str, given: list[str] | None = None, run: str = "run"):
        """Run a script in a new group; return its names, with its words as `argv`."""
        self.form(run)
        Path("x.py").write_text(text)
        with self.worker(given, run) as own:
            sys.argv = own.continued(["x.py", *words])
            names = {"__name__": "__main__", "argv": sys.argv[1:]}
            exec(compile(text, "x.py", "exec"), names)
            return names


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """Return what runs scripts."""
    return Groups(monkeypatch, tmp_path)


def script(save: str, option: str = RESUME, load: str = LOAD) -> str:
    """Return a script that saves, and continues, in some way."""
    return PARSER.format(option=option) + SCRIPT.format(save=save, load=load)


def continued_from(groups: Groups, *words: str, **given: object) -> str | None:
    """Return the name of the file that the next group is given."""
    argv = groups.run(script(""), *words, **given)["argv"]
    return Path(argv[-1]).name if argv[-2:-1] == ["--resume"] else None


@pytest.mark.parametrize(
    ("save", "name"),
    [
        ("save('out/a.pt')", "a.pt"),
        ("save('out/a.pt'); save('out/b.pt')", "b.pt"),
        ("import os; save('tmp.pt'); os.replace('tmp.pt', 'last.pt')", "last.pt"),
        ("import os; save('tmp.pt'); os.link('tmp.pt', 'z.pt'); os.remove('tmp.pt')", "z.pt"),
        ("import shutil; save('a.pt'); shutil.copyfile('a.pt', 'a_best.pt')", "a.pt"),
        ("import shutil; save('b.pt'); shutil.copyfile('b.pt', 'a_best.pt')", "b.pt"),
        ("save('old.pt'); save('new.pt'); import os; os.remove('new.pt')", "old.pt"),
        ("save('a.pt'); torch.save(model.state_dict(), 'b.pt')", "a.pt"),
        ("save('a.pt'); torch.save({'epoch': 1, **model.state_dict()}, 'b.pt')", "a.pt"),
        ("save('a.pt'); torch.save({'optimizer': optimizer.state_dict()}, 'b.pt')", "a.pt"),
        (
            "other = torch.optim.SGD(model.parameters()); other.step(); "
            "save('a.pt', other=other.state_dict()); save('b.pt')",
            "a.pt",
        ),
    ],
)
def test_the_newest_whole_checkpoint_is_given_under_the_name_that_it_has(groups, save, name):
    """Renamed, linked, copied or not; what holds less than a restart needs is none."""
    first = groups.run(script(save))
    assert first["argv"] == []
    assert continued_from(groups) == name
    assert continued_from(groups) == name, "it is still known to the group after that"


def test_what_the_user_gave_is_replaced_once_the_run_has_a_newer_one(groups, capsys):
    """The lines say what would be used, what is used, and what is not."""
    groups.run(script("save('given.pt')"), run="other")
    words = ("--resume", "given.pt")
    assert groups.run(script("save('own.pt')"), *words)["argv"] == [*words]
    found = groups.run(script(""), *words)
    assert found["argv"] == [*words, "--resume", str(Path("own.pt").absolute())]
    assert found["begun_at"] == 2
    Path("own.pt").unlink()
    assert groups.run(script(""), *words)["argv"] == [*words]
    said = capsys.readouterr().err
    assert "from what this run has written last, such as own.pt, by --resume\n" in said
    assert "by --resume in the place of given.pt\n" in said
    assert f"begins with given.pt: what this run wrote last, {Path('own.pt').absolute()}" in said


@pytest.mark.parametrize(
    "how",
    [
        "found = torch.load(pathlib.Path(args.resume))",
        "with open(args.resume, 'rb') as file: found = torch.load(file)",
    ],
)
def test_a_script_may_read_it_in_any_way(groups, how):
    """By a path, or from an open file."""
    groups.run(script("save('a.pt')"))
    text = script("").replace("found = torch.load(args.resume)", how)
    assert groups.run(f"import pathlib{text}")["begun_at"] == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(b"\0" * file.stat().st_size),
        lambda file: torch.save({"epoch": 3, "optimizer": {"state": 1, "param_groups": 2}}, file),
        lambda file: file.unlink(),
    ],
)
def test_a_torn_a_foreign_and_a_missing_file_are_not_given(groups, capsys, change):
    """The one before is, if it is there; else a line says that there is none."""
    groups.run(script("save('old.pt')"))
    groups.run(script("save('a.pt')"))
    change(Path("a.pt"))
    assert continued_from(groups) == "old.pt"
    change(Path("old.pt"))
    assert continued_from(groups) is None
    assert "begins without --resume: what this run wrote last" in capsys.readouterr().err


def test_another_run_in_the_same_folder_is_not_continued(groups):
    """Neither from its file, nor from one of the same name that it has written since."""
    groups.run(script("save('a.pt')"), run="other")
    assert continued_from(groups) is None
    groups.run(script("save('a.pt')"))
    groups.run(script("model.weight.data += 1; save('a.pt')"), run="other")
    assert continued_from(groups) is None


def test_a_save_that_breaks_off_leaves_the_file_before(groups):
    """What it has written so far is removed, by a later group if it was killed."""
    broken = "class Deadly:\n    def __reduce__(self): raise KeyboardInterrupt\n"
    groups.run(script("save('a.pt')"))
    with pytest.raises(KeyboardInterrupt):
        groups.run(script(f"{broken}save('a.pt', bad=Deadly())"))
    assert [p.name for p in Path().iterdir() if "a.pt" in p.name] == ["a.pt"]
    assert continued_from(groups) == "a.pt"


def test_a_group_that_is_over_replaces_nothing(groups):
    """Its checkpoint is complete, and too late."""
    groups.run(script("save('a.pt')"))
    before = Path("a.pt").read_bytes()
    late = f"from pathlib import Path; Path({str(Path('run/rdzv/entry.9.json'))!r}).touch()"
    with pytest.raises(CheckpointFencedError):
        groups.run(script(f"{late}; save('a.pt')"))
    assert Path("a.pt").read_bytes() == before


def test_what_an_old_group_writes_late_is_known_to_be_of_this_run(groups):
    """It has replaced the file of the next group between its question and its answer."""
    groups.run(script("save('a.pt')"))
    (notes,) = Path("run/own_checkpoints").glob("*.jsonl")
    late, noted = Path("a.pt").read_bytes(), notes.read_bytes()
    groups.run(script("save('a.pt')"))
    groups.run(script(""))
    Path("a.pt").write_bytes(late)
    notes.write_bytes(noted)
    assert continued_from(groups) == "a.pt"


def test_all_workers_of_a_group_are_given_the_same(groups, monkeypatch):
    """What the first one has decided, though another one is the newest since."""
    groups.run(script("save('a.pt')"))
    groups.form()
    Path("x.py").write_text(script(""))
    with groups.worker() as own:
        first = own.continued(["x.py"])
    Path("a.pt").unlink()
    monkeypatch.setenv("RANK", "1")
    with groups.worker() as own:
        assert own.continued(["x.py"]) == first


def test_files_of_each_rank_are_no_checkpoint_of_the_training(groups, monkeypatch, capsys):
    """Which option would take them is not known."""
    groups.run(script("save('rank0.pt')"))
    with groups.worker() as own:
        own.continued(["x.py"])
        own._rank = 1
        state = {"epoch": 1, "optimizer": torch.optim.SGD([torch.ones(1)]).state_dict()}
        torch.save(state, "rank1.pt")
    assert continued_from(groups) is None
    assert "each rank writes a checkpoint of its own" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("load", "option", "why"),
    [
        ("pass", RESUME, "--resume is given, and not used"),
        ("model.load_state_dict(found['model'])", RESUME, "has restored no state of Adam"),
    ],
)
def test_a_wrong_guess_ends_the_run_before_its_first_step(groups, load, option, why):
    """A script that does not read what it is given, or that only begins with its weights."""
    groups.run(script("save('a.pt')"))
    text = script("", option, load)
    if why.endswith("used"):
        text, why = text.replace("if args.resume", "if args.resume and False"), "has not read it"
    with pytest.raises(InexactError, match=why):
        groups.run(text)


@pytest.mark.parametrize(
    "option",
    [
        '"--resume", action="store_true"',
        '"--resume", action=argparse.BooleanOptionalAction',
        '"--resume", default=False',
        '"--resume", type=bool',
        '"--resume", type=int',
        '"--resume", nargs="*"',
        '"--resume", choices=["must", "never"]',
        '"--resume", **options',
        '"--resume-id", type=str',
        '"--no-resume", type=str',
        '"--initial-checkpoint", type=str, help="weights to start from"',
        '"--checkpoint", type=str, help="folder to save to, and to resume from"',
        '"--checkpoint", type=str',
        '"--resume"); parser.add_argument("--resume-from"',
    ],
)
def test_an_option_that_may_mean_something_else_is_not_known(option):
    """A switch, an identity, weights, a folder to write to, one of several."""
    assert find_option(ast.parse(PARSER.format(option=option))) is None


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ('"--resume", metavar="PATH"', ["--resume"]),
        ('"-r", "--resume", default=None, type=str', ["--resume", "-r"]),
        ('"--resume-from-checkpoint", type=pathlib.Path', ["--resume-from-checkpoint"]),
        ('"--resume_from", nargs="?", default=""', ["--resume_from"]),
        ('"--ckpt_path", help="Continue from this file"', ["--ckpt_path"]),
        ('"--resume"); parser.add_argument("--no-resume-opt", action="store_true"', ["--resume"]),
    ],
)
def test_options_that_take_a_checkpoint(option, names):
    """By their names, or by their help."""
    assert find_option(ast.parse(PARSER.format(option=option))) == names


ACCELERATE = """
from glob import glob
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
where = args.resume_from_checkpoint
if where == "latest":
    where = max(glob("out/step_*"), default=None)
if where:
    accelerator.load_state(where)
model(torch.ones(2)).sum().backward()
optimizer.step()
accelerator.save_state(f"out/step_{len(glob('out/step_*'))}")
"""


def test_a_folder_of_accelerate_counts_once_it_is_complete(groups):
    """Also in the place of a word by which the script would take another one."""
    pytest.importorskip("accelerate.accelerator", reason="pip install -e '.[frameworks]'")
    text = PARSER.format(option='"--resume_from_checkpoint", default=None') + ACCELERATE
    words = ("--resume_from_checkpoint", "latest")
    assert groups.run(text, *words)["argv"] == [*words]
    Path("out/step_9").mkdir()  # of another run, or torn
    found = groups.run(text, *words)
    assert found["argv"][2:] == [words[0], str(Path("out/step_0").absolute())]
    Path("out/step_2/optimizer.bin").unlink()
    found = groups.run(text, *words)
    assert found["where"] == str(Path("out/step_0").absolute())


GIVEN = ["--resume", "{newest:out/*/last.pt}"]


def test_words_that_are_given_name_the_file(groups, monkeypatch, capsys):
    """Whatever it holds; what does not match is left out, also if it is newer."""
    save = "Path('out/1').mkdir(exist_ok=True); torch.save({'epoch': 0, 'model': 1}, 'tmp.pt')"
    save = f"from pathlib import Path; import shutil; {save}; save('out/1/tmp.pt'); "
    save += "shutil.move('out/1/tmp.pt', 'out/1/last.pt'); save('out/newer.pt')"
    groups.run(script(save), given=GIVEN)
    found = groups.run(script(""), given=GIVEN)
    assert found["argv"] == ["--resume", str(Path("out/1/last.pt").absolute())]
    assert "by --resume ...\n" in capsys.readouterr().err


def test_words_without_a_file_let_the_script_find_it(groups):
    """They are added once there is one, and it must read it."""
    text = PARSER.format(option='"--init_from", default="scratch"')
    text += "args.resume = 'out/ckpt.pt' if args.init_from == 'resume' else ''\n"
    text += SCRIPT.format(save="save('out/ckpt.pt')", load=LOAD)
    given = ["--init_from=resume"]
    assert groups.run(text, given=given)["argv"] == []
    found = groups.run(text, given=given)
    assert (found["argv"], found["begun_at"]) == (given, 1)
    with pytest.raises(InexactError, match="has not read it"):
        groups.run(text.replace("out/ckpt.pt' if", "' if"), given=given)


def test_nothing_is_added_if_that_is_the_setting(groups):
    """And files are written as the script writes them."""
    groups.run(script("save('a.pt')"), given=[])
    assert groups.run(script(""), given=[])["argv"] == []
    assert not Path("run/own_checkpoints").exists()


def test_words_behind_a_separator_stay_behind_it(groups):
    """The added ones are options."""
    text = PARSER.format(option=RESUME).replace(
        "args =", "parser.add_argument('rest', nargs='*')\nargs ="
    )
    text += SCRIPT.format(save="save('a.pt')", load=LOAD)
    groups.run(text, "--", "x")
    assert groups.run(text, "--", "x")["argv"][-2:] == ["--", "x"]


@pytest.mark.parametrize(
    ("words", "ft", "why"),
    [
        ("['{newest:a}', '{newest:b}']", False, "allowed is one"),
        ("['{newest}']", False, "allowed is one"),
        ("['--resume']", True, "heals from the others"),
    ],
)
def test_words_that_cannot_work_are_refused(words, ft, why):
    """Two files need not fit to each other."""
    typed = ["launcher.resume_args="]
    launcher = {"backend": "local", "resume_args": ast.literal_eval(words)}
    with pytest.raises(ConfigError, match=why):
        resolve({"launcher": launcher, "ft": ft, "nodes": 1}, overrides=typed)


def test_a_function_and_another_command_have_no_words(monkeypatch, tmp_path):
    """The first is refused before it is submitted, the second when its workers start."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is for commands of `hpc-elastic run`"):
        launch(said_by, launcher="local", resume_args=["--resume"])
    own = OwnCheckpoints(RunDir(tmp_path), ["--resume"])
    monkeypatch.setattr(command, "own_checkpoints", own)
    with pytest.raises(command.FailedCommandError, match="needs a command that runs in the worker"):
        command.run_command("sh", "-c", "true")


def epochs_of(folder: Path) -> list[int]:
    """Return the epochs that a script has trained, as it was restarted."""
    return [int(line) for line in (folder / "epochs").read_text().split()]


@pytest.mark.long
@pytest.mark.parametrize("given", [(), ("--resume-args=['--resume','{newest:out/check*.pt}']",)])
def test_a_run_that_is_killed_while_it_saves_continues_from_the_checkpoint_before(tmp_path, given):
    """The script writes in place; it ends as an undisturbed one."""
    results = []
    for name, env in (("whole", {}), ("parts", {"DIES_IN_SAVE_OF": "5"})):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(UNCHANGED / "own_resume.py", folder)
        settings = ["--nproc-per-node=2", *(given if env else ("--adapt=off",))]
        with CommandRun(["own_resume.py"], folder, *settings, **env) as run:
            assert run.wait() == 0, run.output()
        results.append(json.loads((folder / "result.json").read_text()))
        hidden = [path.name for path in (folder / "out").iterdir() if path.name[0] == "."]
        assert not hidden
    assert results[0] == results[1]
    assert epochs_of(tmp_path / "parts") == [0, 1, 2, 3, 4, 5, 6, 7]
    assert "continues from out/checkpoint.pt, which this run wrote at" in said_by(run)


@pytest.mark.long
def test_a_loop_that_loses_no_step_keeps_its_own_checkpoints(tmp_path):
    """A notice costs no step; a later death costs those since the script's own, later one."""
    text = (UNCHANGED / "own_resume.py").read_text()
    script = tmp_path / "x.py"
    script.write_text(text.replace("zip(range(4), loader, strict=False)", "enumerate(loader)"))
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513"}
    subprocess.run([sys.executable, script], cwd=tmp_path, env={**os.environ, **alone}, check=True)
    for name in ("epochs", "steps"):
        (tmp_path / name).unlink()
    result = (tmp_path / "result.json").read_text()
    shutil.rmtree(tmp_path / "out")
    env = {"DIES_IN_SAVE_OF": "6", "PAUSE_S": "0.3"}
    with CommandRun(["x.py"], tmp_path, "--nodes=1", **env) as run:
        preempt(run, 10)
        assert run.wait() == 0, run.output()
    said = said_by(run)
    assert run.checkpoints()
    steps = [int(line) for line in (tmp_path / "steps").read_text().split()]
    assert steps == sorted([*range(8), 6] * 4), "those since the last save, before it died"
    assert said.count("level 2: no step is lost") == 3
    assert said.count("continues from out/checkpoint.pt, which this run wrote at") == 2
    assert epochs_of(tmp_path) == [*range(8)]
    assert (tmp_path / "result.json").read_text() == result
