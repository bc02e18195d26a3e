"""Start, end and everything that can cut them short; inherit ``LifeCycleSuite`` and name the backend."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from clawgym_env.errors import SandboxClosed, SandboxStartFailed
from clawgym_env.sandboxes import Backend, Limits, Mount, Sandbox, SandboxSpec
from clawgym_env.sandboxes.folders import base_folder
from tests.conformance.sandbox_world import (
    FETCH,
    REPOSITORY,
    BackendTests,
    answer_hello,
    counted,
    groups_of,
    mounts,
    odd_duration,
    open_descriptors,
    processes_with,
    wait_until,
)


class LifeCycleSuite(BackendTests):
    """Nothing outlives its sandbox, nothing of it is left on the host.

    Attributes:
        start_s: About how long a start takes, for cutting it short at random moments.
        pooled_descriptors: Most connections that the backend keeps open between starts.
    """

    start_s = 0.05
    pooled_descriptors = 0

    def kept_elsewhere(self) -> list[str]:
        """Names of what this process's sandboxes have outside this machine's files, processes and control groups."""
        return []

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

    def test_random_cancels_in_mid_start_leave_nothing(self) -> None:
        seeded = random.Random(7)
        mark = odd_duration()

        async def main() -> int:
            backend = self.backend()
            before = set(base_folder().iterdir())
            started = 0
            for _ in range(counted("CANCELS", 25)):
                task = asyncio.create_task(backend.create(SandboxSpec(limits=Limits(wall_s=float(mark)))))
                await asyncio.sleep(seeded.uniform(0.0, self.start_s * 1.5))
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

        open_before = open_descriptors()
        assert asyncio.run(main()) < counted("CANCELS", 25)
        assert open_descriptors() <= open_before + self.pooled_descriptors
        assert not groups_of(os.getpid())

    def test_many_at_once(self) -> None:
        async def one(backend: Backend, number: int) -> None:
            async with await backend.create(SandboxSpec(files={"n": str(number).encode()})) as sandbox:
                assert sandbox.listener is not None
                async with await asyncio.start_server(answer_hello, sock=sandbox.listener):
                    done = await sandbox.exec(["python3", "-c", FETCH.format(url=sandbox.base_url)])
                    assert done.stdout == b"hello\n", done.stderr
                assert await sandbox.collect() == {"n": str(number).encode()}

        async def main() -> None:
            backend = self.backend()
            await asyncio.gather(*(one(backend, number) for number in range(counted("AT_ONCE", 8))))

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
        assert not groups_of(owner.pid)

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
        owners = []
        command = [sys.executable, "-c", textwrap.dedent(script)]
        for _ in range(counted("KILLS", 10)):
            with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as owner:
                assert owner.stdout is not None
                assert owner.stdout.readline() == b"ready\n"
                time.sleep(seeded.uniform(0.0, self.start_s * 3))
                owner.kill()
                owners.append(owner.pid)
        assert wait_until(lambda: not processes_with(mark)), processes_with(mark)
        self.backend().reap()
        assert wait_until(lambda: set(base_folder().iterdir()) <= before)
        assert not groups_of(*owners)

    def test_cycles_leak_nothing(self) -> None:
        """Starts and stops, some of them with processes inside that try to stay."""
        duration = odd_duration()

        async def cycle(backend: Backend, number: int) -> None:
            async with await backend.create(SandboxSpec(files={"x": b"1"})) as sandbox:
                if number % 4 == 0:
                    await sandbox.exec(["sh", "-c", f"setsid sleep {duration} & exec sleep {duration}"], timeout_s=0.1)

        async def main() -> None:
            backend = self.backend()
            await cycle(backend, 0)
            before = (mounts(), set(base_folder().iterdir()), groups_of(os.getpid()), self.kept_elsewhere())
            descriptors = open_descriptors()
            total = counted("CYCLES", 20)
            for first in range(0, total, 4):
                await asyncio.gather(*(cycle(backend, number) for number in range(first, min(first + 4, total))))
            assert open_descriptors() <= descriptors + self.pooled_descriptors
            assert (mounts(), set(base_folder().iterdir()), groups_of(os.getpid()), self.kept_elsewhere()) == before
            assert not processes_with(duration)

        asyncio.run(main())

    def test_a_failed_start_is_typed_and_its_siblings_go_on(self, tmp_path: Path) -> None:
        impossible = SandboxSpec(mounts=[Mount(tmp_path, "/usr/no-such-folder/x")])

        async def main() -> None:
            backend = self.backend()
            before = set(base_folder().iterdir())
            specs = [SandboxSpec(), impossible, SandboxSpec()]
            made = await asyncio.gather(*(backend.create(spec) for spec in specs), return_exceptions=True)
            assert isinstance(made[1], SandboxStartFailed)
            for sandbox in (made[0], made[2]):
                assert isinstance(sandbox, Sandbox), sandbox
                assert (await sandbox.exec(["echo", "well"])).stdout == b"well\n"
                await sandbox.stop()
            assert set(base_folder().iterdir()) == before
            assert not groups_of(os.getpid())

        asyncio.run(main())
