"""The fake Slurm of the distribution `hpc_elastic_testing`; the extra ``testing`` installs it."""

try:
    from hpc_elastic_testing import (
        Completed,
        FakeCommandError,
        FakeConfig,
        FakeSlurm,
        FakeSlurmError,
    )
except ImportError as e:
    raise ImportError(
        f"the fake Slurm is not installed ({e}): pip install 'hpc_elastic[testing]', or in a "
        "clone pip install ./tools/hpc_elastic_testing"
    ) from e

__all__ = ["Completed", "FakeCommandError", "FakeConfig", "FakeSlurm", "FakeSlurmError"]
