"""Compiles the simulated CUDA and NCCL with g++, from headers in the packages of torch's wheel."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

_NATIVE = Path(__file__).parent / "native"
_RUNTIME = ("machine.cpp", "memory.cpp", "streams.cpp", "nccl.cpp")
# Number types that need further headers, and that no call here has.
_LEFT_OUT = tuple(f"-D__CUDA_{name}_H__" for name in ("FP4", "FP6", "FP8", "FP16", "BF16"))


class BuildError(RuntimeError):
    """The libraries cannot be built here; its text is the reason."""


@dataclass(frozen=True)
class Libraries:
    """The compiled libraries: the preloaded runtime, and the operators that follow torch."""

    runtime: Path
    operators: Path


def build(cache: Path | None = None) -> Libraries:
    """Compile the libraries for this Python's torch, unless the cache has them.

    Args:
        cache: Folder of compiled libraries; by default one of the user's cache.

    Raises:
        BuildError: There is no g++, or torch is no CUDA build, or a source does not compile.
    """
    cuda, nccl, torch = _headers()
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "simulated_gpu")
    cache.mkdir(parents=True, exist_ok=True)
    include = ("-I", str(cuda), "-I", str(nccl), "-I", str(torch / "include"))
    version = (torch / "version.py").read_text()
    runtime = (*_LEFT_OUT, "-O1", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1", *include)
    links = (f"-L{torch / 'lib'}", "-lc10", "-lc10_cuda", "-ltorch_cpu")
    return Libraries(
        _compile(cache, "runtime", _RUNTIME, (*runtime, "-ldl", "-lpthread"), version),
        _compile(cache, "operators", ("operators.cpp",), ("-O0", *include, *links), version),
    )


def _headers() -> tuple[Path, Path, Path]:
    """Return the folders of CUDA's and NCCL's headers and of torch."""
    found = importlib.util.find_spec("torch")
    site = Path(sysconfig.get_path("purelib"))
    cuda = sorted(site.glob("nvidia/cu*/include/cuda_runtime_api.h"))
    nccl = site / "nvidia/nccl/include"
    if found is None or found.origin is None or not cuda or not nccl.is_dir():
        raise BuildError("torch's CUDA build from PyPI is not installed here")
    if not (cuda[-1].parent / "crt").is_dir():
        raise BuildError("headers of CUDA are missing: pip install nvidia-cuda-crt")
    if shutil.which("g++") is None:
        raise BuildError("there is no g++: apt-get install g++")
    return cuda[-1].parent, nccl, Path(found.origin).parent


def _compile(
    cache: Path, name: str, sources: tuple[str, ...], options: tuple[str, ...], version: str
) -> Path:
    """Return the library of these sources, compiled unless the cache has it."""
    digest = hashlib.sha256(repr((options, version)).encode())
    for source in ("machine.h", *sources):
        digest.update((_NATIVE / source).read_bytes())
    made = cache / f"{name}-{digest.hexdigest()[:16]}.so"
    if made.exists():
        return made
    part = cache / f"{made.name}.{os.getpid()}"
    paths = [str(_NATIVE / source) for source in sources]
    command = ["g++", "-std=c++17", "-fPIC", "-shared", "-Wall", *paths, *options, "-o", str(part)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}:\n{done.stderr[-4000:]}")
    return part.rename(made)
