"""Machines with a kernel of their own, and so with an NFS client (or server) of their own.

User-mode Linux: a kernel that is a process. Its root is this machine's, read-only, so that Python
and the code are this machine's; `/tmp`, `/run` and the like are its own. Its network is a tap on
the switch of a Slurm sandbox. What it has to do comes over its console (`guest`).
"""

import contextlib
import itertools
import json
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurm_sandbox import node_init
from slurm_sandbox.config import Layout

MODULES = "/usr/lib/uml/modules"
_BOOT_S = 60.0
_OWN = ("/run", "/tmp", "/var/lib/nfs", "/var/tmp", "/dev/shm")
LOCKS = """mkdir -p /run/rpcbind /var/lib/nfs/sm /var/lib/nfs/sm.bak
touch /var/lib/nfs/etab /var/lib/nfs/rmtab /var/lib/nfs/state
rpcbind -w
rpc.statd --no-notify"""
"""What NFS 3 needs for its locks, as shell."""
_INIT = """#!/bin/sh
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 HOME=/tmp
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mkdir -p /dev/shm /dev/pts
mount -t devpts devpts /dev/pts
for each in {own}; do mount -t tmpfs -o mode=1777 tmpfs $each; done
chmod 755 /run
mkdir -p {directory} /run/kernel/lib /run/rpc_pipefs /run/sendsigs.omit.d
mount -t hostfs -o {directory} none {directory}
hostname {name}
mount --bind {directory}/etc/machines /etc/hosts
mount --bind {directory}/etc/nsswitch.conf /etc/nsswitch.conf
ip link set lo up
ip addr add {address}/24 dev vec0
ip link set vec0 up
ln -s {modules} /run/kernel/lib/modules
modprobe -d /run/kernel -a {kernel}
{{
{more}
}} >/dev/tty0 2>&1
exec {python} -I -S {init} {python} -I {guest} </dev/tty1 >/dev/tty1
"""


class MachineError(RuntimeError):
    """A machine does not do what it was told."""


