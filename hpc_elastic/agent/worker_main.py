"""The process that calls the user's function: ``python -m hpc_elastic.agent.worker_main RUN_DIR``.

The script is loaded under its own name, ``__main__``, but its ``if __name__ == "__main__"`` block
does not run (`main_block`). A Hydra function is called with the config frozen at submission, after
the statements of that block that stand before its call.

What went wrong is written for the agent, in the file and form of torch's `record` decorator, with
our own fields beside it. That the function has returned is written on the control page: an exit
code does not show it, since ``sys.exit(0)`` and ``os._exit(0)`` end a process with 0 as well.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import enum
import gc
import importlib
import importlib.util
import io
import itertools
import json
import logging
import os
import re
import runpy
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, TextIO

from hpc_elastic.agent import command, main_block, signals, stacks, worker_group
from hpc_elastic.agent.command import FailedCommandError
from hpc_elastic.config.schema import LauncherSettings
from hpc_elastic.errors import HpcElasticError, InexactError, PermanentError
from hpc_elastic.gpus import NVIDIA_GPUS
from hpc_elastic.run import arguments, ownership
from hpc_elastic.run.directory import RUN_DIR_VARIABLE, Entry, RunDir
from hpc_elastic.shared_files import make_folder, open_file, write_atomic
from hpc_elastic.slurm.environment import mig_slices
from hpc_elastic.transport import socket_filter
from hpc_elastic.worker import (
    optimizer_steps,
    process_group,
    reporting,
    script_loops,
    shared_page,
)
from hpc_elastic.worker.own_checkpoints import OwnCheckpoints

_log = logging.getLogger("hpc_elastic.agent.worker_main")  # its own name is __main__

_CPUS = Path("/proc/cpuinfo")
_FRAMES_OF_OURS = (
    __file__, *(str(Path(__file__).with_name(name)) for name in ("command.py", "main_block.py")),
    runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>",
)  # fmt: skip
_ADAPTERS = {
    "torch": "hpc_elastic.integrations.plain",
    "lightning.pytorch": "hpc_elastic.integrations.lightning",
    "pytorch_lightning": "hpc_elastic.integrations.lightning",
    "transformers.trainer": "hpc_elastic.integrations.huggingface",
}
"""Modules, and what makes a script that imports them elastic, a layer above."""
_MAIN_NAMES = ("__main__", "__mp_main__")
_LIBRARY = re.compile(r"/site-packages/|/dist-packages/|/lib(64)?/python3[^/]*/|^<")
_LONGEST_TEXT = 1000  # characters that are kept of what JSON cannot hold


def main(argv: list[str]) -> int:
    """Run one worker; return its exit code."""
    signals.end_with_agent(int(os.environ.get(shared_page.AGENT_VARIABLE, os.getppid())))
    signals.set_up_worker()
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory, by `-m`: it would hide packages of the same name
    run = RunDir(Path(argv[0]))
    warm_worker = os.environ.pop(shared_page.WARM_WORKER_VARIABLE, None)
    if warm_worker is not None:
        _wait_for_use(warm_worker, run)  # it receives the environment
    os.environ[RUN_DIR_VARIABLE] = str(run.path)
    control = os.environ.get(shared_page.DIRECTORY_VARIABLE)
    local_rank = os.environ.get("LOCAL_RANK")
    place = None
    if control is not None and local_rank is not None:
        place = Path(control), int(local_rank)
        with contextlib.suppress(OSError, RuntimeError):
            stacks.register_handler(*place)
    sys.stdout, sys.stderr = _unfailing(sys.stdout), _unfailing(sys.stderr)
    reporting.own_page()  # by the agent's LOCAL_RANK: a script may change it
    _bind_to_cpus()
    if mig_slices(os.environ):  # GPU 0 of this process, as with torchrun --virtual-local-rank
        os.environ["LOCAL_RANK"] = "0"
    environment = dict(os.environ)
    pid = os.getpid()
    phase = "import"
    try:
        spec = ownership.load_own(run, run.hydra, run.results)
        entry = spec.entry
        socket_filter.watch_ports()
        signals.keep_fork_server()
        reporting.set_bad_loss_policy(stop=spec.settings.launcher.on_bad_loss == "stop")
        world_size = 1 if spec.settings.ft else int(environment.get("WORLD_SIZE", "1"))
        check = world_size, spec.settings.launcher.require_group
        group = worker_group.GroupCheck(*check)
        after_import("torch", lambda: _prepare_torch(run, group, place))
        after_import(
            "torch.distributed.rendezvous", partial(worker_group.keep_own_stores, environment)
        )
        if not entry.is_command:  # whose children are what they are under torchrun
            worker_group.free_children()
        spawned = partial(worker_group.keep_spawned, environment, *check)
        after_import("torch.multiprocessing.spawn", spawned)
        if spec.settings.launcher.adapt == "auto" and not spec.settings.ft:
            script_loops.LOOPS.is_enabled = True
            for framework, adapter in _ADAPTERS.items():
                after_import(framework, partial(_adapt, adapter))
        if entry.is_command and not spec.settings.ft:
            _follow_checkpoints(run, spec.settings.launcher)
        function = load_function(entry)
        if warm_worker is not None:
            from hpc_elastic.agent.warm_workers import warn_of_late_variables

            warn_of_late_variables(environment)
        gc.freeze()  # garbage collection among all that torch imports takes a tenth of a second
        phase = "run"
        if entry.kind == "function":
            value = function(*arguments.decode(entry.args))
        else:
            from hpc_elastic.agent.hydra_job import hydra_job

            with hydra_job(run) as config:
                value = function(config)
        if os.getpid() == pid:  # not a process that the user's function has forked
            # not by os.environ, which a script may clear
            name = f"round-{environment[shared_page.ROUND_VARIABLE]}"
            results = run.results / (environment.get(shared_page.RESULTS_VARIABLE) or name)
            make_folder(results, parents=True)
            write_atomic(results / f"rank-{environment['RANK']}.json", to_json(value) + "\n")
            reporting.function_returned()
    except BaseException as e:
        if os.getpid() == pid:
            _write_failure(e, _phase_of(e, phase), environment.get("TORCHELASTIC_ERROR_FILE"))
        if not isinstance(e, SystemExit):
            _show(_without_our_frames(e))
        elif _is_message(e.code):
            print(e.code, file=sys.stderr)
        return _exit_code(e)
    return 0


def load_function(entry: Entry) -> Callable[..., Any]:
    """Import the script and module, and return the entry's function; HpcElasticError if none."""
    _enter(entry)
    sys.argv[1:] = entry.args if entry.kind == "hydra" else []
    script = None
    if entry.script or entry.main_block:
        script = main_block.load_main(entry.script, None if entry.script else entry.module)
    function: Any = script
    if entry.module and (entry.script or script is None):
        function = importlib.import_module(entry.module)
        if script is None:
            sys.argv[0] = function.__file__ or entry.module
    for name in entry.qualname.split("."):
        function = getattr(function, name, None)
    if not callable(function):
        where = entry.script or entry.module
        raise HpcElasticError(f"{where} has no function {entry.qualname!r} at module level")
    if entry.attributes is not None:
        function = function.__new__(function)
        vars(function).update(arguments.decode(entry.attributes))
    if script is not None and entry.main_block:
        main_block.run_block(script, function)
    return function  # type: ignore[no-any-return]


