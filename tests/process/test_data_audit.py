"""The ledger of a run, and what is proven from it."""

import dataclasses
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_worlds import Loader, Run, World, train_on
from hpc_elastic.cli.main import main
from hpc_elastic.data import ElasticSampler, ledger
from hpc_elastic.data import audit as audit_module
from hpc_elastic.data.audit import EpochProof, Proof, audit
from hpc_elastic.errors import ConfigError, RunDirectoryError
from hpc_elastic.run.directory import RunDir
from hpc_elastic.worker import reporting


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that has no group yet."""
    return Run(tmp_path / "run", monkeypatch)


def holds(run) -> Proof:
    """The proof of the only sampler, which must hold."""
    (proof,) = audit(run.path)
    assert proof.holds, proof.problems
    return proof


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("end", ["keep", "drop", "pad"])
def test_a_proof_agrees_with_what_was_trained(run, seed, end):
    """For any history: killed groups, lost steps, world sizes; what was lost is counted."""
    chance = random.Random(f"{seed} {end}")
    length, batch = chance.randint(20, 90), chance.randint(1, 20)
    survived, lost = train_on(run, chance, length, (batch, chance.choice([None, 2])), end=end)
    run.succeed()
    proof = holds(run)
    rest = length % batch
    dropped = rest if end == "drop" else 0
    padded = batch - rest if end == "pad" and rest else 0
    expected = [EpochProof(e, length - dropped, 0, 0, 0, dropped, padded) for e in range(3)]
    assert proof.epochs == expected
    assert proof.last_step == max(step for step, _, _ in survived)
    assert proof.replayed_samples <= sum(len(indices) for _, _, indices in lost)
    if not lost:
        assert (proof.replayed_samples, proof.replayed_steps) == (0, 0)


def test_what_was_written_and_lost_is_counted(run):
    """Steps behind the last checkpoint of a group that was killed."""
    run.form_group()
    first = World(2, 40, (4, None))
    steps = first.steps(1)
    for step in steps:
        if step == 3:
            state = first.state()
        if step == 7:
            break
    for sampler in first.samplers:
        sampler._ledger.ledger.flush()
    run.train_group(3, 40, (4, None), state, num_epochs=1)
    proof = holds(run)
    assert (proof.replayed_steps, proof.replayed_samples) == (4, 16)
    assert proof.stretches == 2


def test_only_the_groups_that_the_model_has_gone_through_count(run):
    """A group without a successor is lost, even if others came after it."""
    state = run.train_group(1, 40, (4, None), num_epochs=1, num_steps=5)
    run.form_group()
    dead_end = World(2, 40, (4, None))  # it could not see the checkpoint
    dead_end.run(1, num_steps=2)
    dead_end.state()
    run.train_group(2, 40, (4, None), state, num_epochs=1)
    run.succeed()
    proof = holds(run)
    assert (proof.replayed_steps, proof.replayed_samples) == (2, 8)


def test_a_state_saved_before_the_first_step_has_the_right_ancestor(run):
    """It is the work of the group that it was loaded from."""
    state = run.train_group(1, 20, (4, None), num_epochs=1, num_steps=3)
    run.form_group()
    state = World(2, 20, (4, None), state).state()
    run.train_group(2, 20, (4, None), state, num_epochs=1)
    run.succeed()
    assert audit(run.path)[0].holds


def test_going_back_in_one_process_is_another_stretch(run):
    """As after a loss that exploded: what was trained since is thrown away."""
    run.form_group()
    world = World(2, 20, (4, None))
    world.run(1, num_steps=2)
    state = world.state()
    world.run(1, num_steps=2)
    for sampler in world.samplers:
        sampler.load_state_dict(state)
    world.run(1)
    world.state()
    run.succeed()
    proof = holds(run)
    assert (proof.replayed_steps, proof.stretches) == (2, 2)


def test_a_run_that_goes_on_is_proven_up_to_where_all_ranks_are(run):
    """One rank has written more than another, and nothing has been left out."""
    run.form_group()
    world = World(2, 40, (4, None))
    steps = world.steps(1)
    for _ in range(3):
        next(steps)
    world.state()
    next(steps)
    world.samplers[0]._ledger.ledger.flush()
    proof = holds(run)
    assert proof.epochs == [EpochProof(0, 12, 0, 0, left=28)]
    assert (proof.last_step, proof.open_samples, proof.replayed_samples) == (3, 2, 0)


def lines_of(run, rank, record=1):
    """Return the file of a rank of a group, and its lines."""
    path = run.path / "ledger" / f"train.entry-{record}.rank-{rank}.jsonl"
    return path, path.read_text().splitlines()


@pytest.fixture
def finished(run):
    """A run of two ranks that has trained two epochs of 40 samples, undisturbed."""
    run.train_group(2, 40, (4, None), num_epochs=2)
    run.succeed()
    return run


def test_samples_that_were_never_trained_are_found(finished):
    """A rank has left out its half of three steps."""
    path, (head, first, *rest) = lines_of(finished, 1)
    shortened = json.loads(first)
    shortened[1] -= 3
    path.write_text("\n".join([head, json.dumps(shortened), *rest]) + "\n")
    (proof,) = audit(finished.path)
    missing, wrong, never = proof.problems
    assert missing == "rank 1 of the group of log entry 1: 3 steps are missing"
    assert wrong == (
        "3 steps of the group of log entry 1, from step 8 on, trained something else than planned"
    )
    assert never == "epoch 0: 6 samples were never trained"
    assert proof.epochs[0] == EpochProof(0, 34, 0, 6)


def test_samples_that_were_trained_twice_are_found(finished):
    """A rank has taken the other's share in two steps."""
    path, lines = lines_of(finished, 1)
    with path.open("a") as f:
        f.write("[13,2,1,8,4,2]\n")
    (proof,) = audit(finished.path)
    more, wrong, twice = proof.problems
    assert more == "rank 1 of the group of log entry 1: 2 steps are too many"
    assert wrong.startswith("2 steps of the group of log entry 1, from step 13 on,")
    assert twice == "epoch 1: 4 samples were trained more than once"
    assert proof.epochs[1] == EpochProof(1, 36, 4, 0)
    assert len(lines) == 4


