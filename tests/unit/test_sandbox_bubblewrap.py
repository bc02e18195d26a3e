"""bubblewrap: the suites, as root and as an ordinary user, and what is its own."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from clawgym_env.errors import SandboxUnavailable
from clawgym_env.sandboxes import Mount, Sandbox, SandboxSpec, bubblewrap, seccomp
from tests.conformance.sandbox_lifecycle import LifeCycleSuite
from tests.conformance.sandbox_limits import LimitsSuite
from tests.conformance.sandbox_suite import SandboxSuite
from tests.conformance.sandbox_threats import ThreatsSuite
from tests.conformance.sandbox_world import own_base_folder

__all__ = ["own_base_folder"]  # a fixture: used by name


class TestBubblewrap(SandboxSuite, LifeCycleSuite, LimitsSuite, ThreatsSuite):
    backend_name = "bubblewrap"

    def test_private_files_can_be_mounted(self, tmp_path: Path) -> None:
        private = tmp_path / "private"
        private.mkdir(mode=0o700)
        (private / "tool.sh").write_text("#!/bin/sh\necho tool\n")
        (private / "tool.sh").chmod(0o755)
        mounts = [Mount(private / "tool.sh", "/opt/test/tool.sh")]

        async def use(sandbox: Sandbox) -> None:
            assert (await sandbox.exec(["/opt/test/tool.sh"])).stdout == b"tool\n"

        self.run(use, SandboxSpec(mounts=mounts))

    def test_without_a_system_python_ours_is_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bubblewrap, "SYSTEM_PYTHON", Path("/nowhere/python3"))

        async def use(sandbox: Sandbox) -> None:
            init = await sandbox.exec(["sh", "-c", "tr '\\0' ' ' < /proc/1/cmdline"])
            assert init.stdout.decode().startswith(f"{Path(sys.executable).resolve()} -I -S")

        self.run(use)


def test_barred_namespaces_are_said_with_the_ways_out() -> None:
    for said in (
        "bwrap: No permissions to create a new namespace, likely because the kernel does not allow it",
        "bwrap: setting up uid map: Permission denied",
        "bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted",
        "unshare: unshare failed: Operation not permitted",
    ):
        error = bubblewrap._start_error(said)
        assert isinstance(error, SandboxUnavailable)
        for way in ("unprivileged_userns_clone", "apparmor", "root", "sandbox=process"):
            assert way in str(error)
    assert not isinstance(
        bubblewrap._start_error("bwrap: Can't mkdir /usr/x: Read-only file system"), SandboxUnavailable
    )


def test_a_barred_machine_is_refused_by_the_real_thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bwrap that fails as it does without namespaces: no fallback, no process, no folder."""
    fake = tmp_path / "bwrap"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "bubblewrap 0.9.0" && exit\n'
        'echo "bwrap: No permissions to create a new namespace" >&2; exit 1\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    backend = bubblewrap.BubblewrapBackend()
    assert bubblewrap.find_bwrap() == fake
    assert not backend.probe().available
    assert "sandbox=process" in backend.probe().detail

    async def main() -> None:
        with pytest.raises(SandboxUnavailable, match="No permissions"):
            await backend.create(SandboxSpec())

    asyncio.run(main())


def test_old_system_bwrap_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho bubblewrap 0.4.1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert bubblewrap.find_bwrap() != fake


def test_seccomp_program_jumps_stay_inside() -> None:
    """Every jump of the filter lands on an instruction, for both machines."""
    for machine in seccomp.AUDIT_ARCH:
        code = seccomp.program(machine)
        assert len(code) % 8 == 0
        instructions = [code[at : at + 8] for at in range(0, len(code), 8)]
        for at, instruction in enumerate(instructions):
            if instruction[0] & 0x07 == 0x05:
                assert at + 1 + max(instruction[2], instruction[3]) < len(instructions)
        assert instructions[-1] == seccomp._return(seccomp.ALLOW)
    with pytest.raises(SandboxUnavailable, match="riscv64"):
        seccomp.program("riscv64")
