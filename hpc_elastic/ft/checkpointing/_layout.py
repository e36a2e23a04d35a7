"""A state taken apart into JSON and the bytes of its tensors, and put together again.

The *layout* is one JSON object: the tree without its tensors, and for each tensor its path, type,
shape, strides and place in one stream of bytes. Equal layouts (by `StateLayout.digest`) mean that
two peers have the same step, the same values and tensors of the same form, so that their bytes may
be mixed. Small tensors come first: they are taken from one peer (`small_bytes`), because what
replicas do not have in common, such as a random generator's state or running means, is small.

A DTensor is this rank's shard and its `Sharding`, in words: a mesh is a thing of one process. The
counterpart at the receiver, the worker of the same rank, makes a DTensor of the shard on a mesh of
its own, that of another DTensor that is sharded in the same way. The state of an optimizer, which a
fresh replica does not have, is sharded as the parameters are.
"""

from __future__ import annotations

import itertools
import json
import mmap
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from hpc_elastic import tree_codec
from hpc_elastic.errors import ConfigError
from hpc_elastic.ft.checkpointing.transport import HealError, UnusableStateError
from hpc_elastic.transport.messages import read_fields

SMALL_BYTES = 64 << 10
_TENSORS = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Spec:
    """One tensor of a layout; ``begin`` is where its bytes are in the stream."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class StateLayout:
    """What a peer has to know to receive a state."""

    step: int
    tree: Any
    specs: tuple[Spec, ...]
    small_bytes: int
    num_bytes: int

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> StateLayout:
        """Return what `to_json` made; UnusableStateError for a refusal, or else HealError."""
        try:
            known = json.loads(raw)
            if "refused" in known:
                raise UnusableStateError(f"the peer cannot send its state: {known['refused']}")
            return read_fields(cls, known)
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise HealError(f"not the layout of a state: {raw[:80]!r} ({e})") from e


def encode_refusal(step: int, reason: str) -> bytes:
    """Return what a peer gets in place of a layout if there can be none."""
    return json.dumps({"step": step, "refused": reason}).encode()


def digest(raw: bytes) -> str:
    return blake2b(raw, digest_size=16).hexdigest()


class PackedState:
    """A state taken apart; its tensors stay where they are.

    Attributes:
        leaves: The state's own object for each spec.
        raw: The bytes of each spec's tensor, where it is; an empty one's are anywhere.
    """

    def __init__(self, state: object, step: int) -> None:
        """Take a state apart; raise ConfigError with the path of what cannot be sent."""
        self.leaves: list[Any] = []
        self.dtensors: dict[str, Any] = {}
        self._tensors: list[torch.Tensor] = []
        self._paths: list[str] = []
        self._known: dict[object, int] = {}
        encoded = tree_codec.encode(state, "", self._encode_leaf)
        self.raw = [as_bytes(t) for t in self._tensors]
        sizes = [len(raw) for raw in self.raw]
        order = sorted(range(len(sizes)), key=lambda i: sizes[i] > SMALL_BYTES)
        ends = list(itertools.accumulate(sizes[i] for i in order))
        begins = {i: end - sizes[i] for i, end in zip(order, ends, strict=True)}
        specs = tuple(
            Spec(path, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.stride(),
                 begins[i], sizes[i])
            for i, (path, t) in enumerate(zip(self._paths, self._tensors, strict=True))
        )  # fmt: skip
        small = sum(n for n in sizes if n <= SMALL_BYTES)
        self.layout = StateLayout(step, encoded, specs, small, sum(sizes))

    def _encode_leaf(self, path: str, leaf: Any) -> tuple[str, Any] | None:
        key = f"state: {path}"
        if type(leaf) is np.ndarray:  # a subclass, as a masked array, has more than its numbers
            try:
                array = plain(torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy()))
            except (TypeError, ValueError) as e:  # texts and objects; negative strides
                raise ConfigError(key, leaf.dtype, f"torch has no such array: {e}") from e
            return "array", self._add(path, leaf, array)
        if not isinstance(leaf, torch.Tensor):
            return None
        local = local_part(leaf)
        if type(local) not in _TENSORS or local.layout != torch.strided or local.is_quantized:
            what = f"{type(local).__name__} of layout {local.layout}, dtype {local.dtype}"
            raise ConfigError(key, what, "only dense tensors can be sent: convert it")
        if local.is_meta:
            raise ConfigError(key, "a meta tensor", "it has no data: initialise it")
        number = self._add(path, leaf, plain(local))
        is_parameter = isinstance(leaf, torch.nn.Parameter)
        kept = {"requires_grad": leaf.requires_grad} if is_parameter else {}
        if not is_dtensor(leaf):
            return ("parameter", {"tensor": number, **kept}) if kept else ("tensor", number)
        self.dtensors[path] = leaf
        return "dtensor", {"tensor": number, **asdict(Sharding.of(leaf)), **kept}

    def _add(self, path: str, leaf: Any, tensor: torch.Tensor) -> int:
        """Return its number: a tied one has the other's, a copy made to be sent its own."""
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        number = self._known.setdefault(key if tensor.numel() else path, len(self._tensors))
        if number == len(self._tensors):
            self._tensors.append(tensor)
            self.leaves.append(leaf)
            self._paths.append(path)
        return number


