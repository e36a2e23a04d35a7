"""torchrun, as the benchmarks start it: its program, and the best settings of its rendezvous."""

import sys
from collections.abc import Mapping
from pathlib import Path

from evidence.machine import package_version
from evidence.result import Peer

TORCHRUN = Path(sys.executable).parent / "torchrun"
TUNED = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}
"""The shortest that hold: torch leaves a heartbeat out that comes a little early, so that with two
attempts agents that live are written off."""
UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it new workers may read what the last group's have left in the store."""


def conf(settings: Mapping[str, int]) -> str:
    """Return settings as ``--rdzv-conf`` wants them."""
    return ",".join(f"{key}={value}" for key, value in settings.items())


def peer() -> Peer:
    """Return torchrun with its version, which is torch's."""
    return Peer("torchrun (torch)", package_version("torch"))
