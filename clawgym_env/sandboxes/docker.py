"""Sandboxes out of containers of a Docker engine, for tasks that bring an image or a Dockerfile.

Invariant: a container has no network; the one way out is the listener that its first process (the same as with
bubblewrap) hands to the host. The engine keeps the limits. A container lives no longer than the socket that the owner
holds, and carries its owner in a label, so that ``reap`` finds what a dead one left.

The engine must run on this machine: the control socket is bound into the container from a folder of ours.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from clawgym_env.errors import SandboxError, SandboxUnavailable
from clawgym_env.sandboxes import folders, images, seccomp
from clawgym_env.sandboxes.base import AGENT_UID, HOME, PORT, WORKSPACE, Capabilities, Limits, SandboxSpec
from clawgym_env.sandboxes.bounds import check_spec, init_arguments
from clawgym_env.sandboxes.bubblewrap import ENV, HOSTNAME, PROGRAMS, SHM_BYTES
from clawgym_env.sandboxes.cgroups import Counters
from clawgym_env.sandboxes.launching import STOP_TIMEOUT_S, Started, with_retries
from clawgym_env.sandboxes.layout import Layout
from clawgym_env.sandboxes.supervised import SupervisedSandbox

OWNER_LABEL = "clawgym.owner"
CALL_TIMEOUT_S = 30.0
ACCEPT_TIMEOUT_S = 20.0
AT_ONCE = 8  # calls to the engine in flight; it serialises most of a start anyway
CONTROL = "/run/clawgym-control"
KEPT_BY = "the container engine's control groups"
INSTALL = (
    "install the Python package (pip install 'clawgym[docker]') and a Docker engine on this machine (apt-get install "
    "docker.io), start it (dockerd) and name its socket in DOCKER_HOST where it is not the usual one"
)

T = TypeVar("T")


class DockerBackend:
    """Makes sandboxes with the Docker engine that DOCKER_HOST names, or the usual one."""

    name = "docker"

    def __init__(self) -> None:
        self._client: Any = None
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._images: dict[str | Path | None, images.Image] = {}
        self._building = asyncio.Lock()

    def probe(self) -> Capabilities:
        """Finds out, by running ``true`` in a container, whether this backend works here."""
        try:
            with closing(connect()) as client:
                image = images.prepare(client, None)
                options = container_options(image, Limits()) | {"network_mode": "none", "detach": False}
                client.containers.run(image.id, ["true"], remove=True, **options)
                version = client.version()["Version"]
        except SandboxError as error:
            return Capabilities(False, str(error))
        except Exception as error:
            return Capabilities(False, f"the Docker engine cannot run a container: {error}")
        limits = dict.fromkeys(("cpu", "memory_mb", "pids"), KEPT_BY)
        return Capabilities(True, f"Docker engine {version}", limits)

    def reap(self) -> int:
        """Removes what sandboxes of dead owners left; returns how many things."""
        removed = folders.reap()
        with suppress(SandboxUnavailable), closing(connect()) as client:
            for container in _listed(client):
                if folders.is_dead(container.labels.get(OWNER_LABEL, "")):
                    _remove(container)
                    removed += 1
        return removed

    async def create(self, spec: SandboxSpec) -> SupervisedSandbox:
        """Starts a sandbox; the first one with an image builds it where it must be built.

        Raises:
            SandboxUnavailable: there is no engine, or no Python package for it.
            SandboxStartFailed: it failed several times in a row.
            SandboxError: the image cannot be had.
        """
        check_spec(spec)
        if self._client is None:
            self._client = await asyncio.to_thread(connect)
            weakref.finalize(self, self._client.close)
            await asyncio.to_thread(self.reap)
        async with self._building:
            if spec.image not in self._images:
                self._images[spec.image] = await asyncio.to_thread(images.prepare, self._client, spec.image)
        return await with_retries(partial(self._attempt, self._images[spec.image], spec))

    async def _attempt(self, image: images.Image, spec: SandboxSpec) -> SupervisedSandbox:
        """One start."""
        folder = folders.make_folder("docker")
        remove = partial(shutil.rmtree, folder, ignore_errors=True)
        try:
            launcher = await self._launch(image, spec, folder)
        except BaseException:
            remove()
            raise
        has_endpoint = spec.network == "proxy"
        layout = Layout(HOME, WORKSPACE, {**ENV, **spec.env}, has_endpoint=has_endpoint, tool_ports=spec.tool_ports)
        sandbox = SupervisedSandbox(launcher, layout=layout, limits=spec.limits, counters=Counters(), remove=remove)
        try:
            await sandbox.started()
            await sandbox.put_all(spec.files)
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def _launch(self, image: images.Image, spec: SandboxSpec, folder: Path) -> Started:
        """Creates and starts the container, and takes its first process's connection."""
        (folder / "control").mkdir(mode=0o711)
        path = folder / "control" / "socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            _bind(listener, path)
            listener.listen(1)
            listener.setblocking(False)
            launcher = ContainerLauncher(await self._created(image, spec, folder), self._slots)
            try:
                await self._call(launcher.container.start)
                control = await _accept(listener, launcher)
            except BaseException:
                await asyncio.shield(launcher.wait(0.0))
                raise
            finally:
                path.unlink()
        control.setblocking(False)
        return Started(launcher, control)

    async def _created(self, image: images.Image, spec: SandboxSpec, folder: Path) -> Any:
        """The container, not yet running; never lost, also when the caller is cancelled meanwhile."""
        options = container_options(image, spec.limits)
        command = [*image.python, *first_process(spec)]
        binds = {str(mount.source.resolve()): {"bind": mount.target, "mode": "ro"} for mount in spec.mounts}
        binds |= {str(PROGRAMS): {"bind": "/run/clawgym", "mode": "ro"}}
        binds |= {str(folder / "control"): {"bind": CONTROL, "mode": "ro"}}
        options["volumes"] = [f"{source}:{b['bind']}:ro" for source, b in binds.items()] + image.binds
        making = asyncio.ensure_future(
            self._call(partial(self._client.containers.create, image.id, command, network_mode="none", **options))
        )
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            with suppress(SandboxError):
                await asyncio.to_thread(_remove, await making)
            raise

    async def _call(self, call: Callable[[], T]) -> T:
        """One call to the engine, in a thread."""
        async with self._slots:
            return await asyncio.to_thread(_translated, call)


