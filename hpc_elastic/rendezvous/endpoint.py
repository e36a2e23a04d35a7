"""Who leads: ``rdzv/endpoint.<epoch>.json`` on the shared file system.

A file is made complete under another name and then linked to its own: link(2) fails if the name
exists, on NFS too, so that exactly one agent creates each epoch. Files carry a signature under the
run's secret; one that does not verify, or is cut short, is treated as if it were not there yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.rendezvous.wire import is_signed, sign

_NAME = re.compile(r"endpoint\.(\d+)\.json")


@dataclass(frozen=True)
class Endpoint:
    """Where the leader of an epoch listens, and which task it is."""

    epoch: int
    address: str
    port: int
    task: str
    attempt: int


@dataclass(frozen=True)
class EndpointDir:
    """The endpoint files of one run."""

    path: Path
    secret: bytes

    @property
    def can_claim(self) -> bool:
        """Any agent may lead."""
        return True

    def latest_epoch(self) -> int:
        """Return the highest epoch that anybody has claimed; 0 if none."""
        names = (_NAME.fullmatch(p.name) for p in self.path.iterdir())
        return max((int(m[1]) for m in names if m), default=0)

    def latest(self) -> tuple[int, Endpoint | None]:
        """Return the highest epoch, and its endpoint; None if that does not verify."""
        epoch = self.latest_epoch()
        return epoch, self._read(epoch) if epoch else None

    def claim(self, endpoint: Endpoint) -> bool:
        """Try to become the leader of ``endpoint.epoch``; False if another agent was first.

        Raises:
            RunDirectoryError: the file system has no hard links, or can not be written.
        """
        staged = self.path / f".endpoint.{secrets.token_hex(8)}"
        try:
            staged.write_text(self._seal(endpoint))
            os.link(staged, self._file(endpoint.epoch))
        except FileExistsError:
            return False
        except OSError as e:
            raise RunDirectoryError(
                f"{self.path}: can not create an endpoint ({e}). The run directory must lie on a "
                "writable, shared file system with hard links."
            ) from e
        finally:
            with contextlib.suppress(OSError):
                staged.unlink()
        return True

    def _file(self, epoch: int) -> Path:
        return self.path / f"endpoint.{epoch}.json"

    def _seal(self, endpoint: Endpoint) -> str:
        body = json.dumps(asdict(endpoint), sort_keys=True)
        return json.dumps({"endpoint": body, "mac": sign(self.secret, f"endpoint|{body}")})

    def _read(self, epoch: int) -> Endpoint | None:
        try:
            sealed = json.loads(self._file(epoch).read_text())
            body, mac = str(sealed["endpoint"]), str(sealed["mac"])
            if not is_signed(self.secret, f"endpoint|{body}", mac):
                return None
            endpoint = Endpoint(**json.loads(body))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return endpoint if endpoint.epoch == epoch else None


@dataclass
class FixedEndpoint:
    """The endpoint that Slurm's variables name: the first host of one multi-node allocation.

    For ``torchrun`` without a run directory. There is one epoch, and no other agent may lead.
    """

    endpoint: Endpoint
    can_claim: bool
    """Whether this agent runs on the first host."""
    claimed: bool = False

    def latest(self) -> tuple[int, Endpoint | None]:
        """Return the endpoint, in epoch 1; on the first host only once it listens."""
        return (1, self.endpoint) if self.claimed or not self.can_claim else (0, None)

    def claim(self, endpoint: Endpoint) -> bool:
        """Start to lead; True on the first host, the first time."""
        won = self.can_claim and not self.claimed
        self.claimed = self.claimed or won
        return won
