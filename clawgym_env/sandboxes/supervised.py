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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from clawgym_env.errors import SandboxClosed, SandboxError
from clawgym_env.sandboxes.base import ExecResult, Limits, Mount
from clawgym_env.sandboxes.cgroups import Counters
from clawgym_env.sandboxes.harvest import harvest, read_one
from clawgym_env.sandboxes.inside import wire
from clawgym_env.sandboxes.launching import STOP_TIMEOUT_S, Started
from clawgym_env.sandboxes.layout import Layout, encode_command
from clawgym_env.sandboxes.pipes import Capture, memory_file

START_TIMEOUT_S = 20.0
ANSWER_TIMEOUT_S = 30.0  # of the first process, for anything but a command
READ_TIMEOUT_S = 60.0
SIGKILLED = -9
MAX_HELLO_FDS = 1 + wire.MAX_LISTENERS + 2

T = TypeVar("T")


class SupervisedSandbox:
    """A sandbox whose first process is ``init.py``; it lives in the event loop that made it."""

    def __init__(
        self,
        started: Started,
        *,
        layout: Layout,
        limits: Limits,
        counters: Counters,
        remove: Callable[[], None],
    ) -> None:
        """Takes over a launcher that was just spawned.

        Args:
            counters: Of met limits; closed with the sandbox.
            remove: Removes what a backend keeps on the host, in a thread, once everything inside has ended.
        """
        self._launcher = started.launcher
        self._control = started.control
        self._layout = layout
        self._limits = limits
        self._counters = counters
        self._remove = remove
        self._expires = time.monotonic() + limits.wall_s
        self._expired = False
        self._loop = asyncio.get_running_loop()
        self._hello: asyncio.Future[None] = self._loop.create_future()
        self._pending: dict[int, asyncio.Future[int]] = {}
        self._last_id = 0
        self._workspace_fd = -1
        self._listener: socket.socket | None = None
        self._tools: dict[int, socket.socket] = {}
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
            why = self._launcher.log()
            raise SandboxError(f"the sandbox did not start within {START_TIMEOUT_S:g} s: {why}") from None
        except SandboxClosed:
            why = self._launcher.log() or "its launcher said nothing"
            raise SandboxError(f"the sandbox did not start: {why}") from None

    @property
    def listener(self) -> socket.socket | None:
        """Listening socket that only this sandbox can reach."""
        return self._listener

    @property
    def tools(self) -> Mapping[int, socket.socket]:
        """Port -> listener that only this sandbox can reach."""
        return self._tools

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
        request = encode_command(argv, {**self._layout.env, **(env or {})}, cwd or self.workspace)
        limit = self._limits.output_bytes
        killed_before = self._counters.memory_kills()
        with Capture(self._loop, limit) as out, Capture(self._loop, limit) as err:
            with memory_file(request) as request_fd, memory_file(stdin) as stdin_fd:
                request_id, ended = self._send(wire.EXEC, [request_fd, stdin_fd, out.write_fd, err.write_fd])
            out.close_write_end()
            err.close_write_end()
            rc, timed_out = await self._end_of(request_id, ended, timeout_s, killed_before)
            stdout, stderr = out.finish(), err.finish()
        return ExecResult(
            rc,
            stdout,
            stderr,
            timed_out=timed_out,
            truncated=out.truncated or err.truncated,
            oom=self._counters.memory_kills() > killed_before,
        )

    async def _end_of(
        self, request_id: int, ended: asyncio.Future[int], timeout_s: float, killed_before: int
    ) -> tuple[int, bool]:
        """Exit code of a command, and whether it ran out of time.

        The end of the whole sandbox is the command's end where a limit is the reason for it.
        """
        try:
            done, _ = await asyncio.wait([ended], timeout=timeout_s)
            if done:
                return ended.result(), False
            self._kill(request_id)
            await asyncio.wait([ended], timeout=STOP_TIMEOUT_S)
            return (ended.result() if ended.done() else SIGKILLED), True
        except SandboxClosed:
            if time.monotonic() >= self._expires - 0.1:
                self._expired = True
                return SIGKILLED, True
            if self._counters.memory_kills() == killed_before:
                if self._stopping is not None or not await self._launcher.over_memory():
                    raise
                self._counters.over_memory += 1
            return SIGKILLED, False
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
        with memory_file(wire.encode_files(targets)) as fd:
            request_id, done = self._send(wire.PUT, [fd])
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
            code = await self._answer(*self._send(wire.KILL_ALL, []))
        except SandboxClosed:
            await self._launcher.wait(STOP_TIMEOUT_S)
            return
        if code != 0:
            raise SandboxError(f"processes in the sandbox survived a kill: {os.strerror(code)}")

    async def get(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """Reads one regular file of the workspace; also after the sandbox has reached its time.

        Raises:
            SandboxError: there is no such file, or it is larger than allowed.
            SandboxClosed: the sandbox was stopped.
        """
        return await self._read(lambda fd: read_one(fd, path, max_bytes=max_bytes))

    async def collect(
        self, paths: Sequence[str] | None = None, *, max_files: int = 4096, max_bytes: int = 64 << 20
    ) -> dict[str, bytes]:
        """Reads the workspace's regular files; also after the sandbox has reached its time.

        Raises:
            SandboxError: more files or bytes than allowed.
            SandboxClosed: the sandbox was stopped.
        """
        return await self._read(lambda fd: harvest(fd, paths, max_files=max_files, max_bytes=max_bytes))

    async def _read(self, read: Callable[[int], T]) -> T:
        """Runs a function of the workspace's descriptor in a thread, which owns a copy of it."""
        if self._workspace_fd < 0:
            raise SandboxClosed("the sandbox was stopped; its workspace is gone")
        fd = os.dup(self._workspace_fd)

        def work() -> T:
            try:
                return read(fd)
            finally:
                os.close(fd)

        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                return await asyncio.to_thread(work)
        except TimeoutError:
            raise SandboxError(f"the workspace could not be read within {READ_TIMEOUT_S:g} s") from None

    def limits_met(self) -> tuple[str, ...]:
        """Fields of ``Limits`` that something inside has run into."""
        met = {
            "memory_mb": self._counters.memory_kills() > 0,
            "pids": self._counters.refused_forks() > 0,
            "wall_s": self._expired,
        }
        if self._layout.bounded and self._workspace_fd >= 0:
            space = os.fstatvfs(self._workspace_fd)
            met |= {"disk_mb": space.f_bavail == 0, "inodes": space.f_favail == 0}
        return tuple(name for name, is_met in met.items() if is_met)

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
        for listener in (self._listener, *self._tools.values()):
            if listener is not None:
                listener.close()

    async def _gone(self) -> None:
        """Waits for the end of the launcher, and so of all processes inside."""
        self._counters.close()
        try:
            await self._launcher.wait(STOP_TIMEOUT_S)
            await asyncio.to_thread(self._remove)
        except asyncio.CancelledError:  # the loop itself is closing: a short block is better than a leak
            self._launcher.block()
            self._remove()
            raise
        finally:
            self._launcher.close()

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
            socket.send_fds(self._control, [wire.REQUEST.pack(kind, self._last_id)], fds)
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.ECONNRESET):
                raise SandboxClosed("the sandbox has ended") from None
            raise SandboxError(f"cannot reach the sandbox: {error.strerror}") from error
        self._pending[self._last_id] = ended
        return self._last_id, ended

    async def _answer(self, request_id: int, done: asyncio.Future[int]) -> int:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await done
        except TimeoutError:
            raise SandboxError(f"the sandbox gave no answer within {ANSWER_TIMEOUT_S:g} s") from None
        finally:
            self._pending.pop(request_id, None)

    def _kill(self, request_id: int) -> None:
        if self._open:
            try:
                self._control.send(wire.REQUEST.pack(wire.KILL, request_id))
            except OSError:
                self._disconnect()

    def _on_message(self) -> None:
        """Reads one message of the sandbox; descriptors are taken from the first one only."""
        fds: list[int] = []
        try:
            if self._hello.done():
                data = self._control.recv(wire.REPLY.size)
            else:
                data, fds, _, _ = socket.recv_fds(
                    self._control, wire.REPLY.size, MAX_HELLO_FDS, socket.MSG_CMSG_CLOEXEC
                )
        except BlockingIOError:
            return
        except OSError:
            self._disconnect()
            return
        try:
            kind, request_id, value = wire.REPLY.unpack(data)
        except struct.error:
            self._disconnect()
            return
        if kind == wire.HELLO and not self._hello.done() and fds:
            self._take(value, fds)
            self._hello.set_result(None)
        elif kind == wire.OVER_MEMORY:
            self._counters.over_memory += 1
        elif request_id in self._pending and not self._pending[request_id].done():
            self._pending[request_id].set_result(value)

    def _take(self, value: int, fds: list[int]) -> None:
        """Takes over what came with the first message."""
        self._workspace_fd, *rest = fds
        count = value & 0xFF
        listeners = [socket.socket(fileno=fd) for fd in rest[:count]]
        if self._layout.has_endpoint and listeners:
            self._listener = listeners.pop(0)
        self._tools = dict(zip(self._layout.tool_ports, listeners, strict=False))
        counters = iter(rest[count:])
        if value & wire.HAS_MEMORY_EVENTS:
            self._counters.memory_fd = next(counters)
        if value & wire.HAS_PIDS_EVENTS:
            self._counters.pids_fd = next(counters)

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
