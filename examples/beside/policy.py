"""Reinforcement learning: a trainer that stays, and rollout nodes that come and go.

    python policy.py -m launcher=local role=trainer,rollout-1,rollout-2

Each role is a run of one sweep, so one job array holds them all, and each has its own nodes,
checkpoints and restarts: the loss of a rollout node stops no other role. The trainer saves its
policy at each step. The rollouts take it from there (`follow_checkpoints`), play, and leave what
they have seen in a folder that the trainer looks through.
"""

import time
from pathlib import Path

import hydra
import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch import nn

from hpc_elastic import Checkpointer, follow_checkpoints, report
from hpc_elastic.shared_files import names_in

NUM_STATES, NUM_ACTIONS = 8, 4


@hydra.main(version_base=None, config_path=".", config_name="policy")
def main(cfg: DictConfig) -> float | int:
    """Return the mean reward of the last step (trainer), or the number of batches (rollout)."""
    torch.manual_seed(cfg.seed)
    sweep = Path(HydraConfig.get().sweep.dir)
    policy = nn.Linear(NUM_STATES, NUM_ACTIONS)
    seen = sweep / "seen"
    seen.mkdir(exist_ok=True)
    if cfg.role == "trainer":
        return train(cfg, policy, seen)
    return play(cfg, policy, sweep / "0", seen)


def play(cfg: DictConfig, policy: nn.Module, trainer: Path, seen: Path) -> int:
    """Play a batch with each new policy, until the trainer has ended."""
    number = 0
    for step in follow_checkpoints({"policy": policy}, trainer, poll_s=0.2):
        states = torch.randint(NUM_STATES, (cfg.batch_size,))
        with torch.no_grad():
            logits = policy(torch.eye(NUM_STATES)[states])
        actions = torch.distributions.Categorical(logits=logits).sample()
        rewards = (actions == states % NUM_ACTIONS).float()
        name = f"{step:06d}-{cfg.role}.npz"
        with (seen / f".{name}").open("wb") as file:
            np.savez(file, states=states, actions=actions, rewards=rewards)
        (seen / f".{name}").rename(seen / name)  # whole, or not there
        number += 1
        report(step=step, reward=rewards.mean())
    return number


def train(cfg: DictConfig, policy: nn.Module, seen: Path) -> float:
    """Make one step with all that is seen of a policy that is at most `max_lag` steps old."""
    optimizer = torch.optim.Adam(policy.parameters(), cfg.lr)
    checkpointer = Checkpointer({"policy": policy, "optimizer": optimizer})
    step, reward = checkpointer.load_latest() or 0, 0.0
    checkpointer.save(step)  # the first policy
    while step < cfg.steps:
        names, batches = read(seen, step - cfg.max_lag)
        if not batches:
            report()  # a sign of life: no rollout node is there
            time.sleep(0.05)
            continue
        states, actions, rewards = (
            torch.cat([torch.from_numpy(batch[name]) for batch in batches])
            for name in ("states", "actions", "rewards")
        )
        log_p = policy(torch.eye(NUM_STATES)[states]).log_softmax(dim=1)
        advantage = rewards - rewards.mean()
        loss = -(advantage * log_p.gather(1, actions[:, None]).squeeze(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step, reward = step + 1, rewards.mean().item()
        report(step=step, loss=loss, total_steps=cfg.steps, reward=reward, batches=len(batches))
        checkpointer.save(step, urgent=True)
        for name in names:  # not before: a trainer that is lost meanwhile needs them again
            (seen / name).unlink(missing_ok=True)
    return reward


def read(seen: Path, oldest: int) -> tuple[list[str], list[dict[str, np.ndarray]]]:
    """Return the names of all batches in a folder, and those that are not of an older policy."""
    names, batches = sorted(n for n in names_in(seen) if not n.startswith(".")), []
    for name in names:
        if int(name.partition("-")[0]) >= oldest:
            with np.load(seen / name) as file:
                batches.append({key: file[key] for key in ("states", "actions", "rewards")})
    return names, batches


if __name__ == "__main__":
    main()
