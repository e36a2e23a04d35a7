"""The folder of one fragment that islands share, on a file system: implements `RoundFiles`.

Every call may block as long as the file system does; `diloco` calls them in a thread of its own.

A file of tensors is complete and undamaged, or refused. The format is safetensors', which any
reader knows. The entry ``__metadata__`` holds a checksum for each tensor, and one over all of that,
so that a reader may take a part of a file and verify it.

Reference: https://github.com/huggingface/safetensors#format
"""

# ruff: noqa: D102, D103  (some names say it all; others are of `RoundFiles`)

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import optim

from hpc_elastic import shared_files
from hpc_elastic.block_int8 import dequantize, quantize
from hpc_elastic.errors import ConfigError, DamagedFileError, RunDirectoryError
from hpc_elastic.islands import outer_round as rounds
from hpc_elastic.islands.outer_round import ContributionHead, OuterRound

_log = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]
OuterOptimizer = Callable[[list[torch.Tensor]], optim.Optimizer]
_PARAMETER, _OUTER, _SCALES = "parameters/", "outer/", "scales/"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100 << 20
"""As in the safetensors library."""
_BLOCK_BYTES = 16 << 20


class IslandFolder:
    """The rounds, states and contributions of one fragment.

    ``parameters`` are this island's, float32 in host memory: the initial ones if there is no round
    yet. Those of all rounds have the same names and shapes. A reader has no ``outer_optimizer``.
    """

    def __init__(
        self, path: Path, parameters: Tensors, outer_optimizer: OuterOptimizer | None = None
    ) -> None:
        self.path = path
        self._initial = parameters
        self._shapes = {name: tensor.shape for name, tensor in parameters.items()}
        self._outer_optimizer = outer_optimizer

    def names(self) -> Collection[str]:
        return shared_files.names_in(self.path)

    def read_round(self, index: int) -> OuterRound | None:
        try:
            text = shared_files.read_listed(self.path / rounds.round_name(index))
        except UnicodeDecodeError:
            return None
        return None if text is None else OuterRound.decode(text)

    def put_round(self, outer_round: OuterRound) -> None:
        index = outer_round.index
        with self._linked(index, rounds.round_name(index)) as staged, staged.open("x") as file:
            file.write(outer_round.encode())
            file.flush()
            os.fsync(file.fileno())

    def read_head(self, island: str, number: int) -> ContributionHead | None:
        try:
            with closing(TensorFile(self.path / rounds.contribution_name(island, number))) as file:
                return ContributionHead(**file.values)
        except (FileNotFoundError, DamagedFileError, TypeError):
            return None

    def put_contribution(
        self, island: str, number: int, head: ContributionHead, movement: Tensors
    ) -> None:
        """See `RoundFiles`; ``movement`` comes from `packed`."""
        with self._linked(head.base, rounds.contribution_name(island, number)) as staged:
            write_tensors(staged, movement, vars(head))

    def write_state(
        self, last: OuterRound | None, factors: Mapping[rounds.Key, float], name: str
    ) -> list[rounds.Key]:
        if last is None:
            self._write_state(name, self._initial, {})
            return []
        gradients = {n: torch.zeros(shape) for n, shape in self._shapes.items()}
        unreadable = []
        for (island, number), factor in factors.items():
            movement = self._read_movement(self.path / rounds.contribution_name(island, number))
            if movement is None:
                unreadable.append((island, number))
                continue
            for key, gradient in gradients.items():
                gradient.add_(movement[key], alpha=factor)
        if unreadable:
            return unreadable
        with closing(TensorFile(self.path / last.state)) as file:
            parameters = self._parameters_of(file)
            outer = self._outer_of(file)
        if factors:
            assert self._outer_optimizer is not None
            leaves = [p.requires_grad_() for p in parameters.values()]
            optimizer = self._outer_optimizer(leaves)
            optimizer.load_state_dict({**optimizer.state_dict(), "state": outer})
            for key, parameter in parameters.items():
                parameter.grad = gradients[key]
            optimizer.step()
            outer = optimizer.state_dict()["state"]
        self._write_state(name, parameters, outer)
        return []

    def read_parameters(self, last: OuterRound) -> Tensors:
        """Return the global parameters after a round.

        Raises FileNotFoundError if their file is missing, DamagedFileError if it is damaged, and
        ConfigError if they are those of another model.
        """
        with closing(TensorFile(self.path / last.state)) as file:
            return self._parameters_of(file)

    def empty(self, names: Collection[str]) -> None:
        def truncate() -> None:
            for name in names:
                with suppress(OSError), closing(TensorFile(self.path / name)) as file:
                    os.truncate(self.path / name, file.header_bytes)

        threading.Thread(target=truncate, name="emptying of contributions", daemon=True).start()

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            shared_files.remove_behind(self.path / name)

    @contextmanager
    def _linked(self, index: int, name: str) -> Iterator[Path]:
        """Yield the path of a file to write, and link it to its name then."""
        staged = self.path / rounds.staged_name(index, secrets.token_hex(8))
        try:
            yield staged
            try:
                os.link(staged, self.path / name)
            except OSError as e:
                if e.errno not in shared_files.NO_HARD_LINKS:
                    raise
                raise RunDirectoryError(
                    f"{self.path}: the file system has no hard links ({e.strerror}), by which "
                    "islands agree: give a folder on one that has, such as NFS, Lustre or GPFS"
                ) from e
        finally:
            shared_files.remove_behind(staged)

    def _parameters_of(self, file: TensorFile) -> Tensors:
        found = [n.removeprefix(_PARAMETER) for n in file.names if n.startswith(_PARAMETER)]
        parameters = {name: file.read(_PARAMETER + name) for name in found}
        if {name: tensor.shape for name, tensor in parameters.items()} != self._shapes:
            remedy = "it holds the parameters of another model: give another folder"
            raise ConfigError("folder", str(self.path), remedy)
        return {name: parameters[name] for name in self._shapes}

    def _outer_of(self, file: TensorFile) -> dict[int, dict[str, Any]]:
        """Return the state of the outer optimizer in a file, by parameter."""
        outer: dict[int, dict[str, Any]] = {int(i): dict(v) for i, v in file.values.items()}
        for name in file.names:
            if name.startswith(_OUTER):
                index, _, key = name.removeprefix(_OUTER).partition("/")
                outer.setdefault(int(index), {})[key] = file.read(name)
        return outer

    def _write_state(
        self, name: str, parameters: Tensors, outer: Mapping[int, Mapping[str, Any]]
    ) -> None:
        tensors = {_PARAMETER + n: p.detach() for n, p in parameters.items()}
        values: dict[int, dict[str, Any]] = {}
        for index, state in outer.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{_OUTER}{index}/{key}"] = value
                elif value is None or isinstance(value, bool | int | float):
                    values.setdefault(index, {})[key] = value
                else:
                    remedy = f"its state {key} is no tensor and no number: give another optimizer"
                    raise ConfigError("outer_optimizer", self._outer_optimizer, remedy)
        write_tensors(self.path / name, tensors, values)

    def _read_movement(self, path: Path) -> Tensors | None:
        """Return the tensors of a contribution; None if they are not to be counted."""
        try:
            with closing(TensorFile(path)) as file:
                movement = unpacked({name: file.read(name) for name in file.names}, self._shapes)
        except (FileNotFoundError, DamagedFileError):
            return None
        if movement is None or not are_finite(movement.values()):
            _log.warning("%s is discarded: another model's, or not finite", path)
            return None
        return movement


