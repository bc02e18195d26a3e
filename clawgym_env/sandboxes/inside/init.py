"""First process of a sandbox: hands out the listener, runs commands, and takes everything down with it.

Invariant: this process lives exactly as long as its control socket (the *lease*) and at most ``wall_s``; when it ends,
so does all that ran below it: by the kernel where it is PID 1 of a PID namespace, by its own hand on the bare host.

It is a program, not a library: ``python3 -I -S init.py key=value ...`` on any Python >= 3.8 without site-packages.
``_socket`` and ``_signal`` stand in for their wrappers because the wrappers import ``enum``, which would double the
start-up time of every sandbox.
"""
# ruff: noqa: PTH100, PTH103, PTH120, PTH123, PTH208, SIM105
# pathlib and contextlib would cost every sandbox several milliseconds of start-up.

from __future__ import annotations

import _signal
import _socket
import errno
import os
import select
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import NoReturn

    from clawgym_env.sandboxes.inside import confine, wire
else:
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import confine
    import wire

KILL_TIMEOUT_S = 5.0
FD_BYTES = struct.calcsize("i")
#: The same counters in either version of control groups, as a container sees its own.
MEMORY_EVENTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
PIDS_EVENTS = ("/sys/fs/cgroup/pids.events", "/sys/fs/cgroup/pids/pids.events")


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


def _connected(config: Mapping[str, str]) -> _socket.socket:
    """The control socket: inherited, or reached at a path (a container inherits none)."""
    if "control" in config:
        control = _socket.socket(fileno=int(config["control"]))
        os.set_inheritable(control.fileno(), False)
        return control
    control = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    control.connect(config["connect"])
    return control


def _listen(port: int) -> _socket.socket:
    """A loopback listener in this network namespace."""
    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


def _open_first(paths: Sequence[str]) -> int:
    """Descriptor of the first path that can be read; -1 when none can."""
    for path in paths:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
    return -1


def _send_kill(pid: int) -> None:
    """Kills what may be gone already."""
    try:
        os.kill(pid, _signal.SIGKILL)
    except ProcessLookupError:
        pass


def silence_own_output() -> None:
    """Detaches stdout and stderr: what the start had to say has been said."""
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    os.close(devnull)


class Init:
    """State of the running sandbox."""

    def __init__(self, config: Mapping[str, str]) -> None:
        self.config = config
        self.isolated = os.getpid() == 1
        self.control = _connected(config)
        self.deadline = time.monotonic() + float(config["wall_s"])
        self.running: dict[int, int] = {}
        self.watch: confine.MemoryWatch | None = None
        self.handlers: dict[int, Callable[..., None]] = {
            wire.EXEC: self.start,
            wire.KILL: self.kill,
            wire.KILL_ALL: self.kill_all,
            wire.PUT: self.put,
        }

    def confine(self) -> None:
        """Binds this process, and so all that it will start."""
        config = self.config
        if "groups" in config:
            confine.join_groups(map(int, config["groups"].split(",")))
        if "tmpfs" in config:  # then this process has the capabilities for it
            confine.mount_tmpfs(config["tmpfs"])
            confine.show(config.get("show", ""))
            confine.drop_capabilities()
        if self.isolated:
            confine.prctl(confine.PR_SET_DUMPABLE)  # processes of the same uid cannot trace this one
        else:
            confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)  # orphans become its children, as with PID 1
        confine.set_limits(config)
        if "filter" in config:
            confine.filter_system_calls(bytes.fromhex(config["filter"]))
        if "watch_bytes" in config:
            self.watch = confine.MemoryWatch(int(config["watch_bytes"]), self.others, _send_kill)

    def others(self) -> list[int]:
        """Every process of this sandbox but this one."""
        if not self.isolated:
            return confine.descendants(os.getpid())
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]

    def say_hello(self) -> None:
        """Sends the workspace's directory, the listeners and the counters, which then the host alone holds."""
        ports = [int(port) for port in self.config.get("ports", "").split(",") if port]
        listeners = [_listen(port) for port in ports]
        fds = [os.open(self.config["workspace"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
        fds += [listener.fileno() for listener in listeners]
        value = len(listeners)
        if "counters" in self.config:
            for bit, paths in ((wire.HAS_MEMORY_EVENTS, MEMORY_EVENTS), (wire.HAS_PIDS_EVENTS, PIDS_EVENTS)):
                counter = _open_first(paths)
                if counter >= 0:
                    fds.append(counter)
                    value |= bit
        rights = struct.pack(f"{len(fds)}i", *fds)
        message = [wire.REPLY.pack(wire.HELLO, 0, value)]
        self.control.sendmsg(message, [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        for listener in listeners:
            listener.detach()
        for fd in fds:
            os.close(fd)

    def reply(self, kind: int, request_id: int, value: int) -> None:
        """Answers; the next read finds out that the owner is gone."""
        try:
            self.control.send(wire.REPLY.pack(kind, request_id, value))
        except OSError:
            self.running.clear()

    def receive(self) -> None:
        """Serves one request; ends everything when the owner is gone."""
        try:
            data, ancillary, _, _ = self.control.recvmsg(
                wire.REQUEST.size, _socket.CMSG_SPACE(wire.MAX_FDS * FD_BYTES), _socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            data, ancillary = b"", []
        if not data:
            self.end(remove=True)
        fds: list[int] = []
        for _, _, rights in ancillary:
            fds += struct.unpack(f"{len(rights) // FD_BYTES}i", rights)
        kind, request_id = wire.REQUEST.unpack(data)
        self.handlers[kind](request_id, *fds)

    def start(self, request_id: int, request: int, stdin: int, stdout: int, stderr: int) -> None:
        """Runs a command as the leader of its own session."""
        argv, env, cwd = wire.decode_exec(read_all(request))
        try:
            pid = os.fork()
        except OSError as error:
            os.write(stderr, f"cannot start a process: {error.strerror}\n".encode())
            self.reply(wire.EXIT, request_id, 126)
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
                _send_kill(-pid)
                _send_kill(pid)

    def running_below(self) -> bool:
        """Whether this process has children, seen without reaping them."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def kill_everything(self) -> bool:
        """Kills all that runs below until nothing is left; false when something would not die in time."""
        give_up = time.monotonic() + KILL_TIMEOUT_S
        while time.monotonic() < give_up:
            for pid in [-1] if self.isolated else self.others():
                _send_kill(pid)
            if not self.reap():
                return True
            time.sleep(0.001)
        return False

    def kill_all(self, request_id: int) -> None:
        """Answers once nothing else runs."""
        self.reply(wire.DONE, request_id, 0 if self.kill_everything() else errno.EBUSY)

    def put(self, request_id: int, files: int) -> None:
        """Writes files; answers with the first errno."""
        code = 0
        try:
            for path, content in wire.decode_files(read_all(files)):
                write_file(path, content)
        except OSError as error:
            code = error.errno or errno.EIO
        self.reply(wire.DONE, request_id, code)

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
                self.reply(wire.EXIT, request_id, rc)

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
        self.confine()
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
            if self.watch is not None and self.running_below():
                left_s = min(left_s, self.watch.PERIOD_S)
                if self.watch.look():
                    self.reply(wire.OVER_MEMORY, 0, 0)
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
