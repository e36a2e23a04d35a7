"""DistributedSampler: a fixed share of the data for each replica group, as torchft's.

Samples of an absent group, and batches of failed steps, are lost. `hpc_elastic.data`'s
`ElasticSampler` loses none, and needs no number of groups.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler


class DistributedSampler(TorchSampler[Any]):
    """Splits a dataset over ``num_replica_groups * num_replicas`` workers.

    Args:
        dataset: The dataset.
        replica_rank: This replica group's fixed number, from 0.
        num_replica_groups: The most groups, at least 1.
        group_rank: This worker's rank in its group; None: torch.distributed's.
        num_replicas: Number of workers of the group; None: torch.distributed's.
        kwargs: As torch's sampler: shuffle, seed, drop_last.

    Attributes:
        global_rank: This worker's share.
        global_world_size: Number of shares.

    Raises:
        ValueError: The rank is not below the number of groups.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        replica_rank: int,
        num_replica_groups: int,
        group_rank: int | None = None,
        num_replicas: int | None = None,
        **kwargs: Any,
    ) -> None:
        rank = dist.get_rank() if group_rank is None else group_rank
        workers = dist.get_world_size() if num_replicas is None else num_replicas
        self.global_rank: int = rank + workers * replica_rank
        self.global_world_size: int = workers * num_replica_groups
        super().__init__(
            dataset, rank=self.global_rank, num_replicas=self.global_world_size, **kwargs
        )