class Machine:
    """One machine, which boots when it is made, and lives until `kill`.

    Its host name, and its network interface on the switch of the sandbox ``layout``, are ``name``.
    Its kernel loads the modules ``kernel``; ``disk`` is the file behind `/dev/ubda`. It runs the
    shell of ``more`` before it takes requests.
    """

    def __init__(
        self,
        name: str,
        address: str,
        layout: Layout,
        *,
        memory_mb: int = 1024,
        kernel: Sequence[str] = ("nfsv3", "nfsv4"),
        disk: Path | None = None,
        more: str = "",
    ) -> None:
        self.name, self.address = name, address
        self._numbers = itertools.count(1)
        self._replies: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        folder = layout.directory / "machines"
        folder.mkdir(exist_ok=True)
        self.log = folder / f"{name}.log"
        init = folder / f"{name}.sh"
        init.write_text(
            _INIT.format(
                own=" ".join(_OWN), directory=layout.directory, name=name, address=address,
                modules=MODULES, kernel=" ".join(kernel), more=more, python=sys.executable,
                init=node_init.__file__, guest=Path(__file__).with_name("guest.py"),
            )
        )  # fmt: skip
        init.chmod(0o755)
        self._plug(layout, folder)
        disks = [f"ubda={disk}"] if disk else []
        argv = [
            *("nsenter", f"--net=/run/netns/{layout.switch}"),
            *("setpriv", "--pdeathsig", "KILL"),
            *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *("linux.uml", f"mem={memory_mb}M", f"umid={name}", f"uml_dir={folder}/", *disks),
            *("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro"),
            *("panic=-1", f"init={init}"),
            *("con=null", "con0=null,fd:2", "con1=fd:0,fd:1", "ssl=null"),
            f"vec0:transport=tap,ifname={name},depth=64,gro=0",
        ]
        ours, theirs = socket.socketpair()
        with self.log.open("ab") as log, theirs:
            self.process = subprocess.Popen(
                argv, stdin=theirs, stdout=theirs, stderr=log, start_new_session=True
            )
        self._console = ours.makefile("rw", buffering=1)
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self._wait(0, _BOOT_S, "boot")
        except MachineError as e:
            self.kill()
            raise MachineError(f"{e}\n{self.log.read_text()[-3000:]}") from None

    def _plug(self, layout: Layout, folder: Path) -> None:
        ip = f"ip -n {layout.switch}"
        subprocess.run(f"{ip} link del {self.name}".split(), check=False, capture_output=True)
        for command in (
            f"{ip} tuntap add {self.name} mode tap",
            f"{ip} link set {self.name} master br0 up",
        ):
            subprocess.run(command.split(), check=True)

    def call(self, module: str, function: str, *args: Any, timeout_s: float = 60.0) -> Any:
        """Let it call a function of a module of this folder, and return what that returns.

        MachineError: it raised, or takes longer, or the machine is gone.
        """
        number = next(self._numbers)
        request = {"id": number, "module": module, "function": function, "args": args}
        try:
            with self._changed:
                self._console.write(json.dumps(request) + "\n")
                self._console.flush()
        except OSError as e:
            raise MachineError(f"{self.name} is gone: {e}") from e
        return self._wait(number, timeout_s, f"{module}.{function}")

    def run(self, argv: Sequence[str] | str, *, check: bool = True, timeout_s: float = 60.0) -> str:
        words = shlex.split(argv) if isinstance(argv, str) else list(argv)
        done = self.call("guest", "run", words, {}, "/", timeout_s, timeout_s=timeout_s + 30)
        if check and done["code"]:
            raise MachineError(f"{self.name}: {shlex.join(words)}: {done['code']}: {done['err']}")
        return str(done["out"])

    def start(
        self, argv: Sequence[str], log: Path, *, cwd: str = "/", env: dict[str, str] | None = None
    ) -> int:
        return int(self.call("guest", "start", list(argv), env or {}, cwd, str(log)))

    def ended(self, pid: int) -> int | None:
        """Return the exit code of what `start` has started, None while it runs."""
        code: int | None = self.call("guest", "ended", pid)
        return code

    def ahead_s(self) -> float:
        """Return how far its clock is ahead of this machine's, by the quickest of some answers."""
        found = []
        for _ in range(10):
            asked = time.time()
            there = float(self.call("time", "time"))
            answered = time.time()
            found.append((answered - asked, there - (asked + answered) / 2))
        return min(found)[1]

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """End it at once, as a power cut."""
        self.process.kill()  # with it goes the namespace of pids in which all its processes are
        self.process.wait()
        with self._changed:
            self._changed.notify_all()

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._console:
                try:
                    reply = json.loads(line)
                except ValueError:
                    continue  # of the kernel's own
                with self._changed:
                    self._replies[reply["id"]] = reply
                    self._changed.notify_all()

    def _wait(self, number: int, timeout_s: float, what: str) -> Any:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while number not in self._replies:
                if not self.is_alive:
                    raise MachineError(f"{self.name} is gone ({what}); see {self.log}")
                if time.monotonic() > deadline:
                    raise MachineError(f"{self.name}: no answer for {timeout_s:g} s ({what})")
                self._changed.wait(0.5)
            reply = self._replies.pop(number)
        if "error" in reply:
            raise MachineError(f"{self.name}: {what}: {reply['error']}")
        return reply["value"]


_SERVER = """mkdir -p {export}
mount -t ext4 /dev/ubda {export} || exit 1
modprobe -d /run/kernel nfsd
mount -t nfsd nfsd /proc/fs/nfsd
{locks}
chmod 777 {export}
exportfs -i -o rw,no_root_squash,no_subtree_check,insecure,fsid=0 '*:{export}' || exit 1
rpc.nfsd --tcp 8 || exit 1
rpc.mountd
echo Y >/proc/fs/nfsd/v4_end_grace"""
EXPORT = "/run/export"


def server(layout: Layout, disk: Path) -> Machine:
    if not disk.exists():
        with disk.open("wb") as file:
            file.truncate(8 << 30)
        subprocess.run(["mkfs.ext4", "-q", str(disk)], check=True)
    more = _SERVER.format(export=EXPORT, locks=LOCKS)
    return Machine("server", f"10.{layout.octet}.0.2", layout, disk=disk, more=more)


def mount(machine: Machine, server: Machine, options: str, folder: str) -> str:
    """Mount the server's folder on a machine; return the options that the kernel says it has."""
    machine.run(["mkdir", "-p", folder])
    path = "/" if options.startswith("vers=4") else EXPORT  # fsid=0 is the root of NFS 4
    machine.run(["mount", "-t", "nfs", "-o", options, f"{server.address}:{path}", folder])
    shown = [line.split() for line in machine.run(["cat", "/proc/mounts"]).splitlines()]
    return next(words[3] for words in shown if words[1] == folder)
