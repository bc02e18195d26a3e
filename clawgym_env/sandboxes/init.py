"""First process of a sandbox: hands out the listener, runs commands, and takes everything down with it.

Invariant: this process lives exactly as long as its control socket (the *lease*) and at most ``wall_s``; when it ends,
so does all that ran below it: by the kernel where it is PID 1 of a PID namespace, by its own hand on the bare host.

It is a program, not a library: ``python3 -I -S init.py key=value ...`` on any Python >= 3.8 without site-packages. The
wire (below) is imported by the host's side. ``_socket`` and ``_signal`` stand in for their wrappers because the
wrappers import ``enum``, which would double the start-up time of every sandbox.

Wire, over one ``SOCK_SEQPACKET`` pair; big payloads travel as descriptors, so that no send ever blocks:

| to the sandbox | descriptors | answer |
|---|---|---|
| ``EXEC, id`` | request, stdin, stdout, stderr | ``EXIT, id, rc`` |
| ``KILL, id`` | | none of its own: the ``EXIT`` of ``id`` |
| ``KILL_ALL, id`` | | ``DONE, id, 0`` once nothing else runs |
| ``PUT, id`` | files | ``DONE, id, errno`` |

The first message from the sandbox is ``HELLO`` with the workspace's directory and, where asked for, the listener.
"""
# ruff: noqa: PTH103, PTH120, PTH123, PTH208, SIM105
# pathlib and contextlib would cost every sandbox several milliseconds of start-up.

from __future__ import annotations

import _signal
import _socket
import errno
import os
import resource
import select
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import NoReturn

EXEC, KILL, KILL_ALL, PUT = 1, 2, 3, 4
HELLO, EXIT, DONE = 1, 2, 3
REQUEST = struct.Struct("<BI")
REPLY = struct.Struct("<BIi")
MAX_FDS = 4
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
OPEN_FILES = 4096
KILL_TIMEOUT_S = 5.0
_FD_BYTES = struct.calcsize("i")


def encode_exec(argv: Sequence[bytes], env: Sequence[bytes], cwd: bytes) -> bytes:
    """Packs a command: NUL cannot occur in any of its parts.

    Args:
        env: ``NAME=value`` items.
    """
    return b"\0".join([cwd, b"%d" % len(argv), *argv, *env])


def decode_exec(data: bytes) -> tuple[list[bytes], list[bytes], bytes]:
    """Undoes ``encode_exec``; returns (argv, env, cwd)."""
    cwd, count, *rest = data.split(b"\0")
    return rest[: int(count)], rest[int(count) :], cwd