def are_finite(tensors: Collection[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors)


def packed(movement: Tensors, *, quantized: bool) -> Tensors:
    """Return the tensors of a contribution's file."""
    if not quantized:
        return movement
    tensors: Tensors = {}
    for name, tensor in movement.items():
        tensors[name], tensors[_SCALES + name] = quantize(tensor)
    return tensors


def unpacked(tensors: Tensors, shapes: Mapping[str, torch.Size]) -> Tensors | None:
    """Return the movement that `packed` was given, rounded; None if it has other shapes."""
    movement: Tensors = {}
    for name, shape in shapes.items():
        tensor, scales = tensors.get(name), tensors.get(_SCALES + name)
        if tensor is not None and scales is not None and tensor.numel() >= shape.numel():
            tensor = dequantize(tensor, scales, shape)
        if tensor is None or tensor.shape != shape:
            return None
        movement[name] = tensor
    return movement


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], values: Any) -> None:
    """Write a new file, and have the file system store it.

    If this fails, the file does not exist. ``values`` are any JSON, which the checksum covers.
    Raises ConfigError if a tensor has a type that the format lacks, and OSError if the file exists
    or cannot be written.
    """
    entries: dict[str, dict[str, Any]] = {}
    views: list[memoryview] = []
    begin = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ConfigError(f"tensor {name}", tensor.dtype, f"convert it to one of {[*_NAMES]}")
        raw: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        view = memoryview(raw)
        views.append(view)
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + len(view)],
            "xxh3_64": xxhash.xxh3_64_hexdigest(view),
        }
        begin += len(view)
    text = json.dumps({"values": values, "tensors": entries})
    plain = {n: {k: v for k, v in e.items() if k != "xxh3_64"} for n, e in entries.items()}
    metadata = {"hpc_elastic": text, "xxh3_64": xxhash.xxh3_64_hexdigest(text.encode())}
    header = json.dumps({"__metadata__": metadata, **plain}).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        for view in (memoryview(len(header).to_bytes(8, "little") + header), *views):
            rest = view
            while rest:
                rest = rest[os.write(fd, rest[:_BLOCK_BYTES]) :]
        os.fsync(fd)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


