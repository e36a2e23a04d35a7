"""Leaders that fail by errors of their own: another node leads, or the run ends with the error."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from local_runs import LocalRun

COMMAND = str(Path(sys.executable).with_name("hpc-elastic"))
SCRIPT = textwrap.dedent(
    """
    import hydra

    @hydra.main(version_base=None)
    def main(cfg):
        return "trained"

    if __name__ == "__main__":
        main()
    """
)
PLANTED = textwrap.dedent(
    """
    import os, sys
    if "hpc_elastic.agent" in sys.orig_argv:
        from {module} import {cls} as owner
        method = owner.{method}

        def refuse(self, *arguments):
            if os.environ["SLURMD_NODENAME"] not in {nodes!r}:
                return method(self, *arguments)
            raise {error}

        owner.{method} = refuse
    """
)
"""A method that fails on the nodes that lead."""
STORE = {"module": "hpc_elastic.rendezvous.round_stores", "cls": "RoundStores", "method": "make"}
"""As with a torch that takes no listening socket."""
MESSAGES = {
    "module": "hpc_elastic.rendezvous.leader_state", "cls": "LeaderState", "method": "received",
}  # fmt: skip
"""An agent's message, with an error that a connection could have raised as well."""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts the script's run; on these nodes, a method of a leader raises the error."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(where: dict[str, str], nodes: tuple[str, ...], error: str, *overrides: str) -> LocalRun:
        (tmp_path / "planted").mkdir()
        (tmp_path / "planted" / "sitecustomize.py").write_text(
            PLANTED.format(**where, nodes=nodes, error=error)
        )
        path = f"{tmp_path / 'planted'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        monkeypatch.setenv("PYTHONPATH", path)
        return LocalRun(script, tmp_path, "+launcher=local", "nproc_per_node=1", *overrides)

    return run


@pytest.mark.parametrize("where", [STORE, MESSAGES], ids=["store", "messages"])
def test_a_run_whose_leaders_all_fail_ends_with_their_error(start, where):
    """Both nodes have led by then, with pauses that grow; each failure is an event."""
    with start(
        where, ("local-0", "local-1"), "TypeError('torch takes no socket')", "nodes=2"
    ) as run:
        assert run.wait() != 0
    failed = run.events("leader_failed")
    assert [e["terms"] for e in failed] == [1, 2, 3, 4]
    assert [e["again"] for e in failed] == [True, True, True, False]
    assert {e["host"] for e in failed} == {"local-0", "local-1"}
    assert {e["why"] for e in failed} == {"TypeError: torch takes no socket"}
    times = [e["time"] for e in failed]
    assert times[3] - times[2] > times[2] - times[1] > times[1] - times[0]
    failure = run.result()["failure"]
    assert run.result()["status"] == "failed" and failure["exception"] == "TypeError"
    assert "torch takes no socket" in failure["message"] and "refuse" in failure["traceback"]
    assert "torch takes no socket" in run.output() and failure["remedy"] in run.output()
    for command in ("status", "events"):
        done = subprocess.run(
            [COMMAND, command, str(run.path)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert "torch takes no socket" in done.stdout, done.stderr


def test_a_node_that_cannot_lead_leaves_that_to_another(start):
    """It is a member of the group all the same."""
    error = "RuntimeError('cannot start a thread')"
    with start(STORE, ("local-0",), error, "nodes=2") as run:
        assert run.wait() == 0
    assert {e["host"] for e in run.events("leader_failed")} <= {"local-0"}
    (round_,) = run.events("round")
    assert round_["nodes"] == 2 and run.result()["status"] == "succeeded"
