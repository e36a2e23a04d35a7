"""Results of benchmarks: figures, verdicts, files and the page that is written from them."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from evidence import record, registry, running
from evidence.needs import Need
from evidence.page import Section, as_markdown, page
from evidence.record import Failure, Record, Taken
from evidence.registry import Benchmark
from evidence.result import About, Column, Figure, Peer, Result, Table, Target, figure

TABLE = Table(
    "a caption",
    (Column("who"), Column("s", ".2f"), Column("n", "g")),
    (("ours", Figure(1.0, 0.5, 2.0, 3), Figure(4)), ("a|peer", "no step (120 s)")),
)
RESULT = Result(
    About("The heading", "What is measured.", ("Networks.",)),
    (TABLE,),
    (Target("one", 2.0, 1.0, "s"), Target("two", 0.2, 8.0, "s")),
    (Peer("torchrun", "2.13.0"), Peer("torchx", why="it is not installed")),
    ("A note.",),
    3,
)
TAKEN = Taken(
    "2026-11-21T10:00Z", "python benchmarks/x.py", {"cores": "2"}, {"torch": "2.13.0"}, 0.1, 1.3
)
MEASURED = Record("x", RESULT, TAKEN)


# ---- figures and verdicts -----------------------------------------------------------------------


def test_figure_of_samples_has_median_and_range():
    """One sample has no range; none is an empty cell."""
    assert figure([3.0, 1.0, 2.0]) == Figure(2.0, 1.0, 3.0, 3)
    assert figure([3.0, 1.0, 2.0]).text(".1f") == "2.0 (1.0 to 3.0)"
    assert figure([3.0]).text(".1f") == "3.0"
    assert figure([]) == ""
    assert Figure(92.6).text(".1f") == "92.6"


@pytest.mark.parametrize(
    ("target", "met", "verdict"),
    [
        (Target("", 2.0, 1.0), True, "met, 50 % to spare"),
        (Target("", 2.0, 2.0), True, "met, 0 % to spare"),
        (Target("", 2.0, 2.3), False, "missed by 15 %"),
        (Target("", 0.2, 8.0), False, "missed by a factor of 40"),
        (Target("", 90.0, 85.2, more_is_better=True), False, "missed by 5 %"),
        (Target("", 50.0, 200.0, more_is_better=True), True, "met, a factor of 4 to spare"),
        (Target("", 0, 0), True, "met, 0 to spare"),
        (Target("", 2.0, -0.5, "ms"), True, "met, 2.5 ms to spare"),
        (Target("", 0, 3, "crashes"), False, "missed by 3 crashes"),
        (Target("", 1.0, None, why="disturbed"), None, "not known: disturbed"),
        (Target("", 1.0, None, why="1 of 3", failed=True), False, "missed: 1 of 3"),
    ],
)
def test_target_knows_by_how_much(target, met, verdict):
    """In per cent, or times from twice the bound on; absolutely where the bound is zero."""
    assert (target.met, target.verdict) == (met, verdict)


def test_rows_may_be_shorter_than_the_table():
    """What is missing is empty; texts stand as they are."""
    assert TABLE.texts() == [
        ["ours", "1.00 (0.50 to 2.00)", "4"],
        ["a|peer", "no step (120 s)", ""],
    ]


# ---- files ------------------------------------------------------------------------------------


def test_record_is_read_back_as_it_was_written(tmp_path):
    """With figures, failure and all; and the verdicts are there for those who read no Python."""
    whole = MEASURED.failed(Failure("2026-11-22T10:00Z", "exit code 1"))
    record.write(whole, tmp_path)
    assert record.read("x", tmp_path) == whole
    raw = json.loads((tmp_path / "x.json").read_text())
    assert [t["met"] for t in raw["result"]["targets"]] == [True, False]
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_benchmark_without_a_file_is_not_measured(tmp_path):
    """Only its name is known."""
    assert record.read("x", tmp_path) == Record("x")


@pytest.mark.parametrize("text", ["{", "{}", '{"name": "x", "result": {"about": 1}}'])
def test_file_that_is_no_record_is_named(tmp_path, text):
    """With what to do."""
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(SystemExit, match=r"x\.json: .*; remove it"):
        record.read("x", tmp_path)


# ---- attempts ---------------------------------------------------------------------------------


def test_new_result_takes_the_place_of_figures_and_failure(tmp_path):
    """A good attempt is all that is known from then on."""
    (tmp_path / "result").write_text(json.dumps(RESULT.as_json()))
    before = Record("x", failure=Failure("2026-11-20", "it said nothing"))
    assert running.judged(before, 0, "", tmp_path / "result", TAKEN) == MEASURED


def test_failed_attempt_leaves_the_figures(tmp_path):
    """Also where it has written a result before it failed."""
    (tmp_path / "result").write_text(json.dumps(Result(RESULT.about, ()).as_json()))
    errors = 'File "/home/me/x.py", line 3\nOSError: no /home/me/clone/file\n\n'
    after = running.judged(MEASURED, 2, errors, tmp_path / "result", TAKEN)
    assert (after.result, after.taken) == (RESULT, TAKEN)
    assert after.failure == Failure(TAKEN.date, "exit code 2: OSError: no file")


def test_what_a_benchmark_says_is_shown_and_kept(capfd):
    """The last lines of its standard error, and its exit code."""
    program = "import sys; print('figures'); [print(n, file=sys.stderr) for n in range(99)]"
    code, errors = running.shown([sys.executable, "-c", f"{program}; sys.exit(3)"])
    assert (code, running.last_words(errors), len(errors.splitlines())) == (3, "98", 50)
    out, err = capfd.readouterr()
    assert (out, len(err.splitlines())) == ("figures\n", 99)


def test_attempt_without_a_result_has_failed(tmp_path):
    """It may end well and write nothing, or something else."""
    after = running.judged(Record("x"), 0, "", tmp_path / "result", TAKEN)
    assert "wrote no result" in after.failure.why
    (tmp_path / "result").write_text("[]")
    after = running.judged(Record("x"), 0, "", tmp_path / "result", TAKEN)
    assert "wrote no result" in after.failure.why


# ---- the page ---------------------------------------------------------------------------------


def test_section_has_everything():
    """Figures, verdicts, peers, circumstances, and what is not shown."""
    text = page([Section(MEASURED, "?")])
    for part in (
        "## The heading\n\nWhat is measured.\n",
        "| ours | 1.00 (0.50 to 2.00) | 4 |\n| a\\|peer | no step (120 s) |  |\n",
        "| one | at most 2 s | 1 s | met, 50 % to spare |\n",
        "| two | at most 0.2 s | 8 s | **missed by a factor of 40** |\n",
        "\n- A note.\n",
        "do not show.**\n\n- Networks.\n",
        "Peers: torchrun 2.13.0; torchx: not measured, it is not installed.\n",
        "Measured 2026-11-21T10:00Z by `python benchmarks/x.py`, 3 repeats.",
        "2 cores; load 0.1 before, 1.3 after.",
        "Versions: torch 2.13.0.",
        "| [The heading](#the-heading) | 2026-11-21 | 1 met, 1 **missed** |\n",
    ):
        assert part in text
    assert "Transcribed" not in text and "failed" not in text


def test_transcribed_figures_say_so():
    """They were not written by the benchmark itself."""
    taken = Taken("2026-11-21", "c", {}, {}, transcribed="from the page before.")
    assert "Transcribed: from the page before.\n" in page(
        [Section(Record("x", RESULT, taken), "?")]
    )


def test_failure_stands_above_the_figures_before_it():
    """Both are shown, also in the table of contents."""
    text = page([Section(MEASURED.failed(Failure("2026-11-22T10:00Z", "exit code 1: x")), "?")])
    failed = text.index("**The attempt of 2026-11-22 failed**: exit code 1: x")
    assert failed < text.index("1.00 (0.50 to 2.00)")
    assert "1 met, 1 **missed**; **the last attempt failed** |" in text


def test_benchmark_that_was_never_measured_is_not_dropped():
    """It has a section that says how to measure it, and why it failed, if it did."""
    text = page([Section(Record("x"), "How fast?"), Section(MEASURED, "?")])
    assert "| [x](#x) |  | **not measured** |" in text
    assert "## x\n\nNot measured: `benchmarks/run_all --only x`. How fast?\n" in text
    text = page([Section(Record("x", failure=Failure("2026-11-22", "it needs root")), "?")])
    assert "| [x](#x) |  | **failed** |" in text and "it needs root" in text


def test_tables_of_different_sections_do_not_run_together():
    """An empty line before each heading and each table, and never three."""
    text = page([Section(MEASURED, "?"), Section(Record("y"), "?"), Section(MEASURED, "?")])
    assert "\n\n\n" not in text
    lines = text.splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith(("## ", "| target", "| who"))]
    assert starts and all(lines[n - 1] == "" for n in starts)


def test_markdown_table_has_a_rule():
    """The first column is to the left, figures to the right."""
    assert as_markdown(TABLE).splitlines()[:2] == ["| who | s | n |", "| --- | ---: | ---: |"]
    texts = Table("", (Column("a"), Column("b")), (("x", "y"), ("z",)))
    assert as_markdown(texts).splitlines()[1] == "| --- | --- |"


# ---- what there is ----------------------------------------------------------------------------


def test_every_script_is_there_and_asks_something():
    """The first line of each docstring is what is shown of a benchmark that was not measured."""
    for benchmark in registry.BENCHMARKS:
        assert len(benchmark.question) > 20, benchmark.name
    assert len({b.name for b in registry.BENCHMARKS}) == len(registry.BENCHMARKS)
    drivers = {file.name for file in registry.HERE.glob("*.py")}
    assert drivers == {b.script for b in registry.BENCHMARKS}


def test_options_of_a_quick_look_and_of_repeats():
    """Quick ones come after its own, and win; repeats go to those that have them."""
    b = Benchmark("b", "b.py", "--repeats 5", "--repeats 1 --small", 1)
    assert b.options(quick=False, repeats=None) == ["--repeats", "5"]
    assert b.options(quick=True, repeats=None) == ["--repeats", "5", "--repeats", "1", "--small"]
    assert b.options(quick=False, repeats=7)[-2:] == ["--repeats", "7"]
    c = Benchmark("c", "c.py", "--minutes 1", "", 1, repeats=False)
    assert c.options(quick=False, repeats=7) == ["--minutes", "1"]


def test_unknown_benchmark_is_refused():
    """With the names that there are."""
    assert [b.name for b in registry.chosen(["ft", "submit"])] == ["submit", "ft"]
    with pytest.raises(SystemExit, match="no benchmark fast; there are: submit, "):
        registry.chosen(["fast"])


@pytest.fixture
def two(monkeypatch):
    """Two benchmarks, the first of which needs what is not there; which were run."""
    absent = Need("a moon", lambda: False, "wait for the night")
    found = (
        Benchmark("moon", "submit.py", "", "", 1, (absent,)),
        Benchmark("sun", "submit.py", "", "", 1),
    )
    ran = []

    def run(benchmark, options, folder):
        ran.append(benchmark.name)
        measured = Record(benchmark.name, RESULT, TAKEN)
        record.write(measured, folder)
        return measured

    monkeypatch.setattr(registry, "BENCHMARKS", found)
    monkeypatch.setattr(running, "run", run)
    return ran


def test_what_is_missing_is_said_before_anything_runs(two, tmp_path, capsys):
    """By name, with the remedy."""
    assert running.main(["--into", str(tmp_path)]) == running.MISSING
    assert "moon needs a moon: wait for the night" in capsys.readouterr().err
    assert two == [] and list(tmp_path.iterdir()) == []


def test_the_rest_can_be_run(two, tmp_path):
    """What could not be is on the page all the same."""
    assert running.main(["--into", str(tmp_path), "--rest"]) == running.FAILED
    assert two == ["sun"]
    text = (tmp_path / "RESULTS.md").read_text()
    assert "it needs a moon (wait for the night)" in text and "## The heading" in text


def test_only_what_is_asked_for_is_needed(two, tmp_path):
    """The others' sections stay as they are."""
    record.write(Record("moon", RESULT, TAKEN), tmp_path)
    assert running.main(["--into", str(tmp_path), "--only", "sun"]) == 0
    assert two == ["sun"]
    assert (tmp_path / "RESULTS.md").read_text().count("## The heading") == 2


def test_page_is_written_again_without_measuring(two, tmp_path):
    """From another folder's files."""
    record.write(Record("sun", RESULT, TAKEN), tmp_path / "files")
    assert running.main(["--from", str(tmp_path / "files"), "--into", str(tmp_path)]) == 0
    assert two == []
    assert "## The heading" in (tmp_path / "RESULTS.md").read_text()


def test_quick_look_touches_no_figures_that_are_kept(two, monkeypatch, tmp_path):
    """What it writes goes into a folder of its own."""
    monkeypatch.setattr(running, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(running, "PAGE", tmp_path / "RESULTS.md")
    assert running.main(["--quick", "--only", "sun"]) == 0
    assert two == ["sun"] and list(tmp_path.iterdir()) == []


def test_list_tells_what_is_missing(two, capsys):
    """And how long each takes."""
    assert running.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert "sun " in out and "about   1 min" in out
    assert "missing: a moon: wait for the night" in out


def test_page_is_the_one_of_the_records():
    """Whoever changes a record or the template writes the page anew: run_all --from."""
    sections = [
        Section(record.read(b.name, running.RESULTS), b.question) for b in registry.BENCHMARKS
    ]
    assert running.PAGE.read_text() == page(sections)
