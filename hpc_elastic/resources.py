"""Where the files that ship with the package lie: config groups and sbatch templates.

They stand at the top of the clone (``conf/``, ``sbatch_templates/``) and in a wheel inside the
package (``hpc_elastic/conf``). In a clone that is on sys.path, by an editable install or by
PYTHONPATH, only the former exist, as siblings of the package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Resource = Literal["conf", "sbatch_templates"]


def folder(name: Resource) -> Path:
    """Return the folder of packaged files called ``name``.

    Raises:
        FileNotFoundError: the installation is incomplete; it should be made anew.
    """
    package = Path(__file__).resolve().parent
    for candidate in (package / name, package.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"hpc_elastic has no {name}/ in {package} or beside it: reinstall it")
