"""What a sandbox is: a place of its own for one rollout, thrown away afterwards.

Invariant: nothing that runs inside outlives the owner; from inside, only this rollout's listener can be reached. A
sandbox never knows the proxy: it hands out a listening socket, and whoever owns the rollout serves it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

#: Fixed paths inside every sandbox, so that the rollouts of a group share their first prompt token for token.
HOME = "/home/agent"
WORKSPACE = "/workspace"
PORT = 8080
AGENT_UID = 1000


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource bounds of one sandbox; ``None`` asks for no bound. ``Capabilities.limits`` says how each is kept.

    Attributes:
        cpu: CPUs' worth of time a second, 0.5 for half a CPU.
        cpu_s: CPU seconds of each process.
        memory_mb: Memory of all processes together, in MiB; files in the sandbox's tmpfs count where a control group
            keeps it.
        pids: Processes and threads, the sandbox's own first process included.
        disk_mb: Size of each of HOME, /tmp and the workspace, in MiB.
        inodes: Files and folders in each of them.
        wall_s: Seconds from start to the forced end of the whole sandbox.
        output_bytes: Bytes of stdout, and of stderr, kept from one ``exec``.
        file_bytes: Largest file that can be written.
    """

    cpu: float | None = None
    cpu_s: float | None = 120.0
    memory_mb: int | None = 4096
    pids: int | None = 512
    disk_mb: int = 256
    inodes: int = 1 << 16
    wall_s: float = 900.0
    output_bytes: int = 1 << 20
    file_bytes: int | None = 256 << 20


@dataclass(frozen=True, slots=True)
class Mount:
    """A host folder or file shown read-only at a fixed path inside."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What one sandbox starts with.

    Attributes:
        files: Relative workspace path -> content.
        env: Environment of every ``exec``, on top of the sandbox's own PATH, HOME, LANG and TMPDIR.
        mounts: Read-only host paths (the harness and its runtime).
        image: Docker image to run in, or a folder with a Dockerfile; ``None`` shows the host's own /usr.
        network: ``proxy`` opens the rollout's listener and nothing else; ``none`` not even that.
        tool_ports: Loopback ports on which further servers of the host can be reached (an MCP server, a search
            service): one listener each, in ``Sandbox.tools``. Each is a way out, as wide as what serves it.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: Sequence[Mount] = ()
    limits: Limits = field(default_factory=Limits)
    image: str | Path | None = None
    network: Literal["proxy", "none"] = "proxy"
    tool_ports: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ExecResult:
    """One finished command.

    Attributes:
        rc: Exit code; negative is the signal that killed it.
        timed_out: It ran past its deadline and was killed, with its process group.
        truncated: More output came than ``Limits.output_bytes`` keeps.
        oom: Meanwhile something in the sandbox was killed for ``Limits.memory_mb``.
    """

    rc: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    oom: bool = False


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a probe found.

    Attributes:
        available: Whether sandboxes of this backend can be made here.
        detail: What was found, or what is missing and how to get it.
        limits: Field of ``Limits`` -> how it is kept here; one that is missing is refused when it is asked for.
    """

    available: bool
    detail: str
    limits: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class Sandbox(Protocol):
    """A running sandbox; an async context manager that stops on exit."""

    @property
    def listener(self) -> socket.socket | None:
        """Listening TCP socket whose other side only this sandbox can reach; ``None`` with network ``none``."""
        ...

    @property
    def tools(self) -> Mapping[int, socket.socket]:
        """Port -> its listener, for each of ``SandboxSpec.tool_ports``."""
        ...

    @property
    def base_url(self) -> str:
        """``http://127.0.0.1:PORT`` as seen from inside."""
        ...

    @property
    def home(self) -> str:
        """HOME as seen from inside."""
        ...

    @property
    def workspace(self) -> str:
        """Workspace as seen from inside."""
        ...

    def inside(self, mount: Mount) -> str:
        """Path at which ``mount`` is seen from inside."""
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 600.0,
    ) -> ExecResult:
        """Runs a command to its end or its deadline; cancelling kills its process group."""
        ...

    async def put(self, path: str, data: bytes) -> None:
        """Writes a file: a path relative to the workspace, or ``~/...`` for HOME."""
        ...

    async def kill_all(self) -> None:
        """Kills every process inside except the sandbox's own."""
        ...

    async def get(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """Reads one regular file of the workspace, never through a symlink and never outside it.

        Raises:
            SandboxError: there is no such file, or it is larger than allowed.
        """
        ...

    async def collect(
        self, paths: Sequence[str] | None = None, *, max_files: int = 4096, max_bytes: int = 64 << 20
    ) -> dict[str, bytes]:
        """Reads the workspace's regular files, never through a symlink and never outside it.

        Args:
            paths: Files and folders to read; ``None`` is all. What is not there is left out.

        Raises:
            WorkspaceTooLarge: more files or bytes than allowed.
        """
        ...

    def limits_met(self) -> tuple[str, ...]:
        """Fields of ``Limits`` that something inside has run into; it may have got along with that."""
        ...

    async def stop(self) -> None:
        """Ends everything inside and removes what it held; idempotent and shielded from cancellation."""
        ...

    async def __aenter__(self) -> Sandbox: ...

    async def __aexit__(self, *exc: object) -> None: ...


@runtime_checkable
class Backend(Protocol):
    """Makes sandboxes of one kind."""

    @property
    def name(self) -> str: ...

    def probe(self) -> Capabilities:
        """Finds out, by trying, whether this backend works here."""
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Starts a sandbox.

        Raises:
            SandboxUnavailable: the backend cannot work here; the message names the ways out.
            SandboxStartFailed: it failed several times in a row.
            SandboxError: what the spec asks for cannot be had.
        """
        ...

    def reap(self) -> int:
        """Removes what sandboxes of dead owners left on the host; returns how many things."""
        ...
