"""Nothing that a worker has started outlives it; and nothing else is touched."""

import json
import subprocess
import sys
import textwrap

import pytest

AGENT = textwrap.dedent(
    """
    import json, os, subprocess, sys, time
    import psutil
    from hpc_elastic.agent import signals, worker_process

    WORKER = '''
    import os, subprocess, sys, time
    subprocess.Popen(["sleep", "3600"])                            # in its session
    subprocess.Popen(["sleep", "3600"], start_new_session=True)    # in another
    if not os.fork():                                              # a daemon: twice forked
        os.setsid()
        if not os.fork():
            subprocess.Popen(["sleep", "3600"])
            print("ready", flush=True)
            time.sleep(3600)
        os._exit(0)
    time.sleep(3600)
    '''

    def start(*argv, **options):
        return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, **options)

    signals.adopt_orphans()
    own = start("sleep", "3600")
    warm = start("sh", "-c", "sleep 3600 & echo ready; wait", start_new_session=True)
    worker = start(sys.executable, "-c", WORKER, start_new_session=True)
    for process in (warm, worker):
        process.stdout.readline()
    worker.kill()
    worker.wait()
    family = lambda: {p.pid for p in psutil.Process().children(recursive=True)
                      if p.status() != "zombie"}
    kept = {own.pid, warm.pid, *(p.pid for p in psutil.Process(warm.pid).children())}
    num_left = len(family() - kept)
    ended = worker_process.kill_strays(keep=[warm.pid])
    others = start("true")  # as of a site's wrapper: nobody waits for it
    os.waitid(os.P_PID, others.pid, os.WEXITED | os.WNOWAIT)
    orphan = start("sh", "-c", "sleep 0.01 & exit 0", start_new_session=True)
    orphan.wait()
    deadline = time.monotonic() + 30
    while len(psutil.Process().children()) > 3 and time.monotonic() < deadline:
        worker_process.reap_orphans({warm.pid})
        time.sleep(0.01)
    print(json.dumps([num_left, ended, family() == kept, len(psutil.Process().children())]))
    others.wait()
    print(json.dumps([worker_process.kill_strays(), own.poll(), len(family())]))
    own.kill()
    """
)


def test_everything_that_descends_from_a_worker_is_ended():
    """Daemons and sessions of their own, too; not spares, nor the agent's own commands."""
    done = subprocess.run(
        [sys.executable, "-c", AGENT], capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, last = map(json.loads, done.stdout.splitlines())
    num_left, ended, only_kept, num_children = first
    assert num_left >= 4 and ended == num_left and only_kept
    assert num_children == 3, "an adopted process that has ended is let go"
    assert last == [2, None, 1]


HAMPERED_AGENT = textwrap.dedent(
    """
    import builtins, contextlib, io, os, subprocess, sys
    from hpc_elastic.agent import signals, worker_process

    WORKER = '''
    import subprocess, sys, time
    child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    print(child.pid, flush=True)
    time.sleep(3600)
    '''

    signals.adopt_orphans()
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True,
                              start_new_session=True)
    child = int(worker.stdout.readline())
    read = io.open
    """
)
HIDDEN = textwrap.dedent(
    """
    def may_not_read(path, *args, **options):
        if path == "/proc/1/stat":
            raise PermissionError(1, "Operation not permitted", path)
        return read(path, *args, **options)

    builtins.open = io.open = may_not_read
    """
)
ENDS_MEANWHILE = textwrap.dedent(
    """
    def end_worker(path, *args, **options):
        if path == f"/proc/{worker.pid}/stat":
            worker.kill()
            worker.wait()
        return read(path, *args, **options)

    list_folder = os.listdir
    first = str(child)
    os.listdir = lambda path: sorted(list_folder(path), key=lambda name: name != first)
    builtins.open = io.open = end_worker
    """
)
COUNTED = textwrap.dedent(
    """
    try:
        print(worker_process.kill_strays())
    finally:
        builtins.open = io.open = read
        with contextlib.suppress(FileNotFoundError):
            stat = read(f"/proc/{child}/stat").read()
            # one that ended before its parent is adopted later, and reaped by reap_orphans
            if stat.rpartition(")")[2].split()[0] != "Z":
                print(stat)
                os.kill(child, 9)
        worker.kill()
    """
)


@pytest.mark.parametrize(("obstacle", "num_ended"), [(HIDDEN, 2), (ENDS_MEANWHILE, 1)])
def test_descendants_are_found_whatever_else_can_not_be_looked_at(obstacle, num_ended):
    """Others' processes may be hidden; a worker may end between two looks at its family."""
    done = subprocess.run(
        [sys.executable, "-c", HAMPERED_AGENT + obstacle + COUNTED],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"{num_ended}\n"), done.stderr


BUSY_AGENT = textwrap.dedent(
    """
    import subprocess, threading
    from hpc_elastic.agent import signals, worker_process

    def ask_slurm():
        for _ in range(300):
            codes.append(subprocess.run(["true"]).returncode)

    codes = []
    signals.adopt_orphans()
    threads = [threading.Thread(target=ask_slurm) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        worker_process.reap_orphans(())
    print(set(codes))
    """
)


def test_commands_that_other_threads_wait_for_are_theirs():
    """They may be gone at any moment, also between being seen and being looked at."""
    done = subprocess.run(
        [sys.executable, "-c", BUSY_AGENT], capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "{0}\n"), done.stderr
