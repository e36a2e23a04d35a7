"""Commands that read somebody else's run end, use little memory, and show nothing of the reader's.

Each command is a real process (`reader`), which is killed after 30 s and may not have more than 4
GiB; a command that fails in another way than by a message prints a traceback.
"""

import itertools
import json
import math
import os
import shutil
import socket
from pathlib import Path

import pytest
import stored_run
from reader import reader as running_reader
from strangers import STRANGER

from hpc_elastic.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry
from hpc_elastic.run import registry
from hpc_elastic.run.directory import RunDir, Submission
from hpc_elastic.run.log_index import index_of
from hpc_elastic_watch import live_runs

SECRET = "the private key of the reader"
HUGE = 8 << 30
MOST_MB = 600.0


@pytest.fixture(scope="module")
def reader():
    """Runs commands."""
    with running_reader() as found:
        yield found


@pytest.fixture
def private(tmp_path) -> Path:
    """A file of the reader's own."""
    file = tmp_path / "private"
    file.write_text(f"{SECRET}\n" * 100)
    file.chmod(0o600)
    return file


@pytest.fixture
def run(tmp_path) -> RunDir:
    """A run that has succeeded, with one file of each kind."""
    return stored_run.make_run(tmp_path / "sweep")


def read(reader, *argv) -> str:
    """Run a command that has to end in order; return its output."""
    done = reader.run(*argv)
    assert done.code in (0, 1), (argv, done)
    assert "Traceback (most" not in done.output, (argv, done.output)
    assert SECRET not in done.output, argv
    assert done.peak_mb < MOST_MB, (argv, done.peak_mb)
    return done.output


def report_of(run: RunDir) -> list[object]:
    """The command that reads most files."""
    return ["report", run.path, "--format", "json"]


# ---- another thing in the place of a file


def endless(file: Path, _: Path) -> None:
    """A link to a device without an end."""
    file.symlink_to("/dev/zero")


def huge(file: Path, _: Path) -> None:
    """8 GiB that cost nothing."""
    with file.open("wb") as f:
        f.truncate(HUGE)