class Target:
    """Memory to receive a state into, and the state itself once it is there."""

    def __init__(
        self,
        layout: StateLayout,
        like: Callable[[], object] | None = None,
        *,
        in_place: bool,
        device: str = "cpu",
        staged: bool = False,
    ) -> None:
        """Make the memory for a state to be received.

        ``like`` returns the own state; it is called for the meshes of its DTensors, and for
        ``in_place``. In place, tensors go into those of the same form there that are on ``device``,
        and all others (the peer may have more) into fresh memory on the CPU. ``staged`` also
        receives what has the same form on another device: into memory on the CPU, from where `land`
        copies it.
        """
        self.layout = layout
        self._get_own = like
        self.in_place: dict[int, torch.Tensor] = {}
        """The own memory of tensors that are received into it, by number."""
        found: dict[int, torch.Tensor] = {}
        for number, spec in enumerate(layout.specs):
            own = self._own.get(spec.path) if in_place else None
            if own is not None and own.can_hold(spec):
                is_direct = own.raw.device.type == device
                if is_direct or staged:
                    self.in_place[number] = own.raw
                if is_direct:
                    found[number] = own.raw
        fresh = allocate([s.num_bytes for n, s in enumerate(layout.specs) if n not in found])[::-1]
        self.raw = [found[n] if n in found else fresh.pop() for n in range(len(layout.specs))]

    @cached_property
    def _own_state(self) -> PackedState:
        try:
            return PackedState(None if self._get_own is None else self._get_own(), self.layout.step)
        except ConfigError as e:
            raise UnusableStateError(f"this replica's own {e}") from e

    @cached_property
    def _own(self) -> dict[str, _OwnTensor]:
        found: dict[str, _OwnTensor] = {}
        state = self._own_state
        for leaf, raw, spec in zip(state.leaves, state.raw, state.layout.specs, strict=True):
            # Two keys with one path, such as 1 and "1": neither is taken for the other.
            found[spec.path] = _OwnTensor(leaf, raw[:0] if spec.path in found else raw, spec)
        return found

    def land(self, number: int) -> None:
        """Copy a tensor that was received elsewhere into the own memory; not yet on other streams.

        The version that autograd counts is not changed: the gradients of this step are of no use.
        """
        own = self.in_place[number]
        if own.data_ptr() != self.raw[number].data_ptr():
            own.data.copy_(self.raw[number])

    def state(self) -> Any:
        """Return the state; call it once all bytes have arrived.

        Raises UnusableStateError if the layout is none, or if the peer has a DTensor that is
        sharded in a way in which nothing is sharded here.
        """
        made: dict[tuple[str, str], Any] = {}

        def decode_leaf(kind: str, of: Any) -> Any:
            if kind not in ("tensor", "parameter", "dtensor", "array"):
                raise KeyError(kind)
            key = kind, repr(of)
            if key not in made:  # tied ones stay tied
                made[key] = self._make_leaf(kind, of)
            return made[key]

        try:
            return tree_codec.decode(self.layout.tree, decode_leaf)
        except ValueError as e:
            text = f"not a state that a peer of this version sent: {e}"
            raise UnusableStateError(text) from e

    def _make_leaf(self, kind: str, of: Any) -> Any:
        number = of["tensor"] if kind in ("parameter", "dtensor") else of
        spec, raw = self.layout.specs[number], self.raw[number]
        if number in self.in_place:
            return self._own[spec.path].leaf
        tensor = raw.view(getattr(torch, spec.dtype)).as_strided(spec.shape, spec.stride)
        if kind == "array":
            return tensor.numpy()
        if kind == "tensor":
            return tensor
        if kind == "dtensor":
            tensor = self._make_dtensor(spec.path, tensor, read_fields(Sharding, of))
        if "requires_grad" in of:
            tensor = torch.nn.Parameter(tensor, bool(of["requires_grad"]))
        return tensor

    def _make_dtensor(self, path: str, shard: torch.Tensor, sharding: Sharding) -> Any:
        """Return a DTensor of a shard, on a mesh of this process."""
        from torch.distributed.tensor import DTensor

        owns = self._own_state.dtensors
        own = owns.get(path)
        if own is None:
            alike = [t for t in owns.values() if sharding.is_alike(Sharding.of(t))]
            if len({t.device_mesh for t in alike}) > 1:
                raise UnusableStateError(
                    f"state: {path} is a DTensor at the peer on {sharding.text}, and there are "
                    "several such meshes here: give their dimensions different names"
                )
            own = alike[0] if alike else None
        elif Sharding.of(own) != sharding or local_part(own).shape != shard.shape:
            raise UnusableStateError(
                f"state: {path} is a DTensor of shape {sharding.shape} at the peer, on "
                f"{sharding.text}, here of {tuple(own.shape)} on {Sharding.of(own).text}: all "
                "replica groups need the same model on the same mesh; states are not resharded"
            )
        if own is None:
            raise UnusableStateError(
                f"state: {path} is a DTensor at the peer, on {sharding.text}, and no tensor of "
                "this replica's state is sharded so: all replica groups need the same mesh; a "
                "transport without a Manager needs state_dict=, which returns this replica's state"
            )
        return DTensor.from_local(
            shard.to("cpu" if sharding.device == "cpu" else own.device_mesh.device_type),
            own.device_mesh, own.placements,
            run_check=False, shape=torch.Size(sharding.shape), stride=sharding.stride,
        )  # fmt: skip


