"""Starts that fail, answers that do not come, and what is left for later."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clawgym_env.cli import app
from clawgym_env.errors import SandboxClosed, SandboxError, SandboxStartFailed, SandboxUnavailable
from clawgym_env.sandboxes import Sandbox, SandboxSpec, folders, get_backend, launching, supervised
from tests.conformance.sandbox_world import own_base_folder, processes_with

__all__ = ["own_base_folder"]  # a fixture: used by name


def attempts(*outcomes: Exception | str) -> tuple[list[float], object]:
    """What ``with_retries`` makes of a start that ends in these ways, one after the other; and when each was tried."""
    times: list[float] = []

    async def start() -> str:
        times.append(time.monotonic())
        outcome = outcomes[len(times) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def main() -> object:
        try:
            return await launching.with_retries(start)
        except SandboxError as error:
            return error

    return times, asyncio.run(main())


def test_a_start_is_tried_again() -> None:
    times, result = attempts(SandboxError("busy"), SandboxClosed("gone"), "started")
    assert result == "started"
    assert times[1] - times[0] >= launching.RETRY_DELAY_S
    assert times[2] - times[1] >= 2 * launching.RETRY_DELAY_S


def test_a_start_that_never_succeeds_is_a_typed_error_with_its_reason() -> None:
    times, result = attempts(SandboxError("one"), SandboxError("two"), SandboxError("three"))
    assert len(times) == launching.START_ATTEMPTS == 3
    assert isinstance(result, SandboxStartFailed)
    assert str(result) == "no sandbox after 3 attempts: three"


def test_a_machine_that_cannot_is_not_asked_again() -> None:
    times, result = attempts(SandboxUnavailable("no namespaces"))
    assert (len(times), type(result)) == (1, SandboxUnavailable)


def test_a_first_process_that_says_nothing_meets_the_deadline(
    own_base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that hangs: no start waits for ever, and nothing of it is left."""
    fake = tmp_path / "bwrap"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "bubblewrap 0.9.0" && exit\nexec sleep 7654321\n')
    fake.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(supervised, "START_TIMEOUT_S", 0.2)
    monkeypatch.setattr(supervised, "STOP_TIMEOUT_S", 0.2)

    async def main() -> None:
        with pytest.raises(SandboxStartFailed, match=r"did not start within 0.2 s"):
            await get_backend("bubblewrap").create(SandboxSpec())

    asyncio.run(main())
    assert not processes_with("7654321")


def test_a_request_without_an_answer_meets_the_deadline(own_base_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "ANSWER_TIMEOUT_S", 0.2)

    async def use(sandbox: Sandbox) -> None:
        first = (await sandbox.exec(["sh", "-c", "echo $PPID"])).stdout.decode().strip()
        os.kill(int(first), 19)  # SIGSTOP: alive, and silent
        try:
            with pytest.raises(SandboxError, match="no answer within"):
                await sandbox.put("x", b"")
        finally:
            os.kill(int(first), 18)

    async def main() -> None:
        async with await get_backend("process").create(SandboxSpec()) as sandbox:
            await use(sandbox)

    asyncio.run(main())


def test_the_command_that_reaps(own_base_folder: Path) -> None:
    boot, namespace, pid, start = folders.identity(os.getpid()).split("-")
    dead = folders.base_folder() / f"process-{boot}-{namespace}-{pid}-{int(start) - 1}-abcdefgh"
    living = folders.make_folder("process")
    dead.mkdir()
    result = CliRunner().invoke(app, ["sandbox", "reap"])
    assert result.exit_code == 0, result.output
    assert "bubblewrap: " in result.output and "docker: " in result.output
    assert (dead.exists(), living.exists()) == (False, True)