def _enter(entry: Entry) -> None:
    """Set the working directory and the search path of the program that was submitted."""
    os.chdir(entry.cwd)
    own = entry.sys_path.index("") if "" in entry.sys_path else len(entry.sys_path)
    before, after = entry.sys_path[:own], entry.sys_path[own + 1 :]
    sys.path[:] = dict.fromkeys([*before, *(p for p in sys.path if p not in after), *after])


def _wait_for_use(warm_worker: str, run: RunDir) -> None:
    """Import what the script would, as a warm worker, until the agent needs a worker."""
    from hpc_elastic.agent.warm_workers import wait_for_use

    modules: list[str] = []
    with contextlib.suppress(HpcElasticError, OSError):  # the worker meets, and reports, it again
        spec = ownership.load_own(run)
        _enter(spec.entry)
        modules += spec.settings.launcher.agent.warm_imports
        if spec.entry.kind != "function":
            modules.append("hpc_elastic.agent.hydra_job")
    wait_for_use(warm_worker, modules)


def _bind_to_cpus() -> None:
    """Keep all threads, those of later ones too, on the CPUs that are near this worker's GPU."""
    cpus = json.loads(os.environ.get(shared_page.CPUS_VARIABLE, "[]"))
    if cpus:
        near = cpus[int(os.environ["LOCAL_RANK"]) % len(cpus)]
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended, or the cgroup has other CPUs now
                os.sched_setaffinity(int(thread.name), near)


