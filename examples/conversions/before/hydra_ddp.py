"""Train on handwritten digits: Hydra, mixed precision, an averaged model, the best one."""

import os
import time
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@hydra.main(version_base=None, config_path=".", config_name="hydra_ddp")
def main(cfg: DictConfig) -> float:
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    torch.manual_seed(cfg.seed)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16).float(), torch.tensor(labels)
    data, held_out = TensorDataset(x[:1536], y[:1536]), (x[1536:].to(device), y[1536:].to(device))
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Dropout(cfg.dropout), nn.Linear(128, 10)
    net = nn.Sequential(*layers).to(device)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(net.parameters(), lr=cfg.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg.epochs)
    scaler = torch.amp.GradScaler(device.type)
    sampler = DistributedSampler(data, seed=cfg.seed)
    loader = DataLoader(data, cfg.batch_size // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(net)
    best_file, best = Path(HydraConfig.get().runtime.output_dir, "best.pt"), {"accuracy": 0.0}
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast(device.type):
                loss = cross_entropy(model(x.to(device)), y.to(device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            average.update_parameters(net)
            time.sleep(cfg.pause_s)
        scheduler.step()
        average.eval()
        with torch.no_grad():
            accuracy = (average(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
        if accuracy > best["accuracy"]:
            best["accuracy"] = accuracy
            if dist.get_rank() == 0:
                torch.save(average.module.state_dict(), best_file)
    dist.destroy_process_group()
    return best["accuracy"]


if __name__ == "__main__":
    main()
