"""Messages of local runs to a command and a webhook (``launcher.notify``)."""

import contextlib
import json
import os
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from local_runs import LocalRun

from hpc_elastic.config.resolve import resolve
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.notify import Notifier

SCRIPT = textwrap.dedent(
    """
    import hydra

    @hydra.main(version_base=None)
    def main(cfg):
        if cfg.get("fails"):
            raise ValueError("no such column")

    if __name__ == "__main__":
        main()
    """
)
DIES = textwrap.dedent(
    """
    import os, sys
    if "hpc_elastic.agent" in sys.orig_argv:
        from hpc_elastic.rendezvous.term import StatusWriter
        publish = StatusWriter.publish_result

        async def die(self, entry):
            if self._term.term > 0 and not os.path.exists({flag!r}):
                open({flag!r}, "x").close()
                os._exit(9)
            await publish(self, entry)

        StatusWriter.publish_result = die
    """
)
"""The first leader that is to publish the end of the run, which is decided, dies."""


class Hook:
    """A server on the loopback that answers with a status and keeps what it got."""

    def __init__(self) -> None:
        self.status, self.bodies, self.paths = 200, [], []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.paths.append(self.path)
                hook.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(hook.status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            do_GET = do_POST  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/very-secret"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def hook(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    found = Hook()
    yield found
    found.close()


@pytest.fixture
def start(tmp_path, monkeypatch, hook):
    """Starts a run whose messages go to a command, which appends them to a file, and the hook."""
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setenv("HOOK", hook.url)
    monkeypatch.setenv("MY_TOKEN", "of-the-user")
    command = f"env > {tmp_path}/env; cat >> {tmp_path}/told; echo >> {tmp_path}/told"
    keys = [f"launcher.notify.command='{command}'", "launcher.notify.webhook=$HOOK"]

    def run(*overrides: str) -> LocalRun:
        own = ["+launcher=local", "nproc_per_node=1", *keys, *overrides]
        return LocalRun(tmp_path / "script.py", tmp_path, *own)

    return run


def told(folder: Path) -> list[dict]:
    """What the command got."""
    return [json.loads(line) for line in (folder / "told").read_text().splitlines()]


def test_a_run_of_two_nodes_sends_its_end_once_and_no_secret(start, hook, tmp_path):
    """The command and the webhook get the same; no log, event or variable has the URL."""
    with start("nodes=2") as run:
        assert run.wait() == 0, run.output()
    (message,) = told(tmp_path)
    assert hook.bodies == [message] and hook.paths == ["/very-secret"]
    assert (message["event"], message["status"]) == ("ended", "succeeded")
    assert message["run"] == str(run.path) and "has ended: succeeded" in message["text"]
    (event,) = run.events("notified")
    assert (event["event"], event["why"]) == ("ended", None)
    assert "of-the-user" not in (tmp_path / "env").read_text()
    holds = [f for f in tmp_path.rglob("*") if f.is_file() and b"very-secret" in f.read_bytes()]
    assert [f.name for f in holds] == ["run.json"] and holds[0].stat().st_mode & 0o077 == 0


def test_the_failure_of_a_run_whose_leader_dies_is_sent_once(start, hook, tmp_path, monkeypatch):
    """The leader dies when its end is decided, before it tells; another agent does."""
    (tmp_path / "planted").mkdir()
    flag = tmp_path / "died"
    (tmp_path / "planted" / "sitecustomize.py").write_text(DIES.format(flag=str(flag)))
    path = f"{tmp_path / 'planted'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", path)
    with start("nodes=2", "+fails=true", "launcher.max_restarts=0") as run:
        assert run.wait() != 0
    assert flag.exists() and run.result()["status"] == "failed"
    (message,) = told(tmp_path)
    assert message["event"] == "failed" and "no such column" in message["text"]
    assert hook.bodies == [message]


def test_receivers_that_fail_or_hang_are_named_and_hurt_no_run(start, hook, tmp_path):
    """A redirect is not followed, a command is given up after its time."""
    hook.status = 307
    slow = ["launcher.notify.command='sleep 60'", "launcher.notify.timeout_s=0.5"]
    with start("nodes=1", *slow) as run:
        assert run.wait() == 0, run.output()
    (event,) = run.events("notified")
    assert "launcher.notify.command: it has not ended after 0.5 s" in event["why"]
    assert "launcher.notify.webhook: it answered with status 307" in event["why"]
    assert hook.paths == ["/very-secret"] and run.result()["status"] == "succeeded"


def test_of_many_senders_one_sends(tmp_path):
    """As of two leaders that decide the same: the one that creates the file."""
    command = f"cat >> {tmp_path}/told; echo >> {tmp_path}/told; sleep 0.2"
    launcher = {"backend": "local", "notify": {"command": command}}
    spec = type(
        "Spec", (), {"settings": resolve({"launcher": launcher}), "run_id": "r", "generation": 0}
    )()
    notes: list[dict] = []
    run = RunDir(tmp_path)
    senders = [Notifier(run, spec, lambda kind, **f: notes.append(f)) for _ in range(8)]
    end = {"status": "succeeded", "failure": None}
    threads = [threading.Thread(target=sender.prepare("end", end)) for sender in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told(tmp_path)) == len(notes) == 1


def test_a_webhook_that_answers_byte_by_byte_is_given_up(tmp_path, monkeypatch):
    """Its time is that of the whole answer."""
    import socket

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        peer, _ = server.accept()
        with peer, contextlib.suppress(OSError):
            for byte in b"HTTP/1.1 200 OK\r\n" * 100:
                peer.send(bytes([byte]))
                threading.Event().wait(0.2)

    threading.Thread(target=drip, daemon=True).start()
    hook = f"http://127.0.0.1:{server.getsockname()[1]}/x"
    launcher = {"backend": "local", "notify": {"webhook": hook, "timeout_s": 1}}
    spec = type(
        "Spec", (), {"settings": resolve({"launcher": launcher}), "run_id": "r", "generation": 0}
    )()
    notes: list[dict] = []
    notifier = Notifier(RunDir(tmp_path), spec, lambda kind, **fields: notes.append(fields))
    notifier.prepare("end", {"status": "succeeded", "failure": None})()
    server.close()
    assert notes[0]["why"] == "launcher.notify.webhook: no answer after 1 s"
