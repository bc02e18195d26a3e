"""Commands on the bare host, in folders of their own: for machines without namespaces, and for debugging.

Invariant: nothing is isolated here, so this backend runs only when it is named. It bounds time, CPU seconds and file
sizes, and takes every process that it started down with it; an agent inside can read and write whatever you can.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from functools import partial
from pathlib import Path

from clawgym_env.errors import SandboxError
from clawgym_env.sandboxes import cgroups, folders
from clawgym_env.sandboxes.base import Capabilities, Limits, Mount, SandboxSpec
from clawgym_env.sandboxes.bounds import Bounds, Means, check_spec, init_arguments
from clawgym_env.sandboxes.launching import ProcessLauncher, spawn, with_retries
from clawgym_env.sandboxes.layout import Layout
from clawgym_env.sandboxes.supervised import SupervisedSandbox

ANY_PORT = "0"
INIT = Path(__file__).parent / "inside" / "init.py"


class ProcessSandbox(SupervisedSandbox):
    """A sandbox that is a folder and a supervised process tree."""

    def inside(self, mount: Mount) -> str:
        """The host's own path: nothing is mounted here."""
        return str(mount.source)


class ProcessBackend:
    """Makes sandboxes that isolate nothing."""

    name = "process"

    def __init__(self) -> None:
        self._means: Means | None = None

    def probe(self) -> Capabilities:
        """Works wherever there is /proc."""
        if sys.platform != "linux":
            return Capabilities(False, "the process backend needs Linux")
        means = Means(counts_pids=False)
        return Capabilities(True, f"no isolation: commands run on this machine as you; {means.found}", means.limits())

    def reap(self) -> int:
        """Removes what sandboxes of dead owners left on the host; returns how many things."""
        return folders.reap() + cgroups.reap()

    async def create(self, spec: SandboxSpec) -> ProcessSandbox:
        """Starts a sandbox.

        Raises:
            SandboxStartFailed: it failed several times in a row.
            SandboxError: a limit cannot be kept, or the spec asks for an image.
        """
        check_spec(spec)
        if spec.image is not None:
            raise SandboxError("the process backend has the host's own programs; an image needs sandbox=docker")
        if self._means is None:
            self._means = await asyncio.to_thread(self._prepare)
        _refuse_unkept(spec.limits, self._means)
        return await with_retries(partial(self._attempt, self._means, spec))

    def _prepare(self) -> Means:
        self.reap()
        return Means(counts_pids=False)

    async def _attempt(self, means: Means, spec: SandboxSpec) -> ProcessSandbox:
        """One start."""
        bounds = means.bind(spec.limits)
        try:
            sandbox = _start(bounds, spec)
        except BaseException:
            bounds.remove()
            raise
        try:
            await sandbox.started()
            await sandbox.put_all(spec.files)
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox


def _refuse_unkept(limits: Limits, means: Means) -> None:
    """Raises for bounds that were set and would be ignored."""
    default = Limits()
    for name in ("pids", "disk_mb", "inodes"):
        if name not in means.limits() and getattr(limits, name) not in (None, getattr(default, name)):
            raise SandboxError(
                f"the process backend cannot bound Limits.{name} here; leave it out or use sandbox=bubblewrap"
            )


def _start(bounds: Bounds, spec: SandboxSpec) -> ProcessSandbox:
    """Makes the folder and runs the supervisor in it."""
    folder = folders.make_folder("process")
    home, workspace, tmp = (str(folder / name) for name in ("home", "workspace", "tmp"))
    base = {"PATH": os.environ.get("PATH", os.defpath), folders.MARKER: folder.name}
    ports = [ANY_PORT] * ((spec.network == "proxy") + len(spec.tool_ports))
    config = {"workspace": workspace, "folder": str(folder), "ports": ",".join(ports)}

    def remove() -> None:
        assert isinstance(started.launcher, ProcessLauncher)
        if started.launcher.process.returncode != 0:  # it was killed, or could not kill all of its own
            folders.kill_marked(folder.name)
        bounds.remove()
        shutil.rmtree(folder, ignore_errors=True)

    try:
        for path in (home, workspace, tmp):
            Path(path).mkdir()
        program = [sys.executable, "-I", "-S", str(INIT)]
        with bounds.entrances() as entrances:
            started = spawn(
                lambda control: [
                    *program,
                    *init_arguments({"control": str(control), **bounds.arguments, **config}),
                ],
                entrances,
                {"cwd": folder, "env": base},
            )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    env = {**base, "HOME": home, "LANG": "C.UTF-8", "TMPDIR": tmp, **spec.env}
    layout = Layout(
        home, workspace, env, has_endpoint=spec.network == "proxy", tool_ports=spec.tool_ports, bounded=False
    )
    return ProcessSandbox(started, layout=layout, limits=spec.limits, counters=bounds.counters(), remove=remove)
