"""One agent of a run as a process: ``peer.py RUN_DIR SLOT CLOCK_OFFSET_S``.

It joins whenever it is told to stop its (imagined) workers, and prints one JSON line for each
round, and for what a fence in the round's worker says when asked. Lines on its standard input tell
it what to do: ``fence`` or ``fail``.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

OFFSET_S = float(sys.argv[3])
_time = time.time
time.time = lambda: _time() + OFFSET_S  # before anybody else imports it

from group import PATIENCE_S, Group  # noqa: E402

from hpc_elastic.errors import CheckpointFencedError  # noqa: E402
from hpc_elastic.rendezvous.log_entry import Failure  # noqa: E402
from hpc_elastic.rendezvous.messages import Failed, RoundInfo  # noqa: E402
from hpc_elastic.rendezvous.session import Session  # noqa: E402
from hpc_elastic.run import fencing  # noqa: E402


def say(**fields: object) -> None:
    """Tell the test something."""
    print(json.dumps(fields), flush=True)


def obey(session: Session) -> None:
    """Do what the test says, until it says no more."""
    for line in sys.stdin:
        if line.strip() == "fail":
            failure = Failure("7_0", "n", 0, 0, time.time(), "boom")
            session.report(Failed([failure]))
        else:
            say(fence=ask_fence())
    os._exit(0)


def ask_fence() -> str:
    """Ask as a worker would, right before it commits."""
    try:
        fencing.check_fence()
    except CheckpointFencedError:
        return "fenced"
    return "free"


def main() -> None:
    """Be an agent until the run ends."""
    g = Group(Path(sys.argv[1]), max_nodes=3, max_restarts=0)
    g.running = frozenset(sys.argv[4:])
    session = g.agent(int(sys.argv[2]))
    threading.Thread(target=obey, args=(session,), daemon=True).start()
    while isinstance(outcome := session.join(PATIENCE_S), RoundInfo):
        os.environ[fencing.VARIABLE] = str(fencing.entry_path(g.run.rdzv, outcome.index))
        leads = session._leader is not None
        say(round=outcome.number, world_size=outcome.world_size, leads=leads)
        while not session.stop_requested:
            time.sleep(0.02)
        say(stopped=True)
    say(status=outcome.status)
    session.leave("the run has ended")


if __name__ == "__main__":
    main()
