"""Train the same small GPT in plain torch: FSDP2 over all nodes, bfloat16, and no manager.

    python examples/gpt/plain.py -m launcher=local nodes=1:2
    python examples/gpt/plain.py -m launcher=slurm nodes=1:16 compile=true

A node that dies costs the steps since the last checkpoint, and the group a restart. The parameters
are sharded over all ranks, however many there are: the checkpoint is resharded when it is loaded.
"""

import time

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from hpc_elastic import Checkpointer, ElasticSampler, report
from train import evaluate, set_learning_rate, set_up, shard


@hydra.main(version_base=None, config_path=".", config_name="plain")
def main(cfg: DictConfig) -> float:
    """Run in every worker; return the loss on held-out text."""
    device, model, data, held_out = set_up(cfg)
    if cfg.compile:
        for block in model.blocks:
            block.compile()
    shard(model)

    adam = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.1)
    sampler = ElasticSampler(data, cfg.batch_size, seed=cfg.seed)
    loader = DataLoader(data, batch_sampler=sampler)
    checkpointer = Checkpointer({"model": model, "optimizer": adam, "sampler": sampler})
    checkpointer.load_latest()
    sampler.scale_gradients(model)
    for _ in sampler.epochs(cfg.epochs):
        for tokens, targets in loader:
            set_learning_rate(adam, cfg, sampler.step, cfg.epochs * sampler.num_batches)
            adam.zero_grad()
            logits = model(tokens.to(device))
            loss = cross_entropy(logits.float().flatten(0, 1), targets.to(device).flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
            adam.step()
            report(
                step=sampler.step, loss=loss, total_steps=sampler.total_steps,
                lr=adam.param_groups[0]["lr"],
            )  # fmt: skip
            time.sleep(cfg.pause_s)
            checkpointer.save_if_due(sampler.step, every_s=cfg.save_every_s)
    checkpointer.save(sampler.step)
    loss = evaluate(model, held_out, cfg.eval_batches, device)
    print(f"loss {loss:.3f} on held-out text", flush=True)
    dist.destroy_process_group()
    return loss


if __name__ == "__main__":
    main()
