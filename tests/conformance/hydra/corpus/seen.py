"""What a function sees of its config, and of the process around it, as JSON."""

import json
import logging
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, Node, OmegaConf, UnionNode
from omegaconf.errors import OmegaConfBaseException


def _text(value: object) -> str:
    """Return a value or a type without what differs from process to process."""
    return repr(value).partition(" at 0x")[0]


def _value_at(parent: Any, key: Any) -> str:
    try:
        return f"{type(parent[key]).__name__} {_text(parent[key])}"
    except OmegaConfBaseException as e:
        return f"{type(e).__name__}: {_text(str(e).splitlines()[0])}"


def nodes_of(node: Any, path: str = "") -> dict[str, list[str]]:
    """Return class, text, value, types and flags of each node of a config, by its path."""
    meta, raw = node._metadata, node._value()
    own = [type(node).__name__, str(OmegaConf.is_interpolation(node)), str(meta.optional)]
    own += [_text(meta.ref_type), _text(meta.object_type), _text(sorted(meta.flags.items()))]
    own += [_text(getattr(meta, name, None)) for name in ("key_type", "element_type")]
    found = {path: own}
    inner: Any = []
    if isinstance(node, UnionNode) and isinstance(raw, Node):
        return {**found, **nodes_of(raw, f"{path}|")}
    if isinstance(node, DictConfig | ListConfig) and isinstance(raw, dict | list):
        inner = raw.items() if isinstance(raw, dict) else enumerate(raw)
    else:
        own.append(_text(raw))
    for key, child in inner:
        at = f"{path}.{key}" if path else str(key)
        found |= nodes_of(child, at)
        if not isinstance(child._value(), dict | list):
            found[at].append(_value_at(node, key))
    return found


def write(cfg: DictConfig, **more: object) -> None:
    """Write what is seen to the file in CORPUS_SEEN; the function has changed nothing before."""
    hydra: Any = HydraConfig.get()
    root = logging.getLogger()
    seen = {
        "config": nodes_of(cfg),
        "order": list(map(str, cfg)),
        "hydra": nodes_of(hydra),
        "object": _text(OmegaConf.to_object(cfg)) if not more.pop("lazy", False) else "",
        "yaml": OmegaConf.to_yaml(cfg),
        "cwd": str(Path.cwd()),
        "argv": sys.argv[1:],
        "start method": multiprocessing.get_start_method(),
        "environment": os.environ.get("CORPUS_SET"),
        "log": [logging.getLevelName(root.level), *(type(h).__name__ for h in root.handlers)],
        **{name: _text(value) for name, value in more.items()},
    }
    Path(os.environ["CORPUS_SEEN"]).write_text(json.dumps(seen))
