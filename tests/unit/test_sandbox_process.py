"""The process backend: the common suite, and what it says about what it cannot do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clawgym_env.errors import ConfigError, SandboxError
from clawgym_env.sandboxes import BACKENDS, Limits, Mount, Sandbox, SandboxSpec, folders, get_backend
from tests.conformance.sandbox_lifecycle import LifeCycleSuite
from tests.conformance.sandbox_limits import LimitsSuite
from tests.conformance.sandbox_suite import SandboxSuite
from tests.conformance.sandbox_world import odd_duration, own_base_folder, processes_with, wait_until

__all__ = ["own_base_folder"]  # a fixture: used by name


class TestProcess(SandboxSuite, LifeCycleSuite, LimitsSuite):
    backend_name = "process"

    def test_disk_and_inodes_say_no_space(self) -> None:
        """Refused instead: see test_refuses_bounds_that_it_would_not_keep."""

    def test_a_failed_start_is_typed_and_its_siblings_go_on(self, tmp_path: Path) -> None:
        """Nothing is mounted here that could fail to be; see test_sandbox_launching.py."""

    def test_says_that_it_isolates_nothing(self) -> None:
        assert "no isolation" in self.backend().probe().detail

    def test_inside_is_the_hosts_path(self, tmp_path: Path) -> None:
        async def use(sandbox: Sandbox) -> None:
            assert sandbox.inside(Mount(tmp_path, "/opt/x")) == str(tmp_path)

        self.run(use)

    @pytest.mark.parametrize("limits", [Limits(inodes=100), Limits(disk_mb=1)])
    def test_refuses_bounds_that_it_would_not_keep(self, limits: Limits) -> None:
        async def main() -> None:
            with pytest.raises(SandboxError, match="cannot bound"):
                await self.backend().create(SandboxSpec(limits=limits))

        asyncio.run(main())

    def test_killed_supervisor_is_cleaned_up_after(self) -> None:
        """An agent here can kill the supervisor; what it started is found by the mark in its environment."""
        duration = odd_duration()

        async def main() -> None:
            before = set(folders.base_folder().iterdir())
            sandbox = await self.backend().create(SandboxSpec())
            started = await sandbox.exec(["sh", "-c", f"setsid sleep {duration} & echo $PPID"])
            os.kill(int(started.stdout), signal.SIGKILL)
            # at first it is a shell still, then setsid
            assert wait_until(lambda: len(processes_with(duration)) == 1)
            await sandbox.stop()
            assert not processes_with(duration)
            assert set(folders.base_folder().iterdir()) == before

        asyncio.run(main())


def test_reap_takes_the_dead_and_spares_the_living(own_base_folder: Path) -> None:
    duration = odd_duration()
    base = folders.base_folder()
    boot, namespace, pid, start = folders.identity(os.getpid()).split("-")
    owner = subprocess.Popen(["sleep", duration])
    gone = folders.identity(owner.pid)
    owner.kill()
    owner.wait()
    living = folders.make_folder("test")
    foreign = base / "something-else"
    dead = base / f"test-{gone}-abcdefgh"
    reused = base / f"test-{boot}-{namespace}-{pid}-{int(start) - 1}-abcdefgh"
    other_boot = base / f"test-{'0' * 8}-{namespace}-{pid}-{start}-abc_efgh"
    other_container = base / f"test-{boot}-{int(namespace) + 1}-{pid}-{start}-abcdefgh"
    for path in (foreign, dead, reused, other_boot, other_container):
        path.mkdir()
    leftover = subprocess.Popen(["sleep", duration], env={folders.MARKER: dead.name})
    try:
        assert folders.reap() == 3
        assert set(base.iterdir()) == {living, foreign, other_container}
        assert leftover.wait(timeout=5) == -signal.SIGKILL
    finally:
        leftover.kill()
        leftover.wait()


def test_base_folder_of_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"clawgym-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SandboxError, match="TMPDIR"):
        folders.base_folder()


def test_zombie_owner_counts_as_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    assert wait_until(lambda: folders.identity(child.pid) == "")
    child.wait()


def test_unknown_backend_is_refused() -> None:
    assert set(BACKENDS) == {"bubblewrap", "docker", "process"}
    with pytest.raises(ConfigError, match="bubblewrap, docker, process"):
        get_backend("bubblewarp")
