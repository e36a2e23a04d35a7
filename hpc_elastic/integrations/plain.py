"""A plain training loop, without a change of the script: it loses no step at a change of the group.

A worker calls `install` once its script has imported torch (``launcher.adapt``). What a loop is, is
seen when it runs: a ``for`` of the script draws batches of a DataLoader, an optimizer steps between
them, and a ``for`` over a ``range`` is around. When the next batch is asked for, the step is done
with all that belongs to it: schedule, scaler, average. There all ranks save, if the group has
agreed on that step (`should_checkpoint`):

- each object with ``state_dict`` and ``load_state_dict`` that has a name in the script or in one of
  the functions between the two loops, by that name;
- lists, dicts, and attributes of the script's own objects, where they are plain values and have
  changed since the first batch;
- what an iteration of a loop finds from the one before it (`worker.script_loops`);
- the epoch, and how many samples of it are trained.

The next worker runs the script from its first line. The loop over the epochs begins with the one
that was interrupted. Its first iterator over the same loader yields the rest of the epoch's order,
divided among the present ranks. At its first batch everything is put back, since by then the
script has built it again. All ranks compare what they have, and differences end the run.

After an epoch's last step the group is asked at the first batch of the next epoch, so that no
restart begins behind the last batch, where variables of the loop would be missing.

What is not known is not guessed: `UnknownStateError` has the reason, and the script stays as it is.
What shows only later, such as a value that differs between the ranks, ends the saving with another
line. A checkpoint that cannot be restored exactly ends the run.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib
import math
import os
import sys
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from hpc_elastic import tree_codec
from hpc_elastic.errors import CheckpointError, ConfigError, InexactError
from hpc_elastic.integrations.script_state import (
    CONTENT,
    Place,
    UnknownStateError,
    carried_values,
    content_of,
    find_items,
    find_objects,
    find_place,
    modules_of_callers,
    plain_values,
    refuse_objects,
    text_of,
)
from hpc_elastic.run.directory import default_checkpoints
from hpc_elastic.worker import optimizer_steps, process_group, reporting
from hpc_elastic.worker.script_loops import LOOPS

_NAME = "plain loop"
_KEY = "loop"
"""Of the position among the objects of a checkpoint; the script's have others."""
_ORDERS = (DistributedSampler, RandomSampler, SequentialSampler)
_FRAMEWORKS = ("lightning", "pytorch_lightning", "lightning_fabric", "transformers")
_OUR_API = (
    "hpc_elastic.checkpoint.checkpointer", "hpc_elastic.data.sampler", "hpc_elastic.data.stream",
    "hpc_elastic.islands", "hpc_elastic.worker.checkpoint_trigger",
)  # fmt: skip
"""Modules that are loaded once a script, or an adapter, uses them."""
_OUR_ADAPTERS = ("hpc_elastic.integrations.lightning", "hpc_elastic.integrations.huggingface")


class _Batches:
    """One pass over a loader."""

    def __init__(self, training: _Training, loader: Any, iterator: Any, rest: int | None) -> None:
        self.loader, self.rest = loader, rest
        self.num_drawn = 0
        self.num_before = 0  # batches drawn at the step before
        self.has_ended = False
        self._training, self._iterator = training, iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        """Return the number of batches, of a continued epoch that of its rest."""
        if self.rest is None:
            return len(self.loader)
        size: int = self.loader.batch_size
        return self.rest // size if self.loader.drop_last else math.ceil(self.rest / size)

    def __next__(self) -> Any:
        self._training.before_draw(self)
        try:
            batch = next(self._iterator)
        except BaseException:
            self.has_ended = True
            raise
        self.num_drawn += 1
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


# ---- the order of the data


