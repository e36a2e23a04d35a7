"""Nested defaults, packages, overrides of groups, and values that YAML has many forms for."""

import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import open_dict

sys.path.insert(0, str(Path(__file__).parents[1]))
import seen


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: Any) -> None:
    """Look at it; the config refuses new keys until it is opened."""
    errors = []
    try:
        cfg.new = 1
    except Exception as e:
        errors.append(type(e).__name__)
    seen.write(cfg, lazy=True, errors=errors)
    with open_dict(cfg):
        cfg.new = 1


if __name__ == "__main__":
    main()
