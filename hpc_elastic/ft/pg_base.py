"""The process group of fault tolerance: torch's, which can be configured again in place.

It keeps its identity while its members change: a script, DDP or a `DeviceMesh` holds one object
for the whole training, and the Manager calls `configure` whenever there is a new quorum. Ranks and
size change then, so nothing may be kept of them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed.distributed_c10d import BroadcastOptions, Work


class ProcessGroup(TorchProcessGroup):
    """Base of all groups here; the collectives are torch's, by torch's names.

    Every one of them takes the arguments of `torch.distributed.ProcessGroup`'s method of its name
    (lists of tensors, and an options object), and returns a Work.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group_name: str | None = None

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Meet the members of a new quorum (every member at once; what was before is given up).

        Args:
            store_addr: ``host:port/prefix`` of a TCPStore; the prefix must never have been used.
            replica_id: Name of this member, for messages.
            rank: Of this member, from 0.
            world_size: Members, at least 1.
            quorum_id: For messages.
            group_rank: This worker's rank inside its replica group.
            group_world_size: Workers in a replica group.
            global_ranks: The members' ranks in the whole job, for torch's flight recorder.

        Raises:
            CollectiveTimeoutError: not all came in time; it names who is absent. Ask for another
                quorum.
            AbortedError: `abort` was called meanwhile.
        """
        raise NotImplementedError(f"{type(self).__name__} can not be configured")

    def abort(self) -> None:
        """Give up everything that is pending (any thread); the next `configure` begins anew."""

    def shutdown(self) -> None:
        """Leave the group in peace; what has been sent still arrives."""

    def errored(self) -> Exception | None:
        """Return why the group has to be configured again; None if it has not."""
        return None

    def set_timeout(self, timeout: timedelta) -> None:
        """Let each operation from now on, and each `configure`, take at most so long."""
        raise NotImplementedError(f"{type(self).__name__} has no time-out")

    def size(self) -> int:
        """Return the number of members."""
        raise NotImplementedError(f"{type(self).__name__} has no size")

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return the name under which `register` makes it known."""
        raise NotImplementedError(f"{type(self).__name__} has no name")

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> Work:
        """Broadcast one tensor from the rank ``root``."""
        opts = BroadcastOptions()
        opts.rootRank = root
        return self.broadcast([tensor], opts)

    def register(self, name: str) -> ProcessGroup:
        """Make the group known to torch, for DeviceMesh and functional collectives (once).

        torch's default group must be initialized. For torch it is a group of this rank alone,
        since a size that changes has no place in a mesh.

        Args:
            name: Unique in this process.

        Returns:
            This very object, with a group name.
        """
        group_name = f"{self.getBackendName()}:{name}"
        devices = ["cpu"] + [d for d in ("cuda", "xpu") if getattr(torch, d).is_available()]
        dist.Backend.register_backend(group_name, lambda *_: self, devices=devices)
        made = dist.new_group(
            ranks=[dist.get_rank()], backend=group_name, group_desc=group_name,
            timeout=timedelta(minutes=1),  # not used
        )  # fmt: skip
        return cast(ProcessGroup, made)

    def unregister(self) -> None:
        """Undo `register`."""
        dist.destroy_process_group(self)

    @property
    def group_name(self) -> Any:
        """torch's name for it, once it is registered."""
        if self._group_name is None:
            raise ValueError("the process group has no name: call register() first")
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
