"""The comparison of a sampler's facts between the ranks, through the store of the process group.

A seed of each rank's own (``seed=cfg.seed + rank``) gives each rank an order of its own, in which
samples are trained twice or never. The first rank that comes leaves its facts in the store, and the
others compare theirs. It takes no collective and waits for no other rank, so a rank may have
samplers that the others lack.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

from hpc_elastic.data.epoch_plan import EpochPlan
from hpc_elastic.errors import InexactError

_num_compared = Counter[str]()
"""Comparisons so far, by key: the n-th of one rank is the n-th of the others."""


def default_store() -> Any:
    """Return the store of the default process group, private to torch; None if there is none."""
    distributed: Any = sys.modules.get("torch.distributed")
    if not (distributed and distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.distributed_c10d._get_default_store()


def require_equal_facts(name: str | None, plan: EpochPlan) -> bool:
    """Compare what fixes the order, the batches and their weights; raise ConfigError if it differs.

    A sampler without a name is only compared with those that differ in nothing but the seed: a rank
    may have it alone, as for an evaluation. Returns False if there is no process group yet.
    """
    store = default_store()
    if store is None:
        return False
    rank, _ = plan.batch.group()
    facts = {**plan.facts(), "global_batch_size": plan.batch.global_batch_size, "end": plan.end}
    kind = name or json.dumps({**facts, "seed": None})
    key = f"hpc_elastic/data/{kind}/{_num_compared[kind]}"
    _num_compared[kind] += 1
    theirs = json.loads(store.compare_set(key, "", json.dumps({"rank": rank, **facts})))
    for fact, value in facts.items():
        if theirs[fact] != value:
            remedy = f"rank {theirs['rank']} has {theirs[fact]!r}: give the same on all ranks"
            raise InexactError("dataset" if fact == "dataset_len" else fact, value, remedy)
    return True
