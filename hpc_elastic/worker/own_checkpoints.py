"""The checkpoints that an unchanged script writes itself, and how a restart continues from one.

A restart adds words to the script's command, such as ``--resume out/last.pt``: those of
``launcher.resume_args``, or the one option of the script that takes a checkpoint (`find_option`).
Which file it is follows from what this run has written, and from nothing else:

- `torch.save` to a path writes under another name, asks the fence, and replaces the file in one
  step. So the file before stays until the new one is complete.
- Before that, the run notes the path and the identity of the file: its size, and a digest of its
  end, where torch's format has the checksums of all parts. A file that was renamed, linked or
  copied is known by it. A torn file, a later change, and a file of another run are not.
- A folder of Accelerate's ``save_state`` is noted once it is complete.

The first worker of a group that creates the file of the group's entry decides for all of them. A
worker of an old group that writes late adds to its own notes alone.

An option that was found is a guess. So a checkpoint counts only if it holds each optimizer that has
stepped, and a number, such as the epoch. Rank 0 ends the run before its first step if the script
has not read the checkpoint, or if the optimizer has no state.

    <run>/own_checkpoints/r<entry>-<rank>.jsonl    what a rank of a group has written
    <run>/own_checkpoints/r<entry>.json            what a group continues from, and older notes
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import glob
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_elastic import shared_files
from hpc_elastic.errors import InexactError
from hpc_elastic.run.directory import RunDir
from hpc_elastic.run.fencing import check_fence, fencing_token
from hpc_elastic.worker import optimizer_steps
from hpc_elastic.worker.shared_page import ROUND_VARIABLE

KEY = "launcher.resume_args"
_NEWEST = re.compile(r"\{newest:([^{}]+)\}")
_TAIL_BYTES = 1 << 20
_MOST_PARTS = 10_000  # of a list or dict in which optimizers are looked for
_MOST_NOTES = 32
"""How many checkpoints of earlier groups are known."""
_RESUME = re.compile(r"--(resume|continue)([-_](from|path|file|ckpt|checkpoint))*")
_LOAD = re.compile(r"--(load[-_])?(ckpt|checkpoint)([-_](path|file))?")
_MEANS_RESUME = re.compile(r"(?i)(?!.*\b(sav|writ|out|stor|dir|folder)).*\b(resum|continu|restart)")


# ---- the option


def find_option(tree: ast.AST) -> list[str] | None:
    """Return the names of a script's one option that takes a checkpoint, the longest first.

    A name such as ``--checkpoint`` counts if its help says so. None if there is none, or several.
    """
    found = [names for node in ast.walk(tree) if (names := _names_of_option(node))]
    return found[0] if len(found) == 1 else None


def _names_of_option(node: ast.AST) -> list[str] | None:
    if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "add_argument":
        return None
    names = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
    given = {each.arg: each.value for each in node.keywords}
    constants = {name: getattr(value, "value", ...) for name, value in given.items()}
    kind = ast.unparse(given["type"]) if "type" in given else "str"
    takes_path = (
        kind.rpartition(".")[2] in ("str", "Path")
        and constants.get("action", "store") == "store"
        and constants.get("nargs") in (None, "?")
        and isinstance(constants.get("default"), str | None)
        and given.keys().isdisjoint(["choices", None])
    )
    is_meant = any(map(_RESUME.fullmatch, names)) or (
        any(map(_LOAD.fullmatch, names)) and _MEANS_RESUME.match(str(constants.get("help")))
    )
    return sorted(names, key=len, reverse=True) if takes_path and is_meant else None


def _value_of(names: Sequence[str], command: Sequence[str]) -> str | None:
    """Return what a command gives for an option; None if it does not."""
    named = "|".join(map(re.escape, names)) or "(?!)"
    found = re.search(rf"(?:^|\0)(?:{named})[=\0]([^\0]*)", "\0".join(command))
    return found[1] if found else None


# ---- what was written


@dataclass(frozen=True)
class _Note:
    """A checkpoint that a worker has written: a file, or a folder with files."""

    path: str
    entry: int  # that formed the group
    time: float
    rank: int
    parts: dict[str, str]
    """The identity of each file by its path in the folder; of a file itself, by ``""``."""
    is_whole: bool
    """Whether all is in it that a restart is known to need."""
    has_moments: bool
    """Whether an optimizer had a state then."""

    def find(self, pattern: str) -> Path | None:
        """Return where it is, as it was written: at its path, or a file under another name."""
        own = Path(self.path)
        if pattern:
            paths = set(map(Path, glob.glob(pattern, recursive=True)))  # noqa: PTH207 - absolute
        else:
            names = shared_files.names_in(own.parent) if "" in self.parts else [own.name]
            paths = {own.parent / name for name in names}
        for path in sorted(paths, key=lambda path: (path != own, path)):
            if all(_identity(path / name, known) == known for name, known in self.parts.items()):
                return path
        return None


def _identity(path: Path, expected: str = "") -> str | None:
    """Return the identity of a file; None if it is none, or has not the size that is expected."""
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if not expected or expected.startswith(f"{size}:"):
                    file.seek(max(0, size - _TAIL_BYTES))
                    return f"{size}:{hashlib.sha256(file.read()).hexdigest()[:32]}"
    return None


def _num_optimizers(value: Any, depth: int = 3) -> int:
    """Return how many states of optimizers a checkpoint holds."""
    if isinstance(value, Mapping):
        if {"state", "param_groups"} <= value.keys():
            return 1
        value = list(value.values())
    is_short = isinstance(value, list | tuple) and len(value) <= _MOST_PARTS
    return sum(_num_optimizers(each, depth - 1) for each in value) if is_short and depth else 0


def _is_whole(value: Any) -> bool:
    """Return whether a checkpoint has all optimizers, and a number such as the epoch."""
    num_needed = max(1, len(optimizer_steps.stepped_optimizers()))
    return (
        isinstance(value, Mapping)
        and _num_optimizers(value) >= num_needed
        and any(isinstance(each, int) and not isinstance(each, bool) for each in value.values())
    )


def _entry_of(name: str) -> int:
    """Return the entry of the group that has made a file; -1 for another file."""
    return max(shared_files.numbers_in([re.split(r"[-.]", name)[0]], "r"), default=-1)


# ---- a worker


class OwnCheckpoints:
    """What the script of this worker writes, and what it continues from."""

    def __init__(self, run: RunDir | None = None, given: list[str] | None = None) -> None:
        """Begin for a worker of a run that runs a command; without a run, nothing is done."""
        self._folder = Path() if run is None else run.own_checkpoints
        self._is_active = run is not None and given != []
        self.given = given or []
        self._pattern = ""
        self._option: list[str] = []
        self._name = " ".join(_NEWEST.sub("...", word) for word in self.given)
        self._entry = _entry_of(fencing_token() or "r0")
        self._rank = int(os.environ.get("RANK", 0))
        self._decision: dict[str, Any] = {"files": []}
        self._was_read = self._is_checked = self._has_told = False

    def _print(self, text: str) -> None:
        if self._rank == 0:
            print(f"hpc_elastic: {text}", file=sys.stderr)

    def continued(self, inside: Sequence[str]) -> list[str]:
        """Return what follows the interpreter in a command, with what makes it continue."""
        command = list(inside)
        if self._is_active and not self.given and command[0] != "-m":
            with suppress(OSError, SyntaxError, ValueError):  # Python reports it
                source = Path(command[0]).read_bytes()
                if b"add_argument" in source:  # else the start of a worker need not parse it
                    self._option = find_option(ast.parse(source)) or []
                self._name = self._option[0] if self._option else ""
        self._is_active &= bool(self.given or self._option)
        if not self._is_active:
            return command
        for pattern in _NEWEST.findall(" ".join(self.given)):
            self._pattern = str(Path(pattern).absolute())
        decision = self._decision = self._decide()
        names = self._option or [word.partition("=")[0] for word in self.given if word[:1] == "-"]
        theirs = _value_of(names, command)
        if decision["files"]:
            at = time.strftime("%F %T", time.localtime(decision["time"]))
            file = os.path.relpath(decision["files"][0])
            how = f"{self._name} in the place of {theirs}" if theirs else self._name
            self._print(f"continues from {file}, which this run wrote at {at}, by {how}")
        elif os.environ.get(ROUND_VARIABLE, "1") != "1":
            how = f"with {theirs}" if theirs else f"without {self._name}"
            self._print(f"begins {how}: {decision['why']}")
        at_end = command.index("--") if "--" in command else len(command)
        return [*command[:at_end], *decision["words"], *command[at_end:]]

    # ---- the decision

    def _decide(self) -> dict[str, Any]:
        """Return what this group continues from, the same on all workers."""
        shared_files.make_folder(self._folder)
        own = self._folder / f"r{self._entry}.json"
        names = shared_files.names_in(self._folder)
        if own.name not in names:
            old = [name for name in names if 0 <= _entry_of(name) < self._entry]
            notes = self._read_notes(old)
            kept = [asdict(note) for note in notes[-_MOST_NOTES:]]
            decision = {**self._choose(notes), "notes": kept, "by": os.urandom(8).hex()}
            if shared_files.create_atomic(own, json.dumps(decision)):
                for name in old:
                    (self._folder / name).unlink(missing_ok=True)
        return shared_files.read_json(own) or {}

    def _read_notes(self, names: Sequence[str]) -> list[_Note]:
        found: list[Any] = []
        for path in (self._folder / name for name in names):
            with suppress(FileNotFoundError):  # another worker has decided
                if path.suffix == ".json":
                    found += (shared_files.read_json(path) or {}).get("notes", [])
                else:
                    found += [json.loads(line) for line in shared_files.lines_in(path)]
        return sorted((_Note(**each) for each in found), key=lambda note: (note.entry, note.time))

    def _choose(self, notes: Sequence[_Note]) -> dict[str, Any]:
        """Return the newest that is there as it was written, and the words that name it."""
        nothing: dict[str, Any] = {"files": [], "words": []}
        if self._option:
            notes = [note for note in notes if note.is_whole]
            if {note.path for note in notes} - {note.path for note in notes if note.rank == 0}:
                return {**nothing, "why": f"each rank writes a checkpoint of its own (give {KEY})"}
        for note in reversed(notes):
            found = note.find(self._pattern)
            if found is None:
                continue
            words = [str(found).join(_NEWEST.split(word)[::2]) for word in self.given]
            is_named = self._option or self._pattern  # else the script finds one of them itself
            return {
                "files": [str(found), *([] if is_named else [each.path for each in notes])],
                "words": words or [self._name, str(found)], "time": note.time,
                "has_moments": note.has_moments and bool(self._option),
            }  # fmt: skip
        why = "this run has written no checkpoint yet"
        if notes:
            why = f"what this run wrote last, {notes[-1].path}, is not there as it was written"
        return {**nothing, "why": why}

    # ---- what the script reads and writes

    def watch_torch(self) -> None:
        """Write whole what the script saves, and observe what it reads; once it has torch."""
        torch: Any = sys.modules["torch"]
        optimizer: Any = sys.modules["torch.optim.optimizer"]
        load = torch.load

        @functools.wraps(load)
        def load_noted(f: Any, *args: Any, **options: Any) -> Any:
            name = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)
            if isinstance(name, str | os.PathLike):
                path, files = os.path.realpath(name), map(os.path.realpath, self._decision["files"])
                self._was_read |= any(f"{path}/".startswith(f"{each}/") for each in files)
            return load(f, *args, **options)

        torch.save, torch.load = self._watched_save(torch.save), load_noted
        optimizer.register_optimizer_step_pre_hook(self._check)

    def _check(self, optimizer: Any, *_: object) -> None:
        """End the run if the script is about to train without what it was given."""
        if self._is_checked or self._rank != 0 or not self._decision["files"]:
            return
        if optimizer_steps.is_called_from("torch.distributed.checkpoint.state_dict"):
            return  # by which torch makes a state, to load into it
        self._is_checked = True
        why = None
        if not self._was_read:
            why = "the script has not read it"
        elif self._decision["has_moments"] and not optimizer.state:
            why = f"the script has restored no state of {type(optimizer).__name__}"
        if why is not None:
            remedy = f"{why}: name what continues it as {KEY}; or begin a new run with {KEY}=[]"
            raise InexactError("command", " ".join(self._decision["words"]), remedy)

    def _watched_save(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def save_whole(obj: Any, f: Any, *args: Any, **options: Any) -> Any:
            if not self._is_active or not self._counts(obj, f):
                return save(obj, f, *args, **options)
            target = Path(os.path.realpath(f))
            staged = self._stage(target)
            try:
                saved = save(obj, staged, *args, **options)
                shared_files.sync_to_disk(staged)
                self._add(Path(f).absolute(), {"": staged}, is_whole=_is_whole(obj))
                check_fence()
                staged.replace(target)
            except BaseException:
                staged.unlink(missing_ok=True)
                raise
            return saved

        return save_whole

    def _counts(self, obj: Any, f: Any) -> bool:
        """Return whether what is saved may be a checkpoint, and is saved to a file by its name."""
        if not isinstance(f, str | os.PathLike) or (os.path.lexists(f) and not Path(f).is_file()):
            return False
        matches = fnmatch.fnmatch(str(Path(f).absolute()), self._pattern)
        has_checksums = sys.modules["torch"].serialization.get_crc32_options()
        return has_checksums and (matches or _num_optimizers(obj) > 0)

    def _stage(self, target: Path) -> Path:
        """Return another name for a file to be written, and remove those of earlier groups."""
        prefix = f".{target.name}.{hashlib.sha256(str(self._folder).encode()).hexdigest()[:8]}-"
        for name in shared_files.names_in(target.parent):
            entry = _entry_of(name.removeprefix(prefix)) if name.startswith(prefix) else -1
            if 0 <= entry < self._entry:
                (target.parent / name).unlink(missing_ok=True)
        return target.with_name(f"{prefix}r{self._entry}-{os.urandom(4).hex()}")

    def watch_accelerate(self) -> None:
        """Note the folders that Accelerate has written; once the script has it."""
        kind: Any = sys.modules["accelerate.accelerator"].Accelerator
        save_state = kind.save_state

        @functools.wraps(save_state)
        def save_noted(accelerator: Any, *args: Any, **options: Any) -> Any:
            made = save_state(accelerator, *args, **options)
            if self._is_active and self._rank == 0:
                # those of other ranks may not be complete; they are not needed
                files = [p for p in Path(made).rglob("*") if not p.match("random_states_*")]
                parts = {str(path.relative_to(made)): path for path in files if path.is_file()}
                is_plain = re.match("NO$|MULTI_", accelerator.distributed_type.value)
                is_whole = bool(is_plain) and any(name.startswith("optimizer") for name in parts)
                self._add(Path(made).absolute(), parts, is_whole=is_whole)
            return made

        kind.save_state = save_noted

    def _add(self, path: Path, parts: Mapping[str, Path], *, is_whole: bool) -> None:
        """Note a checkpoint, and print once what a restart would do."""
        known = {name: _identity(part) or "" for name, part in parts.items()}
        moments = any(each.state for each in optimizer_steps.stepped_optimizers())
        note = _Note(str(path), self._entry, time.time(), self._rank, known, is_whole, moments)
        notes = self._folder / f"r{self._entry}-{self._rank}.jsonl"
        with open(notes, "a", opener=shared_files.owner_writes) as file:
            file.write(json.dumps(asdict(note)) + "\n")
        shared_files.sync_to_disk(notes)
        if (is_whole or self.given) and not self._has_told:
            self._has_told = True
            shown = f"what this run has written last, such as {os.path.relpath(path)}"
            self._print(f"a restart continues from {shown}, by {self._name}")
