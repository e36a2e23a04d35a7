"""Failures of workers in words, from their entries in result.json: in one line, and in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpc_elastic.agent.signals import name_of


def one_line(failure: Mapping[str, Any] | None) -> str | None:
    """Return a failure in one line; None if there was none."""
    if not failure:
        return None
    where = f"rank {failure.get('rank')} on {failure.get('host')}"
    if failure.get("phase") == "start":
        where = f"task {failure.get('task')} on {failure.get('host') or 'an unknown node'}"
    if failure.get("phase") == "lead":
        where = f"the leader, task {failure.get('task')} on {failure.get('host')}"
    what = str(failure.get("message") or "").strip().partition("\n")[0]
    error = failure.get("exception")
    how = _ended_by(failure) or (f"{error}: {what}" if error else what)
    return f"{where}: {how or 'exit code ' + str(failure.get('exit_code'))}"


def in_full(first: Mapping[str, Any] | None, later: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the first failure in full, and one for each later one."""
    lines = ["no worker's failure was recorded"]
    if first:
        lines = [f"first failure: {_place(first)}: {_cause(first)}"]
        if first.get("traceback"):
            lines.append(quoted_text(str(first["traceback"]).rstrip()))
        elif first.get("message") != _cause(first) and (
            first.get("exception") or first.get("message")
        ):
            what = f"{first.get('exception') or 'error'}: {first.get('message') or ''}"
            lines.append(quoted_text(what))
        if first.get("remedy"):
            lines.append(str(first["remedy"]))
    for failed in later:
        round_ = failed.get("round")
        when = "died afterwards"
        if first is not None and round_ not in (None, first.get("round")):
            when = f"failed in a later attempt, round {round_}"
        lines.append(f"  {_place(failed)}: {_cause(failed)} ({when})")
    return lines


def quoted_text(text: str) -> str:
    """Return a text of the training's own so that it is not taken for ours."""
    return "\n".join(f"    {line}" for line in text.split("\n"))


def _place(failed: Mapping[str, Any]) -> str:
    is_leader = failed.get("phase") == "lead"
    parts = [f"{'the leader, ' if is_leader else ''}host {failed.get('host')}"]
    ranks = () if is_leader else (("rank", "rank"), ("local_rank", "local rank"))
    for key, word in (*ranks, ("task", "task")):
        parts += [f"{word} {failed[key]}"] if failed.get(key) is not None else []
    return ", ".join(parts)


def _cause(failed: Mapping[str, Any]) -> str:
    if failed.get("phase") == "hang":
        return "hung"
    if ended := _ended_by(failed):
        return ended
    if failed.get("exit_code") is not None:
        if not failed.get("exception") and str(failed.get("message")).startswith("exited with"):
            return str(failed["message"])
        return f"exit code {failed['exit_code']}"
    return str(failed.get("exception") or failed.get("phase") or "failed")


def _ended_by(failed: Mapping[str, Any]) -> str:
    signal = failed.get("signal")
    name = name_of(signal) if isinstance(signal, int) else signal
    return f"ended by {name}" if signal else ""
