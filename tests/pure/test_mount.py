"""What the kernel says of the mount under a folder, and how old answers may be there."""

from pathlib import Path

import psutil
import pytest

from hpc_elastic import shared_files
from hpc_elastic.shared_files import Mount, find

TABLE = r"""
25 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,errors=remount-ro
26 25 0:23 / /dev/shm rw,nosuid,nodev shared:3 - tmpfs tmpfs rw,size=24684092k,inode64
31 1 0:50 / / rw,relatime - overlay overlay rw,lowerdir=/var/l/A:/var/l/B,upperdir=/u,workdir=/w
40 25 0:41 / /home rw,relatime shared:22 - nfs4 10.1.0.2:/export/home rw,vers=4.2,rsize=1048576,wsize=1048576,namlen=255,hard,proto=tcp,timeo=600,retrans=2,sec=sys,clientaddr=10.1.0.7,local_lock=none,addr=10.1.0.2
41 25 0:42 / /data rw,relatime shared:23 - nfs filer:/vol/data rw,vers=3,rsize=65536,wsize=65536,namlen=255,hard,nolock,proto=tcp,timeo=600,retrans=2,sec=sys,mountaddr=10.1.0.3,mountvers=3,mountport=635,mountproto=udp,local_lock=all,addr=10.1.0.3
42 25 0:43 / /fast rw,relatime - nfs4 filer:/fast rw,vers=4.1,hard,nocto,proto=tcp,local_lock=none,addr=10.1.0.3
43 25 0:44 / /quick rw,relatime - nfs filer:/quick rw,vers=3,acregmin=1,acregmax=5,acdirmin=1,acdirmax=7,soft,nocto,proto=tcp,timeo=100,lookupcache=pos,local_lock=none,addr=10.1.0.3
44 25 0:45 / /strict rw,sync,relatime - nfs4 filer:/strict rw,vers=4.2,acregmin=0,acregmax=0,acdirmin=0,acdirmax=0,hard,noac,nocto,proto=tcp,local_lock=none,addr=10.1.0.3
45 25 0:46 / /names rw,relatime - nfs4 filer:/names rw,vers=4.2,hard,lookupcache=none,proto=tcp,local_lock=none,addr=10.1.0.3
46 40 0:41 /ann/runs /srv/my\040runs rw,noatime shared:22 - nfs4 10.1.0.2:/export/home rw,vers=4.2,hard,local_lock=none,addr=10.1.0.2
47 40 0:47 / /home/ann/scratch rw,relatime - lustre 10.149.0.5@o2ib:10.149.0.4@o2ib:/work rw,checksum,flock,user_xattr,lruresize,lazystatfs
50 25 0:48 / /gpfs/project rw,relatime - gpfs project rw
51 25 0:49 / /mnt/beegfs rw,relatime - beegfs beegfs_nodev rw,cfgFile=/etc/beegfs/beegfs-client.conf,_netdev
52 25 0:51 / /ceph rw,relatime - ceph 10.2.0.1,10.2.0.2,10.2.0.3:/ rw,name=user,secret=<hidden>,acl,mds_namespace=fs
53 25 0:52 / /far rw,nosuid,nodev,relatime - fuse.sshfs ann@far:/srv rw,user_id=1000,group_id=1000
54 25 0:53 / /sand rw,nosuid,nodev,relatime - fuse.hpc_elastic_nfs nocto,acregmin=3,acregmax=60,acdirmin=30,acdirmax=90 rw,user_id=0,group_id=0,default_permissions,allow_other
55 25 0:54 / /sound rw,nosuid,nodev,relatime - fuse.hpc_elastic_nfs cto,acregmin=3,acregmax=60,acdirmin=0.5,acdirmax=0.5 rw,user_id=0,group_id=0
56 25 0:55 / /gone rw - tmpfs  rw
"""  # noqa: E501


