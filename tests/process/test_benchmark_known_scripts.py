"""Known scripts, unmodified: the table of them, and what is made of what they print."""

import importlib.util
import re
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from evidence.registry import HERE
from known_scripts import data
from known_scripts.runs import Outputs, Script, Step, read_table, restart

TABLE = read_table()
SCRIPT = Script(
    "owner/name", "0" * 40, "python train.py", r"epoch (?P<epoch>\d+) .*?(?P<step>\d+)/10",
    r"loss ([\d.]+)", "none", workers=2, epoch_steps=10, first_epoch=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def driver():
    """The benchmark's script, whose name is also a package's."""
    spec = importlib.util.spec_from_file_location(
        "benchmark_known_scripts", HERE / "known_scripts.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", TABLE)
def test_each_script_says_all_that_its_run_needs(name):
    """A full revision, patterns with their groups, and kinds of data that there are."""
    script = TABLE[name]
    assert re.fullmatch("[0-9a-f]{40}", script.revision)
    groups = re.compile(script.progress).groupindex
    assert "step" in groups and ("epoch" in groups) == bool(script.epoch_steps)
    assert re.compile(script.loss).groups == 1
    assert {kind.partition(":")[0] for kind in script.data.values()} <= data.KINDS.keys()


def test_steps_count_on_over_epochs_and_codes_of_a_terminal_do_not_matter(tmp_path):
    """A bar that a carriage return redraws is several lines."""
    outputs = Outputs(SCRIPT, tmp_path)
    text = (
        "\x1b[2Kepoch 1 \x1b[35m 9/10\repoch 2 1/10\nloss 0.5\n 9%|# |hpc_elastic: x, level 3: y\n"
    )
    outputs.add("a", text, 7.0)
    assert outputs.steps == [Step(7.0, "a", 9), Step(7.0, "a", 11)]
    assert (outputs.loss, outputs.levels) == ("0.5", {"3"})


def test_a_line_is_read_once_when_it_is_whole(tmp_path):
    """Also in a file that has taken another's place."""
    outputs, file = Outputs(SCRIPT, tmp_path), tmp_path / "rank-0.out"
    file.write_text("epoch 1 1/10\nepoch 1 2")
    assert [step.position for step in outputs.poll()] == [1]
    file.write_text("epoch 1 1/10\nepoch 1 2/10\n")
    assert [step.position for step in outputs.poll()] == [1, 2]
    (tmp_path / "new").write_text("epoch 1 3/10\n")
    (tmp_path / "new").rename(file)
    first, *_, last = outputs.poll()
    assert (last.position, last.output == first.output) == (3, False)


def steps(output: str, first: int, last: int, since: float) -> list[Step]:
    """Return the steps of an output, one a second."""
    return [Step(since + n, output, p) for n, p in enumerate(range(first, last + 1))]


@pytest.mark.parametrize(("first", "said"), [(1, "9"), (8, "2"), (10, "0"), (13, "**3 left out**")])
def test_steps_are_lost_if_the_next_worker_shows_them_again(first, said):
    """Those too that were made between the fault and the restart; and none may be left out."""
    seen = [*steps("old", 1, 9, 10.0), *steps("new", first, 20, 30.0)]
    assert restart(seen, 12.0).lost(SCRIPT) == said


def test_a_restart_costs_what_its_own_group_had_done():
    """A script that begins anew each time loses no step twice; a bar may leave some out."""
    seen = [*steps("a", 1, 9, 10.0), *steps("b", 1, 3, 30.0), *steps("c", 1, 2, 50.0)]
    assert restart(seen, 31.0, group_since=30.0).lost(SCRIPT) == "3"
    drawn = msgspec.structs.replace(SCRIPT, is_drawn=True)
    assert restart([*seen[:9], Step(30.0, "b", 12)], 20.0).lost(drawn) == "0"


def test_only_an_output_that_begins_after_the_fault_is_a_restart():
    """The workers that go on are none; a line may stand for ten steps."""
    seen = [*steps("old", 1, 9, 10.0), *steps("new", 4, 20, 30.0)]
    assert restart(seen, 31.0) is None
    tens = msgspec.structs.replace(SCRIPT, step_size=10)
    assert restart([Step(1.0, "a", 30), Step(3.0, "b", 10)], 2.0).lost(tens) == "3"


def test_a_run_has_to_end_at_the_last_step(driver):
    """One that ends early with exit code 0 has not run."""
    whole = driver.Outcome(code=0, first_line_s=5.0, last=40, loss="0.5")
    short = driver.Outcome(code=0, first_line_s=8.0, last=30, level="1", lost={"kill": "9"})
    seen = {"a": {"undisturbed": whole, "ours": whole}, "b": {"undisturbed": whole, "ours": short}}
    made = driver.result(seen, ["c was not run"])
    seen = {"a": {"ours": whole}}
    assert driver.result(seen, []).tables[0].texts()[0][1] == "not compared"
    assert [row[1] for row in made.tables[0].texts()] == ["yes", "**no**"]
    assert [target.value for target in made.targets] == [1, pytest.approx(1.3)]
    assert made.targets[0].met is False


def test_the_same_data_is_made_each_time(tmp_path):
    """So that two contestants train alike."""
    for kind in ("text:200", "tokens", "digits"):
        for name in ("one", "two"):
            data.make(tmp_path / name / kind, kind)
    one, two = (sorted(p for p in (tmp_path / n).rglob("*") if p.is_file()) for n in ("one", "two"))
    assert len(one) == 8 and [p.read_bytes() for p in one] == [p.read_bytes() for p in two]


def test_sources_are_fetched_once_a_repository(driver):
    """At their revision."""
    (line,) = driver.fetching([SCRIPT, SCRIPT])
    assert "https://github.com/owner/name 0000000000" in line and "name checkout" in line
