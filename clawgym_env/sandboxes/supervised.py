"""The host's half of a running sandbox: one control socket, on whose other end ``init.py`` serves.

Invariant: closing the control socket (the lease) ends everything inside. Nothing that comes from inside is trusted:
messages have a fixed form, output is bounded while it is read, and files are read by ``harvest``.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clawgym_env.errors import SandboxClosed, SandboxError
from clawgym_env.sandboxes import init
from clawgym_env.sandboxes.base import ExecResult, Limits, Mount
from clawgym_env.sandboxes.harvest import harvest
from clawgym_env.sandboxes.launching import STOP_TIMEOUT_S, Started, block_until_exit, wait_for_exit
from clawgym_env.sandboxes.pipes import Capture, memory_file

START_TIMEOUT_S = 20.0
SIGKILLED = -9


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things are, as seen from inside, and the environment that every command starts from."""

    home: str
    workspace: str
    env: Mapping[str, str]


class SupervisedSandbox:
    """A sandbox whose first process is ``init.py``; it lives in the event loop that made it."""

    def __init__(self, started: Started, *, layout: Layout, limits: Limits) -> None:
        """Takes over a launcher that was just spawned."""
        self._process = started.process
        self._control = started.control
        self._log_fd = started.log_fd
        self._layout = layout
        self._limits = limits
        self._expires = time.monotonic() + limits.wall_s
        self._loop = asyncio.get_running_loop()
        self._hello: asyncio.Future[None] = self._loop.create_future()
        self._pending: dict[int, asyncio.Future[int]] = {}
        self._last_id = 0
        self._workspace_fd = -1
        self._listener: socket.socket | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._open = True
        self._loop.add_reader(self._control, self._on_message)

    async def started(self) -> None:
        """Waits until the first process has spoken.

        Raises:
            SandboxError: it ended or said nothing; the message holds the launcher's complaint.
        """
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._hello
        except TimeoutError:
            raise SandboxError(f"the sandbox did not start within {START_TIMEOUT_S:g} s: {self.log()}") from None
        except SandboxClosed:
            raise SandboxError(f"the sandbox did not start: {self.log() or 'its launcher said nothing'}") from None
        self._close_log()

    def log(self) -> str:
        """What the launcher complained about, at most a few lines."""
        return os.pread(self._log_fd, 4096, 0).decode(errors="replace").strip()

    def _close_log(self) -> None:
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1

    @property
    def listener(self) -> socket.socket | None:
        """Listening socket that only this sandbox can reach."""
        return self._listener

    @property
    def base_url(self) -> str:
        """The listener's address as seen from inside.

        Raises:
            SandboxError: there is no listener.
        """
        if self._listener is None:
            raise SandboxError("this sandbox has no listener: it was made with network='none'")
        host, port = self._listener.getsockname()
        return f"http://{host}:{port}"

    @property
    def home(self) -> str:
        """HOME as seen from inside."""
        return self._layout.home

    @property
    def workspace(self) -> str:
        """Workspace as seen from inside."""
        return self._layout.workspace

    def inside(self, mount: Mount) -> str:
        """Path at which ``mount`` is seen from inside."""
        return mount.target

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 600.0,
    ) -> ExecResult:
        """Runs a command to its end or its deadline; cancelling kills its process group.

        A sandbox that reaches ``wall_s`` meanwhile gives the result of a killed command.

        Raises:
            SandboxClosed: the sandbox had ended, or ended for another reason than its time.
            SandboxError: an argument cannot be passed to a process.
        """
        request = _encode_command(argv, {**self._layout.env, **(env or {})}, cwd or self.workspace)
        limit = self._limits.output_bytes
        with Capture(self._loop, limit) as out, Capture(self._loop, limit) as err:
            with memory_file(request) as request_fd, memory_file(stdin) as stdin_fd:
                request_id, ended = self._send(init.EXEC, [request_fd, stdin_fd, out.write_fd, err.write_fd])
            out.close_write_end()
            err.close_write_end()
            rc, timed_out = await self._end_of(request_id, ended, timeout_s)
            stdout, stderr = out.finish(), err.finish()
        return ExecResult(rc, stdout, stderr, timed_out=timed_out, truncated=out.truncated or err.truncated)

    async def _end_of(self, request_id: int, ended: asyncio.Future[int], timeout_s: float) -> tuple[int, bool]:
        """Exit code of a command, and whether it ran out of time."""
        try:
            done, _ = await asyncio.wait([ended], timeout=timeout_s)
            if done:
                return ended.result(), False
            self._kill(request_id)
            await asyncio.wait([ended], timeout=STOP_TIMEOUT_S)
            return (ended.result() if ended.done() else SIGKILLED), True
        except SandboxClosed:
            if time.monotonic() < self._expires - 0.1:
                raise
            return SIGKILLED, True
        except asyncio.CancelledError:
            self._kill(request_id)
            raise
        finally:
            self._pending.pop(request_id, None)

    async def put(self, path: str, data: bytes) -> None:
        """Writes a file: a path relative to the workspace, or ``~/...`` for HOME.

        Raises:
            SandboxError: the path leads elsewhere or cannot be written.
        """
        await self.put_all({path: data})

    async def put_all(self, files: Mapping[str, bytes]) -> None:
        """Writes several files, as ``put`` does."""
        if not files:
            return
        targets = [(os.fsencode(self._target(path)), content) for path, content in files.items()]
        with memory_file(init.encode_files(targets)) as fd:
            request_id, done = self._send(init.PUT, [fd])
        code = await self._answer(request_id, done)
        if code != 0:
            raise SandboxError(f"cannot write {', '.join(files)[:200]} in the sandbox: {os.strerror(code)}")

    def _target(self, path: str) -> str:
        """Absolute path inside of a ``put`` path."""
        root, relative = (self.home, path[2:]) if path.startswith("~/") else (self.workspace, path)
        if not relative or "\0" in relative or relative.startswith("/") or ".." in relative.split("/"):
            raise SandboxError(f"{path!r} is neither a path in the workspace nor '~/...' in HOME")
        return f"{root}/{relative}"

    async def kill_all(self) -> None:
        """Kills every process inside except the sandbox's own; waits for the end of a sandbox that is ending.

        Raises:
            SandboxError: some process would not die.
        """
        try:
            code = await self._answer(*self._send(init.KILL_ALL, []))
        except SandboxClosed:
            await wait_for_exit(self._process, STOP_TIMEOUT_S)
            return
        if code != 0:
            raise SandboxError(f"processes in the sandbox survived a kill: {os.strerror(code)}")

    async def collect(self, *, max_files: int = 4096, max_bytes: int = 64 << 20) -> dict[str, bytes]:
        """Reads the workspace's regular files; also after the sandbox has reached its time.

        Raises:
            SandboxError: more files or bytes than allowed.
            SandboxClosed: the sandbox was stopped.
        """
        if self._workspace_fd < 0:
            raise SandboxClosed("the sandbox was stopped; its workspace is gone")
        fd = os.dup(self._workspace_fd)
        try:
            return await asyncio.to_thread(harvest, fd, max_files=max_files, max_bytes=max_bytes)
        finally:
            os.close(fd)

    async def stop(self) -> None:
        """Ends everything inside and removes what it held; idempotent.

        Cancelling the caller neither stops this nor hastens its return: when it ends, all is gone.
        """
        self.release()
        if self._stopping is None:
            self._stopping = self._loop.create_task(self._gone())
        cancelled = False
        while not self._stopping.done():
            try:
                await asyncio.shield(self._stopping)
            except asyncio.CancelledError:
                cancelled = True
                if self._stopping.cancelled():
                    break
        if cancelled:
            raise asyncio.CancelledError
        self._stopping.result()

    def release(self) -> None:
        """Gives the lease up, without waiting for what follows from it."""
        self._disconnect()
        if self._workspace_fd >= 0:
            os.close(self._workspace_fd)
            self._workspace_fd = -1
        if self._listener is not None:
            self._listener.close()

    async def _gone(self) -> None:
        """Waits for the end of the launcher, and so of all processes inside."""
        try:
            await wait_for_exit(self._process, STOP_TIMEOUT_S)
            await asyncio.to_thread(self._remove_leftovers)
        except asyncio.CancelledError:  # the loop itself is closing: a short block is better than a leak
            block_until_exit(self._process)
            self._remove_leftovers()
            raise
        finally:
            self._close_log()

    def _remove_leftovers(self) -> None:
        """What a backend keeps on the host is removed here, by a thread; idempotent."""

    async def __aenter__(self) -> SupervisedSandbox:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def _send(self, kind: int, fds: Sequence[int]) -> tuple[int, asyncio.Future[int]]:
        """Sends a request; its answer resolves the future."""
        if not self._open:
            raise SandboxClosed("the sandbox has ended")
        self._last_id += 1
        ended: asyncio.Future[int] = self._loop.create_future()
        try:
            socket.send_fds(self._control, [init.REQUEST.pack(kind, self._last_id)], fds)
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.ECONNRESET):
                raise SandboxClosed("the sandbox has ended") from None
            raise SandboxError(f"cannot reach the sandbox: {error.strerror}") from error
        self._pending[self._last_id] = ended
        return self._last_id, ended

    async def _answer(self, request_id: int, done: asyncio.Future[int]) -> int:
        try:
            return await done
        finally:
            self._pending.pop(request_id, None)

    def _kill(self, request_id: int) -> None:
        if self._open:
            try:
                self._control.send(init.REQUEST.pack(init.KILL, request_id))
            except OSError:
                self._disconnect()

    def _on_message(self) -> None:
        """Reads one message of the sandbox; descriptors are taken from the first one only."""
        fds: list[int] = []
        try:
            if self._hello.done():
                data = self._control.recv(init.REPLY.size)
            else:
                data, fds, _, _ = socket.recv_fds(self._control, init.REPLY.size, 2, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            self._disconnect()
            return
        try:
            kind, request_id, value = init.REPLY.unpack(data)
        except struct.error:
            self._disconnect()
            return
        if kind == init.HELLO and not self._hello.done() and fds:
            self._workspace_fd = fds[0]
            self._listener = socket.socket(fileno=fds[1]) if len(fds) > 1 else None
            self._hello.set_result(None)
        elif request_id in self._pending and not self._pending[request_id].done():
            self._pending[request_id].set_result(value)

    def _disconnect(self) -> None:
        """Closes the control socket and fails all that waits for an answer."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._control)
        try:
            self._control.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise
        finally:
            self._control.close()
        waiting: list[asyncio.Future[Any]] = [self._hello, *self._pending.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(SandboxClosed("the sandbox has ended"))
                future.exception()  # waited for or not, it is no news to the loop's exception handler


def _encode_command(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> bytes:
    """Packs a command for the init."""
    if not argv:
        raise SandboxError("an empty command cannot be run")
    if any("\0" in part for part in (*argv, *env, *env.values(), cwd)):
        raise SandboxError("a command, its environment and its folder cannot contain NUL")
    if any("=" in name for name in env):
        raise SandboxError("an environment variable's name cannot contain '='")
    return init.encode_exec(
        [os.fsencode(part) for part in argv],
        [os.fsencode(f"{name}={value}") for name, value in env.items()],
        os.fsencode(cwd),
    )
