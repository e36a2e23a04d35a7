"""Train on sharded files that are read forwards, with as many nodes as there are.

    python train.py -m launcher=local nodes=1:2          two nodes, as processes on this machine
    python train.py -m launcher=slurm nodes=1:4       one to four nodes of a Slurm cluster
    python train.py format=parquet                    the same from Parquet files

The shards are tar files, whose members of one sample have one stem (as WebDataset's), or Parquet
files. The first rank makes them of scikit-learn's handwritten digits, if they are not there yet.
Each sample is trained once an epoch, whatever nodes come and go.
"""

import io
import itertools
import math
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import hydra
import numpy as np
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from hpc_elastic import Checkpointer, report
from hpc_elastic.data import ElasticStream, count_samples

NUM_SHARDS = 12
Sample = tuple[np.ndarray, int]


@hydra.main(version_base=None, config_path=".", config_name="train")
def main(cfg: DictConfig) -> dict[str, float]:
    """Run in every worker; what it returns is the result of the run."""
    dist.init_process_group("gloo")
    folder = Path(HydraConfig.get().runtime.output_dir)
    files = shards(Path(cfg.shards or folder / "shards"), cfg.format)
    if cfg.format == "tar":
        read, lengths = read_tar, count_samples(files, read_tar, folder / "lengths.json")
    else:
        read, lengths = read_parquet, [num_rows(file) for file in files]

    torch.manual_seed(cfg.seed)
    net = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(net.parameters(), cfg.lr, momentum=0.9)
    stream = ElasticStream(
        files, read, lengths, cfg.batch_size, seed=cfg.seed, shuffle_buffer=cfg.shuffle_buffer
    )
    loader = DataLoader(stream.dataset, batch_sampler=stream, num_workers=cfg.num_workers)
    checkpointer = Checkpointer({"net": net, "optimizer": optimizer, "stream": stream})
    checkpointer.load_latest()

    model = stream.scale_gradients(DistributedDataParallel(net))
    loss = torch.tensor(math.nan)
    for _ in stream.epochs(cfg.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            report(step=stream.step, loss=loss, total_steps=stream.total_steps)
            time.sleep(cfg.pause_s)
            checkpointer.save_if_due(stream.step, every_s=cfg.save_every_s)
    checkpointer.save(stream.step)
    checkpointer.close()
    dist.destroy_process_group()
    return {"loss": loss.item(), "steps": stream.step}


def shards(folder: Path, suffix: str) -> list[str]:
    """Return the files of a folder; the first rank makes them if there are none."""
    if dist.get_rank() == 0 and not folder.exists():
        staged = folder.with_name(f".{folder.name}")
        staged.mkdir(parents=True, exist_ok=True)
        images, labels = load_digits(return_X_y=True)
        images = (images / 16).astype(np.float32)
        write = write_tar if suffix == "tar" else write_parquet
        for i in range(NUM_SHARDS):
            write(staged / f"{i:04}.{suffix}", images[i::NUM_SHARDS], labels[i::NUM_SHARDS])
        staged.rename(folder)
    dist.barrier()
    return sorted(map(str, folder.glob(f"*.{suffix}")))


def write_tar(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write samples as two members each: ``000012.npy`` and ``000012.cls``."""
    with tarfile.open(path, "w") as tar:
        for i, (image, label) in enumerate(zip(images, labels, strict=True)):
            array = io.BytesIO()
            np.save(array, image)
            for suffix, data in (("npy", array.getvalue()), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"{i:06}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def read_tar(path: str, start: int) -> Iterator[Sample]:
    """Yield the samples of a tar file; those before `start` are passed over by their headers."""
    with tarfile.open(path) as tar:
        samples = itertools.groupby(tar, key=lambda member: member.name.partition(".")[0])
        for i, (_, members) in enumerate(samples):
            if i >= start:
                parts = {m.name.partition(".")[2]: tar.extractfile(m).read() for m in members}
                yield np.load(io.BytesIO(parts["npy"])), int(parts["cls"])


def write_parquet(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write samples as rows, in groups that can be read alone."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"image": list(images), "label": labels})
    pyarrow.parquet.write_table(table, path, row_group_size=32)


def read_parquet(path: str, start: int) -> Iterator[Sample]:
    """Yield the rows of a Parquet file; groups before `start` are not read."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for i in range(file.num_row_groups):
            num_rows = file.metadata.row_group(i).num_rows
            if start < num_rows:
                for row in file.read_row_group(i).slice(start).to_pylist():
                    yield np.array(row["image"], dtype=np.float32), row["label"]
            start = max(0, start - num_rows)


def num_rows(path: str) -> int:
    """Return how many samples a Parquet file has, which stands at its end."""
    import pyarrow.parquet

    return int(pyarrow.parquet.read_metadata(path).num_rows)


if __name__ == "__main__":
    main()
