"""Starts the launcher of a sandbox, and waits for its end.

Invariant: the launcher holds one end of the control socket (the lease) and runs in a session of its own, so that a
terminal's Ctrl-C reaches the owner alone and the owner's end is what ends it. No wait here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from clawgym_env.errors import SandboxError, SandboxStartFailed, SandboxUnavailable

STOP_TIMEOUT_S = 10.0
START_ATTEMPTS = 3
RETRY_DELAY_S = 0.1

T = TypeVar("T")


class Launcher(Protocol):
    """What keeps a sandbox running on the host: it ends when everything inside has ended."""

    def log(self) -> str:
        """What it complained about, at most a few lines."""
        ...

    async def wait(self, timeout_s: float) -> None:
        """Waits for its end; forces it when that takes too long."""
        ...

    def block(self) -> None:
        """As ``wait``, without an event loop."""
        ...

    async def over_memory(self) -> bool:
        """Whether it is known that the sandbox itself ended for the memory that it held."""
        ...

    def close(self) -> None:
        """Lets go of what it held on the host; idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Started:
    """A sandbox that is on its way.

    Attributes:
        control: Our end of the control socket, non-blocking.
    """

    launcher: Launcher
    control: socket.socket


class ProcessLauncher:
    """A child process of ours, and the file in memory that takes its complaints."""

    def __init__(self, process: subprocess.Popen[bytes], log_fd: int) -> None:
        self.process = process
        self._log_fd = log_fd

    def log(self) -> str:
        """What it wrote to stderr."""
        return os.pread(self._log_fd, 4096, 0).decode(errors="replace").strip()

    async def wait(self, timeout_s: float) -> None:
        """Waits for its end without a thread, and kills it when it takes too long."""
        process = self.process
        if process.poll() is not None:
            return
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        pidfd = os.pidfd_open(process.pid)

        def on_end() -> None:
            loop.remove_reader(pidfd)
            ended.set_result(None)

        loop.add_reader(pidfd, on_end)
        try:
            await asyncio.wait([ended], timeout=timeout_s)
            if not ended.done():
                process.kill()
                await ended
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        process.wait()

    def block(self) -> None:
        """Blocks until its end."""
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    async def over_memory(self) -> bool:
        """The control group's counters say it better."""
        return False

    def close(self) -> None:
        """Closes the log."""
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1


def spawn(command: Callable[[int], Sequence[str]], fds: Sequence[int], popen: Mapping[str, Any]) -> Started:
    """Runs a launcher in a session of its own.

    Args:
        command: Gives the command line, from the descriptor of the sandbox's end of the control socket.
        fds: Further descriptors to be passed; read after ``command`` was called.
        popen: Further arguments of ``subprocess.Popen``; read after ``command`` was called.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    log_fd = os.memfd_create("clawgym-log", os.MFD_CLOEXEC)
    try:
        ours.setblocking(False)
        with theirs:
            argv = command(theirs.fileno())
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log_fd,
                pass_fds=(*fds, theirs.fileno()),
                start_new_session=True,
                **popen,
            )
    except BaseException:
        ours.close()
        os.close(log_fd)
        raise
    return Started(ProcessLauncher(process, log_fd), ours)


async def with_retries(start: Callable[[], Awaitable[T]]) -> T:
    """The first start that succeeds.

    Raises:
        SandboxUnavailable: the backend cannot work here: trying again is of no use.
        SandboxStartFailed: every attempt failed.
    """
    for attempt in range(START_ATTEMPTS):
        try:
            return await start()
        except SandboxUnavailable:
            raise
        except SandboxError as error:
            last = error
            await asyncio.sleep(RETRY_DELAY_S * 2**attempt)
    raise SandboxStartFailed(f"no sandbox after {START_ATTEMPTS} attempts: {last}") from last
