"""Each limit: what the agent sees when it meets it, and what the host gets to know."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from clawgym_env.errors import SandboxClosed, SandboxError
from clawgym_env.sandboxes import Limits, Sandbox, SandboxSpec
from tests.conformance.sandbox_world import BackendTests, odd_duration, processes_with

ALLOCATE = "b = bytearray({mb} << 20); import time; time.sleep({seconds}); print(len(b) >> 20)"
FORK = "import os, time\nn = 0\ntry:\n  while n < 200:\n    if os.fork() == 0: time.sleep(60)\n    n += 1\n"
FORK += "except BlockingIOError: pass\nprint(n)"
SPIN = "import time\nt = time.time()\nwhile time.process_time() < 0.4: pass\nprint(time.time() - t)"


class LimitsSuite(BackendTests):
    """Subclasses may relax what their backend refuses."""

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

    def test_memory_over_the_limit_is_killed_and_said(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            fine = await sandbox.exec(["python3", "-c", ALLOCATE.format(mb=20, seconds=0)])
            assert (fine.rc, fine.stdout, fine.oom) == (0, b"20\n", False)
            assert sandbox.limits_met() == ()
            killed = await sandbox.exec(["python3", "-c", ALLOCATE.format(mb=400, seconds=5)])
            assert (killed.rc, killed.oom, killed.timed_out) == (-signal.SIGKILL, True, False)
            assert sandbox.limits_met() == ("memory_mb",)
            after = await sandbox.exec(["echo", "alive"])
            assert (after.stdout, after.oom) == (b"alive\n", False)

        self.run(use, SandboxSpec(limits=Limits(memory_mb=100)))

    def test_memory_is_counted_over_all_processes(self) -> None:
        script = f"for i in 1 2 3 4; do python3 -c '{ALLOCATE.format(mb=40, seconds=2)}' & done; wait"

        async def use(sandbox: Sandbox) -> None:
            done = await sandbox.exec(["sh", "-c", script])
            assert done.oom
            assert done.stdout.count(b"40\n") < 4
            assert (await sandbox.exec(["echo", "alive"])).stdout == b"alive\n"

        self.run(use, SandboxSpec(limits=Limits(memory_mb=100)))

    def test_the_end_of_the_whole_sandbox_for_memory_is_the_commands_end(self) -> None:
        """Many small holders: the first process may be the one that the kernel picks."""
        script = "import os, time\nfor i in range(60):\n  if os.fork() == 0:\n    b = b'x' * (4 << 20); time.sleep(5)\n"

        async def use(sandbox: Sandbox) -> None:
            done = await sandbox.exec(["python3", "-c", script + "time.sleep(3)"])
            assert done.oom
            await sandbox.kill_all()
            assert await sandbox.collect() == {"kept": b"1"}

        self.run(use, SandboxSpec(files={"kept": b"1"}, limits=Limits(memory_mb=100)))

    def test_process_count_is_bounded_for_each_sandbox_alone(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            async with await self.backend().create(SandboxSpec(limits=Limits(pids=20))) as other:
                for box in (sandbox, other):
                    counted = await box.exec(["python3", "-c", FORK])
                    assert 10 <= int(counted.stdout) < 20
                    refused = await box.exec(["sh", "-c", "for i in 1 2 3 4 5 6; do sleep 9 & done"])
                    assert refused.rc != 0
                    await box.kill_all()
                    assert (await box.exec(["sh", "-c", "sleep 0 & wait"])).rc == 0
                    kept_by = self.backend().probe().limits["pids"]
                    assert box.limits_met() == (() if "RLIMIT_NPROC" in kept_by else ("pids",))

        self.run(use, SandboxSpec(limits=Limits(pids=20)))

    def test_cpu_share_is_kept_or_refused(self) -> None:
        spec = SandboxSpec(limits=Limits(cpu=0.25))

        async def use(sandbox: Sandbox) -> None:
            done = await sandbox.exec(["python3", "-c", SPIN])
            assert float(done.stdout) > 1.0

        async def refused() -> None:
            with pytest.raises(SandboxError, match=r"Limits.cpu.*systemd-run"):
                await self.backend().create(spec)

        if "cpu" in self.backend().probe().limits:
            self.run(use, spec)
        else:
            asyncio.run(refused())

    def test_disk_and_inodes_say_no_space(self) -> None:
        async def use(sandbox: Sandbox) -> None:
            for path in ("/tmp", sandbox.home, sandbox.workspace):
                done = await sandbox.exec(["sh", "-c", f"head -c 3000000 /dev/zero > {path}/big"])
                assert b"No space left" in done.stderr, path
            assert sandbox.limits_met() == ("disk_mb",)
            await sandbox.exec(["rm", "big"])
            for path in ("/tmp", sandbox.home, sandbox.workspace, "/dev/shm"):
                done = await sandbox.exec(["sh", "-c", f"cd {path}; for i in $(seq 150); do : > n$i || exit; done"])
                assert b"No space left" in done.stderr, path
            assert sandbox.limits_met() == ("inodes",)
            await sandbox.exec(["sh", "-c", "rm n*"])
            assert sandbox.limits_met() == ()

        self.run(use, SandboxSpec(limits=Limits(disk_mb=2, inodes=100)))

    @pytest.mark.parametrize(
        "limits", [Limits(cpu=0.0), Limits(memory_mb=1), Limits(pids=1), Limits(disk_mb=0), Limits(inodes=1)]
    )
    def test_limits_that_no_sandbox_could_live_with(self, limits: Limits) -> None:
        async def main() -> None:
            with pytest.raises(SandboxError, match="at least"):
                await self.backend().create(SandboxSpec(limits=limits))

        asyncio.run(main())

    def test_wall_time_ends_everything_and_leaves_the_workspace(self) -> None:
        duration = odd_duration()

        async def use(sandbox: Sandbox) -> None:
            begin = time.monotonic()
            done = await sandbox.exec(["sh", "-c", f"echo x > made; setsid sleep {duration} & sleep {duration}"])
            assert done.timed_out
            assert done.rc == -signal.SIGKILL
            assert time.monotonic() - begin < 10
            assert sandbox.limits_met() == ("wall_s",)
            await sandbox.kill_all()
            assert not processes_with(duration)
            assert await sandbox.collect() == {"made": b"x\n"}
            with pytest.raises(SandboxClosed):
                await sandbox.exec(["true"])

        self.run(use, SandboxSpec(limits=Limits(wall_s=1.0)))
