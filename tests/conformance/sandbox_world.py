"""What the sandbox suites share: real processes, real sockets, and a way to look for leftovers on this machine."""

from __future__ import annotations

import asyncio
import os
import random
import re
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from clawgym_env.sandboxes import Backend, Sandbox, SandboxSpec, cgroups, folders, get_backend

REPOSITORY = Path(__file__).resolve().parents[2]
HELLO = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello"
FETCH = "import urllib.request as r; print(r.urlopen('{url}', timeout=5).read().decode())"


def processes_with(word: str) -> list[int]:
    """PIDs on this host whose command line holds a word."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            try:
                command = (path / "cmdline").read_bytes()
            except OSError:
                continue
            if word.encode() in command:
                found.append(int(path.name))
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Polls until a condition holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def odd_duration() -> str:
    """A sleep that no other process on this machine sleeps."""
    return f"{random.SystemRandom().randrange(10**6, 10**7)}.25"


def counted(name: str, default: int) -> int:
    """How often a test repeats itself: few times by default, as many as an environment variable says."""
    return int(os.environ.get(f"CLAWGYM_TEST_{name}", default))


def groups_of(*pids: int) -> list[Path]:
    """Control groups on this machine that sandboxes of some owners made."""
    roots = {root for root, _ in cgroups._mounts(Path("/proc")).values()}
    return [leaf for root in roots for leaf in cgroups._leaves(root) if _owner_pid(leaf) in pids]


def _owner_pid(leaf: Path) -> int:
    owner = re.search(folders.IDENTITY, leaf.name)
    return int(owner["pid"]) if owner is not None else 0


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mounts() -> list[str]:
    """Those of the host's mounts that a sandbox could have made."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "clawgym" in line]


async def answer_hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(HELLO)
    await writer.drain()
    writer.close()
    await writer.wait_closed()


@pytest.fixture
def own_base_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of this test's own for sandboxes, which other uids can pass."""
    tmp_path_factory.getbasetemp()  # must not come to lie in the folder that goes with this test
    with tempfile.TemporaryDirectory(prefix="clawgym-test-") as folder:
        Path(folder).chmod(0o711)
        monkeypatch.setattr("tempfile.tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def host_server() -> tuple[socket.socket, str]:
    """A loopback listener of the host's, for sandboxes to fail at."""
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, f"127.0.0.1:{listener.getsockname()[1]}"


class BackendTests:
    """Subclasses set ``backend_name``."""

    backend_name: str

    @pytest.fixture(autouse=True)
    def in_own_base_folder(self, own_base_folder: Path) -> None:
        """Other runs on this machine leave nothing where these tests look."""

    def run(self, use: Callable[[Sandbox], Awaitable[None]], spec: SandboxSpec | None = None) -> None:
        """Runs a coroutine function with a fresh sandbox."""

        async def main() -> None:
            async with await self.backend().create(spec or SandboxSpec()) as sandbox:
                await use(sandbox)

        asyncio.run(main())

    def backend(self) -> Backend:
        return get_backend(self.backend_name)
