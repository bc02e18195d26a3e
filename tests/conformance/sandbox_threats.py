"""What a hostile agent may try, each a test; inherit ``ThreatsSuite`` and name an isolating backend.

The threats are those of ``docs/threats.md``, which names the tests.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from clawgym_env.sandboxes import HOME, PORT, WORKSPACE, Limits, Mount, Sandbox, SandboxSpec, seccomp
from tests.conformance.sandbox_world import (
    FETCH,
    REPOSITORY,
    BackendTests,
    answer_hello,
    host_server,
    odd_duration,
    processes_with,
    wait_until,
)

CONNECT = "import socket; socket.create_connection(('{host}', {port}), 2)"
CANARY = "canary-7d0a4c5e"  # never written to a file of the host that sandboxes show
SEARCH = f"""
import os, time
word = {CANARY!r}.encode()
end = time.monotonic() + 1.0
while time.monotonic() < end:
    for root in ("/workspace", "/tmp", "/home", "/run", "/dev/shm", "/proc"):
        for folder, _, files in os.walk(root):
            for name in files:
                if name in ("kmsg", "kcore", "kpagecount", "kpageflags", "pagemap", "trace_pipe", "cmdline", "environ"):
                    continue
                try:
                    fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NONBLOCK)
                    found = word[1:] in os.read(fd, 1 << 16).replace(b"word =", b"") and name != "mem"
                    os.close(fd)
                except OSError:
                    continue
                if found:
                    print(folder, name)
