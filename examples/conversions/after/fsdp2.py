"""Train on handwritten digits with FSDP2."""

import sys
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic import Checkpointer, ElasticSampler, report

EPOCHS, PAUSE_S = int(sys.argv[1]), float(sys.argv[2])


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = fully_shard(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = ElasticSampler(data, global_batch_size=48)
    loader = DataLoader(data, batch_sampler=sampler)
    checkpointer = Checkpointer({"model": model, "optimizer": optimizer, "sampler": sampler})
    checkpointer.load_latest()
    sampler.scale_gradients(model)
    for _ in sampler.epochs(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            time.sleep(PAUSE_S)
            report(step=sampler.step, total_steps=sampler.total_steps)
            checkpointer.save_if_due(sampler.step, every_s=2)
    if dist.get_rank() == 0:
        print("trained", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
