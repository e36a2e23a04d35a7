"""The process that calls the user's function: ``python -m hpc_elastic.agent.worker_main RUN_DIR``.

The script is loaded under the name ``__mp_main__``, as multiprocessing does for a spawned child:
its ``if __name__ == "__main__"`` block does not run, and a data loader's own children find the
script again. A Hydra function is called with the config frozen at submission.

What went wrong is written for the agent, in the file and form of torch's `record` decorator, with
our own fields beside it. That the function has returned is written on the control page: an exit
code does not show it, since ``sys.exit(0)`` and ``os._exit(0)`` end a process with 0 as well.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import io
import itertools
import json
import multiprocessing
import multiprocessing.util
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, TextIO

from hpc_elastic.agent import signals, stacks
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.run import ownership
from hpc_elastic.run.directory import RUN_DIR_VARIABLE, Entry, RunDir
from hpc_elastic.shared_files import make_folder, write_atomic
from hpc_elastic.transport import socket_filter
from hpc_elastic.worker.reporting import function_returned, own_page, report_counted
from hpc_elastic.worker.shared_page import (
    DIRECTORY_VARIABLE,
    RESULTS_VARIABLE,
    ROUND_VARIABLE,
    WARM_WORKER_VARIABLE,
)

_PR_SET_PDEATHSIG = 1  # prctl(2)
_FRAMES_OF_OURS = (
    __file__, str(Path(__file__).with_name("command.py")),
    runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>",
)  # fmt: skip


def main(argv: list[str]) -> int:
    """Run one worker; return its exit code."""
    agent = os.getppid()  # torch starts workers in their own sessions: Linux is to end this one
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent or agent == 1:
        os._exit(1)  # the agent died before the request
    set_up_signals()
    run = RunDir(Path(argv[0]))
    warm_worker = os.environ.pop(WARM_WORKER_VARIABLE, None)
    if warm_worker is not None:
        _wait_for_use(warm_worker, run)  # it receives the environment
    os.environ[RUN_DIR_VARIABLE] = str(run.path)
    control, local_rank = os.environ.get(DIRECTORY_VARIABLE), os.environ.get("LOCAL_RANK")
    if control is not None and local_rank is not None:
        with contextlib.suppress(OSError, RuntimeError):
            stacks.register_handler(Path(control), int(local_rank))
    sys.stdout, sys.stderr = _unfailing(sys.stdout), _unfailing(sys.stderr)
    environment = dict(os.environ)
    own_page()  # by the agent's LOCAL_RANK: a script may change it
    pid = os.getpid()
    phase = "import"
    try:
        entry = ownership.load_own(run, run.hydra, run.results).entry
        socket_filter.watch_ports()
        after_import("torch", lambda: _prepare_torch(run))
        function = load_function(entry)
        if warm_worker is not None:
            from hpc_elastic.agent.warm_workers import warn_of_late_variables

            warn_of_late_variables(environment)
        gc.freeze()  # a look for garbage among all that torch imports takes a tenth of a second
        phase = "run"
        if entry.kind == "function":
            value = function(*entry.args)
        else:
            from hpc_elastic.agent.hydra_job import hydra_job

            with hydra_job(run) as config:
                value = function(config)
        if os.getpid() == pid:  # not a process that the user's function has forked
            name = os.environ.get(RESULTS_VARIABLE) or f"round-{os.environ[ROUND_VARIABLE]}"
            results = run.results / name
            make_folder(results, parents=True)
            rank = os.environ["RANK"]
            write_atomic(results / f"rank-{rank}.json", to_json(value) + "\n")
            function_returned()
    except BaseException as e:
        if os.getpid() == pid:
            _write_failure(e, "import" if _is_import_failure(e) else phase)
        if not isinstance(e, SystemExit):
            traceback.print_exception(_without_our_frames(e))
        elif _is_message(e.code):
            print(e.code, file=sys.stderr)
        return _exit_code(e)
    return 0


def load_function(entry: Entry) -> Callable[..., Any]:
    """Import the user's script or module and return the function named in the entry.

    Raises:
        HpcElasticError: the script has no function of that name.
    """
    _enter(entry)
    if entry.script:
        module = types.ModuleType("__mp_main__")
        module.__file__ = entry.script
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
        sys.argv[:] = [entry.script]
        module.__dict__.update(runpy.run_path(entry.script, run_name="__mp_main__"))
    else:
        module = importlib.import_module(str(entry.module))
        sys.argv[:] = [module.__file__ or str(entry.module)]
    function: Any = module
    for name in entry.qualname.split("."):
        function = getattr(function, name, None)
    if not callable(function):
        where = entry.script or entry.module
        raise HpcElasticError(f"{where} has no function {entry.qualname!r} at module level")
    return function  # type: ignore[no-any-return]


def _enter(entry: Entry) -> None:
    os.chdir(entry.cwd)
    sys.path[:0] = [p for p in entry.sys_path if p not in sys.path]


def _wait_for_use(warm_worker: str, run: RunDir) -> None:
    """Be a warm worker, which imports as the script would, until this is needed as a worker."""
    from hpc_elastic.agent.warm_workers import wait_for_use

    modules: list[str] = []
    with contextlib.suppress(HpcElasticError, OSError):  # the worker meets, and reports, it again
        spec = ownership.load_own(run)
        _enter(spec.entry)
        modules += spec.agent.warm_imports
        if spec.entry.kind != "function":
            modules.append("hpc_elastic.agent.hydra_job")
    wait_for_use(warm_worker, modules)


def _prepare_torch(run: RunDir) -> None:
    """Let data loaders withstand a notice, and hook into every optimizer step of this process.

    It is reported, for scripts that report none themselves, and the present process group is held
    until the end of this process. Where the script's DistributedDataParallel is the last to hold
    it, that destroys the group when the user's function returns, with the interpreter lock, and
    waits for a thread of gloo's that may be waiting for the lock (seen with torch 2.13): all work
    is done, and nothing ever ends. Compiled graphs are kept for the next worker.
    """
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.data._utils import signal_handling

    from hpc_elastic.agent.compile_cache import CompileCache

    keep_loaders(signal_handling)
    steps, kept_groups = itertools.count(1), list[object]()
    compiled = CompileCache(run)
    compiled.load()

    def on_step(*_: object) -> None:
        if _makes_optimizer_state():
            return
        step = next(steps)
        report_counted(step)
        compiled.on_step(step)
        if dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
            if not kept_groups or kept_groups[-1] is not group:
                kept_groups.append(group)

    register_optimizer_step_post_hook(on_step)


def _makes_optimizer_state() -> bool:
    """Return whether a step of an optimizer is the one by which torch makes its state.

    `torch.distributed.checkpoint.state_dict` makes it with a learning rate of 0, before it loads a
    state.
    """
    name = "torch.distributed.checkpoint.state_dict"
    if name not in sys.modules:
        return False
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == name:
            return True
        frame = frame.f_back
    return False


def to_json(value: Any) -> str:
    """Return a worker's return value as JSON text; one-element tensors and arrays are numbers.

    Raises:
        TypeError: JSON cannot carry the value; the message names what to return instead.
    """

    def plain(item: Any) -> Any:
        if hasattr(item, "tolist"):  # tensors and arrays, of torch and NumPy
            return item.tolist()
        raise TypeError(
            f"the function returned a {type(item).__module__}.{type(item).__qualname__}, which "
            "cannot be sent back: return numbers, strings, lists and dicts, or save it to a file"
        )

    return json.dumps(value, default=plain)


def _is_import_failure(error: BaseException) -> bool:
    """Return whether an import failed before the first step, in the user's function as well."""
    page = own_page()
    if page is not None and (page.read().step or 0) > 0:
        return False
    causes = (error, error.__cause__)  # hydra.utils.instantiate raises its own error from it
    if any(isinstance(cause, ImportError) for cause in causes):
        return True
    frames = (f for e in causes if e is not None for f, _ in traceback.walk_tb(e.__traceback__))
    return any(frame.f_code.co_name == "<module>" for frame in frames)


