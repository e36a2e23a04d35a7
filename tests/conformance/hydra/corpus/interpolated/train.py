"""Interpolations of all kinds, and what becomes of them when the function changes a value."""

import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.utils import instantiate
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).parents[1]))
import seen


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(cfg: Any) -> None:
    """Look at it, with what refers to a value that is set here."""
    before = OmegaConf.to_yaml(cfg.model)
    cfg.data.vocab = 32000
    cfg.optim.lr *= 8
    cfg.need.me = 5
    after = [cfg.model.vocab, cfg.model.name, cfg.sched.peak, cfg.later, cfg.twin.lr, cfg.chain]
    after.append(instantiate({"_target_": "builtins.dict", "v": cfg.model.vocab}))
    seen.write(cfg, lazy=True, before=before, after=after)


if __name__ == "__main__":
    main()
