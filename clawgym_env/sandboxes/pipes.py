"""Byte streams between host and sandbox: bounded capture of output, sealed memory files for input.

Invariant: a command that writes without end costs the host ``limit`` bytes and never blocks the event loop; a command
that closes nothing cannot keep its reader waiting after its own end.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

CHUNK = 1 << 16


@contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    """Descriptor of a read-only file in memory, at its start."""
    fd = os.memfd_create("clawgym", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


class Capture:
    """Keeps the first bytes that are written into a pipe and drops the rest.

    Attributes:
        write_fd: The end to hand to a process.
        truncated: Whether bytes were dropped.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self._loop = loop
        self._limit = limit
        self._kept = bytearray()
        self._read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        self.truncated = False
        os.set_blocking(self._read_fd, False)
        loop.add_reader(self._read_fd, self._on_readable)

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close_write_end()
        if self._read_fd >= 0:
            self._loop.remove_reader(self._read_fd)
            os.close(self._read_fd)
            self._read_fd = -1

    def close_write_end(self) -> None:
        """Closes our copy of the writing end."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def finish(self) -> bytes:
        """What was kept, after reading what the pipe holds now (and no more: other writers may go on for ever)."""
        for _ in range(_pipe_size(self._read_fd) // CHUNK + 1):
            if not self._read():
                break
        return bytes(self._kept)

    def _on_readable(self) -> None:
        if self._read() == b"":
            self._loop.remove_reader(self._read_fd)

    def _read(self) -> bytes | None:
        """Takes one chunk: empty at the end of the stream, ``None`` when there is nothing to read now."""
        try:
            chunk = os.read(self._read_fd, CHUNK)
        except BlockingIOError:
            return None
        room = self._limit - len(self._kept)
        self._kept += chunk[:room]
        self.truncated = self.truncated or len(chunk) > room
        return chunk


def _pipe_size(fd: int) -> int:
    """Capacity of a pipe in bytes."""
    return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
