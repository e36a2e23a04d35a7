"""When a leader out of reach is taken for dead, so that another may be elected (pure).

An agent that can not reach the leader takes it for dead when

- its port refused connections for ``CONFIRM_REFUSAL_S``: no such process is there any more; or
- Slurm says that its task does not run (the first few members ask); or
- it was out of reach for ``lost_after_s``, and its lease on the shared file system has lapsed
  (`Liveness.lapse_s`, or ``lost_after_s`` if this agent never followed it). A lease that is renewed
  says that the leader lives and others follow it: then it is this agent that is cut off, and it
  keeps trying.

That takes two reads of the lease, the second begun so long after the first had ended, and none in
between that differs. A lease that can not be read proves nothing, however long.

A record that does not verify counts as a leader out of reach without a lease. It is passed over
only if looks further apart than files may be old have found it so: until then another node may
read a part of what is whole, and would take back what the record decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_elastic.rendezvous.attendance import Liveness

CONFIRM_REFUSAL_S = 0.2


@dataclass
class Watch:
    """What is known of one epoch's leader while it is out of reach; monotonic seconds."""

    epoch: int = 0
    since: float = 0.0
    """Since when it is out of reach."""
    refused_since: float | None = None
    lease: int | None = None
    lease_since: float | None = None
    """When the lease's present value was first seen; None before the first look."""
    followed: bool = False
    """Whether this agent was connected to it."""
    inquired: bool = False
    slurm_says_dead: bool = False
    seen_since: float | None = None
    """When the first look ended that found this epoch."""
    lease_until: float = 0.0
    """When the last look began that found this value."""

    def saw_lease(self, lease: int | None, asked: float, now: float) -> None:
        """A look that began at ``asked`` has found this value."""
        if self.seen_since is None:
            self.seen_since = now
        if self.lease_since is None or lease != self.lease:
            self.lease, self.lease_since = lease, now
        self.lease_until = asked

    def slept(self, for_s: float) -> None:
        """This agent was not running for so long: what it has seen before proves nothing."""
        self.since += for_s
        self.lease_since = self.seen_since = None
        self.refused_since = None

    def is_dead(self, liveness: Liveness, now: float, *, damaged: bool) -> bool:
        """Tell whether the next epoch may be claimed; ``damaged``: its record does not verify."""
        if not damaged and self.slurm_says_dead:
            return True
        if not damaged and self.refused_since is not None:
            return now - self.refused_since >= CONFIRM_REFUSAL_S
        if now - self.since <= liveness.lost_after_s:
            return False
        if damaged:
            since = self.seen_since
            return since is not None and self.lease_until - since >= liveness.stale_s
        lapse_s = max(liveness.lapse_s, 0.0 if self.followed else liveness.lost_after_s)
        seen_s = self.lease_until - self.lease_since if self.lease_since is not None else 0.0
        return seen_s >= lapse_s
