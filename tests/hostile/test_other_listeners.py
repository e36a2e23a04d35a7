"""The servers of the doctor's probe and of an agent's metrics, and what strangers cost them."""

import contextlib
import json
import re
import socket
import threading
import time

import pytest

from hpc_elastic.agent.metrics import Exporter, Sample
from hpc_elastic.config.schema import SlurmSettings
from hpc_elastic.doctor import probe_job
from hpc_elastic.doctor.probe_files import ProbeFolder
from hpc_elastic.doctor.probe_network import connect_to_peer, send_request, serve_peers
from hpc_elastic.transport import auth

TOKEN = "5e" * 16
PATIENCE_S = 60.0
STRANGERS, MOST_THREADS = 60, 40


def ask(address: str, port: int) -> float:
    """The time at a probe's server, as another task asks for it."""
    with connect_to_peer({"address": address, "port": port}, TOKEN, PATIENCE_S) as connection:
        return float(send_request(connection, "time", 1)["time"])


@pytest.fixture(params=["127.0.0.1", "::1"])
def probe(request, tmp_path) -> tuple[str, int]:
    """Address and port of a probe's server."""
    if request.param == "::1":
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("no IPv6 here")
    port = serve_peers(ProbeFolder(tmp_path), TOKEN, v6=":" in request.param)
    return request.param, port


_NONCE = b"0" * 32 + b"\n"


@pytest.mark.parametrize("sent", [
    b"[" * 4000 + b"\n", b"[" * 100_000 + b"\n", b"\n", b"\xff" * 32 + b"\n", b"x" * 100_000,
    b"GET / HTTP/1.1\r\n\r\n", _NONCE, _NONCE + b"[" * 4000 + b"\n", _NONCE + b" \n",
    _NONCE + b"x " + b'{"a":' * 600 + b"\n", _NONCE + b"\xff\xfe \xed\xa0\x80\n",
])  # fmt: skip
def test_the_probe_hangs_up_on_what_is_unsigned(probe, capfd, sent):
    """Quietly, and it goes on."""
    with (
        socket.create_connection(probe, PATIENCE_S) as stranger,
        contextlib.suppress(ConnectionError),
    ):
        stranger.sendall(sent)
        with contextlib.suppress(OSError):  # it has hung up already
            stranger.shutdown(socket.SHUT_WR)
        received = b""
        while part := stranger.recv(1 << 16):
            received += part
        assert set(json.loads(received)) == {"nonce"}
    assert ask(*probe) > 0
    assert capfd.readouterr() == ("", "")


def test_a_holder_of_the_token_may_ask_nonsense(probe, capfd):
    """The server hangs up on it, and goes on; a deep message is none."""
    for request in ({}, {"do": "time"}, {"do": "link", "asker": "x"}, {"do": "x", "asker": None}):
        with (
            connect_to_peer({"address": probe[0], "port": probe[1]}, TOKEN) as connection,
            contextlib.suppress(OSError),
        ):
            connection.send(request)
            connection.receive()
    assert ask(*probe) > 0
    assert capfd.readouterr() == ("", "")


def test_the_probes_token_is_not_on_the_wire(probe):
    """What passes between two tasks does not contain it; each side proves that it has it."""
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:

        def relay() -> None:
            near, _ = between.accept()
            with near, socket.create_connection(probe) as far:
                pairs = [(near, far), (far, near)]
                threads = [threading.Thread(target=copy, args=pair) for pair in pairs]
                [thread.start() for thread in threads]
                [thread.join() for thread in threads]

        def copy(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while part := source.recv(1 << 16):
                    seen.extend(part)
                    target.sendall(part)
                target.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=relay)
        thread.start()
        assert ask(*between.getsockname()) > 0
        thread.join(PATIENCE_S)
    assert b'"time"' in seen
    assert TOKEN.encode() not in seen and bytes.fromhex(TOKEN) not in seen


def test_the_probes_token_is_in_no_file_that_others_read(stranger, open_folder):
    """It is in the settings of the tasks alone (0600): not in the script, so in no argv."""
    folder = open_folder / "probe"
    submission = folder / ".hpc_elastic"
    probe_job._write_submission(SlurmSettings(), submission, 2)
    token = ProbeFolder(submission).read_plan().token
    holders = [f for f in folder.rglob("*") if f.is_file() and token in f.read_text()]
    assert holders == [submission / "array-0.json"]
    folder.chmod(0o755)
    done = stranger(
        "import pathlib, sys\n"
        "for file in pathlib.Path(sys.argv[1]).rglob('*'):\n"
        "    try: print(file.read_text() if file.is_file() else '')\n"
        "    except PermissionError: print('refused', file.name)",
        folder,
    )
    assert token not in done.stdout and "refused array-0.json" in done.stdout and not done.stderr
    assert len(token) >= 32 and re.fullmatch("[0-9a-f]+", token)


def test_a_silent_client_of_the_probe_is_hung_up_on(probe, monkeypatch):
    """After the time that a handshake may take, also if it sends a byte now and then."""
    monkeypatch.setattr("hpc_elastic.transport.connection.HANDSHAKE_TIMEOUT_S", 0.5)
    with socket.create_connection(probe, 0.1) as slow, contextlib.suppress(ConnectionError):
        ended = time.monotonic() + PATIENCE_S
        while time.monotonic() < ended:
            with contextlib.suppress(TimeoutError):
                if not slow.recv(100):
                    return
            slow.sendall(b"0")
        pytest.fail("it is still connected")


def test_strangers_hold_few_threads_of_the_probe(probe, monkeypatch):
    """Many connections that send nothing; another task is answered all the same."""
    monkeypatch.setattr("hpc_elastic.transport.connection.HANDSHAKE_TIMEOUT_S", PATIENCE_S)
    before = threading.active_count()
    with contextlib.ExitStack() as held:
        for _ in range(STRANGERS):
            held.enter_context(socket.create_connection(probe, PATIENCE_S))
        assert ask(*probe) > 0
        assert threading.active_count() - before < MOST_THREADS


def test_strangers_hold_few_threads_of_an_agent(tmp_path, capfd):
    """The port of the metrics belongs to the agent's process; the newest request is answered."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    before = threading.active_count()
    exporter = Exporter(tmp_path / "m" / "t.prom", ("r", "t", "h"), Sample, port)
    try:
        with contextlib.ExitStack() as held:
            for _ in range(STRANGERS):
                held.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
            page = held.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
            page.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert page.recv(100).startswith(b"HTTP/1.0 200")
            assert threading.active_count() - before < MOST_THREADS
    finally:
        exporter.close()
    assert capfd.readouterr() == ("", "")


def test_a_server_that_is_no_peer_is_refused():
    """A stranger who listens at the address of a task learns nothing, and is believed nothing."""
    for greeting in (
        b"[" * 4000, b'{"nonce": ' + b"[" * 2000 + b"}", b'{"nonce": 1}', b"{}", b"\xff",
        b'{"nonce": "0"}',
    ):  # fmt: skip
        with pytest.raises(auth.AuthenticationError):
            auth.answer_greeting(greeting, TOKEN.encode(), "probe", {})
