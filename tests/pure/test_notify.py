"""Which messages a run sends (``launcher.notify``), and which settings are refused."""

import pytest

from hpc_elastic.config.resolve import resolve
from hpc_elastic.errors import ConfigError
from hpc_elastic.run.notify import message_of
from hpc_elastic.run.redaction import redact, redact_argument

SECRET = "https://hooks.example.org/T1/very-secret"


def notify(**values):
    """Return the checked settings of messages."""
    launcher = {"backend": "local", "notify": values}
    return resolve({"launcher": launcher}).launcher.notify


def test_an_end_has_one_key_however_it_is_told():
    """So a run that ends and is taken for lost sends one message; a resumed one sends another."""
    ended = message_of("end", {"status": "succeeded", "failure": None}, 9, 0)
    failed = message_of("end", {"status": "failed", "failure": "rank 0: ValueError"}, 9, 0)
    lost = message_of("lost", {"why": "its tasks have ended without a result"}, 0, 0)
    assert [event for event, _, _ in (ended, failed, lost)] == ["ended", "failed", "lost"]
    assert {key for _, key, _ in (ended, failed, lost)} == {"end-0"}
    assert "rank 0: ValueError" in failed[2]
    assert message_of("end", {"status": "succeeded"}, 30, 1)[1] == "end-1"


def test_other_events_have_a_key_of_their_decision():
    """What two leaders decide for the same round, host or log entry is sent once."""
    requeued = {"nodes": 2, "hosts": ["n1", "n2"], "all": True, "delay_s": 60.0}
    assert message_of("nodes_requeued", requeued, 12, 0)[1] == "requeued-12"
    assert message_of("nodes_requeued", {**requeued, "all": False}, 12, 0) is None
    assert message_of("excluded", {"host": "n1", "why": "NCCL"}, 12, 0)[1] == "excluded-n1"
    waits = {"round": 3, "waited_s": 4000.0}
    assert message_of("waits_long", waits, 12, 0)[1] == "waiting-3"
    assert message_of("round", {}, 12, 0) is None


def test_a_webhook_is_read_from_a_variable_or_a_private_file(tmp_path, monkeypatch):
    """The settings have its URL; reports do not."""
    monkeypatch.setenv("HOOK", SECRET)
    file = tmp_path / "hook"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    for given in (SECRET, "$HOOK", str(file)):
        assert notify(webhook=given).webhook == SECRET
    assert redact({"notify": {"webhook": SECRET}}) == {"notify": {"webhook": "***"}}
    assert SECRET not in redact_argument(f"launcher.notify.webhook={SECRET}")


def test_bad_settings_are_refused_without_the_url(tmp_path):
    """Each error names the key, what is wrong and the remedy."""
    shared = tmp_path / "hook"
    shared.write_text(SECRET)
    shared.chmod(0o644)
    for given, word in {
        "ftp://hooks.example.org/very-secret": "allowed is a URL",
        "file:///etc/passwd": "allowed is a URL",
        f"{SECRET} x": "allowed is a URL",
        "$ABSENT": "a variable $NAME",
        str(tmp_path / "none"): "cannot be read",
        str(shared): "chmod 600",
    }.items():
        with pytest.raises(ConfigError, match=r"launcher\.notify\.webhook") as refused:
            notify(webhook=given)
        assert word in str(refused.value) and "very-secret" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"launcher\.notify\.events.*did you mean 'failed'"):
        notify(command="true", events=["fail"])
    with pytest.raises(ConfigError, match=r"needs launcher\.notify\.command"):
        notify(events=["waiting"])


def test_waits_are_told_only_if_they_are_chosen():
    """A leader counts the time without a group only then."""
    assert notify(command="true").noted_wait_s is None
    assert notify(command="true", events=["waiting"], wait_s=60).noted_wait_s == 60
    assert notify().noted_wait_s is None