def _prepare_torch(
    run: RunDir,
    group: worker_group.GroupCheck | None = None,
    place: tuple[Path, int] | None = None,
) -> None:
    """Let data loaders withstand a notice, and hook into every optimizer step of this process.

    It is reported, for scripts that report none themselves, and the present process group is held
    until the end of this process. Where the script's DistributedDataParallel is the last to hold
    it, that destroys the group when the user's function returns, with the interpreter lock, and
    waits for a thread of gloo's that may be waiting for the lock (seen with torch 2.13): all work
    is done, and nothing ever ends. Compiled graphs are kept for the next worker. A worker with NCCL
    answers the agent's questions about its collectives, by its folder and local rank in `place`.
    """
    import torch.distributed as dist

    signals.keep_loaders()
    steps, kept_groups = itertools.count(1), list[Any]([None])
    compiled = CompileCache(run)
    compiled.load()

    def on_step(_optimizer: object) -> None:
        step = next(steps)
        reporting.report_counted(step)
        compiled.on_step(step)
        world = process_group.world()
        if world is not None and world is not kept_groups[-1]:
            if place is not None and len(kept_groups) == 1 and "nccl" in dist.get_backend():
                stacks.answer_collectives(*place)
            kept_groups.append(world)
        if group is not None and not group.is_done:
            group.on_step(process_group.size() or 0)

    optimizer_steps.watch(on_step)


class CompileCache:
    """The graphs that torch.compile has compiled, kept in the run for each type of node.

        <run>/compile/<type>.<local rank>.bin     what torch.compiler.save_cache_artifacts() returns

    torch itself keeps compiled graphs in a folder of the node. A worker does not find them after a
    restart on another node, nor in a job whose /tmp is new. So each worker puts them into the run
    after its first steps, if the script compiles at all, and a worker that starts puts them back
    into the folder of its node, before the script is imported. torch checks that they fit: its
    version, the device and the graph are part of their keys.

    torch unpickles such a file, so it is read only if this user alone can write it.

    Source: https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_tutorial.html
    """

    def __init__(self, run: RunDir) -> None:
        import torch

        name = f"{node_type()}-torch-{torch.__version__}.{os.environ.get('LOCAL_RANK', '0')}.bin"
        self._file = run.compiled / re.sub(r"[^\w.+-]", "_", name)
        self._is_first_node = os.environ.get("GROUP_RANK") == "0"
        self._next_step = 1
        self._stored: Any = None  # what the file holds, as far as this worker knows

    def load(self) -> None:
        """Put the graphs of earlier workers into this node's folder, where torch finds them."""
        import torch

        try:
            if _is_private(self._file):
                with open_file(self._file) as file:
                    self._stored = torch.compiler.load_cache_artifacts(file.read())
        except FileNotFoundError:
            return
        except Exception as e:  # torch's own: the graphs are compiled anew
            _log.warning("%s: compiled graphs cannot be used: %s", self._file, e)

    def on_step(self, number: int) -> None:
        """Store new graphs after the first step of this worker, its tenth, hundredth and so on."""
        if number != self._next_step:
            return
        self._next_step *= 10
        if "torch._inductor" not in sys.modules:
            return
        import torch

        found = torch.compiler.save_cache_artifacts()
        if found is None or found[1] == self._stored:
            return
        content, self._stored = found
        threading.Thread(
            target=self._write, args=(content,), name="compile cache", daemon=True
        ).start()

    def _write(self, content: bytes) -> None:
        try:
            # one node of each type is enough; where two see no file, both write the same
            if self._is_first_node or not self._file.exists():
                make_folder(self._file.parent, mode=0o700)
                write_atomic(self._file, content, mode=0o600)
        except OSError as e:
            _log.warning("%s: compiled graphs are not kept: %s", self._file, e)


