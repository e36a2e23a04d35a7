"""The ways to save and restore a state that are compared.

A way to save returns the seconds for which the training is held up; the caller measures the rest.
Each is called with a new folder every time, and may keep what a training would keep.
"""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import async_save, load, save  # type: ignore[attr-defined]
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from checkpoint import floors
from hpc_elastic.checkpoint import Checkpointer, CheckpointOptions

State = dict[str, torch.Tensor]


class Ours:
    """`hpc_elastic.Checkpointer`."""

    def __init__(self, state: State) -> None:
        self._state = {"state": state}
        self._made: Checkpointer | None = None
        self._step = 0

    def save(self, folder: Path) -> float:
        """Copy; write, checksum, sync and commit behind."""
        if self._made is None:  # one for all saves, as in a training
            self._made = Checkpointer(self._state, folder.parent / "ours", keep_last=100)
        self._step += 1
        self._made.save(self._step)
        blocked = self._made.blocked_s
        self._made.wait()
        return blocked

    def restore(self, folder: Path) -> None:
        """Verify, and fill in place."""
        options = CheckpointOptions(rng=False, asynchronous=False)
        assert Checkpointer(self._state, folder.parent / "ours", options=options).load_latest()


class TorchSave:
    """`torch.save`, which neither syncs nor checks."""

    def __init__(self, state: State) -> None:
        self._state = state

    def save(self, folder: Path) -> float:
        begin = time.perf_counter()
        folder.mkdir()
        torch.save(self._state, folder / "state.pt")
        return time.perf_counter() - begin

    def restore(self, folder: Path) -> None:
        loaded = torch.load(folder / "state.pt", weights_only=True)
        floors.copy_by_torch(loaded, self._state)


class DcpSave(TorchSave):
    """`torch.distributed.checkpoint.save`, which syncs its files."""

    def save(self, folder: Path) -> float:
        begin = time.perf_counter()
        save(self._state, checkpoint_id=folder)
        return time.perf_counter() - begin

    def restore(self, folder: Path) -> None:
        load(self._state, checkpoint_id=folder)


class DcpAsync(DcpSave):
    """`torch.distributed.checkpoint.async_save`, in a thread."""

    stager: DefaultStager | None = None

    def save(self, folder: Path) -> float:
        """Copy, then write in a thread; the copy itself may be in another one."""
        begin = time.perf_counter()
        answer = async_save(self._state, checkpoint_id=folder, async_stager=self.stager)
        if isinstance(answer, AsyncSaveResponse):
            answer.staging_completion.result()
            blocked = time.perf_counter() - begin
            answer.upload_completion.result()
        else:
            blocked = time.perf_counter() - begin
            answer.result()
        return blocked


class DcpStager(DcpAsync):
    """The same with its DefaultStager: buffers in shared memory that are used again."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        cuda = torch.cuda.is_available()
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda, use_shared_memory=True, use_async_staging=cuda,
                use_non_blocking_copy=cuda,
            )
        )  # fmt: skip


Way = Ours | TorchSave
WAYS: dict[str, type[Way]] = {
    "ours": Ours,
    "torch.save": TorchSave,
    "DCP save": DcpSave,
    "DCP async_save": DcpAsync,
    "DCP async_save, DefaultStager": DcpStager,
}


def begin_group(folder: Path) -> None:
    """Make the process group of one rank that async_save asks for."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
