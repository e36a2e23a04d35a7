"""An agent joins, is counted, leads, gives way and supervises workers without torch."""

import json
import os
import signal
import subprocess
import sys
import textwrap

from local_runs import LocalRun

SCRIPT = textwrap.dedent(
    """
    import hydra

    @hydra.main(version_base=None)
    def main(cfg):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        assert dist.get_world_size() == 2
        dist.barrier()
        return "torch" in __import__("sys").modules

    if __name__ == "__main__":
        main()
    """
)
WATCHED = textwrap.dedent(
    """
    import os, sys, threading, time
    from pathlib import Path

    folder = Path({folder!r})

    def write():
        own = folder / str(os.getpid())
        while True:
            own.with_suffix(".new").write_text(" ".join(list(sys.modules)))
            own.with_suffix(".new").replace(own.with_suffix(".modules"))
            time.sleep(0.05)

    if "hpc_elastic.agent" in sys.orig_argv:
        while os.environ["SLURMD_NODENAME"] == "local-1" and not (folder / "go").exists():
            time.sleep(0.05)
        threading.Thread(target=write, daemon=True).start()
    """
)


def test_an_agent_needs_no_torch(tmp_path, monkeypatch):
    """It waits for the other one, is taken meanwhile and comes back; with every default."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    watched = tmp_path / "watched"
    watched.mkdir()
    (watched / "sitecustomize.py").write_text(WATCHED.format(folder=str(watched)))
    path = f"{watched}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", path)

    def loaded(pid: int) -> set[str]:
        return {name.partition(".")[0] for name in written(pid).split()}

    def written(pid: int) -> str:
        return (watched / f"{pid}.modules").read_text()

    def waits(pid: int) -> bool:
        status = run.path / "status.json"
        shown = json.loads(status.read_text()) if status.exists() else {}
        return shown.get("phase") == "waiting" and bool(run.events("leader") and written(pid))

    with LocalRun(script, tmp_path, "+launcher=local", "nodes=2", "nproc_per_node=1") as run:
        run.eventually(lambda: run.events("task"), "an agent starts")
        (first,) = (event["pid"] for event in run.events("task"))
        run.eventually(lambda: waits(first), "it leads, and waits for the other one")
        assert not loaded(first) & {"torch", "hydra", "omegaconf"}
        os.kill(first, signal.SIGTERM)
        run.eventually(lambda: run.events("task_exited"), "it gives way")
        run.eventually(lambda: len(run.events("task")) == 2, "it comes back")
        (watched / "go").touch()
        assert run.wait() == 0, run.output()
    agents = {event["pid"] for event in run.events("task")}
    assert len(agents) == 3 and {first} < agents
    assert not any("torch" in loaded(pid) for pid in agents)


def test_a_process_of_a_node_starts_without_what_it_may_not_need():
    """An agent and its workers: these modules bring a dozen others, of which none is used."""
    for module in ("task_main", "worker_main", "warm_workers"):
        code = f"import sys, hpc_elastic.agent.{module}; print(*sys.modules)"
        found = subprocess.check_output([sys.executable, "-c", code], text=True).split()
        assert not {"importlib.abc", "importlib.resources", "importlib.metadata"} & {*found}, module