@pytest.mark.parametrize(
    ("number", "kind", "stale_s", "path_stale_s"),
    [
        (25, "ext4", 0, 0),
        (26, "tmpfs", 0, 0),
        (31, "overlay", 0, 0),
        (40, "nfs4", 0, 60),
        (41, "nfs", 0, 60),
        (42, "nfs4", 60, 60),
        (43, "nfs", 7, 7),
        (44, "nfs4", 0, 0),
        (45, "nfs4", 0, 0),
        (46, "nfs4", 0, 60),
        (47, "lustre", 0, 0),
        (50, "gpfs", 0, 0),
        (51, "beegfs", 1, 1),
        (52, "ceph", 0, 0),
        (53, "fuse.sshfs", 60, 60),
        (54, "fuse.hpc_elastic_nfs", 90, 90),
        (55, "fuse.hpc_elastic_nfs", 0, 0.5),
        (99, "", 60, 60),
    ],
)
def test_how_old_an_answer_may_be(number, kind, stale_s, path_stale_s):
    """A file that is opened anew is fresh but with nocto; a path may be answered from memory."""
    mount = find(TABLE, number)
    assert (mount.kind, mount.stale_s, mount.path_stale_s) == (kind, stale_s, path_stale_s)
    assert mount.opened_is_fresh == (stale_s == 0)


def test_options_of_the_mount_and_of_its_file_system_are_one_table():
    """A bind mount has options of its own beside those of what it shows."""
    options = find(TABLE, 46).options
    assert options["vers"] == "4.2" and options["local_lock"] == "none"
    assert "noatime" in options and "hard" in options


def test_what_the_kernel_has_escaped_is_read():
    """A blank in a source is written as an octal number."""
    line = r"60 25 0:60 / /x rw - nfs4 my\040filer:/a\134b rw,vers=4.2"
    assert find(line, 60).source == r"my filer:/a\b"


def test_a_mount_without_a_source():
    """The kernel writes an empty word where nothing is named."""
    assert find(TABLE, 56) == Mount("tmpfs", "", {"rw": ""})


def test_the_mount_under_a_path():
    """A mount that lies in another one is found, also by a path below it that is not there yet."""
    assert Mount.of(Path("/proc/self")).kind == "proc"
    assert Mount.of(Path("/")).kind != "proc"
    assert Mount.of(Path("/proc/self/no/such/file")) == Mount.of(Path("/proc"))


def test_a_link_leads_to_the_mount_of_its_target(tmp_path):
    """What counts is where a path ends."""
    (tmp_path / "link").symlink_to("/proc")
    assert Mount.of(tmp_path / "link").kind == "proc"
    assert Mount.of(tmp_path).kind != "proc"


def test_a_relative_path(tmp_path, monkeypatch):
    """A path is looked up from the working directory, also where it is not there yet."""
    monkeypatch.chdir(tmp_path)
    assert Mount.of(Path("no/such/file")) == Mount.of(tmp_path)


def test_no_file_is_left_open():
    """Asking costs no descriptor."""
    before = psutil.Process().num_fds()
    Mount.of(Path("/proc"))
    assert psutil.Process().num_fds() == before


def test_a_mount_that_may_keep_what_is_written_is_known():
    """NFS in any version, and what is not known to be coherent."""
    numbers = [line.split()[0] for line in TABLE.strip().splitlines()]
    keeps = [number for number in numbers if find(TABLE, int(number)).keeps_writes]
    assert keeps == ["40", "41", "42", "43", "44", "45", "46", "51", "53", "54", "55"]


def test_a_mount_in_the_place_of_another_is_looked_up_within_a_second(tmp_path, monkeypatch):
    """It may have the device number of the one that went, and answer from older caches."""
    now, found = [100.2], [find(TABLE, 40), find(TABLE, 42)]
    monkeypatch.setattr(shared_files, "_ask_about", lambda folder: asked.append(now[0]))
    monkeypatch.setattr(shared_files.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Mount, "of", lambda path: found.pop(0))
    asked: list[float] = []
    for now[0] in (100.2, 100.9, 101.1, 101.2):
        shared_files.names_listed(tmp_path)
    assert asked == [101.1, 101.2]
