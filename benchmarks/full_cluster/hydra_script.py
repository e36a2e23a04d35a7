"""The training as a script of Hydra, for hydra-submitit-launcher."""

import os
from pathlib import Path
from typing import Any

import hydra

from full_cluster.work import train_fixed


@hydra.main(version_base=None, config_path=None)
def main(cfg: Any) -> None:
    train_fixed(Path(cfg.folder), int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"]))


if __name__ == "__main__":
    main()
