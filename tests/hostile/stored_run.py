"""A run directory with one file of each kind, as a run that has succeeded leaves it (no torch)."""

import json
import time
from dataclasses import replace
from pathlib import Path

import xxhash

from hpc_elastic.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry
from hpc_elastic.run.directory import Entry, RunDir, Submission
from hpc_elastic.run.events import EventLog
from hpc_elastic.run.log_index import index_of
from specs import spec_of, started_run

TASK = "17_0"
LOG = Path("tasks", TASK, "attempt-0", "round-1.rank-0.out")
AGENT_LOG = LOG.with_name("agent.log")
ERROR_LOG = LOG.with_name("round-1.rank-0.err")
CHECKPOINT = Path("checkpoints", "step-00000008")
SHARD = "shard-0.safetensors"
EVENTS = Path("events", f"{TASK}.jsonl")
LEDGER = Path("ledger", "train.entry-1.rank-0.jsonl")
RETURNED = Path("results", "round-1", "rank-0.json")
SHAPE = (4, 4)


def make_run(sweep: Path) -> RunDir:
    """Make a run of ``launcher=local`` below a sweep; return its directory."""
    submission = Submission(sweep / ".hpc_elastic")
    submission.logs.mkdir(parents=True)
    files = submission.array(0)
    files.submitted_as("17")
    run = RunDir(sweep / "0")
    files.tasks.write_text(json.dumps({"runs": [{"dir": str(run.path), "slot": 0}]}))
    made = spec_of(
        "train-1", 1, 1, 1, 3, Entry("hydra", "main"), str(submission.path), [(0, 0)],
        launcher="local", provenance={"time": "2030-01-31T12:00:00+00:00"},
    )  # fmt: skip
    started_run(run, made)
    now = time.time()
    ended = {
        "state": "ENDED", "pid": 1, "started": 1, "exit_code": 0, "host": "h", "launcher": 1,
        "launcher_started": 1, "node": "local-0",
    }  # fmt: skip
    submission.local_tasks.write_text(json.dumps({TASK: ended}))
    submission.log(TASK).write_text("captured\n")
    run.hydra.mkdir()
    (run.hydra / "config.yaml").write_text("lr: 0.5\n")
    (run.hydra / "overrides.yaml").write_text("- lr=0.5\n")
    for log in (LOG, ERROR_LOG, AGENT_LOG):
        (run.path / log).parent.mkdir(parents=True, exist_ok=True)
        (run.path / log).write_text(f"a line of {log.name}\n")
    index_of(run.path / LOG).write_bytes(b"\0" * 16)
    _write_events(run, now)
    member = {"task": TASK, "attempt": 0, "slot": 0, "host": "local-0", "nproc": 1}
    point = {
        "time": now - 20, "phase": "training", "round": 1, "term": 1, "nodes": 1, "world_size": 1,
        "step": 4, "total_steps": 8, "loss": 0.5, "checkpoint": 4, "metrics": {"accuracy": 0.5},
    }  # fmt: skip
    run.progress.write_text(json.dumps(point) + "\n")
    status = {**point, "updated": now - 10, "members": [member], "restarts": 1, "max_restarts": 3}
    run.status.write_text(json.dumps(status))
    (run.path / RETURNED).parent.mkdir(parents=True)
    (run.path / RETURNED).write_text('{"loss": 0.5}')
    run.result.write_text(json.dumps(
        {"status": "succeeded", "ended": now, "restarts": 1, "failure": None,
         "results": str(RETURNED.parent)}
    ))  # fmt: skip
    _write_ledger(run)
    write_checkpoint(run.path / CHECKPOINT)
    return run


def _write_events(run: RunDir, now: float) -> None:
    log = EventLog(run.events(TASK), TASK)
    member = {"task": TASK, "attempt": 0, "slot": 0, "host": "local-0", "nproc": 1}
    log.write("task", attempt=0, host="local-0", pid=1, started=now - 60, time=now - 60)
    log.write("joined", host="local-0", time=now - 55)
    formed = {"number": 1, "index": 1, "term": 1, "nodes": 1, "world_size": 1, "restarts": 0}
    log.write("round", members=[member], **formed, time=now - 50)
    log.write("first_step", attempt=0, round=1, step=1, time=now - 45)
    log.write(
        "restart", restarts=1, host="local-0", failure="it failed", rank=0, round=1,
        traceback="Traceback", log=str(run.path / ERROR_LOG), time=now - 40,
    )  # fmt: skip
    log.write("end", status="succeeded", rounds=1, restarts=1, failure=None, time=now)


def _write_ledger(run: RunDir) -> None:
    head = {
        "ledger": 1, "name": "train", "stretch": [1, 0], "parent": None, "step": 0, "epoch": 0,
        "position": 0, "rank": 0, "world_size": 1, "end": "keep", "global_batch": 2,
        "facts": {"dataset_len": 16, "seed": 0, "shuffle": True, "order": 1},
    }  # fmt: skip
    end = {"ledger": 1, "ended": [1, 0], "step": 8, "by": [1, 0], "generation": 0}
    (run.path / LEDGER).parent.mkdir()
    lines = [head, [1, 8, 0, 0, 2, 2], end]
    (run.path / LEDGER).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def whole_tensor(**other: object) -> TensorEntry:
    """The tensor of the checkpoint, in two halves."""
    halves = [((0, 0), (2, 4)), ((2, 0), (2, 4))]
    chunks = tuple(Chunk(o, s, SHARD, f"w[{o[0]},0]") for o, s in halves)
    return replace(TensorEntry(SHAPE, "float32", chunks), **other)


def shard_bytes(header_bytes: int | None = None, first: int = 0) -> bytes:
    """A safetensors file with that tensor.

    Args:
        header_bytes: What it gives as the length of its header; None for the truth.
        first: Where its data begins by its header.
    """
    entry = {"dtype": "F32", "shape": [2, 4]}
    header = json.dumps({
        "w[0,0]": {**entry, "data_offsets": [first, first + 32]},
        "w[2,0]": {**entry, "data_offsets": [first + 32, first + 64]},
    }).encode()  # fmt: skip
    length = len(header) if header_bytes is None else header_bytes
    return length.to_bytes(8, "little") + header + b"\0" * 64


def write_checkpoint(
    folder: Path,
    tensors: dict[str, TensorEntry] | None = None,
    values: dict | None = None,
    shard: bytes | None = None,
    **other: object,
) -> None:
    """Write a checkpoint, whose checksums are right whatever it holds.

    Args:
        folder: Where.
        tensors: Its tensors; None: `whole_tensor`.
        values: The values of the state; None: a state of that tensor.
        shard: The content of its file; None: `shard_bytes`.
        other: Other fields of the manifest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shard = shard_bytes() if shard is None else shard
    (folder / SHARD).unlink(missing_ok=True)
    (folder / SHARD).write_bytes(shard)
    entry = FileEntry(SHARD, len(shard), f"xxh3_64:{xxhash.xxh3_64_hexdigest(shard)}")
    values = {"model": {"w": {"!": "tensor", "of": "w"}}} if values is None else values
    tensors = {"w": whole_tensor()} if tensors is None else tensors
    manifest = Manifest(1, 8, 1, 1.9e9, (entry,), tensors, values, {})
    (folder / "manifest.json").write_text(replace(manifest, **other).to_json())
