"""A fake Slurm for tests of training scripts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_elastic.testing.fake_slurm import FakeSlurm

__all__ = ["FakeSlurm"]


def __getattr__(name: str) -> Any:
    """Import the fake at first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hpc_elastic.testing import fake_slurm

    return getattr(fake_slurm, name)
