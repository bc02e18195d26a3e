"""Control groups: both versions against a tree of files made as the kernel makes them, and what is here for real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clawgym_env.errors import SandboxError
from clawgym_env.sandboxes import Limits, cgroups, folders

V1_FILES = {
    "memory": ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control", "tasks", "cgroup.procs"),
    "pids": ("pids.max", "pids.events", "tasks", "cgroup.procs"),
    "cpu": ("cpu.cfs_period_us", "cpu.cfs_quota_us", "tasks", "cgroup.procs"),
}
V2_FILES = ("memory.max", "memory.swap.max", "memory.events", "pids.max", "pids.events", "cpu.max", "cgroup.procs")
ENTER = "import os, sys, time; [os.write(int(fd), b'0') for fd in sys.argv[1:]]; time.sleep(600)"
LIMITS = Limits(memory_mb=64, pids=20, cpu=0.5)


def fake_v1(root: Path, path: str = "/outer/own", shown: str = "/") -> Path:
    """A /proc that tells of version 1 trees below ``root``; ``shown`` is the group that a container sees as the top."""
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    mounts, groups = [], ["0::/"]
    for number, name in enumerate(V1_FILES, 1):
        inside = os.path.relpath(path, shown)
        (root / name / inside).mkdir(parents=True)
        mounts.append(f"{number} 1 0:{number} {shown} {root / name} rw shared:9 - cgroup cgroup rw,{name}")
        groups.append(f"{number}:{name}:{path}")
    mounts.append(f"9 1 0:9 / {root / 'unified'} rw - cgroup2 cgroup2 rw")
    (proc / "self" / "mountinfo").write_text("\n".join(mounts) + "\n")
    (proc / "self" / "cgroup").write_text("\n".join(groups) + "\n")
    return proc


def fake_v2(root: Path, path: str = "/user.slice/run.scope", offered: str = "cpu memory pids io") -> Path:
    proc, own = root / "proc", root / "cgroup" / path.lstrip("/")
    (proc / "self").mkdir(parents=True)
    own.mkdir(parents=True)
    for name, content in (("cgroup.controllers", offered), ("cgroup.subtree_control", ""), ("cgroup.procs", "")):
        (own / name).write_text(content)
    (proc / "self" / "mountinfo").write_text(f"30 1 0:26 / {root / 'cgroup'} rw - cgroup2 cgroup2 rw,nsdelegate\n")
    (proc / "self" / "cgroup").write_text(f"0::{path}\n")
    return proc


def kernel_mkdir(files: tuple[str, ...]):  # type: ignore[no-untyped-def]
    def mkdir(path: Path) -> None:
        path.mkdir()
        for name in files:
            (path / name).touch()

    return mkdir


def v1_mkdir(path: Path) -> None:
    kernel_mkdir(V1_FILES[next(name for name in V1_FILES if name in path.parts)])(path)


@pytest.mark.parametrize("shown", ["/", "/outer"])
def test_v1_group_is_nested_below_our_own(tmp_path: Path, shown: str) -> None:
    parents, found = cgroups.find(fake_v1(tmp_path, shown=shown))
    assert parents is not None
    assert (parents.version, found) == (1, "control groups v1 (memory, pids, cpu)")
    own = "outer/own" if shown == "/" else "own"
    assert parents.folders == {name: tmp_path / name / own for name in V1_FILES}
    group = cgroups.make(parents, LIMITS, v1_mkdir)
    assert group is not None
    leaves = group.leaves
    assert {leaf.parent for leaf in leaves.values()} == set(parents.folders.values())
    assert folders.identity(os.getpid()) in leaves["memory"].name
    written = {
        name: (leaves[name.split(".")[0]] / name).read_text() for names in V1_FILES.values() for name in names[:-2]
    }
    assert written == {
        "memory.limit_in_bytes": str(64 << 20),
        "memory.memsw.limit_in_bytes": str(64 << 20),
        "memory.oom_control": "",
        "pids.max": "20",
        "pids.events": "",
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "50000",
    }


def test_v2_group_takes_all_controllers_in_one_folder(tmp_path: Path) -> None:
    parents, found = cgroups.find(fake_v2(tmp_path))
    assert parents is not None
    assert (parents.version, found) == (2, "control groups v2 (memory, pids, cpu)")
    own = tmp_path / "cgroup/user.slice/run.scope"
    assert (own / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    group = cgroups.make(parents, LIMITS, kernel_mkdir(V2_FILES))
    assert group is not None
    (leaf,) = set(group.leaves.values())
    assert leaf.parent == own
    assert (leaf / "memory.max").read_text() == str(64 << 20)
    assert (leaf / "memory.swap.max").read_text() == "0"
    assert (leaf / "pids.max").read_text() == "20"
    assert (leaf / "cpu.max").read_text() == "50000 100000"
    entrances = group.open_entrances()
    assert len(entrances) == 1
    os.write(entrances[0], b"0")
    os.close(entrances[0])
    assert (leaf / "cgroup.procs").read_text() == "0"


def test_v2_below_the_leaf_that_an_owner_moved_to(tmp_path: Path) -> None:
    """A process that a run started is in its owner's leaf; its sandboxes go beside that, not below."""
    leaf = f"/scope/{cgroups.PREFIX}{folders.identity(os.getpid())}{cgroups.OWNER_LEAF}"
    proc = fake_v2(tmp_path, path=leaf)
    for name, content in (("cgroup.controllers", "memory pids"), ("cgroup.subtree_control", "memory pids")):
        (tmp_path / "cgroup/scope" / name).write_text(content)
    parents, _ = cgroups.find(proc)
    assert parents is not None
    assert parents.folders == {"memory": tmp_path / "cgroup/scope", "pids": tmp_path / "cgroup/scope"}
    assert not parents.keeps("cpu")


