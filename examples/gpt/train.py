"""Train a small GPT: sharded over the nodes of a replica (FSDP2), averaged over the replicas.

    python examples/gpt/train.py -m launcher=local nodes=1:2       replicas of one node
    python examples/gpt/train.py -m launcher=slurm nodes=4:16:2    replicas of two nodes each

A node that dies costs its replica and one step; the other replicas go on. Its partner waits, with
warm workers, for the next node, and both receive the newest state from the memory of the others.
The text is that of Python's own manual, a byte a token. See docs/howto/fault-tolerance.md.
"""

import hashlib
import math
import os
import time
from pydoc_data.topics import topics

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset

from hpc_elastic import Checkpointer, ElasticSampler, ft, report

VOCABULARY = 256
HELD_OUT = 0.1


class Block(nn.Module):
    """Causal self-attention, and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` of shape (batch, time, width), changed."""
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(dim=2))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """A decoder of bytes."""

    def __init__(self, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, time, 256) of the bytes after ``tokens`` (batch, time)."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Passages(Dataset):
    """Passages of ``context + 1`` bytes of a text, one after the other."""

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        passage = self.bytes[start : start + self.context + 1]
        return passage[:-1], passage[1:]


@hydra.main(version_base=None, config_path=".", config_name="train")
def main(cfg: DictConfig) -> float:
    """Run in every rank of every replica; what rank 0 of a replica returns is its result."""
    device, model, data, held_out = set_up(cfg)
    shard(model)
    train(cfg, model, data, device)
    loss = evaluate(model, held_out, cfg.eval_batches, device)
    print(f"loss {loss:.3f} on held-out text, parameters {fingerprint(model)}", flush=True)
    dist.destroy_process_group()
    return loss


def set_up(cfg: DictConfig) -> tuple[torch.device, GPT, Passages, Passages]:
    """Start torch.distributed; return the device, the model, and the text in two parts."""
    device = torch.device("cpu")
    if is_cuda := torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo")
    torch.manual_seed(cfg.seed)
    text = "".join(topics[name] for name in sorted(topics)).encode()
    cut = int(len(text) * (1 - HELD_OUT))
    model = GPT(cfg.context, cfg.width, cfg.heads, cfg.layers).to(device)
    return device, model, Passages(text[:cut], cfg.context), Passages(text[cut:], cfg.context)


def shard(model: GPT) -> None:
    """Shard the parameters over all ranks, block by block; compute in bfloat16."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=precision)
    fully_shard(model, mp_policy=precision, reshard_after_forward=True)


def train(cfg: DictConfig, model: nn.Module, data: Dataset, device: torch.device) -> None:
    """Train to the last epoch, with the replicas present at each step."""
    adam = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.1)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    manager = ft.Manager(
        pg=ft.ProcessGroupNCCL() if device.type == "cuda" else ft.ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": adam.state_dict()},
        min_replica_size=1,
    )
    sampler = ElasticSampler(data, cfg.batch_size, seed=cfg.seed, manager=manager)
    batches = DataLoader(data, batch_sampler=sampler)
    state = {"model": model, "optimizer": adam, "sampler": sampler, "manager": manager}
    checkpointer = Checkpointer(state)
    checkpointer.load_latest()
    optimizer = ft.Optimizer(manager, adam)
    total_steps = cfg.epochs * sampler.num_batches
    set_learning_rate(adam, cfg, sampler.step, total_steps)
    for _ in sampler.epochs(cfg.epochs):
        for batch in sampler.batches(batches):
            optimizer.zero_grad()  # the quorum: which replicas are there?
            for (tokens, targets), weight in batch.micro_batches(model):
                logits = model(tokens.to(device))
                loss = cross_entropy(logits.float().flatten(0, 1), targets.to(device).flatten())
                (weight * loss).backward()
            average_gradients(manager, model)
            nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
            optimizer.step()  # if all went well; else the same batch comes again
            set_learning_rate(adam, cfg, sampler.step, total_steps)  # a part of the peers' state
            report(
                step=sampler.step, loss=loss, total_steps=sampler.total_steps,
                lr=adam.param_groups[0]["lr"],
            )  # fmt: skip
            time.sleep(cfg.pause_s)
            checkpointer.save_if_due(sampler.step, every_s=cfg.save_every_s)
    if manager.participating_rank() == 0:
        checkpointer.save(sampler.step)
    manager.shutdown()


def average_gradients(manager: ft.Manager, model: nn.Module) -> None:
    """Average each shard of the gradients with its counterparts in the other replicas."""
    gradients = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def set_learning_rate(adam: torch.optim.Optimizer, cfg: DictConfig, step: int, total: int) -> None:
    """Set the rate of the next step: warm up linearly, then follow half a cosine.

    It is set between two steps, so a replica that is healed has it with the optimizer's state. In
    the middle of a step, a replica that heals does not know the number of the step yet.
    """
    warm_up = min(1.0, (step + 1) / cfg.warm_up_steps)
    for group in adam.param_groups:
        group["lr"] = cfg.lr * warm_up * 0.5 * (1 + math.cos(math.pi * step / total))


@torch.no_grad()
def evaluate(model: nn.Module, data: Dataset, batches: int, device: torch.device) -> float:
    """Return the mean loss; all ranks of a replica take part, with the same passages."""
    losses = []
    for (tokens, targets), _ in zip(DataLoader(data, batch_size=16), range(batches), strict=False):
        logits = model(tokens.to(device)).float()
        losses.append(cross_entropy(logits.flatten(0, 1), targets.to(device).flatten()).item())
    return sum(losses) / len(losses)


def fingerprint(model: nn.Module) -> str:
    """Return what is equal in all replicas if all their parameters are, to the last bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(whole.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
