"""Commands on the bare host, in folders of their own: for machines without namespaces, and for debugging.

Invariant: nothing is isolated here, so this backend runs only when it is named. It bounds time, CPU seconds and file
sizes, and takes every process that it started down with it; an agent inside can read and write whatever you can.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

from clawgym_env.errors import SandboxError
from clawgym_env.sandboxes import folders, init
from clawgym_env.sandboxes.base import Capabilities, Limits, Mount, SandboxSpec
from clawgym_env.sandboxes.launching import Started, check_spec, init_arguments, spawn
from clawgym_env.sandboxes.supervised import Layout, SupervisedSandbox

ANY_PORT = "0"


class ProcessSandbox(SupervisedSandbox):
    """A sandbox that is a folder and a supervised process tree."""

    def __init__(self, started: Started, folder: Path, *, layout: Layout, limits: Limits) -> None:
        super().__init__(started, layout=layout, limits=limits)
        self._folder = folder

    def inside(self, mount: Mount) -> str:
        """The host's own path: nothing is mounted here."""
        return str(mount.source)

    def _remove_leftovers(self) -> None:
        if self._process.returncode != 0:  # it was killed, or could not kill all of its own
            folders.kill_marked(self._folder.name)
        shutil.rmtree(self._folder, ignore_errors=True)


class ProcessBackend:
    """Makes sandboxes that isolate nothing."""

    name = "process"

    def __init__(self) -> None:
        self._reaped = False

    def probe(self) -> Capabilities:
        """Works wherever there is /proc."""
        if sys.platform != "linux":
            return Capabilities(False, "the process backend needs Linux")
        return Capabilities(True, "no isolation: commands run on this machine as you")

    def reap(self) -> int:
        """Removes what sandboxes of dead owners left on the host; returns how many folders."""
        self._reaped = True
        return folders.reap()

    async def create(self, spec: SandboxSpec) -> ProcessSandbox:
        """Starts a sandbox.

        Raises:
            SandboxError: this start failed, or a limit cannot be kept.
        """
        check_spec(spec)
        _refuse_unkept(spec.limits)
        if not self._reaped:
            await asyncio.to_thread(self.reap)
        sandbox = _start(spec)
        try:
            await sandbox.started()
            await sandbox.put_all(spec.files)
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox


def _refuse_unkept(limits: Limits) -> None:
    """Raises for bounds that were set and would be ignored."""
    default = Limits()
    for name in ("pids", "tmp_mb"):
        if getattr(limits, name) not in (None, getattr(default, name)):
            raise SandboxError(
                f"the process backend cannot bound Limits.{name}; leave it out or use sandbox=bubblewrap"
            )


def _start(spec: SandboxSpec) -> ProcessSandbox:
    """Makes the folder and runs the supervisor in it."""
    folder = folders.make_folder("process")
    home, workspace, tmp = (str(folder / name) for name in ("home", "workspace", "tmp"))
    base = {"PATH": os.environ.get("PATH", os.defpath), folders.MARKER: folder.name}
    config = {"workspace": workspace, "folder": str(folder)}
    if spec.network == "proxy":
        config["port"] = ANY_PORT
    try:
        for path in (home, workspace, tmp):
            Path(path).mkdir()
        program = [sys.executable, "-I", "-S", init.__file__]
        started = spawn(
            lambda control: [*program, *init_arguments(control, spec.limits, config)], (), {"cwd": folder, "env": base}
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    env = {**base, "HOME": home, "LANG": "C.UTF-8", "TMPDIR": tmp, **spec.env}
    return ProcessSandbox(started, folder, layout=Layout(home, workspace, env), limits=spec.limits)
