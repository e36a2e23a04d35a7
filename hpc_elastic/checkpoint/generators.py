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
from hpc_elastic.worker import process_group


def capture_generators() -> dict[str, Any]:
    """Return the states as JSON.

    NumPy's is its global generator's, if NumPy has been imported; the GPUs', all that this process
    can see, its own first, if CUDA is in use.
    """
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, _base64(struct.pack(f"<{len(words)}I", *words)), gauss],
        "torch": _base64(bytes(torch.get_rng_state().tolist())),
    }
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = [name, _base64(keys.astype("<u4").tobytes()), *rest]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        of_gpus, own = torch.cuda.get_rng_state_all(), process_group.gpu().index
        states["gpus"] = [_base64(bytes(s.tolist())) for s in of_gpus[own:] + of_gpus[:own]]
    return states


def restore_generators(states: Mapping[str, Any]) -> None:
    """Set the generators as `capture_generators` found them; else CheckpointCorruptError.

    A GPU that there was not then keeps its state, and so does NumPy's if it was not imported.
    """
    try:
        version, words, gauss = states["python"]
        data = base64.b64decode(words)
        random.setstate((version, struct.unpack(f"<{len(data) // 4}I", data), gauss))
        torch.set_rng_state(_tensor(states["torch"]))
        if "numpy" in states:
            import numpy as np

            name, keys, *rest = states["numpy"]
            np.random.set_state((name, np.frombuffer(base64.b64decode(keys), dtype="<u4"), *rest))
        if states.keys() & {"cuda", "gpus"} and torch.cuda.is_available():
            count, own = torch.cuda.device_count(), process_group.gpu().index
            for key, first in (("cuda", 0), ("gpus", own)):  # "cuda": by index, before 0.3
                for i, text in enumerate(states.get(key, ())[:count]):
                    torch.cuda.set_rng_state(_tensor(text), (first + i) % count)
    except (KeyError, TypeError, ValueError, RuntimeError, struct.error) as e:
        raise CheckpointCorruptError(f"no states of random number generators: {e}") from e


def derive_generators(step: int, rank: int, of_first: Mapping[str, Any]) -> None:
    """Seed the generators of a rank that the checkpoint of a step knows nothing of."""
    source = json.dumps([step, rank, of_first], sort_keys=True).encode()
    seed = int.from_bytes(hashlib.sha256(source).digest()[:8], "little")
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8, device="cpu")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