class ContainerLauncher:
    """A container, which ends when its first process does."""

    def __init__(self, container: Any, slots: asyncio.Semaphore) -> None:
        self.container = container
        self._slots = slots

    def log(self) -> str:
        """What its first process wrote before it spoke to us."""
        try:
            text: bytes = self.container.logs(tail=5)
        except Exception:
            return "the container has no log"
        return text.decode(errors="replace").strip()

    async def wait(self, timeout_s: float) -> None:
        """Removes the container: whatever runs in it, it is gone afterwards."""
        async with self._slots:
            await asyncio.to_thread(_remove, self.container)

    def block(self) -> None:
        """Removes the container."""
        _remove(self.container)

    async def over_memory(self) -> bool:
        """Whether the engine saw the container's memory limit met."""

        def look() -> bool:
            self.container.reload()
            return bool(self.container.attrs["State"]["OOMKilled"])

        with suppress(SandboxError):
            return await asyncio.to_thread(_translated, look)
        return False

    def close(self) -> None:
        """Holds nothing."""


def connect() -> Any:
    """A client of the engine.

    Raises:
        SandboxUnavailable: there is none, or no Python package for it.
    """
    try:
        import docker
    except ImportError:
        raise SandboxUnavailable(f"no Python package for Docker here; {INSTALL}") from None
    place = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    try:
        if place.startswith("unix://"):  # a client that finds nobody there leaves its connections open
            with socket.socket(socket.AF_UNIX) as knock:
                knock.settimeout(CALL_TIMEOUT_S)
                knock.connect(place.removeprefix("unix://"))
        client = docker.from_env(timeout=CALL_TIMEOUT_S, max_pool_size=AT_ONCE)
    except Exception as error:
        raise SandboxUnavailable(f"no Docker engine can be reached at {place} ({error}); {INSTALL}") from None
    try:
        client.ping()
    except Exception as error:
        client.close()
        raise SandboxUnavailable(f"no Docker engine answers here ({error}); {INSTALL}") from None
    return client