def node_type() -> str:
    """Return the model of this node's first GPU, or of its CPU without one; ``unknown`` if unknown.

    It is read without the driver: a script may still choose its device, or fork.
    """
    try:
        gpus = sorted(NVIDIA_GPUS.glob("*/information"))
        text, key = (gpus[0].read_text(), "Model") if gpus else (_CPUS.read_text(), "model name")
        found = re.search(rf"^{key}\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else "unknown"


def _is_private(file: Path) -> bool:
    found = file.stat()
    if found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        return True
    _log.warning("%s is not used: others may write it (chmod go-w, or remove it)", file)
    return False


def _adapt(adapter: str) -> None:
    importlib.import_module(adapter).install()


def _follow_checkpoints(run: RunDir, launcher: LauncherSettings) -> None:
    """Let the script continue from the checkpoints that it writes itself."""
    if launcher.adapt == "auto" or launcher.resume_args:
        own = command.own_checkpoints = OwnCheckpoints(run, launcher.resume_args)
        after_import("torch", own.watch_torch)
        after_import("accelerate.accelerator", own.watch_accelerate)


def to_json(value: Any) -> str:
    """Return a worker's return value as JSON text, as far as JSON has it.

    Tensors and arrays are numbers and lists, paths are texts. Of what JSON cannot hold its text is
    kept, with a warning: the training is done, and would return the same again.
    """
    unknown: dict[str, None] = {}
    try:
        text = json.dumps(_plain(value, unknown))
    except Exception as e:  # a user's class, or a value that contains itself
        unknown[f"{type(value).__qualname__} ({type(e).__name__})"] = None
        text = json.dumps(_text_of(value))
    if unknown:
        print(
            f"hpc_elastic: the function returned {', '.join(unknown)}: the results hold only the "
            "text of it. Return numbers, texts, lists and dicts, or save it to a file",
            file=sys.stderr,
        )
    return text


def _plain(item: Any, unknown: dict[str, None]) -> Any:
    """Return a value as JSON has it; note the types that it cannot hold."""
    if item is None or isinstance(item, str | int | float):
        return item
    if isinstance(item, enum.Enum):
        return _plain(item.value, unknown)
    if isinstance(item, os.PathLike):
        return os.fspath(item)
    if isinstance(item, Mapping):
        keys = {key: key if isinstance(key, str | int | float | None) else str(key) for key in item}
        return {keys[key]: _plain(value, unknown) for key, value in item.items()}
    if isinstance(item, Set | Sequence) and not isinstance(item, bytes | bytearray):
        return [_plain(each, unknown) for each in item]
    if hasattr(item, "tolist"):  # tensors and arrays, of torch and NumPy
        return _plain(item.tolist(), unknown)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        fields = (field.name for field in dataclasses.fields(item))
        return {name: _plain(getattr(item, name), unknown) for name in fields}
    unknown[f"a {type(item).__module__}.{type(item).__qualname__}"] = None
    return _text_of(item)


def _text_of(item: Any) -> str:
    with contextlib.suppress(Exception):  # a user's class may fail to make one
        return str(item)[:_LONGEST_TEXT]
    return f"<{type(item).__qualname__}>"


def _phase_of(error: BaseException, phase: str) -> str:
    """Return the phase of a failure (`rendezvous.log_entry.Failure`).

    What is certain to fail again before the first step is a failure of the import, in the user's
    function as well: a module that is not there or fails by itself, a syntax error, a name that is
    not defined, a wrong argument, a command that is not found. What may pass is none: a download, a
    port, memory. A training that is refused before its first step is so after each restart.
    """
    causes = (error, error.__cause__)  # hydra.utils.instantiate raises its own error from it
    if any(isinstance(cause, PermanentError) for cause in causes):
        return "final"
    page = reporting.own_page()
    if page is not None and (page.read().step or 0) > 0:
        return "run"
    if any(isinstance(cause, InexactError) for cause in causes):
        return "final"
    is_certain = phase == "import" and not isinstance(error, OSError)
    is_certain = is_certain or any(_is_certain(cause) for cause in causes if cause is not None)
    return "import" if is_certain else "run"


def _is_certain(error: BaseException) -> bool:
    if isinstance(error, FailedCommandError):
        return error.is_certain
    if isinstance(error, ImportError | SyntaxError):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SystemExit):
        parsers = ("argparse", "click.core")
        return error.code == 2 and any(f.f_globals.get("__name__") in parsers for f in frames)
    if isinstance(error, NameError):
        return bool(frames) and not _LIBRARY.search(frames[-1].f_code.co_filename)
    imports = (
        frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") not in _MAIN_NAMES
        for frame in frames
    )
    return any(imports) and not isinstance(error, OSError | SystemExit)


