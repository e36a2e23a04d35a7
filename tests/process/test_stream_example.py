"""The example of streams: its readers, and a run whose node goes."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from framework_runs import ROOT, FrameworkRun

from hpc_elastic.data import count_samples


@pytest.fixture(scope="module")
def example():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("streams", ROOT / "examples/streams/train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_a_reader_begins_anywhere(example, form, tmp_path):
    """Each sample comes back, from any start on, and is counted."""
    if form == "parquet":
        pytest.importorskip("pyarrow", reason="pip install pyarrow")
    images, labels = np.arange(80 * 64, dtype=np.float32).reshape(80, 64), np.arange(80) % 10
    path = str(tmp_path / f"0.{form}")
    getattr(example, f"write_{form}")(Path(path), images, labels)
    read = getattr(example, f"read_{form}")
    for start in (0, 1, 31, 32, 79, 80):
        found = list(read(path, start))
        assert [label for _, label in found] == labels[start:].tolist()
        if found:
            assert np.array_equal(np.stack([image for image, _ in found]), images[start:])
    assert count_samples([path], read) == [80]
    if form == "parquet":
        assert example.num_rows(path) == 80


@pytest.mark.long
def test_a_run_from_tar_files_trains_every_sample_once(tmp_path):
    """A node of two is told to go, while its loader's worker is ahead of the training."""
    overrides = ("nodes=1:2", "epochs=4", "pause_s=0.1", "save_every_s=2", "num_workers=1")
    with FrameworkRun("streams/train.py", tmp_path, *overrides) as run:
        run.trains(1)
        run.has_saved()
        run.tell_to_go(run.tasks()[0])
        values = run.values()
    assert {value["steps"] for value in values} == {4 * 38}
    assert "1,797 samples" in run.audit()
    assert len(run.events("round")) >= 2
