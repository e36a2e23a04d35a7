"""hpc-elastic checkpoints export and verify: what they write, find and refuse."""

import json
import math
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from savers import flip_a_bit, names_in

from hpc_elastic import Checkpointer
from hpc_elastic.checkpoint import sharding
from hpc_elastic.checkpoint.equality import merge
from hpc_elastic.checkpoint.manifest import MANIFEST
from hpc_elastic.checkpoint.shard_file import write_part
from hpc_elastic.checkpoint.snapshot import Snapshots
from hpc_elastic.checkpoint.state import flatten
from hpc_elastic.checkpoint.store import Store, directories_of
from hpc_elastic.cli.main import main
from hpc_elastic.run import fencing
from hpc_elastic.run.directory import RunDir


def make(directory: Path, step: int, state: dict, world_size: int = 1) -> Path:
    """Write a checkpoint as several ranks would, all from this process."""
    folder = Store(directory).folder(step)
    folder.mkdir(parents=True)
    flat = flatten(state)
    parts = []
    for rank in range(world_size):
        plan = sharding.Planner(rank, world_size).plan(flat.tensors, flat.first)
        parts.append(write_part(folder, rank, Snapshots().copy(flat, plan)))
    manifest = merge(parts, step=step, world_size=world_size, created=1e9)
    (folder / MANIFEST).write_text(manifest.to_json())
    return folder


@pytest.fixture
def state():
    """Return a state with all kinds of leaves; one tensor is spread over the ranks."""
    net = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200))
    half = torch.arange(5, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(net.parameters(), amsgrad=True)
    net(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    user = {"best": math.inf, "sizes": (1, 2), 3: {"half": half, "empty": torch.empty(0, 2)}}
    return {"model": net, "optimizer": optimizer, "user": user}


@pytest.fixture
def run(tmp_path, state):
    """Return a run directory with two checkpoints."""
    make(tmp_path / "run" / "checkpoints", 10, state)
    make(tmp_path / "run" / "checkpoints", 20, state, world_size=3)
    return tmp_path / "run"


def test_an_export_is_what_torch_save_would_have_written(run, state, tmp_path, capsys):
    """Plain torch loads it with weights_only=True: whole tensors, and the values beside them."""
    assert main(["checkpoints", "export", str(run), "-o", str(tmp_path / "all.pt")]) == 0
    assert "step 20" in capsys.readouterr().err
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert list(found) == ["model", "optimizer", "user"]
    assert found["user"]["best"] == math.inf and found["user"]["sizes"] == (1, 2)
    assert torch.equal(found["user"][3]["half"], state["user"][3]["half"])
    assert found["user"][3]["empty"].shape == (0, 2)
    torch.testing.assert_close(found["optimizer"], state["optimizer"].state_dict(), rtol=0, atol=0)
    assert names_in(tmp_path) == ["all.pt", "run"]


def test_values_that_torch_refuses_are_converted(tmp_path):
    """torch.load with weights_only=True takes no numbers of NumPy, and no frozensets."""
    user = {"f": np.float32(0.5), "day": np.datetime64("2020-01-01"), "c": 1j, "b": b"x"}
    user["sets"] = [{1, 2}, frozenset([(np.int64(3),)])]
    make(tmp_path / "run" / "checkpoints", 10, {"user": user})
    assert (
        main(["checkpoints", "export", str(tmp_path / "run"), "-o", str(tmp_path / "all.pt")]) == 0
    )
    found = torch.load(tmp_path / "all.pt", weights_only=True)["user"]
    assert repr([found[k] for k in ("f", "day", "c", "b")]) == "[0.5, '2020-01-01', 1j, b'x']"
    assert found["sets"] == [[1, 2], [(3,)]]


def test_one_key_of_an_older_step(run, state, tmp_path):
    """The file holds just that object's state dict, which a fresh model takes."""
    file = tmp_path / "model.pt"
    assert (
        main(["checkpoints", "export", str(run), "--step", "10", "--key", "model", "-o", str(file)])
        == 0
    )
    found = torch.load(file, weights_only=True)
    net = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200))
    net.load_state_dict(found)
    assert all(
        torch.equal(a, b)
        for a, b in zip(net.parameters(), state["model"].parameters(), strict=True)
    )


def test_an_export_tells_scripts_what_it_wrote(run, tmp_path, capsys):
    """Standard output has nothing else; what was passed over is said beside it."""
    flip_a_bit(run / "checkpoints/step-00000020/shard-1.safetensors")
    file = tmp_path / "x.pt"
    assert (
        main(["checkpoints", "export", str(run), "--key", "model", "-o", str(file), "--json"]) == 0
    )
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told == {
        "run": str(run), "checkpoint": str(run / "checkpoints/step-00000010"), "step": 10,
        "key": "model", "file": str(file), "num_bytes": file.stat().st_size,
        "num_tensors": len(torch.load(file, weights_only=True)),
    }  # fmt: skip
    assert "step-00000020 is damaged" in err
    assert main(["checkpoints", "export", "--help"]) == 0
    assert set(told) <= set(re.findall(r"\w+", capsys.readouterr().out))


@pytest.mark.parametrize(
    ("output", "arguments", "what"),
    [
        ("x.pt", ["--step", "15"], "no checkpoint of step 15, only step-00000020, step-00000010"),
        ("x.pt", ["--key", "modle"], "did you mean 'model'"),
        ("no/such/x.pt", [], "no/such/x.pt"),
    ],
)
def test_an_export_of_what_is_not_there_is_refused(run, tmp_path, capsys, output, arguments, what):
    """The error says what there is, or that the output cannot be written; no file is left."""
    assert main(["checkpoints", "export", str(run), "-o", str(tmp_path / output), *arguments]) == 1
    assert what in capsys.readouterr().err
    assert names_in(tmp_path) == ["run"]


