"""Data for a training whose world size changes: every sample once an epoch, one global batch.

    sampler = ElasticSampler(data, 128, seed=0)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=2)
    ...                                               # the sampler belongs into the checkpoint
    model = sampler.scale_gradients(model)
    for epoch in sampler.epochs(10):
        for x, y in loader:                           # this rank's share of one global batch
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()

With gradient accumulation, or a fault-tolerant manager:

    sampler = ElasticSampler(data, 128, seed=0, micro_batch_size=32)
    ...
        for batch in sampler.batches(loader):         # one global batch
            optimizer.zero_grad()
            for (x, y), weight in batch.micro_batches(model):     # this rank's micro-batches of it
                (weight * loss_of(model(x), y)).backward()
            optimizer.step()                          # now the batch counts as trained

`sampler` holds the position in the data, `batch` divides a global batch among the ranks,
`epoch_plan` shuffles without a list of indices, `ledger` records the samples of each rank, and
`audit` proves from it that no sample was left out or used twice.

`ElasticStream` does the same for sharded data that can only be read sequentially: files, ranges,
generators. It is used like the sampler, with ``DataLoader(stream.dataset, batch_sampler=stream)``.

The package imports NumPy at the first use of a name, and not torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_elastic.data.batch import GlobalBatch
    from hpc_elastic.data.sampler import ElasticSampler
    from hpc_elastic.data.stream import ElasticStream, count_samples

__all__ = ["ElasticSampler", "ElasticStream", "GlobalBatch", "count_samples"]


def __getattr__(name: str) -> Any:
    """Import NumPy only where samples are drawn: an agent divides a batch, and does without."""
    if name in __all__:
        from hpc_elastic.data import batch, sampler, stream

        return next(getattr(m, name) for m in (batch, sampler, stream) if hasattr(m, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
