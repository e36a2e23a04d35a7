"""A process group that hands everything on to another one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed.distributed_c10d import Work

from hpc_elastic.ft.broken import NotConfiguredError
from hpc_elastic.ft.pg_base import ProcessGroup

DEFAULT_TIMEOUT = timedelta(seconds=60)


class ProcessGroupWrapper(ProcessGroup):
    """Hand every operation on to another group; a subclass changes what it wants to.

    All operations go through `_call`, so that one method decides about all of them.
    """

    def __init__(
        self, timeout: timedelta = DEFAULT_TIMEOUT, pg: ProcessGroup | None = None
    ) -> None:
        """Wrap ``pg``.

        Args:
            timeout: Of each operation and of `configure`, where the subclass has a group of its
                own.
            pg: The group to wrap; None where the subclass brings its own.
        """
        super().__init__(0, 1)
        self._pg = pg
        self._timeout = timeout

    @property
    def parent(self) -> TorchProcessGroup:
        """The group that does the work.

        Raises:
            NotConfiguredError: there is none yet.
        """
        if self._pg is None:
            raise NotConfiguredError(
                f"{type(self).__name__} has no members: call configure() first"
            )
        return self._pg

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Configure the wrapped group."""
        self._wrapped().configure(*args, **kwargs)

    def abort(self) -> None:
        """Abort the wrapped group."""
        self._wrapped().abort()

    def shutdown(self) -> None:
        """Shut down the wrapped group."""
        self._wrapped().shutdown()

    def errored(self) -> Exception | None:
        """Return what the wrapped group says."""
        return self._wrapped().errored()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the wrapped group's."""
        self._timeout = timeout
        self._wrapped().set_timeout(timeout)

    def size(self) -> int:
        """Return the number of members."""
        return self.parent.size()

    def rank(self) -> int:
        """Return this member's rank; 0 as long as there are no members."""
        try:
            return self.parent.rank()
        except RuntimeError:
            return 0

    def getBackendName(self) -> str:  # noqa: N802
        """Return the wrapped group's."""
        return self._wrapped().getBackendName()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pg={self._pg})"

    def _wrapped(self) -> ProcessGroup:
        if self._pg is None:
            raise NotConfiguredError(f"{type(self).__name__} wraps no group")
        return self._pg

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Work:
        """Do one operation: ``name`` is the method's of torch's ProcessGroup."""
        work: Work = getattr(self.parent, name)(*args, **kwargs)
        return work

    # torch's surface, all its overloads. The C++ side calls these by name (its trampolines), and
    # so does torch.distributed.

    def allreduce(self, *args: Any, **kwargs: Any) -> Work:
        """Reduce tensors over all members, in place."""
        return self._call("allreduce", *args, **kwargs)

    def allreduce_coalesced(self, *args: Any, **kwargs: Any) -> Work:
        """Reduce several tensors as one."""
        return self._call("allreduce_coalesced", *args, **kwargs)

    def allgather(self, *args: Any, **kwargs: Any) -> Work:
        """Gather a tensor of each member on all."""
        return self._call("allgather", *args, **kwargs)

    def allgather_coalesced(self, *args: Any, **kwargs: Any) -> Work:
        """Gather several tensors of each member."""
        return self._call("allgather_coalesced", *args, **kwargs)

    def allgather_into_tensor_coalesced(self, *args: Any, **kwargs: Any) -> Work:
        """Gather into one tensor each."""
        return self._call("allgather_into_tensor_coalesced", *args, **kwargs)

    def _allgather_base(self, *args: Any, **kwargs: Any) -> Work:
        return self._call("_allgather_base", *args, **kwargs)

    def alltoall(self, *args: Any, **kwargs: Any) -> Work:
        """Send one tensor to each member, and receive one."""
        return self._call("alltoall", *args, **kwargs)

    def alltoall_base(self, *args: Any, **kwargs: Any) -> Work:
        """Send a part of one tensor to each member."""
        return self._call("alltoall_base", *args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> Work:
        """Wait for all members."""
        return self._call("barrier", *args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Work:
        """Copy one member's tensors to all."""
        return self._call("broadcast", *args, **kwargs)

    def gather(self, *args: Any, **kwargs: Any) -> Work:
        """Gather on one member."""
        return self._call("gather", *args, **kwargs)

    def scatter(self, *args: Any, **kwargs: Any) -> Work:
        """Scatter from one member."""
        return self._call("scatter", *args, **kwargs)

    def reduce(self, *args: Any, **kwargs: Any) -> Work:
        """Reduce on one member."""
        return self._call("reduce", *args, **kwargs)

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> Work:
        """Reduce, and give a part to each member."""
        return self._call("reduce_scatter", *args, **kwargs)

    def reduce_scatter_tensor_coalesced(self, *args: Any, **kwargs: Any) -> Work:
        """Reduce several tensors, and give a part of each to each member."""
        return self._call("reduce_scatter_tensor_coalesced", *args, **kwargs)

    def _reduce_scatter_base(self, *args: Any, **kwargs: Any) -> Work:
        return self._call("_reduce_scatter_base", *args, **kwargs)

    def send(self, *args: Any, **kwargs: Any) -> Work:
        """Send tensors to one member."""
        return self._call("send", *args, **kwargs)

    def recv(self, *args: Any, **kwargs: Any) -> Work:
        """Receive tensors from one member."""
        return self._call("recv", *args, **kwargs)

    def recv_anysource(self, *args: Any, **kwargs: Any) -> Work:
        """Receive tensors from whoever sends first."""
        return self._call("recv_anysource", *args, **kwargs)