def test_a_succeeded_run_that_lost_its_last_group_is_not_proven(run):
    """What is left is a history without a fault, but not the one that the model has."""
    state = run.train_group(2, 40, (4, None), num_epochs=2, num_steps=5)
    run.train_group(3, 40, (4, None), state, num_epochs=2)
    run.succeed()
    assert audit(run.path)[0].holds
    for path in (run.path / "ledger").glob("train.entry-2.*"):
        path.unlink()
    (proof,) = audit(run.path)
    (problem,) = proof.problems
    assert problem.startswith("the run has succeeded, but the end of the training is not recorded")
    assert proof.epochs == [EpochProof(0, 20, 0, 0, left=20)]


def test_a_succeeded_run_whose_last_group_had_nothing_to_train_is_proven(run):
    """It was killed between the last step and its function's end; the next one only returns."""
    state = run.train_group(2, 40, (4, None), num_epochs=2)
    run.form_group()
    World(3, 40, (4, None), state).run(2)
    run.succeed()
    proof = holds(run)
    assert (proof.last_step, proof.stretches) == (20, 1)
    for path in (run.path / "ledger").glob("train.entry-1.*"):
        path.unlink()
    assert not audit(run.path)[0].holds


def test_a_resumed_run_is_proven_by_its_last_generation_only(run):
    """The first one had succeeded, and said so."""
    state = run.train_group(1, 40, (4, None), num_epochs=1)
    run.succeed()
    spec = RunDir(run.path).load()
    run.form_group()
    RunDir(run.path).spec.write_text(dataclasses.replace(spec, generation=1).to_json())
    second = World(1, 40, (4, None), state)
    second.run(2)
    second.state()
    run.succeed()
    assert audit(run.path)[0].holds
    lines_of(run, 0, record=2)[0].unlink()
    assert not audit(run.path)[0].holds


@pytest.mark.parametrize(("length", "batch"), [(42, 4), (43, 4), (47, 10)])
def test_a_rest_is_dropped_at_the_end_only_and_as_large_as_it_is(run, length, batch):
    """A last batch that was left out is no rest, though it be smaller than two batches."""
    run.train_group(1, length, (batch, None), end="drop", num_epochs=2)
    run.succeed()
    (proof,) = audit(run.path)
    assert [epoch.dropped for epoch in proof.epochs] == [length % batch] * 2
    path, lines = lines_of(run, 0)
    span = json.loads(lines[1])
    for count in range(1, batch):  # of the last step, fewer and fewer samples
        last = [span[1], 1, 0, (span[1] - 1) * batch, 0, count]
        cut = [span[0], span[1] - 1, *span[2:]]
        changed = [lines[0], json.dumps(cut), json.dumps(last), *lines[2:]]
        path.write_text("\n".join(changed) + "\n")
        (proof,) = audit(run.path)
        assert not proof.holds
        assert proof.epochs[0].never == batch - count
        assert proof.epochs[0].dropped == length % batch