def _write_failure(error: BaseException, phase: str) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    text = "".join(traceback.format_exception(_without_our_frames(error)))
    now = time.time()
    extra = {"py_callstack": text, "timestamp": str(int(now))}
    message = _message_of(error)
    theirs = {"message": f"{kind}: {message}", "extraInfo": extra}
    ours = {
        "exception": kind, "message": message, "traceback": text, "time": now, "phase": phase,
        "exit_code": _exit_code(error),
    }  # fmt: skip
    if isinstance(error, SystemExit) and not _is_message(error.code):
        del ours["exception"], ours["message"]  # the agent reports how the worker has ended
        handled = error.__context__
        what = f"{type(handled).__name__}: {_message_of(handled)}" if handled else None
        ours["while_handling"] = what
    record = {"message": theirs, "hpc_elastic": ours}
    with contextlib.suppress(OSError):
        write_atomic(Path(path), json.dumps(record))


def _message_of(error: BaseException) -> str:
    """Return the text of an error; a user's class may fail to make one."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"  # as in Python's own tracebacks


def _exit_code(error: BaseException) -> int:
    code = error.code if isinstance(error, SystemExit) else 1
    return code & 0xFF if isinstance(code, int) else int(_is_message(code))


def _is_message(code: object) -> bool:
    """Return whether what was given to ``sys.exit`` is a message, which Python prints."""
    return not (code is None or isinstance(code, int))


def _without_our_frames(error: BaseException) -> BaseException:
    """Cut the frames that lead to the user's code, which only this module's reader knows."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _FRAMES_OF_OURS:
        frames = frames.tb_next
    explains_itself = frames is not None or isinstance(error, HpcElasticError)
    return error.with_traceback(frames) if explains_itself else error


