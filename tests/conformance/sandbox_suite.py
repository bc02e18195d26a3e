"""What every sandbox backend must do; inherit ``SandboxSuite`` and name the backend."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from clawgym_env.errors import SandboxError
from clawgym_env.sandboxes import Backend, Mount, Sandbox, SandboxSpec
from tests.conformance.sandbox_world import (
    FETCH,
    BackendTests,
    answer_hello,
    odd_duration,
    processes_with,
    wait_until,
)


class SandboxSuite(BackendTests):
    """Commands and files."""

    def test_is_a_backend_that_works_here(self) -> None:
        backend = self.backend()
        assert isinstance(backend, Backend)
        assert backend.name == self.backend_name
        assert backend.probe().available, backend.probe().detail

    def test_protocol_and_fixed_names(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            assert isinstance(sandbox, Sandbox)
            shown = await sandbox.exec(["sh", "-c", 'echo "$HOME"; pwd; echo "$LANG"; test -d "$TMPDIR" && echo tmp'])
            assert shown.stdout.decode().splitlines() == [sandbox.home, sandbox.workspace, "C.UTF-8", "tmp"]

        self.run(use)

    def test_exec_streams_and_exit_code(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            done = await sandbox.exec(["sh", "-c", "cat; echo oops >&2; exit 7"], stdin=b"a\0b\xff")
            assert (done.rc, done.stdout, done.stderr) == (7, b"a\0b\xff", b"oops\n")
            assert not done.timed_out
            assert not done.truncated

        self.run(use)

    def test_exec_arguments_environment_and_folder_arrive_unchanged(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            strange = "spaces  'quotes' \"\n\t=ü"
            await sandbox.put("sub/x", b"")
            done = await sandbox.exec(
                ["sh", "-c", 'printf %s "$1$VALUE$SPECIFIC"; pwd', "sh", strange],
                env={"VALUE": strange, "SPECIFIC": "over"},
                cwd=f"{sandbox.workspace}/sub",
            )
            assert done.stdout.decode() == f"{strange}{strange}over{sandbox.workspace}/sub\n"

        self.run(use, SandboxSpec(env={"SPECIFIC": "spec"}))

    def test_exec_takes_large_arguments_and_input(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            big = "x" * 100_000
            done = await sandbox.exec(["sh", "-c", 'printf %s "$1"; wc -c', "sh", big], stdin=b"y" * 3_000_000)
            assert done.stdout.decode() == f"{big}3000000\n"

        self.run(use)

    def test_missing_program_and_killed_program(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            assert (await sandbox.exec(["no-such-program"])).rc == 127
            assert (await sandbox.exec(["/"])).rc == 126
            assert (await sandbox.exec(["sh", "-c", "kill -SEGV $$"])).rc == -signal.SIGSEGV

        self.run(use)

    def test_signals_are_not_inherited_ignored(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            done = await sandbox.exec(["sh", "-c", "yes | head -n 1; echo ${PIPESTATUS:-}"], timeout_s=10)
            assert done.stdout == b"y\n\n"
            ignored = await sandbox.exec(["grep", "SigIgn", "/proc/self/status"])
            assert int(ignored.stdout.split()[1], 16) == 0

        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
        try:
            self.run(use)
        finally:
            signal.signal(signal.SIGHUP, before)

    @pytest.mark.parametrize("argv", [[], ["sh", "a\0b"]])
    def test_commands_that_cannot_be(self, argv: list[str]) -> None:
        async def use(sandbox: Sandbox) -> None:
            with pytest.raises(SandboxError):
                await sandbox.exec(argv)

        self.run(use)

    def test_timeout_kills_the_group_and_keeps_its_output(self) -> None:
        duration = odd_duration()

        async def use(sandbox: Sandbox) -> None:
            begin = time.monotonic()
            done = await sandbox.exec(["sh", "-c", f"echo early; sleep {duration} & sleep {duration}"], timeout_s=0.3)
            assert done.timed_out
            assert done.rc == -signal.SIGKILL
            assert done.stdout == b"early\n"
            assert time.monotonic() - begin < 5
            assert wait_until(lambda: not processes_with(duration))

        self.run(use)

    def test_cancelling_exec_kills_the_group(self) -> None:
        duration = odd_duration()

        async def use(sandbox: Sandbox) -> None:
            task = asyncio.create_task(sandbox.exec(["sh", "-c", f"sleep {duration} & sleep {duration}"]))
            await asyncio.to_thread(wait_until, lambda: len(processes_with(duration)) >= 2)
            assert len(processes_with(duration)) >= 2
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(wait_until, lambda: not processes_with(duration))
            assert (await sandbox.exec(["true"])).rc == 0

        self.run(use)

    def test_background_process_does_not_hold_exec_back(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            begin = time.monotonic()
            done = await sandbox.exec(["sh", "-c", "(while :; do echo noise; sleep 0.01; done) & echo started"])
            assert done.stdout.startswith((b"started", b"noise"))
            assert time.monotonic() - begin < 5

        self.run(use)

    def test_kill_all_reaches_what_left_its_session(self) -> None:
        duration = odd_duration()

        async def use(sandbox: Sandbox) -> None:
            await sandbox.exec(["sh", "-c", f"setsid sleep {duration} & (setsid sh -c 'setsid sleep {duration}; :' &)"])
            await asyncio.to_thread(wait_until, lambda: len(processes_with(duration)) >= 3)
            assert len(processes_with(duration)) >= 3
            await sandbox.kill_all()
            assert not processes_with(duration)
            assert (await sandbox.exec(["echo", "alive"])).stdout == b"alive\n"

        self.run(use)

    def test_put_and_collect(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            await sandbox.put("a/b/c.bin", bytes(range(256)))
            await sandbox.put("~/.config/x.json", b"{}")
            await sandbox.put("start.txt", b"replaced")
            assert (await sandbox.exec(["sh", "-c", 'cat ~/.config/x.json; printf "\\377" > made'])).stdout == b"{}"
            assert await sandbox.collect() == {
                "a/b/c.bin": bytes(range(256)),
                "empty": b"",
                "made": b"\xff",
                "start.txt": b"replaced",
            }

        self.run(use, SandboxSpec(files={"start.txt": b"first", "empty": b""}))

    @pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "~/../x", "", "a\0b"])
    def test_put_stays_in_its_folders(self, path: str) -> None:
        async def use(sandbox: Sandbox) -> None:
            with pytest.raises(SandboxError):
                await sandbox.put(path, b"")

        self.run(use)

    def test_put_reports_what_is_in_the_way(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            await sandbox.put("file", b"")
            with pytest.raises(SandboxError, match="file/below"):
                await sandbox.put("file/below", b"")

        self.run(use)

    def test_collect_reads_no_links_pipes_or_sockets(self, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_text("secret")
        make = (
            f"ln -s /etc/passwd link; ln -s {secret} out; ln -s / root; ln -s . here; mkfifo pipe; mkdir deep; "
            "ln -s ../../../../../../etc deep/etc; ln real hard; "
            "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'"
        )

        async def use(sandbox: Sandbox) -> None:
            assert (await sandbox.exec(["sh", "-c", make])).rc == 0
            assert await sandbox.collect() == {"hard": b"kept", "real": b"kept"}

        self.run(use, SandboxSpec(files={"real": b"kept"}))

    def test_collect_reads_what_the_agent_made_unreadable(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            done = await sandbox.exec(["sh", "-c", "mkdir d; echo 1 > d/f; echo 2 > g; chmod 0 d/f d g"])
            assert done.rc == 0
            assert await sandbox.collect() == {"d/f": b"1\n", "g": b"2\n"}

        self.run(use)

    def test_collect_is_bounded(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            await sandbox.exec(["sh", "-c", "for i in 1 2 3; do head -c 100 /dev/zero > $i; done"])
            assert len(await sandbox.collect(max_files=3, max_bytes=300)) == 3
            with pytest.raises(SandboxError, match="more than 2 files"):
                await sandbox.collect(max_files=2)
            with pytest.raises(SandboxError, match="more than 299 bytes"):
                await sandbox.collect(max_bytes=299)
            await sandbox.exec(["truncate", "-s", "100M", "sparse"])
            with pytest.raises(SandboxError, match="bytes"):
                await sandbox.collect()
            await sandbox.exec(["sh", "-c", 'd=deep; for i in $(seq 100); do d=$d/x; done; rm *; mkdir -p "$d"'])
            with pytest.raises(SandboxError, match="levels"):
                await sandbox.collect()

        self.run(use)

    def test_listener_is_reached_from_inside(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            assert sandbox.listener is not None
            server = await asyncio.start_server(answer_hello, sock=sandbox.listener)
            async with server:
                done = await sandbox.exec(["python3", "-c", FETCH.format(url=sandbox.base_url)])
            assert done.stdout == b"hello\n", done.stderr

        self.run(use)

    def test_no_listener_without_network(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            assert sandbox.listener is None
            with pytest.raises(SandboxError):
                sandbox.base_url  # noqa: B018 -- the property itself is under test

        self.run(use, SandboxSpec(network="none"))

    def test_mount_is_seen_where_the_sandbox_says(self, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "file").write_text("mounted")
        mount = Mount(tmp_path / "folder", "/opt/test/folder")

        async def use(sandbox: Sandbox) -> None:
            assert (await sandbox.exec(["cat", f"{sandbox.inside(mount)}/file"])).stdout == b"mounted"

        self.run(use, SandboxSpec(mounts=[mount]))

    def test_missing_mount_is_refused(self, tmp_path: Path) -> None:
        async def main() -> None:
            with pytest.raises(SandboxError, match="does not exist"):
                await self.backend().create(SandboxSpec(mounts=[Mount(tmp_path / "none", "/opt/none")]))

        asyncio.run(main())

    def test_get_and_declared_files(self) -> None:
        make = "mkdir -p d/e; echo 1 > d/e/f; echo 2 > g; ln -s d link; ln -s g file; mkfifo pipe; chmod 0 d/e"

        async def use(sandbox: Sandbox) -> None:
            await sandbox.exec(["sh", "-c", make])
            assert await sandbox.get("./d//e/f") == b"1\n"
            assert await sandbox.collect(["d", "g", "missing", "missing/deep"]) == {"d/e/f": b"1\n", "g": b"2\n"}
            assert await sandbox.collect(["link/e/f", "file", "link", "pipe"]) == {}
            for path in ("link/e/f", "file", "pipe", "d", "missing", "../x", "/etc/passwd", "", "x" * 300):
                with pytest.raises(SandboxError):
                    await sandbox.get(path)
            with pytest.raises(SandboxError, match="more than 1 bytes"):
                await sandbox.get("g", max_bytes=1)

        self.run(use)

    def test_tool_servers_are_reached_where_they_were_declared(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            assert sorted(sandbox.tools) == [9001, 9002]
            assert sandbox.listener is None
            async with await asyncio.start_server(answer_hello, sock=sandbox.tools[9002]):
                port = sandbox.tools[9002].getsockname()[1]
                done = await sandbox.exec(["python3", "-c", FETCH.format(url=f"http://127.0.0.1:{port}")])
            assert done.stdout == b"hello\n", done.stderr

        self.run(use, SandboxSpec(network="none", tool_ports=[9001, 9002]))

    @pytest.mark.parametrize("ports", [[80], [9000, 9000], [8080], list(range(9000, 9016))])
    def test_tool_ports_that_cannot_be(self, ports: list[int]) -> None:
        async def main() -> None:
            with pytest.raises(SandboxError, match="tool_ports"):
                await self.backend().create(SandboxSpec(tool_ports=ports))

        asyncio.run(main())

    def test_mounts_below_places_of_the_sandboxs_own(self, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "file").write_text("mounted")
        mounts = [Mount(tmp_path / "folder/file", "/home/agent/.x/file"), Mount(tmp_path / "folder", "/tmp/shown")]

        async def use(sandbox: Sandbox) -> None:
            for path in (sandbox.inside(mounts[0]), f"{sandbox.inside(mounts[1])}/file"):
                assert (await sandbox.exec(["cat", path])).stdout == b"mounted"

        self.run(use, SandboxSpec(mounts=mounts))