def test_an_export_does_not_replace_the_file_with_half_of_it(run, tmp_path, capsys):
    """Where the disk is full, the old file stays, and nothing is left beside it."""
    output = tmp_path / "x.pt"
    output.write_text("old")
    code = "import sys; from hpc_elastic.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "checkpoints", "export", str(run), "-o", str(output)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "cannot be written" in done.stderr
    assert output.read_text() == "old"
    assert names_in(tmp_path) == ["run", "x.pt"]


@pytest.mark.long
def test_an_export_needs_no_memory_for_the_state(tmp_path):
    """The state may be larger than what the process may have in memory of its own."""
    size = 256 << 20
    make(tmp_path / "big", 1, {"w": torch.arange(size // 4, dtype=torch.int32)})
    code = (
        "import sys, resource, torch; from hpc_elastic.cli.main import main\n"
        "import hpc_elastic.checkpoint.export, hpc_elastic.cli.checkpoints\n"
        "def private(): return sum(int(line.split()[1]) for line in open('/proc/self/status')"
        " if line.startswith('RssAnon'))\n"
        "before = private()\n"
        "assert main(['checkpoints', 'export', sys.argv[1], '-o', sys.argv[2]]) == 0\n"
        "print(private() - before)\n"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "big"), str(tmp_path / "big.pt")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < size / 4
    whole = torch.load(tmp_path / "big.pt", weights_only=True, mmap=True)["w"]
    assert torch.equal(whole, torch.arange(size // 4, dtype=torch.int32))


def test_verify_shows_all_checkpoints_or_one(run, capsys):
    """A table of all, and exit code 0 where all are good; a damaged manifest is found."""
    assert main(["checkpoints", "verify", str(run)]) == 0
    said = capsys.readouterr().out
    assert "step-00000010" in said and "step-00000020" in said and "good" in said
    folder = run / "checkpoints/step-00000010"
    assert main(["checkpoints", "verify", str(folder)]) == 0
    flip_a_bit(folder / MANIFEST)
    assert main(["checkpoints", "verify", str(folder)]) == 1


@pytest.mark.parametrize("where", [".", "checkpoints"])
def test_verify_names_what_is_damaged(run, capsys, where):
    """Exit code 1, the file and what is wrong with it; the other checkpoint is good."""
    flip_a_bit(run / "checkpoints/step-00000020/shard-2.safetensors")
    assert main(["checkpoints", "verify", str(run / where), "--json"]) == 1
    newest, oldest = json.loads(capsys.readouterr().out)
    assert newest["step"] == 20 and newest["world_size"] == 3
    assert "shard-2.safetensors" in newest["problems"][0]
    assert oldest["problems"] == []
    assert main(["checkpoints", "verify", str(run / where)]) == 1
    assert "shard-2.safetensors" in capsys.readouterr().out


def test_verify_without_checkpoints(tmp_path, capsys):
    """The error says where they would be."""
    assert main(["checkpoints", "verify", str(tmp_path)]) == 1
    assert "has no checkpoints" in capsys.readouterr().err


def test_verifying_needs_no_torch(run):
    """A login node checks checkpoints without importing torch."""
    code = (
        "import sys; from hpc_elastic.cli.main import main\n"
        "code = main(['checkpoints', 'verify', sys.argv[1], '--json'])\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", code, str(run)], check=True, capture_output=True)


def test_checkpoints_are_found_wherever_the_script_keeps_them(tmp_path, monkeypatch, capsys):
    """The run knows of the directory from the first checkpoint that is committed there."""
    run, elsewhere = tmp_path / "run", tmp_path / "scratch" / "my weights"
    (run / "rdzv").mkdir(parents=True)
    record = run / "rdzv" / "entry.1.json"
    record.write_text("{}")
    monkeypatch.setenv(fencing.VARIABLE, str(record))
    net = torch.nn.Linear(2, 2)
    with Checkpointer({"net": net}, elsewhere) as checkpoints:
        checkpoints.save(5)
        checkpoints.wait()
        checkpoints.save(7)
    assert directories_of(RunDir(run)) == [elsewhere]
    assert main(["checkpoints", "verify", str(run), "--json"]) == 0
    assert [found["step"] for found in json.loads(capsys.readouterr().out)] == [7, 5]
    assert (
        main(["checkpoints", "export", str(run), "--key", "net", "-o", str(tmp_path / "net.pt")])
        == 0
    )
    assert torch.load(tmp_path / "net.pt", weights_only=True).keys() == net.state_dict().keys()

    with Checkpointer({"net": net}, run / "checkpoints") as customary:
        customary.save(6)
    capsys.readouterr()
    assert main(["checkpoints", "verify", str(run), "--json"]) == 0
    assert [found["step"] for found in json.loads(capsys.readouterr().out)] == [7, 6, 5]
    assert main(["checkpoints", "export", str(run), "-o", str(tmp_path / "all.pt")]) == 1
    told = capsys.readouterr().err
    assert "several directories" in told and str(elsewhere) in told


def test_outside_of_a_run_nothing_is_written_down(tmp_path, monkeypatch):
    """There is nobody to look for it."""
    monkeypatch.delenv(fencing.VARIABLE, raising=False)
    with Checkpointer({"net": torch.nn.Linear(2, 2)}, tmp_path / "weights") as checkpoints:
        checkpoints.save(1)
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