def container_options(image: images.Image, limits: Limits) -> dict[str, Any]:
    """What holds for every container, whatever it runs."""
    size = f"size={limits.disk_mb << 20},nr_inodes={limits.inodes}"
    own = f"{size},uid={AGENT_UID},gid={AGENT_UID},mode=755"
    shm = f"size={SHM_BYTES},nr_inodes={limits.inodes},mode=1777"
    memory = None if limits.memory_mb is None else limits.memory_mb << 20
    return {
        "user": f"{AGENT_UID}:{AGENT_UID}",
        "hostname": HOSTNAME,
        "labels": {OWNER_LABEL: folders.identity(os.getpid())},
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "tmpfs": {"/tmp": f"{own},exec", HOME: f"{own},exec", WORKSPACE: f"{own},exec", "/dev/shm": shm},
        "mem_limit": memory,
        "memswap_limit": memory,
        "nano_cpus": None if limits.cpu is None else int(limits.cpu * 1e9),
        "pids_limit": limits.pids,
        "ipc_mode": "none",
        "cgroupns": "private",
        "volumes": image.binds,
        "working_dir": "/",
        "entrypoint": [],
        "log_config": {"Type": "json-file", "Config": {"max-size": "64k"}},
    }


def first_process(spec: SandboxSpec) -> list[str]:
    """The init and its arguments, as seen from inside; the engine keeps what it does not."""
    limits = spec.limits
    ports = ([PORT] if spec.network == "proxy" else []) + list(spec.tool_ports)
    settings = {
        "connect": f"{CONTROL}/socket",
        "wall_s": str(limits.wall_s),
        "workspace": WORKSPACE,
        "ports": ",".join(map(str, ports)),
        "filter": seccomp.program().hex(),
        "counters": "1",
    }
    for name, value in (("cpu_s", limits.cpu_s), ("file_bytes", limits.file_bytes)):
        if value is not None:
            settings[name] = str(-int(-value // 1))
    return ["-I", "-S", "/run/clawgym/init.py", *init_arguments(settings)]


def _bind(listener: socket.socket, path: Path) -> None:
    """Binds without the host's path in the socket's name, which can be read inside (and has 108 bytes at most)."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    path.chmod(0o666)


async def _accept(listener: socket.socket, launcher: ContainerLauncher) -> socket.socket:
    """The first connection: nothing but the init runs in the container yet."""
    loop = asyncio.get_running_loop()
    end = time.monotonic() + ACCEPT_TIMEOUT_S
    while time.monotonic() < end:
        try:
            async with asyncio.timeout(1.0):
                connection, _ = await loop.sock_accept(listener)
                return connection
        except TimeoutError:
            await asyncio.to_thread(_translated, launcher.container.reload)
            if launcher.container.status not in ("created", "running"):
                break
    raise SandboxError(f"the container did not start: {await asyncio.to_thread(launcher.log)}")


def _translated(call: Callable[[], T]) -> T:
    """A call to the engine, whose failure is ours to name."""
    import docker
    import requests

    try:
        return call()
    except docker.errors.DockerException as error:
        raise SandboxError(f"the Docker engine refused: {error}") from error
    except requests.RequestException as error:
        raise SandboxError(f"the Docker engine gave no answer: {error}") from error


def _listed(client: Any) -> list[Any]:
    found: list[Any] = client.containers.list(all=True, filters={"label": OWNER_LABEL}, ignore_removed=True)
    return found


def _remove(container: Any) -> None:
    """Kills and removes a container, or waits until another removal of it is through."""
    import docker

    end = time.monotonic() + STOP_TIMEOUT_S
    while True:
        try:
            container.remove(force=True, v=True)
        except docker.errors.NotFound:
            return
        except docker.errors.APIError as error:
            if error.status_code != 409 or time.monotonic() > end:
                raise SandboxError(f"a container cannot be removed: {error}") from error
            time.sleep(0.02)
        else:
            return
