# A package for a Spack repository: packages/py_hpc_elastic/package.py there. `./scripts/release`
# writes a copy with the checksum of the sdist into dist/packaging. It was compiled, and its
# dependencies compared with pyproject.toml, not audited by Spack.
from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyHpcElastic(PythonPackage):
    """Elastic PyTorch runs on Slurm.

    They start when one node is free, grow, shrink and survive preemption.
    """

    homepage = "https://pypi.org/project/hpc_elastic/"
    pypi = "hpc_elastic/hpc_elastic-0.2.0.tar.gz"

    license("Apache-2.0")

    version("0.2.0", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")

    depends_on("py-torch@2.8:+distributed", type=("build", "run"))
    depends_on("py-submitit@1.5.3:", type=("build", "run"))
    depends_on("py-hydra-core@1.3.2:1.4", type=("build", "run"))
    depends_on("py-omegaconf@2.3:", type=("build", "run"))
    depends_on("py-click@8.1:", type=("build", "run"))
    depends_on("py-prometheus-client@0.20:", type=("build", "run"))
    depends_on("py-jinja2@3.1:", type=("build", "run"))
    depends_on("py-psutil@5.9.3:", type=("build", "run"))
    depends_on("py-rich@13:", type=("build", "run"))
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-xxhash@3.4:", type=("build", "run"))
    depends_on("py-msgspec@0.21:", type=("build", "run"))

    conflicts("platform=darwin")
    conflicts("platform=windows")
