"""A script that asks for the behaviour of an earlier Hydra, in the variable CORPUS_BASE."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import hydra

sys.path.insert(0, str(Path(__file__).parents[1]))
import seen

BASE = os.environ["CORPUS_BASE"]
GIVEN: dict[str, Any] = {} if BASE == "unset" else {"version_base": BASE}


@hydra.main(config_path="conf", config_name="config", **GIVEN)
def main(cfg: Any) -> None:
    """Look at it, and write into the working directory."""
    Path("written.txt").write_text(str(cfg.group.name))
    logging.getLogger("own").info("from a logger with handlers")
    other = hydra.compose("config", ["group=b"])
    seen.write(cfg, composed=other, name=logging.getLogger(__name__).name)


if __name__ == "__main__":
    main()
