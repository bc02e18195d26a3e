"""How the first process of a sandbox binds itself, and so all that it starts, before it starts anything.

Invariant: every step either holds or ends the sandbox; none is skipped for want of a permission. What is set here
cannot be undone from inside: limits are hard, capabilities gone, the system-call filter is inherited.

``_ctypes`` stands in for ``ctypes``, whose import would cost every sandbox several milliseconds of start-up.
"""
# ruff: noqa: PTH103, PTH112, PTH120, PTH123, PTH208
# pathlib would cost every sandbox several milliseconds of start-up.

from __future__ import annotations

import os
import resource
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522
LAST_CAPABILITY = "/proc/sys/kernel/cap_last_cap"
CLONE_NEWNS, CLONE_NEWCGROUP = 0x20000, 0x2000000
MS_NOSUID, MS_NODEV, MS_BIND = 2, 4, 4096
OPEN_FILES = 4096


def call(name: str, *arguments: int | bytes) -> int:
    """Calls a function of the C library; integers are C ints, bytes are pointers.

    Raises:
        OSError: it returned less than 0.
    """
    import _ctypes

    handle = _ctypes.dlopen(None, 0)  # type: ignore[arg-type] # the running program and its libraries
    result: int = _ctypes.call_function(_ctypes.dlsym(handle, name), arguments)
    if result < 0:
        raise OSError(f"{name}{arguments} failed")
    return result


def prctl(option: int, value: int = 0, more: bytes | int = 0) -> None:
    """Sets one attribute of this process."""
    call("prctl", option, value, more, 0, 0)


def set_limits(config: Mapping[str, str]) -> None:
    """Bounds this process and all it starts. Not RLIMIT_AS: Node reserves far more addresses than it uses."""
    wanted = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, OPEN_FILES)]
    for key, kind in (
        ("cpu_s", resource.RLIMIT_CPU),
        ("pids", resource.RLIMIT_NPROC),
        ("file_bytes", resource.RLIMIT_FSIZE),
    ):
        if key in config:
            wanted.append((kind, int(config[key])))
    for kind, value in wanted:
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))


def join_groups(descriptors: Iterable[int]) -> None:
    """Enters control groups through files that the host opened: its rights count, not ours.

    A process that moves itself costs microseconds; moving another one waits for the whole machine (12 ms here).
    """
    for fd in descriptors:
        os.write(fd, b"0")
        os.close(fd)


def mount_tmpfs(table: str) -> None:
    """Mounts the places that can be written, each bounded in bytes and inodes, in a mount namespace of our own.

    The new control-group namespace hides the name of the group, which differs from sandbox to sandbox.

    Args:
        table: ``path:mode:bytes:inodes`` items, separated by commas.
    """
    call("unshare", CLONE_NEWNS | CLONE_NEWCGROUP)
    for item in table.split(","):
        path, mode, size, inodes = item.split(":")
        options = f"mode={mode},size={size},nr_inodes={inodes}"
        call("mount", b"tmpfs", path.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options.encode())


def show(table: str) -> None:
    """Shows what lies hidden at one path at another below the places that ``mount_tmpfs`` has covered.

    Args:
        table: ``source:target`` items, separated by commas.
    """
    for item in table.split(",") if table else ():
        source, target = item.split(":")
        if os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        call("mount", source.encode(), target.encode(), 0, MS_BIND, 0)


def drop_capabilities() -> None:
    """Gives up every capability, for good."""
    with open(LAST_CAPABILITY) as file:
        last = int(file.read())
    for capability in range(last + 1):
        prctl(PR_CAPBSET_DROP, capability)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    call("capset", struct.pack("=Ii", CAPABILITY_VERSION_3, 0), bytes(24))


def filter_system_calls(program: bytes) -> None:
    """Installs a filter that everything below inherits."""
    import array

    code = array.array("B", program)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, struct.pack("HxxxxxxP", len(program) // 8, code.buffer_info()[0]))


def descendants(root: int) -> list[int]:
    """PIDs below ``root``, from /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/" + name + "/stat", "rb") as stat:
                    parent = int(stat.read().rsplit(b")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def held_memory(pid: int) -> int:
    """Bytes of memory that go with a process: anonymous and shared, not the files that it maps."""
    return _kilobytes(f"/proc/{pid}/status", (b"RssAnon:", b"RssShmem:")) << 10


def held_memory_shared_out(pid: int) -> int:
    """As ``held_memory``, each page divided by its holders; slower, and plain where a process forbids the look."""
    return _kilobytes(f"/proc/{pid}/smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:")) << 10 or held_memory(pid)


def _kilobytes(path: str, fields: tuple[bytes, ...]) -> int:
    """Sum of some lines of a file of /proc; 0 when it cannot be read."""
    total = 0
    try:
        with open(path, "rb") as file:
            for line in file:
                if line.startswith(fields):
                    total += int(line.split()[1])
    except (OSError, ValueError):
        return 0
    return total


class MemoryWatch:
    """Keeps the processes of a sandbox below a bound where no control group does.

    It looks every ``PERIOD_S`` and kills the process that holds most; what is still over at the next look is killed
    whole. Between two looks more can be taken: a weaker bound than the kernel's own.
    """

    PERIOD_S = 0.05

    def __init__(self, limit: int, pids: Callable[[], list[int]], kill: Callable[[int], None]) -> None:
        self._limit = limit
        self._pids = pids
        self._kill = kill
        self._was_over = False

    def look(self) -> bool:
        """One look; whether something was killed."""
        pids = self._pids()
        if sum(map(held_memory, pids)) > self._limit:
            held = {pid: held_memory_shared_out(pid) for pid in pids}
            if sum(held.values()) > self._limit:
                for pid in pids if self._was_over else [max(held, key=held.__getitem__)]:
                    self._kill(pid)
                self._was_over = True
                return True
        self._was_over = False
        return False