class _LogFile(io.FileIO):
    """The file of a worker's output: what its file system does not take is lost, and ends nothing.

    A disk that is full, a server that is away, a node whose files are read-only for a while.
    """

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


def _unfailing(stream: TextIO) -> TextIO:
    """Return a stream of the same descriptor on which `print` does not fail."""
    file = _LogFile(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        file,  # unbuffered, as by python -u
        encoding=stream.encoding, errors=stream.errors, write_through=True,
    )  # fmt: skip


def _exit_process(exit_code: int) -> None:
    """End the process as Python would, without the finalization of the interpreter.

    A C++ thread of torch that asks for the GIL during finalization is unwound by force, and takes
    the whole process down with SIGABRT ("terminate called without an active exception",
    python/cpython#87135, cured in Python 3.14): one in a dozen short runs lost a worker that had
    done all its work.
    """
    # Private: Python has no public way to end the threads of executors, which torch.compile leaves
    # open, to wait for the others, and to run what was registered.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


# ---- A worker stays at work while its node is under notice: the signals do nothing to it
# Slurm may send them to every process of a task: with proctrack/linuxproc it does, and so do
# `scancel --full` and a signal to a process group. The agent makes a notice of them. They are
# handled by a function of Python: it outlives a call into C++, is not handed on to programs that
# are started (SIG_IGN would be), and a script may set its own.

STOP = signal.SIGHUP
"""By this the agent stops workers. Its default ends a process that is stuck in a collective at
once, and leaves no core file; nothing else sends it to a process without a terminal."""


def set_up_signals() -> None:
    """Withstand the signals of a notice from now on (worker's main thread, at its start)."""
    signals.ignore_preemption_signals()
    for number in (STOP, signal.SIGQUIT):  # what started all this may ignore them: nohup, `&`
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.register_at_fork(after_in_child=_as_others_do)
    # The last one registered runs first: before multiprocessing, which waits for its children.
    assert multiprocessing.util is not None
    atexit.register(end_children)


def _as_others_do() -> None:
    """Restore the defaults in a forked child: its parent may want to end it."""
    for number in signals.NOTICES:
        if signal.getsignal(number) is signals.do_nothing:
            signal.signal(number, signal.SIG_DFL)


def keep_loaders(signal_handling: types.ModuleType) -> None:
    """Let data loaders withstand them, too (worker, once torch is imported, before its first).

    torch ends its loaders on a SIGTERM whose sender is not the worker. What each of them calls
    first, a private name, is replaced (test_worker_signals fails if torch changes it). They ignore
    the worker's SIGTERM as well then, which torch sends to one that has not ended in time;
    `end_children` replaces it. Loaders that are started by "spawn" or "forkserver" are programs of
    their own, and die.

    Args:
        signal_handling: ``torch.utils.data._utils.signal_handling``.
    """
    name = "_set_worker_signal_handlers"
    theirs = getattr(signal_handling, name)

    def set_handlers() -> None:
        theirs()
        signals.ignore_preemption_signals()

    setattr(signal_handling, name, set_handlers)


def end_children() -> None:
    """Kill what multiprocessing would wait for, having sent a SIGTERM that does nothing.

    torch's handler of SIGCHLD would raise here when the first is dead, and the others would live.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        if child.daemon:
            with contextlib.suppress(OSError, ValueError):
                child.kill()


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call a function as soon as a module has been imported; now, if it has been.

    Args:
        name: Of a module or package, as in ``import name``.
        then: Called once, by the thread that imports, before its import statement ends.
    """
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(MetaPathFinder):
    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the one module as it would be found without this, and see to what follows."""
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader, then = spec.loader, self._then

        def load_and_tell(module: types.ModuleType) -> None:
            del loader.exec_module  # of this instance: a reload is none of ours
            loader.exec_module(module)
            then()

        loader.exec_module = load_and_tell  # type: ignore[method-assign]
        return spec


if __name__ == "__main__":
    _exit_process(main(sys.argv[1:]))
