"""What every sandbox backend must do; inherit ``SandboxSuite`` and name the backend."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from clawgym_env.errors import SandboxClosed, SandboxError
from clawgym_env.sandboxes import Backend, Limits, Mount, Sandbox, SandboxSpec, get_backend
from clawgym_env.sandboxes.folders import base_folder

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


class SandboxSuite:
    """Real processes, real sockets; subclasses set ``backend_name``."""

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

    def test_output_is_bounded(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            done = await sandbox.exec(["sh", "-c", "head -c 5000000 /dev/zero; echo small >&2"])
            assert done.rc == 0
            assert done.stdout == bytes(1000)
            assert done.stderr == b"small\n"
            assert done.truncated
            whole = await sandbox.exec(["head", "-c", "1000", "/dev/zero"])
            assert len(whole.stdout) == 1000
            assert not whole.truncated

        self.run(use, SandboxSpec(limits=Limits(output_bytes=1000)))

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

    def test_file_and_cpu_limits_bind(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            big = await sandbox.exec(["sh", "-c", "head -c 2000000 /dev/zero > big"])
            assert big.rc != 0
            assert len((await sandbox.collect())["big"]) == 1 << 20
            spin = await sandbox.exec(["python3", "-c", "while True: pass"], timeout_s=30)
            assert spin.rc in (-signal.SIGXCPU, -signal.SIGKILL)
            assert not spin.timed_out
            assert (await sandbox.exec(["sh", "-c", "ulimit -c"])).stdout == b"0\n"

        self.run(use, SandboxSpec(limits=Limits(file_bytes=1 << 20, cpu_s=0.5)))

    def test_memory_limit_is_refused_not_ignored(self) -> None:
        async def main() -> None:
            with pytest.raises(SandboxError, match="memory_mb"):
                await self.backend().create(SandboxSpec(limits=Limits(memory_mb=64)))

        asyncio.run(main())

    def test_wall_time_ends_everything_and_leaves_the_workspace(self) -> None:
        duration = odd_duration()

        async def use(sandbox: Sandbox) -> None:
            begin = time.monotonic()
            done = await sandbox.exec(["sh", "-c", f"echo x > made; setsid sleep {duration} & sleep {duration}"])
            assert done.timed_out
            assert done.rc == -signal.SIGKILL
            assert time.monotonic() - begin < 10
            await sandbox.kill_all()
            assert not processes_with(duration)
            assert await sandbox.collect() == {"made": b"x\n"}
            with pytest.raises(SandboxClosed):
                await sandbox.exec(["true"])

        self.run(use, SandboxSpec(limits=Limits(wall_s=1.0)))

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

    def test_stop_is_idempotent_and_ends_all(self) -> None:
        duration = odd_duration()

        async def main() -> None:
            before = set(base_folder().iterdir())
            sandbox = await self.backend().create(SandboxSpec(files={"x": b""}))
            running = asyncio.create_task(sandbox.exec(["sh", "-c", f"setsid sleep {duration} & sleep {duration}"]))
            await asyncio.to_thread(wait_until, lambda: len(processes_with(duration)) >= 2)
            await asyncio.gather(sandbox.stop(), sandbox.stop())
            await sandbox.stop()
            assert not processes_with(duration)
            assert set(base_folder().iterdir()) == before
            with pytest.raises(SandboxClosed):
                await running
            for use in (sandbox.exec(["true"]), sandbox.put("x", b""), sandbox.collect()):
                with pytest.raises(SandboxClosed):
                    await use

        asyncio.run(main())

    def test_cancelled_stop_still_stops(self) -> None:
        duration = odd_duration()

        async def main() -> None:
            before = set(base_folder().iterdir())
            sandbox = await self.backend().create(SandboxSpec())
            await sandbox.exec(["sh", "-c", f"setsid sleep {duration} &"])
            stopping = asyncio.create_task(sandbox.stop())
            await asyncio.sleep(0)
            stopping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stopping
            assert not processes_with(duration)
            assert set(base_folder().iterdir()) == before

        asyncio.run(main())

    def test_loop_that_is_torn_down_leaves_nothing(self) -> None:
        duration = odd_duration()
        before = set(base_folder().iterdir())

        async def main() -> None:
            sandbox = await self.backend().create(SandboxSpec())
            await sandbox.exec(["sh", "-c", f"setsid sleep {duration} &"])
            _ = asyncio.create_task(sandbox.stop())  # noqa: RUF006 -- the loop ends first, on purpose
            await asyncio.sleep(0)

        asyncio.run(main())
        assert not processes_with(duration)
        assert set(base_folder().iterdir()) == before

    def test_fifty_random_cancels_in_mid_start_leave_nothing(self) -> None:
        seeded = random.Random(7)
        mark = odd_duration()

        async def main() -> int:
            backend = self.backend()
            before = set(base_folder().iterdir())
            started = 0
            for _ in range(50):
                task = asyncio.create_task(backend.create(SandboxSpec(limits=Limits(wall_s=float(mark)))))
                await asyncio.sleep(seeded.uniform(0.0, 0.08))
                task.cancel()
                try:
                    sandbox = await task
                except asyncio.CancelledError:
                    continue
                started += 1
                await sandbox.stop()
            assert not processes_with(mark)
            assert set(base_folder().iterdir()) == before
            return started

        open_before = len(list(Path("/proc/self/fd").iterdir()))
        assert asyncio.run(main()) < 50
        assert len(list(Path("/proc/self/fd").iterdir())) <= open_before

    def test_eight_at_once(self) -> None:
        async def one(backend: Backend, number: int) -> None:
            async with await backend.create(SandboxSpec(files={"n": str(number).encode()})) as sandbox:
                assert sandbox.listener is not None
                async with await asyncio.start_server(answer_hello, sock=sandbox.listener):
                    done = await sandbox.exec(["python3", "-c", FETCH.format(url=sandbox.base_url)])
                    assert done.stdout == b"hello\n", done.stderr
                assert await sandbox.collect() == {"n": str(number).encode()}

        async def main() -> None:
            backend = self.backend()
            await asyncio.gather(*(one(backend, number) for number in range(8)))

        asyncio.run(main())

    def test_killed_owner_leaves_no_process_and_no_folder(self) -> None:
        duration = odd_duration()
        script = f"""
            import asyncio
            from clawgym_env.sandboxes import SandboxSpec, get_backend

            async def main():
                backend = get_backend({self.backend_name!r})
                boxes = [await backend.create(SandboxSpec()) for _ in range(3)]
                for box in boxes:
                    await box.exec(["sh", "-c", "setsid sleep {duration} & setsid sleep {duration} &"])
                print("ready", flush=True)
                await asyncio.sleep(600)

            asyncio.run(main())
        """
        before = set(base_folder().iterdir())
        owner = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)], cwd=REPOSITORY, stdout=subprocess.PIPE
        )
        with owner:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"ready\n"
            assert len(processes_with(duration)) >= 6
            owner.kill()
        assert wait_until(lambda: not processes_with(duration)), processes_with(duration)
        self.backend().reap()
        assert wait_until(lambda: set(base_folder().iterdir()) <= before)

    def test_owners_killed_in_mid_start_leave_no_process(self) -> None:
        seeded = random.Random(3)
        mark = odd_duration()
        script = f"""
            import asyncio
            from clawgym_env.sandboxes import Limits, SandboxSpec, get_backend

            async def main():
                backend = get_backend({self.backend_name!r})
                print("ready", flush=True)
                await asyncio.gather(*(backend.create(SandboxSpec(limits=Limits(wall_s={mark}))) for _ in range(4)))
                await asyncio.sleep(600)

            asyncio.run(main())
        """
        before = set(base_folder().iterdir())
        command = [sys.executable, "-c", textwrap.dedent(script)]
        for _ in range(10):
            with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as owner:
                assert owner.stdout is not None
                assert owner.stdout.readline() == b"ready\n"
                time.sleep(seeded.uniform(0.0, 0.2))
                owner.kill()
        assert wait_until(lambda: not processes_with(mark)), processes_with(mark)
        self.backend().reap()
        assert wait_until(lambda: set(base_folder().iterdir()) <= before)


def host_server() -> tuple[socket.socket, str]:
    """A loopback listener of the host's, for sandboxes to fail at."""
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, f"127.0.0.1:{listener.getsockname()[1]}"
