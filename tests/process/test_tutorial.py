"""The scripts of docs/tutorial/2-own-script.md, run as they stand but with shorter pauses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from local_runs import LocalRun

PAGE = Path(__file__).parents[2] / "docs/tutorial/2-own-script.md"
COMMAND = [sys.executable, "-m", "hpc_elastic"]


def script(folder: Path, *, elastic: bool) -> Path:
    """Write one of the page's two scripts, that of before or that of after."""
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (text,) = (block for block in found if ("ElasticSampler" in block) == elastic)
    assert "time.sleep(0.1)" in text
    path = folder / ("elastic.py" if elastic else "plain.py")
    path.write_text(text.replace("time.sleep(0.1)", "time.sleep(0.02)"))
    return path


@pytest.mark.long
@pytest.mark.parametrize("elastic", [False, True])
def test_a_script_of_the_tutorial_survives_a_preemption(elastic, tmp_path):
    """The plain one starts again from its beginning, the elastic one loses no step."""
    with LocalRun(script(tmp_path, elastic=elastic), tmp_path, "+launcher=local", "nodes=2") as run:
        run.eventually(lambda: len(run.events("first_step")) == 2, "both nodes train")
        subprocess.run(
            [*COMMAND, "node", "preempt", str(run.path), "local-1"], check=True, timeout=120
        )
        assert run.wait() == 0, run.output()
    restored = [event["restored"] for event in run.events("first_step")][2:]
    assert len(restored) == 2 and all((step is not None) == elastic for step in restored)
    audit = [*COMMAND, "audit", str(run.path)]
    assert (subprocess.run(audit, timeout=60).returncode == 0) == elastic
