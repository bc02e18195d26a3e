"""Where sandboxes keep what must lie on the host's disk, and how it is found again when its owner has died.

Invariant: every folder's name holds its owner (boot, PID namespace, pid, start time) from the moment it exists, so that
``reap`` removes exactly those folders whose owner no longer runs, and never one of a live owner.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import tempfile
import time
from pathlib import Path

from clawgym_env.errors import SandboxError

MARKER = "CLAWGYM_SANDBOX"  # environment variable of every process that a sandbox starts on the bare host
IDENTITY = r"(?P<boot>[0-9a-f]{8})-(?P<namespace>\d+)-(?P<pid>\d+)-\d+"
OWNER = re.compile(rf"-(?P<identity>{IDENTITY})-\w+$")


def base_folder() -> Path:
    """The folder of this user's sandboxes, made where it is missing.

    Raises:
        SandboxError: something of another user's stands in its place.
    """
    path = Path(tempfile.gettempdir()) / f"clawgym-{os.geteuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise SandboxError(f"{path} is not a folder that only you can write; remove it or set TMPDIR to another place")
    return path


def make_folder(kind: str) -> Path:
    """A new folder of this process's; made and marked as its own in one step."""
    return Path(tempfile.mkdtemp(prefix=f"{kind}-{identity(os.getpid())}-", dir=base_folder()))


def identity(pid: int) -> str:
    """Names a running process for good, by boot, PID namespace, pid and start time; empty when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] == b"Z" else f"{_boot()}-{_namespace()}-{pid}-{int(fields[19])}"


def is_dead(owner: str) -> bool:
    """Whether the process of that identity is known to have ended.

    One in another PID namespace (a container that shares our /tmp, our cgroups or our container engine) is not ours to
    judge: it counts as living for as long as the machine runs.
    """
    parts = re.fullmatch(IDENTITY, owner)
    if parts is None or (parts["boot"] == _boot() and parts["namespace"] != _namespace()):
        return False
    return identity(int(parts["pid"])) != owner


def reap() -> int:
    """Removes what dead owners left: first their processes, then their folders.

    Returns:
        How many folders were removed.
    """
    removed = 0
    for path in base_folder().iterdir():
        owner = OWNER.search(path.name)
        if owner is not None and is_dead(owner["identity"]):
            kill_marked(path.name)
            shutil.rmtree(path, ignore_errors=True)
            removed += 1
    return removed


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").stat().st_ino)


def kill_marked(name: str) -> None:
    """Kills the processes whose environment names a sandbox, until none is found."""
    marker = f"{MARKER}={name}".encode()
    for _ in range(100):
        found = [pid for pid in _pids() if marker in _environment(pid)]
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not found:
            return
        time.sleep(0.002)


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and int(path.name) != os.getpid()]


def _environment(pid: int) -> list[bytes]:
    """Environment of a process at its start; empty when it is gone, a zombie or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
