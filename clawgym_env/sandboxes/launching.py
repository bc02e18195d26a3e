"""Starts the launcher of a sandbox, and waits for its end.

Invariant: the launcher holds one end of the control socket (the lease) and runs in a session of its own, so that a
terminal's Ctrl-C reaches the owner alone and the owner's end is what ends it. No wait here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clawgym_env.errors import SandboxError
from clawgym_env.sandboxes.base import Limits, SandboxSpec

STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Started:
    """A launcher that is on its way.

    Attributes:
        process: It ends when the sandbox does.
        control: Our end of the control socket, non-blocking.
        log_fd: File in memory that takes the launcher's complaints until the start.
    """

    process: subprocess.Popen[bytes]
    control: socket.socket
    log_fd: int


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
    return Started(process, ours, log_fd)


def check_spec(spec: SandboxSpec) -> None:
    """Refuses what cannot be kept.

    Raises:
        SandboxError: a memory limit was asked for, or a mount is impossible.
    """
    if spec.limits.memory_mb is not None:
        raise SandboxError(
            "Limits.memory_mb needs control groups, which this backend does not use: leave it None (tmp_mb bounds "
            "files and pids processes in sandbox=bubblewrap), or bound the memory of the whole run from outside"
        )
    for mount in spec.mounts:
        if not mount.source.exists():
            raise SandboxError(f"cannot mount {mount.source} in a sandbox: it does not exist")
        if not mount.target.startswith("/") or ".." in mount.target.split("/"):
            raise SandboxError(f"cannot mount {mount.source} at {mount.target!r}: the target must be an absolute path")


def init_arguments(control_fd: int, limits: Limits, config: Mapping[str, str]) -> list[str]:
    """Arguments of ``init.py``: ``config`` and the bounds that every backend keeps."""
    bounds = {"cpu_s": limits.cpu_s, "file_bytes": limits.file_bytes}
    settings = {"control": str(control_fd), "wall_s": str(limits.wall_s), **config}
    settings |= {name: str(math.ceil(value)) for name, value in bounds.items() if value is not None}
    return [f"{name}={value}" for name, value in settings.items()]


async def wait_for_exit(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Waits for a process of ours without a thread, and kills it when it takes too long."""
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


def block_until_exit(process: subprocess.Popen[bytes]) -> None:
    """Blocks until a process whose lease is closed has ended."""
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