@dataclass(frozen=True)
class Sharding:
    """How a DTensor is sharded, without the processes: equal at the counterparts of two groups.

    ``placements`` are as torch writes them, one for each dimension of the mesh; ``device`` is the
    type of the device that holds the shard, with CPU offload not that of the mesh. Shape and stride
    are those of the whole tensor.
    """

    placements: tuple[str, ...]
    mesh: tuple[int, ...]
    names: tuple[str, ...]
    device: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> Sharding:
        mesh = tensor.device_mesh
        return cls(
            tuple(repr(p) for p in tensor.placements), tuple(mesh.shape),
            tuple(mesh.mesh_dim_names or ()), local_part(tensor).device.type,
            tuple(tensor.shape), tuple(tensor.stride()),
        )  # fmt: skip

    @property
    def text(self) -> str:
        names = f" {self.names}" if self.names else ""
        return f"a mesh of {self.mesh}{names} with ({', '.join(self.placements)})"

    def is_alike(self, other: Sharding) -> bool:
        """Return whether a tensor of another shape is sharded in the same way."""
        keys = ("placements", "mesh", "names")
        return all(getattr(self, key) == getattr(other, key) for key in keys)


@dataclass(frozen=True)
class _OwnTensor:
    """A tensor of this replica, and its bytes as they would be sent."""

    leaf: Any
    raw: torch.Tensor
    spec: Spec

    def can_hold(self, spec: Spec) -> bool:
        """Return whether the bytes of ``spec`` may be written into the leaf's own memory."""
        own = self.spec
        same_form = (own.dtype, own.shape, own.stride) == (spec.dtype, spec.shape, spec.stride)
        if not same_form or len(self.raw) != spec.num_bytes:
            return False
        if isinstance(self.leaf, np.ndarray):
            return bool(self.leaf.ctypes.data == self.raw.data_ptr())
        return not len(self.raw) or bool(local_part(self.leaf).data_ptr() == self.raw.data_ptr())


def is_dtensor(tensor: object) -> bool:
    """Return whether it is a DTensor; importing their module would take a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(leaf: Any) -> Any:
    """Return this rank's part of a DTensor; other tensors as they are."""
    return leaf.to_local() if is_dtensor(leaf) else leaf


# ---- The bytes of tensors, and memory to receive them into


Part = tuple[int, int, Callable[[int, int], memoryview]]
"""Place in a stream of bytes, length, and how to get a range of it."""
_HUGE_PAGE_BYTES = 2 << 20
_SHARED_BYTES = 64 << 20
_ALIGNMENT = 64


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without history, its elements side by side; a copy only if it has to be."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    expected = 1  # the elements may lie side by side in any order of dimensions
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and step != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a plain tensor, as bytes in one dimension."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def view(raw: torch.Tensor) -> memoryview:
    return memoryview(raw.numpy())  # type: ignore[arg-type]  # NumPy's stubs before 3.12