class TensorFile:
    """A file of `write_tensors` with its JSON ``values``, open for reading.

    ``names`` are those of the tensors, in the order in which they were written; ``header_bytes`` is
    the size of what stands before their data.
    """

    values: Any

    def __init__(self, path: Path) -> None:
        """Open the file, verify its header; OSError if unreadable, DamagedFileError if damaged."""
        shared_files.refresh(path)
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = int.from_bytes(self._read(8, 0), "little")
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            metadata = json.loads(self._read(size, 8))["__metadata__"]
            text = metadata["hpc_elastic"]
            if xxhash.xxh3_64_hexdigest(text.encode()) != metadata["xxh3_64"]:
                raise ValueError("another checksum")
            content = json.loads(text)
            self.values, self._entries = content["values"], content["tensors"]
            self.header_bytes, self.names = 8 + size, list(self._entries)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            self.close()
            if isinstance(e, DamagedFileError):
                raise
            raise DamagedFileError(f"the header of {path} is damaged: {e!r}") from e
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in host memory; OSError if unreadable, DamagedFileError if damaged."""
        entry = self._entries.get(name)
        if entry is None:
            raise DamagedFileError(f"{self._path} has no tensor {name}")
        begin, end = entry["data_offsets"]
        data = self._read(end - begin, self.header_bytes + begin)
        if xxhash.xxh3_64_hexdigest(data) != entry["xxh3_64"]:
            raise DamagedFileError(f"tensor {name} of {self._path} is damaged")
        dtype = _DTYPES[entry["dtype"]]
        if not data:
            return torch.empty(entry["shape"], dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(entry["shape"])

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _read(self, num_bytes: int, offset: int) -> bytearray:
        if offset + num_bytes > os.fstat(self._fd).st_size:
            raise DamagedFileError(f"{self._path} ends before byte {offset + num_bytes}")
        data = bytearray(num_bytes)
        view, done = memoryview(data), 0
        while done < num_bytes:
            got = os.preadv(self._fd, [view[done : done + _BLOCK_BYTES]], offset + done)
            if not got:
                raise DamagedFileError(f"{self._path} ends before byte {offset + num_bytes}")
            done += got
        return data
