"""``launcher.rendezvous.allow_from``: the ports of a run are closed to all other addresses."""

import json
import socket
import sys

import pytest
from counting import counting, undisturbed_loss
from sweeps import eventually

LISTENING = """
import json, psutil
ports = []
for process in psutil.process_iter():
    name = " ".join(process.cmdline())
    if "hpc_elastic.agent" in name and process.name() != "srun":  # which has ports of Slurm's
        who = "worker" if "worker" in name else "agent"
        found = process.net_connections("tcp")
        ports += [(who, *c.laddr) for c in found if c.status == "LISTEN"]
print(json.dumps(ports))
"""


def is_reached(address: str, port: int) -> bool:
    """Whether a connection from the login node comes up."""
    try:
        socket.create_connection((address, port), 1.0).close()
    except TimeoutError:
        return False
    return True


@pytest.mark.long
@pytest.mark.parametrize("is_closed", [True, False])
def test_who_is_not_named_reaches_no_port_of_a_run(slurm, sweep, tmp_path, is_closed):
    """Not the leader's, nor the store's and gloo's, which authenticate nobody; and it trains."""
    nodes = ",".join(slurm.address(node) for node in slurm.nodes)
    allowed = [f"launcher.rendezvous.allow_from=[{nodes}]"] if is_closed else []
    run = counting(sweep, tmp_path / "run", "nodes=2:2", *allowed)
    eventually(lambda: any(len(r.steps) > 20 for r in run.rounds()), "it has trained for a while")
    ports = [
        (who, address, port)
        for node in slurm.nodes
        for who, address, port in json.loads(
            slurm.exec_on(node, [sys.executable, "-c", LISTENING]).stdout
        )
    ]
    assert {who for who, *_ in ports} == {"agent", "worker"}, ports
    assert {is_reached(address, port) for _, address, port in ports} == {not is_closed}, ports
    run.hurry()
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output
    assert run.sweep.value() == pytest.approx(undisturbed_loss(), rel=0.01)


@pytest.mark.long
def test_a_network_without_the_node_is_refused_by_name(slurm, sweep, tmp_path):
    """Its own peers would not be let in."""
    run = counting(
        sweep, tmp_path / "run", "nodes=1:1", "launcher.rendezvous.allow_from=[192.0.2.0/24]"
    )
    output = run.sweep.output()
    assert "launcher.rendezvous.allow_from" in output and "must be among them" in output