def allocate(sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return fresh bytes on the CPU for each size, in huge pages if they are many.

    Fresh memory in small pages costs several times what the copy into it does, and so do the ends
    of tensors that fill no huge page. So tensors share memory, but each has a storage of its own. A
    tensor that is kept keeps no more than `_SHARED_BYTES` of others.
    """
    made: list[torch.Tensor] = []
    begin = 0
    while begin < len(sizes):
        end, places = begin, [0]
        while end < len(sizes) and (end == begin or places[-1] + sizes[end] <= _SHARED_BYTES):
            places.append(-(-(places[-1] + sizes[end]) // _ALIGNMENT) * _ALIGNMENT)
            end += 1
        memory = _map_memory(places[-1]) if places[-1] else b""
        for size, place in zip(sizes[begin:end], places, strict=False):
            part = torch.empty(0, dtype=torch.uint8)
            if size:
                part = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=place)
            made.append(part)
        begin = end
    return made


def _map_memory(num_bytes: int) -> mmap.mmap:
    is_large = num_bytes >= 2 * _HUGE_PAGE_BYTES
    if is_large:
        num_bytes = -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if is_large:
        with suppress(OSError):  # a hint: where the system refuses it, pages are small
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def reader(raw: torch.Tensor) -> Callable[[int, int], memoryview]:
    """Return a function that gives a range of a tensor's bytes; on a GPU it copies just that.

    Call it when the bytes are final for the calling thread's stream. Other threads may then ask for
    the ranges.
    """
    if raw.device.type == "cpu":
        buffer = view(raw)
        return lambda begin, end: buffer[begin:end]
    if raw.device.type != "cuda":
        return lambda begin, end: view(raw[begin:end].cpu())
    written = torch.cuda.Event()  # type: ignore[no-untyped-call]
    written.record(torch.cuda.current_stream(raw.device))
    stream = torch.cuda.Stream(raw.device)  # type: ignore[no-untyped-call]

    def read(begin: int, end: int) -> memoryview:
        # A stream of its own: the training's next kernels are not waited for.
        with torch.cuda.device(raw.device), torch.cuda.stream(stream):
            bounce = torch.empty(end - begin, dtype=torch.uint8, pin_memory=True)
            stream.wait_event(written)
            bounce.copy_(raw[begin:end], non_blocking=True)
        stream.synchronize()
        return view(bounce)

    return read


def stream_parts(layout: StateLayout, raw: Sequence[torch.Tensor]) -> list[Part]:
    """Return the bytes of a state's tensors as the parts of one stream, in its order."""
    rows = zip(layout.specs, raw, strict=True)
    ordered = sorted((row for row in rows if row[0].num_bytes), key=lambda row: row[0].begin)
    return [(spec.begin, spec.num_bytes, reader(tensor)) for spec, tensor in ordered]


# ---- Digests of tensors' bits
# The bytes of a tensor are 64-bit words; their sum over each row of `_ROW_WORDS`, modulo 2**64, is
# multiplied by an odd number of that row, and the products are added. Integer sums depend on no
# order, so the digest is deterministic on any device, and reads memory once, at its speed. A change
# within one word changes the sum of its row by less than 2**64 and not by 0, and an odd factor
# keeps that, so every flipped bit, or any other change of one word, changes the digest. Several
# changed words go unnoticed if their differences cancel: with probability 2**-64 for random
# changes, 1/128 for two flipped bits in one row, and far less in different rows. Tensors of one
# state are combined likewise, by their place.


_ROW_WORDS = 4096
_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
"""An odd number whose multiples by small odd numbers are spread over 64 bits."""


def digest_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the digest of each of these tensors; their devices are waited for once each."""
    digests = [digest_tensor(tensor) for tensor in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for number, digest in enumerate(digests):
        by_device.setdefault(digest.device, []).append(number)
    found: dict[int, int] = {}
    for numbers in by_device.values():
        values = torch.stack([digests[n] for n in numbers]).tolist()
        found |= zip(numbers, values, strict=True)
    return [found[number] for number in range(len(tensors))]


def digest_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the digest of a tensor's bits: one int64, on its device."""
    raw = as_bytes(plain(tensor))
    if raw.storage_offset() % 8:  # torch has no words at such an address
        raw = raw.clone()
    num_words = len(raw) // 8
    words, rest = raw[: 8 * num_words].view(torch.int64), raw[8 * num_words :]
    num_rows = num_words // _ROW_WORDS
    sums = [words[num_rows * _ROW_WORDS :].sum()[None]]
    if num_rows:
        sums.append(words[: num_rows * _ROW_WORDS].view(num_rows, _ROW_WORDS).sum(1))
    if len(rest):
        places = torch.arange(0, 8 * len(rest), 8, device=rest.device)
        sums.append((rest.to(torch.int64) << places).sum()[None])
    all_sums = torch.cat(sums)
    if len(all_sums) == 1:
        return all_sums[0]
    odd = torch.arange(1, 2 * len(all_sums), 2, device=all_sums.device)
    return (all_sums * (odd * _signed(_FACTOR))).sum()


def combine_digests(digests: Sequence[int]) -> int:
    """Return one digest of several, which depends on their order."""
    return _signed(sum(d * (2 * n + 1) * _FACTOR for n, d in enumerate(digests)))


def _signed(number: int) -> int:
    """Return a number modulo 2**64 as an int64."""
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number
