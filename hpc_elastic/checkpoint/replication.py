"""Copies of a rank's files to a worker on another node, over TCP, beside the training.

The process group is not used: its operations belong to the training's thread. Each worker has a
`Receiver`, to which `push` connects, over the authenticated connections of `transport`. Messages
are of bounded size; names of files are checked, and the contents of files are compared with the
checksums in the signed message. What was received is taken for complete once the part file is
there, which is written last.
"""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import xxhash

from hpc_elastic.checkpoint.manifest import MANIFEST_BYTES, FileEntry, RankPart
from hpc_elastic.checkpoint.node_memory import MemorySave, NodeMemory, free_bytes
from hpc_elastic.errors import CheckpointCorruptError, CheckpointError
from hpc_elastic.shared_files import open_file, read_text, write_atomic
from hpc_elastic.transport.auth import FrameSigner
from hpc_elastic.transport.signed_socket import SignedSocket, SocketServer

TIMEOUT_S = 30.0
"""Silence of this long ends a connection."""
_BLOCK_BYTES = 4 << 20
_CONTEXT = "checkpoint copies"
_FILE = re.compile(r"shard-\d+[A-Za-z0-9_.-]*")


def push(address: tuple[str, int], key: bytes, save: MemorySave, folder: Path, rank: int) -> None:
    """Copy a rank's files of a save to a worker on another node, at the address of its `Receiver`.

    Raises OSError if there is no connection, it broke, or the other side does not know the key;
    CheckpointError, with the reason, if the other side refused.
    """
    text = read_text(folder / f"part-{rank}.json", MANIFEST_BYTES)
    with closing(SignedSocket.connect(address, key, _CONTEXT, timeout_s=TIMEOUT_S)) as connection:
        connection.send({"save": [save.step, save.token, save.world_size], "part": text})
        for file in RankPart.from_json(text).files:
            with open_file(folder / file.name) as f:
                if connection.send_file(f, file.num_bytes) != file.num_bytes:
                    raise CheckpointCorruptError(f"{folder / file.name} was cut short")
        answer = connection.receive()
    if answer.get("problem") is not None:
        raise CheckpointError(f"the neighbour did not take the copy: {answer['problem']}")


class Receiver:
    """Takes the copies that other workers push, in threads of its own."""

    def __init__(self, memory: NodeMemory, key: bytes, addresses: Iterable[str]) -> None:
        """Begin to listen on the first of these numeric addresses that is this machine's.

        Raises OSError if none is.
        """
        self._memory = memory
        self._server = SocketServer(addresses, key, _CONTEXT, self._serve, name="checkpoint-copy")
        self.address = self._server.address

    def close(self) -> None:
        """Take no more copies."""
        self._server.close()

    def _serve(self, sock: socket.socket, signer: FrameSigner) -> None:
        connection = SignedSocket(sock, signer, TIMEOUT_S)
        connection.send({"problem": self._receive_files(connection, connection.receive())})

    def _receive_files(self, connection: SignedSocket, message: dict[str, Any]) -> str | None:
        """Receive the files that a message announces; return the error, if any."""
        try:
            numbers, part = message["save"], RankPart.from_json(message["part"])
            is_number = [type(n) is int and 0 <= n < 1 << 63 for n in numbers]
            if is_number != [True] * 3:
                raise ValueError(f"{numbers!r:.80} is no save")
            save = MemorySave(*numbers)
            if not 0 <= part.rank < save.world_size:
                raise ValueError(f"rank {part.rank} of {save.world_size}")
            for file in part.files:
                if not _FILE.fullmatch(file.name) or not 0 <= file.num_bytes < 1 << 63:
                    raise ValueError(f"{file.name!r:.80} is no name of a shard")
            folder = self._memory.make(save)
            num_bytes = sum(file.num_bytes for file in part.files)
            if num_bytes > free_bytes(folder):
                return f"{folder} has no room for {num_bytes} bytes"
            for file in part.files:
                _receive_file(connection, folder / file.name, file)
            write_atomic(folder / f"part-{part.rank}.json", message["part"])
            self._memory.prune(save.step)
        except (CheckpointCorruptError, KeyError, TypeError, ValueError, OSError) as e:
            return f"{type(e).__name__}: {e}"
        return None


def _receive_file(connection: SignedSocket, path: Path, file: FileEntry) -> None:
    """Receive one file; it has its name once it is complete and as it should be."""
    staged = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    checksum, left, block = xxhash.xxh3_64(), file.num_bytes, memoryview(bytearray(_BLOCK_BYTES))
    try:
        with staged.open("xb") as f:
            while left:
                got = connection.receive_into(block[: min(left, _BLOCK_BYTES)])
                checksum.update(block[:got])
                f.write(block[:got])
                left -= got
        if f"xxh3_64:{checksum.hexdigest()}" != file.checksum:
            raise CheckpointCorruptError(f"{path.name} was changed on its way")
        staged.rename(path)
    finally:
        staged.unlink(missing_ok=True)
