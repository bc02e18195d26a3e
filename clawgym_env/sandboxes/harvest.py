"""Reads what an agent left behind, from outside, without trusting a single name in it.

Invariant: every step opens one name relative to an open directory and never follows a symlink, so no path can lead
out of the workspace; only regular files are read, and each is opened by the inode that was checked.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from clawgym_env.errors import SandboxError, WorkspaceTooLarge

MAX_DEPTH = 64
ENTRIES_PER_FILE = 4
MAX_PATH = 255 * 16


def harvest(
    directory_fd: int, paths: Sequence[str] | None = None, *, max_files: int, max_bytes: int
) -> dict[str, bytes]:
    """Reads the regular files below a directory.

    Args:
        directory_fd: Open directory; left open.
        paths: Relative paths of files and folders to read; ``None`` is everything. One that is missing, or leads
            through a symlink, is left out.
        max_files: Most regular files.
        max_bytes: Most bytes in all of them together.

    Returns:
        Relative path -> content, in the order of their paths. Symlinks, pipes, sockets and devices are left out.

    Raises:
        WorkspaceTooLarge: more files, bytes, entries or levels than allowed.
        SandboxError: a path that leads out.
    """
    reader = _Reader(max_files, max_bytes)
    top = os.dup(directory_fd)
    try:
        if paths is None:
            reader.walk(top, "", 0)
        for path in () if paths is None else dict.fromkeys(_plain(path) for path in paths):
            reader.reach(top, path.split("/"), "", 0)
    finally:
        os.close(top)
    return dict(sorted(reader.found.items()))


def read_one(directory_fd: int, path: str, *, max_bytes: int) -> bytes:
    """Content of one regular file below a directory.

    Raises:
        SandboxError: it is missing, no regular file, behind a symlink, or larger than allowed.
    """
    path = _plain(path)
    found = harvest(directory_fd, [path], max_files=1, max_bytes=max_bytes)
    if list(found) != [path]:
        raise SandboxError(f"no regular file {path!r} in the workspace")
    return found[path]


def _plain(path: str) -> str:
    """A relative path without empty parts.

    Raises:
        SandboxError: it leads out of the workspace, or nowhere.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or path.startswith("/") or ".." in parts or "\0" in path or len(os.fsencode(path)) > MAX_PATH:
        raise SandboxError(f"{path!r} is no path in the workspace")
    return "/".join(parts)


class _Reader:
    """Counts against the bounds while walking."""

    def __init__(self, max_files: int, max_bytes: int) -> None:
        self.max_files = max_files
        self.max_bytes = max_bytes
        self.entries_left = ENTRIES_PER_FILE * max_files
        self.bytes_left = max_bytes
        self.found: dict[str, bytes] = {}

    def walk(self, directory_fd: int, prefix: str, depth: int) -> None:
        """Reads one directory, then those in it."""
        if depth > MAX_DEPTH:
            raise WorkspaceTooLarge(f"the workspace nests folders deeper than {MAX_DEPTH} levels")
        with os.scandir(directory_fd) as entries:
            names = []
            for entry in entries:
                names.append(entry.name)
                if len(names) > self.entries_left:
                    raise WorkspaceTooLarge(
                        f"the workspace holds more than {self.max_files * ENTRIES_PER_FILE} entries"
                    )
        self.entries_left -= len(names)
        for name in names:
            self._visit(directory_fd, name, prefix + name, depth)

    def reach(self, directory_fd: int, parts: list[str], prefix: str, depth: int) -> None:
        """Reads what one path names, step by step."""
        name, *rest = parts
        if not rest:
            self._visit(directory_fd, name, prefix + name, depth)
            return
        try:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
        except OSError:  # missing, or a name longer than a name can be
            return
        try:
            status = os.fstat(fd)
            if stat.S_ISDIR(status.st_mode):
                below = _reopen(fd, status, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    self.reach(below, rest, f"{prefix}{name}/", depth + 1)
                finally:
                    os.close(below)
        finally:
            os.close(fd)

    def _visit(self, directory_fd: int, name: str, path: str, depth: int) -> None:
        try:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
        except OSError:
            return
        try:
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode):
                self._read(fd, status, path)
            elif stat.S_ISDIR(status.st_mode):
                below = _reopen(fd, status, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    self.walk(below, path + "/", depth + 1)
                finally:
                    os.close(below)
        finally:
            os.close(fd)

    def _read(self, fd: int, status: os.stat_result, path: str) -> None:
        if len(self.found) >= self.max_files:
            raise WorkspaceTooLarge(f"the workspace holds more than {self.max_files} files")
        if status.st_size > self.bytes_left:
            raise WorkspaceTooLarge(f"the workspace's files hold more than {self.max_bytes} bytes")
        with open(_reopen(fd, status, os.O_RDONLY), "rb") as file:
            content = file.read(self.bytes_left + 1)
        if len(content) > self.bytes_left:
            raise WorkspaceTooLarge(f"the workspace's files hold more than {self.max_bytes} bytes")
        self.bytes_left -= len(content)
        self.found[path] = content


def _reopen(path_fd: int, status: os.stat_result, flags: int) -> int:
    """Opens the very inode that ``path_fd`` names, also where the agent took its owner's permissions away."""
    link = Path(f"/proc/self/fd/{path_fd}")
    needed = stat.S_IRUSR | (stat.S_IXUSR if stat.S_ISDIR(status.st_mode) else 0)
    if status.st_mode & needed != needed:
        link.chmod(stat.S_IMODE(status.st_mode) | needed)
    return os.open(link, flags | os.O_CLOEXEC)