@pytest.mark.parametrize("change", [-1, 1])
def test_gaps_and_doubles_among_paddings_are_found(run, change):
    """They stand for samples that a batch was filled with."""
    run.train_group(2, 41, (8, None), end="pad", num_epochs=1)
    run.succeed()
    (proof,) = audit(run.path)
    assert (proof.holds, proof.epochs[0].padded) == (True, 7)
    path, lines = lines_of(run, 1)  # the second half of the last batch is padding
    span = json.loads(lines[1])
    cut = [span[0], span[1] - 1, *span[2:]]
    last = [span[1], 1, 0, span[3] + (span[1] - 1) * 8 + change, 0, 4]
    path.write_text("\n".join([lines[0], json.dumps(cut), json.dumps(last), *lines[2:]]) + "\n")
    (problem,) = audit(run.path)[0].problems
    assert problem.startswith("1 step of the group of log entry 1, from step 6 on,")


@pytest.mark.parametrize("seed", range(30))
def test_no_change_of_a_number_goes_unnoticed(finished, seed):
    """Whichever part of a span is wrong."""
    chance = random.Random(seed)
    path, lines = lines_of(finished, chance.randint(0, 1))
    span = json.loads(lines[line := chance.randint(1, 2)])
    number = chance.randint(1, 5)
    span[number] = abs(span[number] + chance.choice([-1, 1]))
    lines[line] = json.dumps(span)
    path.write_text("\n".join(lines) + "\n")
    assert not audit(finished.path)[0].holds, span


def test_it_does_not_matter_when_it_was_written(run):
    """Lines that the time of writing has cut off are one again; so a long run is small to audit."""
    run.form_group()
    world = World(2, 4000, (4, None))
    for step in world.steps(1):
        if step % 7 == 0:
            world.samplers[0]._ledger.ledger.flush()
    world.state()
    run.succeed()
    assert len(lines_of(run, 0)[1]) > 100
    (group,) = audit_module.read(run.path / "ledger")["train"].groups.values()
    assert [spans.tolist() for spans in group.spans.values()] == [
        [[1, 1000, 0, 0, 4, 2]], [[1, 1000, 0, 2, 4, 2]]
    ]  # fmt: skip
    assert audit(run.path)[0].holds


def test_a_lost_group_is_found(run):
    """Its steps cannot be proven."""
    state = run.train_group(1, 40, (4, None), num_epochs=1, num_steps=5)
    run.form_group()
    World(1, 40, (4, None), state).run(1, num_steps=1)
    lines_of(run, 0)[0].unlink()
    (proof,) = audit(run.path)
    assert "the ledger of the group of log entry 1, which trained up to step 5" in proof.problems[0]


def test_a_checkpoint_of_another_run_begins_the_history(run, tmp_path, monkeypatch):
    """What that one has trained is not this one's to prove, even under the same numbers."""
    other = Run(tmp_path / "other", monkeypatch)
    other.form_group()
    world = World(1, 40, (4, None))
    world.run(1, num_steps=5)
    state = world.state()
    run.form_group()
    World(2, 40, (4, None)).run(1, num_steps=1)
    run.train_group(2, 40, (4, None), state, num_epochs=1)
    run.succeed()
    proof = holds(run)
    assert proof.epochs == [EpochProof(0, 20, 0, 0, elsewhere=20)]


def test_a_cut_off_line_is_left_out_and_a_damaged_one_told(finished):
    """The first is what a killed writer leaves; the second is no ledger any more."""
    path, lines = lines_of(finished, 1)
    with path.open("a") as f:
        f.write("[21,1,2,0")
    assert audit(finished.path)[0].holds
    path.write_text("\n".join([lines[0], "[1,1", *lines[1:]]) + "\n")
    with pytest.raises(RunDirectoryError, match=r"rank-1\.jsonl is damaged"):
        audit(finished.path)


def test_a_ledger_takes_a_line_for_many_steps(run):
    """However many steps there are between two saves."""
    run.form_group()
    sampler = ElasticSampler(10**9, 64, seed=3, rank=0, world_size=4)
    next(sampler.batches(Loader(sampler)))
    ledger = sampler._ledger.ledger
    for step in range(1, 20_001):
        ledger.add_step(step, 0, 64 * (step - 1), 16)
    sampler.state_dict()
    _, lines = lines_of(run, 0)
    assert lines[1:] == ["[1,20000,0,0,64,16]"]


