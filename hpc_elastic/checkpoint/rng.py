"""The random number generators of this process: Python's, NumPy's, torch's on CPU and GPUs.

Each rank saves and restores its own. A rank that has none in the checkpoint, since the world has
grown, gets them from a seed that depends on the step, the rank, and rank 0's saved state only: so
every restore of that checkpoint goes on alike, and no two ranks draw the same numbers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import struct
import sys
from collections.abc import Mapping
from typing import Any

import torch

from hpc_elastic.errors import CheckpointCorruptError


def capture() -> dict[str, Any]:
    """Return the states as JSON.

    NumPy's is its global generator's, if NumPy has been imported; the GPUs', all that this process
    can see, if CUDA is in use. Generators that the user made are his own to save.
    """
    states: dict[str, Any] = {"python": _of_python(), "torch": _text(torch.get_rng_state())}
    if "numpy" in sys.modules:
        states["numpy"] = _of_numpy()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = [_text(state) for state in torch.cuda.get_rng_state_all()]
    return states


def restore(states: Mapping[str, Any]) -> None:
    """Set the generators as `capture` found them.

    A GPU that there was not then keeps its state, and so does NumPy's if it was not imported.

    Raises:
        CheckpointCorruptError: the states are none.
    """
    try:
        _set_python(states["python"])
        torch.set_rng_state(_tensor(states["torch"]))
        if "numpy" in states:
            _set_numpy(states["numpy"])
        if "cuda" in states and torch.cuda.is_available():
            for device in range(min(len(states["cuda"]), torch.cuda.device_count())):
                torch.cuda.set_rng_state(_tensor(states["cuda"][device]), device)
    except (KeyError, TypeError, ValueError, RuntimeError, struct.error) as e:
        raise CheckpointCorruptError(f"no states of random number generators: {e}") from e


def derive(step: int, rank: int, of_first: Mapping[str, Any]) -> None:
    """Seed the generators of a rank that the checkpoint knows nothing of.

    Args:
        step: Of the checkpoint.
        rank: This process's.
        of_first: Rank 0's states.
    """
    source = json.dumps([step, rank, of_first], sort_keys=True).encode()
    seed = int.from_bytes(hashlib.sha256(source).digest()[:8], "little")
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _of_python() -> list[Any]:
    version, words, gauss = random.getstate()
    return [version, _base64(struct.pack(f"<{len(words)}I", *words)), gauss]


def _set_python(state: list[Any]) -> None:
    version, words, gauss = state
    data = base64.b64decode(words)
    random.setstate((version, struct.unpack(f"<{len(data) // 4}I", data), gauss))


def _of_numpy() -> list[Any]:
    name, words, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
    return [name, _base64(words.astype("<u4").tobytes()), position, has_gauss, gauss]


def _set_numpy(state: list[Any]) -> None:
    import numpy as np

    name, words, position, has_gauss, gauss = state
    keys = np.frombuffer(base64.b64decode(words), dtype="<u4")
    np.random.set_state((name, keys, position, has_gauss, gauss))


def _text(state: torch.Tensor) -> str:
    return _base64(bytes(state.tolist()))


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
