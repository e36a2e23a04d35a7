"""Notifications of a run (``launcher.notify``): a command, and a webhook, get one JSON object each.

Of a leader, its successor, and the launcher that follows the run, one sends a message: the one that
creates ``<run>/notified/<key>``. It does so before it sends, and no other process sends it. So a
message comes at most once, and is lost with a sender that dies, or fails, after that.

The leader sends what it decides, after a look at the log. The end of a run is sent by the agent
that publishes the result. A run whose last task was killed has no process: what follows it
(`launcher.wait`) sends that it is lost. The webhook's URL may be a secret: no argument, variable,
log or event has it.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hpc_elastic import _util
from hpc_elastic.run.directory import RunDir, RunSpec
from hpc_elastic.shared_files import create_atomic, make_folder

_log = logging.getLogger(__name__)

_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR")
"""What a command has of the environment."""


def message_of(
    kind: str, facts: Mapping[str, Any], index: int, generation: int
) -> tuple[str, str, str] | None:
    """Return event, key and text of the message about an event; None if it has none (pure).

    A run sends one message with each key. ``index`` is that of the leader's last log entry.
    """
    end = f"end-{generation}"
    match kind:
        case "end":
            event = "failed" if facts["status"] == "failed" else "ended"
            why = f": {facts['failure']}" if facts.get("failure") else ""
            return event, end, f"has ended: {facts['status']}{why}"
        case "lost":
            return kind, end, f"is lost: {facts['why']}"
        case "waits_long":
            waited = _util.duration(facts["waited_s"])
            return "waiting", f"waiting-{facts['round']}", f"has waited for nodes for {waited}"
        case "nodes_requeued" if facts.get("all"):
            away = _util.duration(facts["delay_s"])
            return "requeued", f"requeued-{index}", f"lacks nodes, and returns all for {away}"
        case "excluded":
            text = f"does not use {facts['host']} for up to an hour: {facts['why']}"
            return kind, f"excluded-{facts['host']}", text
    return None


@dataclass(frozen=True)
class Notifier:
    """Sends the messages of one run, as its settings say; ``note`` writes the event about it."""

    run: RunDir
    spec: RunSpec
    note: Callable[..., object]

    def prepare(
        self, kind: str, facts: Mapping[str, Any], index: int = 0
    ) -> Callable[[], None] | None:
        """Return what sends the message about an event; None if there is none to send."""
        settings = self.spec.settings.launcher.notify
        found = message_of(kind, facts, index, self.spec.generation)
        if found is None or found[0] not in settings.events or not settings.has_receiver:
            return None
        return partial(self._send, *found, facts)

    def _send(self, event: str, key: str, text: str, facts: Mapping[str, Any]) -> None:
        """Send a message unless another process has; it may block, and never raises."""
        try:
            make_folder(self.run.notified)
            if not create_atomic(self.run.notified / key, f"{os.urandom(8).hex()}\n"):
                return
        except OSError as e:
            _log.warning("the message %s is not sent: %s", key, e)
            return
        run_id = self.spec.run_id
        about = {"event": event, "text": f"run {run_id} {text}"[:500], "time": time.time()}
        where = {"run_id": run_id, "run": str(self.run.path)}
        body = json.dumps({**facts, **about, **where, "sender": socket.gethostname()}, default=str)
        settings, whys = self.spec.settings.launcher.notify, list[str | None]()
        if settings.command is not None:
            env = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
            code, _, why = _util.run_shell(
                settings.command, timeout_s=settings.timeout_s, env=env, stdin=body
            )
            if code != 0:
                whys.append(f"command: {why}")
        if settings.webhook is not None:
            late: list[str | None] = [f"webhook: no answer after {settings.timeout_s:g} s"]
            arguments = settings.webhook, body, settings.timeout_s
            posting = threading.Thread(target=lambda: late.append(_post(*arguments)), daemon=True)
            posting.start()  # a server may answer byte by byte
            posting.join(settings.timeout_s)
            whys.append(late[-1])
        failed = "; ".join(f"launcher.notify.{why}" for why in whys if why is not None)
        self.note("notified", event=event, key=key, why=failed or None)


def _post(url: str, body: str, timeout_s: float) -> str | None:
    """POST JSON; return why that has failed, without the URL; None if it has not."""
    import urllib.error  # with HTTP and TLS, which no agent needs otherwise
    import urllib.request

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            """Follow no redirect: the message is for this address alone."""

    headers = {"Content-Type": "application/json", "User-Agent": "hpc_elastic"}
    try:
        request = urllib.request.Request(url, body.encode(), headers, method="POST")
        with urllib.request.build_opener(NoRedirect).open(request, timeout=timeout_s):
            return None
    except urllib.error.HTTPError as e:
        return f"webhook: it answered with status {e.code}"
    except Exception as e:  # its text may have the URL
        reason = getattr(e, "reason", type(e).__name__)
        return f"webhook: it cannot be reached: {reason}"