def test_a_want_of_threads_ends_no_training(run, monkeypatch):
    """What is saved is synced all the same."""
    run.form_group()
    sampler = ElasticSampler(100, 4, seed=3, rank=0, world_size=1)
    next(sampler.batches(Loader(sampler)))
    ledger, synced = sampler._ledger.ledger, []
    ledger.add_step(1, 0, 0, 4)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    monkeypatch.setattr(os, "fdatasync", synced.append)
    sampler.state_dict()
    assert synced == [ledger._file]
    assert lines_of(run, 0)[1][1:] == ["[1,1,0,0,0,4]"]


def no_thread(_):
    """Stand for a limit of processes that is reached."""
    raise RuntimeError("can't start new thread")


def test_a_step_is_not_written_before_it_was_made(run, monkeypatch):
    """When it is time to write, the step whose gradients have just been found waits."""
    monkeypatch.setattr(ledger, "FLUSH_S", 0.0)
    run.form_group()
    world = World(1, 40, (4, None))
    steps = world.steps(1)
    next(steps)
    assert len(lines_of(run, 0)[1]) == 1
    next(steps)
    assert lines_of(run, 0)[1][1:] == ["[1,1,0,0,0,4]"]


def test_two_samplers_of_one_name_are_told(run):
    """They would be taken for one that trains everything twice."""
    run.form_group()
    World(1, 40, (4, None)).run(1, num_steps=1)
    with pytest.raises(ConfigError, match=r"^name='train': .*its own name"):
        World(1, 40, (4, None)).run(1, num_steps=1)
    World(1, 40, (4, None), name="other").run(1, num_steps=1)
    World(1, 40, (4, None), name=None).run(1, num_steps=1)
    assert [proof.name for proof in audit(run.path)] == ["other", "train"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Let the samplers of a group be in one place of a node; return how its process ends there."""
    page = SimpleNamespace(path=tmp_path / "worker-0")
    monkeypatch.setattr(ledger.reporting, "own_page", lambda: page)
    mark = tmp_path / "ledger.worker-0.train"
    return lambda: mark.write_text(mark.read_text().replace(f"/{os.getpid()}", "/0"))


@pytest.mark.parametrize("seed", range(4))
def test_a_worker_writes_on_in_the_file_of_the_last_one_in_its_place(
    run, tmp_path, monkeypatch, seed
):
    """All groups, killed anywhere, leave one file for each place, and the proof is the same."""
    writer = ledger.Ledger

    def in_place(path, _):
        mark = tmp_path / path.name.split(".")[2]
        if mark.exists():
            mark.write_text(mark.read_text().replace(f"/{os.getpid()}", "/0"))
        return writer(path, mark)

    monkeypatch.setattr(ledger, "Ledger", in_place)
    chance = random.Random(seed)
    survived, lost = train_on(run, chance, 101, (8, None), num_epochs=3)
    run.succeed()
    assert holds(run).replayed_steps <= len(lost)
    assert run.record > 2
    assert len(names_of_ledger(run)) <= 6 < len(survived)


@pytest.mark.parametrize("why", ["it lives", "it is torn", "it is empty", "it is gone"])
def test_a_file_that_may_still_be_written_or_is_not_whole_is_left(run, place, why):
    """The next worker has one of its own."""
    run.train_group(1, 40, (4, None), num_epochs=1, num_steps=1)
    (before,) = (run.path / "ledger").iterdir()
    if why != "it lives":
        place()
    text = before.read_text()
    if why == "it is gone":
        before.unlink()
    elif why != "it lives":
        before.write_text(text[:-1] if why == "it is torn" else "")
    left = before.read_text() if before.exists() else None
    run.train_group(1, 40, (4, None), num_epochs=1, num_steps=1)
    assert names_of_ledger(run)[-1] == "train.entry-2.rank-0.jsonl"
    assert len(audit(run.path)[0].epochs) == 1
    assert (before.read_text() if before.exists() else None) == left


def test_a_rename_that_is_lost_or_fails_is_tried_again(run, place, monkeypatch):
    """Nothing is written to a file that is about to be replaced."""
    run.train_group(1, 40, (4, None), num_epochs=1, num_steps=1)
    place()
    with monkeypatch.context() as broken:
        broken.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
        run.form_group()
        world = World(1, 40, (4, None))
        world.run(1, num_steps=1)
    world.state()
    assert names_of_ledger(run) == ["train.entry-2.rank-0.jsonl"]
    assert audit(run.path)[0].stretches == 2


def test_files_that_are_renamed_while_they_are_listed_are_read(run, place, monkeypatch):
    """The reader lists again: a listing may have neither the old nor the new name."""
    run.train_group(1, 40, (4, None), num_epochs=1, num_steps=1)
    (file,) = (run.path / "ledger").iterdir()
    monkeypatch.setattr(audit_module, "_RETRY_S", 0.0)
    listings = iter([["train.entry-0.rank-0.jsonl"], [], [file.name]])
    monkeypatch.setattr(
        audit_module, "names_in", lambda folder: frozenset(next(listings, [file.name]))
    )
    assert audit(run.path)[0].stretches == 1


def names_of_ledger(run):
    """The names of its files."""
    return sorted(path.name for path in (run.path / "ledger").iterdir())


def test_a_full_disk_costs_no_training(run, monkeypatch, caplog):
    """What could not be written is kept, and written later."""
    run.form_group()
    world = World(1, 40, (4, None))
    steps = world.steps(1)
    next(steps)
    with monkeypatch.context() as broken:
        broken.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
        world.state()
    assert "not written for now" in caplog.text
    for _ in steps:
        pass
    world.state()
    run.succeed()
    assert audit(run.path)[0].holds


def test_children_do_not_write_what_is_their_parents(run):
    """A forked data loader holds a copy of what is noted."""
    run.form_group()
    world = World(1, 40, (4, None))
    next(world.steps(1))
    if (child := os.fork()) == 0:
        world.samplers[0]._ledger.ledger.flush()
        os._exit(0)
    os.waitpid(child, 0)
    world.state()
    assert lines_of(run, 0)[1][1:] == ["[1,1,0,0,0,4]"]


def test_the_command_prints_the_proof(finished, capsys):
    """And exits with 0."""
    assert main(["audit", str(finished.path)]) == 0
    out = capsys.readouterr().out
    assert "Proven: every sample so far was trained exactly once" in out
    assert "recorded and lost: 0 steps (0 samples)" in " ".join(out.split())


def test_the_command_fails_without_a_proof(finished, capsys):
    """And reports the problem, as text and as JSON."""
    path, lines = lines_of(finished, 1)
    path.write_text("\n".join(lines[:2]) + "\n")
    assert main(["audit", str(finished.path)]) == 1
    assert "NOT PROVEN: epoch 1: 20 samples were never trained" in capsys.readouterr().out
    assert main(["audit", str(finished.path), "--json"]) == 1
    (proof,) = json.loads(capsys.readouterr().out).values()
    assert proof["holds"] is False
    assert [epoch["never"] for epoch in proof["epochs"]] == [0, 20]
    assert "10 steps are missing" in proof["problems"][0]


def test_a_run_without_a_ledger_is_told(run, capsys):
    """It may have used no ElasticSampler."""
    assert main(["audit", str(run.path)]) == 1
    assert "has no ledger" in capsys.readouterr().err


def test_neither_the_sampler_nor_the_audit_import_torch():
    """An audit answers on a login node."""
    code = "import sys, hpc_elastic.data, hpc_elastic.cli.check; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_a_checkpoint_without_the_samplers_state_is_a_finding(run, monkeypatch):
    """Its model has seen the samples that are trained again; without gradients nothing refuses."""
    monkeypatch.setattr("hpc_elastic.data.sampler._records_gradients", lambda: False)
    run.train_group(2, 40, (4, None), num_epochs=1, num_steps=6)
    reporting.note_restored(5)
    run.train_group(2, 40, (4, None), num_epochs=1)
    run.succeed()
    (proof,) = audit(run.path)
    assert len(proof.problems) == 1
    assert "restored the checkpoint of step 5 without the sampler's state" in proof.problems[0]


@pytest.mark.parametrize(
    ("numbers", "is_found"),
    [((3, 6), False), ((3, 7), True), ((3, 5), False), ((1, 2), False), ((6, 12), False)],
)
def test_samples_behind_the_restored_step_are_a_finding(run, numbers, is_found):
    """Where an earlier checkpoint had the sampler's number; scripts may number in other ways."""
    state = run.train_group(2, 40, (4, None), num_epochs=1, num_steps=3)
    for number in numbers:
        reporting.note_restored(number)
        state = run.train_group(2, 40, (4, None), state, num_epochs=1, num_steps=3)
    (proof,) = audit(run.path)
    assert bool(proof.problems) == is_found, proof.problems


def test_a_ledger_without_restored_steps_is_read(run):
    """That of an earlier version."""
    run.train_group(1, 40, (4, None), num_epochs=1)
    (path,) = (run.path / ledger.FOLDER).glob("*.jsonl")
    path.write_text(path.read_text().replace(', "restored": null', ""))
    run.succeed()
    assert holds(run).last_step == 10
