"""A run: its files, what happened to it, and who may still write them; and the names of its tasks.

A task is ``40_3``, an element of an array; ``40.1``, a node of a larger job; or ``40``, a job.
"""


def task_name(job_id: str, index: int, *, coallocated: bool = False) -> str:
    """Return a task's name: ``<array job id>_<index>``; if co-allocated ``<job id>.<node id>``."""
    return f"{job_id}{'.' if coallocated else '_'}{index}"


def queue_name(task: str) -> str:
    """Return the name of a task for squeue and scontrol: of a node of a larger job, the job's."""
    return task.partition(".")[0]


def job_of(task: str) -> str:
    """Return the job id, of the array or of the job of several nodes, that a task is a part of."""
    return queue_name(task).partition("_")[0]


def index_of(task: str) -> int | None:
    """Return the index of an element of an array; None of other tasks, and of several elements."""
    index = queue_name(task).partition("_")[2]
    return int(index) if index.isdecimal() else None


def node_of(task: str) -> int | None:
    """Return the number of a node of a larger job; None of other tasks."""
    node = task.partition(".")[2]
    return int(node) if node.isdecimal() else None
