"""Control groups: one for each sandbox, below the group that this process is in, so that outer limits go on to hold.

Invariant: a group is entered by the sandbox's first process before it starts anything, through descriptors that were
opened here; all that it starts is counted. A group's name holds its owner, so that ``reap`` finds those whose owner has
died and touches no other. Both versions are known: version 1 has a tree for each controller, version 2 one for all.

Kernel documentation: admin-guide/cgroup-v1 (memory, pids, cpu) and admin-guide/cgroup-v2.
"""

from __future__ import annotations

import errno
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from clawgym_env.errors import SandboxError
from clawgym_env.sandboxes import folders
from clawgym_env.sandboxes.base import Limits

CONTROLLERS = ("memory", "pids", "cpu")
LIMITS = {"memory": "memory_mb", "pids": "pids", "cpu": "cpu"}  # controller -> field of Limits
PREFIX = "clawgym-"
OWNER_LEAF = "-owner"
PERIOD_US = 100_000
REMOVE_TIMEOUT_S = 5.0
HOW_TO_GET = (
    "control groups that this process can use: run under `systemd-run --user --scope -p Delegate=yes` (root: without "
    "--user), or in a container with its cgroup folder mounted for writing"
)


@dataclass(frozen=True, slots=True)
class Parents:
    """Where groups for sandboxes can be made.

    Attributes:
        version: 1 or 2.
        folders: Controller -> folder of the group that this process is in.
    """

    version: int
    folders: Mapping[str, Path]

    def keeps(self, limit: str) -> bool:
        """Whether a field of ``Limits`` can be kept here."""
        return any(LIMITS[controller] == limit for controller in self.folders)


@dataclass(slots=True)
class Counters:
    """The kernel's counts of met limits, read through open descriptors; -1 is none.

    Attributes:
        memory_fd: ``memory.events`` or ``memory.oom_control``.
        pids_fd: ``pids.events``.
        over_memory: Kills for memory that came to be known otherwise.
    """

    memory_fd: int = -1
    pids_fd: int = -1
    over_memory: int = 0
    _last: dict[str, int] = field(default_factory=dict)

    def memory_kills(self) -> int:
        """Processes that were killed for the memory that they held."""
        return self._read(self.memory_fd, "oom_kill") + self.over_memory

    def refused_forks(self) -> int:
        """Processes that were not started because there were too many."""
        return self._read(self.pids_fd, "max")

    def _read(self, fd: int, name: str) -> int:
        """One ``name value`` line; the last known one once the group is gone."""
        if fd >= 0:
            with suppress(OSError):
                for line in os.pread(fd, 4096, 0).decode().splitlines():
                    key, _, value = line.partition(" ")
                    if key == name:
                        self._last[name] = int(value)
        return self._last.get(name, 0)

    def close(self) -> None:
        """Reads for the last time and closes."""
        self.memory_kills()
        self.refused_forks()
        for fd in (self.memory_fd, self.pids_fd):
            if fd >= 0:
                os.close(fd)
        self.memory_fd = self.pids_fd = -1


@dataclass(frozen=True, slots=True)
class Group:
    """The control group of one sandbox: a folder in each tree.

    Attributes:
        leaves: Controller -> folder.
    """

    version: int
    leaves: Mapping[str, Path]

    def open_entrances(self) -> list[int]:
        """Descriptors into which a process writes 0 to enter; the caller closes them."""
        name = "tasks" if self.version == 1 else "cgroup.procs"
        return [os.open(leaf / name, os.O_WRONLY | os.O_CLOEXEC) for leaf in self._folders()]

    def open_counters(self) -> Counters:
        """The counts of met limits."""
        counters = Counters()
        if "memory" in self.leaves:
            name = "memory.oom_control" if self.version == 1 else "memory.events"
            counters.memory_fd = os.open(self.leaves["memory"] / name, os.O_RDONLY | os.O_CLOEXEC)
        if "pids" in self.leaves:
            counters.pids_fd = os.open(self.leaves["pids"] / "pids.events", os.O_RDONLY | os.O_CLOEXEC)
        return counters

    def remove(self) -> None:
        """Kills what is left in the group and removes it.

        Raises:
            SandboxError: it could not be removed.
        """
        for leaf in self._folders():
            if not remove_leaf(leaf):
                raise SandboxError(f"the control group {leaf} cannot be removed: something in it does not end")

    def _folders(self) -> list[Path]:
        return list(dict.fromkeys(self.leaves.values()))


def find(proc: Path = Path("/proc")) -> tuple[Parents | None, str]:
    """Where groups can be made, found by making one.

    Args:
        proc: Tells the process's groups and where their trees are mounted.

    Returns:
        The parents, or ``None``; and what was found, or why there are none.
    """
    try:
        paths = own_groups(proc)
    except OSError as error:
        return None, f"no control groups: {error}"
    v1 = {controller: paths[controller] for controller in CONTROLLERS if controller in paths}
    if v1:
        usable = {controller: folder for controller, folder in v1.items() if _can_make(folder)}
        if usable:
            return Parents(1, usable), f"control groups v1 ({', '.join(usable)})"
        return None, f"control groups v1 cannot be written at {next(iter(v1.values()))}"
    if "" not in paths:
        return None, "no control groups are mounted"
    return _find_v2(_above_owner_leaf(paths[""]))


def _find_v2(folder: Path) -> tuple[Parents | None, str]:
    if not _can_make(folder):
        return None, f"control groups v2 cannot be written at {folder}"
    offered = [name for name in CONTROLLERS if name in (folder / "cgroup.controllers").read_text().split()]
    if not offered:
        return None, f"no controller is delegated to {folder}"
    try:
        enable(folder, offered)
    except OSError as error:
        return None, f"controllers cannot be enabled below {folder}: {error.strerror}"
    return Parents(2, dict.fromkeys(offered, folder)), f"control groups v2 ({', '.join(offered)})"


