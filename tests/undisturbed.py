"""What the unchanged script of Lightning trains, by a loop of torch alone, without a restart."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from hpc_elastic.data import ElasticSampler

UNCHANGED = Path(__file__).parent / "unchanged"
"""Scripts without a line of this package."""


def undisturbed() -> torch.Tensor:
    """Return the parameters after the training of lightning_trainer.py."""
    sys.path.insert(0, str(UNCHANGED))
    import lightning_trainer

    sys.path.remove(str(UNCHANGED))
    torch.manual_seed(0)
    data = lightning_trainer.Lines()
    data.setup("fit")
    layer = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(layer.parameters(), 0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
    for epoch in range(lightning_trainer.EPOCHS):
        sampler = ElasticSampler(data.data, lightning_trainer.BATCH, seed=0, name=None)
        sampler.load_state_dict(sampler.state_dict() | {"epoch": epoch})
        sampler.scale_gradients(layer)
        for x, y in DataLoader(data.data, batch_sampler=sampler):
            optimizer.zero_grad()
            (layer(x) - y).square().mean().backward()
            optimizer.step()
            schedule.step()
    return torch.cat([p.detach().flatten() for p in layer.parameters()])
