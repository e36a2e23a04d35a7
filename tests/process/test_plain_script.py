"""A script that calls nothing of ours is looked after all the same: a run with `launcher=local`."""

import contextlib
import json
import random
import socket
import textwrap
import urllib.request
from pathlib import Path

from local_runs import LocalRun
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from hpc_elastic.cli.main import main
from hpc_elastic.report.details import read_details
from hpc_elastic.report.run_view import read_view

SCRIPT = textwrap.dedent(
    """
    import time
    from pathlib import Path

    import hydra
    import torch

    @hydra.main(version_base=None)
    def train(cfg):
        torch.set_num_threads(1)
        net = torch.nn.Linear(4, 1)
        sgd = torch.optim.SGD(net.parameters(), 0.1)
        while not Path({stop!r}).exists():
            sgd.zero_grad()
            net(torch.ones(2, 4)).sum().backward()
            sgd.step()
            time.sleep(0.02)

    if __name__ == "__main__":
        train()
    """
)


def free_port() -> int:
    """Return a port of the loopback that nobody uses, nor will be given for a connection."""
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def served(port: int) -> dict[str, float]:
    """Return what the agent serves, as a collector of OpenMetrics asks for it; empty: nothing."""
    wanted = {"Accept": "application/openmetrics-text; version=1.0.0"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=wanted)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_its_steps_and_its_pace_are_shown(tmp_path, capsys):
    """By `status`, by the metrics' port while it trains, and in the metrics' file afterwards."""
    script, stop, port = tmp_path / "plain.py", tmp_path / "stop", free_port()
    script.write_text(SCRIPT.format(stop=str(stop)))
    overrides = ("-m", "+launcher=local", f"launcher.agent.metrics_port={port}")
    with LocalRun(script, tmp_path, *overrides) as run:
        run.eventually(
            lambda: (
                (run.path / "run.json").exists()
                and read_details(read_view(run.path)).pace.steps_per_s
            ),
            "steps and their pace are known",
        )
        assert main(["status", "--json", str(run.path)]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["step"] > 0 and 0 < told["steps_per_s"] < 50
        run.eventually(
            lambda: (
                (found := served(port)).get("hpc_elastic_steps_per_second")
                and found["hpc_elastic_step"] >= told["step"]
            ),
            "the port serves the step and the pace",
        )
        stop.touch()
        run.wait()
    (file,) = Path(run.path, "metrics").glob("*.prom")
    assert file.read_text().endswith("# EOF\n")
    assert main(["status", "--json", str(run.path)]) == 0
    assert json.loads(capsys.readouterr().out)["step"] >= told["step"]