def enable(folder: Path, controllers: Sequence[str]) -> None:
    """Lets a version 2 group's children have controllers.

    A group with processes of its own cannot: where those are this process alone, it moves to a leaf first.

    Raises:
        OSError: the kernel refuses, as it does while others are in the group.
    """
    switch = folder / "cgroup.subtree_control"
    missing = [name for name in controllers if name not in switch.read_text().split()]
    if not missing:
        return
    wanted = " ".join(f"+{name}" for name in missing)
    try:
        switch.write_text(wanted)
    except OSError as error:
        inside = (folder / "cgroup.procs").read_text().split()
        if error.errno != errno.EBUSY or inside != [str(os.getpid())]:
            raise
        leaf = folder / f"{PREFIX}{folders.identity(os.getpid())}{OWNER_LEAF}"
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text("0")
        switch.write_text(wanted)


def make(parents: Parents, limits: Limits, mkdir: Callable[[Path], None] = Path.mkdir) -> Group | None:
    """A group with the bounds that its parents can keep; ``None`` where none is asked for.

    Args:
        mkdir: Makes one folder of a control-group tree.

    Raises:
        SandboxError: the kernel refuses.
    """
    wanted = {c: folder for c, folder in parents.folders.items() if getattr(limits, LIMITS[c]) is not None}
    if not wanted:
        return None
    name = f"{PREFIX}{folders.identity(os.getpid())}-{secrets.token_hex(4)}"
    group = Group(parents.version, {controller: folder / name for controller, folder in wanted.items()})
    settings = settings_v1(limits) if parents.version == 1 else settings_v2(limits)
    try:
        for leaf in dict.fromkeys(group.leaves.values()):
            mkdir(leaf)
        for controller, leaf in group.leaves.items():
            for file, value in settings[controller].items():
                if (leaf / file).exists() or not file.startswith(("memory.memsw", "memory.swap")):
                    (leaf / file).write_text(value)
    except OSError as error:
        group.remove()
        raise SandboxError(f"a control group cannot be made: {error}") from error
    return group


def settings_v1(limits: Limits) -> dict[str, dict[str, str]]:
    """Controller -> file -> content; the order matters: memory is bounded before memory and swap."""
    memory = str((limits.memory_mb or 0) << 20)
    return {
        "memory": {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory},
        "pids": {"pids.max": str(limits.pids)},
        "cpu": {
            "cpu.cfs_period_us": str(PERIOD_US),
            "cpu.cfs_quota_us": str(int((limits.cpu or 0) * PERIOD_US)),
        },
    }


def settings_v2(limits: Limits) -> dict[str, dict[str, str]]:
    """Controller -> file -> content."""
    return {
        "memory": {"memory.max": str((limits.memory_mb or 0) << 20), "memory.swap.max": "0"},
        "pids": {"pids.max": str(limits.pids)},
        "cpu": {"cpu.max": f"{int((limits.cpu or 0) * PERIOD_US)} {PERIOD_US}"},
    }


def remove_leaf(leaf: Path) -> bool:
    """Kills what is in one group and removes its folder; whether it is gone."""
    give_up = time.monotonic() + REMOVE_TIMEOUT_S
    while time.monotonic() < give_up:
        try:
            leaf.rmdir()
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                return False
            for pid in _members(leaf):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
    return False


def reap(proc: Path = Path("/proc")) -> int:
    """Removes the groups of owners that have died; returns how many folders."""
    removed = 0
    for root in {root for root, _ in _mounts(proc).values()}:
        for leaf in _leaves(root):
            owner = leaf.name.removeprefix(PREFIX).rsplit("-", 1)[0]
            if folders.is_dead(owner):
                removed += remove_leaf(leaf)
    return removed


def own_groups(proc: Path = Path("/proc")) -> dict[str, Path]:
    """Controller (``""`` for version 2) -> folder of the group that this process is in."""
    mounts = _mounts(proc)
    found = {}
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in mounts:
                mountpoint, root = mounts[controller]
                found[controller] = mountpoint / os.path.relpath(path, root)
    return found


def _mounts(proc: Path) -> dict[str, tuple[Path, str]]:
    """Controller (``""`` for version 2) -> where its tree is mounted, and which group of it is shown there."""
    found: dict[str, tuple[Path, str]] = {}
    for line in (proc / "self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, mountpoint = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        place = (Path(mountpoint.encode().decode("unicode_escape")), root)
        if kind == "cgroup2":
            found.setdefault("", place)
        elif kind == "cgroup":
            for option in options.split(","):
                found.setdefault(option, place)
    return found


def _above_owner_leaf(folder: Path) -> Path:
    """The group itself, or its parent where it is the leaf that an owner moved to."""
    moved = folder.name.startswith(PREFIX) and folder.name.endswith(OWNER_LEAF)
    return folder.parent if moved else folder


def _can_make(folder: Path) -> bool:
    """Whether groups can be made below a folder, by trying."""
    trial = folder / f"{PREFIX}{folders.identity(os.getpid())}-{secrets.token_hex(4)}"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError:
        return False
    return True


def _leaves(root: Path) -> Iterator[Path]:
    """Groups of sandboxes anywhere below a mounted tree."""
    for folder, names, _ in os.walk(root):
        for name in names:
            if name.startswith(PREFIX):
                yield Path(folder, name)


def _members(leaf: Path) -> list[int]:
    try:
        return [int(pid) for pid in (leaf / "cgroup.procs").read_text().split()]
    except OSError:
        return []
