"""Whether processes have ended."""

import psutil


def is_gone(pid: int) -> bool:
    """Tell whether a process has ended; nobody may have asked for its exit code yet."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
