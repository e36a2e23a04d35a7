"""Whose a directory of checkpoints is: decided by its mark, who asks, and what is there."""

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_elastic.checkpoint import owner
from hpc_elastic.checkpoint.owner import NO_RUN, Owner, OwnerVerdict, claim, judge, read, require
from hpc_elastic.errors import CheckpointError, ConfigError

HERE = Path("/scratch/checkpoints")
A = Owner("a-1", "/runs/a", restarts=True, keys=["net"])
B = Owner("b-2", "/runs/b", restarts=True, keys=["net"])
STEP, LATER_STEP = Owner("7.0-x", "/steps/7.0", keys=["net"]), Owner("8.0-x", "/steps/8.0")
ALONE = Owner(NO_RUN, keys=["net"])


def best(mine: Owner) -> Owner:
    """Return the same owner with saves that are no boundaries."""
    return replace(mine, boundary=False)


@pytest.mark.parametrize(
    ("mark", "mine", "take_over", "is_empty", "marks"),
    [
        (None, A, None, True, True),
        (None, A, None, False, True),  # of hpc_elastic 0.2.0
        (None, best(A), None, True, True),
        (None, best(A), None, False, False),
        (None, ALONE, None, True, False),
        (A, A, None, False, False),
        (A, replace(A, keys=["net", "ema"]), None, False, False),
        (A, B, "a-1", False, True),
        (A, ALONE, "a-1", False, True),
        (ALONE, A, NO_RUN, False, True),
        (B, B, "a-1", False, False),
        (A, B, None, True, True),
        (ALONE, ALONE, None, False, False),
        (STEP, LATER_STEP, None, False, True),
        (STEP, ALONE, None, False, False),
    ],
)
def test_an_owner_that_may_save(mark, mine, take_over, is_empty, marks):
    """And whether the directory is marked for it."""
    verdict = judge(HERE, mark, mine, take_over, is_empty=is_empty)
    assert verdict == OwnerVerdict(marks=marks)


@pytest.mark.parametrize(
    ("mark", "mine", "take_over", "at_once", "message"),
    [
        (A, B, None, True, r"the run a-1 \(/runs/a\), with the state net: .*take_over='a-1'"),
        (A, B, "b-2", True, "the run a-1"),
        (B, A, "a-1", True, "take_over='b-2'"),  # the earlier owner, with its script
        (ALONE, B, None, True, "a script outside of a run.*take_over='no run'"),
        (STEP, B, None, True, "take_over='7.0-x'"),
        (A, STEP, None, True, "take_over='a-1'"),
        (A, best(B), None, False, "the run a-1"),
        (A, ALONE, None, False, "the run a-1"),
        (A, best(A), None, False, "a directory of its own"),
        (best(A), A, None, False, "a directory of its own"),
        (best(ALONE), ALONE, None, False, "a directory of its own"),
    ],
)
def test_an_owner_that_may_not(mark, mine, take_over, at_once, message):
    """Another's directory, or its own of the other kind; who may still restore hears it later."""
    verdict = judge(HERE, mark, mine, take_over, is_empty=False)
    assert verdict.at_once is at_once and not verdict.marks
    with pytest.raises(ConfigError, match=f"^directory='{HERE}'.*{message}"):
        raise verdict.problem


def test_the_first_of_two_has_the_directory(tmp_path):
    """Until it is replaced on purpose; each commit finds that."""
    assert claim(tmp_path, A, None, has_steps=False) == OwnerVerdict(marks=True)
    assert claim(tmp_path, B, None, has_steps=True).at_once
    assert read(tmp_path) == A
    require(tmp_path, A)
    assert claim(tmp_path, B, "a-1", has_steps=True).marks
    assert read(tmp_path) == B
    with pytest.raises(CheckpointError, match=r"belongs to the run b-2 .* now"):
        require(tmp_path, A)


def test_a_script_outside_of_a_run_marks_what_it_saves_to(tmp_path):
    """Not what it only looks at; another such script goes on from there."""
    claim(tmp_path, ALONE, None, has_steps=False)
    assert read(tmp_path) is None
    require(tmp_path, ALONE)
    assert read(tmp_path) == ALONE
    require(tmp_path, replace(ALONE, nonce="another"))
    with pytest.raises(CheckpointError, match="belongs to a script outside of a run"):
        require(tmp_path, A)
    with pytest.raises(CheckpointError, match="belongs to"):
        require(tmp_path, best(ALONE))


def test_a_run_that_is_over_without_a_checkpoint_leaves_nothing_to_protect(tmp_path):
    """Corrected and submitted again, it may have the same directory; not beside one that lives."""
    mine, run = tmp_path / "c", tmp_path / "run"
    mine.mkdir()
    run.mkdir()
    first = replace(A, path=str(run))
    claim(mine, first, None, has_steps=False)
    assert claim(mine, B, None, has_steps=False).problem is not None
    (run / "result.json").write_text("{}")
    assert claim(mine, B, None, has_steps=True).problem is not None
    assert claim(mine, B, None, has_steps=False).marks
    assert read(mine) == B


@pytest.mark.parametrize("text", ["", "[]", '{"run": 7}', '{"run": "a", "colour": "red"}', "{"])
def test_a_damaged_mark_is_named(tmp_path, text):
    """With the remedy; nothing is concluded from it."""
    (tmp_path / "owner.json").write_text(text)
    with pytest.raises(ConfigError, match=r"owner\.json'.*remove it if they are this run's"):
        read(tmp_path)


def test_a_file_system_without_links_has_marks_too(tmp_path, monkeypatch):
    """As some of FUSE."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    claim(tmp_path, A, None, has_steps=False)
    assert read(tmp_path) == A


def test_an_identity_is_of_the_run_or_of_the_job_step(tmp_path, monkeypatch):
    """A step of torchrun has no run.json: another submission is another owner."""
    assert Owner.current().run == NO_RUN
    names = []
    for run in ("a", "b"):
        (tmp_path / run / "rdzv").mkdir(parents=True)
        monkeypatch.setenv("HPC_ELASTIC_FENCE", str(tmp_path / run / "rdzv" / "entry.2.json"))
        mine = Owner.current(["net"])
        assert (mine.path, mine.restarts, mine.keys) == (str(tmp_path / run), False, ["net"])
        names.append(mine.run)
    assert len({*names, NO_RUN}) == 3
    assert len({owner.tag(name) for name in names}) == 2
