"""The order of the time-outs and intervals of a run: each pair that the design needs, in one table.

A name is a key of the settings, or ``module:NAME`` of a value that is fixed in the code. Pairs of
keys are checked when the settings are resolved, the others by a test. A wait that grows at random
is named by its base; the module that draws it has its bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from hpc_elastic.config.schema import LauncherSettings
from hpc_elastic.errors import ConfigError


class TimeoutOrder(NamedTuple):
    """``times`` the shorter one must be below the longer one."""

    shorter: str
    longer: str
    why: str
    times: float = 1.0


_RENDEZVOUS, _FT = "launcher.rendezvous", "ft.quorum:QuorumRules"

ORDER = (
    TimeoutOrder(f"{_RENDEZVOUS}.heartbeat_interval_s", f"{_RENDEZVOUS}.heartbeat_timeout_s",
          "one late heartbeat loses no node, and a lease expires (5 intervals) within an election "
          "(2 time-outs)", 2.5),
    TimeoutOrder("transport.connection:CONNECT_TIMEOUT_S", f"{_RENDEZVOUS}.heartbeat_timeout_s",
          "an agent can connect to a new leader within an election (2 time-outs)", 0.5),
    TimeoutOrder(f"{_RENDEZVOUS}.heartbeat_timeout_s", f"{_RENDEZVOUS}.straggler_timeout_s",
          "a round waits for members that are still in an election (2 time-outs)", 2.0),
    TimeoutOrder("launcher.agent.stop_timeout_s", f"{_RENDEZVOUS}.straggler_timeout_s",
          "a round waits for members that are still stopping their workers"),
    TimeoutOrder("launcher.agent.monitor_interval_s", f"{_RENDEZVOUS}.straggler_timeout_s",
          "a round waits for members that have not polled their workers yet"),
    TimeoutOrder(f"{_RENDEZVOUS}.straggler_timeout_s", f"{_RENDEZVOUS}.join_timeout_s",
          "a round closes without a straggler before the agents that wait for it give up"),
    TimeoutOrder(f"{_RENDEZVOUS}.last_call_s", f"{_RENDEZVOUS}.join_timeout_s",
          "a round closes after its last call before the agents that wait for it give up"),
    TimeoutOrder("launcher.below_min_timeout_s", f"{_RENDEZVOUS}.join_timeout_s",
          "nodes below the minimum return to the queue before their agents give up, and fail"),
    TimeoutOrder(f"{_RENDEZVOUS}.heartbeat_timeout_s", f"{_FT}.live_timeout_s",
          "a replica that is silent counts as lost before it counts as slow"),
    TimeoutOrder(f"{_FT}.short_reconnect_timeout_s", f"{_FT}.reconnect_timeout_s",
          "a new lighthouse waits less where half of the quorum has asked for the next one"),
    TimeoutOrder(f"{_FT}.reconnect_timeout_s", f"{_FT}.live_timeout_s",
          "members that reconnect are not dropped as slow"),
    TimeoutOrder("ft.manager_server:SILENCE_S", "ft.process_group:DEFAULT_TIMEOUT",
          "the loss of a replica's server is found before a collective gives up"),
    TimeoutOrder("ft.process_group:DEFAULT_TIMEOUT", "agent.hang_watch:REPLICA_MIN_LIMIT_S",
          "replicas that wait in a collective for a slow one leave it out before they count as "
          "hung", 2.0),
)  # fmt: skip
"""Each pair, with the reason."""


def contradictions(settings: LauncherSettings) -> Iterator[ConfigError]:
    """Yield an error for each pair of keys that has not the order of `ORDER`; null is no limit."""
    for order in ORDER:
        if ":" in order.shorter + order.longer:
            continue
        keys = (order.shorter, order.longer)
        shorter, longer = (attrgetter(k.removeprefix("launcher."))(settings) for k in keys)
        if shorter is None or longer is None or order.times * shorter < longer:
            continue
        what = "it" if order.times == 1 else f"{order.times:g} times it"
        remedy = f"{what} must be below {order.longer} ({longer:g}), so that {order.why}"
        yield ConfigError(order.shorter, shorter, f"{remedy}: lower it, or raise the other")