def test_v2_without_delegation_says_so(tmp_path: Path) -> None:
    parents, found = cgroups.find(fake_v2(tmp_path, offered="io misc"))
    assert parents is None
    assert "no controller is delegated" in found


def test_no_tree_at_all_says_so(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mountinfo").write_text("1 1 0:1 / / rw - ext4 /dev/vda rw\n")
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    assert cgroups.find(tmp_path) == (None, "no control groups are mounted")
    (tmp_path / "self" / "cgroup").unlink()
    assert "no control groups" in cgroups.find(tmp_path)[1]


def test_a_tree_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    proc = fake_v1(tmp_path)
    for name in V1_FILES:
        shutil.rmtree(tmp_path / name / "outer/own")
        (tmp_path / name / "outer/own").touch()  # root may write anywhere: a file is where the folder should be
    parents, found = cgroups.find(proc)
    assert parents is None
    assert "cannot be written" in found


def test_what_the_kernel_refuses_leaves_nothing(tmp_path: Path) -> None:
    def half(path: Path) -> None:
        if "cpu" in path.parts:
            raise PermissionError(13, "Permission denied")
        path.mkdir()

    parents, _ = cgroups.find(fake_v1(tmp_path))
    assert parents is not None
    with pytest.raises(SandboxError, match="Permission denied"):
        cgroups.make(parents, LIMITS, half)
    assert not [leaf for name in V1_FILES for leaf in (tmp_path / name / "outer/own").iterdir()]


def test_nothing_is_made_for_limits_that_nobody_asked_for(tmp_path: Path) -> None:
    parents, _ = cgroups.find(fake_v1(tmp_path))
    assert parents is not None
    assert cgroups.make(parents, Limits(memory_mb=None, pids=None)) is None


@pytest.mark.parametrize(("name", "field"), [("memory.oom_control", "oom_kill"), ("memory.events", "oom_kill")])
def test_counters_in_either_version(tmp_path: Path, name: str, field: str) -> None:
    (tmp_path / name).write_text(f"oom_kill_disable 0\nmax 7\n{field} 2\n")
    (tmp_path / "pids.events").write_text("max 3\n")
    fds = [os.open(tmp_path / file, os.O_RDONLY) for file in (name, "pids.events")]
    counters = cgroups.Counters(*fds)
    assert (counters.memory_kills(), counters.refused_forks()) == (2, 3)
    counters.over_memory += 1
    counters.close()
    assert (counters.memory_kills(), counters.refused_forks()) == (3, 3)
    assert cgroups.Counters().memory_kills() == 0


def test_reap_takes_groups_of_dead_owners_only(tmp_path: Path) -> None:
    proc = fake_v1(tmp_path)
    boot, namespace, pid, start = folders.identity(os.getpid()).split("-")
    own = tmp_path / "pids/outer/own"
    names = {
        "dead": f"clawgym-{boot}-{namespace}-{pid}-{int(start) - 1}-0a1b2c3d",
        "living": f"clawgym-{boot}-{namespace}-{pid}-{start}-0a1b2c3d",
        "elsewhere": f"clawgym-{boot}-{int(namespace) + 1}-{pid}-{start}-0a1b2c3d",
        "owner": f"clawgym-{boot}-{namespace}-{pid}-{int(start) - 1}-owner",
        "foreign": "clawgym-something",
    }
    for name in names.values():
        (own / name).mkdir()
    assert cgroups.reap(proc) == 2
    assert {path.name for path in own.iterdir()} == {names[key] for key in ("living", "elsewhere", "foreign")}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may write the trees of this machine")
def test_real_group_is_entered_killed_and_removed() -> None:
    """With the trees that this machine has, whichever version."""
    parents, found = cgroups.find()
    assert parents is not None, found
    group = cgroups.make(parents, LIMITS)
    assert group is not None
    entrances = group.open_entrances()
    child = subprocess.Popen([sys.executable, "-c", ENTER, *map(str, entrances)], pass_fds=entrances)
    try:
        for fd in entrances:
            os.close(fd)
        end = time.monotonic() + 10
        while any(str(child.pid) not in (leaf / "cgroup.procs").read_text().split() for leaf in group.leaves.values()):
            assert time.monotonic() < end
            time.sleep(0.01)
        group.remove()
        assert child.wait(timeout=5) == -9
        assert not any(leaf.exists() for leaf in group.leaves.values())
    finally:
        child.kill()
        child.wait()


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/sys/fs/cgroup/unified/cgroup.procs").exists(),
    reason="no version 2 tree beside version 1 here",
)
def test_real_v2_leaf_is_entered_and_removed() -> None:
    """The part of version 2 that a hybrid machine has: a group without controllers."""
    leaf = Path(f"/sys/fs/cgroup/unified/clawgym-{folders.identity(os.getpid())}-00000000")
    leaf.mkdir()
    group = cgroups.Group(2, {"memory": leaf})
    (entrance,) = group.open_entrances()
    child = subprocess.Popen([sys.executable, "-c", ENTER, str(entrance)], pass_fds=[entrance])
    os.close(entrance)
    try:
        end = time.monotonic() + 10
        while str(child.pid) not in (leaf / "cgroup.procs").read_text().split():
            assert time.monotonic() < end
            time.sleep(0.01)
        group.remove()
        assert child.wait(timeout=5) == -9
        assert not leaf.exists()
    finally:
        child.kill()
        child.wait()