def _write_failure(error: BaseException, phase: str, path: str | None) -> None:
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
    """Cut our frames, which lead to the user's code."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _FRAMES_OF_OURS:
        frames = frames.tb_next
    explains_itself = frames is not None or isinstance(error, HpcElasticError)
    return error.with_traceback(frames) if explains_itself else error


def _show(error: BaseException) -> None:
    """Show an error as the end of a script does: by the script's own hook, if it has set one."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:  # of the hook; a SystemExit has nothing left to end
        traceback.print_exc()
        traceback.print_exception(error)


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
        with contextlib.suppress(Exception):  # a script may set its own, or None
            stream.flush()
    _close_files()
    os._exit(exit_code)


def _close_files() -> None:
    """Close the files that are still open, as finalization would: their buffers are written.

    What wraps another file comes first. The files of C libraries are flushed.
    """
    gc.unfreeze()
    in_c = (io.BufferedWriter, io.BufferedRandom)
    found = optimizer_steps.live_objects(io.IOBase)
    files = [each for each in found if not isinstance(each, io.RawIOBase)]  # that has no buffer
    for file in sorted(files, key=lambda f: (not isinstance(f, io.TextIOBase), type(f) in in_c)):
        with contextlib.suppress(Exception):  # as finalization: a full disk, a closed pipe
            file.close()
    ctypes.CDLL(None).fflush(None)


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call a function once a module has been imported, in the importing thread, or now."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder:
    """Finds a module as it would be found without this, until it has been imported.

    Being looked up is no import: transformers and others ask for torch's spec first.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then
        self._is_asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as others would, and call the function once it has been executed."""
        if fullname != self._name or getattr(self._is_asking, "now", False):
            return None
        self._is_asking.now = True  # other hooks ask all finders
        try:
            found = (f.find_spec(fullname, path, target) for f in sys.meta_path if f is not self)
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self._is_asking.now = False
        if spec is None or spec.loader is None:
            return spec
        theirs = spec.loader.exec_module  # of this instance, perhaps by another hook

        def load_and_tell(module: types.ModuleType) -> None:
            theirs(module)
            if self in sys.meta_path:  # once; a reload is none of ours
                sys.meta_path.remove(self)
                self._then()

        spec.loader.exec_module = load_and_tell  # type: ignore[method-assign]
        return spec


if __name__ == "__main__":
    _exit_process(main(sys.argv[1:]))