def encode_files(files: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Packs ``(path, content)`` pairs of bytes."""
    parts: list[bytes] = []
    for path, content in files:
        parts += [path, b"\0", b"%d" % len(content), b"\0", content]
    return b"".join(parts)


def decode_files(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Undoes ``encode_files``, one pair at a time."""
    at = 0
    while at < len(data):
        path_end = data.index(b"\0", at)
        size_end = data.index(b"\0", path_end + 1)
        end = size_end + 1 + int(data[path_end + 1 : size_end])
        yield data[at:path_end], data[size_end + 1 : end]
        at = end


def read_all(fd: int) -> bytes:
    """Whole content of a regular file or memfd, and closes it."""
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()


def write_file(path: bytes, content: bytes) -> None:
    """Writes one file and its parents, replacing what was there; never through a symlink at the last step."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with open(fd, "wb") as file:
        file.write(content)


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


def prctl(option: int, value: int) -> None:
    """Sets one attribute of this process."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def become(argv: list[bytes], env: Sequence[bytes], cwd: bytes, stdio: Sequence[int]) -> NoReturn:
    """Turns a forked child into a command."""
    try:
        os.setsid()
        for target, fd in enumerate(stdio):
            os.dup2(fd, target)
        for number in _signal.valid_signals() - {_signal.SIGKILL, _signal.SIGSTOP}:
            _signal.signal(number, _signal.SIG_DFL)  # whatever the owner ignores: a run under nohup ignores SIGHUP
        os.chdir(cwd)
        environment = {}
        for item in env:
            name, _, value = item.partition(b"=")
            environment[name] = value
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        os.write(2, b"%s: %s\n" % (argv[0], (error.strerror or "").encode()))
        os._exit(126 if isinstance(error, PermissionError) else 127)
    finally:
        os._exit(125)


def silence_own_output() -> None:
    """Detaches stdout and stderr: what the start had to say has been said."""
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    os.close(devnull)


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


class Init:
    """State of the running sandbox."""

    def __init__(self, config: Mapping[str, str]) -> None:
        self.config = config
        self.isolated = os.getpid() == 1
        self.control = _socket.socket(fileno=int(config["control"]))
        os.set_inheritable(self.control.fileno(), False)
        self.deadline = time.monotonic() + float(config["wall_s"])
        self.running: dict[int, int] = {}
        self.handlers: dict[int, Callable[..., None]] = {
            EXEC: self.start,
            KILL: self.kill,
            KILL_ALL: self.kill_all,
            PUT: self.put,
        }

    def say_hello(self) -> None:
        """Sends the workspace's directory and the listener, which then has no other holder than the host."""
        workspace = os.open(self.config["workspace"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fds, listener = [workspace], None
        if "port" in self.config:
            listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
            listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", int(self.config["port"])))
            listener.listen(128)
            fds.append(listener.fileno())
        rights = struct.pack(f"{len(fds)}i", *fds)
        self.control.sendmsg([REPLY.pack(HELLO, 0, 0)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        os.close(workspace)
        if listener is not None:
            listener.close()

    def reply(self, kind: int, request_id: int, value: int) -> None:
        """Answers; the next read finds out that the owner is gone."""
        try:
            self.control.send(REPLY.pack(kind, request_id, value))
        except OSError:
            self.running.clear()

    def receive(self) -> None:
        """Serves one request; ends everything when the owner is gone."""
        try:
            data, ancillary, _, _ = self.control.recvmsg(
                REQUEST.size, _socket.CMSG_SPACE(MAX_FDS * _FD_BYTES), _socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            data, ancillary = b"", []
        if not data:
            self.end(remove=True)
        fds: list[int] = []
        for _, _, rights in ancillary:
            fds += struct.unpack(f"{len(rights) // _FD_BYTES}i", rights)
        kind, request_id = REQUEST.unpack(data)
        self.handlers[kind](request_id, *fds)

    def start(self, request_id: int, request: int, stdin: int, stdout: int, stderr: int) -> None:
        """Runs a command as the leader of its own session."""
        argv, env, cwd = decode_exec(read_all(request))
        try:
            pid = os.fork()
        except OSError as error:
            os.write(stderr, f"cannot start a process: {error.strerror}\n".encode())
            self.reply(EXIT, request_id, 126)
        else:
            if pid == 0:
                become(argv, env, cwd, (stdin, stdout, stderr))
            self.running[pid] = request_id
        for fd in (stdin, stdout, stderr):
            os.close(fd)

    def kill(self, request_id: int) -> None:
        """Kills a command's process group; its ``EXIT`` follows when it is reaped."""
        for pid, owner in self.running.items():
            if owner == request_id:
                for send in (os.killpg, os.kill):
                    try:
                        send(pid, _signal.SIGKILL)
                    except ProcessLookupError:
                        pass

    def kill_everything(self) -> bool:
        """Kills all that runs below until nothing is left; false when something would not die in time."""
        give_up = time.monotonic() + KILL_TIMEOUT_S
        while time.monotonic() < give_up:
            for pid in [-1] if self.isolated else descendants(os.getpid()):
                try:
                    os.kill(pid, _signal.SIGKILL)
                except ProcessLookupError:
                    pass
            if not self.reap():
                return True
            time.sleep(0.001)
        return False

    def kill_all(self, request_id: int) -> None:
        """Answers once nothing else runs."""
        self.reply(DONE, request_id, 0 if self.kill_everything() else errno.EBUSY)

    def put(self, request_id: int, files: int) -> None:
        """Writes files; answers with the first errno."""
        code = 0
        try:
            for path, content in decode_files(read_all(files)):
                write_file(path, content)
        except OSError as error:
            code = error.errno or errno.EIO
        self.reply(DONE, request_id, code)

    def reap(self) -> bool:
        """Collects what has ended; false when no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            request_id = self.running.pop(pid, None)
            if request_id is not None:
                rc = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                self.reply(EXIT, request_id, rc)

    def end(self, *, remove: bool) -> NoReturn:
        """Ends this process and everything below it; ``remove`` also the host folder, when the owner is gone."""
        clean = True
        if not self.isolated:
            self.running.clear()
            clean = self.kill_everything()
            if remove and "folder" in self.config:
                import shutil

                shutil.rmtree(self.config["folder"], ignore_errors=True)
        os._exit(0 if clean else 1)

    def run(self) -> NoReturn:
        """Serves until the lease or the time ends."""
        if self.isolated:
            prctl(PR_SET_DUMPABLE, 0)  # processes of the same uid cannot trace this one
        else:
            prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become its children, as with PID 1
        set_limits(self.config)
        wake, wake_write = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wake_write, False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.say_hello()
        silence_own_output()
        poller = select.poll()
        poller.register(self.control.fileno(), select.POLLIN)
        poller.register(wake, select.POLLIN)
        while True:
            left_s = self.deadline - time.monotonic()
            if left_s <= 0:
                self.end(remove=False)
            ready = [fd for fd, _ in poller.poll(int(left_s * 1000) + 1)]
            if wake in ready:
                os.read(wake, 4096)
            self.reap()
            if self.control.fileno() in ready:
                self.receive()


def main() -> None:
    """Entry point: ``key=value`` arguments."""
    Init(dict(argument.split("=", 1) for argument in sys.argv[1:])).run()


if __name__ == "__main__":
    main()