def listening(file: Path, _: Path) -> None:
    """A socket; its path has room for a hundred characters, so it is bound from its folder."""
    before = Path.cwd()
    os.chdir(file.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(file.name)
    finally:
        os.chdir(before)


ATTACKS = {
    "FIFO": lambda file, _: os.mkfifo(file),
    "endless": endless,
    "link": lambda file, private: file.symlink_to(private),
    "huge": huge,
    "folder": lambda file, _: file.mkdir(),
    "socket": listening,
    "deep": lambda file, _: file.write_text("[" * 100_000),
    "deep object": lambda file, _: file.write_text('{"time":' * 300 + "1" + "}" * 300),
    "no text": lambda file, _: file.write_bytes(b"\xff\xfe\x00" * 100),
}
INSIDE = {
    "run.json": ["status", "events", "logs", "audit", "checkpoints verify"],
    "status.json": ["status"],
    "result.json": ["status", "audit"],
    "settings.json": ["status"],
    "cancelled.json": ["status"],
    "progress.jsonl": ["status"],
    "excluded_nodes.json": [],
    ".hydra/config.yaml": [],
    ".hydra/overrides.yaml": ["status"],
    "saves_to/0123": ["checkpoints verify", "status"],
    str(stored_run.EVENTS): ["status", "events", "logs"],
    str(stored_run.LEDGER): ["audit"],
    str(stored_run.LOG): ["logs"],
    f"{stored_run.LOG}.times": ["logs"],
    str(stored_run.ERROR_LOG): ["logs"],
    str(stored_run.AGENT_LOG): ["logs --agent"],
    str(stored_run.CHECKPOINT / "manifest.json"): ["checkpoints verify", "status"],
    str(stored_run.CHECKPOINT / stored_run.SHARD): ["checkpoints verify"],
    "../.hpc_elastic/local-tasks.json": ["status"],
    "../.hpc_elastic/array-0.jobid": ["status"],
    "../.hpc_elastic/logs/17_0.log": ["logs --agent"],
    "../.hpc_elastic/array-0.replaced/0.1": ["status"],
}
"""Files, and the commands that read them, beside `report_of`."""
PAIRS = [
    pytest.param(name, attack, marks=[pytest.mark.long] if (i + j) % 3 else [])
    for (i, name), (j, attack) in itertools.product(enumerate(INSIDE), enumerate(ATTACKS))
]
"""Each attack on a third of the files, and each file by a third of the attacks; else it is long."""


@pytest.mark.parametrize(("name", "attack"), PAIRS)
def test_what_is_no_file_of_a_run_harms_no_reader(run, reader, private, attack, name):
    """The rest is shown, or the command ends with a message; without a result, too."""
    file = run.path / name
    if file == run.settings:  # it is read in a directory of 0.2.0
        values = json.loads(run.spec.read_text())
        del values["version"]
        run.spec.write_text(json.dumps(values))
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    ATTACKS[attack](file, private)
    read(reader, *report_of(run))
    for command in INSIDE[name]:
        words, _, options = command.partition(" --")
        read(reader, *words.split(), run.path, *([f"--{options}"] if options else []))


@pytest.mark.parametrize("attack", ["FIFO", "endless", "huge", "folder", "socket"])
def test_the_message_names_the_file_and_what_it_is(run, reader, private, attack):
    """In one sentence, as the only line."""
    run.spec.unlink()
    ATTACKS[attack](run.spec, private)
    output = read(reader, "events", run.path)
    what = {"endless": "is a link, not a file", "huge": "8,589,934,592 bytes"}
    what |= {"FIFO": "is a FIFO, not a file", "socket": "is a socket, not a file"}
    assert output.count("\n") == 1 and "run.json" in output
    assert what.get(attack, "Is a directory") in output


def test_a_list_and_a_wait_survive_them_too(run, reader, tmp_path, private, monkeypatch):
    """Of several runs the good ones are listed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    runs = {f"run-{attack}": stored_run.make_run(tmp_path / attack) for attack in ATTACKS}
    registry.add({**{name: each.path for name, each in runs.items()}, "good": run.path})
    for attack, each in zip(ATTACKS, runs.values(), strict=True):
        for file in (each.spec, each.status):
            file.unlink()
            ATTACKS[attack](file, private)
    with running_reader() as own:
        output = read(own, "list", "--all", "--json")
    assert {row["state"] for row in json.loads(output)} == {"unknown", "succeeded"}
    result = run.path / stored_run.RETURNED
    result.unlink()
    result.symlink_to(private)
    assert "damaged" in read(reader, "wait", run.path.parent)


@pytest.mark.parametrize("outside", ["../../elsewhere", "/elsewhere", "x" * 5000])
def test_results_lie_inside_of_the_run(run, reader, outside):
    """A folder that result.json names may be one of the reader's own."""
    run.result.write_text(json.dumps({"status": "succeeded", "results": outside}))
    assert "its results are in" in read(reader, "wait", run.path.parent)


def test_a_live_page_reads_no_private_file(run, private):
    """It shows the return value of rank 0."""
    assert live_runs.results_of(run) == {"loss": 0.5}
    returned = run.path / stored_run.RETURNED
    private.write_text(json.dumps({"key": SECRET}))
    returned.unlink()
    returned.symlink_to(private)
    assert live_runs.results_of(run) == {}
    run.result.write_text(json.dumps({"status": "succeeded", "results": str(private.parent)}))
    private.rename(private.with_name("rank-0.json"))
    assert live_runs.results_of(run) == {}


# ---- logs


def test_no_log_leads_to_a_private_file(run, reader, private):
    """Neither a link in its place, nor one in the place of its folder, nor one that is named."""
    folder = run.path / stored_run.LOG.parent
    shutil.rmtree(folder)
    elsewhere = private.parent / "elsewhere"
    elsewhere.mkdir()
    for name in (stored_run.LOG.name, stored_run.AGENT_LOG.name):
        (elsewhere / name).write_text(SECRET)
    folder.symlink_to(elsewhere)
    events = run.path / stored_run.EVENTS
    events.write_text(
        events.read_text().replace(str(run.path / stored_run.ERROR_LOG), f"{private}")
    )
    for argv in (["logs", run.path], ["logs", run.path, "--agent"], report_of(run)):
        read(reader, *argv)


def test_captured_output_is_that_of_the_runs_owner(run, reader, private, tmp_path):
    """run.json names the submission's folder, where the reader's own submissions have logs, too."""
    if os.geteuid():
        pytest.skip("only root can be two users")
    own = Submission(tmp_path / "own" / ".hpc_elastic")
    own.logs.mkdir(parents=True)
    own.log(stored_run.TASK).write_text(SECRET)
    spec = json.loads(run.spec.read_text())
    run.spec.write_text(json.dumps({**spec, "submission": str(own.path)}))
    for path in (run.path, *run.path.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
    read(reader, "logs", run.path, "--agent")


@pytest.mark.parametrize("options", [["--tail", "5"], ["--tail", "5", "--grep", "x"], ["--json"]])
def test_a_huge_log_ends_nowhere_but_at_its_lines(run, reader, options):
    """Holes of a sparse file are skipped."""
    with (run.path / stored_run.LOG).open("ab") as f:
        f.truncate(HUGE)
        f.seek(HUGE)
        f.write(b"\nthe last line x\n")
    assert "the last line" in read(reader, "logs", run.path, *options)


def test_times_that_no_clock_shows_are_no_times(run, reader):
    """In an index, and as the date of a file."""
    log = run.path / stored_run.LOG
    index_of(log).write_bytes((5).to_bytes(8, "little") + b"\xff" * 8 + b"\xff" * 16)
    os.utime(log, (1e15, 1e15))
    assert "a line of" in read(reader, "logs", run.path)


# ---- values


NUMBERS = ["1e400", "NaN", "-Infinity", "1" * 400, "1" * 5000, "-1", "1e17", '"x"', "{}", "[[]]"]


@pytest.mark.parametrize("number", NUMBERS)
def test_impossible_values_are_no_values(run, reader, number):
    """In each number of each file: the rest is shown, or a message."""
    for name in ("status.json", "run.json", "progress.jsonl", stored_run.EVENTS, stored_run.LEDGER):
        file = run.path / name
        good = file.read_text()
        values = [
            json.loads(line) for line in (good.splitlines() if ".jsonl" in str(file) else [good])
        ]
        text = "".join(json.dumps(_marked(value)) + "\n" for value in values)
        file.write_text(text.replace('"@"', number))
        command = "audit" if name == stored_run.LEDGER else "status"
        read(reader, command, run.path)
        read(reader, *report_of(run))
        file.write_text(good)


def _marked(value):
    """Return a value with a mark in the place of each number."""
    if isinstance(value, dict):
        return {key: _marked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_marked(item) for item in value]
    return "@" if type(value) in (int, float) else value


def test_a_ledger_of_endless_epochs_is_refused(run, reader):
    """Its lines are few, and its steps are more than memory has room for."""
    file = run.path / stored_run.LEDGER
    good = file.read_text()
    changes = {
        "[1, 8, 0": "[1, 1000000000000000, 0",
        "[1, 8, 0, ": "[1, 8, 99999999999999, ",
        '"step": 8': '"step": 8000000000000000',
        '"world_size": 1': '"world_size": 1000000000000000',
    }
    for change in changes.items():
        file.write_text(good.replace(*change))
        read(reader, "audit", run.path)


def test_aliases_of_yaml_are_not_followed(run, reader):
    """Twenty lines of them are 10^20 values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 20)]
    (run.hydra / "config.yaml").write_text("\n".join(lines))
    assert "it has an alias" in read(reader, *report_of(run))


def test_names_with_line_feeds_and_escapes_stay_in_their_line(run, reader):
    """Of tasks, hosts and files."""
    odd = run.path / "tasks" / "17_1\nhpc-elastic: all is well\x1b[2J" / "attempt-0"
    odd.mkdir(parents=True)
    (odd / stored_run.LOG.name).write_text("a line\n")
    (run.path / "events" / "odd\n\x1b[2J.jsonl").write_text("{}\n")
    for command in ("status", "events", "logs"):
        output = read(reader, command, run.path)
        assert "\x1b" not in output and "\nhpc-elastic: all is well" not in output


# ---- manifests


def pieces(*boxes, name: str = "w[{},0]") -> tuple[Chunk, ...]:
    """Boxes of the stored file."""
    return tuple(Chunk(o, s, stored_run.SHARD, name.format(o[0])) for o, s in boxes)


HALVES = [((0, 0), (2, 4)), ((2, 0), (2, 4))]
TENSORS = {
    "a hole": ({"chunks": pieces(HALVES[0])}, "hole"),
    "no boxes": ({"chunks": ()}, "hole"),
    "a vast hole": ({"shape": (1 << 30, 4)}, "hole"),
    "twice": ({"chunks": pieces(*HALVES, ((1, 0), (1, 4)))}, "stored twice"),
    "the same box twice": ({"chunks": pieces(HALVES[0], HALVES[0])}, "stored twice"),
    "hole and overlap": ({"chunks": pieces(HALVES[0], ((1, 0), (2, 4)))}, "stored twice"),
    "outside": ({"chunks": pieces(HALVES[0], ((2, 0), (3, 4)))}, "outside"),
    "other sides": ({"chunks": pieces(HALVES[0], ((2,), (2,)))}, "outside"),
    "negative": ({"chunks": pieces(HALVES[0], ((-1, 0), (2, 4)))}, "no size"),
    "too large": ({"shape": (1 << 62, 1 << 62)}, "too large"),
    "larger than any": ({"shape": (1 << 70, 4)}, "no size"),
    "empty and vast": ({"shape": (0, 1 << 62)}, "too large"),
    "more bytes than the file": (
        {"shape": (400, 4), "chunks": pieces(((0, 0), (400, 4)))}, "its tensors have 6400"
    ),
    "one place for two": ({"chunks": pieces(*HALVES, name="w[0,0]")}, "another box"),
    "no type": ({"dtype": "object"}, "no type of tensors"),
    "another size of type": ({"dtype": "float16"}, "should have"),
    "another file": (
        {"chunks": (*pieces(HALVES[0]), Chunk(*HALVES[1], "shard-1.safetensors", "x"))},
        "no file of the checkpoint",
    ),
    "above the folder": (
        {"chunks": (*pieces(HALVES[0]), Chunk(*HALVES[1], "../private", "x"))}, "no file name"
    ),
}  # fmt: skip


def verdict(reader, run: RunDir, tmp_path: Path) -> str:
    """What `verify` prints of the checkpoint; `export` has to refuse it before it writes."""
    found = json.loads(read(reader, "checkpoints", "verify", run.path, "--json"))
    output = tmp_path / "exported"
    output.mkdir()
    for argv in (
        ["checkpoints", "export", run.path],
        ["checkpoints", "export", run.path / stored_run.CHECKPOINT],
    ):
        assert "damaged" in read(reader, *argv, "-o", output / "model.pt")
    assert list(output.iterdir()) == []
    (problem,) = found[0]["problems"]
    return problem


@pytest.mark.parametrize("name", TENSORS)
def test_boxes_that_are_not_the_tensor_are_damage(run, reader, tmp_path, name):
    """Its checksums are right: whoever writes a checkpoint can compute them."""
    change, words = TENSORS[name]
    tensors = {"w": stored_run.whole_tensor(**change)}
    stored_run.write_checkpoint(run.path / stored_run.CHECKPOINT, tensors)
    assert words in verdict(reader, run, tmp_path)


SHARDS = {
    "a header longer than the file": stored_run.shard_bytes(header_bytes=1 << 40),
    "no room for a header": b"\0" * 8,
    "a header without end": (50).to_bytes(8, "little") + b"[" * 50,
    "deep": (200_000).to_bytes(8, "little") + b"[" * 200_000 + b"\0" * 64,
    "data beyond its end": stored_run.shard_bytes(first=1000),
    "data before its start": stored_run.shard_bytes(first=-32),
    "less than it should hold": stored_run.shard_bytes().replace(b"[0, 32]", b"[0, 16]"),
    "parts of bytes": stored_run.shard_bytes()
    .replace(b"[0, 32]", b"[0, 3.]")
    .replace(b"3.", b"32.0"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_a_file_whose_header_lies_is_damage(run, reader, tmp_path, name):
    """Found before anything is written or loaded."""
    shard = SHARDS[name].ljust(300, b"\0")
    stored_run.write_checkpoint(run.path / stored_run.CHECKPOINT, shard=shard)
    assert stored_run.SHARD in verdict(reader, run, tmp_path)


def test_a_manifest_of_impossible_fields_is_damage(run, reader, tmp_path):
    """Its times and numbers."""
    file = run.path / stored_run.CHECKPOINT / "manifest.json"
    for number, fields in enumerate(
        [{"created": 1e300}, {"created": 10**400}, {"step": -1}, {"world_size": 10**300},
         {"version": 10**400}, {"files": (FileEntry(stored_run.SHARD, -1, "x"),)}]
    ):  # fmt: skip
        stored_run.write_checkpoint(file.parent, **fields)
        (tmp_path / str(number)).mkdir()
        verdict(reader, run, tmp_path / str(number))


def test_a_tensor_is_exported_once(run, reader, tmp_path):
    """A state that names it a thousand times would be a thousand times its size."""
    values = {"model": [{"!": "tensor", "of": "w"}] * 1000}
    stored_run.write_checkpoint(run.path / stored_run.CHECKPOINT, values=values)
    done = reader.run("checkpoints", "export", run.path, "-o", tmp_path / "model.pt")
    assert done.code == 1 and "named 1000 times" in done.output
    assert "Traceback (most" not in done.output and not (tmp_path / "model.pt").exists()


def test_boxes_are_checked_in_linear_time():
    """A comb of 20,000 boxes, in which each has edges of its own, as no sharding makes it."""
    n = 10_000
    boxes = [Chunk((i, 0), (1, i + 1), "f", f"a{i}") for i in range(n)]
    boxes += [Chunk((i, i + 1), (1, n - i), "f", f"b{i}") for i in range(n)]
    entry = TensorEntry((n, n + 1), "int8", tuple(boxes))
    files = (FileEntry("f", math.prod(entry.shape), "x"),)
    manifest = Manifest(1, 8, 1, 0.0, files, {"w": entry}, {}, {})
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_loading_passes_over_a_checkpoint_with_a_hole(tmp_path):
    """As over any that does not verify."""
    import torch

    from hpc_elastic.checkpoint import Checkpointer
    from hpc_elastic.errors import CheckpointCorruptError

    folder = tmp_path / stored_run.CHECKPOINT
    stored_run.write_checkpoint(folder)
    state = {"model": {"w": torch.ones(4, 4)}}
    with Checkpointer(state, folder.parent) as checkpointer:
        assert checkpointer.load_latest() == 8 and not state["model"]["w"].any()
        tensors = {"w": stored_run.whole_tensor(chunks=pieces(HALVES[0]))}
        stored_run.write_checkpoint(folder, tensors)
        with pytest.raises(CheckpointCorruptError, match="no checkpoint in"):
            checkpointer.load_latest()


# ---- made by a stranger


_TRAP = """
import os, sys
run, private, log, events, status = sys.argv[1:]
for name in (log, events, status):
    os.unlink(os.path.join(run, name))
os.symlink(private, os.path.join(run, log))
os.mkfifo(os.path.join(run, events))
os.symlink("/dev/zero", os.path.join(run, status))
os.symlink(private, os.path.join(run, "saves_to"))
"""


def test_a_strangers_traps_are_read_by_the_victim(stranger, reader, open_folder, private):
    """All of it belongs to the stranger, and the reader is root."""
    run = stored_run.make_run(open_folder / "sweep")
    for path in (run.path.parent, *run.path.parent.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
    names = (stored_run.LOG, stored_run.EVENTS, "status.json")
    done = stranger(_TRAP, run.path, private, *names)
    assert done.returncode == 0, done.stderr
    for command in ("status", "events", "logs", "checkpoints verify", "audit"):
        read(reader, *command.split(), run.path)
    read(reader, "checkpoints", "prune", run.path, "--keep-last", "1", "--dry-run")
    read(reader, *report_of(run))