def rest_of(
    order: list[int], consumed: int, rank: int, world_size: int, *, drop: bool
) -> list[int]:
    """Return a rank's share of the rest of an epoch, as DistributedSampler divides a whole one."""
    rest = order[consumed:]
    if drop:
        del rest[len(rest) // world_size * world_size :]
    else:
        num_more = -len(rest) % world_size
        rest += (order * math.ceil(num_more / max(1, len(order))))[:num_more]
    return rest[rank::world_size]


def refuse_loader(loader: Any) -> None:
    """Raise UnknownStateError if the order of a loader's samples is not known."""
    from hpc_elastic.integrations.loader import why_not_exact

    if reason := why_not_exact(loader):
        raise UnknownStateError(reason)
    sampler, world_size = loader.sampler, int(os.environ.get("WORLD_SIZE", 1))
    if isinstance(sampler, DistributedSampler):
        if (sampler.num_replicas, sampler.rank) != (world_size, int(os.environ.get("RANK", 0))):
            raise UnknownStateError("its DistributedSampler has not the ranks of the group")
    elif _most_workers() > 1:
        raise UnknownStateError(f"each worker draws all samples ({type(sampler).__name__})")


def _most_workers() -> int:
    from hpc_elastic.integrations.loader import own_settings

    settings, on_node = own_settings()
    return settings.nodes.max * on_node


def _of_state(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _state_of(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)


class _Position:
    """Where a training is, and its plain values, as an object of a checkpoint."""

    fits_any_world_size = True

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


# ---- the training


@dataclass(frozen=True)
class _Values:
    """The plain values of a training."""

    names: dict[str, dict[str, Any]]  # of the loops, by the key of the loop
    others: dict[str, Any]
    left_out: list[str]
    """Sums of an epoch that begin anew."""


class _Training:
    """The training of this process, as far as it has been seen."""

    def __init__(self) -> None:
        self._step = 0
        self._level: int | None = None  # None: not known yet; 0: it is none of ours
        self._loader: Any = None  # of the training
        self._epoch: int | None = None  # of its last step
        self._drawn_from: Any = None
        self._stepped = False
        self._stepped_with: Any = None  # the loader that was drawn from before the step
        self._is_due = False  # whether the group has not been asked about the last step
        self._per_step = 1  # batches of a step
        self._passes = weakref.WeakSet[_Batches]()
        self._position = _Position()
        self._checkpointer: Any = None
        self._objects: dict[str, Any] = {}
        self._baseline: dict[str, str] | None = None
        """The plain values of this process before its first batch, as text."""
        self._keys: tuple[str, str] | None = None  # of the loops
        self._entries = Counter[str]()  # of the loops over ranges
        self._trouble: str | None = None  # of the last save
        self._record: dict[str, Any] | None = None  # from which this process continues
        self._has_looked = self._in_epoch = False
        self._why_not = ""
        self._is_foreign: bool | None = None  # whether another part sees to the training
        self._consumed = 0  # samples of the present epoch before this process
        self._rest: tuple[Any, list[int] | None] | None = None
        self._generators = weakref.WeakKeyDictionary[Any, torch.Tensor]()
        """The generator of a RandomSampler before it has drawn its order."""

    # ---- hooks

    def on_step(self, optimizer: object) -> None:
        """Record a step of an optimizer."""
        if self._level is None and self._drawn_from is None and self._is_left_alone():
            self._level = 0
        if self._level != 0 and self._find_record() is not None:
            assert self._record is not None
            raise InexactError(
                "script", self._record["epochs"],
                "the training begins without the state of its checkpoint, which was saved in this "
                f"loop: let the script train in the same order as before{self._why_not}",
            )  # fmt: skip
        if self._level is None and self._drawn_from is None:
            self._settle(UnknownStateError("no batch was drawn from a DataLoader"))
        self._stepped, self._stepped_with = True, self._drawn_from

    def begin_pass(self, loader: Any, begin: Callable[[Any], Any]) -> Any:
        """Return what iterates over a loader: the whole epoch, or the rest of it."""
        caller = str(sys._getframe(2).f_globals.get("__name__"))
        is_ours = caller.startswith(("hpc_elastic.data", "hpc_elastic.integrations"))
        if self._level == 0 or is_ours or caller.partition(".")[0] in _FRAMEWORKS:
            return begin(loader)
        if self._baseline is None and LOOPS.active:
            self._note_baseline(loader)
        rest = None
        self._generators.pop(loader.sampler, None)
        if self._in_epoch and self._is_continued(loader):
            rest, self._consumed = self._find_rest(loader)
            self._in_epoch, self._loader = False, loader
        elif loader is self._loader:
            self._consumed = 0
            LOOPS.first_index.clear()
        batches = _Batches(self, loader, begin(loader), rest)
        self._passes.add(batches)
        return batches

    def before_draw(self, batches: _Batches) -> None:
        """Do what is due before a batch is drawn."""
        if self._record is not None and batches.rest is not None and not batches.num_drawn:
            self._restore(batches)
        if self._stepped and self._stepped_with is batches.loader:
            self._stepped, self._is_due = False, True
            self._step += 1
            if LOOPS.values:
                key, names = next(iter(LOOPS.values.items()))
                raise InexactError(
                    "script", key, f"{min(names)} was not put back there: begin a new run"
                )
            if batches.num_drawn:  # else the loop was left before its end
                self._per_step = batches.num_drawn - batches.num_before
                batches.num_before = batches.num_drawn
            if self._level is None:
                self._decide(batches)
            elif self._level == 2 and batches.loader is not self._loader:
                self._follow(batches.loader)
            self._epoch = LOOPS.active[0].value if LOOPS.active else None
        if self._level == 2 and self._is_due and batches.loader is self._loader:
            reporting.report(step=self._step)
            if not batches.num_drawn or batches.num_drawn < len(batches):
                self._is_due = False
                self._save_if_due(batches)
        self._drawn_from = batches.loader

    def _follow(self, loader: Any) -> None:
        """Go on with a loader that the script has made anew for an epoch, if it is one."""
        old = self._loader
        try:
            refuse_loader(loader)
            place = find_place(loader)
            is_there = old is not None and self._keys == (place.epochs.key, place.inner.key)
            is_next = is_there and place.epochs.value != self._epoch
            if not (is_next and _form(loader) == _form(old)):
                raise UnknownStateError("there is a second training loop, or a second loader")
        except UnknownStateError as e:
            self._give_up(str(e))
        else:
            self._loader, self._consumed = loader, 0

    def order(self, sampler: Any, begin: Callable[[Any], Iterator[int]]) -> Iterator[int]:
        """Return a sampler's order: the whole one, or the rest of an epoch."""
        if self._rest is not None and self._rest[0] is sampler:
            rest, self._rest = self._rest[1], None
            return iter(rest) if rest is not None else self._draw_again(sampler, begin)
        return self._noted(sampler, begin) if type(sampler) is RandomSampler else begin(sampler)

    def begin_epochs(self, key: str, values: range) -> range:
        """Return the rest of a loop over a range that begins."""
        self._entries[key] += 1
        record = self._find_record()
        if record is None or key != record["epochs"] or self._in_epoch:
            return values
        epoch = record["epoch"]
        if epoch in values:
            self._in_epoch, self._is_foreign = True, False
            if names := record["names"].get(key):
                LOOPS.values[key] = dict(names)
            return values[values.index(epoch) :]
        if (values.start - epoch) * values.step > 0:  # it has read a later checkpoint of its own
            self._record, self._step = None, record["step"]
            return values
        raise InexactError(
            "script", f"{key} in {values}",
            f"the checkpoint of step {record['step']} is of {epoch}, which is not in it: run the "
            "same range again, or begin a new run",
        )  # fmt: skip

    def end_epochs(self, key: str) -> None:
        """Hold the objects of a training no longer, once its epochs are over."""
        if self._keys is not None and key == self._keys[0]:
            self._release()

    def _release(self) -> None:
        checkpointer, self._checkpointer, self._objects = self._checkpointer, None, {}
        self._loader = self._drawn_from = self._stepped_with = None
        if checkpointer is not None:
            with contextlib.suppress(CheckpointError):  # it is in the log
                checkpointer.close()

    # ---- the order of the data

    def _noted(self, sampler: Any, begin: Callable[[Any], Iterator[int]]) -> Iterator[int]:
        self._generators[sampler] = (sampler.generator or torch.default_generator).get_state()
        yield from begin(sampler)

    def _draw_again(self, sampler: Any, begin: Callable[[Any], Iterator[int]]) -> Iterator[int]:
        """Yield the rest of the order that a RandomSampler had drawn."""
        generator = sampler.generator or torch.default_generator
        now = generator.get_state()
        generator.set_state(self._generators[sampler])
        order = list(begin(sampler))
        if sampler.generator is None:
            generator.set_state(now)
        yield from order[self._consumed :]

    def _is_continued(self, loader: Any) -> bool:
        record = self._record
        assert record is not None
        try:
            place = find_place(loader)
        except UnknownStateError as e:
            self._why_not = f" ({e})"
            return False
        return (place.epochs.key, place.inner.key) == (record["epochs"], record["batches"])

    def _find_rest(self, loader: Any) -> tuple[int, int]:
        """Set the order of an epoch that goes on; return this rank's samples, and those before."""
        record, sampler = self._record, loader.sampler
        assert record is not None
        try:
            refuse_loader(loader)
        except UnknownStateError as e:
            raise self._refusal(str(e)) from e
        mine, theirs = _described(loader), record["data"]
        if mine != theirs:
            raise self._refusal(f"its data was {theirs}, and is {mine}")
        consumed = record["consumed"]
        world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        if isinstance(sampler, DistributedSampler):
            whole: Any = DistributedSampler(
                loader.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed
            )
            whole.set_epoch(sampler.epoch)
            order = list(whole)
            rest = rest_of(order, consumed, rank, world_size, drop=sampler.drop_last)
        else:
            rest = list(range(consumed, len(loader.dataset)))
        if not isinstance(sampler, RandomSampler):
            self._rest = sampler, rest
        elif record["generator"] is not None:  # else it had not drawn its order
            self._generators[sampler] = _state_of(record["generator"])
            self._rest = sampler, None
        each = loader.batch_size * world_size
        index, odd = divmod(consumed, each)
        if odd:
            index -= index % record["per_step"]
        LOOPS.first_index[record["batches"]] = index
        return len(rest), consumed

    # ---- the decision

    def _decide(self, batches: _Batches) -> None:
        """Find out what can be done for this training, after its first step."""
        self._level = 2
        if self._is_left_alone():
            self._level = 0
            return
        problem: str | None = None
        place = None
        try:
            place = self._examine(batches)
        except UnknownStateError as e:
            problem = str(e)
        if not _trains_together():
            problem = problem or "the workers have no DistributedDataParallel over the whole group"
        elif problem := _first(problem):
            pass
        else:
            assert place is not None
            try:
                values = self._collect(place)
                place.forget_locals()
                self._begin_saving()
            except (UnknownStateError, CheckpointError, ConfigError) as e:
                problem = str(e)
        if problem is not None:
            self._settle(UnknownStateError(problem))
            return
        self._loader = batches.loader
        self._print_level(values.left_out)

    def _is_left_alone(self) -> bool:
        """Return whether a framework or this package's own API sees to the training."""
        if self._is_foreign is None:
            loaded = sys.modules.keys() - LOOPS.loaded_before
            checkpointer = sys.modules.get("hpc_elastic.checkpoint.checkpointer")
            uses_ours = loaded.isdisjoint(_OUR_ADAPTERS) and (
                not loaded.isdisjoint(_OUR_API) or (checkpointer and checkpointer.is_any_open())
            )
            self._is_foreign = uses_ours or any(
                name.partition(".")[0] in _FRAMEWORKS for name in modules_of_callers()
            )
        return self._is_foreign

    def _examine(self, batches: _Batches) -> Place:
        refuse_loader(batches.loader)
        place = find_place(batches.loader)
        if self._entries[place.epochs.key] > 1:
            raise UnknownStateError("the loop over the epochs runs a second time")
        assert LOOPS.script is not None
        if "zero_grad" not in LOOPS.script.methods:
            raise UnknownStateError(
                "the script does not call zero_grad(), so gradients may be kept"
            )
        self._objects = find_objects(place)
        refuse_objects(self._objects)
        self._keys = place.epochs.key, place.inner.key
        return place

    def _note_baseline(self, loader: Any) -> None:
        """Note the plain values that the script has made, before a loop changes them."""
        with contextlib.suppress(UnknownStateError):
            place = find_place(loader)
            if not self._is_left_alone():  # else this would be done after a step
                importlib.import_module("hpc_elastic.checkpoint.checkpointer")
            plain = plain_values(place, find_objects(place))
            self._baseline = {name: text_of(value) or "" for name, value in plain.items()}
            place.forget_locals()

    def _begin_saving(self) -> None:
        from hpc_elastic.checkpoint import Checkpointer

        if self._checkpointer is None:
            self._checkpointer = Checkpointer({**self._objects, _KEY: self._position})

    def _settle(self, why: UnknownStateError) -> None:
        """Leave the script as it is."""
        self._level = 0
        if not self._is_left_alone():
            from hpc_elastic.integrations.loader import print_level

            reason = f"{why}; it continues from its own checkpoints, if it reads them"
            print_level(_NAME, "", level=1, why=reason)

    def _give_up(self, why: str) -> None:
        """End the saving; what is saved stays, and is right."""
        self._release()
        self._settle(UnknownStateError(f"from step {self._step} on, {why}"))

    def _print_level(self, left_out: list[str]) -> None:
        from hpc_elastic.integrations.loader import print_level

        size = self._loader.batch_size
        why = (
            "no step is lost, and a restart goes on inside its epoch; the batch is that of the "
            f"script, {size} samples a worker, and changes with their number"
        )
        if left_out:
            why += f"; of such an epoch, {', '.join(left_out)} adds up the rest only"
        print_level(_NAME, "state, position", level=2, why=why)

    # ---- saving

    def _save_if_due(self, batches: _Batches) -> None:
        from hpc_elastic.worker.checkpoint_trigger import should_checkpoint

        if not should_checkpoint(self._step):
            return
        problem, place = self._trouble, None
        try:
            others = [p for p in self._passes if p is not batches and not p.has_ended]
            if any(each.num_drawn for each in others):
                raise UnknownStateError("a second loader is drawn from inside of the loop")
            place = find_place(batches.loader)
            if self._keys != (place.epochs.key, place.inner.key):
                raise UnknownStateError("there is a second training loop, or a second loader")
            if self._entries[place.epochs.key] > 1:
                raise UnknownStateError("the loop over the epochs runs a second time")
        except UnknownStateError as e:
            problem = problem or str(e)
        if problem := _first(problem):
            self._give_up(problem)
            return
        assert place is not None
        try:
            values = self._collect(place)
        except UnknownStateError as e:
            self._give_up(str(e))
            return
        self._position.state = self._describe(place, batches, values)
        place.forget_locals()
        try:
            self._checkpointer.save(self._step)
        except (CheckpointError, ConfigError) as e:
            self._trouble = str(e)  # other ranks learn it at the next save

    def _describe(self, place: Place, batches: _Batches, values: _Values) -> dict[str, Any]:
        loader, world_size = batches.loader, int(os.environ.get("WORLD_SIZE", 1))
        generator = self._generators.get(loader.sampler)
        if generator is None and getattr(loader.sampler, "generator", None) is not None:
            generator = loader.sampler.generator.get_state()
        return {
            "step": self._step,
            "epochs": place.epochs.key,
            "epoch": place.epochs.value,
            "batches": place.inner.key,
            "consumed": self._consumed + batches.num_drawn * loader.batch_size * world_size,
            "per_step": self._per_step,
            "data": _described(loader),
            "generator": None if generator is None else _of_state(generator),
            "names": values.names,
            "others": values.others,
        }

    def _collect(self, place: Place) -> _Values:
        """Return the plain values, alike on all ranks; UnknownStateError on all if they are not."""
        carried, plain, left_out = {}, dict[str, Any](), list[str]()
        problem, begins_anew = None, set[tuple[str, str]]()
        try:
            for key, name, value, is_shown in carried_values(place, self._objects):
                if text_of(value) is not None:
                    carried[key, name] = value
                    if is_shown:
                        begins_anew.add((key, name))
                elif is_shown:
                    left_out.append(name)
                else:
                    what = f"{name} ({type(value).__name__}) is carried from one iteration"
                    raise UnknownStateError(f"{what} to the next")
            before = self._baseline or {}
            plain = plain_values(place, self._objects)
            plain = {n: value for n, value in plain.items() if before.get(n) != text_of(value)}
            if changed := [n for n in plain if n.endswith(CONTENT)]:
                name = changed[0].removesuffix(CONTENT)
                raise UnknownStateError(f"{name} changes, and holds more than is saved")
        except UnknownStateError as e:
            problem = str(e)
        texts = {" ".join(at): text_of(value) or "" for at, value in carried.items()}
        texts |= {name: text_of(value) or "" for name, value in plain.items()}
        texts["the position"] = repr([place.epochs.value, self._step, self._consumed])
        alike = _alike(texts)
        for at in begins_anew:
            if " ".join(at) not in alike:
                texts.pop(" ".join(at))
                del carried[at]
                left_out.append(at[1])
        if different := sorted(texts.keys() - alike):
            problem = problem or f"{different[0]} is not the same on all workers"
        if problem := _first(problem):
            raise UnknownStateError(problem)
        names: dict[str, dict[str, Any]] = {}
        for (key, name), value in carried.items():
            names.setdefault(key, {})[name] = value
        return _Values(names, plain, sorted(set(left_out)))

    # ---- continuing

    def _find_record(self) -> dict[str, Any] | None:
        """Return where the newest checkpoint of this run is, at first use."""
        if not self._has_looked:
            self._has_looked = True
            from hpc_elastic.checkpoint.store import Store, read_manifest

            store = Store(default_checkpoints())
            for step in store.steps():
                try:
                    value = read_manifest(store.stored(step)).values.get(_KEY)
                except CheckpointError:
                    continue
                if isinstance(value, dict) and "epochs" in value:
                    self._record = tree_codec.decode(value, _no_leaf)
                break
        return self._record

    def _restore(self, batches: _Batches) -> None:
        """Put everything back, before the first batch of an epoch that goes on (collective)."""
        record = self._record
        assert record is not None
        try:
            place = find_place(batches.loader)
            self._objects = find_objects(place)
        except UnknownStateError as e:
            raise self._refusal(str(e)) from e
        self._begin_saving()
        self._checkpointer.load_latest()
        found = self._position.state
        if text_of(found) != text_of(record):
            raise self._refusal("it is another one than the newest that this worker has seen")
        _compare(self._objects, found)
        self._put_back(place, record["others"])
        if values := record["names"].get(place.inner.key):
            LOOPS.values[place.inner.key] = dict(values)
        self._step, self._record = record["step"], None
        reporting.report(step=self._step)

    def _put_back(self, place: Place, saved: Mapping[str, Any]) -> None:
        assert LOOPS.script is not None
        names, missing = place.frames[0][1].f_globals, dict(saved)
        for name in LOOPS.script.set_by_functions & saved.keys():
            names[name] = missing.pop(name)
        for name, item in find_items(place, self._objects).items():
            for part in [p for p in missing if p == name or p.startswith(f"{name}.")]:
                _assign(item, part.removeprefix(name), missing.pop(part))
        if missing:
            raise self._refusal(f"{min(missing)} is in it, and not in the script")

    def _refusal(self, why: str) -> InexactError:
        assert self._record is not None
        step = self._record["step"]
        return InexactError(
            "checkpoint", f"step {step}",
            f"the training cannot continue from it: {why}; begin a new run, or remove it to "
            "continue from the script's own checkpoints",
        )  # fmt: skip


def _assign(item: Any, attribute: str, value: Any) -> None:
    if attribute:
        *path, last = attribute.removeprefix(".").split(".")
        for each in path:
            item = vars(item)[each]
        vars(item)[last] = value
    elif isinstance(item, list):
        item[:] = value
    elif isinstance(item, dict | set):
        item.clear()
        item.update(value)


def _no_leaf(kind: Any, _value: object) -> Any:
    raise KeyError(kind)


def _form(loader: Any) -> tuple[object, ...]:
    return loader.batch_size, loader.drop_last, type(loader.sampler)


def _described(loader: Any) -> dict[str, Any]:
    sampler, data = loader.sampler, loader.dataset
    found: dict[str, Any] = {"sampler": type(sampler).__name__, "samples": len(data)}
    if isinstance(sampler, DistributedSampler):
        found |= {name: getattr(sampler, name) for name in ("seed", "shuffle", "epoch")}
    while isinstance(data, Subset):
        found["split"] = zlib.crc32(repr(list(data.indices)).encode(), found.get("split", 0))
        data = data.dataset
    return found


def _trains_together() -> bool:
    """Return whether all ranks make the same steps, so that they may communicate."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1:
        return True
    models = optimizer_steps.live_objects(DistributedDataParallel)
    return process_group.size() == world_size and any(
        model.process_group.size() == world_size for model in models
    )


def _first(problem: str | None) -> str | None:
    """Return the first rank's problem, the same on all ranks; None if there is none."""
    if (process_group.size() or 1) == 1:
        return problem
    return next((each for each in process_group.gather_json(problem) if each), None)


def _alike(texts: Mapping[str, str]) -> set[str]:
    """Return the names whose texts are the same on all ranks."""
    mine = {name: zlib.crc32(text.encode()) for name, text in texts.items()}
    if (process_group.size() or 1) == 1:
        return set(mine)
    rows = process_group.gather_json(mine)
    return {name for name, digest in mine.items() if all(r.get(name) == digest for r in rows)}


def _compare(objects: Mapping[str, Any], position: Mapping[str, Any]) -> None:
    """Refuse a restored state that is not the same on all ranks, and name the object."""
    kinds = torch.nn.Module | torch.optim.Optimizer
    texts = {name: _digest(each) for name, each in objects.items() if isinstance(each, kinds)}
    texts["the position"] = text_of(position) or ""
    different = sorted(texts.keys() - _alike(texts))
    if different:
        remedy = "the ranks have restored different states: begin a new run"
        raise InexactError("checkpoint", different[0], remedy)


def _digest(item: Any) -> str:
    digest = 0
    for leaf in tree_codec.leaves(item.state_dict()):
        data: Any = repr(leaf).encode()
        if isinstance(leaf, torch.Tensor):
            data = content_of(leaf)
        digest = zlib.crc32(data, digest)
    return str(digest)


@functools.cache
def install() -> None:
    """Look at the loops of this process, unless its script uses this package."""
    if LOOPS.script is not None and "hpc_elastic" in LOOPS.script.packages:
        return
    training = _Training()
    iterate = DataLoader.__iter__

    @functools.wraps(iterate)
    def iterate_elastically(loader: Any) -> Any:
        return training.begin_pass(loader, iterate)

    DataLoader.__iter__ = iterate_elastically  # type: ignore[method-assign]
    orders: Any = _ORDERS
    for kind in orders:
        kind.__iter__ = _watched(kind.__iter__, training)
    LOOPS.on_begin, LOOPS.on_end = training.begin_epochs, training.end_epochs
    LOOPS.is_compiling = torch.compiler.is_compiling
    optimizer_steps.watch(training.on_step)


def _watched(begin: Any, training: _Training) -> Any:
    @functools.wraps(begin)
    def order(sampler: Any) -> Any:
        return training.order(sampler, begin)

    return order
