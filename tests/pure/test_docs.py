"""What the documentation says is complete, and what `tests/check_pages.py` looks up."""

import re
import sys
from pathlib import Path

import pytest

import check_pages
from check_pages import KEYS, LOOPS, commands
from check_words import MOST_WORDS, long_sentences
from doc_pages import ROOT
from hpc_elastic.run import directory

sys.path.append(str(ROOT / "docs"))

import figures
from badges import badges
from generate import cli_page, settings_page
from sizing_page import sizing_page


def test_commands_are_found():
    """What is looked for is there: behind prompts, in sentences, over two lines, in a `$(...)`."""
    text = """In `hpc-elastic events RUN --raw`:

```console
$ python train.py -m launcher=slurm nodes=1:4 \\
    launcher.time=60
$ eval "$(hpc-elastic init --completion bash)"   # once
output, which is no command
```
"""
    sentence, training, *completion = commands(text)[-1:] + commands(text)[:-1]
    assert sentence == ["hpc-elastic", "events", "RUN", "--raw"]
    assert training[-1] == "launcher.time=60"
    assert ["hpc-elastic", "init", "--completion", "bash"] in completion
    pages = "\n".join(path.read_text() for path in (ROOT / "docs/tutorial").glob("*.md"))
    of_tutorial = {words[1] for words in commands(pages) if words[1:]}
    assert {"doctor", "status", "events", "cancel", "resume"} <= of_tutorial


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("`hpc-elastic statuses RUN`", "statuses"),
        ("`hpc-elastic status --colour`", "--colour"),
        ("`hpc-elastic run --node=4 -- python x.py`", "node"),
        ("a key, launcher.agent.cold", "launcher.agent.cold"),
        ("`python train.py nodez=4`", "nodez=4"),
        ("```python\nfrom hpc_elastic import reports\n```", "hpc_elastic.reports"),
        ("```python\nfrom hpc_elastic = 1\n```", "invalid syntax"),
        ("`tests/test_nothing.py`", "tests/test_nothing.py"),
        ("`slurm-sandbox upwards`", "slurm-sandbox upwards"),
    ],
)
def test_what_is_not_there_is_found(text, unknown):
    """By one of the loops, and by its name."""
    assert [unknown in found for loop in LOOPS for found in loop(text)] == [True]


def test_long_sentences_are_found(tmp_path):
    """By their line; code, tables, titles and the title of an item are no sentences."""
    words = "word " * (MOST_WORDS - 2)
    (page := tmp_path / "page.md").write_text(
        f"# {words * 2}\n\n```\n{words * 2}\n```\n| {words * 2} |\n\n"
        f"- **{words * 2}**: {words}and `code of four words`.\n- A {words}and\nsome more.\n"
    )
    assert [line for line, _ in long_sentences(page)] == [9]


def test_a_page_without_a_link_is_found(monkeypatch):
    """The README leads to the index, and no page leads to the licence of a tool."""
    alone = "tools/slurm_sandbox/LICENSE"
    monkeypatch.setattr(check_pages, "NAMES", ["docs/index.md", alone])
    assert check_pages.unreachable_pages() == {alone}


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("reference/settings.md", settings_page),
        ("reference/cli.md", cli_page),
        ("explanation/sizing.md", sizing_page),
        ("images/badges.svg", badges),
    ],
)
def test_a_generated_page_is_fresh(name, page):
    """`python docs/generate.py` writes it."""
    assert (ROOT / f"docs/{name}").read_text() == page()


def test_every_figure_has_a_source():
    """The blocks of figures are fresh, and no figure outside of them stands alone."""
    assert list(figures.problems()) == []


@pytest.mark.parametrize(
    ("line", "has_source"),
    [
        ("it takes 3.5 s", False),
        ("27 to 30 % longer ([measured](../benchmarks/RESULTS.md#a-study))", False),
        ("it takes 97 % ([paper](https://example.org))", True),
        ("after 30 s ([settings](../reference/settings.md))", True),
        ("Python 3.11, step 52, `grace=30 s`, 10.1.0.0/16, the last [30 s](x.md#in-30-s)", False),
        ("Python 3.11, step 52, `grace=30 s`, 10.1.0.0/16, [part 1](x.md#in-30-s)", True),
    ],
)
def test_a_figure_without_a_source_is_found(line, has_source):
    """Typed from RESULTS.md, it would be stale one day; in code it is none."""
    block = "<!-- figures ladder -->\n2 minutes\n<!-- figures end -->"
    text = f"{block}\n{line}\n```console\nafter 3 s\n```\n"
    assert list(figures.without_source(text)) == ([] if has_source else [re.sub("`.*?`", "", line)])


def test_a_peer_that_is_ahead_stands_first():
    """By the figures themselves, in both tables."""
    for in_short in (True, False):
        table = figures.comparison("README.md", in_short=in_short).splitlines()[2:]
        is_ours_best = [row.split(" | ")[1].startswith("**") for row in table]
        assert is_ours_best == sorted(is_ours_best) and not all(is_ours_best)
    with pytest.raises(LookupError):
        figures.Measured("submit", ("sbatch",), "whole command, s").cell()


def test_the_page_of_files_has_every_path():
    """That `run.directory` names, of a run and of a submission, and those of single modules."""
    text = (ROOT / "docs/reference/files.md").read_text()
    here, array = Path("here"), Path("array-<k>")
    owners = directory.RunDir(here), directory.Submission(here), directory.ArrayFiles(array)
    kinds = directory._Below, directory._Suffixed
    paths = [
        str(getattr(owner, name)).removeprefix("here/")
        for owner in owners
        for name, value in vars(type(owner)).items()
        if isinstance(value, kinds)
    ]
    others = "before-resume.<n> ledger metrics sweeper.lock tensorboard trackers wandb"
    paths += others.split()
    assert len(paths) > 30
    missing = [path for path in paths if path.split("/")[0] not in text]
    assert not missing


def test_the_settings_page_has_every_key_with_a_meaning():
    """No key is left out, and none stands there without a word."""
    rows = re.findall(r"^\| `(launcher\.[\w.]+)` \|.*\| (.*) \|$", settings_page(), re.MULTILINE)
    groups = {key for key in KEYS if any(other.startswith(f"{key}.") for other in KEYS)}
    assert {key for key, _ in rows} == KEYS - groups
    assert [key for key, meaning in rows if not meaning] == []
