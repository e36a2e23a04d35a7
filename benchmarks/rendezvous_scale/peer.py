"""torch's own rendezvous: DynamicRendezvousHandler over one TCPStore, a thread for each agent.

The threads are spread over a few processes, as many as it likes: in one, the interpreter's lock
would be counted against it. Processes have imported torch and wait, when the time begins.
"""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast

from rendezvous_scale.process import NoAnswerError, allow_files, answer, side

ADDRESS = "127.0.0.1"
_START_S = 60.0


@dataclass(frozen=True)
class PeerReached:
    """What it took until all agents had their rank; counts are of the whole group."""

    wall_s: float
    messages: int
    """Requests to the store and their answers."""
    bytes: int
    """Of the state that was read and written, as it is sent."""


class Counter:
    """A backend that counts what goes to the store and comes from it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.messages = self.bytes = 0

    @property
    def name(self) -> str:
        return str(self._backend.name)

    def get_state(self) -> Any:
        return self._counted(self._backend.get_state(), 0)

    def set_state(self, state: bytes, token: Any = None) -> Any:
        """Count and pass on; the old state is sent too, to be compared."""
        old = token if isinstance(token, bytes) else b""
        return self._counted(self._backend.set_state(state, token), _as_base64(state) + len(old))

    def _counted(self, found: Any, sent: int) -> Any:
        self.messages += 2
        self.bytes += sent + (_as_base64(found[0]) if found else 0)
        return found


def _as_base64(state: bytes) -> int:
    return (len(state) + 2) // 3 * 4


def measure(size: int, processes: int, limit_s: float) -> PeerReached | None:
    """Return what a rendezvous of ``size`` agents takes; None if it takes longer than the limit."""
    shares = [len(range(i, size, processes)) for i in range(min(processes, size))]
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(side(serve))
        port = answer(host, _START_S)
        pipes = [stack.enter_context(side(take_part, port, share, size)) for share in shares]
        for pipe in pipes:
            answer(pipe, _START_S)
        since = time.perf_counter()
        for pipe in pipes:
            pipe.send("go")
        try:
            counts = [answer(p, since + limit_s - time.perf_counter()) for p in pipes]
        except NoAnswerError:
            return None
        wall_s = time.perf_counter() - since
    return PeerReached(wall_s, sum(c[0] for c in counts), sum(c[1] for c in counts))


def serve(pipe: Connection) -> None:
    """Host the store until the pipe closes."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(ADDRESS, 0, is_master=True, multi_tenant=True, wait_for_workers=False)
    pipe.send(store.port)
    with contextlib.suppress(EOFError):
        pipe.recv()


def take_part(pipe: Connection, port: int, share: int, size: int) -> None:
    """Be ``share`` of the ``size`` agents, once told to; then wait until the pipe closes."""
    allow_files(share)
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    where = f"{ADDRESS}:{port}"
    go, counters = threading.Event(), []
    params = RendezvousParameters("c10d", where, "scale", size, size, ADDRESS, is_host=False)

    def agent() -> None:
        go.wait()
        backend, store = create_backend(params)
        counters.append(Counter(backend))
        create_handler(store, cast(Any, counters[-1]), params).next_rendezvous()

    with ThreadPoolExecutor(share) as threads:
        waiting = [threads.submit(agent) for _ in range(share)]
        pipe.send("ready")
        pipe.recv()
        go.set()
        for agent_ in waiting:
            agent_.result()
        pipe.send((sum(c.messages for c in counters), sum(c.bytes for c in counters)))
        with contextlib.suppress(EOFError):
            pipe.recv()