"""


class ThreatsSuite(BackendTests):
    """Everything here runs as the agent would run it: by ``exec``, with no more rights."""

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

    def test_nothing_of_the_host_is_visible(self, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_text("secret")
        hidden = ["/root/.ssh", "/home/agent/.ssh", "/var/run/docker.sock", "/run/docker.sock", str(REPOSITORY)]

        async def use(sandbox: Sandbox) -> None:
            for path in (*hidden, str(secret), tempfile.gettempdir()):
                assert (await sandbox.exec(["test", "-e", path])).rc == 1, path
            for path in ("/etc/shadow", "/proc/1/environ", "/proc/1/root/etc", "/proc/kcore"):
                done = await sandbox.exec(["sh", "-c", f"cat {path} || ls {path}"])
                assert (done.stdout.replace(path.encode() + b"\n", b""), done.rc != 0) in ((b"", True), (b"", False))
            listing = await sandbox.exec(["sh", "-c", "ls /home; ls -d /proc/[0-9]*"])
            assert listing.stdout.split()[:2] == [b"agent", b"/proc/1"]
            assert len(listing.stdout.split()) <= 4  # agent, the init, sh, ls

        self.run(use)

    def test_only_bounded_places_can_be_written(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            touch = "for d in / /usr /etc /run /opt /var /dev /sys /proc/sys; do touch $d/new && echo $d; done"
            assert (await sandbox.exec(["sh", "-c", touch])).stdout == b""
            find = "find / -path /proc -prune -o -type d -writable -print"
            written = (await sandbox.exec(["sh", "-c", find])).stdout.decode().split()
            assert set(written) <= {"/workspace", "/home/agent", "/tmp", "/dev/shm", "/dev/mqueue", "/dev/pts"}

        self.run(use)

    def test_mounts_cannot_be_written(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o777)
        mount = Mount(tmp_path, "/opt/test")

        async def use(sandbox: Sandbox) -> None:
            assert sandbox.inside(mount) == "/opt/test"
            assert b"Read-only" in (await sandbox.exec(["touch", "/opt/test/new"])).stderr

        self.run(use, SandboxSpec(mounts=[mount]))

    def test_no_rights_and_no_way_to_gain_any(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            status = (await sandbox.exec(["cat", "/proc/self/status"])).stdout.decode()
            facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            assert {int(facts[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
            assert (facts["NoNewPrivs"], facts["Seccomp"]) == ("1", "2")
            assert set(facts["Uid"].split()) == {"1000"}
            for command in ("unshare -U true", "unshare -m true", "mount -t tmpfs x /tmp", "chroot / true", "su -c id"):
                assert (await sandbox.exec(["sh", "-c", command])).rc != 0, command

        self.run(use)

    def test_egress_by_tcp_udp_and_dns(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            listener, address = host_server()
            with listener:
                host, port = address.split(":")
                refused = await sandbox.exec(["python3", "-c", CONNECT.format(host=host, port=port)])
                assert b"ConnectionRefusedError" in refused.stderr
            outside = await sandbox.exec(["python3", "-c", CONNECT.format(host="192.0.2.1", port=80)])
            assert b"Network is unreachable" in outside.stderr
            udp = "import socket as s; s.socket(2, s.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))"
            assert b"Network is unreachable" in (await sandbox.exec(["python3", "-c", udp])).stderr
            dns = await sandbox.exec(["python3", "-c", "import socket; socket.getaddrinfo('example.com', 80)"])
            assert b"gaierror" in dns.stderr
            shown = await sandbox.exec(
                ["sh", "-c", "tail -n +3 /proc/net/dev | cut -d: -f1; tail -n +2 /proc/net/route"]
            )
            assert shown.stdout.split() == [b"lo"]

        self.run(use)

    def test_udp_to_the_host_does_not_arrive(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
                receiver.bind(("127.0.0.1", 0))
                receiver.settimeout(0.3)
                send = f"import socket as s; s.socket(2, s.SOCK_DGRAM).sendto(b'x', {receiver.getsockname()!r})"
                await sandbox.exec(["python3", "-c", send])
                with pytest.raises(TimeoutError):
                    receiver.recv(1)

        self.run(use)

    def test_unix_sockets_of_the_host_cannot_be_reached(self, own_base_folder: Path) -> None:
        name = f"clawgym-{odd_duration()}"

        async def use(sandbox: Sandbox) -> None:
            with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named:
                abstract.bind(f"\0{name}")
                named.bind(str(own_base_folder / "sock"))
                for listener in (abstract, named):
                    listener.listen()
                for address in (f"\\0{name}", own_base_folder / "sock"):
                    done = await sandbox.exec(
                        ["python3", "-c", f"import socket; socket.socket(1).connect('{address}')"]
                    )
                    assert b"ConnectionRefused" in done.stderr or b"FileNotFound" in done.stderr
            inside = await sandbox.exec(["sh", "-c", "grep -c ' @' /proc/net/unix; find / -xdev -type s 2>/dev/null"])
            assert inside.stdout.split() == [b"0"]

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

    def test_another_rollout_cannot_be_reached(self) -> None:
        """Both have the same address inside; each gets to its own server, and to no port that the other opens."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nother")
            await writer.drain()
            writer.close()

        async def use(sandbox: Sandbox) -> None:
            async with await self.backend().create(SandboxSpec()) as other:
                assert sandbox.listener is not None
                assert other.listener is not None
                async with (
                    await asyncio.start_server(answer_hello, sock=sandbox.listener),
                    await asyncio.start_server(answer, sock=other.listener),
                ):
                    for box, said in ((sandbox, b"hello\n"), (other, b"other\n")):
                        assert (await box.exec(["python3", "-c", FETCH.format(url=box.base_url)])).stdout == said
                await other.exec(["sh", "-c", "setsid python3 -m http.server 9000 --bind 0.0.0.0 >/dev/null 2>&1 &"])
                own = CONNECT.format(host="127.0.0.1", port=9000)
                reached = [
                    await box.exec(["python3", "-c", f"import time; time.sleep(1)\n{own}"]) for box in (other, sandbox)
                ]
                assert [done.rc for done in reached] == [0, 1]

        self.run(use)

    def test_the_endpoint_cannot_be_taken_over(self) -> None:
        bind = textwrap.dedent("""
            import socket as s
            for option in (s.SO_REUSEADDR, s.SO_REUSEPORT):
                for host in ("127.0.0.1", "0.0.0.0"):
                    sock = s.socket()
                    sock.setsockopt(s.SOL_SOCKET, option, 1)
                    try:
                        sock.bind((host, 8080)); sock.listen(); print("taken")
                    except OSError as error:
                        print(error.strerror)
        """)

        async def use(sandbox: Sandbox) -> None:
            done = await sandbox.exec(["python3", "-c", bind])
            assert set(done.stdout.decode().splitlines()) == {"Address already in use"}

        self.run(use)

    def test_the_init_cannot_be_stopped_traced_or_read(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            done = await sandbox.exec(
                ["sh", "-c", "kill -9 1; kill -STOP 1; cat /proc/1/environ /proc/1/mem; ls /proc/1/fd"]
            )
            assert done.stdout == b""
            assert (await sandbox.exec(["true"], timeout_s=5)).rc == 0

        self.run(use)

    def test_the_control_socket_cannot_be_reached(self) -> None:
        """Not through the descriptors of a command, and not at any path."""

        async def use(sandbox: Sandbox) -> None:
            shown = await sandbox.exec(["python3", "-c", "import os; print(sorted(os.listdir('/proc/self/fd')))"])
            assert shown.stdout == b"['0', '1', '2', '3']\n"  # 3 is the listing's own
            connect = "import socket as s, sys\nfor line in open('/proc/net/unix'):\n  for path in line.split()[7:]:\n"
            connect += (
                "    for kind in (s.SOCK_STREAM, s.SOCK_SEQPACKET):\n      try: s.socket(1, kind).connect(path)\n"
            )
            connect += "      except OSError: continue\n      print(path)"
            for look in (["find", "/", "-type", "s"], ["python3", "-c", connect]):
                assert (await sandbox.exec(look)).stdout == b""
            shown = await sandbox.exec(["cat", "/proc/net/unix"])
            assert b"clawgym" not in shown.stdout

        self.run(use)

    def test_collect_reads_no_links_pipes_or_sockets(self, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_text("secret")
        make = (
            f"ln -s /etc/shadow link; ln -s {secret} out; ln -s / root; ln -s . here; mkfifo pipe; mkdir deep; "
            "ln -s ../../../../../../etc deep/etc; ln real hard; "
            "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'"
        )

        async def use(sandbox: Sandbox) -> None:
            assert (await sandbox.exec(["sh", "-c", make])).rc == 0
            assert await sandbox.collect() == {"hard": b"kept", "real": b"kept"}
            assert await sandbox.collect(["link", "out", "root/etc/shadow", "deep/etc/shadow", "sock", "pipe"]) == {}

        self.run(use, SandboxSpec(files={"real": b"kept"}))

    def test_links_that_are_swapped_while_they_are_read(self) -> None:
        """A process flips a file and a folder to symlinks as fast as it can."""
        flip = textwrap.dedent("""
            import os
            os.makedirs("d"); open("d/shadow", "w").write("own"); os.symlink("/etc", "s")
            open("f", "w").write("own"); os.symlink("/etc/passwd", "l")
            while True:
                os.rename("d", "t"); os.rename("s", "d"); os.rename("d", "s"); os.rename("t", "d")
                os.rename("f", "t"); os.rename("l", "f"); os.rename("f", "l"); os.rename("t", "f")
        """)

        async def use(sandbox: Sandbox) -> None:
            running = asyncio.create_task(sandbox.exec(["python3", "-c", flip], timeout_s=30))
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                found = {**await sandbox.collect(), **await sandbox.collect(["d/shadow", "d/passwd", "f"])}
                assert set(found.values()) <= {b"own", b""}, found
            await sandbox.kill_all()
            await running

        self.run(use)

    def test_the_answers_are_not_where_the_agent_is(self) -> None:
        """The verifier's sandbox runs beside the agent's, which looks for a word of the hidden tests everywhere."""

        async def use(agent: Sandbox) -> None:
            hidden = SandboxSpec(files={"tests/answer": CANARY.encode()}, network="none")
            looking = asyncio.create_task(agent.exec(["python3", "-c", SEARCH], timeout_s=30))
            async with await self.backend().create(hidden) as verifier:
                while not looking.done():
                    assert (await verifier.exec(["cat", "tests/answer"])).stdout == CANARY.encode()
            assert (looking.result().rc, looking.result().stdout) == (0, b"")

        self.run(use)

    def test_only_declared_files_run_beside_the_hidden_tests(self) -> None:
        """The agent leaves files that Python and pytest would run by themselves; the fresh sandbox never has them."""
        forge = (
            "for f in conftest.py sitecustomize.py usercustomize.py json.py; do echo 'print(\"forged\")' > $f; done; "
        )
        forge += "echo 'def double(x): return 2 * x' > solution.py; ln -s conftest.py other.py"

        async def use(agent: Sandbox) -> None:
            await agent.exec(["sh", "-c", forge])
            await agent.kill_all()
            taken = await agent.collect(["solution.py", "other.py"])
            assert taken == {"solution.py": b"def double(x): return 2 * x\n"}
            hidden = {"check.py": b"import json, solution\nprint(json.dumps(solution.double(21)))"}
            async with await self.backend().create(SandboxSpec(files={**taken, **hidden}, network="none")) as verifier:
                done = await verifier.exec(["python3", "check.py"])
            assert done.stdout == b"42\n", done.stderr

        self.run(use)

    def test_a_writer_that_stays_behind_changes_nothing_that_was_read(self) -> None:
        duration = odd_duration()
        write = f"setsid sh -c 'while :; do echo forged > result; done' & setsid sleep {duration} &"

        async def use(sandbox: Sandbox) -> None:
            await sandbox.exec(["sh", "-c", write])
            await sandbox.kill_all()
            await sandbox.put("result", b"true")
            await asyncio.sleep(0.2)
            assert await sandbox.get("result") == b"true"
            assert not processes_with(duration)

        self.run(use)

    def test_a_fork_bomb_stays_inside(self) -> None:
        bomb = "import os\nwhile True:\n  try:\n    os.fork()\n  except OSError:\n    pass\n"

        async def use(sandbox: Sandbox) -> None:
            done = await sandbox.exec(["python3", "-c", bomb], timeout_s=1.0)
            assert done.timed_out
            async with await self.backend().create(SandboxSpec()) as other:
                assert (await other.exec(["echo", "well"])).stdout == b"well\n"
            await sandbox.kill_all()
            assert (await sandbox.exec(["echo", "well"])).stdout == b"well\n"

        self.run(use, SandboxSpec(limits=Limits(pids=64, cpu_s=10.0)))

    def test_what_leaves_its_session_does_not_outlive_the_sandbox(self) -> None:
        duration = odd_duration()
        flee = "import os\nfor _ in range(3):\n  if os.fork(): os._exit(0)\n  os.setsid()\n"
        flee += f"os.execvp('sleep', ['sleep', '{duration}'])"

        async def main() -> None:
            sandbox = await self.backend().create(SandboxSpec())
            await sandbox.exec(["python3", "-c", flee])
            assert await asyncio.to_thread(wait_until, lambda: bool(processes_with(duration)))
            await sandbox.stop()
            assert not processes_with(duration)

        asyncio.run(main())

    def test_the_kernels_settings_and_devices_are_out_of_reach(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            script = "for f in /proc/sys/kernel/core_pattern /proc/sysrq-trigger /sys/kernel/uevent_helper; do "
            script += "echo x > $f && echo $f; done; "
            script += "ls /dev/mem /dev/kmsg /dev/kvm /dev/vda /dev/sda; mknod x c 1 1 && echo x"
            assert (await sandbox.exec(["sh", "-c", script])).stdout == b""

        self.run(use)
