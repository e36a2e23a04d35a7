"""Resolvers of the user's own, registered in the module and in the main block."""

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).parents[1]))
import seen

SETTINGS = {"from": "module"}
OmegaConf.register_new_resolver("at_module", lambda: SETTINGS["from"])
OmegaConf.register_new_resolver("tup", lambda *items: tuple(items))
OmegaConf.register_new_resolver("path", Path)
OmegaConf.register_new_resolver("type", lambda name: {"int": int, "float": float}[name])
OmegaConf.register_new_resolver("make", lambda: {"first": 1, "second": [1, {"a": 2}]})
OmegaConf.register_new_resolver("eval", eval)
OmegaConf.register_new_resolver("times", lambda a, b: a * b)
OmegaConf.register_new_resolver("sibling", lambda key, _parent_: _parent_[key])
OmegaConf.register_new_resolver("root", lambda _root_: _root_["lr"] + 1)
OmegaConf.register_new_resolver("of_node", lambda: os.environ["CORPUS_NODE"])
OmegaConf.register_new_resolver("raises", lambda: 1 / 0)
OmegaConf.register_new_resolver("cached", lambda x: x, use_cache=True)


@hydra.main(version_base="1.2", config_path=".", config_name="config")
def main(cfg: Any) -> None:
    """Look at it, with what depends on a value that is set here."""
    cfg.lr *= 2
    seen.write(cfg, lazy=True, settings=SETTINGS, called=cfg.fn(3), twice=cfg.product)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    os.environ["CORPUS_SET"] = "in the main block"
    SETTINGS["from"] = "main block"
    OmegaConf.register_new_resolver("in_main", lambda x: f"main {x}")
    sys.argv.insert(2, "+appended=1")
    main()
