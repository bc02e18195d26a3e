"""Where sandboxes keep what must lie on the host's disk, and how it is found again when its owner has died.

Invariant: every folder names its owner (boot, pid, start time of the pid), so that ``reap`` removes exactly those
folders whose owner no longer runs, and never one of a live owner.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import tempfile
import time
from pathlib import Path

from clawgym_env.errors import SandboxError

OWNER_FILE = "owner"
MARKER = "CLAWGYM_SANDBOX"  # environment variable of every process that a sandbox starts on the bare host
UNOWNED_GRACE_S = 60.0


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


def make_folder(prefix: str) -> Path:
    """A new folder of this process's."""
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=base_folder()))
    (path / OWNER_FILE).write_text(identity(os.getpid()))
    return path


def identity(pid: int) -> str:
    """Names a process for good: boot, pid and start time; empty when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return "" if fields[0] == b"Z" else f"{boot} {pid} {int(fields[19])}"


def reap() -> int:
    """Removes what dead owners left: first their processes, then their folders.

    Returns:
        How many folders were removed.
    """
    removed = 0
    for path in base_folder().iterdir():
        if path.is_dir() and not path.is_symlink() and not _owner_lives(path):
            kill_marked(path.name)
            shutil.rmtree(path, ignore_errors=True)
            removed += 1
    return removed


def _owner_lives(path: Path) -> bool:
    """Whether a folder's owner runs; a folder without a record yet gets the benefit of the doubt for a while."""
    try:
        owner = (path / OWNER_FILE).read_text()
    except OSError:
        owner = ""
    try:
        if len(owner.split()) != 3:
            return time.time() - path.stat().st_mtime < UNOWNED_GRACE_S
    except FileNotFoundError:
        return False
    return identity(int(owner.split()[1])) == owner


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
