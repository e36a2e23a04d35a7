"""Trainings that faults happen to: parts b, c, d, g, h and j."""

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ft.crew import Crew, Member
from ft.libraries import HOST, Lighthouse

WARM_STEPS = 5
"""Steps that all make together before something happens to them."""
MB = 1 << 20


@dataclass
class Training:
    """Some replicas of one library that make steps together.

    ``num_bytes`` are of a worker's state, and of its gradient; ``ranks`` its replica's workers.
    ``replicas`` are the workers that are to be alive, replica by replica. A ``task`` ``large`` has
    small gradients. The driver has the ``stores`` of groups, as the agent of torchrun has.
    """

    crew: Crew
    lighthouse: Lighthouse
    num_bytes: int
    ranks: int = 1
    replicas: list[Member] = field(default_factory=list)
    task: str = "train"
    stores: list[TCPStore] = field(default_factory=list)

    def start(self, count: int, patience_s: float = 60.0) -> None:
        for replica in [self.prepare() for _ in range(count)]:
            self.let(replica)
            self.replicas += replica
        self.together(patience_s)

    def prepare(self) -> list[Member]:
        """Start the workers of one replica more, which wait after their imports."""
        self.stores.append(TCPStore(HOST, 0, is_master=True, wait_for_workers=False))
        port = self.stores[-1].port if self.ranks > 1 else 0
        return [
            self.crew.start(
                self.lighthouse.library, self.task, lighthouse=self.lighthouse.address,
                num_bytes=self.num_bytes, rank=rank, ranks=self.ranks, port=port,
            )
            for rank in range(self.ranks)
        ]  # fmt: skip

    def let(self, replica: Sequence[Member]) -> float:
        """Let its workers go on from their imports; return when."""

        def have_started() -> bool:
            return all(member.gone or bool(member.first("imported")) for member in replica)

        self.crew.need(have_started, "a replica starts")
        for member in replica:
            member.tell({"go": True})
        return time.monotonic()

    def together(self, patience_s: float = 60.0) -> None:
        """Wait until all have committed steps of all."""
        now, everybody = time.monotonic(), len(self.replicas) // self.ranks

        def done() -> bool:
            return all(
                sum(s.begun > now and s.participants == everybody for s in m.commits) >= WARM_STEPS
                for m in self.replicas
            )

        self.crew.need(done, f"{everybody} replicas make steps together", patience_s)

    def end(self) -> None:
        self.crew.end(*self.replicas)
        self.replicas.clear()


def delays(survivors: Sequence[Member], since: float) -> list[float]:
    """Return each one's seconds until it committed a step that it had begun after that."""
    return [
        next((s.ended - since for s in m.commits if s.begun >= since), float("nan"))
        for m in survivors
    ]


def has_gone_on(members: Sequence[Member], since: float) -> bool:
    """Whether each has committed a step that it had begun after that."""
    return all(any(s.begun >= since and s.committed for s in reversed(m.steps)) for m in members)


def longest_gap(member: Member, begin: float, end: float) -> float:
    """Return the longest time between commits in that span; its ends count as commits."""
    moments = [begin, *(s.ended for s in member.commits if begin < s.ended < end), end]
    return max(b - a for a, b in itertools.pairwise(moments))


def median_step(members: Sequence[Member], participants: int) -> float:
    """Return the median seconds between commits of steps of this number of replicas."""
    gaps = []
    for member in members:
        ended = [s.ended for s in member.commits if s.participants == participants]
        gaps += [b - a for a, b in itertools.pairwise(ended)]
    return statistics.median(gaps)
