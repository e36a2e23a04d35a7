"""Make ``launcher=slurm`` and ``launcher=local`` exist in every Hydra script on this machine.

Hydra imports every module of ``hydra_plugins`` when it starts, so that a user's script need not
import anything of ours.
"""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from hpc_elastic._util import folder
from hydra_plugins.hpc_elastic_launcher.config_store import register

register()


class HpcElasticSearchPath(SearchPathPlugin):
    """Append the packaged config groups, so that the user's own of the same name come first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folder by path: ``pkg://`` finds it in a wheel only, not in a clone."""
        search_path.append("hpc_elastic", folder("conf").as_uri())
